"""Super weights: single weights on which a model depends, beside their controls."""

from collections.abc import Iterator, Mapping

import pandas as pd
from matplotlib.axes import Axes

from outliers.models.names import short_name
from outliers.runs.stages.super_weights import BESIDE, cost_table
from outliers.show.axes import cost_axis, name_places
from outliers.show.claims import Claim, say, say_each
from outliers.show.legends import legend
from outliers.show.section import Drawing, Finding, Section
from outliers.show.style import color_of, figure_function, panels_of
from outliers.show.tables import MISSING, OVER_TEXT, Table
from outliers.show.value import Value
from outliers.show.words import count, percent

# Treatment: label in the legend, colour, marker, offset from the middle of its candidate.
TREATMENTS = {
    "weight": ("the weight", "vermilion", "o", -0.35),
    "nearest": ("the weights nearest in magnitude", "grey", "x", -0.21),
    "random": ("random weights of equal magnitude", "grey", "x", -0.21),
    "largest": ("the largest weight of its matrix", "black", "^", -0.07),
    "neuron": ("its whole neuron", "blue", "s", 0.07),
    "row": ("its whole row", "green", "D", 0.21),
    "massive": ("massive activation at its mean", "orange", "*", 0.35),
}


@figure_function
def weight_costs(found: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the increase of perplexity with each candidate super weight set to zero, in per cent, beside its controls.

    Example:
        >>> axes = outliers.plot.weight_costs(outliers.super_weights(model, blocks, controls=2))

    Args:
        found: as `outliers.super_weights` returns it.
    """
    rows = controlled(found)
    names = list(dict.fromkeys(rows["candidate"]))
    ((axes,),) = panels_of(ax, 1, 1, (3.4 + 1.1 * len(names), 4.2))
    for treatment, (label, color, marker, offset) in TREATMENTS.items():
        treated = rows[rows["treatment"] == treatment]
        places = [names.index(name) + offset for name in treated["candidate"]]
        style = {"color": color_of(color), "marker": marker, "linestyle": "none", "label": label}
        if places:
            axes.plot(places, 100 * treated["cost"], **style)
    name_places(axes, [weight_name(*place) for place in rows.groupby("candidate", sort=False)["layer"].first().items()])
    for between in range(1, len(names)):
        axes.axvline(between - 0.5, color="0.9", linewidth=0.6)
    cost_axis(axes, list(100 * rows["cost"]))
    legend(ax, axes, axes.get_legend_handles_labels()[0], "right upper")
    return axes


def controlled(costs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of candidates that were compared with controls, without the scaled weights."""
    cost_table = costs.loc[costs["treatment"] == "neuron", "candidate"]
    return costs[costs["candidate"].isin(cost_table) & costs["treatment"].isin(list(TREATMENTS))]


def weight_name(candidate: str, layer: int) -> str:
    """Name a weight by its layer and place: layer 11 [507, 1229]."""
    return f"layer {layer:.0f} {candidate[candidate.rindex('[') :].replace(',', ', ')}"


WORTH = 0.05  # smallest relative increase of perplexity without a super weight
CAPTION = (
    "Candidate super weights: increase of perplexity (%) with each set to zero, and with its controls: {others}, the "
    "largest weight of the same matrix, the neuron and the row of the weight, and the massive activation after the "
    "layer at its mean. KL: divergence of the predictions from those of the unmodified model, in nats per token. "
    "Controls: of the candidates with the largest effect{}."
)
OTHERS = {  # by treatment; earlier results have the second one
    "nearest": "the {count} weights of all second feed-forward projections that are nearest in magnitude (least and "
    "largest increase, and their magnitudes)",
    "random": "random weights of equal magnitude in the same matrix (mean ± standard deviation of {count})",
}
COMPARED = {
    "nearest": "any of the {count} weights nearest in magnitude ({low:.2g} to {high:.2g})",
    "random": "any of {count} random weights of equal magnitude in this projection",
}
SCALED_CAPTION = "The weight with the largest effect, scaled by a factor: increase of perplexity (%){}."
DRAWING_CAPTION = "Increase of perplexity with each candidate set to zero, beside its controls."
SINGLE = {
    "largest": "largest",
    "neuron": "neuron",
    "row": "row",
    "massive": "massive at mean",
}


def super_weights_section(rows: list[dict]) -> Section:
    """Show the search for super weights in one model; rows of other metrics are left out."""
    costs = cost_table(rows)
    candidates = pd.DataFrame(map(_summed_up, _by_candidate(costs)))
    controlled = candidates.dropna(subset="neuron")
    kind, number = controlled["kind"].iloc[0], int(controlled["count"].max())
    over_text = f". {OVER_TEXT}" if costs["error"].notna().any() else ""
    caption = CAPTION.format(over_text, others=OTHERS[kind].format(count=count(number)))
    columns = [*COLUMNS, *BESIDE_COLUMNS[kind]]
    columns += [(header, _percent(name)) for name, header in SINGLE.items() if name in candidates]
    tables = [Table.of("super_weights", caption, columns, _numbers(candidates), texts=2)]
    scaled = costs[costs["treatment"] == "scaled"]
    if len(scaled):
        tables.append(Table.of("scaled", SCALED_CAPTION.format(over_text), SCALED, _numbers(scaled), texts=1))
    drawings = [Drawing.of("super_weights", DRAWING_CAPTION, weight_costs(costs))]
    title = f"Super weights of {short_name(rows[0]['model'])}"
    further = {"super_weights_costs": _numbers(costs)}
    return Section(title, rows, tables, drawings, further=further)


def _numbers(costs: pd.DataFrame) -> pd.DataFrame:
    """Return a table for its file, without errors that no row knows."""
    numbers = costs.drop(columns=["increase", "most_increase"], errors="ignore")
    return numbers if numbers["error"].notna().any() else numbers.drop(columns="error")


def _by_candidate(costs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    return (candidate_costs for _, candidate_costs in costs.groupby("candidate", sort=False))


def _summed_up(candidate_costs: pd.DataFrame) -> dict:
    """Summarize a candidate and its controls, if it has any.

    `kind`, `count` and costs (`others`, `least`, `greatest`) describe the weights nearest in magnitude, or random ones;
    `most` is the largest cost of any other single weight, and `beside_size` the largest in magnitude.
    """
    about = candidate_costs.iloc[0].to_dict()
    by_treatment = dict(iter(candidate_costs.groupby("treatment")))
    if "neuron" not in by_treatment:
        return about
    kind = next(kind for kind in OTHERS if kind in by_treatment)
    others, beside = by_treatment[kind], candidate_costs[candidate_costs["treatment"].isin(BESIDE)]
    costs, sizes, most = others["cost"], others["other"].abs(), beside.loc[beside["cost"].idxmax()]
    about |= {name: by_treatment[name]["cost"].iloc[0] for name in SINGLE if name in by_treatment}
    about |= {"kind": kind, "count": len(costs), "others": costs.mean(), "others_deviation": costs.std()}
    about |= {"least": costs.min(), "greatest": costs.max(), "low": sizes.min(), "high": sizes.max()}
    about |= {"most": most["cost"], "most_deviation": most["deviation"], "most_increase": most["increase"]}
    return about | {"beside_size": beside["cost"].abs().max()}


def _is_super_weight(candidate: dict) -> bool:
    """Return whether the weight costs at least `WORTH`, and more log-perplexity than each control, beyond scatter."""
    return candidate["cost"] >= WORTH and candidate["increase"].is_above(candidate["most_increase"])


def _cost(row: Mapping) -> Value:
    """Return the increase of perplexity without a weight; small scatter of its logarithm is relative scatter."""
    ratio = 1 + row["cost"]
    deviation, error = (None if pd.isna(row.get(part)) else ratio * row[part] for part in ("deviation", "error"))
    return Value(row["cost"], deviation, error)


def _percent(field: str):
    return lambda row: MISSING if pd.isna(row.get(field)) else percent(row[field], unit="")


def _range(low: str, high: str) -> str:
    return MISSING if low in (MISSING, "nan") else f"{low} to {high}"


COLUMNS = (
    ("weight", lambda row: weight_name(row["candidate"], row["layer"])),
    ("found by", "{found_by}"),
    ("value", "{value:.3f}"),
    ("KL", "{kl:.4f}"),
    ("zero", lambda row: percent(*_cost(row).shown, "")),
)
BESIDE_COLUMNS = {
    "nearest": (
        ("nearest", lambda row: _range(_percent("least")(row), _percent("greatest")(row))),
        ("magnitude", lambda row: _range(f"{row['low']:.3g}", f"{row['high']:.3g}")),
    ),
    "random": (
        (
            "random",
            lambda row: MISSING if pd.isna(row["others"]) else percent(row["others"], row["others_deviation"], ""),
        ),
    ),
}
SCALED = (
    ("weight", lambda row: weight_name(row["candidate"], row["layer"])),
    ("factor", "{factor:g}"),
    ("perplexity", "{perplexity:.2f}"),
    ("increase (%)", lambda row: percent(*_cost(row).shown, "")),
)


CARRIED = Claim(
    "super_weights",
    yes="Weight [{output}, {input}] of the second feed-forward projection of layer {layer} is {which} super weight: "
    "without it the perplexity {change:changed}; without {beside} it changes by at most {beside_size:rise}; without "
    "the whole neuron {input} it {neuron:changed}{reason}.",
    no="None of {number:count} candidates is a super weight: setting one to zero changes the perplexity by at most "
    "{size:rise} ({costliest}). Without {beside} of {called} it changes by at most {beside_size:rise}; without its "
    "whole neuron it {neuron:changed}.",
)
NOT_THE_NEURON = ". The loss of the neuron's output therefore does not explain the effect of the weight"
OF_ROW = Claim(
    "super_weights",
    "Without the whole row {output} of layer {layer} the perplexity {row:changed}[[; with the massive activation after "
    "the layer at its mean it {massive:changed}]].",
)
OF_FACTORS = Claim("super_weights", "Scaling {called} by {factors:listed} changes the perplexity by {costs:listed}.")


def super_weights_findings(rows: list[dict]) -> list[Finding]:
    """State the single weights on which the model depends, with their controls, or that none was found.

    Each finding belongs to the feature that the weight writes.
    """
    costs = cost_table(rows)
    candidates = [_summed_up(candidate) for candidate in _by_candidate(costs)]
    treated = [_with_words(candidate) for candidate in candidates if not pd.isna(candidate.get("neuron"))]
    carrying = list(filter(_is_super_weight, treated))
    if not carrying:
        largest = max(candidates, key=lambda candidate: abs(candidate["cost"]))
        of_all = {"size": abs(largest["cost"]), "costliest": weight_name(largest["candidate"], largest["layer"])}
        return say(CARRIED, sorted(treated, key=lambda row: -abs(row["cost"])), False, number=len(candidates), **of_all)
    first, which = carrying[:1], "a" if len(carrying) > 1 else "the one"
    scaled = costs[(costs["treatment"] == "scaled") & (costs["candidate"] == first[0]["candidate"])]
    factors, of_factors = list(map("{:g}".format, scaled["factor"])), list(map(percent, scaled["cost"]))
    return [
        *say_each(CARRIED, carrying, which=which),
        *say(OF_ROW, first),
        *say(OF_FACTORS, first, factors=factors, costs=of_factors),
    ]


def _with_words(candidate: dict) -> dict:
    """Add to a candidate the fields of its sentence: feature, name, controls, and a note on its neuron."""
    largest = "" if pd.isna(candidate.get("largest")) else " or the largest of its matrix"
    others = COMPARED[candidate["kind"]].format(**candidate | {"count": count(candidate["count"])})
    return candidate | {
        "feature": candidate["output"],
        "change": _cost(candidate),
        "called": weight_name(candidate["candidate"], candidate["layer"]),
        "beside": others + largest,
        "reason": NOT_THE_NEURON if candidate["neuron"] < candidate["cost"] / 2 else "",
    }
