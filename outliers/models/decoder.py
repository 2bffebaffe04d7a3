"""Blocks through the decoder of a model, resident or streamed, to look at it and not to train it."""

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import Block, Example, anatomy_of, check_block, decoder_layers, family_of, read_ids
from outliers.models.stream import AS_IT_IS, Variant, into_layers, is_streamed, out_of_layers, state_in

_observed: dict[nn.Module, list] = {}  # models: by how many at once, and their modules that were in training mode
_MODES = threading.Lock()


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Turn off what a model does in training alone, such as dropout, within this context.

    Each module has its own mode again when the last of those that look at the model, in whatever threads, is done.
    """
    with _MODES:
        observed = _observed.setdefault(model, [0, []])
        observed[0] += 1
        training = [module for module in model.modules() if module.training]
        observed[1] += training
        for module in training:
            module.training = False
    try:
        yield
    finally:
        with _MODES:
            observed[0] -= 1
            if not observed[0]:
                for module in _observed.pop(model)[1]:
                    module.training = True


def inference(observe: Callable) -> Callable:
    """Decorate a function of a model, its first argument, that looks at it: without gradients, and in eval mode."""

    @functools.wraps(observe)
    def observing(model: PreTrainedModel, *arguments, **keywords):
        with torch.inference_mode(), in_eval_mode(model):
            return observe(model, *arguments, **keywords)

    return observing


@contextmanager
def under(model: PreTrainedModel, variant: Variant) -> Iterator[tuple[PreTrainedModel, Variant]]:
    """What `run_decoder` is called with for a variant: a resident model under it; a streamed one, and the variant."""
    if is_streamed(model):
        yield model, variant
    else:
        with variant.on(model) as changed:
            yield changed, AS_IT_IS


def run_decoder(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    begin: Callable[[int, torch.Tensor], None] = lambda number, ids: None,
    variant: Variant = AS_IT_IS,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Pass blocks through the decoder, one sequence each.

    A resident model takes one block after the other. A streamed one takes all blocks through one layer after the
    other, so that hooks meet them in turns: `begin` tells whose turn it is.

    Args:
        model: a causal language model; with a `stream` if its layers are not resident.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,); or examples of another family.
        begin: called with the number and the ids of a block before hooks see anything of it.
        variant: what a streamed model's layers are under; a resident one is under its own already, see `under`.

    Yields:
        The number of the block, the block on the model's device, and its last hidden states (T, features), after the
        final norm.

    Raises:
        UserError: a block is something else than token ids (T,), longer than the model's context, or holds ids outside
            its vocabulary.
    """
    if is_streamed(model):
        of_one = model.stream.run(model, blocks, [variant], lambda _variant, *turn: begin(*turn))
        yield from ((number, ids, state) for number, (_, ids, state) in enumerate(of_one))
        return
    keywords = family_of(model.config).keywords
    for number, block in enumerate(blocks):
        check_example(model, block)
        block = block.to(model.device)
        begin(number, read_ids(block))
        yield number, block, model.base_model(read_ids(block)[None], **keywords).last_hidden_state[0]


def run_from(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], first: int, inputs: list[dict[int, torch.Tensor]]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """As `run_decoder`, of a resident model whose layers before one may have read the blocks already.

    Args:
        model, blocks: as `run_decoder`.
        first: the layer, from 1 on, before which all is as it was when `inputs` came to be.
        inputs: of each block what layers read, (1, T, features) by the number of the layer; that of `first` is added.
    """
    layers = decoder_layers(model)
    for block, (number, known) in zip(blocks, enumerate(inputs), strict=True):
        check_example(model, block)
        block = block.to(model.device)
        ids = read_ids(block)
        embedded, calls = into_layers(model, ids)
        start = max((layer for layer in known if layer <= first), default=0)
        state = known.get(start, embedded[None])
        for layer in range(start, len(layers)):
            if layer == first:
                known[layer] = state
            output = calls[layer].on(layers[layer], state)
            state = state_in(output)
        yield number, block, out_of_layers(model, ids, state[0], isinstance(output, tuple))


def check_example(model: PreTrainedModel, block: Block) -> None:
    """Raise UserError unless a block is what the family of a model reads, of which it has a place for every token."""
    if isinstance(block, Example) and anatomy_of(model.config).family == "causal":
        raise UserError("an example of another family for a causal language model; expected int64 token ids (T,)")
    block = read_ids(block)
    if not isinstance(block, torch.Tensor) or block.ndim != 1 or block.is_floating_point() or not len(block):
        found = f"of type {type(block).__name__}"
        if isinstance(block, torch.Tensor):
            found = f"{str(block.dtype).removeprefix('torch.')} of shape {tuple(block.shape)}"
        raise UserError(
            f"a block is {found}; expected int64 token ids (T,): give blocks (blocks, T), or a list of sequences as "
            "outliers.load_text(…, block=None) makes it, of lists of ids too"
        )
    check_block(model.config, len(block), int(block.max()))


def run_exchanged(
    model: PreTrainedModel, other: PreTrainedModel, block: torch.Tensor, layers: Collection[int]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Pass a block through a resident model in which one decoder layer at a time is that of another model.

    What goes into that layer is what the layers before it make of the block, which is computed once for all; so half of
    the layers are computed on average. Yields the number of each exchanged layer, and as `run_decoder` the block
    and its last hidden states (T, features).
    """
    check_example(model, block)
    block = block.to(model.device)
    ids = read_ids(block)
    first, calls = into_layers(model, ids)
    own, state = list(decoder_layers(model)), first[None]
    for number, exchanged in enumerate(decoder_layers(other)[: max(layers, default=-1) + 1]):
        if number in layers:
            output = calls[number].on(exchanged, state)
            for call, layer in zip(calls[number + 1 :], own[number + 1 :], strict=True):
                output = call.on(layer, state_in(output))
            yield number, block, out_of_layers(model, ids, state_in(output)[0], isinstance(output, tuple))
        state = state_in(calls[number].on(own[number], state))
