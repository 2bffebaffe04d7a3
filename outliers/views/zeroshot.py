"""Figure 1 of the paper: zero-shot accuracy by task, and its mean over the tasks by model size."""

from collections.abc import Sequence

import pandas as pd

from outliers.plot.zeroshot import PREFIX, accuracy_by_size, label_of_weights, mean_accuracy, mean_chance, placed
from outliers.quantization.schemes import BASELINE
from outliers.show.section import Drawing, Finding, Section
from outliers.show.tables import Table, cell
from outliers.show.value import Value, exact
from outliers.show.words import count, listed

MEAN = ("mean", "acc")
CAPTION = (
    "Mean zero-shot accuracy by model size; bars: one standard error. Hollow markers: outlier features in 16 bits."
)


def zeroshot_section(rows: list[dict]) -> Section:
    """The section of zero-shot tasks."""
    table, drawing = accuracy_table(rows), Drawing.of("accuracy", CAPTION, accuracy_by_size(rows))
    findings = zeroshot_findings(mean_accuracy(rows), mean_chance(rows))
    return Section("Zero-shot accuracy", rows, table.printed, [table], [drawing], findings=findings)


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
    table, run = accuracies(rows), rows[0]
    cells = [
        [model, label_of_weights(scheme, run["dtype"]), *(_cell(metric, value) for (_, metric), value in row.items())]
        for (model, scheme), row in table.iterrows()
    ]
    examples = {row["task"]: row["examples"] for row in rows}
    errors = [row["standard_error"] for row in mean_accuracy(rows) if row["standard_error"] is not None]
    caption = (
        f"Zero-shot accuracy by lm-eval {run['lm_eval']}, in per cent, and perplexity. Examples: "
        f"{', '.join(f'{task} {count}' for task, count in examples.items())}."
        + (f" The largest standard error of a mean is {100 * max(errors):.1f} points." if errors else "")
    )
    headers = ["model", "weights", *(f"{task} {metric}" for task, metric in table.columns)]
    data = table.set_axis([f"{task}_{metric}" for task, metric in table.columns], axis="columns").reset_index()
    return Table("figure1", caption, headers, cells, data, names=2)


def _cell(metric: str, value: float) -> str:
    return cell(".4g", value) if metric == "perplexity" else cell(".1f", value, unit=100)


def zeroshot_findings(means: Sequence[dict], chance: float | None) -> list[Finding]:
    """The schemes that lose accuracy beyond the standard errors, and the models that only guess.

    means: as `mean_accuracy` makes them. chance: mean accuracy of guesses, None where it is not known.
    """
    known = [mean for mean in means if mean["standard_error"] is not None]
    unquantized = {mean["model"]: mean for mean in known if mean["scheme"] == BASELINE}
    quantized = [mean for mean in known if mean["scheme"] != BASELINE and mean["model"] in unquantized]
    sentences = _lost([(unquantized[mean["model"]], mean) for mean in quantized])
    sentences += [] if chance is None else _guesses(list(unquantized.values()), chance)
    return [Finding(sentence, "figure1") for sentence in sentences]


def _lost(pairs: Sequence[tuple[dict, dict]]) -> list[str]:
    """Schemes whose mean accuracy is lower; as if examples were independent, which is careful: they are the same."""
    if not pairs:
        return []
    lower = [(before, after) for before, after in pairs if _accuracy(before).is_above(_accuracy(after))]
    if not lower:
        before, after = min(pairs, key=lambda pair: pair[1]["value"] - pair[0]["value"])
        largest = f"the largest change is that of {after['model']} under {after['scheme']}"
        return [
            f"No scheme measurably lowers zero-shot accuracy; {largest}, from {_percent(before)} to {_percent(after)}."
        ]
    lower.sort(key=lambda pair: pair[1]["value"] - pair[0]["value"])
    return [
        f"{after['scheme']} lowers the mean zero-shot accuracy of {after['model']} from {_percent(before)} to "
        f"{_percent(after)}."
        for before, after in lower[:3]
    ]


def _accuracy(mean: dict) -> Value:
    return Value(mean["value"], mean["standard_error"])


def _percent(mean: dict) -> str:
    return f"{100 * mean['value']:.1f} ± {100 * mean['standard_error']:.1f} %"


def _guesses(means: Sequence[dict], chance: float) -> list[str]:
    """The models that do not do better than guesses beyond their standard errors."""
    guess = [mean["model"] for mean in means if not _accuracy(mean).is_above(exact(chance))]
    if not guess:
        return []
    which = f"{count(len(guess)).capitalize()} of {count(len(means))} models" if len(guess) > 3 else listed(guess)
    verb = "does" if len(guess) == 1 else "do"
    return [f"{which} {verb} not measurably exceed chance ({100 * chance:.1f} %), even without quantization."]
