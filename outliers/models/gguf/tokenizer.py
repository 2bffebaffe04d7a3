"""The tokenizer of a GGUF file, as its header defines it for llama.cpp.

transformers reads only the vocabulary from the file, and assumes the rest. So the tokenizer is built here from parts of
the library `tokenizers`.
"""

import logging
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outliers.errors import UserError, unknown_name
from outliers.models.gguf.header import gguf_refusals, read_header, read_lists, remembered
from outliers.models.gguf.splits import BY_NAME, Rule
from outliers.models.internals import generate_merges
from outliers.models.tokenizers import check_size

BLANK = "▁"  # stands for a space in SentencePiece
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
PLACEHOLDER = "[PAD"  # prefix of the names of tokens that the converter did not find
SENTINELS = 100  # number of sentinels of T5
logger = logging.getLogger(__name__)


class Vocabulary:
    """The fields of a file's tokenizer by name, its tokens in order, and their types."""

    def __init__(self, file: Path):
        if "tokenizer.ggml.tokens" not in read_header(file).fields:
            raise UserError(f"'{file}' holds no tokenizer; expected a GGUF file with the vocabulary of its model")
        self.file, self.fields = file, read_lists(file, ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
        self.tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(self["tokens"])]
        self.types = self._token_list("token_type", TokenType.NORMAL)
        self.scores = self._token_list("scores", 0.0)
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            (token, times), *_ = Counter(self.tokens).most_common(1)
            raise UserError(
                f"'{file}' is damaged: token {token!a} stands {times} times in its vocabulary; get it again"
            )

    def __getitem__(self, name: str):
        return self.get(name)

    def get(self, name: str, default=None):
        return self.fields.get(f"tokenizer.ggml.{name}", default)

    def _token_list(self, name: str, default) -> list:
        """Return a list with an entry for each token; raise UserError if the file's list is too short."""
        values = self.get(name, [default] * len(self.tokens))
        if not isinstance(values, list) or len(values) < len(self.tokens):
            raise UserError(
                f"'{self.file}' is damaged: its tokenizer.ggml.{name} is not of all {len(self.tokens):,} tokens; get "
                "it again"
            )
        return values[: len(self.tokens)]

    def of_types(self, *types: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    @property
    def merges(self) -> list[tuple[str, ...]]:
        if not isinstance(self["merges"], list):
            raise UserError(
                f"'{self.file}' holds no merges of its vocabulary (tokenizer.ggml.merges); expected those by which "
                "words are made of bytes"
            )
        return [tuple(merge.split(" ")) for merge in self["merges"]]

    @property
    def rule(self) -> Rule:
        name = self["pre"]
        if name is None:
            logger.warning(
                f"warning: '{self.file}' does not say how it splits words (tokenizer.ggml.pre), as files of 2023 do: "
                "they are split by llama.cpp's rule for these"
            )
        if (name or "default") not in BY_NAME:
            raise unknown_name("rule of splitting words (tokenizer.ggml.pre)", name, BY_NAME, f"('{self.file}')")
        return BY_NAME[name or "default"]

    def special_token(self, name: str) -> str | None:
        """Return the token of a purpose, such as "bos", or None."""
        number = self.get(f"{name}_token_id", DEFAULT_IDS.get((self["model"], name)))
        if number is None:
            return None
        if not 0 <= number < len(self.tokens):
            raise UserError(
                f"'{self.file}' is damaged: its tokenizer.ggml.{name}_token_id is {number}, and it has "
                f"{len(self.tokens):,} tokens; get it again"
            )
        return self.tokens[number]


DEFAULT_IDS = {("llama", "bos"): 1, ("llama", "eos"): 2, ("llama", "unknown"): 0}  # if a file does not say so


def _byte_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Build a BPE tokenizer of words that are spelled in bytes, as in GPT-2."""
    rule = vocabulary.rule
    if not rule.bytes:
        return _character_tokenizer(vocabulary, vocabulary.merges)
    tokenizer = Tokenizer(BPE(vocabulary.ids, vocabulary.merges, ignore_merges=rule.whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*_splits(rule), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splits(rule: Rule) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(expression), "isolated") for expression in rule.expressions]


def _piece_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Build a BPE tokenizer of characters with merges in the order of scores, as in SentencePiece's BPE."""
    others = {*vocabulary.tokens} - {*vocabulary.of_types(TokenType.NORMAL)}
    scores = {token: (vocabulary.scores[place], -place) for token, place in vocabulary.ids.items()}
    return _character_tokenizer(vocabulary, generate_merges(vocabulary.ids, scores, others))


def _character_tokenizer(vocabulary: Vocabulary, merges: list[tuple[str, ...]]) -> Tokenizer:
    """Build a BPE tokenizer of characters, with ▁ for a space and byte tokens for characters without a token."""
    unknown = vocabulary.special_token("unknown")
    tokenizer = Tokenizer(BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = vocabulary.get("add_space_prefix", vocabulary["model"] == "llama")
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(BLANK)] if prefix else []), normalizers.Replace(" ", BLANK)]
    )
    after = [decoders.Strip(" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    if vocabulary["model"] != "llama":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_splits(BY_NAME["gemma4"]))
    return tokenizer


def _unigram_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Build a tokenizer that finds the most likely tokens of a text, as SentencePiece's unigram model."""
    names = _with_sentinels(vocabulary.tokens)
    unknown = vocabulary.special_token("unknown")
    unknown_id = vocabulary.ids.get(unknown)
    bytes_too = TokenType.BYTE in vocabulary.types
    tokenizer = Tokenizer(Unigram(list(zip(names, vocabulary.scores, strict=True)), unknown_id, bytes_too))
    charsmap, merged = vocabulary["precompiled_charsmap"], vocabulary.get("remove_extra_whitespaces", False)
    prefix = vocabulary.get("add_space_prefix", False)
    steps = [normalizers.Precompiled(bytes(byte & 255 for byte in charsmap))] if charsmap else []
    if merged:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    steps += [normalizers.Prepend(BLANK)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
    # Splitting at words does not change the tokens, unless a token may hold several spaces.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "never", split=merged)
    tokenizer.decoder = decoders.Metaspace(BLANK, "always" if prefix else "never")
    tokenizer.add_special_tokens(
        [AddedToken(new, normalized=False) for old, new in zip(vocabulary.tokens, names, strict=True) if old != new]
    )
    return tokenizer


def _with_sentinels(tokens: list[str]) -> list[str]:
    """Restore the names of T5's sentinels, in descending order, which the converter drops."""
    left = count(SENTINELS - 1, -1)
    named = [f"<extra_id_{next(left)}>" if token.startswith(PLACEHOLDER) else token for token in tokens]
    return [old if new.startswith("<extra_id_-") else new for old, new in zip(tokens, named, strict=True)]


# By the file's name for the model of its tokenizer.
MODELS: dict[str, Callable[[Vocabulary], Tokenizer]] = {
    "gpt2": _byte_tokenizer,
    "llama": _piece_tokenizer,
    "gemma4": lambda vocabulary: _character_tokenizer(vocabulary, vocabulary.merges),
    "t5": _unigram_tokenizer,
}


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    with gguf_refusals(file):
        tokenizer, keywords = _tokenizer_in(file)
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path=str(file), **keywords)
    for tensor in read_header(file).tensors:
        if tensor.name == "token_embd.weight":
            check_size(made, tensor.shape[0], str(file))
    return made


@remembered
def _tokenizer_in(file: Path) -> tuple[Tokenizer, dict]:
    """Return the tokenizer of a file, which transformers copies, and the arguments of its wrapper."""
    vocabulary = Vocabulary(file)
    model = vocabulary["model"]
    if model not in MODELS:
        raise unknown_name("tokenizer (tokenizer.ggml.model)", str(model), MODELS, f"('{file}')")
    tokenizer = MODELS[model](vocabulary)
    special = vocabulary.of_types(TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.of_types(TokenType.USER_DEFINED)])
    roles = {name: vocabulary.special_token(role) for name, role in ROLES.items()}
    begins = model == "llama" or (model == "gpt2" and BY_NAME[vocabulary.get("pre", "default")].begins)
    return tokenizer, roles | {
        "chat_template": vocabulary.fields.get("tokenizer.chat_template"),
        "add_bos_token": vocabulary.get("add_bos_token", begins),
        "add_eos_token": vocabulary.get("add_eos_token", model == "t5"),
    }
