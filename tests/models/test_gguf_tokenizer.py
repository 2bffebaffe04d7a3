"""The tokenizer of a GGUF file, against the parts of `tokenizers` that models of its kind name in their own files."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split, WhitespaceSplit
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from outliers import UserError, load_tokenizer
from outliers.models.gguf.splits import BY_NAME
from outliers.models.gguf.tokenizer import _splits
from tests.conftest import C4, STORIES, needs_shared
from tests.gguf_files import TOKENIZER, vocabulary, write_gguf

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
LIST = (
    "To do:\n\n1. Buy 12 eggs.\n\n2. Don't call 555-1234.\n\n10. It's 1969:  naïve\n\n\n  x²\t3.14\r\n\r\n-- 你好!!\n"
)
TEXTS = [LIST, " a", "  two  blanks ", "getUserName IT'S 1234567", "\n\n\n", ""]


def tokenizer_in(folder: Path, **fields):
    """The tokenizer of a small file with these fields, whose names are without "tokenizer.ggml."."""
    name = f"{len(list(folder.glob('*.gguf')))}.gguf"
    sizes = {"block_count": 1, "embedding_length": 8, "attention.head_count": 2}
    said = {f"tokenizer.{'' if field == 'chat_template' else 'ggml.'}{field}": value for field, value in fields.items()}
    tensors = {
        "blk.0.attn_norm.weight": np.ones(8, np.float32),
        "token_embd.weight": np.ones((len(fields.get("tokens", [0])), 8), np.float32),
    }
    return load_tokenizer(str(write_gguf(folder / name, "llama", sizes | said, tensors)))


def of_bytes(folder: Path, **changes):
    """The tokenizer of a file with the byte-level vocabulary of the pocket models."""
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in vocabulary().items()}
    return tokenizer_in(folder, **{k: v for k, v in (fields | changes).items() if v is not None})


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


# How words are split

GPT2 = ByteLevel(add_prefix_space=False)
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
OWN = {  # as the tokenizer.json of a model with each name has it
    "gpt-2": [GPT2],
    "smollm": [Digits(individual_digits=True), GPT2],
    "llama-bpe": [Split(Regex(LLAMA3), "isolated"), BYTES],
    "deepseek-coder": [
        *(Split(Regex(of), "isolated") for of in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5]+")),
        *(Digits(individual_digits=True), BYTES),
    ],
}


@pytest.mark.parametrize("name", OWN)
def test_words_are_split_as_the_file_says(name, tmp_path):
    ours, own = of_bytes(tmp_path, pre=name), Tokenizer.from_file(str(TOKENIZER))
    own.pre_tokenizer = Sequence(OWN[name])
    own.model.ignore_merges = name == "llama-bpe"
    for text in TEXTS:
        assert ids(ours, text) == own.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids(ours, text)) == text


# The words of a text, written down by hand from the expressions of llama.cpp's table.
WORDS = {
    "falcon": " It|'|S| |123|45|\n\n | a| |—| 你好|!!| getUser|\t|3|.|1",
    "default": " It|'|S| |123|45|\n\n | a| |—| 你好|!!| getUser|\t|3|.|1",
    "tiny_aya": " It'S| |12|345|\n\n| | a| —| 你好|!!| get|User|\t|3|.|1",
    "kimi-k2": " It'S| |123|45|\n\n| | a| —| |你好|!!| get|User|\t|3|.|1",
    "deepseek-v3": " It|'S| |123|45|\n\n| | a| —| |你好|!!| getUser|\t|3|.|1",
    "afmoe": " It|'S| |12|345|\n\n| | a| —| |你好|!!| getUser|\t|3|.|1",
    "deepseek-llm": " It|'|S| |12345|\n|\n| | a| |—| |你好|!!| getUser|\t|3|.|1",
    "superbpe": " It'S |12|345|\n\n  a — 你好!! getUser\t|3|.|1",
    "bloom": " It'S| 12345|\n\n | a| —| 你好|!!| getUser|\t|3|.|1",
    "viking": " It'S| |1|2|3|4|5|\n\n | a| —| 你好|!!| getUser|\t|3|.|1",
    "bailingmoe": " It|'S| |1|2|3|4|5|\n\n| | a| —| 你好|!!| getUser|\t|3|.|1",
    "exaone-moe": " It|'S| |1|2|3|4|5|\n\n| | a| —| 你好|!!| getUser|\t|3|.|1",
    "gemma4": " It'S 12345|\n\n|  a — 你好!! getUser\t3.1",
}


@pytest.mark.parametrize("name", WORDS)
def test_words_of_a_rule(name):
    words = Sequence(_splits(BY_NAME[name])).pre_tokenize_str(" It'S 12345\n\n  a — 你好!! getUser\t3.1")
    assert "|".join(word for word, _ in words) == WORDS[name]


def test_names_that_transformers_knows_too():
    theirs = {name: Sequence([Split(Regex(of), "isolated")]) for name, of in GGUF_PRE_TOKENIZER_SPLITS.items()}
    assert theirs.keys() <= BY_NAME.keys()
    for name, split in theirs.items():
        for text in TEXTS:
            assert Sequence(_splits(BY_NAME[name])).pre_tokenize_str(text) == split.pre_tokenize_str(text), name


@pytest.mark.parametrize("name", BY_NAME)
def test_every_rule_keeps_all_of_a_text(name):
    text = LIST + "Straße ΑΒΓ ǅ ﬀ Ⴀ 한국어 ไทย ١٢٣ 𝐀 e\u0301 豈 <sentinel:1> IMGIMGABZ " + " " * 1100
    assert "".join(text[slice(*at)] for _, at in Sequence(_splits(BY_NAME[name])).pre_tokenize_str(text)) == text


def test_a_file_that_names_no_rule(tmp_path, caplog):
    ours, default = of_bytes(tmp_path, pre=None), of_bytes(tmp_path, pre="default")
    assert ids(ours, LIST) == ids(default, LIST) != ids(of_bytes(tmp_path), LIST)
    assert [record.getMessage() for record in caplog.records] == [
        f"warning: '{tmp_path / '0.gguf'}' does not say how it splits words (tokenizer.ggml.pre), as files of 2023 do: "
        "they are split by llama.cpp's rule for these"
    ]


def test_words_that_are_tokens_without_merges(tmp_path):
    tokens = [*ByteLevel.alphabet(), "ab", "abc"]
    known = {"model": "gpt2", "tokens": tokens, "merges": ["a b"]}
    assert ids(tokenizer_in(tmp_path, pre="llama-bpe", **known), "abc") == [257]
    assert ids(tokenizer_in(tmp_path, pre="dbrx", **known), "abc") == [256, tokens.index("c")]


# Types of tokens


def test_tokens_that_are_taken_out_of_a_text_first(tmp_path):
    """Whatever characters they have: those of the user by their text, and those of control as special ones."""
    tokens = [*ByteLevel.alphabet(), "<｜begin▁of▁sentence｜>", "    ", "<think>", "[PAD259]", "Ġt"]
    types = [NORMAL] * 256 + [CONTROL, USER, USER, UNUSED, NORMAL]
    known = {"model": "gpt2", "pre": "deepseek-llm", "merges": ["Ġ t"], "bos_token_id": 256}
    ours = tokenizer_in(tmp_path, tokens=tokens, token_type=types, **known)
    assert ids(ours, "<｜begin▁of▁sentence｜>    <think>") == [256, 257, 258]
    assert ours.all_special_ids == [256]
    assert len(ours) == 261
    assert len(ids(ours, "[PAD259]")) == 8
    assert ours.decode([256, 257, 258], skip_special_tokens=True) == "    <think>"


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "abc"]
OF_PIECES = {
    "model": "llama",
    "tokens": PIECES,
    "scores": [0.0] * 259 + [-float(number) for number in range(len(PIECES) - 259)],
    "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(PIECES) - 259)],
}


def pieces(tokenizer, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(ids(tokenizer, text))


def test_pieces_begin_with_a_blank_unless_the_file_says_no(tmp_path):
    """As SentencePiece does it, also where a text begins with one."""
    ours, without = tokenizer_in(tmp_path, **OF_PIECES), tokenizer_in(tmp_path, **OF_PIECES, add_space_prefix=False)
    assert pieces(ours, "ab abc") == ["▁ab", "▁ab", "c"]
    assert pieces(without, "ab abc") == ["ab", "▁ab", "c"]
    assert pieces(ours, " a") == ["▁", "▁a"]
    assert pieces(without, " a") == ["▁a"]
    for tokenizer in (ours, without):
        for text in ("ab abc", " a", "a  b", "aé\n"):
            assert tokenizer.decode(ids(tokenizer, text)) == text


def test_bytes_of_characters_that_are_no_pieces(tmp_path):
    assert pieces(tokenizer_in(tmp_path, **OF_PIECES), "aé") == ["▁a", "<0xC3>", "<0xA9>"]
    few = {name: value[:3] + value[259:] if isinstance(value, list) else value for name, value in OF_PIECES.items()}
    assert pieces(tokenizer_in(tmp_path, **few), "aéöb") == ["▁a", "<unk>", "b"]


def test_only_normal_pieces_are_merged(tmp_path):
    """Not what a converter has filled up with, nor what stands for a byte."""
    types = OF_PIECES["token_type"]
    unused = tokenizer_in(tmp_path, **(OF_PIECES | {"token_type": [*types[:-1], UNUSED]}))
    assert pieces(tokenizer_in(tmp_path, **OF_PIECES, add_space_prefix=False), "cabc") == ["c", "abc"]
    assert pieces(unused, "cabc") == ["▁", "c", "ab", "c"]


def test_first_and_last_tokens(tmp_path):
    """Where the file does not say, llama.cpp's defaults."""
    assert tokenizer_in(tmp_path, **OF_PIECES)("a").input_ids == [1, PIECES.index("▁a")]
    both = {"add_bos_token": False, "add_eos_token": True}
    assert tokenizer_in(tmp_path, **OF_PIECES, **both)("a").input_ids == [PIECES.index("▁a"), 2]
    a = ids(of_bytes(tmp_path), "a")
    assert of_bytes(tmp_path)("a").input_ids == a
    assert of_bytes(tmp_path, pre="llama-bpe")("a").input_ids == [0, *a]
    assert of_bytes(tmp_path, pre="llama-bpe", add_bos_token=False)("a").input_ids == a
    assert of_bytes(tmp_path, add_bos_token=True)("a").input_ids == [0, *a]


