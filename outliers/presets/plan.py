"""A plan: few projections that stay exact, so that a scheme costs at most so much, and none of which could be left
out."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from outliers.criterion import LOG_PERPLEXITY, check_share
from outliers.errors import UserError, unknown_name
from outliers.metrics.records import Agreement, Errors, Perplexity
from outliers.quantization.plans.plan import Plan
from outliers.quantization.schemes import Scheme, get_scheme
from outliers.runs.rows import Row
from outliers.specification.fields import (
    DRAWS,
    NONE,
    Count,
    Line,
    Name,
    Once,
    OneScheme,
    Several,
    Share,
    Split,
)
from outliers.specification.kinds import BLOCKS, Calibrated, OfOneModel
from outliers.subjects import cell
from outliers.subjects.causal import Causal
from outliers.subjects.cell import Cell, Stages, Subject
from outliers.terminal.progress import with_bar
from outliers.variants.quantized import EXACT, Quantized
from outliers.variants.written import variant

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from outliers.quantization.magnitudes import Calibration
    from outliers.show.value import Value

CANDIDATES = 60  # projections with the largest errors over all tokens, and as many with those of the mean token
LEFT = 0.1  # a better scheme suffices where it leaves at most this share of a projection's divergence
EXCHANGED = 3  # of the chosen those that gain least, tried without, and in exchange for as many of the others
SEARCH, CONFIRM, SINGLE = "search", "confirm", "single"  # stages of the perplexities of sets
CLEARLY = 3  # standard deviations of rounding beyond a cost, from which one draw of many tells that a set costs more
BY = ("count", "parameters")
DRAWN = 6  # draws of each set: the standard deviation of fewer is itself uncertain


class Alone(NamedTuple):
    """The cost of a projection where nothing else is quantized, nats a token.

    loss: by how much the loss should rise on any text. divergence: KL from the model as it is.
    """

    loss: float
    divergence: float

    @classmethod
    def of(cls, rise: float, divergence: float, tokens: int) -> "Alone":
        """Of what was measured over some tokens.

        A small change of the predictions that favours no token raises the loss by its divergence D, and what T tokens
        show of it scatters with the variance 2 D / T. With a prior of mean and standard deviation D, the expected rise
        is between the two.
        """
        share = divergence / (divergence + 2 / tokens) if divergence > 0 else 1.0
        return cls(divergence + share * (rise - divergence), divergence)


class Choice(NamedTuple):
    """A projection that may get better, or stay exact.

    gain: by how much the loss should fall on any text, nats a token. price: 1, or the parameters that it takes.
    scheme: that it gets; None for exact.
    """

    path: str
    gain: float
    price: int
    scheme: Scheme | None


@dataclass(frozen=True)
class Search:
    """The settings of a search for a plan.

    searched, confirmed: the model with the blocks of the search, and with others. under: the scheme. better: schemes
    that projections may get before they stay exact. cost: by how much perplexity may rise, as a share. by: what few of
    is better, "count" or "parameters". draws: of each perplexity of a set.
    """

    searched: Subject
    confirmed: Subject
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

        # one that somebody has in memory may lack layers of its configuration
        model = getattr(self.searched, "loaded", None) or skeleton(self.searched.config)
        return {projection.path: math.prod(shape_of(projection.module)) for projection in projections(model)}

    def set_of(self, choices: Iterable[Choice]) -> Quantized:
        """The scheme in all but some projections, which are better."""
        exact: list[str] = []
        instead: dict[Scheme, list[str]] = {}
        for choice in choices:
            (exact if choice.scheme is None else instead.setdefault(choice.scheme, [])).append(choice.path)
        if len(exact) == len(self.sizes):
            return EXACT
        others = tuple((scheme, tuple(sorted(paths))) for scheme, paths in instead.items())
        return Quantized(self.under.scheme, tuple(sorted(exact)), (), self.under.calibration, others)

    def allowed(self, exact: Row) -> float:
        """The largest loss, nats a token, beyond that of the model as it is."""
        return _loss(exact) + math.log1p(self.cost)

    def cells_of(self, stage: str, *sets: Sequence[Choice]) -> list[Cell]:
        """The perplexity of sets of better projections on the blocks of a stage."""
        prices = [sum(choice.price for choice in choices) for choices in sets]
        about = [{"chosen": len(choices), "price": price} for choices, price in zip(sets, prices, strict=True)]
        return [self.cell_of(stage, self.set_of(choices), fields) for choices, fields in zip(sets, about, strict=True)]

    def cell_of(self, stage: str, variant: Quantized, about: dict) -> Cell:
        """The perplexity of the model under a variant on the blocks of a stage."""
        subject = self.searched if stage == SEARCH else self.confirmed
        draws = 1 if stage == SINGLE else self.draws
        return Cell(subject, variant, Perplexity(draws=draws), {"stage": stage} | about)

    def cells_without(self, stage: str, chosen: list[Choice], left: Iterable[Choice]) -> list[Cell]:
        """Those of a set without each of some of its projections."""
        left = list(left)
        cells = self.cells_of(stage, *(_without(chosen, choice) for choice in left))
        return [
            replace(cell, about=cell.about | {"without": choice.path}) for cell, choice in zip(cells, left, strict=True)
        ]


class Blocks(Causal):
    """A model with some blocks of a text; what has to know the inputs of layers is calibrated behind all of them.

    settings: with as many blocks as there are in all.
    """

    def __init__(self, settings: "Planning", first: int, count: int):
        super().__init__(settings.model, settings.revision, settings)
        self.first, self.count = first, count

    @property
    def asked(self) -> dict:
        """The fields that identify it in a row."""
        return super().asked | {"blocks": self.count} | ({"first_block": self.first} if self.first else {})

    @property
    def span(self) -> tuple[int, int]:
        """The first of its blocks of the text, and their number."""
        return self.first, self.count


class Planning(OfOneModel, Calibrated):
    """The projections of one model that stay exact under a scheme, so that it costs at most so much."""

    experiment = "plan"
    of_folder = True

    name: Name = "plan"
    scheme: OneScheme = Field(default="absmax", description="Scheme of all other projections.")
    cost: Annotated[float, Share] = Field(
        default=0.05, gt=0, le=100, allow_inf_nan=False, description="Largest increase of perplexity, such as 5%."
    )
    by: Literal["count", "parameters"] = Field(default="count", description="Size of the plan to minimize.")
    instead: Annotated[list[OneScheme], Split, Once] = Field(
        default=[],
        description=f"Better schemes to try before a projection stays exact, such as llm.int8,w8a8; {NONE}",
    )
    blocks: Count = Field(default=BLOCKS, description="Blocks of the search, from the start of the text.")
    confirm: Count = Field(default=BLOCKS, description="Blocks after them, on which the plan is confirmed.")
    draws: Several = Field(default=DRAWN, description=DRAWS)
    export: Annotated[list[Line], Split, Once] = Field(
        default=[],
        description="Formats of other libraries in which to write the plan too, such as compressed-tensors or torchao.",
    )

    def plans(self) -> list[cell.Plan]:
        """The search of a model by its settings; it is confirmed on the blocks behind those that are searched."""
        settings = self.model_copy(update={"blocks": self.blocks + self.confirm})
        under, *better = (get_scheme(scheme, self.alpha_of_schemes) for scheme in (self.scheme, *self.instead))
        searched, confirmed = Blocks(settings, 0, self.blocks), Blocks(settings, self.blocks, self.confirm)
        search = Search(searched, confirmed, Quantized(under), tuple(better), self.cost, self.by, self.draws)
        check_search(search)
        if self.export:
            exports_of(self, Plan(model=self.model, scheme=under.name, projections=len(search.sizes)))
        return [cell.Plan(searched, search_stages(search), usual=lambda: usual_of(search))]


def exports_of(spec: Planning, plan: Plan) -> dict[str, str]:
    """A plan in the formats that are asked for, by the names of their files.

    Raises:
        UserError: a format is unknown, or cannot say the plan's schemes or model.
    """
    if not spec.export:
        return {}
    from outliers.models.load import load_config
    from outliers.models.skeleton import skeleton
    from outliers.quantization.plans.exports import EXPORTS, export_text

    config = load_config(spec.model, spec.revision)
    model = skeleton(config, config.dtype)
    texts = {name: export_text(plan, name, model) for name in spec.export}
    return {EXPORTS[name].file: text for name, text in texts.items()}


def check_search(search: Search) -> None:
    """Raise UserError where a scheme has no projections to choose from, or another cannot be in its place."""
    if not search.under.scheme.quantizes_projections:
        raise UserError(f"a plan for '{search.under.name}', which quantizes no projection; expected one such as absmax")
    for scheme in search.better:
        if not scheme.quantizes_projections or scheme.needs_calibration or scheme == search.under.scheme:
            raise UserError(
                f"'{scheme.name}' in the place of '{search.under.name}'; expected another scheme that quantizes "
                "projections without a calibration, such as llm.int8"
            )


def search_stages(search: Search) -> Stages:
    """Errors of all projections; what those cost alone whose errors are large; sets of them; the last set on other
    blocks, with further projections until it costs little enough there too; and that without each of its members."""
    choices = yield from _choices(search)
    chosen = yield from _searched(search, choices)
    found = yield from _confirmed(search, chosen, [choice for choice in choices if choice not in chosen])
    yield from _left_out(search, *found)


def usual_of(search: Search) -> int:
    """The usual number of passes of a search over its blocks, from those of kept plans."""
    alone = min(len(search.sizes), CANDIDATES)  # nearly all by both errors
    confirmed = search.confirmed.span[1] / search.searched.span[1] * (search.draws * (2 + alone // 6) + alone // 3)
    return alone * (1 + len(search.better)) + search.draws * (3 + 3 * alone // 8) + round(confirmed)


def _choices(search: Search) -> Stages:
    """The projections that may get better, those first that save most of the loss for what they take."""
    subject, under = search.searched, search.under
    exact, errors = yield [Cell(subject, EXACT, Perplexity()), Cell(subject, under, Errors())]
    paths = _candidates(errors.values)
    schemes = [under, *map(Quantized, search.better)]
    alone = [
        Cell(subject, scheme.alone_at(path), Perplexity(), {"alone": path}) for path in paths for scheme in schemes
    ]
    rows = yield [twin for perplexity in alone for twin in (perplexity, replace(perplexity, metric=Agreement()))]
    tokens = sum(map(len, subject.blocks))
    pairs = zip(rows[::2], rows[1::2], strict=True)
    measured = [Alone.of(_loss(loss) - _loss(exact), _value(agreement), tokens) for loss, agreement in pairs]
    by_path = zip(*[iter(measured)] * len(schemes), strict=True)
    choices = [_choice(search, path, alone) for path, alone in zip(paths, by_path, strict=True)]
    return sorted(choices, key=lambda choice: choice.gain / choice.price, reverse=True)


def _candidates(values: Sequence[Mapping]) -> list[str]:
    """The paths of the projections with the largest errors, by either measure, in the order of the model."""
    paths = set()
    for metric in ("damage.error", "damage.error_by_token"):
        errors = [value for value in values if value["metric"] == metric and value["value"] > 0]
        paths |= {value["projection"] for value in sorted(errors, key=lambda value: -value["value"])[:CANDIDATES]}
    return list(dict.fromkeys(value["projection"] for value in values if value["projection"] in paths))


def _choice(search: Search, path: str, alone: Sequence[Alone]) -> Choice:
    """A projection with the first of the better schemes that leaves little of its divergence, or exact.

    alone: under the scheme, and under each better one.
    """
    price = 1 if search.by == "count" else search.sizes[path]
    under, *others = alone
    suffices = (number for number, other in enumerate(others) if other.divergence <= LEFT * under.divergence)
    number = next(suffices, None)
    if number is None:
        return Choice(path, under.loss, price, None)
    return Choice(path, under.loss - others[number].loss, price, search.better[number])


def _searched(search: Search, choices: list[Choice]) -> Stages:
    """The fewest that suffice on the blocks of the search: as many as should, then with some of the last left out, or
    in exchange for others."""

    def lowest(sets: list[list[Choice]]) -> Stages:
        """Of sets that with the least loss."""
        rows = yield search.cells_of(SEARCH, *sets)
        loss, number = min((_loss(row), number) for number, row in enumerate(rows))
        return loss, sets[number]

    exact, _, most = yield [search.cell_of(SEARCH, EXACT, {}), *search.cells_of(SEARCH, [], choices)]
    allowed = search.allowed(exact)
    # What projections cost alone adds up, so that what the first ones leave is known before it is measured.
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
    """The number of the first ones that should save so much of the loss; all where none do."""
    saved = accumulate((choice.gain for choice in choices), initial=0.0)
    return next((count for count, gain in enumerate(saved) if gain >= loss), len(choices))


def _without(chosen: list[Choice], left: Choice) -> list[Choice]:
    return [choice for choice in chosen if choice != left]


def _confirmed(search: Search, chosen: list[Choice], others: list[Choice]) -> Stages:
    """The set on other blocks: with as many of the others as should suffice until it does there, and then with half of
    those that joined last, by bisection. It, empty where none does; the largest loss that is allowed, and the rows of
    all sets."""
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


def _left_out(search: Search, chosen: list[Choice], allowed: float, drawn: list[Row]) -> Stages:
    """The set without each of its members, until no single one can be left out. Each is measured once, and with all
    draws where that is not clearly more than what is allowed and than the least of those with all draws, those first
    that matter least.

    drawn: rows of several draws on the blocks that confirm, by which one draw scatters.
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
    """The standard deviation of the loss of one draw by rounding, from rows of several."""
    variances = [(row.values[0].get("standard_deviation", 0.0) / _value(row)) ** 2 for row in rows]
    return math.sqrt(math.fsum(variances) / len(variances))


