"""Documents and blocks."""

import gzip
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outliers.errors import UserError
from outliers.models.load import load_tokenizer
from outliers.text.blocks import find_text, load_text, tokens_hash
from outliers.text.documents import read_file, sample
from outliers.text.tokens import LONGEST, visible_token
from tests.conftest import C4, STORIES, needs_shared


@pytest.fixture(scope="module")
def tokenizer():
    """That of a pocket model."""
    return load_tokenizer("pocket/gpt2-0.5m")


@pytest.fixture
def documents(tmp_path):
    """Two short documents in every kind of file."""
    texts = ["The first document.\nTwo lines.", "The second."]
    rows = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts)
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "a.jsonl").write_text(rows)
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write(texts[0])
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(rows)
    return tmp_path, texts


def test_files(documents):
    folder, texts = documents
    assert read_file(folder / "a.txt") == read_file(folder / "a.txt.gz") == texts[:1]
    assert read_file(folder / "a.jsonl") == read_file(folder / "a.jsonl.gz") == texts


def test_blocks_are_documents_with_ends_joined_and_cut(documents, tokenizer):
    folder, texts = documents
    ids = [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    blocks = load_text(str(folder / "a.jsonl"), tokenizer, 3, 4)
    assert blocks.dtype == torch.int64
    assert blocks.flatten().tolist() == ids[:12]
    whole = len(ids) // 3
    with pytest.raises(UserError, match=f"too short: {len(ids)} tokens make {whole} blocks of 3, not {whole + 1}"):
        load_text(str(folder / "a.jsonl"), tokenizer, 3, whole + 1)


def test_no_special_tokens_and_no_end_where_there_is_none(documents, tokenizer):
    folder, texts = documents
    tokenizer = load_tokenizer("pocket/gpt2-0.5m")
    tokenizer.eos_token = None
    ids = [i for text in texts for i in tokenizer(text)["input_ids"]]
    assert load_text(str(folder / "a.jsonl"), tokenizer, len(ids), 1).flatten().tolist() == ids


def test_blocks_that_begin_with_the_first_token(documents, tokenizer):
    folder, _ = documents
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(7)
    with_it, without = (load_text(str(folder / "a.jsonl"), tokenizer, 3 + bos, 2, bos) for bos in (True, False))
    assert with_it[:, 0].tolist() == [7, 7]
    assert torch.equal(with_it[:, 1:], without), "the first token counts among the four of a block"
    with pytest.raises(UserError, match=r"too short: (\d+) tokens make \1 blocks of 2"):
        load_text(str(folder / "a.jsonl"), tokenizer, 2, 1000, bos=True)
    tokenizer.bos_token = None
    with pytest.raises(UserError, match=r"has no first token \(bos_token_id\); run without --bos"):
        load_text(str(folder / "a.jsonl"), tokenizer, 4, 2, bos=True)


def test_sample_is_large_and_varied(tokenizer):
    documents = sample()
    assert sum(len(document.encode()) for document in documents) >= 60_000
    assert len(set(documents)) == len(documents) >= 80
    blocks = load_text("sample", tokenizer, 256, 64)
    assert blocks.shape == (64, 256)


def test_hash_depends_on_ids_and_shape():
    blocks = torch.arange(12).view(3, 4)
    hashes = {tokens_hash(blocks), tokens_hash(blocks.view(4, 3)), tokens_hash(blocks + 1), tokens_hash(blocks.clone())}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", "x", r"ends in '.pdf'"),
        ("a.jsonl", "not json\n", "row 1 of"),
        ("a.jsonl", '{"text": "x"}\n{"content": "x"}\n', "row 2 of .* field 'text'"),
        ("a.jsonl", '{"text": 3}\n', "row 1 of"),
        ("a.txt.gz", "not gzip", "cannot be read"),
        ("a.txt", b"\xff\xfe\xfa", "cannot be read"),
        ("a.txt", "", "too short: 1 tokens make 0 blocks"),
    ],
)
def test_unusable_files(tmp_path, tokenizer, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        load_text(str(path), tokenizer, 8, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sampel", "unknown text 'sampel'; did you mean sample"),
        ("nowhere.txt", "text file 'nowhere.txt' does not exist"),
    ],
)
def test_unknown_texts(name, message):
    with pytest.raises(UserError, match=message):
        find_text(name)


@pytest.mark.parametrize(("block", "blocks"), [(1, 4), (0, 4), (8, 0), (8, -1)])
def test_sizes_out_of_range(tokenizer, block, blocks):
    with pytest.raises(UserError, match="expected at least 1 block of at least 2 tokens"):
        load_text("sample", tokenizer, block, blocks)


@pytest.mark.parametrize("name", ["c4", "wikitext2"])
def test_hub_texts_without_network(monkeypatch, tokenizer, name):
    def no_network(*_args, **_keywords):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", no_network)
    with pytest.raises(UserError, match=r"cannot load '.*' from the hub \(ConnectionError\).*sample"):
        load_text(name, tokenizer, 8, 1)


def test_hub_texts_are_asked_for_as_defined(monkeypatch, tokenizer):
    asked = []

    def load_dataset(*args, **keywords):
        asked.append((args, keywords))
        return Rows({"text": ["one line of text ", "another one"]})

    class Rows(dict):
        """Rows by iteration, columns by name, as a data set has them."""

        def __iter__(self):
            return iter([{"text": text} for text in self["text"]])

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    c4 = load_text("c4", tokenizer, 4, 1)
    wikitext = load_text("wikitext2", tokenizer, 4, 1)
    assert asked == [
        (("allenai/c4", "en"), {"split": "validation", "streaming": True}),
        (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test", "streaming": False}),
    ]
    assert c4.tolist()[0] == tokenizer("one line of text ")["input_ids"][:4]
    assert wikitext.tolist()[0] == tokenizer("one line of text \n\nanother one")["input_ids"][:4]


@needs_shared
def test_c4_rows_with_a_tokenizer_that_adds_special_tokens():
    tokenizer = load_tokenizer(str(STORIES))
    blocks = load_text(str(C4), tokenizer, 256, 32)
    assert blocks.shape == (32, 256)
    assert (blocks == tokenizer.eos_token_id).sum() > 1
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
