"""Search for a plan: few projections that stay exact, so that a scheme costs at most a given share of perplexity.

No single projection of the plan can be left out.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from outliers.criterion import LOG_PERPLEXITY
from outliers.errors import UserError
from outliers.metrics.records import Agreement, Errors, Perplexity
from outliers.models.variant import AS_IT_IS
from outliers.quantization.plans.plan import Plan
from outliers.quantization.schemes import Scheme
from outliers.runs.rows import Row
from outliers.subjects.cell import Cell, Stages, Subject
from outliers.variants.quantized import EXACT, Quantized
from outliers.variants.written import variant

if TYPE_CHECKING:
    from outliers.show.value import Value

CANDIDATES = 60  # projections with the largest errors over all tokens, and as many by the error of the mean token
LEFT = 0.1  # largest share of a projection's divergence that a sufficient better scheme leaves
EXCHANGED = 3  # members of least gain that are left out, or exchanged for as many others, as a trial
SEARCH, CONFIRM, SINGLE = "search", "confirm", "single"  # stages of the perplexities of sets
CLEARLY = 3  # standard deviations of rounding by which one draw must exceed a loss to be clearly larger
DRAWS_OF_A_SET = 6  # draws of each set: the standard deviation of fewer is itself uncertain


class CostAlone(NamedTuple):
    """The cost of a projection if nothing else is quantized, in nats per token.

    loss: expected increase of the loss on any text. divergence: KL divergence from the unquantized model.
    """

    loss: float
    divergence: float

    @classmethod
    def of(cls, rise: float, divergence: float, tokens: int) -> "CostAlone":
        """Return the cost from an increase of the loss and a divergence, both measured over some tokens.

        A small change of the predictions that favours no token raises the loss by its divergence D, and a measurement
        over T tokens scatters around that with the variance 2 D / T. With a prior of mean and standard deviation D, the
        expected rise is D + s · (rise - D), s = D / (D + 2 / T).
        """
        share = divergence / (divergence + 2 / tokens) if divergence > 0 else 1.0
        return cls(divergence + share * (rise - divergence), divergence)


class Choice(NamedTuple):
    """A projection with a more exact scheme that it may get, or none, so that it stays exact.

    gain: expected decrease of the loss on any text, nats per token. price: 1, or the number of its parameters. scheme:
    the better scheme; None for exact.
    """

    path: str
    gain: float
    price: int
    scheme: Scheme | None


@dataclass(frozen=True)
class Search:
    """The settings of a search for a plan.

    search_subject, confirm_subject: the model with the blocks of the search, and with other blocks that confirm it.
    under: the scheme. better: schemes that projections may get before they stay exact. cost: allowed increase of
    perplexity, as a share. by: what to minimize, "count" or "parameters". draws: number of draws of each perplexity.
    """

    search_subject: Subject
    confirm_subject: Subject
    under: Quantized
    better: tuple[Scheme, ...]
    cost: float
    by: str
    draws: int

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The number of weights of each projection of the model, by path."""
        from outliers.models.anatomy import projections, shape_of  # late, for it imports torch
        from outliers.models.skeleton import skeleton

        # a model in memory may lack layers of its configuration
        model = getattr(self.search_subject, "loaded", None) or skeleton(self.search_subject.config)
        return {projection.path: math.prod(shape_of(projection.module)) for projection in projections(model)}

    def set_of(self, choices: Iterable[Choice]) -> Quantized:
        """Return the scheme as a variant in which some projections are better."""
        exact: list[str] = []
        instead: dict[Scheme, list[str]] = {}
        for choice in choices:
            (exact if choice.scheme is None else instead.setdefault(choice.scheme, [])).append(choice.path)
        if len(exact) == len(self.sizes):
            return EXACT
        others = tuple((scheme, tuple(sorted(paths))) for scheme, paths in instead.items())
        return Quantized(self.under.scheme, tuple(sorted(exact)), (), self.under.calibration, others)

    def allowed(self, exact: Row) -> float:
        """Return the largest allowed loss, nats per token, from the row of the unquantized model."""
        return _loss(exact) + math.log1p(self.cost)

    def cells_of(self, stage: str, *sets: Sequence[Choice]) -> list[Cell]:
        """Return the cells for the perplexity of sets of better projections on the blocks of a stage."""
        prices = [sum(choice.price for choice in choices) for choices in sets]
        labels = [{"chosen": len(choices), "price": price} for choices, price in zip(sets, prices, strict=True)]
        return [self.cell_of(stage, self.set_of(choices), fields) for choices, fields in zip(sets, labels, strict=True)]

    def cell_of(self, stage: str, variant: Quantized, labels: dict) -> Cell:
        subject = self.search_subject if stage == SEARCH else self.confirm_subject
        draws = 1 if stage == SINGLE else self.draws
        return Cell(subject, variant, Perplexity(draws=draws), {"stage": stage} | labels)

    def cells_without(self, stage: str, chosen: list[Choice], removed: Iterable[Choice]) -> list[Cell]:
        """Return the cells for the perplexity of a set without each of some of its projections."""
        removed = list(removed)
        cells = self.cells_of(stage, *(_without(chosen, choice) for choice in removed))
        return [
            replace(cell, labels=cell.labels | {"without": choice.path})
            for cell, choice in zip(cells, removed, strict=True)
        ]


