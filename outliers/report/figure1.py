"""Figure 1 of the paper from rows: zero-shot accuracy by task, and its mean over the tasks."""

import pandas as pd

from outliers.models.names import distinct_names
from outliers.quantization.schemes import BASELINE
from outliers.report.paper import Key, key_of
from outliers.report.section import Drawing, Section, Table
from outliers.report.zeroshot_figures import PREFIX, accuracy_by_size, mean_accuracy, place

MEAN = ("mean", "acc")


def zeroshot_section(rows: list[dict]) -> Section:
    """What zero-shot tasks show."""
    table = published_table(rows)
    caption = (
        "Mean zero-shot accuracy by model size; bars: one standard error. Hollow markers: outlier features in 16 bits."
    )
    drawings = [Drawing("accuracy", caption, accuracy_by_size(rows))]
    return Section("Zero-shot accuracy", table.printed, [table], drawings, [], {}, rows)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Accuracies and perplexities by the keys of the published ones."""
    return {
        (key_of(row["model"]), row["task"], row["metric"].removeprefix(PREFIX), row["scheme"]): row["value"]
        for row in rows
    }


def accuracy_table(rows: list[dict]) -> pd.DataFrame:
    """One row a model and scheme (index), in the order of the rows, with columns (task, metric).

    The last column is the mean accuracy over the tasks, empty where one of them was not measured.
    """
    wide: dict[tuple, dict] = {}
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows)
    for row in rows:
        wide.setdefault(place(row, names), {})[row["task"], row["metric"].removeprefix(PREFIX)] = row["value"]
    for mean in mean_accuracy(rows):
        wide[mean["model"], mean["scheme"]][MEAN] = mean["value"]
    table = pd.DataFrame.from_dict(wide, orient="index")
    table.index = pd.MultiIndex.from_tuples(wide, names=["model", "scheme"])
    columns = list(dict.fromkeys([column for values in wide.values() for column in values if column != MEAN] + [MEAN]))
    return table.reindex(columns=pd.MultiIndex.from_tuples(columns, names=["task", "metric"]))


def accuracy_headers(table: pd.DataFrame) -> list[str]:
    """What stands above `accuracy_cells`."""
    return ["model", "weights", *(f"{task} {metric}" for task, metric in table.columns)]


def accuracy_cells(table: pd.DataFrame, dtype: str) -> list[list[str]]:
    """The table row by row as printed: accuracies in per cent, perplexities as such."""
    return [
        [model, f"{dtype}, not quantized" if scheme == BASELINE else scheme]
        + [_cell(metric, value) for (_, metric), value in row.items()]
        for (model, scheme), row in table.iterrows()
    ]


def published_table(rows: list[dict]) -> Table:
    """The table with its caption; its data are the values of `accuracy_table` with flat names."""
    table, one = accuracy_table(rows), rows[0]
    examples = {row["task"]: row["examples"] for row in rows}
    errors = [row["standard_error"] for row in mean_accuracy(rows) if row["standard_error"] is not None]
    caption = (
        f"Zero-shot accuracy by lm-eval {one['lm_eval']}, in per cent, and perplexity. Examples: "
        f"{', '.join(f'{task} {count}' for task, count in examples.items())}."
        + (f" The largest standard error of a mean is {100 * max(errors):.1f} points." if errors else "")
    )
    data = table.set_axis([f"{task}_{metric}" for task, metric in table.columns], axis="columns").reset_index()
    cells = accuracy_cells(table, one["dtype"])
    return Table("figure1", caption, accuracy_headers(table), cells, data, names=2)


def _cell(metric: str, value: float) -> str:
    if pd.isna(value):
        return "-"
    return f"{value:.4g}" if metric == "perplexity" else f"{100 * value:.1f}"
