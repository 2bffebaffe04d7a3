"""The rules by which byte-level vocabularies split a text into words, by their names in `tokenizer.ggml.pre`.

The names and expressions are from llama.cpp's table of 2026. Where the table replaces an expression of a model's
tokenizer.json that llama.cpp's engine cannot read, the model's own is used.
"""

import re
from typing import NamedTuple


class Rule(NamedTuple):
    """A way to split a text into words before bytes are merged.

    expressions: applied one after the other; each splits the results of the one before into its matches and the text
    between them. whole_words: whether a word that is a token stays whole, whatever the merges would make of it. begins:
    whether texts begin with the token bos if the file does not say so. bytes: whether tokens are spelled in bytes, as
    in GPT-2; otherwise in characters, with ▁ for a space.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False
    bytes: bool = True


SHORT = "'s|'t|'re|'ve|'m|'ll|'d"  # English contractions
CONTRACTED = f"(?i:{SHORT})"
BLANKS = r"\s+(?!\S)|\s+"
LINES = r"\s*[\r\n]+"
SIGNS = r" ?[^\s\p{L}\p{N}]+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
GPT2 = rf"{SHORT}| ?\p{{L}}+| ?\p{{N}}+|{SIGNS}|{BLANKS}"


def _words(digits: str, word: str = WORD, signs: str = rf"{SIGNS}[\r\n]*", blanks: str = BLANKS) -> str:
    """Return an expression for contractions, words with the sign before them, numbers, signs and blanks."""
    return rf"{CONTRACTED}|{word}|{digits}|{signs}|{LINES}|{blanks}"


def _cased(upper: str, lower: str, end: str, digits: str, signs: str = rf"{SIGNS}[\r\n/]*") -> str:
    """Return an expression for words that end before a capital letter.

    upper, lower: classes of letters. end: what may follow a word.
    """
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}{upper}*{lower}+{end}|{before}{upper}+{lower}*{end}|{digits}|{signs}|{LINES}|{BLANKS}"


def _class(ranges: str) -> str:
    """Return the inside of a character class, from code points: literal characters could be normalized by editors."""
    return re.sub("[0-9A-F]+", lambda number: rf"\x{{{number[0]}}}", ranges).replace(" ", "")


UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
NOT_HAN = r"&&[^\p{Han}]"
LLAMA3 = _words(r"\p{N}{1,3}")
QWEN2 = _words(r"\p{N}")
GPT4O = _cased(f"[{UPPER}]", f"[{LOWER}]", f"{CONTRACTED}?", r"\p{N}{1,3}")
TEKKEN = _cased(f"[{UPPER}]", f"[{LOWER}]", "", r"\p{N}")
DIGIT, NUMBER, FEW_DIGITS, THREE_DIGITS = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", "[0-9][0-9][0-9]"
FROM_THE_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # digits in groups of three from the right
HAN, KANA = _class("4E00-9FA5"), _class("3040-309F 30A0-30FF")
JAPANESE = rf"[{HAN}{KANA}]+"
CHINESE = rf"[{HAN}{_class('800-4E00 AC00-D7FF')}]+"
LINE, WHOLE_LINE = r"[\r\n]", r"[^\n]+|[\n]+"
ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
UNICODE_SIGNS = rf"{ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
DEEPSEEK3 = rf"{UNICODE_SIGNS}[\r\n]*|{LINES}|{BLANKS}"
CASED = _class(  # letters with a case, in the Unicode version of that time
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
DEEPSEEK_SIGNS = rf"\s?[!-/:-~{_class('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+"
SENTENCES = rf" ?[^(\s|.,!?{_class('2026 3002 FF0C 3001 964 6D4 60C')})]+"
YOUTU = "|".join(
    f"[{part}]+"
    for part in (
        _class("AC00-D7A3 3131-318E"),
        _class("FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F"),
        _class("3105-312F"),
        HAN + KANA,
    )
)
ASIAN = (
    "["
    + _class(
        "4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F "
        "AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
    )
    + "]+"
)
HALVED_BLANKS = "|".join([*(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}"])

RULES = {
    "default": Rule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, NUMBER, THREE_DIGITS)),
    "gpt-2": Rule((GPT2,)),
    "falcon": Rule((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, THREE_DIGITS)),
    "starcoder": Rule((DIGIT, GPT2)),
    "chameleon": Rule(
        (
            *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", DIGIT),
            *(r"[\p{P}!-/:-@\[-`{-~]", GPT2),
        ),
        begins=True,
    ),
    "llama-bpe": Rule((LLAMA3,), whole_words=True, begins=True),
    "dbrx": Rule((LLAMA3,)),
    "jais-2": Rule((_words(FEW_DIGITS, blanks=HALVED_BLANKS),)),
    "minicpm5": Rule((FEW_DIGITS, _words(NUMBER)), whole_words=True),
    "qwen2": Rule((QWEN2,)),
    "laguna": Rule((WHOLE_LINE, QWEN2)),
    "qwen35": Rule((_words(DIGIT, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)),
    "ufakzeka": Rule((QWEN2.removeprefix(f"{CONTRACTED}|"),)),
    "seed-coder": Rule((_words(DIGIT, signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "exaone-moe": Rule(
        (
            rf"{CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{DIGIT}|{SIGNS}[\r\n/]?"
            rf"|\s*[\r\n]|{BLANKS}",
        )
    ),
    "bailingmoe": Rule(
        (rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|{DIGIT}|{SIGNS}+[\r\n]*|\s*[\r\n]|{BLANKS}",)
    ),
    "tekken": Rule((TEKKEN,), whole_words=True, begins=True),
    "gpt-4o": Rule((GPT4O,)),
    "granite-embed-multi-97m": Rule((GPT4O,), whole_words=True),
    "tiny_aya": Rule((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)),
    "youtu": Rule((YOUTU, _cased(f"[{UPPER}]", f"[{LOWER}]", f"{CONTRACTED}?", DIGIT)), whole_words=True),
    "kimi-k2": Rule(
        (
            r"[\p{Han}]+|"
            + _cased(f"[{UPPER}{NOT_HAN}]", f"[{LOWER}{NOT_HAN}]", f"{CONTRACTED}?", FEW_DIGITS, rf"{SIGNS}[\r\n]*"),
        )
    ),
    "deepseek-llm": Rule((LINE, rf"\s?[{CASED}]+", DEEPSEEK_SIGNS, r"\s+$", CHINESE, NUMBER)),
    "deepseek-coder": Rule((LINE, r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, DIGIT)),
    "deepseek-v3": Rule((FEW_DIGITS, JAPANESE, DEEPSEEK3)),
    "spark2_5": Rule((FEW_DIGITS, JAPANESE, rf"{UNICODE_SIGNS}|{LINE}|{BLANKS}", DIGIT)),
    "afmoe": Rule((FROM_THE_END, ASIAN, DEEPSEEK3)),
    "superbpe": Rule((NUMBER, r"(?=(\d{3})+(?!\d))")),
    "bloom": Rule((SENTENCES,)),
    "viking": Rule((SENTENCES, DIGIT)),
    "gemma4": Rule((WHOLE_LINE,), bytes=False),
}
# Other names of a rule.
ALIKE = {
    "gpt-2": (
        *("phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert"),
        *("jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4", "mpt", "olmo", "jais", "trillion"),
        "granite-docling",
    ),
    "starcoder": ("refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "llama-bpe": (*("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),),
    "dbrx": ("smaug-bpe", "glm4", "chatglm-bpe"),
    "qwen2": (*("stablelm2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan", "solar-open", "grok-2"),),
    "gpt-4o": ("llama4", "kanana2", "talkie", "minimax-m2"),
    "tiny_aya": ("cohere2moe",),
    "deepseek-v3": ("hunyuan-dense", "joyai-llm", "hy_v4"),
    "bailingmoe": ("bailingmoe2", "llada-moe"),
    "bloom": ("poro-chat", "gpt3-finnish"),
    "gemma4": ("granite-embed-multi-311m", "sarvam-moe"),
}
BY_NAME = RULES | {name: RULES[rule] for rule, names in ALIKE.items() for name in names}
