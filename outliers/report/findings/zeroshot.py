"""What zero-shot tasks say."""

from collections.abc import Sequence

from outliers.report.findings.words import are_apart, count, listed
from outliers.report.section import Finding

TABLE = "figure1"


def zeroshot_findings(means: Sequence[dict], baseline: str, chance: float | None) -> list[Finding]:
    """Which schemes lose accuracy beyond the standard errors, and which models only guess.

    means: as `mean_accuracy` of Figure 1 makes them. baseline: the scheme that quantizes nothing. chance: mean accuracy
    of guesses, None where it is not known.
    """
    known = [mean for mean in means if mean["standard_error"] is not None]
    exact = {mean["model"]: mean for mean in known if mean["scheme"] == baseline}
    pairs = [(exact[one["model"]], one) for one in known if one["scheme"] != baseline and one["model"] in exact]
    said = [*_lost(pairs), *([] if chance is None else _guesses(list(exact.values()), chance))]
    return [Finding(sentence, TABLE) for sentence in said]


def _lost(pairs: Sequence[tuple[dict, dict]]) -> list[str]:
    """Schemes whose mean accuracy is lower; as if examples were independent, which is careful: they are the same."""
    if not pairs:
        return []
    lower = [(before, after) for before, after in pairs if before["value"] > after["value"] and _apart(before, after)]
    if not lower:
        before, after = min(pairs, key=lambda pair: pair[1]["value"] - pair[0]["value"])
        example = f"{after['model']} goes from {_percent(before)} to {_percent(after)} under {after['scheme']}"
        return [f"That any scheme costs zero-shot accuracy could not be shown: at worst, {example}."]
    lower.sort(key=lambda pair: pair[1]["value"] - pair[0]["value"])
    return [
        f"{after['scheme']} costs {after['model']} zero-shot accuracy: {_percent(before)} falls to {_percent(after)}."
        for before, after in lower[:3]
    ]


def _apart(one: dict, other: dict) -> bool:
    return are_apart(one["value"], other["value"], one["standard_error"], other["standard_error"])


def _percent(mean: dict) -> str:
    return f"{100 * mean['value']:.1f} ± {100 * mean['standard_error']:.1f} %"


def _guesses(exact: Sequence[dict], chance: float) -> list[str]:
    """Which models are not shown to do better than guesses."""
    guess = [
        one["model"]
        for one in exact
        if one["value"] < chance or not are_apart(one["value"], chance, one["standard_error"])
    ]
    if not exact or not guess:
        return []
    which = f"{count(len(guess)).capitalize()} of {count(len(exact))} models" if len(guess) > 3 else listed(guess)
    verb = "is" if len(guess) == 1 else "are"
    return [f"{which} {verb} not shown to do better than guesses, {100 * chance:.1f} %, also without quantization."]