def exports_of(formats: Iterable[str], plan: Plan, revision: str | None = None) -> dict[str, str]:
    """Return a plan in formats of other libraries, by file name.

    Raises:
        UserError: a format is unknown, or cannot express the plan's schemes or model.
    """
    if not formats:
        return {}
    from outliers.models.load import load_config
    from outliers.models.skeleton import skeleton
    from outliers.quantization.plans.exports import EXPORTS, export_text

    config = load_config(plan.model, revision)
    model = skeleton(config, config.dtype)
    texts = {name: export_text(plan, name, model) for name in formats}
    return {EXPORTS[name].file: text for name, text in texts.items()}


def check_search(search: Search) -> None:
    """Raise UserError if a scheme has no projections to choose from, or a better scheme cannot replace it."""
    if not search.under.scheme.quantizes_projections:
        raise UserError(f"a plan for '{search.under.name}', which quantizes no projection; expected one such as absmax")
    for scheme in search.better:
        if not scheme.quantizes_projections or scheme.needs_calibration or scheme == search.under.scheme:
            raise UserError(
                f"'{scheme.name}' in the place of '{search.under.name}'; expected another scheme that quantizes "
                "projections without a calibration, such as llm.int8"
            )


def plan_stages(search: Search) -> Stages:
    """Yield the cells of a search.

    They are the errors of all projections; the cost of each projection with a large error alone; sets of projections;
    the last set on other blocks, with further projections until it costs little enough there too; and that set without
    each of its members.
    """
    choices = yield from _choice_stages(search)
    chosen = yield from _search_stages(search, choices)
    confirmed = yield from _confirmation_stages(search, chosen, [choice for choice in choices if choice not in chosen])
    yield from _removal_stages(search, *confirmed)


