"""Figure 1 of the paper: zero-shot accuracy by task, and its mean over tasks by model size."""

import math
from collections.abc import Sequence
from operator import itemgetter

import pandas as pd
from matplotlib.axes import Axes

from outliers.models.names import names_by_row
from outliers.quantization.schemes import BASELINE
from outliers.show.axes import label_right, parameters_axis
from outliers.show.claims import Claim, say, say_each
from outliers.show.legends import explained, variant_legend, variant_styles
from outliers.show.section import Context, Drawing, Finding, Section
from outliers.show.style import GREY, figure_function, panels_of
from outliers.show.tables import MISSING, Table, cell
from outliers.show.value import RowsOrFrame, Value, averaged, comparable_rows, exact, grouped, value_of
from outliers.show.words import count, listed

# Accuracy of guessing; unknown for tasks that are not listed.
CHANCE = {
    "hellaswag": 0.25,
    "piqa": 0.5,
    "piqa-local": 0.5,
    "winogrande": 0.5,
    "lambada_openai": 0.0,
    "lambada-local": 0.0,
}
PREFIX = "zeroshot."
DODGE = 1.035  # factor along x between schemes of one model, which keeps their error bars apart


def label_of_weights(variant: str, dtype: str) -> str:
    """Return the label of a variant: its name, or "float16, not quantized"."""
    return f"{dtype}, not quantized" if variant == BASELINE else variant


def mean_accuracy(rows: list[dict]) -> list[dict]:
    """Return the mean accuracy over tasks of each model and variant that was measured on all of them.

    standard_error: of the mean over tasks, which have independent examples; None if a task has none. paired_error:
    standard error of the difference from the unquantized model on the same examples. by_task: the value of each task.
    """
    accuracies = [row for row in named(rows) if row["metric"] == "acc"]
    tasks, means = {row["task"] for row in accuracies}, []
    for ours in grouped(accuracies, itemgetter("model", "variant")).values():
        errors = [row["standard_error"] for row in ours]
        if {row["task"] for row in ours} == tasks:
            about = {name: ours[0].get(name) for name in ("model", "variant", "parameters", "architecture", "alpha")}
            error = None if None in errors else math.hypot(*errors) / len(errors)
            paired = [row["paired_error"] for row in ours if "paired_error" in row]
            by_task = {row["task"]: value_of(row)._replace(deviation=0.0) for row in ours}
            mean = {**about, "value": sum(row["value"] for row in ours) / len(ours), "standard_error": error}
            if len(paired) == len(ours):
                mean["paired_error"] = math.hypot(*paired) / len(paired)
            means.append(mean | {"by_task": by_task})
    return means


def named(rows: list[dict]) -> list[dict]:
    """Replace the models and metrics of rows by their names in tables."""
    names = zip(names_by_row(rows), rows, strict=True)
    return [row | {"model": name, "metric": row["metric"].removeprefix(PREFIX)} for name, row in names]


def mean_chance(rows: list[dict]) -> float | None:
    """Return the mean accuracy of guessing over the tasks of the rows; None if it is unknown for one of them."""
    tasks = {row["task"] for row in rows if row["metric"] == f"{PREFIX}acc"}
    return sum(CHANCE[task] for task in tasks) / len(tasks) if tasks and tasks <= set(CHANCE) else None


