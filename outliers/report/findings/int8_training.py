"""What training in int8 says."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outliers.report.analysis import Ratio, ratio
from outliers.report.findings.words import listed, percent
from outliers.report.section import Finding

if TYPE_CHECKING:
    from outliers.report.artefacts.table7 import Setting

HELD = 0.02  # int8 holds what 16 bits reach where it costs less of the perplexity
PROJECTIONS, ATTENTION = "FFN, linear", "FFN, linear, attention"
PLAIN = "0 %"


def int8_findings(settings: Sequence["Setting"], at: str) -> list[Finding]:
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


def _held(settings: dict[tuple, "Setting"]) -> list[str]:
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


def _feed_forward(settings: dict[tuple, "Setting"]) -> list[str]:
    one = settings.get(("FFN", PLAIN))
    if one is None:
        return []
    cost = _percent(one.increase)
    if _is_cost(one.increase) or one.increase.interval is None:
        return [f"Feed-forward projections alone in int8 end at {cost}."]
    return [f"That feed-forward projections alone in int8 cost anything could not be shown: {cost}."]


def _decomposed(settings: dict[tuple, "Setting"]) -> list[str]:
    """Which shares of features in 16 bits save something of the cost of all projections."""
    plain = settings.get((PROJECTIONS, PLAIN))
    others = [one for key, one in settings.items() if key[0] == PROJECTIONS and key[1] != PLAIN]
    if plain is None or not others:
        return []
    saving = [one for one in others if _is_less(ratio(one.values, plain.values))]
    shares = listed(one.decomposition for one in saving or others)
    if not saving:
        return [f"That {shares} of features in 16 bits bring this down could not be shown."]
    return [f"{shares} of features in 16 bits bring this down: {listed(_percent(one.increase) for one in saving)}."]


def _attention(settings: dict[tuple, "Setting"]) -> list[str]:
    """What attention in int8 costs beside the projections alone, with each share of features in 16 bits."""
    attended = [one for key, one in settings.items() if key[0] == ATTENTION]
    if not attended:
        return []
    shares = listed(one.decomposition for one in attended)
    ends = listed(_percent(one.increase) for one in attended)
    return [f"With the products of attention in int8 too and {shares} of features in 16 bits, it ends at {ends}."]


def _exact(settings: dict[tuple, "Setting"]) -> list[str]:
    """What is left of the cost of all projections where the trained weights are used in float32."""
    one = settings.get((PROJECTIONS, PLAIN))
    if one is None or one.exact_increase is None or not _is_cost(one.increase):
        return []
    cost, left = _percent(one.increase), _percent(one.exact_increase)
    return [f"Of the {cost} of '{one.run}', {left} stay where the weights that it ends with are used in float32."]


def _is_less(one: Ratio | None) -> bool:
    return one is not None and one.is_shown and one.value < 1


def _is_cost(increase: Ratio) -> bool:
    return increase.is_shown and increase.value > 1
