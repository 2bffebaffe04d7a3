"""Printed values of the paper and of others: one CSV file per table, beside this file."""

import csv
from pathlib import Path

import pandas as pd

from outliers.models.names import short_name

PRINTED = Path(__file__).parent
CellKey = tuple[str, ...]


def model_key(model: str) -> str:
    """Return the key of a model in the published numbers: its short name in lower case."""
    return short_name(model).lower()


def numbers_of(name: str, keys: CellKey) -> dict[CellKey, float | str]:
    """Read a printed table as values by key.

    keys: names of the parts of a key. Columns with these names hold parts of the keys of their row; the header of any
    other column is the last part of the keys of its values.
    """
    with (PRINTED / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    parts = len(header) - len(set(header) - set(keys))
    columns = [[column] for column in header[parts:]] if len(keys) > parts else [[]]
    return {
        (*line[:parts], *column): _value(text)
        for line in lines
        for column, text in zip(columns, line[parts:], strict=True)
    }


def _value(text: str) -> float | str:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


TABLE1, TABLE7 = (
    numbers_of("table1", ("model", "scheme")),  # perplexity on C4
    numbers_of("table7", ("model", "int8", "decomposition")),  # perplexity of models trained in int8
)
FAIRSEQ = list(dict.fromkeys(model for model, _ in TABLE1))

# LLaMA-2-7B on WikiText-2, weights by GPTQ, keys and values in 4 bits too: QuaRot (2024), Table 1. OPT-175B on
# WikiText-2: SmoothQuant (2023), Table 3. 13 B parameters on C4: LLM.int8(), Table 1. Bits are those of both operands.
REMEDIES = pd.read_csv(PRINTED / "remedies.csv")
REMEDIES["increase"] = 100 * (REMEDIES["perplexity"] / REMEDIES["unquantized"] - 1)  # in per cent


def table1_rows() -> list[dict]:
    """Return Table 1 as rows with `model`, `variant` and `value`."""
    return [{"model": model, "variant": scheme, "value": value} for (model, scheme), value in TABLE1.items()]


def published_models() -> pd.DataFrame:
    """Return Table 4: one row per model (index), the worst first, with the columns of measured models (`by_model`)."""
    table = pd.read_csv(PRINTED / "table4.csv", index_col="model").rename_axis(None).astype(float)
    return table.sort_values("perplexity", ascending=False)


TABLE4_COLUMNS = list(published_models())
