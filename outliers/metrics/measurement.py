"""The measurement of a metric: all that the planner (`outliers.runs.planner`) has to know to do the rest."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from outlier_kernels.formats import FORMATS
from transformers import PreTrainedModel

from outliers.models.variant import Variant
from outliers.quantization.schemes import Scheme
from outliers.show.value import grouped, with_paired_errors
from outliers.subjects.bench import Bench, naming
from outliers.subjects.cell import Cell, Stages, following
from outliers.terminal.forecaster import Steps
from outliers.terminal.progress import Progress, taken
from outliers.variants.together import others_of, schemes_of

FLOAT = 4  # bytes of a number in float32
DIGITS = ".7g"  # of a number in float32
ALL_OPTIONS = frozenset(("dtype", "device", "block", "blocks", "stream", "memory"))


class Keeps(NamedTuple):
    """The memory of a measurement beside a model's weights, by which its need is forecast.

    beside: what stands beside each weight of a projection, or in its place, of which one at a time is there; see
    `held`. attention, logits: matrices (heads, T, T) of a layer and (T, vocabulary) that are there at once. variants,
    roles: under how many variants each block passes a streamed model, and how many of its hidden states are kept until
    its last layer. block: tokens of a block, where not those of the settings; batch: how many pass at once. cached:
    tokens whose keys and values are kept. others: how many models of others are there beside ours. options: what the
    user may be told to change.
    """

    beside: tuple[tuple[int, int], ...] = ()
    attention: int = 0
    logits: int = 0
    variants: int = 1
    roles: int = 0
    block: int | None = None
    batch: int = 1
    cached: int = 0
    others: int = 0
    options: frozenset[str] = ALL_OPTIONS


def held(schemes: Iterable[Scheme]) -> tuple[int, int]:
    """Bytes that some schemes hold together beside a weight, and copies of it, transformed, in the model's dtype."""
    kinds = dict.fromkeys(scheme.weight_operand for scheme in schemes if scheme.weights or scheme.transforms)
    codes = sum(1 if weights and FORMATS[weights.format].integers else FLOAT for weights, *_ in kinds)
    return codes, sum(bool(transforms) for _, _, transforms, *_ in kinds)


class Measurement(ABC):
    """Answers cells of one subject, which may be of several metrics that share it.

    unit: what a step is of. cost: times as long as a block passes the model, on a CPU, a step takes. splits: whether a
    text can be measured in parts, on several machines.
    """

    unit = "block"
    cost = 1.0
    splits = True

    def check(self, cell: Cell) -> None:  # noqa: B027 (most fit all subjects)
        """Raise UserError where the parameters of a metric do not fit its subject."""

    def facts(self, cell: Cell, bench: Bench) -> dict:
        """Facts that a row of a cell depends on, beside its subject, its variant and the code."""
        return {}

    def beside_row(self, cell: Cell, facts: dict, planner: Any) -> list[tuple] | None:
        """The parts of the answer to a cell of which something is kept beside its row, as the planner's `answer` gives
        them, measured as far as they are not there; None where nothing is kept."""
        return None

    def shared(self, cell: Cell) -> Hashable:
        """The key that cells of one subject share which are answered at once; by default each has its own."""
        return id(cell)

    def steps(self, cells: Sequence[Cell]) -> int:
        """Progress of the bar by the answers to some cells that are given at once."""
        return sum(len(cell.subject.blocks) for cell in cells)

    def keeps(self, cells: Sequence[Cell]) -> Keeps | None:
        """The memory beside the model of these cells' subject: one variant's codes at a time; None where no model
        is."""
        variants = {cell.variant.name: cell.variant for cell in cells}.values()
        beside = tuple(held(quantized.scheme for quantized in schemes_of(variant)) for variant in variants)
        return Keeps(beside, variants=len(variants), others=max(len(others_of(variant)) for variant in variants))

    @abstractmethod
    def answer(self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict) -> list[Any]:
        """The result of a part of the text for each cell; it travels between machines.

        facts: of the subject, whose weights a model that is loaded for this must have.
        """

    @abstractmethod
    def values(self, cell: Cell, answers: list[Any]) -> list[dict]:
        """The values of a row, from the answers of all parts in their order."""


class OnePass(Measurement):
    """Answers each cell from a pass of its own through the model under the variant."""

    @abstractmethod
    def observed(self, bench: Bench, cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Any) -> Any:
        """The answer of some blocks; `variant` knows what it needs of the subject."""

    def answer(self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict) -> list[Any]:
        (cell,) = cells
        subject = cell.subject
        model, blocks = subject.load(bench, facts), bench.counted(subject.blocks[part])
        with naming(subject.name, cell.variant.name):
            (variant,) = bench.knowing([cell.variant], subject)
            return [self.observed(bench, cell, model, blocks, variant)]


