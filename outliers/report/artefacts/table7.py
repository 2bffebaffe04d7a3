"""Tables 7, 9 and 10 of the paper: training and fine-tuning in int8, ours by perplexity beside 16 bits."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from outliers.models.names import short_name
from outliers.plot.axes import count_label
from outliers.plot.published import TABLE7
from outliers.plot.training import trained
from outliers.quantization.schemes import BASELINE
from outliers.report.analysis import Mean, Ratio, mean, of_runs, ratio
from outliers.report.paper import Artefact, Key, Published, grid
from outliers.report.section import Finding, Section, printed
from outliers.report.tables import MISSING, Table, cell, seeds_note, with_interval
from outliers.report.words import listed, percent
from outliers.specification.recipe import Training

PARTS = {"ffn": "FFN", "linear": "linear", "attention": "attention"}  # of a recipe: as keys and sentences have them
EXACT = f"perplexity.{BASELINE}"
# RoBERTa-large, fine-tuned on each task of GLUE.
TASKS = ["MNLI", "QNLI", "QQP", "RTE", "SST-2", "MRPC", "CoLA", "STS-B", "mean"]
GLUE = "mean"
TABLE10 = {
    ("16 bits", "0 %"): (90.4, 94.9, 92.2, 84.5, 96.4, 90.1, 67.4, 93.0, 88.6),
    ("FFN", "0 %"): (90.2, 94.7, 92.3, 85.4, 96.4, 91.0, 68.6, 91.9, 88.8),
    ("FFN, linear", "0 %"): (90.2, 94.4, 92.2, 84.1, 96.2, 89.7, 63.6, 91.6, 87.7),
    ("FFN, linear", "1 %"): (90.0, 94.6, 92.2, 83.0, 96.2, 89.7, 65.8, 91.8, 87.9),
    ("FFN, linear", "2 %"): (90.0, 94.5, 92.2, 85.9, 96.7, 90.4, 68.0, 91.9, 88.7),
    ("FFN, linear", "3 %"): (90.0, 94.6, 92.2, 86.3, 96.4, 90.2, 68.3, 91.8, 88.7),
}
TABLE9 = {
    "32-bit Baseline": (90.4, 94.9, 92.2, 84.5, 96.4, 90.1, 67.4, 93.0, 88.61),
    "32-bit Replication": (90.3, 94.8, 92.3, 85.4, 96.6, 90.4, 68.8, 92.0, 88.83),
    "Q-BERT": (87.8, 93.0, 90.6, 84.7, 94.8, 88.2, 65.1, 91.1, 86.91),
    "Q8BERT": (85.6, 93.0, 90.1, 84.8, 94.7, 89.7, 65.0, 91.1, 86.75),
    "PSQ": (89.9, 94.5, 92.0, 86.8, 96.2, 90.4, 67.5, 91.9, 88.65),
    "Vector-wise": (90.2, 94.7, 92.3, 85.4, 96.4, 91.0, 68.6, 91.9, 88.81),
}
# Of Table 9 what our runs are; the paper prints for vector-wise what Table 10 has for FFN.
METHODS = {"32-bit Baseline": "16 bits", "Vector-wise": "FFN"}
PUBLISHED = Published("LLM.int8(), Table 7", ("model", "int8", "decomposition"), TABLE7, "{:.2f}")
OF_TABLE10 = Published(
    "LLM.int8(), Table 10, scores of GLUE tasks",
    ("model", "int8", "decomposition", "task"),
    grid({("roberta-large", *setting): values for setting, values in TABLE10.items()}, TASKS),
)
OF_TABLE9 = Published("LLM.int8(), Table 9, scores of GLUE tasks", ("method", "task"), grid(TABLE9, TASKS))
HEADERS = ["PPL", "over 16 bits (%)", "PPL, float32", "over 16 bits (%)"]
CAPTION = (
    "What is in int8 while a model trains, and the share of features that stays in 16 bits; the perplexity of the "
    "model as it was trained, with its int8 products, and of the same weights in float32, each with what it adds to "
    "that of the run in 16 bits, in per cent. ± is half of a 95 % interval, and brackets are such intervals."
)
PAPERS_INCREASE = "what it adds to the perplexity of the paper's models, in per cent."
PAPERS_GLUE = "the mean score of RoBERTa-large on GLUE, as published; another metric of another model."
METHODS_CAPTION = (
    "Perplexity of {}, ours, beside the mean scores of RoBERTa-large on GLUE, as published. Our first row trains in 16 "
    "bits; vector-wise is FFN in int8, whose scores the paper prints here. The other methods were not run."
)


class Setting(NamedTuple):
    """What runs of one recipe end with.

    int8: its parts, or "16 bits". decomposition: the share of features that is not in int8, as printed. values: by
    seed. increase, exact_increase: beside the run in 16 bits of the same model, seed by seed.
    """

    run: str
    model: str
    parameters: int
    int8: str
    decomposition: str
    values: dict[int, float]
    perplexity: Mean
    increase: Ratio | None
    exact: Mean
    exact_increase: Ratio | None

    @property
    def key(self) -> Key:
        """As tables name it."""
        return self.int8, self.decomposition


def settings(rows: list[dict]) -> list[Setting]:
    """What each run ends with, in the order of the rows."""
    models = trained(rows)
    values, exact = of_runs(models, "perplexity"), of_runs(models, EXACT)
    runs = models.drop_duplicates("run").set_index("run")
    plain = {of_run["model"]: run for run, of_run in reversed(list(runs.iterrows())) if not of_run["int8"]}

    def beside(of_all: dict[str, dict], run: str) -> Ratio | None:
        other = plain.get(runs.loc[run, "model"])
        return None if other in (None, run) else ratio(of_all[run], of_all[other])

    return [
        Setting(
            run,
            short_name(of_run["model"]),
            int(of_run["parameters"]),
            ", ".join(name for part, name in PARTS.items() if part in of_run["int8"]) or "16 bits",
            f"{100 * of_run['decomposition']:g} %",
            values[run],
            mean(list(values[run].values())),
            beside(values, run),
            mean(list(exact[run].values())),
            beside(exact, run),
        )
        for run, of_run in runs.iterrows()
    ]


def table7_section(rows: list[dict]) -> Section:
    """Training in int8 from the first step."""
    plain = {size: ppl for (size, int8, _), ppl in TABLE7.items() if int8 == "16 bits"}
    columns: dict[str, dict[Key, str]] = {f"{size} (%)": {} for size in plain}
    for (size, *setting), ppl in TABLE7.items():
        if setting[0] != "16 bits":
            columns[f"{size} (%)"][tuple(setting)] = _signed(ppl / plain[size])
    return _section(rows, "Training in int8", "table7", columns, f"{CAPTION} Right: {PAPERS_INCREASE}")


def table10_section(rows: list[dict]) -> Section:
    """Fine-tuning in int8."""
    columns = {"GLUE mean": {setting: f"{values[-1]:.1f}" for setting, values in TABLE10.items()}}
    return _section(rows, "Fine-tuning in int8", "table10", columns, f"{CAPTION} Right: {PAPERS_GLUE}")


def _section(rows: list[dict], title: str, name: str, published: dict[str, dict[Key, str]], caption: str) -> Section:
    ends, notes = settings(rows), [seeds_note(trained(rows))]
    tables = [int8_table(name, caption, ends, published)]
    return Section(title, rows, printed(tables, notes), tables, notes=notes, findings=int8_findings(ends, name))


def int8_table(name: str, caption: str, ends: Sequence[Setting], published: dict[str, dict[Key, str]]) -> Table:
    """A row a setting, with the paper's columns and ours; published: further columns, by the keys of settings."""
    cells = [
        [
            one.model,
            *("yes" if part in one.int8.split(", ") else "" for part in PARTS.values()),
            one.decomposition,
            *_measured(one),
            *(column.get(one.key, MISSING) for column in published.values()),
        ]
        for one in ends
    ]
    headers = ["Model", "FFN", "Linear", "Attention", "Decomp", *HEADERS, *published]
    return Table(name, caption, headers, cells, pd.DataFrame(map(_unrounded, ends)), names=5)


