"""The interface of a measurement: all that the planner (`outliers.runs.planner`) has to know of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from outlier_kernels.formats import FORMATS
from transformers import PreTrainedModel

from outliers.models.variant import Variant
from outliers.quantization.schemes import Scheme
from outliers.show.value import grouped
from outliers.subjects.cell import Cell, Subject
from outliers.subjects.model_cache import ModelCache, naming

FLOAT = 4  # bytes of a float32 number
DIGITS = ".7g"  # format with the digits of float32
ALL_OPTIONS = frozenset(("dtype", "device", "block", "blocks", "stream", "memory"))


class MemoryNeeds(NamedTuple):
    """The memory that a measurement needs beside a model's weights, for forecasts.

    per_weight: for each variant, of which one is in memory at a time, the bytes that are stored beside each weight of a
    projection or instead of it, see `stored_bytes`. attention_matrices, logit_matrices: number of simultaneous matrices
    (heads, T, T) of a layer, and (T, vocabulary). variant_count: number of variants under which each block passes a
    streamed model. kept_states: number of a block's hidden states that are kept until the last layer. block: tokens of
    a block, if not those of the experiment; batch: number of blocks in a pass. cached: tokens whose keys and values are
    kept. other_models: number of further models in memory. options: options that an error message may suggest to
    change.
    """

    per_weight: tuple[tuple[int, int], ...] = ()
    attention_matrices: int = 0
    logit_matrices: int = 0
    variant_count: int = 1
    kept_states: int = 0
    block: int | None = None
    batch: int = 1
    cached: int = 0
    other_models: int = 0
    options: frozenset[str] = ALL_OPTIONS


def stored_bytes(schemes: Iterable[Scheme], drawn: bool = False) -> tuple[int, int]:
    """Return the bytes that schemes together store beside a weight, and the number of changed copies of the weight.

    Copies are in the model's dtype. drawn: whether there are draws above 0, which have codes of their own, and weights
    to multiply with outlier features.
    """
    schemes = list(schemes)
    kinds = dict.fromkeys(scheme.weight_operand for scheme in schemes if scheme.weights or scheme.transforms)
    codes = sum(1 if weights and FORMATS[weights.format].integers else FLOAT for weights, *_ in kinds)
    copies = sum(bool(transforms) for _, _, transforms, *_ in kinds)
    exact = any(scheme.weights and scheme.outlier_threshold is not None for scheme in schemes)
    return (2 * codes, copies + exact) if drawn else (codes, copies)


class Measurement(ABC):
    """A way to measure cells of one subject, possibly of several metrics that share a pass.

    unit: name of a step of progress. cost: time of a step on a CPU, relative to a block's pass through the model.
    splits: whether a text can be measured in parts, on several machines.
    """

    unit = "block"
    cost = 1.0
    splits = True

    def check(self, cell: Cell) -> None:  # noqa: B027 (most fit all subjects)
        """Raise UserError if the parameters of a metric do not fit its subject."""

    def provenance(self, cell: Cell, model_cache: ModelCache) -> dict:
        """Return what a row depends on beside its subject, its variant and the code."""
        return {}

    def shared(self, cell: Cell) -> Hashable:
        """Return the key of cells of one subject that are measured together; by default every cell has its own."""
        return id(cell)

    def steps(self, cells: Sequence[Cell]) -> int:
        """Return the number of progress steps of some cells that are measured together."""
        return sum(len(cell.subject.blocks) for cell in cells)

    def memory_needs(self, cells: Sequence[Cell]) -> MemoryNeeds | None:
        """Return the memory that these cells need beside the model, with one variant's codes at a time.

        Return None if there is no model.
        """
        variants = {cell.variant.name: cell.variant for cell in cells}.values()
        drawn = any(getattr(cell.metric, "draws", 1) > 1 for cell in cells)
        per_weight = tuple(
            stored_bytes((quantized.scheme for quantized in variant.schemes), drawn) for variant in variants
        )
        return MemoryNeeds(
            per_weight, variant_count=len(variants), other_models=max(len(variant.swaps) for variant in variants)
        )

    @abstractmethod
    def measure(self, model_cache: ModelCache, cells: Sequence[Cell], part: slice, provenance: dict) -> list[Any]:
        """Return the result of a part of the text for each cell; results are pickled to be sent between machines.

        part: of the subject's blocks. provenance: of the subject; a loaded model must have the weights that it names.
        """

    @abstractmethod
    def values(self, cell: Cell, results: list[Any]) -> list[dict]:
        """Return the values of a row from the results of all parts, in their order."""


class CellMeasurement(Measurement):
    """A measurement that passes the model under the variant once for each cell."""

    @abstractmethod
    def measure_cell(
        self, model_cache: ModelCache, cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Variant
    ) -> Any:
        """Return the result of some blocks; `variant` has all that it needs to know of the subject."""

    def measure(self, model_cache: ModelCache, cells: Sequence[Cell], part: slice, provenance: dict) -> list[Any]:
        (cell,) = cells
        subject = cell.subject
        model, blocks = subject.load(model_cache, provenance), model_cache.with_progress(subject.blocks[part])
        with naming(subject.name, cell.variant.name):
            (variant,) = model_cache.completed([cell.variant], subject)
            return [self.measure_cell(model_cache, cell, model, blocks, variant)]


class LogitsReader(Protocol):
    """Reads the logits of a block's predictions, one slice of the vocabulary after the other.

    It is made from the model under the variant, the block and the targets (predictions,). compares: whether it also
    reads the logits of the unquantized model.
    """

    compares: bool

    def __init__(self, model: PreTrainedModel, block: torch.Tensor, targets: torch.Tensor): ...

    def add(self, start: int, logits: torch.Tensor, exact: torch.Tensor | None) -> None:
        """Read logits (predictions, tokens) of the tokens from `start` on, without changing them."""

    def result(self) -> Any:
        """Return the result of the block."""


class StatesComputation(NamedTuple):
    """The computation of a metric of the last hidden states.

    measure: called with the model under the variant, the block, its last hidden states (T, features) and, if
    `compares`, the unquantized model with its own ones; returns the result of the block. values: returns the values of
    a row from the results of all blocks, by draw; if `of_subject`, it is also called with the subject.
    """

    measure: Callable[[PreTrainedModel, torch.Tensor, torch.Tensor, tuple[PreTrainedModel, torch.Tensor] | None], Any]
    values: Callable[..., list[dict]]
    compares: bool = False
    of_subject: bool = False


class LogitsComputation(NamedTuple):
    """The computation of a metric of the logits, which all such metrics of a variant share.

    values, of_subject: as in `StatesComputation`.
    """

    reader: type[LogitsReader]
    values: Callable[..., list[dict]]
    of_subject: bool = False

    @property
    def compares(self) -> bool:
        """Whether the metric also reads the logits of the unquantized model."""
        return self.reader.compares


def float_digits(value: torch.Tensor | float, digits: str = DIGITS) -> float:
    """Round a number to the digits that rows have."""
    return float(f"{float(value):{digits}}")


def loaded(
    model_cache: ModelCache, subject: Subject, variants: Iterable[Variant], provenance: dict
) -> tuple[PreTrainedModel, list[Variant]]:
    """Load the model of a subject, and complete variants with what they need to know of its text."""
    model = subject.load(model_cache, provenance)
    with naming(subject.name):
        return model, model_cache.completed(variants, subject)


def by_draw(results: Iterable[Iterable[list]], seed_count: int) -> list[list]:
    """Return a list of the results of all blocks for each draw and seed.

    results: for each part of the text, the results of its blocks by draw; a text is repeated for each seed.
    """
    draws = (list(chain.from_iterable(parts)) for parts in zip(*results, strict=True))
    return [of_seed for draw in draws for of_seed in by_seed(draw, seed_count)]


def by_seed(losses: list, seed_count: int) -> list[list]:
    """Split the results of all blocks of a text that is repeated for each seed."""
    blocks = len(losses) // seed_count
    return [losses[blocks * number : blocks * (number + 1)] for number in range(seed_count)]


def bundles_of(cells: list[Cell]) -> Iterable[list[Cell]]:
    """Group cells into bundles, which are measured together: by subject, measurement, and `Measurement.shared`."""
    groups = grouped(cells, lambda cell: (id(cell.subject), cell.metric.measurement)).values()
    return chain.from_iterable(grouped(alike, alike[0].metric.measurement.shared).values() for alike in groups)
