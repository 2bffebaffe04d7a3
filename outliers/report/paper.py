"""The published numbers, as data, and ours beside them.

Facts from LLM.int8() (Dettmers et al., 2022, arXiv:2208.07339), from the blog post about its integration into
transformers (huggingface.co/blog/hf-bitsandbytes-integration), and from the sources named in `ELSEWHERE`. Models are
keyed by their short names in lower case, so that a hub id and a local copy are the same model.
"""

from itertools import chain, product
from typing import NamedTuple

import pandas as pd

from outliers.models.names import short_name
from outliers.quantization.schemes import TABLE1
from outliers.report.section import Table

Key = tuple[str, ...]


class Published(NamedTuple):
    """One table or figure of the paper: its numbers by key; keys: what the parts of a key are; form: of a number."""

    source: str
    keys: tuple[str, ...]
    values: dict[Key, float | str]
    form: str = "{:.4g}"


def key_of(model: str) -> str:
    """A model as the published numbers name it."""
    return short_name(model).lower()


def _grid(rows: list, columns: list, values: list[tuple]) -> dict[Key, float | str]:
    """A printed table, row by row, as (row, column) to value."""
    cells = [_flat(key) for key in product(rows, columns)]
    return dict(zip(cells, chain(*values), strict=True))


def _columns(rows: list, columns: list, values: list[tuple]) -> dict[Key, float | str]:
    """A printed table, row by row, as (column, row) to value."""
    return _grid(columns, rows, list(zip(*values, strict=True)))


def _flat(parts: tuple) -> Key:
    return tuple(str(name) for part in parts for name in (part if isinstance(part, tuple) else (part,)))


FAIRSEQ = [f"fairseq-dense-{size}" for size in ("125m", "1.3b", "2.7b", "6.7b", "13b")]
DIMENSIONS = [768, 1024, 1536, 2048, 2560, 4096, 5140, 12288]
OF_MODELS = [
    "perplexity",
    "parameters",
    "count",
    "one_sided",
    "layers",
    "positions",
    "q1",
    "median",
    "q3",
    "top1_softmax",
    "top1_softmax_without",
]
BLOG = "bitsandbytes integration blog"