def passes_of(search: Search) -> int:
    """Estimate the number of passes of a search over its blocks, fitted to stored plans."""
    alone = min(len(search.sizes), CANDIDATES)  # nearly all are candidates by both errors
    share = search.confirm_subject.span[1] / search.search_subject.span[1]
    confirmed = share * (search.draws * (2 + alone // 6) + alone // 3)
    return alone * (1 + len(search.better)) + search.draws * (3 + 3 * alone // 8) + round(confirmed)


def _choice_stages(search: Search) -> Stages:
    """Yield cells, and return the projections to improve, those first that save most loss for their price."""
    subject, under = search.search_subject, search.under
    exact, errors = yield [Cell(subject, EXACT, Perplexity()), Cell(subject, under, Errors())]
    paths = _candidates(errors.values)
    schemes = [under, *map(Quantized, search.better)]
    alone = [Cell(subject, scheme.only_at(path), Perplexity(), {"alone": path}) for path in paths for scheme in schemes]
    rows = yield [twin for perplexity in alone for twin in (perplexity, replace(perplexity, metric=Agreement()))]
    tokens = sum(map(len, subject.blocks))
    pairs = zip(rows[::2], rows[1::2], strict=True)
    measured = [CostAlone.of(_loss(loss) - _loss(exact), _value(agreement), tokens) for loss, agreement in pairs]
    by_path = zip(*[iter(measured)] * len(schemes), strict=True)
    choices = [_choice(search, path, alone) for path, alone in zip(paths, by_path, strict=True)]
    return sorted(choices, key=lambda choice: choice.gain / choice.price, reverse=True)


def _candidates(values: Sequence[Mapping]) -> list[str]:
    """Return the paths of the projections with the largest errors, over all tokens or by mean token, in the model's
    order."""
    paths = set()
    for metric in ("damage.error", "damage.error_by_token"):
        errors = [value for value in values if value["metric"] == metric and value["value"] > 0]
        paths |= {value["projection"] for value in sorted(errors, key=lambda value: -value["value"])[:CANDIDATES]}
    return list(dict.fromkeys(value["projection"] for value in values if value["projection"] in paths))


def _choice(search: Search, path: str, alone: Sequence[CostAlone]) -> Choice:
    """Return a projection with the first better scheme whose divergence is a small share of that of the search's
    scheme, or else exact.

    Args:
        alone: costs of the projection, first under the search's scheme, then under each better one.
    """
    price = 1 if search.by == "count" else search.sizes[path]
    under, *others = alone
    suffices = (number for number, other in enumerate(others) if other.divergence <= LEFT * under.divergence)
    number = next(suffices, None)
    if number is None:
        return Choice(path, under.loss, price, None)
    return Choice(path, under.loss - others[number].loss, price, search.better[number])


def _search_stages(search: Search, choices: list[Choice]) -> Stages:
    """Yield cells, and return the fewest projections that suffice on the blocks of the search.

    The search begins with as many as should suffice; then some of the last are left out, or exchanged for others.
    """

    def lowest(sets: list[list[Choice]]) -> Stages:
        """Measure sets, and return the least loss and its set."""
        rows = yield search.cells_of(SEARCH, *sets)
        loss, number = min((_loss(row), number) for number, row in enumerate(rows))
        return loss, sets[number]

    exact, _, most = yield [search.cell_of(SEARCH, EXACT, {}), *search.cells_of(SEARCH, [], choices)]
    allowed = search.allowed(exact)
    # Costs of single projections add up, which predicts the loss that the first choices leave.
    count = _enough(choices, _loss(most) + math.fsum(choice.gain for choice in choices) - allowed)
    loss, chosen = yield from lowest([choices[:count]])
    while loss > allowed and len(chosen) < len(choices):
        more = choices[len(chosen) :]
        loss, chosen = yield from lowest([chosen + more[: max(1, _enough(more, loss - allowed))]])
    while loss <= allowed and chosen:
        loss, fewer = yield from lowest([_without(chosen, choice) for choice in chosen[-EXCHANGED:]])
        chosen = fewer if loss <= allowed else chosen
    others = [choice for choice in choices if choice not in chosen][:EXCHANGED]
    exchanged = [[*_without(chosen, choice), other] for choice in chosen[-EXCHANGED:] for other in others]
    _, best = yield from lowest([chosen, *exchanged])
    return best


def _enough(choices: Sequence[Choice], loss: float) -> int:
    """Return how many of the first choices should save a loss; all if they save too little."""
    saved = accumulate((choice.gain for choice in choices), initial=0.0)
    return next((count for count, gain in enumerate(saved) if gain >= loss), len(choices))


def _without(chosen: list[Choice], removed: Choice) -> list[Choice]:
    return [choice for choice in chosen if choice != removed]


def _confirmation_stages(search: Search, chosen: list[Choice], others: list[Choice]) -> Stages:
    """Yield cells, and return a set that suffices on other blocks, the largest allowed loss, and the rows of all sets.

    Further choices join the set until it suffices there; by bisection, as many as possible of those that joined last
    leave it again. The set is empty if none suffices.
    """
    every, count, fails = [*chosen, *others], len(chosen), len(chosen)
    exact, *rows = yield [search.cell_of(CONFIRM, EXACT, {}), *search.cells_of(CONFIRM, [], chosen)]
    allowed = search.allowed(exact)
    while (missing := _loss(rows[-1]) - allowed) > 0 and count < len(every):
        fails, count = count, count + max(1, _enough(every[count:], missing))
        rows += yield search.cells_of(CONFIRM, every[:count])
    while missing <= 0 and count - fails > 1:
        middle = (fails + count) // 2
        rows += yield search.cells_of(CONFIRM, every[:middle])
        fails, count = (fails, middle) if _loss(rows[-1]) <= allowed else (middle, count)
    return every[:count] if missing <= 0 else [], allowed, rows


def _removal_stages(search: Search, chosen: list[Choice], allowed: float, drawn: list[Row]) -> Stages:
    """Yield cells for the set without each member, until no single member can be left out.

    Each is measured with one draw first. It is measured with all draws, the least important first, unless the loss is
    clearly larger than allowed, and than the least loss measured with all draws.

    Args:
        drawn: rows of several draws on the confirming blocks, from which the scatter of one draw follows.
    """
    tried: list[Choice] = []
    while chosen != tried:
        tried, least = chosen, math.inf
        _, *rows = yield [search.cell_of(SINGLE, EXACT, {}), *search.cells_without(SINGLE, tried, tried)]
        for loss, number in sorted((_loss(row), number) for number, row in enumerate(rows)):
            if loss <= max(allowed, least) + CLEARLY * _scatter(drawn):
                (row,) = yield search.cells_without(CONFIRM, chosen, [tried[number]])
                drawn, least = [*drawn, row], min(least, _loss(row))
                chosen = _without(chosen, tried[number]) if _loss(row) <= allowed else chosen


def _scatter(rows: Sequence[Row]) -> float:
    """Return the standard deviation of the loss of one draw by rounding, from rows of several draws."""
    variances = [(row.values[0].get("standard_deviation", 0.0) / _value(row)) ** 2 for row in rows]
    return math.sqrt(math.fsum(variances) / len(variances))


def _loss(row: Row) -> float:
    """Return the loss of a row of perplexity, nats per token."""
    value = _value(row)
    return value if row.values[0].get("metric") == LOG_PERPLEXITY else math.log(value)


def _value(row: Row) -> float:
    return row.values[0]["value"]


def plan_of(records: Iterable[Mapping], model: str, cost: float, draws: int) -> Plan:
    """Return the plan that results from the records of a search."""
    from outliers.show.value import value_of  # late, for it imports pandas

    records = list(records)
    confirmations = [row for row in records if row.get("stage") == CONFIRM]
    exact = next(row for row in confirmations if "chosen" not in row)
    whole, *sets = (row for row in confirmations if "chosen" in row)
    if exact.get("metric") == LOG_PERPLEXITY:
        raise UserError(f"the perplexity of '{model}' without quantization is larger than any number; expected another")
    sets = [row | {"value": math.inf} if row.get("metric") == LOG_PERPLEXITY else row for row in sets]
    enough = [row for row in sets if row["value"] <= exact["value"] * (1 + cost)]
    last = min(enough, key=lambda row: row["chosen"]) if enough else sets[-1]
    under, chosen = variant(whole["variant"]), variant(last["variant"])
    paths = list(dict.fromkeys(row["projection"] for row in records if row["metric"] == "damage.error"))
    is_quantized = chosen is not AS_IT_IS  # False if every projection is exact
    singles = perplexities_without_each(records, last["chosen"]).values()
    drawn = [perplexity for perplexity in singles if perplexity.deviation is not None]
    single = min(drawn or singles, key=lambda perplexity: perplexity.mean, default=None)
    text = {name: last[name] for name in ("text", "block", "blocks", "first_block") if name in last}
    return Plan(
        model=model,
        weights_hash=last.get("weights_hash"),
        scheme=under.scheme.name,
        exact=list(chosen.skip) if is_quantized else paths,
        instead={scheme.name: list(places) for scheme, places in chosen.instead} if is_quantized else {},
        projections=len(paths),
        measured={
            **text,
            "draws": draws,
            "perplexity": last["value"],
            "unquantized": exact["value"],
            **({"cost_deviation": 0.0} | _bars("cost", value_of(last).increase_over(value_of(exact)))),
            "allowed": cost,
            **({} if single is None else _bars("without_one", single.increase_over(value_of(exact)))),
        },
    )


def _bars(name: str, cost: "Value") -> dict[str, float]:
    """Return a cost as fields of a plan, with its deviation by rounding and its error over the text, if known."""
    bars = {f"{name}_deviation": cost.deviation, f"{name}_error": cost.error}
    return {name: cost.mean, **{field: bar for field, bar in bars.items() if bar is not None}}


def perplexities_without_each(records: Iterable[Mapping], chosen: int) -> "dict[str, Value]":
    """Return the perplexity of a set without each of its projections, by the path of the projection.

    Args:
        records: of a search; those with all draws replace those with one draw.
        chosen: size of the set.
    """
    from outliers.show.value import Value, has_no_number, value_of  # late, for it imports pandas

    without = [row for row in records if "without" in row and row["chosen"] == chosen - 1]
    once_first = sorted(without, key=lambda row: "standard_deviation" in row)
    return {row["without"]: Value(math.inf) if has_no_number(row) else value_of(row) for row in once_first}
