"""Documents and blocks."""

import collections
import gzip
import itertools
import json

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outliers import Sweep, UserError, load_tokenizer, sweep
from outliers.commands.trace import Tracing
from outliers.text.blocks import find_text, load_text, tokens_hash, unpad
from outliers.text.documents import read_file
from outliers.text.given import text_name
from outliers.text.tokens import LONGEST, visible_token
from tests.conftest import C4, STORIES, needs_shared


@pytest.fixture(scope="module")
def tokenizer():
    """That of a pocket model."""
    return load_tokenizer("pocket/gpt2-0.5m")


TEXTS = ["The first document.\nTwo lines.", "The second."]


def test_files(tmp_path):
    """Also compressed in members that follow each other."""
    rows = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in TEXTS)
    (tmp_path / "a.txt").write_text(TEXTS[0])
    (tmp_path / "a.jsonl").write_text(rows)
    members = [gzip.compress(part.encode()) for part in (TEXTS[0][:5], "", TEXTS[0][5:])]
    (tmp_path / "a.txt.gz").write_bytes(b"".join(members) + bytes(100))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    assert read_file(tmp_path / "a.txt") == read_file(tmp_path / "a.txt.gz") == TEXTS[:1]
    assert read_file(tmp_path / "a.jsonl") == read_file(tmp_path / "a.jsonl.gz") == TEXTS


def test_blocks_are_documents_with_ends_joined_and_cut(tokenizer):
    ids = [i for text in TEXTS for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    blocks = load_text(TEXTS, tokenizer, 3, 4)
    assert blocks.dtype == torch.int64
    assert blocks.flatten().tolist() == ids[:12]
    whole = len(ids) // 3
    with pytest.raises(UserError, match=f"too short: {len(ids)} tokens make {whole} blocks of 3, not {whole + 1}"):
        load_text(TEXTS, tokenizer, 3, whole + 1)


def test_no_end_where_there_is_none():
    tokenizer = load_tokenizer("pocket/gpt2-0.5m")
    tokenizer.eos_token = None
    ids = [i for text in TEXTS for i in tokenizer(text)["input_ids"]]
    assert load_text(TEXTS, tokenizer, len(ids), 1).flatten().tolist() == ids


def test_blocks_that_begin_with_the_first_token(tokenizer):
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(7)
    with_it, without = (load_text(TEXTS, tokenizer, 3 + bos, 2, bos) for bos in (True, False))
    assert with_it[:, 0].tolist() == [7, 7]
    assert torch.equal(with_it[:, 1:], without), "the first token counts among the four of a block"
    with pytest.raises(UserError, match=r"too short: (\d+) tokens make \1 blocks of 2"):
        load_text(TEXTS, tokenizer, 2, 1000, bos=True)
    tokenizer.bos_token = None
    with pytest.raises(UserError, match=r"has no first token \(bos_token_id\); run without --bos"):
        load_text(TEXTS, tokenizer, 4, 2, bos=True)


def test_hash_depends_on_ids_and_shape():
    blocks = torch.arange(12).view(3, 4)
    hashes = {tokens_hash(blocks), tokens_hash(blocks.view(4, 3)), tokens_hash(blocks + 1), tokens_hash(blocks.clone())}
    assert len(hashes) == 3


LONG = "One long document of words, which has enough of them. "


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("blank lines at the end", b'{"text": "%s"}\n\n \r\n\n'),
        ("ends of lines as on old Macs", b'{"text": "%s"}\r{"text": "x"}\r'),
        ("a torn row after it", b'{"text": "%s"}\n{"tex'),
        ("half a surrogate pair elsewhere", b'{"url": "\\ud800", "text": "%s"}\n'),
        ("a field twice", b'{"text": 1, "text": "%s"}\n'),
    ],
)
def test_rows_that_are_read(tmp_path, tokenizer, name, content):
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(content.replace(b"%s", LONG.encode()))
    ids = tokenizer(LONG)["input_ids"]
    assert load_text(str(path), tokenizer, len(ids), 1).flatten().tolist() == ids


