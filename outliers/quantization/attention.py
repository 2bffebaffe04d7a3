"""Attention in int8: the products that the paper leaves in 16 bits (LLM.int8(), section 7 and appendix E)."""

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from outliers.errors import UserError
from outliers.models.anatomy import Projection
from outliers.models.attention import MASK, OURS, attentions, change_attention, check_replaceable_attention
from outliers.quantization.products import ProductNumerics, product
from outliers.quantization.remedies import PRODUCTS
from outliers.quantization.schemes import Scheme

# Arguments of other implementations, or for modules around attention.
WITHOUT_EFFECT = {*MASK, "is_causal", "deterministic", "output_router_logits"}
MASKS_OF = ("sdpa", "eager", OURS)  # implementations whose masks alone decide what queries attend to


class AttentionProducts(NamedTuple):
    """The numerics of the `PRODUCTS` of attention: queries times keys, and probabilities times values."""

    scores: ProductNumerics
    values: ProductNumerics

    @classmethod
    def of(cls, scheme: Scheme) -> "AttentionProducts":
        """Return the numerics of a scheme that quantizes attention."""
        in_int8 = scheme.attention.roles or PRODUCTS
        return cls(*(ProductNumerics(scheme.attention.number) if name in in_int8 else EXACT for name in PRODUCTS))


EXACT = ProductNumerics(exact=True)


def int8_attention(
    products: AttentionProducts,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention from states (batch, heads, T, features), with the signature of transformers' attention
    functions.

    Queries times keys and probabilities times values are computed by `products`, for each head separately: queries and
    keys have a scale per token, probabilities one per query, values one per feature. The softmax is exact.
    attention_mask: added to the scores, or boolean with True where a query attends. None stands for a causal mask if
    the module is causal and there are several queries, otherwise for no mask.

    Returns:
        The outputs (batch, T, heads, features), and the probabilities (batch, heads, T, keys).

    Raises:
        UserError: the architecture's attention is more than a masked softmax, for example has capped scores.
    """
    if unknown := [name for name, given in others.items() if given is not None and name not in WITHOUT_EFFECT]:
        raise UserError(f"attention in int8 with '{unknown[0]}'; expected a masked softmax of scores")
    key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
    scores = product(query, key, products.scores) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attention_mask is not None:  # boolean or additive, depending on the implementation
        mask = attention_mask[..., : key.shape[2]]
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    probabilities = functional.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    kept = functional.dropout(probabilities, dropout, module.training)
    return product(kept, value.mT, products.values).transpose(1, 2).contiguous(), probabilities


def put_attention(model: PreTrainedModel, products: AttentionProducts, exact_paths: Collection[str] = ()) -> None:
    """Replace the attention function of a model by one in int8.

    exact_paths: paths of `attentions` that stay exact.

    Raises:
        UserError: the attention of the model cannot be replaced, is in int8 already, or has masks that are not
            explicit.
    """
    check_replaceable_attention(model)
    if int8_attentions(model):
        raise UserError("the attention of this model is in int8 already; expected one in 16 bits")
    if (before := model.config._attn_implementation) not in MASKS_OF:
        raise UserError(f"attention in int8 in the place of '{before}'; expected attn_implementation='sdpa' or 'eager'")
    for attention in attentions(model):
        if attention.path not in exact_paths:
            change_attention(attention.module, function=partial(int8_attention, products))


def int8_attentions(model: PreTrainedModel) -> list[Projection]:
    """Return the attentions that `put_attention` has changed to int8."""
    all_attentions = [(attention, vars(attention.module).get("attending")) for attention in attentions(model)]
    return [attention for attention, attending in all_attentions if attending and attending.function]


def take_attention_back(model: PreTrainedModel) -> None:
    """Undo `put_attention`."""
    for attention in int8_attentions(model):
        change_attention(attention.module, function=None)