@needs_shared
def test_a_file_of_stories260k_has_the_tokens_of_its_tokenizer(tmp_path):
    """A piece has the score of the first merge that makes it."""
    content = json.loads((STORIES / "tokenizer.json").read_text())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    rank = {}
    for number, merge in enumerate(content["merges"]):
        rank.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ")), number)
    scores = [-float(rank.get(token, 1e6)) for token in tokens]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    ours = tokenizer_in(
        tmp_path, model="llama", tokens=[t.replace(" ", "▁") for t in tokens], scores=scores, token_type=types
    )
    theirs = load_tokenizer(str(STORIES))
    documents = [json.loads(line)["text"] for line in C4.read_text().splitlines()[:100]]
    for text in [*TEXTS, *documents, "Once upon a time, there was a girl named Lily."]:
        assert ids(ours, text) == ids(theirs, text)
        assert ours.decode(ids(ours, text)) == theirs.decode(ids(theirs, text)) == text


# Unigram models


def charsmap(of: str, to: str) -> list[int]:
    """A map of SentencePiece that replaces a character of ASCII by another: a double array of four nodes."""
    nodes = [0] * 1024
    nodes[0] = 256 << 10
    nodes[256 ^ ord(of)] = ord(of) | 1 << 8 | 512 << 10
    nodes[256 ^ ord(of) ^ 512] = 1 << 31
    trie = struct.pack(f"<{len(nodes)}I", *nodes)
    return list(struct.pack("<I", len(trie)) + trie + to.encode() + b"\0")


