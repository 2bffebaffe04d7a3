"""The figure of zero-shot accuracy, and the means over the tasks that it shows, from rows."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.models.names import distinct_names
from outliers.quantization.schemes import BASELINE, SCHEMES
from outliers.report.style import GREY, bare, parameters_axis
from outliers.report.sweep_figures import STYLES

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
DODGE = 1.035  # factor between neighbours of one model, so that their error bars stand side by side


def accuracy_by_size(rows: list[dict]) -> Figure:
    """Mean zero-shot accuracy in per cent against parameters, a line a scheme and architecture.

    Error bars are one standard error of the mean, absent where it is not known. The dotted line is the mean accuracy
    of guesses.
    """
    means = mean_accuracy(rows)
    schemes = [scheme for scheme in STYLES if any(mean["scheme"] == scheme for mean in means)]
    figure = Figure(figsize=(4.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, scheme in enumerate(schemes):
        for architecture in sorted({mean["architecture"] for mean in means if mean["scheme"] == scheme}):
            line = [mean for mean in means if (mean["scheme"], mean["architecture"]) == (scheme, architecture)]
            _plot(axes, line, scheme, DODGE ** (place - (len(schemes) - 1) / 2))
    chance = mean_chance(rows)
    if chance is not None:
        axes.axhline(100 * chance, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(
            "chance", (1, 100 * chance), (3, 0), ("axes fraction", "data"), "offset points", fontsize=7, va="center"
        )
    parameters_axis(axes)
    axes.set_ylabel("mean zero-shot accuracy (%)")
    names = {BASELINE: f"{rows[0]['dtype']}, not quantized"}
    handles = {container.get_label(): container for container in axes.containers}
    figure.legend(
        [handles[scheme] for scheme in schemes],
        [names.get(scheme, scheme) for scheme in schemes],
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    bare(axes)
    return figure


def _plot(axes: Axes, means: list[dict], scheme: str, shift: float) -> None:
    """The means of one line, without their error bars if the error of one is not known."""
    means = sorted(means, key=lambda mean: mean["parameters"])
    errors = [mean["standard_error"] for mean in means]
    color, marker, line = STYLES[scheme]
    axes.errorbar(
        [mean["parameters"] * shift for mean in means],
        [100 * mean["value"] for mean in means],
        None if None in errors else [100 * error for error in errors],
        color=color,
        marker=marker,
        linestyle=line,
        fillstyle="full" if SCHEMES[scheme].outlier_threshold is None else "none",  # hollow: with decomposition
        markersize=5,
        linewidth=1,
        elinewidth=0.7,
        capsize=2,
        label=scheme,
    )


def mean_accuracy(rows: list[dict]) -> list[dict]:
    """The mean over the tasks of the accuracy of each model and scheme that was measured on all of them.

    standard_error is that of the mean, of tasks with examples of their own; None where a task has none.
    """
    accuracies: dict[tuple, dict] = {}
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows)
    for row in rows:
        if row["metric"] == f"{PREFIX}acc":
            accuracies.setdefault(place(row, names), {})[row["task"]] = row
    tasks = {task for of_tasks in accuracies.values() for task in of_tasks}
    return [
        {
            "model": model,
            "scheme": scheme,
            **{name: next(iter(of_tasks.values()))[name] for name in ("parameters", "architecture")},
            "value": sum(row["value"] for row in of_tasks.values()) / len(tasks),
            "standard_error": _error_of_mean([row["standard_error"] for row in of_tasks.values()]),
        }
        for (model, scheme), of_tasks in accuracies.items()
        if set(of_tasks) == tasks
    ]


def mean_chance(rows: list[dict]) -> float | None:
    """Mean accuracy of guesses over the tasks of the rows; None where it is not known of one of them."""
    tasks = {row["task"] for row in rows if row["metric"] == f"{PREFIX}acc"}
    return sum(CHANCE[task] for task in tasks) / len(tasks) if tasks and tasks <= set(CHANCE) else None


def place(row: dict, names: dict[tuple, str]) -> tuple[str, str]:
    """What a line of the table and a point of the figure stand for: model and scheme.

    names: of all models, as `outliers.specification.kinds.distinct_names` makes them.
    """
    return names[row["model"], row.get("checkpoint")], row["scheme"]


def _error_of_mean(errors: list[float | None]) -> float | None:
    return None if None in errors else math.hypot(*errors) / len(errors)