class Reader(Protocol):
    """Reads the logits of a block's predictions, a part of the vocabulary after the other.

    Made of the model under the variant, the block and the targets (predictions,). compares: whether it reads those of
    the unquantized model beside them.
    """

    compares: bool

    def __init__(self, model: PreTrainedModel, block: torch.Tensor, targets: torch.Tensor): ...

    def add(self, start: int, logits: torch.Tensor, exact: torch.Tensor | None) -> None:
        """Read logits (predictions, tokens) of the tokens from `start` on, and leave them as they are."""

    def result(self) -> Any:
        """The values of the block."""


class Seen(NamedTuple):
    """A metric made of the last hidden states.

    see: called with the model under the variant, the block, its last hidden states (T, features) and, where `compares`,
    the unquantized model with those of it; what it returns is of a block. values: of what is seen of all blocks, draw
    by draw, the values of a row; where `of_subject`, it is called with the subject, too.
    """

    see: Callable[[PreTrainedModel, torch.Tensor, torch.Tensor, tuple[PreTrainedModel, torch.Tensor] | None], Any]
    values: Callable[..., list[dict]]
    compares: bool = False
    of_subject: bool = False


class Read(NamedTuple):
    """A metric made of the logits, which all such metrics of a variant share; values, of_subject: as of `Seen`."""

    reader: type[Reader]
    values: Callable[..., list[dict]]
    of_subject: bool = False

    @property
    def compares(self) -> bool:
        """Whether it reads the logits of the unquantized model, too."""
        return self.reader.compares


def short(value: torch.Tensor | float, digits: str = DIGITS) -> float:
    """A number as rows have it."""
    return float(f"{float(value):{digits}}")


def loaded(
    bench: Bench, subject: Any, variants: Iterable[Variant], facts: dict
) -> tuple[PreTrainedModel, list[Variant]]:
    """The model of a subject, and variants that know what they have to of its text."""
    model = subject.load(bench, facts)
    with naming(subject.name):
        return model, bench.knowing(variants, subject)


def by_draw(answers: Iterable[Iterable[list]], seeds: int) -> list[list]:
    """The results of all blocks of a text for each draw, and in it each seed; answers: of its parts, draw by draw."""
    draws = (list(chain.from_iterable(parts)) for parts in zip(*answers, strict=True))
    return [of_seed for draw in draws for of_seed in by_seed(draw, seeds)]


def by_seed(losses: list, seeds: int) -> list[list]:
    """The results of all blocks of a text that is there so many times, of each time."""
    blocks = len(losses) // seeds
    return [losses[blocks * number : blocks * (number + 1)] for number in range(seeds)]


def bundles_of(cells: list[Cell]) -> Iterable[list[Cell]]:
    """Cells that are answered together, by their subjects, what measures them, and what they share."""
    groups = grouped(cells, lambda cell: (id(cell.subject), cell.metric.measurement)).values()
    return chain.from_iterable(grouped(alike, alike[0].metric.measurement.shared).values() for alike in groups)


def records_of(cells: Iterable[Cell]) -> list[dict]:
    """The values of cells of one given model, a flat dictionary for each, in the order of the cells."""
    return records_along(stage for stage in [list(cells)])


def records_along(stages: Stages) -> list[dict]:
    """The same of cells of which some follow from what others are answered."""
    with taken() as bar:
        return _records(stages, bar)


def _records(stages: Stages, bar: Progress | None) -> list[dict]:
    bench, records = Bench(bar if bar is not None else SimpleNamespace(update=_quiet, begin=_quiet)), []
    cells = next(stages)
    while cells:
        values: dict[Cell, list[dict]] = {}
        bundles = [(bundle, _steps(bundle)) for bundle in bundles_of(cells)]
        for _, steps in bundles if bar is not None else ():
            bar.expect(steps)
        for bundle, steps in bundles:
            measurement = bundle[0].metric.measurement
            if bar is not None:
                bar.enter(bar.desc.removesuffix(": "), steps)
            end = 0 if bar is None else bar.n + steps.count
            answers = measurement.answer(bench, bundle, slice(0, len(bundle[0].subject.blocks)), {})
            if bar is not None and bar.n < end:  # what it did not move itself
                bar.update(end - bar.n)
            values |= {cell: measurement.values(cell, [answer]) for cell, answer in zip(bundle, answers, strict=True)}
        records += [_about(cell) | value for cell in cells for value in values[cell]]
        cells = following(stages, [SimpleNamespace(values=values[cell]) for cell in cells])
    return with_paired_errors(records)


def _steps(bundle: list[Cell]) -> Steps:
    measurement = bundle[0].metric.measurement
    kind = f"{type(measurement).__module__} {bundle[0].variant.name}"
    return Steps(measurement.steps(bundle), kind=kind, cost=measurement.cost)


def _about(cell: Cell) -> dict:
    return {"variant": cell.variant.name, **cell.variant.fields(), **cell.about}


def _quiet(_steps: int = 1) -> None:
    """As a bar that nobody sees."""