@pytest.mark.parametrize(
    "text",
    [
        "One\r\ntwo\rthree\n\r\n",
        "One\u2028two\x85three\x0bfour\x1cfive\n",
        "A mark \ufeff in the middle\0 and nothing.\n",
        "\n\n\nBlank lines.\n\n\n",
        "",
    ],
)
def test_characters_stay(tmp_path, text):
    """As Python reads a text file, whose ends of lines are all one; and as JSON says, whose are not."""
    (tmp_path / "a.txt").write_text(text, newline="", encoding="utf-8")
    assert read_file(tmp_path / "a.txt") == [(tmp_path / "a.txt").read_text(encoding="utf-8")]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False), encoding="utf-8")
    assert read_file(tmp_path / "a.jsonl") == [text]


def test_documents_without_tokens_end(tmp_path, tokenizer):
    tokenizer = load_tokenizer("pocket/gpt2-0.5m")
    tokenizer.eos_token = None
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 20_000)
    with pytest.raises(UserError, match=r"10000 documents of text '.*a.jsonl' in a row give no tokens"):
        load_text(str(tmp_path / "a.jsonl"), tokenizer, 8, 1)


def test_a_file_is_read_as_far_as_needed(tmp_path, tokenizer, constants):
    """So that the memory of a text does not grow with its file."""
    constants("outliers.text.pieces", PIECE=256, LONGEST=16 * 256)
    (tmp_path / "a.txt").write_bytes(b"Words of one line.\n" * 200 + b"\xff")
    assert load_text(tmp_path / "a.txt", tokenizer, 8, 4).shape == (4, 8)
    with pytest.raises(UserError, match="line 201 of text file"):
        load_text(tmp_path / "a.txt", tokenizer, 8, 1000)


@pytest.mark.parametrize(
    ("block", "blocks", "expected"),
    [
        (1, 4, "at least 1 block of at least 2 tokens"),
        (8, 0, "at least 1 block of at least 2 tokens"),
        (2, 2**30, "at most 1,073,741,824 tokens in all"),
    ],
)
def test_sizes_out_of_range(tokenizer, block, blocks, expected):
    with pytest.raises(UserError, match=f"expected {expected}"):
        load_text("sample", tokenizer, block, blocks)


