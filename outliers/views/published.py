"""Published values, of the paper and of others, as far as figures show them beside what was measured."""

from typing import NamedTuple

import pandas as pd

# Perplexity on C4, as the paper prints it: LLM.int8(), Table 1. Scheme: of each of the models.
FAIRSEQ = [f"fairseq-dense-{size}" for size in ("125m", "1.3b", "2.7b", "6.7b", "13b")]
TABLE1 = {
    "fp32": (25.65, 15.91, 14.43, 13.30, 12.45),
    "absmax": (87.76, 16.55, 15.11, 14.59, 19.08),
    "zeropoint": (56.66, 16.24, 14.76, 13.49, 13.94),
    "absmax-row": (30.93, 17.08, 15.24, 14.13, 16.49),
    "absmax-vector": (35.84, 16.82, 14.98, 14.13, 16.48),
    "zeropoint-vector": (25.72, 15.94, 14.36, 13.38, 13.47),
    "absmax-row-decomp": (30.76, 16.19, 14.65, 13.25, 12.46),
    "llm.int8": (25.83, 15.93, 14.44, 13.24, 12.45),
    "llm.int8-zeropoint": (25.69, 15.92, 14.43, 13.24, 12.45),
}

# LLM.int8(), Table 4. Model: its value in each of the columns.
TABLE4_COLUMNS = [
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
TABLE4 = {
    "gpt2": (33.5, 117e6, 1, 1, 0.25, 0.06, -8, -7, -6, 0.45, 0.19),
    "gpt2-medium": (26.0, 345e6, 2, 1, 0.29, 0.18, 6, 7, 8, 0.45, 0.19),
    "fairseq-dense-125m": (25.7, 125e6, 2, 2, 0.25, 0.22, -40, -23, -11, 0.32, 0.24),
    "gpt2-large": (22.6, 762e6, 2, 0, 0.31, 0.16, -9, -6, 9, 0.41, 0.18),
    "gpt2-xl": (21.0, 1.5e9, 2, 1, 0.41, 0.35, -11, -9, -7, 0.41, 0.25),
    "fairseq-dense-1.3b": (15.9, 1.3e9, 4, 3, 0.64, 0.47, -33, -21, -11, 0.39, 0.15),
    "fairseq-dense-2.7b": (14.4, 2.7e9, 5, 5, 0.52, 0.18, -25, -16, -9, 0.45, 0.13),
    "gpt-j-6b": (13.8, 6.0e9, 6, 6, 0.62, 0.28, -21, -17, -14, 0.55, 0.10),
    "fairseq-dense-6.7b": (13.3, 6.7e9, 6, 6, 1.00, 0.75, -44, -40, -35, 0.35, 0.13),
    "fairseq-dense-13b": (12.5, 13e9, 7, 6, 1.00, 0.73, -63, -58, -45, 0.37, 0.16),
}

# LLM.int8(), Table 7. Parameters, parts in int8 and the share of features that is not, as printed: perplexity of models
# that were trained so.
TABLE7 = {
    ("209M", "16 bits", "0 %"): 16.74,
    ("209M", "FFN", "0 %"): 16.77,
    ("209M", "FFN, linear", "0 %"): 16.83,
    ("209M", "FFN, linear", "2 %"): 16.78,
    ("209M", "FFN, linear", "5 %"): 16.77,
    ("209M", "FFN, linear", "10 %"): 16.80,
    ("209M", "FFN, linear, attention", "2 %"): 24.33,
    ("209M", "FFN, linear, attention", "5 %"): 20.00,
    ("209M", "FFN, linear, attention", "10 %"): 19.00,
    ("1.1B", "16 bits", "0 %"): 9.99,
    ("1.1B", "FFN", "0 %"): 9.93,
    ("1.1B", "FFN, linear", "0 %"): 10.52,
    ("1.1B", "FFN, linear", "1 %"): 10.41,
}


class Other(NamedTuple):
    """A perplexity that others published, and that without quantization beside it; bits: of both operands."""

    what: str
    bits: int
    perplexity: float
    unquantized: float

    @property
    def increase(self) -> float:
        """In per cent."""
        return 100 * (self.perplexity / self.unquantized - 1)


# LLaMA-2-7B on WikiText-2, weights by GPTQ, keys and values in 4 bits too: QuaRot (2024), Table 1. OPT-175B on
# WikiText-2: SmoothQuant (2023), Table 3. 13 B parameters on C4: LLM.int8(), Table 1.
REMEDIES = (
    Other("QuaRot", 4, 6.10, 5.47),
    Other("absmax", 8, 19.08, 12.45),
    Other("SmoothQuant", 8, 11.11, 10.99),
    Other("LLM.int8()", 8, 11.10, 10.99),
)


def published_rows() -> list[dict]:
    """Table 1 as rows: `model`, `scheme`, `value`."""
    return [
        {"model": model, "scheme": scheme, "value": value}
        for scheme, values in TABLE1.items()
        for model, value in zip(FAIRSEQ, values, strict=True)
    ]


def published_models() -> pd.DataFrame:
    """Table 4: one row a model (index), worse ones first, with the columns that `by_model` gives to measured ones."""
    table = pd.DataFrame.from_dict(TABLE4, orient="index", columns=TABLE4_COLUMNS).astype(float)
    return table.sort_values("perplexity", ascending=False)