PUBLISHED = {
    "table1": Published(
        "LLM.int8(), Table 1",
        ("model", "scheme"),
        _columns(
            TABLE1,
            FAIRSEQ,
            [
                (25.65, 15.91, 14.43, 13.30, 12.45),
                (87.76, 16.55, 15.11, 14.59, 19.08),
                (56.66, 16.24, 14.76, 13.49, 13.94),
                (30.93, 17.08, 15.24, 14.13, 16.49),
                (35.84, 16.82, 14.98, 14.13, 16.48),
                (25.72, 15.94, 14.36, 13.38, 13.47),
                (30.76, 16.19, 14.65, 13.25, 12.46),
                (25.83, 15.93, 14.44, 13.24, 12.45),
                (25.69, 15.92, 14.43, 13.24, 12.45),
            ],
        ),
        "{:.2f}",
    ),
    "figure1": Published(
        f"{BLOG} (the paper's figure prints no numbers)",
        ("model", "task", "metric", "scheme"),
        _grid(
            [
                (model, *task)
                for model in ("opt-175b", "bloom")
                for task in (
                    ("hellaswag", "acc_norm"),
                    ("hellaswag", "acc"),
                    ("piqa", "acc"),
                    ("piqa", "acc_norm"),
                    ("lambada_openai", "perplexity"),
                    ("lambada_openai", "acc"),
                    ("winogrande", "acc"),
                )
            ],
            ["llm.int8", "fp32"],
            [
                (0.7849, 0.7849),
                (0.5921, 0.5931),
                (0.7965, 0.7959),
                (0.8101, 0.8107),
                (3.0142, 3.0152),
                (0.7464, 0.7466),
                (0.7174, 0.7245),
                (0.7274, 0.7303),
                (0.5563, 0.5584),
                (0.7835, 0.7884),
                (0.7922, 0.7911),
                (3.9191, 3.9310),
                (0.6808, 0.6718),
                (0.7048, 0.7048),
            ],
        ),
    ),
    "table3": Published(
        "LLM.int8(), Table 3",
        ("hardware", "bits"),
        _grid(
            [
                "8x A100 80 GB",
                "8x A100 40 GB",
                "8x RTX 3090 24 GB",
                "4x RTX 3090 24 GB",
                "Colab Pro 15 GB",
                "Colab 12 GB",
            ],
            [8, 16],
            [
                ("OPT-175B / BLOOM", "OPT-175B / BLOOM"),
                ("OPT-175B / BLOOM", "OPT-66B"),
                ("OPT-175B / BLOOM", "OPT-66B"),
                ("OPT-66B", "OPT-30B"),
                ("OPT-13B", "GPT-J-6B"),
                ("T0/T5-11B", "GPT-2 1.3B"),
            ],
        ),
        "{}",
    ),
    "table4": Published(
        "LLM.int8(), Table 4",
        ("model", "metric"),
        _grid(
            [
                "gpt2",
                "gpt2-medium",
                "fairseq-dense-125m",
                "gpt2-large",
                "gpt2-xl",
                "fairseq-dense-1.3b",
                "fairseq-dense-2.7b",
                "gpt-j-6b",
                "fairseq-dense-6.7b",
                "fairseq-dense-13b",
            ],
            OF_MODELS,
            [
                (33.5, 117e6, 1, 1, 0.25, 0.06, -8, -7, -6, 0.45, 0.19),
                (26.0, 345e6, 2, 1, 0.29, 0.18, 6, 7, 8, 0.45, 0.19),
                (25.7, 125e6, 2, 2, 0.25, 0.22, -40, -23, -11, 0.32, 0.24),
                (22.6, 762e6, 2, 0, 0.31, 0.16, -9, -6, 9, 0.41, 0.18),
                (21.0, 1.5e9, 2, 1, 0.41, 0.35, -11, -9, -7, 0.41, 0.25),
                (15.9, 1.3e9, 4, 3, 0.64, 0.47, -33, -21, -11, 0.39, 0.15),
                (14.4, 2.7e9, 5, 5, 0.52, 0.18, -25, -16, -9, 0.45, 0.13),
                (13.8, 6.0e9, 6, 6, 0.62, 0.28, -21, -17, -14, 0.55, 0.10),
                (13.3, 6.7e9, 6, 6, 1.00, 0.75, -44, -40, -35, 0.35, 0.13),
                (12.5, 13e9, 7, 6, 1.00, 0.73, -63, -58, -45, 0.37, 0.16),
            ],
        ),
    ),
    "table5": Published(
        "LLM.int8(), Table 5",
        ("way", "dimension"),
        _grid(
            ["int8 alone", "absmax, plain torch", "vector-wise, plain torch", "vector-wise", "LLM.int8()"],
            DIMENSIONS,
            [
                (0.99, 1.08, 1.43, 1.61, 1.63, 1.67, 2.13, 2.29),
                (0.25, 0.24, 0.36, 0.45, 0.53, 0.70, 0.96, 1.50),
                (0.21, 0.22, 0.33, 0.41, 0.50, 0.65, 0.91, 1.50),
                (0.43, 0.49, 0.74, 0.91, 0.94, 1.18, 1.59, 2.00),
                (0.14, 0.20, 0.36, 0.51, 0.64, 0.86, 1.22, 1.81),
            ],
        ),
        "{:.2f}",
    ),
    "table6": Published(
        f"LLM.int8(), Table 6; {BLOG}",
        ("model", "scheme", "hardware", "batch"),
        _grid(
            [
                ("bloom", "fp32", "8x A100 80 GB"),
                ("bloom", "llm.int8", "8x A100 80 GB"),
                ("bloom", "llm.int8", "4x A100 80 GB"),
                ("bloom", "llm.int8", "3x A100 80 GB"),
                ("bloom", "fp32", f"8x A100 80 GB ({BLOG})"),
                ("bloom", "llm.int8", f"4x A100 80 GB ({BLOG})"),
                ("bloom", "fp32", f"14x A100 40 GB ({BLOG})"),
                ("bloom", "llm.int8", f"5x A100 40 GB ({BLOG})"),
                ("t5-11b", "fp32", f"2x T4 15 GB ({BLOG})"),
                ("t5-11b", "llm.int8", f"1x T4 15 GB ({BLOG})"),
                ("t5-3b", "fp32", f"2x T4 15 GB, float32 ({BLOG})"),
                ("t5-3b", "llm.int8", f"1x T4 15 GB ({BLOG})"),
            ],
            [1, 8, 32],
            [
                (239, 32, 9.94),
                (253, 34, 10.44),
                (246, 33, 9.40),
                (247, 33, 9.11),
                (239, 32, 9.9),
                (282, 37.5, 10.2),
                (285, 36.5, 10.4),
                (367, 46.4, "out of memory"),
                (11.7, 1.7, 0.5),
                (43.5, 5.3, 1.3),
                (45, 7.2, 3.1),
                (312, 39.1, 10.2),
            ],
        ),
    ),
}


class Elsewhere(NamedTuple):
    """A value that others published for a public model, under a protocol of their own."""

    model: str
    quantity: str
    value: str
    source: str


