"""Blocks through the decoder of a model, resident or streamed."""

from collections.abc import Callable, Iterable, Iterator

import torch
from transformers import PreTrainedModel

from outliers.models.anatomy import check_block
from outliers.models.stream import is_streamed, one_variant


def run_decoder(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    begin: Callable[[int, torch.Tensor], None] = lambda number, ids: None,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Pass blocks through the decoder, one sequence each.

    A resident model takes one block after the other. A streamed one takes all blocks through one layer after the
    other, so that hooks meet them in turns: `begin` tells whose turn it is.

    Args:
        model: a causal language model; with a `stream` if its layers are not resident.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,).
        begin: called with the number and the ids of a block before hooks see anything of it.

    Yields:
        The number of the block, its ids (T,) on the model's device, and its last hidden states (T, features), after the
        final norm.

    Raises:
        UserError: a block is longer than the model's context or holds ids outside its vocabulary.
    """
    if is_streamed(model):
        of_one = model.stream.run(model, blocks, [one_variant], lambda _variant, *turn: begin(*turn))
        yield from ((number, ids, state) for number, (_, ids, state) in enumerate(of_one))
        return
    for number, block in enumerate(blocks):
        check_block(model.config, len(block), int(block.max()))
        ids = block.to(model.device)
        begin(number, ids)
        yield number, ids, model.base_model(ids[None], use_cache=False).last_hidden_state[0]
