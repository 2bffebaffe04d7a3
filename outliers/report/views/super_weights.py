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
    found = compared(rows)
    candidates = pd.DataFrame(map(_summed_up, _each(found)))
    draws = int(controlled(found).groupby("candidate")["treatment"].apply(lambda of: (of == "random").sum()).max())
    caption = CAPTION.format(draws=draws)
    columns = [*COLUMNS, *((said, _percent(name)) for name, said in SINGLE.items() if name in candidates)]
    tables = [Table.of("super_weights", caption, columns, candidates, names=2)]
    scaled = found[found["treatment"] == "scaled"]
    if len(scaled):
        tables.append(Table.of("scaled", SCALED_CAPTION, SCALED, scaled, names=1))
    drawings = [Drawing.of("super_weights", DRAWING_CAPTION, weight_costs(found))]
    findings = [Finding(text, at) for _, text, at in carried_by(rows)][:FINDINGS]
    title = f"Super weights of {short_name(rows[0]['model'])}"
    further = {"super_weights_costs": found}
    return Section(title, rows, printed(tables), tables, drawings, further=further, findings=findings)


def _each(found: pd.DataFrame) -> Iterator[pd.DataFrame]:
    return (of_one for _, of_one in found.groupby("candidate", sort=False))


def _summed_up(of_one: pd.DataFrame) -> dict:
    """A candidate with the cost of each control; `random` and `random_deviation` of the draws, where it has them."""
    about = of_one.iloc[0].to_dict()
    costs = {treatment: rows["cost"] for treatment, rows in of_one.groupby("treatment")}
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
    found = compared(rows)
    candidates = [_summed_up(one) for one in _each(found)]
    beside_controls = [one for one in candidates if not pd.isna(one.get("random"))]
    carrying = [one for one in beside_controls if _carries(one)]
    if not carrying and beside_controls:
        most = max(beside_controls, key=lambda one: one["cost"])
        yield most["output"], _none(most, len(candidates)), "super_weights"
    for number, one in enumerate(carrying):
        yield one["output"], _carried(one), "super_weights"
        if number == 0:
            yield one["output"], _not_the_neuron(one), "super_weights"
            yield one["output"], _multiplied(one, found[found["treatment"] == "scaled"]), "super_weights"


def _none(most: dict, number: int) -> str:
    return (
        f"None of {count(number)} candidates is a super weight: setting one to zero changes the perplexity by at most "
        f"{percent(most['cost'])} ({_place(most)}); random weights of equal magnitude change it by "
        f"{percent(*_random(most))}."
    )


def _place(one: dict) -> str:
    return called(one["candidate"], one["layer"])


def _carried(one: dict) -> str:
    return (
        f"Weight [{one['output']}, {one['input']}] of the second feed-forward projection of layer {one['layer']} is a "
        f"super weight: without it the perplexity {changed(one['cost'])}; without random weights of equal magnitude in "
        f"this projection it changes by {percent(*_random(one))}."
    )


def _not_the_neuron(one: dict) -> str:
    """The reason of the weight's effect, as the controls show it."""
    text = f"Without the whole neuron {one['input']} of layer {one['layer']} the perplexity {changed(one['neuron'])}; "
    text += f"without the whole row {one['output']} it {changed(one['row'])}"
    if not pd.isna(one.get("massive")):
        text += f"; with the massive activation after the layer at its mean it {changed(one['massive'])}"
    if one["neuron"] < one["cost"] / 2:
        text += ". The loss of the neuron's output therefore does not explain the effect of the weight"
    return f"{text}."


def _multiplied(one: dict, scaled: pd.DataFrame) -> str:
    rows = scaled[scaled["candidate"] == one["candidate"]].itertuples()
    scales = list(rows)
    factors, costs = listed(f"{row.factor:g}" for row in scales), listed(percent(row.cost) for row in scales)
    return f"Scaling {_place(one)} by {factors} changes the perplexity by {costs}."
