"""What a sweep of schemes says."""

from collections.abc import Sequence

from outliers.report.findings.words import are_apart, count, listed, percent
from outliers.report.section import Finding

TABLE = "table1_increase"
# Scheme to the same with outlier features in 16 bits.
DECOMPOSED = {
    "absmax-vector": "llm.int8",
    "zeropoint-vector": "llm.int8-zeropoint",
    "absmax-row": "absmax-row-decomp",
}

Cost = dict  # row of `costs`: `value` and `standard_deviation` in per cent of the perplexity without quantization


def sweep_findings(costs: Sequence[Cost], names: dict[str, str]) -> list[Finding]:
    """What costs most, what outlier features in 16 bits save, what costs least, of the model that it costs most.

    Nothing of a single draw.

    costs: of schemes, as `costs` of Table 1 makes them. names: what models are called.
    """
    if not costs or any("standard_deviation" not in cost for cost in costs):
        return []
    found = [cost | {"share": cost["value"] / 100, "scatter": cost["standard_deviation"] / 100} for cost in costs]
    found.sort(key=lambda cost: -cost["value"])
    most = found[0]
    if not _is_cost(most):
        models = f"any of {count(len(names))} models" if len(names) > 1 else next(iter(names.values()))
        return [Finding(f"No scheme costs {models} perplexity beyond the scatter of rounding.", TABLE)]
    of_model = {cost["scheme"]: cost for cost in found if cost["model"] == most["model"]}
    name = names[most["model"]]
    said = [f"{most['scheme']} costs {name} {_said(most)} of its perplexity."]
    said += [*_saved(of_model), *_least(of_model, name), *_others(found, names)]
    return [Finding(sentence, TABLE) for sentence in said]


def _is_cost(cost: Cost) -> bool:
    return cost["share"] > 0 and are_apart(cost["share"], 0, cost["scatter"])


def _said(cost: Cost) -> str:
    return percent(cost["share"], cost["scatter"])


def _saved(schemes: dict[str, Cost]) -> list[str]:
    """What outlier features in 16 bits save, of the first schemes of `DECOMPOSED`; or that nothing could be shown."""
    pairs = [(schemes[one], schemes[other]) for one, other in DECOMPOSED.items() if {one, other} <= schemes.keys()]
    if not pairs:
        return []
    before, after = pairs[0]
    if before["share"] < after["share"] or not are_apart(*(_pair(before, after))):
        return [f"That outlier features in 16 bits save anything could not be shown: {_both(before, after)}."]
    return [f"Outlier features in 16 bits bring the cost down: {_both(before, after)}."]


def _pair(one: Cost, other: Cost) -> tuple[float, ...]:
    return one["share"], other["share"], one["scatter"], other["scatter"]


def _both(before: Cost, after: Cost) -> str:
    return f"{_said(before)} under {before['scheme']}, {_said(after)} under {after['scheme']}"


def _least(schemes: dict[str, Cost], name: str) -> list[str]:
    """What costs nothing that could be shown, or else least."""
    free = [scheme for scheme, cost in schemes.items() if not _is_cost(cost)]
    if free:
        return [f"That {listed(free)} cost{'s' if len(free) == 1 else ''} {name} anything could not be shown."]
    *_, second, least = [None, *schemes.values()]
    if second is None or not are_apart(*_pair(second, least)):
        return []
    return [f"{least['scheme']} costs {name} least: {_said(least)}."]


def _others(costs: list[Cost], names: dict[str, str]) -> list[str]:
    """How many models lose at least one per cent under some scheme, where there are several."""
    broken = {cost["model"] for cost in costs if are_apart(cost["share"], 0.01, cost["scatter"]) and cost["value"] > 1}
    if len(names) < 2:
        return []
    if len(broken) == len(names):
        return ["Each of the models loses more than one per cent under some scheme."]
    verb = "loses" if len(broken) == 1 else "lose"
    return [f"{count(len(broken)).capitalize()} of {count(len(names))} models {verb} more than one per cent."]