def _measured(one: Setting) -> list[str]:
    """Both perplexities, each with what it is beside 16 bits."""
    pairs = ((one.perplexity, one.increase), (one.exact, one.exact_increase))
    return [text for ppl, more in pairs for text in (cell(".2f", ppl.value, ppl.reach), _with_interval(more))]


def _with_interval(more: Ratio | None) -> str:
    return MISSING if more is None else with_interval(_signed, more.value, *(more.interval or ()))


def _signed(ratio: float) -> str:
    """By how many per cent more, as tables have it."""
    return f"{100 * (ratio - 1):+z.1f}"


def _unrounded(one: Setting) -> dict:
    """A row of the CSV file."""
    row = {name: getattr(one, name) for name in ("run", "model", "parameters", "int8", "decomposition")}
    for name in ("perplexity", "exact"):
        value = getattr(one, name)
        row |= {"seeds": value.seeds, name: value.value, f"{name}_reach": value.reach}
    for name in ("increase", "exact_increase"):
        value = getattr(one, name)
        numbers = (None, None, None) if value is None else (value.value, *(value.interval or (None, None)))
        columns = (name, f"{name}_low", f"{name}_high")
        row |= {column: number and number - 1 for column, number in zip(columns, numbers, strict=True)}
    return row


def table9_section(rows: list[dict]) -> Section:
    """Fine-tuning in int8 beside other methods, which only the paper has scores of."""
    plain = {one.int8: one for one in settings(rows) if one.decomposition == "0 %"}
    ours = {method: plain[int8] for method, int8 in METHODS.items() if int8 in plain}
    cells, data = [], []
    for method, values in TABLE9.items():
        one = ours.get(method)
        cells.append([method, *(_measured(one)[:2] if one else ("not run", MISSING)), f"{values[-1]:.2f}"])
        data.append({"method": method, "glue_mean": values[-1], **(_unrounded(one) if one else {})})
    caption = METHODS_CAPTION.format(", ".join(dict.fromkeys(one.model for one in ours.values())))
    tables = [Table("table9", caption, ["Method", *HEADERS[:2], "GLUE mean"], cells, pd.DataFrame(data))]
    notes = [seeds_note(trained(rows))]
    return Section("Fine-tuning in int8, and other methods", rows, printed(tables, notes), tables, notes=notes)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Perplexities by the keys of Table 7."""
    return {(count_label(one.parameters), *one.key): one.perplexity.value for one in settings(rows)}


def _of_other_metrics(_rows: list[dict]) -> dict[Key, float]:
    """Nothing: ours are perplexities, and the paper's are scores of tasks."""
    return {}


