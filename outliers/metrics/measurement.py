"""How a metric is measured: what the planner (`outliers.runs.planner`) has to know to do the rest."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from outliers.measurements.bench import Bench
    from outliers.runs.cell import Cell
    from outliers.runs.planner import Planner


class Measurement(ABC):
    """Answers cells of one subject, which may be of several metrics that share it.

    splits: whether a text can be measured in parts, on several machines.
    """

    splits = True

    def facts(self, cell: "Cell", bench: "Bench") -> dict:
        """What a row of a cell has to be made anew for, beside its subject, its variant and the code."""
        return {}

    def kept(self, cell: "Cell", facts: dict, planner: "Planner") -> list[tuple] | None:
        """The parts of the answer to a cell of which something is kept beside its row, as the planner's `answer` gives
        them, measured as far as they are not there; None where nothing is kept."""
        return None

    def bundles(self, cells: Sequence["Cell"]) -> list[list["Cell"]]:
        """Cells of one subject that are answered at once."""
        return [[cell] for cell in cells]

    def steps(self, cells: Sequence["Cell"]) -> int:
        """How far the answers to some cells, which are given at once, move the bar."""
        return sum(len(cell.subject.blocks) for cell in cells)

    @abstractmethod
    def answer(self, bench: "Bench", cells: Sequence["Cell"], part: slice, facts: dict) -> list[Any]:
        """What is measured of a part of the text for each cell; it travels between machines.

        facts: of the subject, whose weights a model that is loaded for this must have.
        """

    @abstractmethod
    def values(self, cell: "Cell", answers: list[Any]) -> list[dict]:
        """The values of a row, from the answers of all parts in their order."""


class Seen(NamedTuple):
    """How a metric is made of the last hidden states.

    see: called with the model under the variant, ids (T,), its last hidden states (T, features) and, where `compares`,
    those of the unquantized model; what it returns is of a block. values: of what is seen of all blocks, draw by draw,
    the values of a row.
    """

    see: Callable[[PreTrainedModel, torch.Tensor, torch.Tensor, torch.Tensor | None], Any]
    values: Callable[[list[list]], list[dict]]
    compares: bool = False
