"""What subjects without stored weights have in common."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from outliers.subjects.cell import Cell

if TYPE_CHECKING:
    from outliers.subjects.bench import Bench


class Weightless:
    """A subject of which no stored weights are read, and no text."""

    blocks: Sequence = range(1)  # it is measured at once
    of_one_variant = of_variants = False
    settings: Any

    def check(self, _cells: Iterable[Cell]) -> None:
        """All fit it."""

    def check_unchanged(self) -> None:
        """No file has its weights."""

    def weights(self, _bench: "Bench") -> dict:
        """None are known."""
        return {}
