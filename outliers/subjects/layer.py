"""A linear layer of a shape, with random weights."""

from typing import TYPE_CHECKING

from outliers.specification.kinds import Machine, layer_shape
from outliers.subjects.cell import Cell, Subject, unusual

if TYPE_CHECKING:
    from outliers.subjects.bench import Bench


class Layer(Subject):
    """The first feed-forward layer of models of a dimension, or of a shape, see `layer_shape`."""

    def __init__(self, dimension: int | str, settings: Machine):
        self.dimension, self.settings = dimension, settings
        self.name = f"dimension {dimension}"

    @property
    def asked(self) -> dict:
        """What rows say of it."""
        return {"dimension": self.dimension, "dtype": self.settings.dtype, **unusual(dict(self.settings))}

    def prepare(self) -> None:
        """See that the device is there."""
        from outliers.subjects.bench import check_machine  # which imports torch, as what follows

        check_machine(self.settings)

    def facts(self, _bench: "Bench", _cell: Cell) -> dict:
        """How many outputs it has, and which kernels multiply it."""
        from outlier_kernels import dispatch

        from outliers.models.load import find_device

        kernels = dispatch.path(find_device(self.settings.device))
        return {"outputs": layer_shape(self.dimension)[1], "kernels": kernels}
