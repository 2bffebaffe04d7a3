"""A whole model in, a whole model out."""

import copy

from torch import nn
from transformers import PreTrainedModel

from outliers.models.anatomy import projections
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.schemes import Scheme, get_scheme


def quantize(model: PreTrainedModel, scheme: str | Scheme) -> PreTrainedModel:
    """Return `model` with every linear projection of its decoder layers under an 8-bit scheme.

    The given model is not changed; the new one shares its weights and adds 8-bit codes. Embeddings, norms, the head
    and the attention function stay as they are. `fp32` quantizes nothing. A model that is quantized already keeps
    its exact weights and can be put under another scheme; codes that both schemes have in common are shared.

    Raises:
        UserError: no scheme has this name, or the architecture is unknown.
    """
    scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
    # deepcopy builds a new module tree, but takes from its memo whatever is there: parameters on the same storage,
    # and in the place of each projection the one under the new scheme.
    memo = {id(old): nn.Parameter(old.detach(), old.requires_grad) for old in model.parameters()}
    memo |= {id(module): _under(scheme, module, memo) for _, _, _, module in projections(model)}
    return copy.deepcopy(model, memo)


def _under(scheme: Scheme, module: nn.Module, memo: dict) -> nn.Module:
    """A projection, quantized or not, under a scheme."""
    exact = copy.deepcopy(module.projection if isinstance(module, QuantizedLinear) else module, memo)
    if scheme.bits != 8:
        return exact
    quantized = QuantizedLinear(exact, scheme)
    if isinstance(module, QuantizedLinear):
        quantized.share_codes(module)
    return quantized