def test_hub_texts_are_asked_for_as_defined(monkeypatch, lacking, tokenizer):
    asked, data = [], datasets.Dataset.from_dict({"text": ["one line of text ", "another one"]})
    lacking("huggingface_hub.HfApi.dataset_info")
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **keywords: asked.append((args, keywords)) or data)
    c4 = load_text("c4", tokenizer, 4, 1)
    wikitext = load_text("wikitext2", tokenizer, 4, 1)
    assert asked == [
        (("allenai/c4", "en"), {"split": "validation", "streaming": True}),
        (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test", "streaming": False}),
    ]
    assert c4.tolist()[0] == tokenizer("one line of text ")["input_ids"][:4]
    assert wikitext.tolist()[0] == tokenizer("one line of text \n\nanother one")["input_ids"][:4]


DOCUMENTS = ["One document of mine.", "", "Another one,\nin two lines.", "The third."] * 3


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (DOCUMENTS, "list of 12 documents"),
        (collections.UserList(DOCUMENTS), "UserList of 12 documents"),
        (datasets.Dataset.from_dict({"text": DOCUMENTS, "id": range(12)}), "Dataset of 12 rows"),
        (datasets.Dataset.from_dict({"text": DOCUMENTS}).to_iterable_dataset(), "IterableDataset of rows"),
        (datasets.Dataset.from_dict({"said": DOCUMENTS})["said"], "Column of 12 documents"),
    ],
)
def test_documents_of_ones_own(tokenizer, tmp_path, text, name):
    """As those of a file; and an experiment and its rows say what they are."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    blocks = load_text(text, tokenizer, 8, 4)
    assert torch.equal(blocks, load_text(tmp_path / "a.jsonl", tokenizer, 8, 4))
    assert torch.equal(blocks, load_text(iter(DOCUMENTS), tokenizer, 8, 4)), "what can be read once"
    assert (text_name(text), find_text(text).protocol) == (name, "first-blocks")
    spec = Tracing(model="x", text=text)
    assert spec.text is text
    assert spec.model_copy(update={"blocks": 1}).text is text
    assert list(spec.model_dump()["text"]) == list(text)
    assert json.loads(spec.model_dump_json())["text"] == name


def test_no_more_documents_are_read_than_are_needed(tokenizer):
    documents = iter(DOCUMENTS)
    assert load_text(documents, tokenizer, 8, 2).shape == (2, 8)
    assert len(list(documents)) >= len(DOCUMENTS) // 2, "which are left"


def test_a_column_of_ones_own(tokenizer):
    data = datasets.Dataset.from_dict({"said": DOCUMENTS, "id": range(12)})
    assert torch.equal(load_text(data, tokenizer, 8, 4, column="said"), load_text(DOCUMENTS, tokenizer, 8, 4))
    with pytest.raises(UserError, match="Dataset of 12 rows has no column 'text' but said, id; name one of them: "):
        load_text(data, tokenizer, 8, 4)
    with pytest.raises(UserError, match="document 1 of a Dataset of 12 rows is of type int; expected strings, lists"):
        load_text(data, tokenizer, 8, 4, column="id")


def test_token_ids_of_ones_own(tokenizer):
    ids = torch.randint(100, (50,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(load_text(ids, tokenizer, 8, 6), ids[:48].view(6, 8))
    assert torch.equal(load_text(ids[:48].view(6, 8), tokenizer, 8, 4), ids[:32].view(4, 8))
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(7)
    with_first = load_text(ids, tokenizer, 9, 6, bos=True)
    assert torch.equal(with_first[:, 1:], ids[:48].view(6, 8))
    assert (with_first[:, 0] == 7).all()
    assert [text_name(ids), text_name(ids[:48].view(6, 8))] == ["tensor of 50 token ids", "tensor of 6 x 8 token ids"]
    assert [find_text(ids).protocol, find_text(ids[None]).protocol] == ["first-blocks", "given-blocks"]
    spec = Sweep(models=["x"], text=ids, block=8)
    assert spec.model_copy(update={"blocks": 1}).text is spec.text is ids
    assert json.loads(spec.model_dump_json())["text"] == "tensor of 50 token ids"
    with pytest.raises(UserError, match="blocks already get no first token; run without --bos"):
        load_text(ids[:48].view(6, 8), tokenizer, 8, 4, bos=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([], "text is an empty list; expected at least one document"),
        (["One document.", 3], "document 2 of a list of 2 documents is of type int; expected strings, lists"),
        (["half \ud800"], "document 1 of a list of 1 documents has half a surrogate pair"),
        (np.arange(12), "document 1 of a ndarray of 12 documents is of type int64; expected strings"),
        ({"train": []}, "text is {'train': .* of type dict; expected a name, a path, an iterable of documents, one"),
        (torch.zeros(50), r"token ids are float32 of shape \(50,\); expected int64 \(blocks, T\), or \(tokens,\)"),
        (torch.arange(-1, 49), "token ids go down to -1; expected 0 or more"),
        (torch.zeros(0, dtype=torch.int64), "text 'tensor of 0 token ids' is too short: 0 tokens make 0 blocks of 10"),
        ([[1, 2], []], "document 2 of a list of 2 documents is an empty list; leave it out"),
        ([[1, 2], [1, -2]], "token ids of document 2 of a list of 2 documents go down to -2; expected 0 or more"),
        ([torch.zeros(3, 3, dtype=torch.int64)], "document 1 of a list of 1 documents is of type Tensor; expected"),
        ([{"role": "user", "content": "Hi"}], "document 1 .* of type dict; expected strings, .*lists of messages"),
        ([[{"role": "user"}]], "message 1 of document 1 of a list of 1 documents has no text in its 'content'"),
        ([[{"role": "user", "content": "Hi"}]], "tokenizer has no chat template; give the conversations as strings"),
        (torch.zeros(9, 11, dtype=torch.int64), "token ids are 9 blocks of 11 tokens; expected at least 5 of 10"),
        (DOCUMENTS, "document 2 of text 'list of 12 documents' gives no tokens, and so no sequence; leave it out"),
        (["One."], "text 'list of 1 documents' is too short: 1 documents make as many sequences, not 5; ask for fewer"),
    ],
)
def test_texts_that_are_none(tokenizer, text, message):
    with pytest.raises(UserError, match=message):
        load_text(text, tokenizer, None if "sequence" in message else 10, 5)


def test_documents_as_sequences_of_their_own(tokenizer, tmp_path):
    """As the tokenizer makes them one by one; whatever they are, nothing is joined, cut or added."""
    said = [text for text in DOCUMENTS if text]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in said))
    data = datasets.Dataset.from_dict({"ids": expected})
    for text in (said, tmp_path / "a.jsonl", expected, list(map(torch.tensor, expected)), map(np.array, expected)):
        found = load_text(text, tokenizer, block=None)
        assert [ids.tolist() for ids in found] == expected
        assert {ids.dtype for ids in found} == {torch.int64}
    assert [ids.tolist() for ids in load_text(data, tokenizer, None, column="ids")] == expected
    assert [ids.tolist() for ids in load_text(data["ids"], tokenizer, None, 2)] == expected[:2]
    blocks = torch.arange(12).view(3, 4)
    assert [ids.tolist() for ids in load_text(blocks, tokenizer, None)] == blocks.tolist()
    assert [ids.tolist() for ids in load_text(blocks.flatten(), tokenizer, None)] == [list(range(12))]
    tokenizer = load_tokenizer("pocket/gpt2-0.5m")
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(7)
    with_first = load_text(said, tokenizer, None, 3, bos=True)
    assert [ids.tolist() for ids in with_first] == [[7, *ids] for ids in expected[:3]]


def test_more_tokens_than_memory_holds_of_a_text_without_end(tokenizer, constants):
    constants("outliers.text.blocks", MOST_TOKENS=1000)
    for block in (64, None):
        with pytest.raises(UserError, match="text 'cycle of documents' has more than 1,000 tokens; say how many"):
            load_text(itertools.cycle(["One document."]), tokenizer, block)


CONVERSATIONS = [
    [{"role": "user", "content": "Which one?"}, {"role": "assistant", "content": "The second."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
]


def test_conversations():
    """As transformers writes and tokenizes them, in lists and in the column of a data set."""
    tokenizer = load_tokenizer("pocket/gpt2-0.5m")
    tokenizer.chat_template = (
        "{% for message in messages %}<|endoftext|>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    expected = [tokenizer.apply_chat_template(one)["input_ids"] for one in CONVERSATIONS]
    data = datasets.Dataset.from_dict({"messages": CONVERSATIONS})
    for text, column in ((CONVERSATIONS, "text"), (data, "messages"), (data["messages"], "text")):
        found = load_text(text, tokenizer, block=None, column=column)
        assert [ids.tolist() for ids in found] == expected
        assert load_text(text, tokenizer, 4, 3, column=column).flatten().tolist() == [*expected[0], *expected[1]][:12]


@pytest.mark.parametrize("text", ["", "two\nlines", 7, None, {"a": 1}, iter(DOCUMENTS)])
def test_texts_that_an_experiment_does_not_take(text):
    with pytest.raises(UserError, match="field 'text': "):
        Tracing(model="x", text=text)


def test_rows_of_a_text_of_ones_own(tmp_path):
    """They name it, are found again by its tokens, and are not taken for those of another one."""
    fields = {"models": ["pocket/gpt2-0.1m"], "schemes": ["fp32"], "block": 16, "blocks": 2}
    (one,) = sweep(Sweep(**fields, text=DOCUMENTS), tmp_path)
    assert (one["text"], one["protocol"]) == ("list of 12 documents", "first-blocks")
    blocks = load_text(DOCUMENTS, load_tokenizer("pocket/gpt2-0.1m"), 16, 2)
    assert one["tokens_hash"] == tokens_hash(blocks)
    assert sweep(Sweep(**fields, text=list(DOCUMENTS)), tmp_path) == [one]
    (other,) = sweep(Sweep(**fields, text=DOCUMENTS[::-1]), tmp_path)
    assert other["value"] != one["value"]
    (of_ids,) = sweep(Sweep(**fields, text=blocks), tmp_path)
    assert (of_ids["value"], of_ids["text"]) == (one["value"], "tensor of 2 x 16 token ids")


@needs_shared
def test_c4_rows_with_a_tokenizer_that_adds_special_tokens():
    tokenizer = load_tokenizer(str(STORIES))
    blocks = load_text(str(C4), tokenizer, 256, 32)
    assert blocks.shape == (32, 256)
    assert (blocks == tokenizer.bos_token_id).sum() == 0


def test_tokens_as_people_read_them(tokenizer):
    """Byte-level tokens: blanks are seen, and pieces of a character are what the vocabulary has."""
    ids = tokenizer(" the\n|'s é")["input_ids"]
    assert [visible_token(tokenizer, token) for token in ids] == ["'␣the'", r"'\n'", "'|'", '"\'"', "'s'", "'␣'", "'é'"]
    assert visible_token(tokenizer, tokenizer.eos_token_id) == "'<|endoftext|>'"
    piece = tokenizer("漢", add_special_tokens=False)["input_ids"][0]
    assert visible_token(tokenizer, piece) == tokenizer.convert_ids_to_tokens(piece) != "'漢'"
    assert visible_token(tokenizer, len(tokenizer)) == f"#{len(tokenizer)}"
    assert len({visible_token(tokenizer, token) for token in range(len(tokenizer))}) == len(tokenizer)


def test_the_space_before_a_word_is_seen_in_every_kind_of_tokenizer():
    """Tokenizers of LLaMA's kind leave out the space before the first token of a text."""
    vocabulary = {"<unk>": 0, "▁the": 1, "the": 2, "▁": 3, "<0x0A>": 4, "<0xE6>": 5, f"▁{'-' * 60}": 6}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    llamas = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    seen = [visible_token(llamas, token) for token in range(7)]
    assert seen[:6] == ["'<unk>'", "'␣the'", "'the'", "'␣'", r"'\n'", "<0xE6>"]
    assert seen[6] == f"'␣{'-' * (LONGEST - 2)}…'"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=5), st.data())
