"""What zero-shot tasks say."""

from collections.abc import Sequence

from outliers.report.analysis import Value, exact
from outliers.report.findings.words import count, listed
from outliers.report.section import Finding

TABLE = "figure1"


def zeroshot_findings(means: Sequence[dict], baseline: str, chance: float | None) -> list[Finding]:
    """Which schemes lose accuracy beyond the standard errors, and which models only guess.

    means: as `mean_accuracy` of Figure 1 makes them. baseline: the scheme that quantizes nothing. chance: mean accuracy
    of guesses, None where it is not known.
    """
    known = [mean for mean in means if mean["standard_error"] is not None]
    unquantized = {mean["model"]: mean for mean in known if mean["scheme"] == baseline}
    quantized = [mean for mean in known if mean["scheme"] != baseline and mean["model"] in unquantized]
    sentences = _lost([(unquantized[mean["model"]], mean) for mean in quantized])
    sentences += [] if chance is None else _guesses(list(unquantized.values()), chance)
    return [Finding(sentence, TABLE) for sentence in sentences]


def _lost(pairs: Sequence[tuple[dict, dict]]) -> list[str]:
    """Schemes whose mean accuracy is lower; as if examples were independent, which is careful: they are the same."""
    if not pairs:
        return []
    lower = [(before, after) for before, after in pairs if _accuracy(before).is_above(_accuracy(after))]
    if not lower:
        before, after = min(pairs, key=lambda pair: pair[1]["value"] - pair[0]["value"])
        example = f"{after['model']} goes from {_percent(before)} to {_percent(after)} under {after['scheme']}"
        return [f"That any scheme costs zero-shot accuracy could not be shown: at worst, {example}."]
    lower.sort(key=lambda pair: pair[1]["value"] - pair[0]["value"])
    return [
        f"{after['scheme']} costs {after['model']} zero-shot accuracy: {_percent(before)} falls to {_percent(after)}."
        for before, after in lower[:3]
    ]


def _accuracy(mean: dict) -> Value:
    return Value(mean["value"], mean["standard_error"])


def _percent(mean: dict) -> str:
    return f"{100 * mean['value']:.1f} ± {100 * mean['standard_error']:.1f} %"


def _guesses(means: Sequence[dict], chance: float) -> list[str]:
    """Which models are not shown to do better than guesses."""
    guess = [mean["model"] for mean in means if not _accuracy(mean).is_above(exact(chance))]
    if not guess:
        return []
    which = f"{count(len(guess)).capitalize()} of {count(len(means))} models" if len(guess) > 3 else listed(guess)
    verb = "is" if len(guess) == 1 else "are"
    return [f"{which} {verb} not shown to do better than guesses, {100 * chance:.1f} %, also without quantization."]
