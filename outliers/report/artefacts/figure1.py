"""Figure 1 of the paper: zero-shot accuracy by task, and its mean over the tasks by model size."""

import pandas as pd

from outliers.plot.zeroshot import PREFIX, accuracy_by_size, label_of_weights, mean_accuracy, mean_chance, placed
from outliers.quantization.schemes import BASELINE
from outliers.report.findings.zeroshot import zeroshot_findings
from outliers.report.paper import BLOG, Artefact, Key, Published, grid, key_of
from outliers.report.section import Drawing, Section
from outliers.report.tables import Table, cell
from outliers.specification.kinds import ZeroShot

PUBLISHED = Published(
    f"{BLOG} (the paper's figure prints no numbers)",
    ("model", "task", "metric", "scheme"),
    grid(
        {
            ("opt-175b", "hellaswag", "acc_norm"): (0.7849, 0.7849),
            ("opt-175b", "hellaswag", "acc"): (0.5921, 0.5931),
            ("opt-175b", "piqa", "acc"): (0.7965, 0.7959),
            ("opt-175b", "piqa", "acc_norm"): (0.8101, 0.8107),
            ("opt-175b", "lambada_openai", "perplexity"): (3.0142, 3.0152),
            ("opt-175b", "lambada_openai", "acc"): (0.7464, 0.7466),
            ("opt-175b", "winogrande", "acc"): (0.7174, 0.7245),
            ("bloom", "hellaswag", "acc_norm"): (0.7274, 0.7303),
            ("bloom", "hellaswag", "acc"): (0.5563, 0.5584),
            ("bloom", "piqa", "acc"): (0.7835, 0.7884),
            ("bloom", "piqa", "acc_norm"): (0.7922, 0.7911),
            ("bloom", "lambada_openai", "perplexity"): (3.9191, 3.9310),
            ("bloom", "lambada_openai", "acc"): (0.6808, 0.6718),
            ("bloom", "winogrande", "acc"): (0.7048, 0.7048),
        },
        ["llm.int8", "fp32"],
    ),
)
MEAN = ("mean", "acc")
CAPTION = (
    "Mean zero-shot accuracy by model size; bars: one standard error. Hollow markers: outlier features in 16 bits."
)


def zeroshot_section(rows: list[dict]) -> Section:
    """What zero-shot tasks show."""
    table, drawing = accuracy_table(rows), Drawing.of("accuracy", CAPTION, accuracy_by_size(rows))
    findings = zeroshot_findings(mean_accuracy(rows), BASELINE, mean_chance(rows))
    return Section("Zero-shot accuracy", rows, table.printed, [table], [drawing], findings=findings)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Accuracies and perplexities by the keys of the published ones."""
    return {
        (key_of(row["model"]), row["task"], row["metric"].removeprefix(PREFIX), row["scheme"]): row["value"]
        for row in rows
    }


def accuracies(rows: list[dict]) -> pd.DataFrame:
    """One row a model and scheme (index), in the order of the rows, with columns (task, metric).

    The last column is the mean accuracy over the tasks, empty where one of them was not measured.
    """
    wide: dict[tuple, dict] = {}
    for place, row in placed(rows):
        wide.setdefault(place, {})[row["task"], row["metric"].removeprefix(PREFIX)] = row["value"]
    for mean in mean_accuracy(rows):
        wide[mean["model"], mean["scheme"]][MEAN] = mean["value"]
    table = pd.DataFrame.from_dict(wide, orient="index")
    table.index = pd.MultiIndex.from_tuples(wide, names=["model", "scheme"])
    columns = list(dict.fromkeys([column for values in wide.values() for column in values if column != MEAN] + [MEAN]))
    return table.reindex(columns=pd.MultiIndex.from_tuples(columns, names=["task", "metric"]))


def accuracy_table(rows: list[dict]) -> Table:
    """Accuracies in per cent and perplexities; its data are the values of `accuracies` with flat names."""
    table, one = accuracies(rows), rows[0]
    cells = [
        [model, label_of_weights(scheme, one["dtype"]), *(_cell(metric, value) for (_, metric), value in row.items())]
        for (model, scheme), row in table.iterrows()
    ]
    examples = {row["task"]: row["examples"] for row in rows}
    errors = [row["standard_error"] for row in mean_accuracy(rows) if row["standard_error"] is not None]
    caption = (
        f"Zero-shot accuracy by lm-eval {one['lm_eval']}, in per cent, and perplexity. Examples: "
        f"{', '.join(f'{task} {count}' for task, count in examples.items())}."
        + (f" The largest standard error of a mean is {100 * max(errors):.1f} points." if errors else "")
    )
    headers = ["model", "weights", *(f"{task} {metric}" for task, metric in table.columns)]
    data = table.set_axis([f"{task}_{metric}" for task, metric in table.columns], axis="columns").reset_index()
    return Table("figure1", caption, headers, cells, data, names=2)


def _cell(metric: str, value: float) -> str:
    return cell(".4g", value) if metric == "perplexity" else cell(".1f", value, unit=100)


ARTEFACTS = {"figure1": Artefact("Figure 1", ZeroShot, zeroshot_section, PUBLISHED, measured)}
