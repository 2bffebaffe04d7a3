"""A linear layer with random weights."""

from typing import TYPE_CHECKING

from outliers.config.experiment import Experiment
from outliers.subjects.cell import Cell, Subject

if TYPE_CHECKING:
    from outliers.subjects.model_cache import ModelCache


def layer_shape(dimension: int | str) -> tuple[int, int]:
    """Return input and output features: d and 4 d of a model dimension d, or those of a text such as "576x1536"."""
    if isinstance(dimension, int):
        return dimension, 4 * dimension
    features, outputs = map(int, dimension.split("x"))
    return features, outputs


class SingleLayer(Subject):
    """The first feed-forward layer of models of a dimension, or a layer of a given shape, see `layer_shape`."""

    def __init__(self, dimension: int | str, experiment: Experiment):
        self.dimension, self.experiment = dimension, experiment
        self.name = f"dimension {dimension}"

    @property
    def request(self) -> dict:
        return {"dimension": self.dimension, "dtype": self.experiment.dtype, **self.experiment.non_default()}

    def prepare(self) -> None:
        from outliers.subjects.model_cache import check_machine  # late, for it imports torch

        check_machine(self.experiment)

    def provenance(self, _model_cache: "ModelCache", _cell: Cell) -> dict:
        """Return the number of output features, and the kernels that compute the product."""
        from outlier_kernels import dispatch

        from outliers.models.load import find_device

        first, *_ = dispatch.backends(find_device(self.experiment.device))
        return {"outputs": layer_shape(self.dimension)[1], "kernels": first.row_name}
