"""Attention in int8: the products that the paper leaves in 16 bits (LLM.int8(), section 7 and appendix E)."""

import copy
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from outliers.errors import UserError
from outliers.models.anatomy import Projection, anatomy_of, in_layer, layers_of
from outliers.models.attending import SUMMED
from outliers.quantization.products import Products, product
from outliers.quantization.schemes import Scheme
from outliers.quantization.transforms import PRODUCTS

INT8 = "int8"  # its name among the implementations of attention
# Arguments that the mask stands for, and that of other implementations.
WITHOUT_EFFECT = {"use_cache", "position_ids", "sliding_window", "is_causal", "deterministic"}
MASKS_OF = ("sdpa", "eager", SUMMED)  # implementations whose masks say all of what queries attend to
ROLE = "attention"  # of what attention multiplies, beside the roles of projections


class AttentionProducts(NamedTuple):
    """The computation of each of `PRODUCTS`: queries times keys, and probabilities times values."""

    scores: Products
    values: Products

    @classmethod
    def of(cls, scheme: Scheme) -> "AttentionProducts":
        """Those of a scheme whose attention is in int8."""
        in_int8 = scheme.attention_products or PRODUCTS
        return cls(*(Products(scheme.attention) if name in in_int8 else EXACT for name in PRODUCTS))


EXACT = Products(exact=True)
IN_INT8 = AttentionProducts(Products(), Products())


def int8_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An attention function of transformers: states (batch, heads, T, features) to outputs (batch, T, heads, features).

    Queries times keys and probabilities times values are products as `module.attention_products` says, each head's for
    itself: queries and keys have a scale a token, probabilities one a query, values one a feature. The softmax is
    exact. attention_mask: what is added to the scores, or True where a query attends; None for all keys, or for those
    up to each query where there are several queries and the module is causal.

    Returns:
        The outputs; and the probabilities, (batch, heads, T, keys).

    Raises:
        UserError: the architecture's attention is more than a softmax under a mask, such as one with capped scores.
    """
    if unknown := [name for name, given in others.items() if given is not None and name not in WITHOUT_EFFECT]:
        raise UserError(f"attention in int8 with '{unknown[0]}'; expected a masked softmax of scores")
    products = getattr(module, "attention_products", IN_INT8)
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) if groups > 1 else states for states in (key, value))
    scores = product(query, key, products.scores) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attention_mask is not None:  # of whichever implementation it was made for
        mask = attention_mask[..., : key.shape[2]]
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    probabilities = functional.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    kept = functional.dropout(probabilities, dropout, module.training)
    return product(kept, value.mT, products.values).transpose(1, 2).contiguous(), probabilities


def is_replaceable(model: PreTrainedModel) -> bool:
    """Whether the attention function of a model can be replaced: of encoder-decoders T5Gemma alone has one, whose
    scores are capped."""
    return model._supports_attention_backend and not anatomy_of(model.config).decoder


def check_attention(model: PreTrainedModel) -> None:
    """Raise UserError unless the attention function of a model can be replaced."""
    if not is_replaceable(model):
        raise UserError(
            f"the attention of '{model.config.model_type}' cannot be replaced in transformers; expected an "
            "architecture such as gpt2, llama, bert or vit, or attention in 16 bits"
        )


def attentions(model: PreTrainedModel) -> Iterator[Projection]:
    """The attention of each layer; path: of its products, which are no module of their own."""
    for layer in layers_of(model):
        attention = in_layer(layer, ROLE, layer.anatomy.attention)
        yield attention._replace(path=f"{attention.path}.products")


def put_attention(model: PreTrainedModel, products: AttentionProducts, left: Collection[str] = ()) -> None:
    """Let the attention of a model multiply so from now on.

    Its modules get configurations of their own that say so: that of the model stays, and with it the masks, and what
    layers compute whose attention is left.

    left: paths of `attentions` that stay as they are.

    Raises:
        UserError: its attention cannot be replaced, is in int8 already, or has masks that do not say all.
    """
    check_attention(model)
    before = model.config._attn_implementation
    if is_in_int8(model):
        raise UserError("the attention of this model is in int8 already; expected one in 16 bits")
    if before not in MASKS_OF:
        raise UserError(f"attention in int8 in the place of '{before}'; expected attn_implementation='sdpa' or 'eager'")
    for module in [attention.module for attention in attentions(model) if attention.path not in left]:
        module.attention_products, module.config_before = products, module.config
        module.config = copy.copy(module.config)
        module.config._attn_implementation = INT8


def is_in_int8(model: PreTrainedModel) -> bool:
    """Whether `put_attention` has put attention of a model into int8."""
    return any("attention_products" in vars(attention.module) for attention in attentions(model))


def take_attention_back(model: PreTrainedModel) -> None:
    """Let the attention of a model multiply as it did before `put_attention`."""
    for attention in attentions(model):
        if vars(attention.module).pop("attention_products", None):
            attention.module.config = vars(attention.module).pop("config_before")


AttentionInterface.register(INT8, int8_attention)
AttentionMaskInterface.register(INT8, eager_mask)
