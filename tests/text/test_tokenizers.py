"""Tokenizers of folders: what is read where files disagree, and what is refused."""

import json
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Gemma3TextConfig, LlamaConfig, Qwen3Config

from outliers import UserError, load_text, load_tokenizer
from outliers.models.names import POCKET
from outliers.models.tokenizers import folder as files
from outliers.text.blocks import cut_text
from tests.conftest import STORIES, needs_shared

GPT2 = POCKET / "gpt2-0.1m"
TALK = [{"role": "user", "content": "Hello"}]
TEXT = "\n\n12 a  b\n\n1. It's IT'S naïve 你好"
DIGITS = [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]


def folder_of(place: Path, source: Path, model_type: str, named: str, pre_tokenizer: list | None = None) -> Path:
    """A folder with the tokenizer.json of another one and a class beside it."""
    place.mkdir()
    content = json.loads((source / "tokenizer.json").read_text())
    if pre_tokenizer:
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizer}
    (place / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {"tokenizer_class": named}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    size = len(content["model"]["vocab"])
    (place / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": size}))
    return place


@needs_shared
@pytest.mark.parametrize(
    ("source", "model_type", "named", "pre_tokenizer"),
    [
        (STORIES, "llama", "GPT2Tokenizer", None),
        (STORIES, "llama", "LlamaTokenizer", None),
        (GPT2, "starcoder2", "GPT2Tokenizer", DIGITS),
        (GPT2, "qwen2", "Qwen2Tokenizer", None),
    ],
)
def test_the_file_decides_where_the_class_contradicts_it(source, model_type, named, pre_tokenizer, tmp_path, caplog):
    """transformers takes the class's own rules for what is around the vocabulary."""
    folder = folder_of(tmp_path / "m", source, model_type, named, pre_tokenizer)
    own = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    assert AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids != own
    ours = load_tokenizer(str(folder))
    assert ours(TEXT, add_special_tokens=False).input_ids == own
    assert [record.getMessage() for record in caplog.records if record.name.startswith("outliers")] == [
        f"warning: {named}, the class of the tokenizer of '{folder}', makes other tokens than its tokenizer.json; the "
        "file is read"
    ]
    theirs = AutoTokenizer.from_pretrained(source)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("T5Tokenizer", "cannot read it ('dict' object is not an instance of 'Sequence'); its tokenizer.json is read"),
        ("RagTokenizer", "cannot read it (type object 'RagTokenizer' has no attribute 'vocab_files_names'); its "),
        ("LayoutLMv3Tokenizer", "cannot read it (Words must be of type"),  # as it says of the first text
    ],
)
def test_the_file_is_read_where_its_class_fails(named, said, tmp_path, caplog):
    folder = folder_of(tmp_path / "m", GPT2, "gpt2", named)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
    own = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    assert load_tokenizer(str(folder))(TEXT, add_special_tokens=False).input_ids == own
    assert said in caplog.text


@pytest.mark.parametrize(
    ("name", "field", "value", "expected"),
    [
        ("tokenizer_config.json", "tokenizer_class", ["GPT2Tokenizer"], "text or null"),
        ("tokenizer_config.json", "model_max_length", "1024", "a number or null"),
        ("tokenizer_config.json", "bos_token", 5, "text or an object or null"),
        ("tokenizer_config.json", "extra_special_tokens", [1], "a list of text or objects"),
        ("tokenizer_config.json", "split_special_tokens", "no", "true or false"),
        ("tokenizer.json", "model", None, "an object"),
        ("tokenizer.json", "added_tokens", 5, "a list"),
    ],
)
def test_fields_of_a_wrong_type(name, field, value, expected, tmp_path):
    folder = folder_of(tmp_path / "m", GPT2, "gpt2", "GPT2Tokenizer")
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | {field: value}))
    with pytest.raises(UserError) as refusal:
        load_tokenizer(str(folder))
    assert str(refusal.value) == f"'{folder / name}' has {field} {json.dumps(value)}; expected {expected}"


def test_a_class_that_agrees_is_kept(tmp_path, caplog):
    folder = folder_of(tmp_path / "m", GPT2, "gpt2", "GPT2Tokenizer")
    assert type(load_tokenizer(str(folder))).__name__ == "GPT2Tokenizer"
    assert caplog.records == []


