"""Passes of blocks through the decoder of a model, resident or streamed, for measurements."""

import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, count, groupby, islice
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import (
    check_block,
    decoder_layers,
    family_of,
    ids_of,
    inputs_of,
    layers_of,
    run_stack,
    stacks_of,
)
from outliers.models.anatomy.examples import Block, Example
from outliers.models.anatomy.experts import call_by_projection, restore
from outliers.models.anatomy.trust import check_found
from outliers.models.anatomy.weights import device_of, is_offloaded
from outliers.models.hooks import is_independent
from outliers.models.stream import AS_IT_IS, Once, Variant, WatchedVariant, exchanged, is_streamed, separate_layers
from outliers.terminal.progress import expect_passes, pass_made

# By model: the number of simultaneous uses, its modules that were in training mode, and how its experts were called.
_observed: dict[nn.Module, list] = {}
_MODES = threading.Lock()
Observe = TypeVar("Observe", bound=Callable)
Result = TypeVar("Result")
BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on the length
SHORTEST = 128  # least positions of blocks that pass together
AT_ONCE = 2  # blocks that pass together on a CPU: while one is between two products, the other computes one


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Turn off training behaviour of a model, such as dropout, and call its experts by their projections.

    Each module gets its own mode back when the last use of the model ends, in whatever thread.
    """
    with _MODES:
        if model not in _observed:
            _observed[model] = [0, [], call_by_projection(model)]
        observed = _observed[model]
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
                restore(_observed.pop(model)[2])
                for module in observed[1]:
                    module.training = True


def inference(observe: Observe) -> Observe:
    """Decorate a function that measures a model, its first argument: it runs without gradients, on the model as
    `separate_layers` returns it, in eval mode."""

    @functools.wraps(observe)
    def observing(model: PreTrainedModel, *arguments, **keywords):
        model = separate_layers(model)
        with torch.inference_mode(), in_eval_mode(model):
            check_found(model)
            return observe(model, *arguments, **keywords)

    return observing


def map_blocks(
    model: PreTrainedModel, see: Callable[[int, Block], Result], blocks: Iterable[Block]
) -> Iterator[Result]:
    """Return the results of all blocks in order; on a CPU two blocks pass through the model together, on half of the
    threads each.

    Between small products, Python, norms and activations leave some threads idle. Results have the same bits as in
    sequence. Blocks pass one after the other if the model has hooks that are not `independent`; if rotary embeddings
    depend on the length of the last block; in mixtures; and if the first two blocks are short, because fewer threads
    sum products of few rows in another order. A single last block gets all threads.

    Args:
        model: a resident model.
        see: called with the number of a block and the block, in two threads, so that it must not change shared state.
        blocks: as for `run_decoder`; read lazily, two ahead.
    """
    threads = torch.get_num_threads()
    expect_passes(len(blocks) if isinstance(blocks, Sized) else 1)
    blocks = iter(blocks)
    first = list(islice(blocks, AT_ONCE))
    short = any(len(ids) < SHORTEST for block in first for ids in ids_of(model, checked(model, block)))
    mixture = any(kind.experts for stack in stacks_of(model.config) for kind in stack.layer_kinds)
    alone = len(first) < AT_ONCE or short or mixture or device_of(model).type != "cpu" or threads < AT_ONCE
    blocks = chain(first, blocks)
    if alone or not all(map(_is_independent, model.modules())):
        yield from map(see, count(), blocks)
        return
    in_mode = torch.inference_mode(torch.is_inference_mode_enabled())(see)
    numbered: Iterator[tuple[int, Block]] = enumerate(blocks)
    pending: deque[Future] = deque()
    with ThreadPoolExecutor(AT_ONCE, initializer=partial(torch.set_num_threads, threads // AT_ONCE)) as pool:
        try:
            last = next(numbered)
            for following in numbered:
                pending.append(pool.submit(in_mode, *last))
                last = following
                if len(pending) > AT_ONCE:
                    yield pending.popleft().result()
            left = (last[0] + 1) % AT_ONCE  # whether the last block would be alone
            if not left:
                pending.append(pool.submit(in_mode, *last))
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # the pool changed the default of later threads
    if left:
        yield see(*last)


def _is_independent(module: nn.Module) -> bool:
    """Return whether a module and its hooks keep no state between blocks."""
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    rotation = str(getattr(module, "rope_type", None))
    if is_offloaded(module):  # calls would take away each other's weights
        return False
    return all(map(is_independent, hooks)) and not any(map(rotation.count, BY_LENGTH))


@contextmanager
def under(model: PreTrainedModel, variant: Variant) -> Iterator[tuple[PreTrainedModel, Variant]]:
    """Provide the arguments of `run_decoder`: a resident model under the variant, or a streamed model and the
    variant."""
    if is_streamed(model):
        yield model, variant
    else:
        with variant.on(model) as changed:
            yield changed, AS_IT_IS


def run_decoder(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    begin: Callable[[int, tuple[torch.Tensor, ...]], None] = lambda number, ids: None,
    variant: Variant = AS_IT_IS,
) -> Iterator[tuple[int, Block, torch.Tensor]]:
    """Pass blocks through the layers of all stacks, each as a separate sequence.

    A resident model passes one block after the other. A streamed model passes all blocks through each layer before the
    next; `begin` announces each block in each layer.

    Args:
        model: a model of any family; with a `stream` if its layers are not resident.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,); or examples of another family.
        begin: called with the number of a block and its ids as `ids_of` returns them, before hooks see the block.
        variant: applied to a streamed model's layers; a resident model is under it already, see `under`.

    Yields:
        The number of the block, the block on the model's device, and its last hidden states (T, features), after the
        final norm.

    Raises:
        UserError: a block is not token ids (T,), longer than the model's context, or has ids outside its vocabulary.
    """
    if is_streamed(model):
        passed = model.stream.run(model, map(partial(checked, model), blocks), [variant], lambda _, *turn: begin(*turn))
        yield from ((number, ids, state) for number, (_, ids, state) in enumerate(passed))
        return
    expect_passes(len(blocks) if isinstance(blocks, Sized) else 1)
    for number, block in enumerate(blocks):
        block = placed(model, block)
        begin(number, ids_of(model, block))
        states = _run(model, block)
        pass_made()
        yield number, block, states


def watched_pass(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    hooks: Callable[[PreTrainedModel, int | None], AbstractContextManager],
    variant: Variant = AS_IT_IS,
    begin: Callable[[int, tuple[torch.Tensor, ...]], None] = lambda number, ids: None,
) -> list[tuple[int, Block, torch.Tensor]]:
    """Pass all blocks through a model under a variant with hooks, and keep of what `run_decoder` yields only the item
    of the last block: a list of one, empty without blocks.

    hooks: makes a context with hooks on all layers of a model or on one, which see the changed model.
    """
    with under(model, WatchedVariant(variant, hooks)) as (changed, left):
        return list(deque(run_decoder(changed, blocks, begin, left), maxlen=1))


def _run(model: PreTrainedModel, block: Block) -> torch.Tensor:
    """Return the last hidden states (T, features) of a block."""
    state = None
    for stack, read in zip(stacks_of(model.config), inputs_of(model, block), strict=True):
        state = run_stack(model, stack, read, None if state is None else state[None])
    return state


def _run_from(
    model: PreTrainedModel,
    block: Block,
    first: int,
    known: Mapping[int, object],
    others: Mapping[int, nn.Module],
    further: Iterable[int] = (),
) -> tuple[torch.Tensor, dict[int, object]]:
    """Return the last hidden states (T, features) of a block, and the outputs of some layers by number.

    The outputs are those of the last layer before `first` in each stack, and of the layers in `further`. known: see
    `run_from`. others: replacements of layers, by number.
    """
    layers, modules = layers_of(model), dict(others)
    if any(layer.anatomy.shares for layer in layers):
        known = {}  # later layers read more of earlier ones than their outputs, such as keys
    last = {number: modules.setdefault(number, Once(layers[number].module)) for number in further}
    for _, group in groupby(layers[:first], lambda layer: layer.stack):
        numbers = [layer.number for layer in group]
        done = max(known.keys() & numbers, default=-1)
        modules |= {number: Once(layers[number].module, known[done]) for number in numbers if number <= done}
        last[numbers[-1]] = modules.setdefault(numbers[-1], Once(layers[numbers[-1]].module))
    states = _run(exchanged(model, {layers[number].path: module for number, module in modules.items()}), block)
    return states, {number: once.cached for number, once in last.items()}


def run_from(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    first: int,
    known: list[dict[int, object]],
    further: Collection[int] = (),
) -> Iterator[tuple[int, Block, torch.Tensor]]:
    """Pass blocks as `run_decoder` through a resident model, starting from cached outputs of its first layers.

    Args:
        model, blocks: as for `run_decoder`.
        first: the layer before which the model has not changed since outputs were cached.
        known: for each block, outputs of layers by number; that of the last layer before `first` of each stack is
            added.
        further: layers from `first` on whose outputs are added too.
    """
    for block, (number, outputs) in zip(blocks, enumerate(known), strict=True):
        block = placed(model, block)
        states, last = _run_from(model, block, first, outputs, {}, further)
        outputs |= last
        yield number, block, states


def checked(model: PreTrainedModel, block: Block) -> Block:
    """Return a block; raise UserError unless the model's family can read it, with room for every token."""
    family = family_of(model.config)
    if family.check:
        family.check(model.config, block)
        return block
    if isinstance(block, Example) and family.name == "causal" and block.ids.shape != block.labels.shape:
        raise UserError("an example of another family for a causal language model; expected int64 token ids (T,)")
    for ids in block if isinstance(block, Example) else (block,):
        if not isinstance(ids, torch.Tensor) or ids.ndim != 1 or ids.is_floating_point() or not len(ids):
            kind = f"of type {type(ids).__name__}"
            if isinstance(ids, torch.Tensor):
                kind = f"{str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}"
            raise UserError(
                f"a block is {kind}; expected int64 token ids (T,): give blocks (blocks, T), or a list of sequences "
                "as outliers.load_text(…, block=None) makes it, of lists of ids too"
            )
        check_block(model.config, len(ids), int(ids.max()))
    return block


def placed(model: PreTrainedModel, block: Block) -> Block:
    """Return a checked block on the model's device, copied asynchronously if possible."""
    # an asynchronous copy to MPS would read the CPU's memory too late
    device = device_of(model)
    return checked(model, block).to(device, non_blocking=device.type != "mps")


def run_exchanged(
    model: PreTrainedModel, other: PreTrainedModel, block: Block, layers: Collection[int]
) -> Iterator[tuple[int, Block, torch.Tensor]]:
    """Pass a block through a resident model in which one layer at a time is that of another model.

    The outputs of the layers before it are computed once for all, so that on average half of the layers are computed.
    Yields the number of each exchanged layer, and as `run_decoder` the block and its last hidden states (T, features).
    """
    block, modules, known = placed(model, block), decoder_layers(other), {}
    for number in sorted(layers):
        states, known = _run_from(model, block, number, known, {number: modules[number]})
        yield number, block, states
