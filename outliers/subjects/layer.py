"""A linear layer of a shape, with random weights."""

from typing import TYPE_CHECKING

from outliers.specification.kinds import Machine
from outliers.subjects.cell import Cell, Subject, unusual

if TYPE_CHECKING:
    from outliers.subjects.bench import Bench


def layer_shape(dimension: int | str) -> tuple[int, int]:
    """Features and outputs of a layer of a dimension d, which has 4 d outputs, or as "576x1536" says."""
    if isinstance(dimension, int):
        return dimension, 4 * dimension
    features, outputs = map(int, dimension.split("x"))
    return features, outputs


class Layer(Subject):
    """The first feed-forward layer of models of a dimension, or of a shape, see `layer_shape`."""

    def __init__(self, dimension: int | str, settings: Machine):
        self.dimension, self.settings = dimension, settings
        self.name = f"dimension {dimension}"

    @property
    def asked(self) -> dict:
        """The fields that identify it in a row."""
        return {"dimension": self.dimension, "dtype": self.settings.dtype, **unusual(dict(self.settings))}

    def prepare(self) -> None:
        """See that the device is there."""
        from outliers.subjects.bench import check_machine  # which imports torch, as what follows

        check_machine(self.settings)

    def facts(self, _bench: "Bench", _cell: Cell) -> dict:
        """The number of its outputs, and the kernels that multiply it."""
        from outlier_kernels import dispatch

        from outliers.models.load import find_device

        first, *_ = dispatch.backends(find_device(self.settings.device))
        return {"outputs": layer_shape(self.dimension)[1], "kernels": first.path}
