"""Figure 1 of the paper: zero-shot accuracy by task, and its mean over the tasks by model size."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.models.names import distinct_names
from outliers.quantization.schemes import BASELINE
from outliers.report.paper import BLOG, Artefact, Key, Published, grid, key_of
from outliers.report.section import Drawing, Section, Table
from outliers.report.style import GREY, bare, parameters_axis, scheme_styles
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
# Accuracy of a guess; a task that is not here has none that is known.
CHANCE = {
    "hellaswag": 0.25,
    "piqa": 0.5,
    "piqa-local": 0.5,
    "winogrande": 0.5,
    "lambada_openai": 0.0,
    "lambada-local": 0.0,
}
PREFIX = "zeroshot."
MEAN = ("mean", "acc")
DODGE = 1.035  # factor between neighbours of one model, so that their error bars stand side by side
CAPTION = (
    "Mean zero-shot accuracy by model size; bars: one standard error. Hollow markers: outlier features in 16 bits."
)


def zeroshot_section(rows: list[dict]) -> Section:
    """What zero-shot tasks show."""
    table, drawing = accuracy_table(rows), Drawing("accuracy", CAPTION, accuracy_by_size(rows))
    return Section("Zero-shot accuracy", rows, table.printed, [table], [drawing])


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
    for place, row in _placed(rows):
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
        [model, _label(scheme, one["dtype"]), *(_cell(metric, value) for (_, metric), value in row.items())]
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


def _label(scheme: str, dtype: str) -> str:
    return f"{dtype}, not quantized" if scheme == BASELINE else scheme


def _cell(metric: str, value: float) -> str:
    if pd.isna(value):
        return "-"
    return f"{value:.4g}" if metric == "perplexity" else f"{100 * value:.1f}"


def mean_accuracy(rows: list[dict]) -> list[dict]:
    """The mean over the tasks of the accuracy of each model and scheme that was measured on all of them.

    standard_error is that of the mean, of tasks with examples of their own; None where a task has none.
    """
    found: dict[tuple, dict] = {}
    for place, row in _placed(rows):
        if row["metric"] == f"{PREFIX}acc":
            found.setdefault(place, {})[row["task"]] = row
    tasks = {task for of_tasks in found.values() for task in of_tasks}
    return [
        {
            "model": model,
            "scheme": scheme,
            **{name: next(iter(of_tasks.values())).get(name) for name in ("parameters", "architecture", "alpha")},
            "value": sum(row["value"] for row in of_tasks.values()) / len(tasks),
            "standard_error": _error_of_mean([row["standard_error"] for row in of_tasks.values()]),
        }
        for (model, scheme), of_tasks in found.items()
        if set(of_tasks) == tasks
    ]


def _placed(rows: list[dict]) -> list[tuple[tuple[str, str], dict]]:
    """Each row with what a line of the table and a point of the figure stand for: model and scheme."""
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows)
    return [((names[row["model"], row.get("checkpoint")], row["scheme"]), row) for row in rows]


def mean_chance(rows: list[dict]) -> float | None:
    """Mean accuracy of guesses over the tasks of the rows; None where it is not known of one of them."""
    tasks = {row["task"] for row in rows if row["metric"] == f"{PREFIX}acc"}
    return sum(CHANCE[task] for task in tasks) / len(tasks) if tasks and tasks <= set(CHANCE) else None


def _error_of_mean(errors: list[float | None]) -> float | None:
    return None if None in errors else math.hypot(*errors) / len(errors)


def accuracy_by_size(rows: list[dict]) -> Figure:
    """Mean zero-shot accuracy in per cent against parameters, a line a scheme and architecture.

    Error bars are one standard error of the mean, absent where it is not known. The dotted line is the mean accuracy
    of guesses.
    """
    means = mean_accuracy(rows)
    styles = scheme_styles(means)
    figure = Figure(figsize=(4.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, (scheme, style) in enumerate(styles.items()):
        for architecture in sorted({mean["architecture"] for mean in means if mean["scheme"] == scheme}):
            line = [mean for mean in means if (mean["scheme"], mean["architecture"]) == (scheme, architecture)]
            _plot(axes, line, style, DODGE ** (place - (len(styles) - 1) / 2))
    chance = mean_chance(rows)
    if chance is not None:
        axes.axhline(100 * chance, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(
            "chance", (1, 100 * chance), (3, 0), ("axes fraction", "data"), "offset points", fontsize=7, va="center"
        )
    parameters_axis(axes)
    axes.set_ylabel("mean zero-shot accuracy (%)")
    handles = {container.get_label(): container for container in axes.containers}
    figure.legend(
        [handles[scheme] for scheme in styles],
        [_label(scheme, rows[0]["dtype"]) for scheme in styles],
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    bare(axes)
    return figure


def _plot(axes: Axes, means: list[dict], style: dict, shift: float) -> None:
    """The means of one line, without their error bars if the error of one is not known."""
    means = sorted(means, key=lambda mean: mean["parameters"])
    errors = [mean["standard_error"] for mean in means]
    axes.errorbar(
        [mean["parameters"] * shift for mean in means],
        [100 * mean["value"] for mean in means],
        None if None in errors else [100 * error for error in errors],
        elinewidth=0.7,
        capsize=2,
        **style,
    )


ARTEFACTS = {"figure1": Artefact("Figure 1", ZeroShot, zeroshot_section, PUBLISHED, measured)}
