"""Figure 1 of the paper: mean zero-shot accuracy by model size."""

import math

from matplotlib.axes import Axes

from outliers.models.names import distinct_names
from outliers.quantization.schemes import BASELINE
from outliers.show.axes import beside, parameters_axis
from outliers.show.legends import explained, scheme_legend, scheme_styles
from outliers.show.style import GREY, figure_function, panels_of
from outliers.show.value import Rows, records

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


def label_of_weights(scheme: str, dtype: str) -> str:
    return f"{dtype}, not quantized" if scheme == BASELINE else scheme


def mean_accuracy(rows: list[dict]) -> list[dict]:
    """The mean over the tasks of the accuracy of each model and scheme that was measured on all of them.

    standard_error is that of the mean, of tasks with examples of their own; None where a task has none.
    """
    accuracies: dict[tuple, dict] = {}
    for place, row in placed(rows):
        if row["metric"] == f"{PREFIX}acc":
            accuracies.setdefault(place, {})[row["task"]] = row
    tasks = {task for by_task in accuracies.values() for task in by_task}
    return [
        {
            "model": model,
            "scheme": scheme,
            **{name: next(iter(by_task.values())).get(name) for name in ("parameters", "architecture", "alpha")},
            "value": sum(row["value"] for row in by_task.values()) / len(tasks),
            "standard_error": None if None in errors else math.hypot(*errors) / len(errors),
        }
        for (model, scheme), by_task in accuracies.items()
        for errors in [[row["standard_error"] for row in by_task.values()]]
        if set(by_task) == tasks
    ]


def placed(rows: list[dict]) -> list[tuple[tuple[str, str], dict]]:
    """Each row with what a line of the table and a point of the figure stand for: model and scheme."""
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows)
    return [((names[row["model"], row.get("checkpoint")], row["scheme"]), row) for row in rows]


def mean_chance(rows: list[dict]) -> float | None:
    """Mean accuracy of guesses over the tasks of the rows; None where it is not known of one of them."""
    tasks = {row["task"] for row in rows if row["metric"] == f"{PREFIX}acc"}
    return sum(CHANCE[task] for task in tasks) / len(tasks) if tasks and tasks <= set(CHANCE) else None


@figure_function
def accuracy_by_size(rows: Rows, *, ax: Axes | None = None) -> Axes:
    """Figure 1 of the paper: mean zero-shot accuracy in per cent against parameters, a line a scheme and architecture.

    Error bars are one standard error of the mean, absent where it is not known. The dotted line is the mean accuracy
    of guesses.

    Example:
        >>> axes = outliers.plot.accuracy_by_size(outliers.frame("results/kept/pocket/figure1"))

    Args:
        rows: of zero-shot tasks.
    """
    rows = records(rows)
    means = mean_accuracy(rows)
    styles = scheme_styles(means)
    axes = panels_of(ax, 1, 1, (5.6, 3.2)).item()
    for place, (scheme, style) in enumerate(styles.items()):
        for architecture in sorted({mean["architecture"] for mean in means if mean["scheme"] == scheme}):
            line = [mean for mean in means if (mean["scheme"], mean["architecture"]) == (scheme, architecture)]
            _plot(axes, line, style, DODGE ** (place - (len(styles) - 1) / 2))
    chance = mean_chance(rows)
    if chance is not None:
        axes.axhline(100 * chance, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
        beside(axes, "chance", 100 * chance)
    parameters_axis(axes)
    axes.set_ylabel("mean zero-shot accuracy (%)")
    drawn = {container.get_label(): container for container in axes.containers}
    entries = {label_of_weights(scheme, rows[0]["dtype"]): drawn[scheme] for scheme in styles}
    bars = "± 1 standard error" if any(mean["standard_error"] is not None for mean in means) else ""
    scheme_legend(ax, axes, entries, explained((mean["alpha"] for mean in means), bars))
    return axes


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
