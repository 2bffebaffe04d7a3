"""Attention in int8: the products that the paper leaves in 16 bits (LLM.int8(), section 7 and appendix E)."""

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from outliers.errors import UserError
from outliers.quantization.products import Products, product

INT8 = "int8"  # its name among the implementations of attention
WITHOUT_EFFECT = {"use_cache", "position_ids", "sliding_window", "is_causal"}  # arguments that the mask stands for


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

    Queries times keys and probabilities times values are products as `module.products` says, each head's for itself:
    queries and keys have a scale a token, probabilities one a query, values one a feature. The softmax is exact.

    Returns:
        The outputs; and the probabilities, (batch, heads, T, keys).

    Raises:
        UserError: the architecture's attention is more than a softmax under a mask, such as one with capped scores.
    """
    if unknown := [name for name, given in others.items() if given is not None and name not in WITHOUT_EFFECT]:
        raise UserError(f"attention in int8 with '{unknown[0]}'; expected a softmax of scores under a mask alone")
    products = getattr(module, "products", Products())
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) if groups > 1 else states for states in (key, value))
    scores = product(query, key, products) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    probabilities = functional.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    kept = functional.dropout(probabilities, dropout, module.training)
    return product(kept, value.mT, products).transpose(1, 2).contiguous(), probabilities


def check_attention(model: PreTrainedModel) -> None:
    """Raise UserError unless the attention function of a model can be replaced."""
    if not model._supports_attention_backend:
        raise UserError(
            f"the attention of '{model.config.model_type}' cannot be replaced in transformers; expected an "
            "architecture such as gpt2, opt or llama, or attention in 16 bits"
        )


AttentionInterface.register(INT8, int8_attention)
AttentionMaskInterface.register(INT8, eager_mask)