@figure_function
def accuracy_by_size(rows: RowsOrFrame, *, ax: Axes | None = None) -> Axes:
    """Draw Figure 1 of the paper: mean zero-shot accuracy in per cent against parameters.

    Each variant and architecture has a line. Error bars are one standard error of the mean, if known. The dotted line
    is the mean accuracy of guessing.

    Example:
        >>> axes = outliers.plot.accuracy_by_size(outliers.frame("results/kept/pocket/figure1"))

    Args:
        rows: of zero-shot tasks.
    """
    rows = comparable_rows(rows)
    means = mean_accuracy(rows)
    styles = variant_styles(means)
    axes = panels_of(ax, 1, 1, (5.6, 3.2)).item()
    for place, (variant, style) in enumerate(styles.items()):
        for architecture in sorted({mean["architecture"] for mean in means if mean["variant"] == variant}):
            line = [mean for mean in means if (mean["variant"], mean["architecture"]) == (variant, architecture)]
            _plot(axes, line, style, DODGE ** (place - (len(styles) - 1) / 2))
    chance = mean_chance(rows)
    if chance is not None:
        axes.axhline(100 * chance, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
        label_right(axes, "chance", 100 * chance)
    parameters_axis(axes)
    axes.set_ylabel("mean zero-shot accuracy (%)")
    drawn = {container.get_label(): container for container in axes.containers}
    entries = {label_of_weights(variant, rows[0]["dtype"]): drawn[variant] for variant in styles}
    bars = "± 1 standard error" if any(mean["standard_error"] is not None for mean in means) else ""
    variant_legend(ax, axes, entries, explained((mean["alpha"] for mean in means), bars))
    return axes


def _plot(axes: Axes, means: list[dict], style: dict, shift: float) -> None:
    """Plot the means of one line, without error bars unless all errors are known."""
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


def zeroshot_section(rows: list[dict], _context: Context | None = None) -> Section:
    means, caption = mean_accuracy(rows), "Mean zero-shot accuracy by model size."
    if any(mean["alpha"] is not None for mean in means):
        caption += " Hollow markers: outlier features in 16 bits."
    if any(mean["standard_error"] is not None for mean in means):
        caption += " Bars: one standard error."
    drawing = Drawing.of("accuracy", caption, accuracy_by_size(rows))
    findings = zeroshot_findings(means, mean_chance(rows))
    return Section("Zero-shot accuracy", rows, [accuracy_table(rows)], [drawing], findings=findings)


def accuracies(rows: list[dict], values: str = "value") -> pd.DataFrame:
    """Return one row per model and variant (index), in the order of the rows, with columns (task, metric).

    The last column is the mean accuracy over tasks, NaN if one of them was not measured. values: the field to show, or
    "cell" for its text in a table.
    """
    means = [mean | {"task": "mean", "metric": "acc"} for mean in mean_accuracy(rows)]
    every = [row | {"cell": _cell(row)} for row in named(rows) + means]
    frame, place, columns = pd.DataFrame(every), ["model", "variant"], ["task", "metric"]
    order = dict.fromkeys([*frame[columns].itertuples(index=False, name=None), ("mean", "acc")])
    return frame.pivot(index=place, columns=columns, values=values).reindex(
        index=pd.MultiIndex.from_frame(frame[place].drop_duplicates()),
        columns=pd.MultiIndex.from_tuples(order, names=columns),
    )


def accuracy_table(rows: list[dict]) -> Table:
    """Make a table of accuracies in per cent and perplexities, with the values of `accuracies` as its data."""
    table, run = accuracies(rows), rows[0]
    cells = [
        [model, label_of_weights(variant, run["dtype"]), *row]
        for (model, variant), *row in accuracies(rows, "cell").fillna(MISSING).itertuples(name=None)
    ]
    examples = {row["task"]: row["examples"] for row in rows}
    errors = [row["standard_error"] for row in mean_accuracy(rows) if row["standard_error"] is not None]
    caption = (
        f"Zero-shot accuracy by lm-eval {run['lm_eval']}, in per cent, and perplexity. Examples: "
        f"{', '.join(f'{task} {count}' for task, count in examples.items())}."
        + (f" The largest standard error of a mean is {100 * max(errors):.1f} points." if errors else "")
        + PAIRED * any("paired_error" in row for row in rows)
    )
    headers = ["model", "weights", *(f"{task} {metric}" for task, metric in table.columns)]
    data = table.set_axis([f"{task}_{metric}" for task, metric in table.columns], axis="columns").reset_index()
    baseline = label_of_weights(BASELINE, run["dtype"])
    return Table("figure1", caption, headers, cells, data, texts=2, baseline=baseline)


PAIRED = " ±: standard error over the examples of the difference from the unquantized model, paired."


def _cell(row: dict) -> str:
    """Format the value of a row, with its error if that is known question by question."""
    bar = row.get("paired_error", row.get("standard_error") if "unit_sums" in row else None)
    form, unit = (".4g", 1) if row["metric"] == "perplexity" else (".1f", 100)
    return cell(form, row["value"], bar, unit)


LOWER = Claim("figure1", "{variant} lowers the mean zero-shot accuracy of {model} from {from} to {to}.")
NONE_LOWER = Claim(
    "figure1",
    "No scheme measurably lowers zero-shot accuracy; the largest change is that of {model} under {variant}, from "
    "{from} to {to}.",
    of_every=True,
)
GUESSES = Claim(
    "figure1", "{which} {guess:does|do} not measurably exceed chance ({chance:.1%}), even without quantization."
)


def zeroshot_findings(means: Sequence[dict], chance: float | None) -> list[Finding]:
    """State which schemes lose accuracy beyond the standard error of the difference, and which models merely guess.

    means: as `mean_accuracy` returns them. chance: mean accuracy of guessing, None if unknown.
    """
    known = [mean for mean in means if mean["standard_error"] is not None]
    unquantized = {mean["model"]: mean for mean in known if mean["variant"] == BASELINE}
    pairs = [(unquantized.get(mean["model"]), mean) for mean in known if mean["variant"] != BASELINE]
    pairs = sorted((pair for pair in pairs if pair[0]), key=lambda pair: pair[1]["value"] - pair[0]["value"])
    lower = [pair for pair in pairs if _is_lower(*pair)][:3]
    stated = [after | {"from": _percent(before), "to": _percent(after)} for before, after in lower or pairs[:1]]
    findings = say_each(LOWER if lower else NONE_LOWER, stated)
    levels = {mean["model"]: Value(mean["value"], 0.0, mean["standard_error"]) for mean in unquantized.values()}
    guess = [model for model, level in levels.items() if not level.is_above(exact(chance or 0))]
    if chance is None or not guess:
        return findings
    which = f"{count(len(guess)).capitalize()} of {count(len(unquantized))} models" if len(guess) > 3 else listed(guess)
    return [*findings, *say(GUESSES, [{"guess": guess, "which": which, "chance": chance}])]


def _is_lower(before: dict, after: dict) -> bool:
    """Return whether the mean accuracy falls by more than the standard error of the differences, paired by question."""
    differences = [value.minus(after["by_task"][task]) for task, value in before["by_task"].items()]
    return averaged(differences, 0.0).is_above(exact(0))


def _percent(mean: dict) -> str:
    return f"{cell('.1f', mean['value'], mean['standard_error'], 100).replace('±', ' ± ')} %"