def _loss(row: Row) -> float:
    """The loss of a row of perplexity, nats a token."""
    value = _value(row)
    return value if row.values[0].get("metric") == LOG_PERPLEXITY else math.log(value)


def _value(row: Row) -> float:
    return row.values[0]["value"]


@with_bar
def plan(
    model: "PreTrainedModel",
    blocks: "Iterable[torch.Tensor]",
    scheme: "str | Scheme",
    confirm: "Iterable[torch.Tensor]",
    cost: float | str = 0.05,
    by: str = "count",
    instead: "Sequence[str | Scheme]" = (),
    draws: int = DRAWN,
    calibration: "Calibration | None" = None,
    *,
    progress: bool | None = None,
) -> Plan:
    """Return a plan with few exact projections under which a scheme costs at most so much perplexity.

    What each projection costs alone is measured; those are left exact that save most, until the perplexity of the whole
    is low enough; the last ones are tried without, and in exchange for others. The set is then confirmed on other
    blocks, where further projections join it until it costs little enough there too, and leave it as long as one of
    them can: no single one of the plan can be left out. The model is left as it was.

    Args:
        model: a causal language model, resident or streamed, whose exact weights are there.
        blocks: token ids, int64 (blocks, T), or a list of (T,), of the search.
        scheme: name, or a scheme of one's own, of all other projections.
        confirm: further blocks, on which the plan is confirmed.
        cost: by how much the perplexity may rise, as a share: 0.05 or "5%".
        by: what few of stays exact: "count" of projections, or "parameters".
        instead: schemes that a projection gets before it stays exact: the first that leaves at most a tenth of the KL
            divergence that the scheme causes there.
        draws: how many times each set is measured, with embeddings changed by 1e-6 and ties of weights rounded anew.
        calibration: how large the inputs are, which some remedies have to know; see `outliers.calibrate`.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Returns:
        The plan; `measured` says what it costs on the blocks that confirm it.

    Raises:
        UserError: a scheme is unknown or quantizes no projection, `by` is unknown; as `outliers.quantize` and
            `outliers.perplexity`.

    Example:
        >>> found = outliers.plan(model, blocks[:1], "absmax", confirm=blocks[1:], cost=0.05, draws=2)
    """
    from outliers.metrics.measurement import records_along
    from outliers.quantization.convert import check_calibrated
    from outliers.subjects.given import Given
    from outliers.text.blocks import sequences

    if by not in BY:
        raise unknown_name("size of a plan", by, BY)
    check_calibrated(get_scheme(scheme), calibration)
    searched, confirmed = (Given(model, list(sequences(part, None))) for part in (blocks, confirm))
    under, better = Quantized(get_scheme(scheme), calibration=calibration), tuple(map(get_scheme, instead))
    cost = check_share("cost", cost)
    search = Search(searched, confirmed, under, better, cost, by, draws)
    check_search(search)
    return plan_of(records_along(search_stages(search)), searched.name, cost, draws)