LIKELY = [*((special, 0.0) for special in ("<pad>", "</s>", "<unk>")), ("▁", -2.0), ("▁a", -2.5), ("a", -3.0)]
LIKELY += [("b", -3.0), ("ab", -3.5)]
OF_LIKELIHOODS = {
    "model": "t5",
    "tokens": [token for token, _ in LIKELY] + [f"[PAD{number}]" for number in range(8, 110)],
    "scores": [score for _, score in LIKELY] + [-1e4] * 102,
    "token_type": [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * 5, *[UNUSED] * 102],
    "eos_token_id": 1,
    "unknown_token_id": 2,
    "padding_token_id": 0,
}
OF_T5 = {"add_space_prefix": True, "remove_extra_whitespaces": True}


def test_unigram_pieces_are_those_of_t5(tmp_path):
    ours = tokenizer_in(tmp_path, **OF_LIKELIHOODS, **OF_T5)
    own = Tokenizer(Unigram(LIKELY, 2))
    own.pre_tokenizer = Sequence([WhitespaceSplit(), Metaspace()])
    for text in ("ab a", "  a   b ", "b a", "xa"):
        assert ids(ours, text) == own.encode(text).ids, text
    assert ours("a").input_ids == [4, 1]
    assert ids(ours, "<extra_id_0> a")[0] == ours.convert_tokens_to_ids("<extra_id_0>") == 107
    assert ours.convert_ids_to_tokens([8, 108]) == ["<extra_id_99>", "[PAD108]"]


