"""Function-preserving changes of the features: (X T)(T⁻¹ W) = X W, made before anything is quantized.

A transform is one file, and its row here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from outlier_kernels.formats import find

if TYPE_CHECKING:
    import torch


class Transform(NamedTuple):
    """How a layer's features change, and what undoes it in its weight.

    fit: of a weight (outputs, features) the tensor that says which change it is, such as a factor for each feature; a
    layer keeps it. hidden_states: of X (tokens, features) and that tensor X T. weight: of a weight (outputs, features)
    and that tensor the weight times T⁻ᵀ.
    """

    fit: "Callable[[torch.Tensor], torch.Tensor]"
    hidden_states: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
    weight: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"


TRANSFORMS: dict[str, str | Transform] = {}  # by name: itself, or where it is, "module:name"


def find_transform(name: str) -> Transform:
    """The transform of a row of the table."""
    return find(TRANSFORMS[name])
