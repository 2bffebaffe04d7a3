"""A whole model in, a whole model out."""

import copy
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError, unknown_name
from outliers.models.anatomy import Projection, check_plain, projections
from outliers.models.hooks import check_hooks, hand_over_hooks
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.schemes import Scheme, get_scheme

KINDS = {"exact": QuantizedLinear, "int8": Int8Linear}


def quantize(model: PreTrainedModel, scheme: str | Scheme, keep: Literal["exact", "int8"] = "exact") -> PreTrainedModel:
    """Return `model` with every linear projection of its decoder layers under an 8-bit scheme.

    The given model is not changed; the new one shares all that is not quantized. Embeddings, norms, the head, the
    attention function and the experts of a mixture stay as they are, and so do forward hooks. `fp32` quantizes nothing.

    Args:
        model: a causal language model, on any device, also "meta", or spread over several.
        scheme: name, or a scheme with a threshold of its own.
        keep: "exact" shares the exact weights and adds codes: the paper's equation, in which outlier features meet
            exact weights; such a model can be put under another scheme, and codes that both have in common are shared.
            "int8" keeps nothing but the codes, a byte a weight; outlier features meet weights rebuilt from them.

    Raises:
        UserError: no scheme has this name, the architecture is unknown, or something is wrapped around the model; a
            projection is more than a floating-point weight and a bias, such as one with an adapter, or has hooks on
            gradients or its state; only codes are left of the weights.
    """
    scheme = scheme if isinstance(scheme, Scheme) else get_scheme(scheme)
    if keep not in KINDS:
        raise unknown_name("way to keep weights", keep, KINDS)
    # deepcopy builds a new module tree, but takes from its memo whatever is there: parameters on the same storage,
    # and in the place of each projection the one under the new scheme.
    memo = {id(old): nn.Parameter(old.detach(), old.requires_grad) for old in model.parameters()}
    memo |= {id(found.module): _under(scheme, found, memo, KINDS[keep]) for found in projections(model)}
    copied = copy.deepcopy(model, memo)
    for name in ("to", "cuda"):  # where accelerate spread the model, they are functions that move the original
        vars(copied).pop(name, None)
    return copied


def _under(scheme: Scheme, projection: Projection, memo: dict, kind: type) -> nn.Module:
    """A projection, quantized or not, under a scheme."""
    module = projection.module
    if isinstance(module, Int8Linear):
        raise UserError("only int8 codes are left of this model's weights; quantize the model that they were made of")
    quantized = isinstance(module, QuantizedLinear)
    if not quantized:
        check_plain(projection)
    check_hooks(projection.path, module)
    exact = _bare(module.projection if quantized else module, memo)
    new = exact if scheme.bits != 8 else kind(exact, scheme)
    if quantized and kind is QuantizedLinear and new is not exact:
        new.share_codes(module)
    hand_over_hooks(module, new)
    return new.train(module.training)


def _bare(module: nn.Module, memo: dict) -> nn.Module:
    """A plain projection on the parameters of the memo, without hooks.

    Not a deep copy: hooks may refer to the whole model, which would then be copied before its projections are known.
    """
    bare = type(module).__new__(type(module))
    nn.Module.__init__(bare)
    vars(bare).update({name: value for name, value in vars(module).items() if name[0] != "_" and name != "forward"})
    for name, parameter in module._parameters.items():
        bare.register_parameter(name, None if parameter is None else memo[id(parameter)])
    return bare