@needs_shared
def test_roles_that_a_file_leaves_to_its_class(tmp_path):
    """As far as its vocabulary has their tokens."""
    for number, (named, first) in enumerate((("LlamaTokenizer", 1), ("GPT2Tokenizer", None))):
        folder = folder_of(tmp_path / str(number), STORIES, "llama", named)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
        ours = load_tokenizer(str(folder))
        assert ours.bos_token_id == first
        assert len(ours) == 512


# No tokenizer


@pytest.mark.parametrize("config", [Qwen3Config, Gemma3TextConfig, LlamaConfig])
def test_a_folder_without_its_tokenizer(config, tmp_path):
    """For which transformers invents one, or says something else."""
    config(vocab_size=4096).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"no tokenizer in '.*': it holds no vocabulary; expected the files of the model's own"
    ):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_of_another_vocabulary(tmp_path):
    folder = folder_of(tmp_path / "m", GPT2, "gpt2", "GPT2Tokenizer")
    for size in (50_257, 9_000, 2_500):
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": size}))
        said = f"no tokenizer in '.*': what is there has 4,096 tokens, and the model's vocabulary {size:,}"
        with pytest.raises(UserError, match=said):
            load_tokenizer(str(folder))
    for size in (4_096, 4_352, 6_000, 4_000):  # which are padded, or have a few tokens more
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": size}))
        assert len(load_tokenizer(str(folder))) == 4096


def test_a_tokenizer_that_encodes_nothing(tmp_path):
    folder = folder_of(tmp_path / "m", GPT2, "gpt2", "GPT2Tokenizer")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 4}))
    with pytest.raises(UserError, match=r"no tokenizer in '.*': what .* of 1 tokens, encodes no text"):
        load_tokenizer(str(folder))


def test_bytes_need_no_vocabulary(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 384}))
    assert load_tokenizer(str(tmp_path))("ab", add_special_tokens=False).input_ids == [100, 101]


# Limits


