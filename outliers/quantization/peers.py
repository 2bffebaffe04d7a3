"""Linear layers of other libraries, to compare with."""

import copy
import importlib.util
import logging

from torch import nn
from transformers import PreTrainedModel

from outliers.models.anatomy import check_plain, projections
from outliers.models.hooks import check_hooks, hand_over_hooks
from outliers.quantization.linear import stored_weight

BITSANDBYTES = "bitsandbytes"


def has_bitsandbytes() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec(BITSANDBYTES) is not None


def bitsandbytes_layer(exact: nn.Module, threshold: float = 6.0) -> nn.Module:
    """The same layer, `nn.Linear` or `Conv1D`, by bitsandbytes, in eval mode (in training mode its CPU path does not
    quantize activations).

    threshold: from which magnitude on a feature is multiplied in 16 bits.
    """
    logging.getLogger(BITSANDBYTES).setLevel(logging.CRITICAL)  # it complains of optional kernels as it is imported
    import bitsandbytes

    weight, bias = stored_weight(exact).detach(), exact.bias
    outputs, features = weight.shape
    how = {"bias": bias is not None, "has_fp16_weights": False, "threshold": threshold}
    layer = bitsandbytes.nn.Linear8bitLt(features, outputs, **how)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias.detach()}))
    if bias is not None:
        layer.bias.data = layer.bias.data.to(bias.dtype)
    return layer.to(weight.device).eval()


def with_bitsandbytes(model: PreTrainedModel, threshold: float = 6.0) -> PreTrainedModel:
    """A new model whose projections of the decoder layers are those of bitsandbytes; it shares all else.

    Raises:
        UserError: a projection is more than a floating-point weight and a bias, see `outliers.quantize`.
    """
    memo = {id(parameter): parameter for parameter in model.parameters()}
    for projection in projections(model):
        check_plain(projection)
        check_hooks(projection.path, projection.module)
        memo[id(projection.module)] = layer = bitsandbytes_layer(projection.module, threshold)
        hand_over_hooks(projection.module, layer)
    return copy.deepcopy(model, memo)
