"""What training in int8 says."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outliers.report.findings.words import listed
from outliers.report.section import Finding
from outliers.report.seeds import Ratio, ratio

if TYPE_CHECKING:
    from outliers.report.artefacts.table7 import Setting

HELD = 0.02  # int8 holds what 16 bits reach where it costs less of the perplexity
PROJECTIONS, ATTENTION = "FFN, linear", "FFN, linear, attention"
PLAIN = "0 %"


def int8_findings(settings: Sequence["Setting"], at: str) -> list[Finding]:
    """Of each model: what all projections cost, what the feed-forward ones do, what decomposition saves; attention."""
    models = dict.fromkeys(one.model for one in settings)
    said = [sentence for model in models for sentence in _of_model([one for one in settings if one.model == model])]
    return [Finding(sentence, at) for sentence in said]


def _of_model(settings: Sequence["Setting"]) -> list[str]:
    found = {one.key: one for one in settings if one.increase is not None}
    return [*_held(found), *_feed_forward(found), *_decomposed(found), *_attention(found), *_exact(found)]


def _held(found: dict[tuple, "Setting"]) -> list[str]:
    """Whether all projections in int8 end within `HELD` of 16 bits."""
    one = found.get((PROJECTIONS, PLAIN))
    if one is None:
        return []
    said = f"{one.model}, trained with all projections in int8, ends at {one.increase.in_percent()} beside 16 bits"
    return [f"{said}: {_within(one.increase)}."]


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


def _feed_forward(found: dict[tuple, "Setting"]) -> list[str]:
    one = found.get(("FFN", PLAIN))
    if one is None:
        return []
    if _is_cost(one.increase) or one.increase.interval is None:
        return [f"Feed-forward projections alone in int8 end at {one.increase.in_percent()}."]
    return [
        f"That feed-forward projections alone in int8 cost anything could not be shown: {one.increase.in_percent()}."
    ]


def _decomposed(found: dict[tuple, "Setting"]) -> list[str]:
    """Which shares of features in 16 bits save something of the cost of all projections."""
    plain = found.get((PROJECTIONS, PLAIN))
    others = [one for key, one in found.items() if key[0] == PROJECTIONS and key[1] != PLAIN]
    if plain is None or not others:
        return []
    saving = [one for one in others if _is_less(ratio(one.values, plain.values))]
    shares = listed(one.decomposition for one in saving or others)
    if not saving:
        return [f"That {shares} of features in 16 bits bring this down could not be shown."]
    return [f"{shares} of features in 16 bits bring this down: {listed(one.increase.in_percent() for one in saving)}."]


def _attention(found: dict[tuple, "Setting"]) -> list[str]:
    """What attention in int8 costs beside the projections alone, with each share of features in 16 bits."""
    settings = [one for key, one in found.items() if key[0] == ATTENTION]
    if not settings:
        return []
    shares = listed(one.decomposition for one in settings)
    ends = listed(one.increase.in_percent() for one in settings)
    return [f"With the products of attention in int8 too and {shares} of features in 16 bits, it ends at {ends}."]


def _exact(found: dict[tuple, "Setting"]) -> list[str]:
    """What is left of the cost of all projections where the trained weights are used in float32."""
    one = found.get((PROJECTIONS, PLAIN))
    if one is None or one.exact_increase is None or not _is_cost(one.increase):
        return []
    cost, left = one.increase.in_percent(), one.exact_increase.in_percent()
    return [f"Of the {cost} of '{one.run}', {left} stay where the weights that it ends with are used in float32."]


def _is_less(one: Ratio | None) -> bool:
    return one is not None and one.is_shown and one.value < 1


def _is_cost(increase: Ratio) -> bool:
    return increase.is_shown and increase.value > 1