# Findings


HELD = 0.02  # int8 holds what 16 bits reach where it costs less of the perplexity
PROJECTIONS, ATTENTION = "FFN, linear", "FFN, linear, attention"
PLAIN = "0 %"


def int8_findings(settings: Sequence[Setting], at: str) -> list[Finding]:
    """Of each model: what all projections cost, what the feed-forward ones do, what decomposition saves; attention."""
    models = dict.fromkeys(one.model for one in settings)
    compared = {
        model: {one.key: one for one in settings if one.model == model and one.increase is not None} for model in models
    }
    parts = (_held, _feed_forward, _decomposed, _attention, _exact)
    return [Finding(sentence, at) for own in compared.values() for part in parts for sentence in part(own)]


def _percent(increase: Ratio) -> str:
    """By how many per cent it is more or less than 1: +0.4 % [−0.2, +1.0]."""
    ends = ", ".join(percent(end - 1).removesuffix(" %") for end in increase.interval or ())
    return percent(increase.value - 1) + (f" [{ends}]" if ends else "")


def _held(settings: dict[tuple, Setting]) -> list[str]:
    """Whether all projections in int8 end within `HELD` of 16 bits."""
    one = settings.get((PROJECTIONS, PLAIN))
    if one is None:
        return []
    end = f"{one.model}, trained with all projections in int8, ends at {_percent(one.increase)} beside 16 bits"
    return [f"{end}: {_within(one.increase)}."]


def _within(increase: Ratio) -> str:
    limit = f"{100 * HELD:.0f} %"
    if increase.interval is None:
        return f"{'within' if abs(increase.value - 1) < HELD else 'beyond'} {limit}, with one seed"
    low, high = increase.interval
    seeds = f"over {increase.seeds} seeds"
    if max(abs(low - 1), abs(high - 1)) < HELD:
        return f"within {limit}, with its interval {seeds}"
    if low - 1 > HELD or 1 - high > HELD:
        return f"beyond {limit}, with its interval {seeds}"
    return f"whether that is within {limit} the scatter {seeds} does not show"


def _feed_forward(settings: dict[tuple, Setting]) -> list[str]:
    one = settings.get(("FFN", PLAIN))
    if one is None:
        return []
    cost = _percent(one.increase)
    if _is_cost(one.increase) or one.increase.interval is None:
        return [f"Feed-forward projections alone in int8 end at {cost}."]
    return [f"That feed-forward projections alone in int8 cost anything could not be shown: {cost}."]


def _decomposed(settings: dict[tuple, Setting]) -> list[str]:
    """Which shares of features in 16 bits save something of the cost of all projections."""
    plain = settings.get((PROJECTIONS, PLAIN))
    others = [one for key, one in settings.items() if key[0] == PROJECTIONS and key[1] != PLAIN]
    if plain is None or not others:
        return []
    left = [(one, ratio(one.values, plain.values)) for one in others]
    saving = [one for one, part in left if part and part.is_shown and part.value < 1]
    shares = listed(one.decomposition for one in saving or others)
    if not saving:
        return [f"That {shares} of features in 16 bits bring this down could not be shown."]
    return [f"{shares} of features in 16 bits bring this down: {listed(_percent(one.increase) for one in saving)}."]


def _attention(settings: dict[tuple, Setting]) -> list[str]:
    """What attention in int8 costs beside the projections alone, with each share of features in 16 bits."""
    attended = [one for key, one in settings.items() if key[0] == ATTENTION]
    if not attended:
        return []
    shares = listed(one.decomposition for one in attended)
    ends = listed(_percent(one.increase) for one in attended)
    return [f"With the products of attention in int8 too and {shares} of features in 16 bits, it ends at {ends}."]


def _exact(settings: dict[tuple, Setting]) -> list[str]:
    """What is left of the cost of all projections where the trained weights are used in float32."""
    one = settings.get((PROJECTIONS, PLAIN))
    if one is None or one.exact_increase is None or not _is_cost(one.increase):
        return []
    cost, left = _percent(one.increase), _percent(one.exact_increase)
    return [f"Of the {cost} of '{one.run}', {left} stay where the weights that it ends with are used in float32."]


def _is_cost(increase: Ratio) -> bool:
    return increase.is_shown and increase.value > 1


ARTEFACTS = {
    "table7": Artefact("Table 7", Training, table7_section, PUBLISHED, measured),
    "table10": Artefact("Table 10", Training, table10_section, OF_TABLE10, _of_other_metrics),
    "table9": Artefact("Table 9", Training, table9_section, OF_TABLE9, _of_other_metrics),
}