MASSIVE, REPLICATION, GUIDE, VENDOR, SMOOTHQUANT = (
    "refine_massive_activations, raw figures data",
    "third-party replication",
    "transformers' perplexity guide",
    "a vendor's benchmark table",
    "SmoothQuant",
)
LARGEST = "largest features of the mean residual stream"
ELSEWHERE = [
    Elsewhere(
        "gpt2",
        "residual stream, feature 447, position 0, layers 2–9 (from 0), 1,024 tokens without BOS, bfloat16",
        "2480 2656 2800 2896 2960 2992 3008 3024",
        MASSIVE,
    ),
    Elsewhere("gpt2", LARGEST, "138 378 447", REPLICATION),
    Elsewhere("gpt2-medium", LARGEST, "9 238 268 428 580 608", REPLICATION),
    Elsewhere("gpt2-large", LARGEST, "8 24 248 440 792 870", REPLICATION),
    Elsewhere("opt-125m", LARGEST, "130 353 422", REPLICATION),
    Elsewhere("opt-1.3b", LARGEST, "236 572 1177 1192 1359", REPLICATION),
    Elsewhere("opt-2.7b", LARGEST, "13 198 319 1102 1454 1625 1802", REPLICATION),
    Elsewhere("opt-6.7b", "feature 2394, layers 0–15, 2,048 tokens", "148 rising to 334", MASSIVE),
    Elsewhere("opt-66b", "outlier channels", "6353 (positive), 8725 (negative)", "Outlier Suppression+"),
    Elsewhere("llama-2-7b", "massive activations, layers 1–29", "1415 (−1502), 2533 (2547)", "massive-activations"),
    Elsewhere("gpt2", "perplexity on WikiText-2, bfloat16; on C4", "30.22; 37.33", "refine_massive_activations"),
    Elsewhere("gpt2", "perplexity on WikiText-2 (raw, test), stride 1024", "29.94", GUIDE),
    Elsewhere("gpt2-large", "perplexity on WikiText-2 (raw, test), stride 1024; 512", "19.44; 16.44", GUIDE),
    Elsewhere("gpt2", "LAMBADA perplexity; accuracy", "40.06; 0.3256", "lm-eval"),
    Elsewhere("opt-125m", "perplexity on WikiText-2, float16; int8 per tensor", "27.65; 30.18", VENDOR),
    Elsewhere("opt-13b", "perplexity on WikiText-2, float16; int8 per tensor", "10.12; 4135.99", VENDOR),
    Elsewhere(
        "opt-13b", "LAMBADA accuracy (1,000 examples), float16; int8; SmoothQuant", "0.786; 0.048; 0.793", SMOOTHQUANT
    ),
    Elsewhere(
        "opt-175b",
        "perplexity on WikiText-2, float16; int8; LLM.int8(); SmoothQuant-O1",
        "10.99; 93080; 11.10; 11.11",
        f"{SMOOTHQUANT}, Table 3",
    ),
    *(
        Elsewhere(model, "attention sink at position 0, ε 0.3, 64 tokens, %", value, "Attention-Sink paper")
        for model, value in (("gpt2-xl", "77.0"), ("mistral-7b", "97.5"), ("llama-2-7b", "92.5"))
    ),
]


def published_models() -> pd.DataFrame:
    """The published Table 4: one row a model, columns as `outliers.report.table4.by_model` has them."""
    table = pd.Series(PUBLISHED["table4"].values).unstack()
    return table.astype(float).sort_values("perplexity", ascending=False)


def comparison(shown: str, measured: dict[Key, float | str]) -> Table:
    """Every published value with the one measured beside it, if it was run.

    Measured values of a model (of a way to multiply, in Table 5) that is published for other settings stand at the end.

    measured: by the same keys as the published values. The difference is measured − published; of texts whether they
    are the same.
    """
    of_paper = PUBLISHED[shown]
    subjects = {key[0] for key in of_paper.values}
    keys = [*of_paper.values, *(key for key in measured if key[0] in subjects and key not in of_paper.values)]
    pairs = [(key, measured.get(key), of_paper.values.get(key)) for key in keys]
    records = [[*key, ours, theirs, _difference(ours, theirs)] for key, ours, theirs in pairs]
    headers = [*of_paper.keys, "measured", "published", "difference"]
    cells = [_cells(record, len(of_paper.keys), of_paper.form) for record in records]
    return Table(
        f"{shown}_published",
        f"Measured beside published ({of_paper.source}).",
        headers,
        cells,
        pd.DataFrame(records, columns=headers),
        names=len(of_paper.keys),
        folded=not set(measured) & set(keys),
    )


def _difference(ours: float | str | None, theirs: float | str | None) -> float | str | None:
    if ours is None or theirs is None:
        return None
    if isinstance(theirs, str) or isinstance(ours, str):
        return "same" if ours == theirs else "other"
    return ours - theirs


def _cells(record: list, names: int, form: str) -> list[str]:
    keys, (ours, theirs, difference) = record[:names], record[names:]
    return [
        *map(str, keys),
        "not run" if ours is None else _shown(ours, form),
        "-" if theirs is None else _shown(theirs, form),
        "-" if difference is None else _shown(difference, form.replace("{:", "{:+")),
    ]


def _shown(value: float | str, form: str) -> str:
    return value if isinstance(value, str) else form.format(value)


def elsewhere(models: list[str]) -> Table | None:
    """What others published for these models; None where nothing is known."""
    names = {key_of(model) for model in models}
    known = [value for value in ELSEWHERE if value.model in names]
    if not known:
        return None
    headers = ["model", "quantity", "published", "source"]
    cells = [list(value) for value in known]
    caption = "Published elsewhere, each under the protocol that it names."
    return Table("elsewhere", caption, headers, cells, pd.DataFrame(cells, columns=headers), names=4)
