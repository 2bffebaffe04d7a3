"""The view of a search for super weights: single weights that carry a model, beside their controls."""

from collections.abc import Iterator

import pandas as pd

from outliers.models.names import short_name
from outliers.plot.ablation import called, controlled, weight_costs
from outliers.presets.super_weights import compared
from outliers.report.analysis import Value, exact
from outliers.report.section import FINDINGS, Drawing, Finding, Section, printed
from outliers.report.tables import MISSING, Table
from outliers.report.words import changed, count, listed, percent

WORTH = 0.05  # of the perplexity: what a single weight has to carry to be called one that does
CAPTION = (
    "Candidate super weights: increase of perplexity (%) with each set to zero, and with its controls: random weights "
    "of equal magnitude in the same matrix (mean ± standard deviation of {draws}), the largest weight of the layer, "
    "the neuron and the row of the weight, and the massive activation after the layer at its mean. KL: divergence of "
    "the predictions from those of the unmodified model, in nats per token. Controls: of the candidates with the "
    "largest effect."
)
SCALED_CAPTION = "The weight with the largest effect, scaled by a factor: increase of perplexity (%)."
DRAWING_CAPTION = "Increase of perplexity with each candidate set to zero, beside its controls."
SINGLE = {
    "largest": "largest",
    "neuron": "neuron",
    "row": "row",
    "massive": "massive at mean",
}


def super_weights_section(rows: list[dict]) -> Section:
    """The search of one model, from its rows; others among them are left out."""
    costs = compared(rows)
    candidates = pd.DataFrame(map(_summed_up, _each(costs)))
    draws = int(
        controlled(costs).groupby("candidate")["treatment"].apply(lambda kinds: (kinds == "random").sum()).max()
    )
    caption = CAPTION.format(draws=draws)
    columns = [*COLUMNS, *((header, _percent(name)) for name, header in SINGLE.items() if name in candidates)]
    tables = [Table.of("super_weights", caption, columns, candidates, names=2)]
    scaled = costs[costs["treatment"] == "scaled"]
    if len(scaled):
        tables.append(Table.of("scaled", SCALED_CAPTION, SCALED, scaled, names=1))
    drawings = [Drawing.of("super_weights", DRAWING_CAPTION, weight_costs(costs))]
    findings = [Finding(text, at) for _, text, at in carried_by(rows)][:FINDINGS]
    title = f"Super weights of {short_name(rows[0]['model'])}"
    further = {"super_weights_costs": costs}
    return Section(title, rows, printed(tables), tables, drawings, further=further, findings=findings)


def _each(costs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    return (candidate_costs for _, candidate_costs in costs.groupby("candidate", sort=False))


def _summed_up(candidate_costs: pd.DataFrame) -> dict:
    """A candidate with the cost of each control; `random` and `random_deviation` of the draws, where it has them."""
    about = candidate_costs.iloc[0].to_dict()
    costs = {treatment: rows["cost"] for treatment, rows in candidate_costs.groupby("treatment")}
    if "neuron" not in costs:
        return about
    random = costs["random"]
    single = {name: costs[name].iloc[0] for name in SINGLE if name in costs}
    return about | single | {"random": random.mean(), "random_deviation": random.std()}


def _carries(candidate: dict) -> bool:
    """Whether the weight costs more than random ones beyond two standard deviations, and enough to be told."""
    return candidate["cost"] >= WORTH and exact(candidate["cost"]).is_above(_random(candidate))


def _random(candidate: dict) -> Value:
    return Value(candidate["random"], candidate["random_deviation"])


def _percent(field: str):
    return lambda row: MISSING if pd.isna(row.get(field)) else percent(row[field]).removesuffix(" %")


COLUMNS = (
    ("weight", lambda row: called(row["candidate"], row["layer"])),
    ("found by", "{found_by}"),
    ("value", lambda row: f"{row['value']:.3f}".replace("-", "−")),
    ("KL", "{kl:.4f}"),
    ("zero", _percent("cost")),
    (
        "random",
        lambda row: MISSING if pd.isna(row.get("random")) else percent(*_random(row)).replace(" % ±", " ±"),
    ),
)
SCALED = (
    ("weight", lambda row: called(row["candidate"], row["layer"])),
    ("factor", "{factor:g}"),
    ("perplexity", "{perplexity:.2f}"),
    ("increase (%)", _percent("cost")),
)


def carried_by(rows: list[dict]) -> Iterator[tuple[int, str, str]]:
    """The single weights that carry the model, with their controls; or that none was found. Each with the feature that
    the weight writes, and the table that it is from."""
    costs = compared(rows)
    candidates = [_summed_up(candidate) for candidate in _each(costs)]
    beside_controls = [candidate for candidate in candidates if not pd.isna(candidate.get("random"))]
    carrying = [candidate for candidate in beside_controls if _carries(candidate)]
    if not carrying and beside_controls:
        most = max(beside_controls, key=lambda candidate: candidate["cost"])
        yield most["output"], _none(most, len(candidates)), "super_weights"
    for number, candidate in enumerate(carrying):
        yield candidate["output"], _carried(candidate), "super_weights"
        if number == 0:
            yield candidate["output"], _not_the_neuron(candidate), "super_weights"
            yield candidate["output"], _multiplied(candidate, costs[costs["treatment"] == "scaled"]), "super_weights"


def _none(most: dict, number: int) -> str:
    return (
        f"None of {count(number)} candidates is a super weight: setting one to zero changes the perplexity by at most "
        f"{percent(most['cost'])} ({_place(most)}); random weights of equal magnitude change it by "
        f"{percent(*_random(most))}."
    )


def _place(candidate: dict) -> str:
    return called(candidate["candidate"], candidate["layer"])


def _carried(candidate: dict) -> str:
    return (
        f"Weight [{candidate['output']}, {candidate['input']}] of the second feed-forward projection of layer "
        f"{candidate['layer']} is a super weight: without it the perplexity {changed(candidate['cost'])}; without "
        f"random weights of equal magnitude in this projection it changes by {percent(*_random(candidate))}."
    )


def _not_the_neuron(candidate: dict) -> str:
    """The reason of the weight's effect, as the controls show it."""
    text = f"Without the whole neuron {candidate['input']} of layer {candidate['layer']} the perplexity "
    text += (
        f"{changed(candidate['neuron'])}; without the whole row {candidate['output']} it {changed(candidate['row'])}"
    )
    if not pd.isna(candidate.get("massive")):
        text += f"; with the massive activation after the layer at its mean it {changed(candidate['massive'])}"
    if candidate["neuron"] < candidate["cost"] / 2:
        text += ". The loss of the neuron's output therefore does not explain the effect of the weight"
    return f"{text}."


def _multiplied(candidate: dict, scaled: pd.DataFrame) -> str:
    rows = scaled[scaled["candidate"] == candidate["candidate"]].itertuples()
    scales = list(rows)
    factors, costs = listed(f"{row.factor:g}" for row in scales), listed(percent(row.cost) for row in scales)
    return f"Scaling {_place(candidate)} by {factors} changes the perplexity by {costs}."
