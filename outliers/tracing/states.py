"""Access to the hidden states themselves."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from transformers import PreTrainedModel

from outliers.criterion import of_transformerlens
from outliers.errors import UserError
from outliers.models.anatomy import decoder_layers, state_readers
from outliers.models.anatomy.examples import Block
from outliers.models.decoder import in_eval_mode, run_decoder, under
from outliers.models.hooks import RESIDUAL, hooks
from outliers.models.stream import AS_IT_IS, Variant, WatchedVariant, is_streamed, separate_layers
from outliers.text.blocks import unpad


def hidden_states(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    layer: int | str,
    role: str = RESIDUAL,
    variant: Variant = AS_IT_IS,
    attention_mask: Iterable[torch.Tensor] | None = None,
) -> Iterator[torch.Tensor]:
    """Yield a hidden state of each block, (tokens, features); `torch.cat(list(…))` is the matrix of all.

    A resident model runs each block lazily, and only up to this layer. A streamed model reads its layers once for all
    blocks, up to this one, and stores the states like its others, in memory or in a file (docs/large-models.md).

    Args:
        model: a causal language model, quantized or not; it is left as it was.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,), also of several lengths.
        layer: the number of a decoder layer, from 0; or the TransformerLens name of a hidden state, which includes the
            role, such as "blocks.3.mlp.hook_post" (docs/names.md).
        role: "residual", the output of the layer; or "attn_in", "attn_out", "ffn_in" or "ffn_out", the input of its
            q/k/v, attention output, first or second feed-forward projections.
        variant: a change of the model, such as a scheme, see `outliers.variants`.
        attention_mask: which tokens are padding and left out, shaped as the blocks; None if there is none.

    Yields:
        (tokens, features) in the model's dtype, on its device, without gradients; the caller may edit it.

    Raises:
        UserError: the model has no such layer, or the layer no such role; a block is longer than the model's context or
            holds ids outside its vocabulary; or the attention mask does not fit these blocks.

    Example:
        >>> first, second = outliers.hidden_states(model, blocks, layer=0, role="attn_in")
        >>> first.shape[0]
        64
    """
    model = separate_layers(model)
    layer, role = (isinstance(layer, str) and of_transformerlens(layer)) or (layer, role)
    count = len(decoder_layers(model))
    if layer not in range(count):
        raise UserError(f"layer {layer} of a model with {count}; expected 0 to {count - 1}")
    with hooks(model, lambda *_state: None, [role], [layer]):
        pass  # reports a missing role now, not when the first state is computed
    if any(part.expert is not None and part.role == role for part in state_readers(model, layer)):
        raise UserError(
            f"each expert of layer {layer} reads a state of its own in role {role}, of the tokens that chose it; use "
            "outliers.hooks, which meets them one after the other"
        )
    blocks = unpad(blocks, attention_mask)
    groups = [list(blocks)] if is_streamed(model) else ([block] for block in blocks)
    return (state for group in groups for state in _states_up_to(model, group, layer, role, variant))


class _Reached(Exception):
    """Raised to skip the rest of the decoder once all requested states are known."""


def _states_up_to(
    model: PreTrainedModel, blocks: list[torch.Tensor], layer: int, role: str, variant: Variant
) -> list[torch.Tensor]:
    """Return a hidden state (T, features) of each block (T,), running the model up to its layer."""
    turn, states = 0, {}

    def begin(number: int, _inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal turn
        turn = number

    def keep(_layer: int, _role: str, x: torch.Tensor) -> None:
        storage = model.stream.storage(x.shape, x.dtype, x.device) if is_streamed(model) else torch.empty_like(x)
        states[turn] = storage.copy_(x)
        if len(states) == len(blocks):
            raise _Reached

    def hooks_on(changed: PreTrainedModel, only: int | None) -> AbstractContextManager:
        return hooks(changed, keep, [role], [layer]) if only in (None, layer) else nullcontext()

    watched = WatchedVariant(variant, hooks_on)
    with torch.no_grad(), in_eval_mode(model), suppress(_Reached), under(model, watched) as (changed, left):
        for _done in run_decoder(changed, blocks, begin, left):
            pass
    return [states[number] for number in range(len(blocks))]