def test_padding_of_any_batch_comes_off(ragged, data):
    """Wherever it is, and whatever ids it has; no token is lost. Of batches as of sequences one by one."""
    width = max(map(len, ragged)) + data.draw(st.integers(0, 3))
    before = [data.draw(st.integers(0, width - len(ids))) for ids in ragged]
    ids, mask = torch.full((len(ragged), width), 7), torch.zeros(len(ragged), width, dtype=torch.int64)
    for row, (start, one) in enumerate(zip(before, ragged, strict=True)):
        ids[row, start : start + len(one)], mask[row, start : start + len(one)] = torch.tensor(one), 1
    assert [one.tolist() for one in unpad(ids, mask)] == ragged
    assert [one.tolist() for one in unpad(iter(list(ids)), mask.bool())] == ragged


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([[1, 1, 1]], "1 sequences for 2"),
        ([[1, 1], [1, 1]], r"sequence 0 is \(2,\); expected \(3,\)"),
        ([[1, 1, 1], [1, 1, 2]], "sequence 1 holds something else"),
        ([[1, 1, 1], [0, 0, 0]], "sequence 1 masks all"),
        ([[1, 0, 1], [1, 1, 1]], "sequence 0 masks tokens between"),
    ],
)
def test_masks_that_mask_no_padding(mask, said):
    with pytest.raises(UserError, match=said):
        unpad(torch.ones(2, 3, dtype=torch.int64), torch.tensor(mask))
