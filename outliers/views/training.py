"""Cost of training in int8: models by recipe, compared with training in 16 bits."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import pandas as pd

from outliers.models.names import short_name
from outliers.quantization.schemes import BASELINE
from outliers.show.claims import Claim, say
from outliers.show.section import Finding
from outliers.show.tables import MISSING, Table, cell, with_interval
from outliers.show.value import Mean, grouped, mean, ratio
from outliers.show.words import percent
from outliers.views.causes import of_runs, trained

RECIPE_PARTS = {"ffn": "FFN", "linear": "linear", "attention": "attention"}  # part of a recipe: its name in tables
EXACT = f"perplexity.{BASELINE}"
HEADERS = ["PPL", "over 16 bits (%)", "PPL, float32", "over 16 bits (%)"]


class RecipeResult(NamedTuple):
    """The final values of the runs of one recipe.

    int8: the parts in int8, or "16 bits". decomposition: share of features in 16 bits, as printed. values: final
    perplexity by seed. perplexity, exact: means with int8 products, and of the same weights with float32 products.
    increase, exact_increase: ratios to the run in 16 bits of the same model, seed by seed.
    """

    run: str
    model: str
    parameters: int
    int8: str
    decomposition: str
    values: dict[int, float]
    perplexity: Mean
    increase: Mean | None
    exact: Mean
    exact_increase: Mean | None

    @property
    def key(self) -> tuple[str, str]:
        return self.int8, self.decomposition


def settings(rows: list[dict]) -> list[RecipeResult]:
    """Return the final values of each run, in the order of the rows."""
    models = trained(rows)
    values, exact = of_runs(models, "perplexity"), of_runs(models, EXACT)
    runs = models.drop_duplicates("run").set_index("run")
    plain = {fields["model"]: run for run, fields in reversed(list(runs.iterrows())) if not fields["int8"]}

    def over_16_bits(values_of_runs: dict[str, dict], run: str) -> Mean | None:
        other = plain.get(runs.loc[run, "model"])
        return None if other in (None, run) else ratio(values_of_runs[run], values_of_runs[other])

    return [
        RecipeResult(
            run,
            short_name(fields["model"]),
            int(fields["parameters"]),
            ", ".join(name for part, name in RECIPE_PARTS.items() if part in fields["int8"]) or "16 bits",
            f"{100 * fields['decomposition']:g} %",
            values[run],
            mean(list(values[run].values())),
            over_16_bits(values, run),
            mean(list(exact[run].values())),
            over_16_bits(exact, run),
        )
        for run, fields in runs.iterrows()
    ]


def int8_table(name: str, caption: str, ends: Sequence[RecipeResult], published: dict[str, dict]) -> Table:
    """Make a table with one row per setting. published: further columns, with values by the keys of settings."""
    cells = [
        [
            setting.model,
            *("yes" if part in setting.int8 else "" for part in RECIPE_PARTS.values()),
            setting.decomposition,
            *perplexity_cells(setting),
            *(column.get(setting.key, MISSING) for column in published.values()),
        ]
        for setting in ends
    ]
    headers = ["Model", "FFN", "Linear", "Attention", "Decomp", *HEADERS, *published]
    return Table(name, caption, headers, cells, pd.DataFrame(map(setting_row, ends)), texts=5)


def perplexity_cells(setting: RecipeResult) -> list[str]:
    """Format both perplexities of a setting, each with its increase over 16 bits."""
    pairs = ((setting.perplexity, setting.increase), (setting.exact, setting.exact_increase))
    return [text for ppl, more in pairs for text in (cell(".2f", ppl.value, ppl.reach), _with_interval(more))]


def _with_interval(more: Mean | None) -> str:
    return MISSING if more is None else with_interval(signed_increase, more.value, *(more.interval or ()))


def signed_increase(ratio: float) -> str:
    """Write the increase that a ratio stands for, in per cent with its sign."""
    return f"{100 * (ratio - 1):+z.1f}"


def setting_row(setting: RecipeResult) -> dict:
    """Return a setting as a row of the CSV file."""
    row = {name: getattr(setting, name) for name in ("run", "model", "parameters", "int8", "decomposition")}
    for name in ("perplexity", "exact"):
        value = getattr(setting, name)
        row |= {"seeds": value.seeds, name: value.value, f"{name}_reach": value.reach}
    for name in ("increase", "exact_increase"):
        value = getattr(setting, name)
        numbers = (None, None, None) if value is None else (value.value, *(value.interval or (None, None)))
        columns = (name, f"{name}_low", f"{name}_high")
        row |= {column: number and number - 1 for column, number in zip(columns, numbers, strict=True)}
    return row


HELD = 0.02  # int8 matches 16 bits if it costs less than this share of perplexity
PROJECTIONS, ATTENTION = "FFN, linear", "FFN, linear, attention"
PLAIN = "0 %"


OF_PROJECTIONS = Claim(
    "{at}",
    "Training {model} with all projections in int8 changes its final perplexity by {change} relative to 16 bits: "
    "{within}.",
)
FEED_FORWARD = Claim("{at}", "With the feed-forward projections alone in int8 the change is {change}.")
FREE = Claim("{at}", "Feed-forward projections alone in int8 have no measurable cost: {change}.")
SAVED = Claim("{at}", "Keeping {shares:listed} of features in 16 bits reduces the change to {changes:listed}.")
NOT_SAVED = Claim("{at}", "Keeping {shares:listed} of features in 16 bits has no measurable benefit.")
ATTENDED = Claim(
    "{at}", "With attention in int8 too, and {shares:listed} of features in 16 bits, the change is {changes:listed}."
)
LEFT = Claim("{at}", "Of the {change} of '{run}', {left} remains when its final weights are evaluated in float32.")


def int8_findings(settings: Sequence[RecipeResult], at: str) -> list[Finding]:
    """State for each model the cost of training in int8.

    That is the cost of all projections and of the feed-forward ones alone, the shares of features in 16 bits that
    reduce it, the cost with attention in int8 too, and the cost that remains when the trained weights are used in
    float32.
    """
    compared = grouped((run for run in settings if run.increase is not None), attrgetter("model")).values()
    return [finding for runs in compared for finding in _of_model(runs, at)]


def _of_model(runs: list[RecipeResult], at: str) -> list[Finding]:
    whole, forward = ([run for run in runs if run.key == (parts, PLAIN)] for parts in (PROJECTIONS, "FFN"))
    decomposed = [run for run in runs if run.int8 == PROJECTIONS and run.decomposition != PLAIN]
    saving = [
        run
        for run in decomposed
        for plain in whole
        if (change := ratio(run.values, plain.values)) and change.differs_from_one and change.value < 1
    ]
    is_free = [run for run in forward if not _is_cost(run.increase) and run.increase.interval is not None]
    left = [run for run in whole if run.exact_increase is not None and _is_cost(run.increase)]
    claims = (
        (OF_PROJECTIONS, whole),
        (FREE if is_free else FEED_FORWARD, forward),
        (SAVED if saving else NOT_SAVED, (saving or decomposed) if whole else []),
        (ATTENDED, [run for run in runs if run.int8 == ATTENTION]),
        (LEFT, left),
    )
    return [finding for claim, chosen in claims for finding in say(claim, _first_with_changes(chosen), at=at)]


def _first_with_changes(runs: Sequence[RecipeResult]) -> list[dict]:
    """Return a list with the fields of the first run, with `shares` and `changes` of all runs; [] without a run."""
    shares, changes = [run.decomposition for run in runs], [_percent(run.increase) for run in runs]
    return [
        run._asdict()
        | {"shares": shares, "changes": changes, "change": changes[0], "within": _within(run.increase)}
        | {"left": run.exact_increase and _percent(run.exact_increase)}
        for run in runs[:1]
    ]


def _percent(increase: Mean) -> str:
    """Write the change that a ratio stands for, in per cent with its interval: +0.4 % [−0.2, +1.0]."""
    ends = ", ".join(percent(end - 1, unit="") for end in increase.interval or ())
    return percent(increase.value - 1) + (f" [{ends}]" if ends else "")


def _within(increase: Mean) -> str:
    limit = f"{100 * HELD:.0f} %"
    if increase.interval is None:
        return f"{'within' if abs(increase.value - 1) < HELD else 'beyond'} {limit} in the one seed trained"
    low, high = increase.interval
    whole = f", as is the whole interval over {increase.seeds} seeds"
    if max(abs(low - 1), abs(high - 1)) < HELD:
        return f"within {limit}{whole}"
    if low - 1 > HELD or 1 - high > HELD:
        return f"beyond {limit}{whole}"
    return f"{increase.seeds} seeds do not resolve whether this is within {limit}"


def _is_cost(increase: Mean) -> bool:
    return increase.differs_from_one and increase.value > 1
