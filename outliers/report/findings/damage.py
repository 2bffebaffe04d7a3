"""What the damage by schemes says: how much, and where it comes from."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pandas as pd

from outliers.report.analysis import exact, value_of
from outliers.report.findings.words import amount, percent
from outliers.report.section import FINDINGS, Finding

if TYPE_CHECKING:
    from outliers.metrics.damages import Damages

Names = Callable[[int], str]  # of a token, by its id

SHARE, MOST = 0.1, 3  # a layer that alone causes this share of a scheme's damage is named, up to so many


def damage_findings(damages: Mapping[str, "Damages"], names: Names) -> list[Finding]:
    """Of the scheme that costs most: in which role and by which value, how much, and in which layers; of the others in
    which role and how much; the worst output of each. One draw does not tell a role or a layer from others."""
    schemes = sorted(damages.values(), key=lambda one: -one.model.get("damage", 0))
    costly = [one for one in schemes if "damage" in one.model and not _is_scatter(one, one.model)]
    findings = []
    for one in schemes:
        findings += _of_roles(one, names) if one in costly else []
        findings += [_of_model(one)] if "damage" in one.model else []
        findings += _of_layers(one) if one in costly[:1] else []
    return [*findings, *(finding for one in schemes for finding in _of_errors(one))][:FINDINGS]


def _of_model(one: "Damages") -> Finding:
    before, after = one.model["unquantized"], one.model["perplexity"]
    change = f"Under {one.scheme} the perplexity goes from {before:.2f} to {after:.2f} ({_cost(one, one.model)})"
    if value_of(one.model, "perplexity").deviation is None:
        ending = " in a single draw; --draws 4 measures how far rounding scatters it."
    else:
        ending = ", which is within the scatter of rounding." if _is_scatter(one, one.model) else "."
    return Finding(f"{change}{ending}", "damage_model")


def _cost(one: "Damages", values: Mapping, name: str = "perplexity") -> str:
    """What a perplexity is above that of the unquantized model, with its standard deviation where there is one."""
    return percent(*value_of(values, name).beside(one.model["unquantized"]))


def _is_scatter(one: "Damages", values: Mapping, name: str = "perplexity") -> bool:
    """Whether a perplexity is within the scatter of rounding of the unquantized model's."""
    return not value_of(values, name).is_apart(exact(one.model["unquantized"]))


def _of_roles(one: "Damages", names: Names) -> list[Finding]:
    """In which role most of it is, if that one costs more than the next, and the largest value that it has to hold."""
    if one.roles.empty:
        return []
    first, *others = one.roles.sort_values("perplexity_only", ascending=False).to_dict("records")
    if _is_scatter(one, first, "perplexity_only") or (others and not _is_more(first, others[0])):
        return [Finding(f"No role stands out under {one.scheme}.", "damage_roles")]
    part = _part(one, first["damage_only"])
    share = f", {100 * part:.0f} % of the rise of log-perplexity" if 0 < part < 1 else ""
    which = f"Most of what {one.scheme} costs" if part > 0.5 else f"The largest part of what {one.scheme} costs"
    sentence = f"{which} is in {first['role']} ({_cost(one, first, 'perplexity_only')} alone{share})"
    sentence += _largest(one, first["role"], names)
    if pd.notna(first.get("damage_without")):
        sentence += f"; with {first['role']} exact, {_cost(one, first, 'perplexity_without')} is left"
    return [Finding(f"{sentence}.", "damage_roles")]


def _is_more(place: dict, other: dict) -> bool:
    return value_of(place, "perplexity_only").is_above(value_of(other, "perplexity_only"))


def _of_layers(one: "Damages") -> list[Finding]:
    """Which layers cost most alone, if each of them costs more than any that is not named."""
    if one.layers.empty:
        return []
    layers = one.layers.sort_values("perplexity_only", ascending=False).to_dict("records")
    broken = [layer for layer in layers[:MOST] if _part(one, layer["damage_only"]) >= SHARE]
    while broken and len(broken) < len(layers) and not _is_more(broken[-1], layers[len(broken)]):
        broken.pop()
    if not broken:
        return [Finding(f"No layer stands out under {one.scheme}.", "damage_layers")]
    costs = ", ".join(f"{layer['layer']:.0f} ({_cost(one, layer, 'perplexity_only')})" for layer in broken)
    which = "layers that cost" if len(broken) > 1 else "layer that costs"
    return [Finding(f"Under {one.scheme} the {which} most alone: {costs}.", "damage_layers")]


def _largest(one: "Damages", role: str, names: Names) -> str:
    """The largest value of a role, which a scale has to hold; nothing where no input was looked at."""
    inputs = one.errors[one.errors["role"] == role].dropna(subset=["largest"])
    if inputs.empty:
        return ""
    most = inputs.loc[inputs["largest"].astype(float).idxmax()].to_dict()
    place = f"layer {most['layer']}, feature {most['feature']:.0f}, position {most['position']:.0f}"
    return f", where values go up to {amount(most['largest'])} ({place}, token {names(int(most['token']))})"


def _of_errors(one: "Damages") -> list[Finding]:
    if one.errors.empty:
        return []
    worst = one.errors.loc[one.errors["by_token"].idxmax()]
    sentence = (
        f"The output that is worst for the mean token under {one.scheme} is that of "
        f"{worst['projection']}, with an error of {decibels(worst['by_token_db'])} dB; its largest input is "
        f"{worst['largest']:,.1f}, in feature {worst['feature']}."
    )
    return [Finding(sentence, "damage_worst")]


def _part(one: "Damages", damage: float) -> float:
    """The share of the rise of log-perplexity that this one is; 0 where there is none."""
    return math.log1p(damage) / math.log1p(one.model["damage"]) if one.model["damage"] > 0 else 0.0


def decibels(db: float) -> str:
    """An error as a table and a sentence have it: −25.3; −∞ where there is none."""
    return "−∞" if math.isinf(db) else f"{round(db, 1) + 0.0:.1f}".replace("-", "−")  # of −0 the sign goes
