"""Table 1 of the paper from rows: schemes down, models across, perplexity in the cells."""

import pandas as pd
from tabulate import tabulate

from outliers.experiment.spec import short_name
from outliers.quantization.schemes import SCHEMES


def table1(rows: list[dict]) -> pd.DataFrame:
    """Perplexity by scheme (index, in the order of `SCHEMES`) and model (columns, in the order of the rows)."""
    frame = pd.DataFrame([row for row in rows if row["metric"] == "perplexity"])
    table = frame.pivot(index="scheme", columns="model", values="value")
    return table.loc[[name for name in SCHEMES if name in table.index], frame["model"].unique()]


def terminal(table: pd.DataFrame) -> str:
    """The table for a terminal: scheme names as a user types them, model names broken at their hyphens."""
    headers = ["perplexity", *(short_name(model).replace("-", "\n") for model in table.columns)]
    return _tabulate(table, headers, "simple")


def published_form(table: pd.DataFrame, dtype: str, tablefmt: str) -> str:
    """The table with the paper's own row labels, in a format of the tabulate library (github, latex_booktabs)."""
    labels = [_label(scheme, dtype) for scheme in table.index]
    headers = ["Perplexity", *map(short_name, table.columns)]
    return _tabulate(table.set_axis(labels), headers, tablefmt) + "\n"


def _label(scheme: str, dtype: str) -> str:
    if scheme == "fp32" and dtype != "float32":
        return f"{dtype}, not quantized"
    return SCHEMES[scheme].label


def _tabulate(table: pd.DataFrame, headers: list[str], tablefmt: str) -> str:
    cells = table.astype(object).where(table.notna(), None)  # what is missing is a dash, never a number
    return tabulate(cells, headers, tablefmt=tablefmt, floatfmt=".2f", missingval="-")