def test_blanks_of_unigram_pieces_are_the_files(tmp_path):
    plain = tokenizer_in(tmp_path, **OF_LIKELIHOODS)
    assert pieces(plain, "  a ") == ["▁", "▁a", "▁"]
    assert pieces(tokenizer_in(tmp_path, **OF_LIKELIHOODS, add_space_prefix=True), " a") == ["▁", "▁a"]
    assert pieces(tokenizer_in(tmp_path, **OF_LIKELIHOODS, remove_extra_whitespaces=True), "  a ") == ["a"]


def test_characters_that_the_file_replaces(tmp_path):
    mapped = tokenizer_in(tmp_path, **OF_LIKELIHOODS, **OF_T5, precompiled_charsmap=charsmap("Z", "b"))
    assert normalizers.Precompiled(bytes(charsmap("Z", "b"))).normalize_str("aZa") == "aba"
    assert pieces(mapped, "aZ") == pieces(mapped, "ab") == ["▁", "ab"]


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "holds no tokenizer; expected a GGUF file with the vocabulary of its model"),
        ({"pre": "smolm"}, r"unknown rule of splitting words \(tokenizer.ggml.pre\) 'smolm'; did you mean smollm"),
        ({"model": "rwkv"}, r"unknown tokenizer \(tokenizer.ggml.model\) 'rwkv'; known: gpt2, llama, gemma4, t5"),
        ({"merges": None}, r"holds no merges of its vocabulary \(tokenizer.ggml.merges\)"),
        ({"bos_token_id": 4096}, "its tokenizer.ggml.bos_token_id is 4096, and it has 4,096 tokens"),
        ({"token_type": [1] * 4095}, "its tokenizer.ggml.token_type is not of all 4,096 tokens"),
        ({"tokens": ["a"] * 4096}, "token 'a' stands 4096 times in its vocabulary"),
    ],
)
def test_vocabularies_that_contradict_themselves(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        of_bytes(tmp_path, **changes)


def test_tokens_without_a_name(tmp_path):
    """llama.cpp names those that were lost, of which there may be several."""
    ours = tokenizer_in(
        tmp_path, model="gpt2", pre="gpt-2", tokens=[*ByteLevel.alphabet(), "", "", "ab"], merges=["a b"]
    )
    assert ids(ours, "ab") == [258]
    assert ours.convert_ids_to_tokens([256, 257]) == ["[EMPTY_256]", "[EMPTY_257]"]
