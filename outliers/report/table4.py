"""Table 4 of the paper from rows: one row a model."""

import pandas as pd

from outliers.models.names import distinct_names
from outliers.report.paper import Key, key_of
from outliers.report.section import Table
from outliers.report.style import count_label

OF_THE_MOST_COMMON = ["layers", "positions", "q1", "median", "q3"]
COLUMNS = [
    "perplexity",
    "parameters",
    "count",
    "one_sided",
    *OF_THE_MOST_COMMON,
    "top1_softmax",
    "top1_softmax_without",
]
HEADERS = [
    "Model",
    "PPL",
    "Params",
    "Count",
    "1-sided",
    "Layers",
    "SDims",
    "Quartiles",
    "Top-1 p",
    "w/o outliers",
]


def measured(rows: list[dict]) -> dict[Key, float]:
    """The numbers of Table 4 by the keys of the published ones."""
    table = table4(rows).stack().dropna()
    return {(key_of(model), metric): value for (model, metric), value in table.items()}


def by_model(rows: list[dict]) -> pd.DataFrame:
    """The metrics of `table4_row` as columns, one row a model and checkpoint in the order of the rows.

    The index is the model's short name, or its whole one where two models share that; `parameters`, `architecture`,
    `checkpoint` and `alpha` stand beside the metrics.
    """
    wide: dict[tuple, dict] = {}
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows)
    for row in rows:
        place = row["model"], row.get("checkpoint")
        about = {
            name: row.get(name)
            for name in ("parameters", "architecture", "checkpoint", "alpha", "same_weights_as", "tokens_hash")
        }
        wide.setdefault(place, {"model": names[place], **about})[row["metric"]] = row["value"]
    return pd.DataFrame(wide.values()).set_index("model").reindex(columns=_columns(wide))


def _columns(wide: dict) -> list[str]:
    """All columns that occur, and those of Table 4 in any case."""
    return list(dict.fromkeys([name for row in wide.values() for name in row if name != "model"] + COLUMNS))


def table4(rows: list[dict]) -> pd.DataFrame:
    """One row a model with the columns of the paper's Table 4; fractions and probabilities as such.

    Without an outlier feature there is no most common one: its columns are empty.
    """
    table = by_model(rows)[COLUMNS]
    table.loc[table["count"] == 0, OF_THE_MOST_COMMON] = float("nan")
    return table


def published_table(rows: list[dict]) -> Table:
    """The table with the paper's headers and roundings."""
    cells = [[model, *_cells(row)] for model, row in table4(rows).iterrows()]
    caption = (
        "Outlier features (count; of one sign), layers and sequence positions (SDims) that the most common one affects "
        "and quartiles of its values, mean top-1 softmax probability with and without outlier features."
    )
    return Table("table4", caption, HEADERS, cells, by_model(rows).drop(columns="alpha").reset_index())


def _cells(row: pd.Series) -> list[str]:
    quartiles = row[["q1", "median", "q3"]]
    return [
        f"{row['perplexity']:.1f}",
        count_label(row["parameters"]),
        f"{row['count']:.0f}",
        f"{row['one_sided']:.0f}",
        _percent(row["layers"], 0),
        _percent(row["positions"], 1),
        "-" if quartiles.isna().any() else "({:.1f}, {:.1f}, {:.1f})".format(*quartiles),
        _percent(row["top1_softmax"], 1),
        _percent(row["top1_softmax_without"], 1),
    ]


def _percent(value: float, digits: int) -> str:
    return "-" if pd.isna(value) else f"{value:.{digits}%}"