def test_files_larger_than_any_tokenizer(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"):
        folder = folder_of(tmp_path / name, GPT2, "gpt2", "GPT2Tokenizer")
        with (folder / name).open("ab") as file:
            file.truncate(files.LARGEST_FILE + 1)
        with pytest.raises(UserError, match=rf"{name}' has 67 MB; expected at most 64 MB, as every tokenizer has"):
            load_tokenizer(str(folder))


@pytest.mark.parametrize("name", files.ADDED)
def test_more_added_tokens_than_any_tokenizer_has(name, tmp_path):
    folder = folder_of(tmp_path / "m", GPT2, "gpt2", "GPT2Tokenizer")
    added = [{"content": f"<{number}>", "id": 4096 + number} for number in range(files.MOST_ADDED + 1)]
    content = json.loads((folder / name).read_text())
    content[files.ADDED[name]] = added if name == "tokenizer.json" else {entry["id"]: entry for entry in added}
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{name}' adds 131,073 tokens to its vocabulary; expected at most 131,072"):
        load_tokenizer(str(folder))


def test_an_expression_that_takes_forever(tmp_path, capfd):
    """The library stops it, prints its stack, and raises what is no exception of Python's usual ones."""
    slow = [{"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}, *DIGITS[1:]]
    tokenizer = load_tokenizer(str(folder_of(tmp_path / "m", GPT2, "gpt2", "PreTrainedTokenizerFast", slow)))
    with pytest.raises(UserError, match=r"the model's tokenizer cannot split the text \(.*retry-limit"):
        load_text(["a" * 40 + "b"], tokenizer, None)
    slow[0]["pattern"] = {"Regex": "([^=]+)+=[zq]"}
    with pytest.raises(UserError, match=r"cannot load the tokenizer of .*: .*retry-limit"):
        load_tokenizer(str(folder_of(tmp_path / "n", GPT2, "gpt2", "PreTrainedTokenizerFast", slow)))
    assert capfd.readouterr().err == ""


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP, "it takes more than 1 seconds"),
        ("{{ 10**(10**8) }}", "it takes more than 1 seconds"),  # a single step of Python
        ("{{ ('a' * 10**5) * 10**5 }}", "it takes more than 512 MB of memory"),
        (DOUBLING, "it takes more than 512 MB of memory"),
        ("{{ 'a' * 20000000 }}", "it writes more than 16 MB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{{ raise_exception('nobody asked') }}", "nobody asked"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
    ],
)
def test_chat_templates_without_bounds(template, reason, constants):
    """They cost no more than their limits, and the same tokenizer then writes what another template says."""
    constants("outliers.text.templates", SECONDS=1 if "seconds" in reason else 60)
    tokenizer = load_tokenizer("pocket/gpt2-0.1m")
    tokenizer.chat_template, begin, before = template, time.monotonic(), getrusage(RUSAGE_SELF).ru_maxrss
    said = rf"the tokenizer's chat template cannot write a conversation \(.*{reason}.*\); check its roles, or give"
    with pytest.raises(UserError, match=said):
        load_text([TALK], tokenizer, None)
    assert time.monotonic() - begin < 30
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KB
    tokenizer.chat_template = "{{ messages[0].content }}"
    (ids,) = load_text([TALK], tokenizer, None)
    assert tokenizer.decode(ids) == "Hello"


# The first token of a model


@pytest.fixture
def stories():
    return load_tokenizer(str(STORIES))


SAID = (
    "warning: text '{}' has the model's first token, <s>, by itself where {} of its blocks or sequences begin; it "
    "stands there once"
)


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@needs_shared
@pytest.mark.parametrize("block", [32, None])
def test_a_text_that_begins_with_the_first_token(block, stories, caplog):
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside. " * 3
    blocks = load_text([f"<s>{story}"], stories, block, 1, bos=True)
    assert said(caplog) == [SAID.format("list of 1 documents", 1)]
    plain = load_text([story], stories, block, 1, bos=True)
    assert [*map(list, blocks)] == [*map(list, plain)]
    assert len(said(caplog)) == 1
    assert list(blocks[0])[:2] != [1, 1]


@needs_shared
def test_token_ids_that_begin_with_the_first_token(stories, caplog):
    """Also where a block begins in the middle of them, by chance."""
    ids = torch.tensor([1, 5, 6, 7, 1, 8, 9, 10, 11, 1, 12, 13])
    blocks = load_text(ids, stories, 4, 3, bos=True)
    assert blocks.tolist() == [[1, 5, 6, 7], [1, 8, 9, 10], [1, 11, 1, 12]]
    assert said(caplog) == [SAID.format("tensor of 12 token ids", 2)]
    documents = load_text(ids, stories, 4, 3, bos=True, documents=True)
    assert [part.tolist() for part in documents] == [[1, 5, 6, 7], [1, 8, 9, 10], [1, 11], [1, 12]]


def test_ends_of_documents_that_are_the_first_token_stay(caplog):
    """Of GPT-2 one token is both; where it ends a document it says so."""
    tokenizer = load_tokenizer("pocket/gpt2-0.1m")
    one = len(tokenizer("a b c").input_ids)
    blocks = load_text(["a b c", "a b c"], tokenizer, one + 1, 2, bos=True)
    assert blocks[1].tolist()[:2] == [0, 0]
    assert said(caplog) == []


@needs_shared
def test_bytes_of_a_text_that_begins_with_the_first_token(stories):
    """They are those of the text without it."""
    story = "Once upon a time, there was a little girl named Lily. " * 4
    without, with_it = (cut_text([text], stories, 32, 2, bos=True) for text in (story, f"<s>{story}"))
    assert torch.equal(with_it.ids, without.ids)
    assert torch.equal(with_it.sizes, without.sizes)


@needs_shared
@pytest.mark.parametrize("block", range(3, 12))
def test_first_tokens_in_the_middle_of_a_text(block, stories):
    """Each stays unless a block begins with it."""
    text = "<s>One day<s>Tim saw a big<s><s>dog. It<s>was<s>red.<s>The end<s>"
    left, expected = [*stories(text, add_special_tokens=False).input_ids, stories.eos_token_id], []
    while left:
        while left and left[0] == 1:
            left.pop(0)
        expected.append([1, *left[: block - 1]])
        del left[: block - 1]
    whole = [ids for ids in expected if len(ids) == block]
    assert load_text([text], stories, block, bos=True).tolist() == whole