def plan_of(records: Iterable[Mapping], model: str, cost: float, draws: int) -> Plan:
    """The plan that the records of a search end in."""
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
    is_quantized = isinstance(chosen, Quantized)  # and not exact everywhere
    singles = singles_of(records, last["chosen"]).values()
    drawn = [one for one in singles if one.deviation is not None]
    single = min(drawn or singles, key=lambda one: one.mean, default=None)
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
            **({"cost_deviation": 0.0} | _bars("cost", value_of(last).beside(value_of(exact)))),
            "allowed": cost,
            **({} if single is None else _bars("without_one", single.beside(value_of(exact)))),
        },
    )


def _bars(name: str, cost: "Value") -> dict[str, float]:
    """A cost as fields of a plan, with its deviation by rounding and its error over the text where they are known."""
    bars = {f"{name}_deviation": cost.deviation, f"{name}_error": cost.error}
    return {name: cost.mean, **{field: bar for field, bar in bars.items() if bar is not None}}


def singles_of(records: Iterable[Mapping], chosen: int) -> "dict[str, Value]":
    """Perplexities of a set of so many projections without each of them, by its path: over all draws where it was
    measured with them, and then with their scatter."""
    from outliers.show.value import Value, is_beyond, value_of  # late, for it imports pandas

    without = [row for row in records if "without" in row and row["chosen"] == chosen - 1]
    once_first = sorted(without, key=lambda row: "standard_deviation" in row)
    return {row["without"]: Value(math.inf) if is_beyond(row) else value_of(row) for row in once_first}
