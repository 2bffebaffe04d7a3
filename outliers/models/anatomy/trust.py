"""Checks that a model with weights does what its anatomy says."""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from outliers.errors import UserError, reason_of
from outliers.models.anatomy import (
    Layer,
    context_length,
    family_of,
    inputs_of,
    layers_of,
    projections,
    run_stack,
    stacks_of,
)
from outliers.models.anatomy.examples import Example
from outliers.models.head import Head
from outliers.models.hooks import attached
from outliers.models.stream import outputs_of

TOKENS = 16
EXACT, ROUNDED = 1e-5, 0.05  # largest relative differences of logits, in float32 and in fewer bits
WRITES = ("attn_out", "cross_out", "ffn_out")  # roles of projections whose outputs are added to the stream
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
LOSS = 1e-6  # largest relative difference of losses in float32
# By checked model: the first layer whose change is not the sum of its branches, with the difference; else None.
_checked: WeakKeyDictionary[nn.Module, tuple[str, float] | None] = WeakKeyDictionary()
_checking = Lock()  # for threads that measure one model at the same time


def check_found(model: PreTrainedModel) -> None:
    """Check once, on a few tokens and without the hooks of others, that a model does what its anatomy says.

    Raises:
        UserError: a projection is not called exactly once in a pass, so that measurements would mix several uses; or
            the logits or the loss of the model differ from those of its layers and its head.
    """
    if model in _checked or family_of(model.config).name_of or any(one.is_meta for one in model.parameters()):
        return
    with _checking, torch.no_grad():
        if model not in _checked:
            with _without_hooks(model):
                _checked[model] = _check(model)


def trust_copy(model: PreTrainedModel, copied: PreTrainedModel) -> None:
    """Take a copy of a model with other projections for checked if the model is: it has the same layers and calls."""
    if model in _checked:
        _checked[copied] = _checked[model]


def check_sums(model: PreTrainedModel) -> None:
    """Raise UserError if a layer changes the residual stream by more than the sum of the outputs of its attention and
    feed-forward projections."""
    check_found(model)
    if wrong := _checked.get(model):
        path, difference = wrong
        raise UserError(
            f"what the output projections of '{path}' of '{model.config.model_type}' put out differs by "
            f"{difference:.1e} from what the layer adds to the residual stream; expected {_tolerance(model):.0e} at "
            "most, for writers to be told apart: use --by readers, or outliers.trace"
        )


def check_planted(model: PreTrainedModel, planted: PreTrainedModel) -> None:
    """Raise UserError unless a language model has the same logits with planted features, outlier features that are
    added to its weights so that its outputs stay the same."""
    if family_of(model.config).name_of or any(one.is_meta for one in model.parameters()):
        return
    with _without_hooks(model), _without_hooks(planted):
        before, after = (_logits(one, _few_tokens(one)) for one in (model, planted))
    if not _difference(after, before) <= 10 * _tolerance(model):
        raise UserError(
            f"a planted feature changes what '{model.config.model_type}' computes, for more reads the norms' "
            "outputs than a pass has found; plant in another model"
        )


def _few_tokens(model: PreTrainedModel) -> Example | torch.Tensor:
    tokens = min(TOKENS, context_length(model.config) or TOKENS)
    ids = torch.arange(1, tokens + 1, device=model.device) % family_of(model.config).vocabulary(model.config)
    return Example(ids, ids) if model.config.is_encoder_decoder or stacks_of(model.config)[0].bidirectional else ids


def _logits(model: PreTrainedModel, block: Example | torch.Tensor) -> torch.Tensor:
    """Return the logits (T, vocabulary) of a block by the model's own forward pass."""
    inputs = zip(("input_ids", "decoder_input_ids"), (read[None] for read in inputs_of(model, block)), strict=False)
    return model(**dict(inputs), **family_of(model.config).keywords).logits[0]


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of logits, relative to the largest expected one."""
    return float((logits - expected.to(logits.dtype)).abs().max() / expected.abs().max())


def _tolerance(model: PreTrainedModel) -> float:
    """Return the largest `_difference` that rounding explains in the dtype in which a model computes."""
    # accelerate gives a model that computes in mixed precision a forward of its own
    whole = next(model.parameters()).dtype == torch.float32 and "forward" not in vars(model)
    return EXACT if whole else ROUNDED


def _check(model: PreTrainedModel) -> tuple[str, float] | None:
    """Check calls, logits and loss; return the first layer that adds more than its branches, with the difference."""
    block, calls, sums = _few_tokens(model), Counter(), _BranchSums(model)
    parts, layers = list(projections(model)), layers_of(model)

    def count(module: nn.Module, _inputs: tuple) -> None:
        calls[module] += 1

    counting = (module.register_forward_pre_hook(count) for module in {projection.module for projection in parts})
    state = None
    with attached(chain(counting, *map(sums.hooks, layers))):
        for stack, read in zip(stacks_of(model.config), inputs_of(model, block), strict=True):
            state = run_stack(model, stack, read, None if state is None else state[None])
    kind = model.config.model_type
    places = Counter(projection.module for projection in parts)  # one module may stand in several places
    for projection in parts:
        runs = calls[projection.module]
        if runs != places[projection.module] and (projection.expert is None or runs):
            raise UserError(
                f"'{projection.path}' of '{kind}' runs {runs} times in a pass; expected once, for what is "
                f"measured of layer {projection.layer} of {len(layers)} would be of several uses"
            )
    expected = _logits(model, block)
    if not expected.isfinite().all():  # measurements report where
        return None
    try:
        head = Head(model, state)
        logits = torch.cat([head.logits(part) for part in head.parts], -1)
    except (IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"the head of '{kind}' reads more than the last hidden states ({reason_of(error, 100)}); expected one that "
            "makes logits of them alone: nothing of this model can be measured"
        ) from None
    worst, limit = _difference(logits, expected), _tolerance(model)
    if not worst <= limit:
        raise UserError(
            f"the logits of '{kind}' differ by {worst:.1e} from those of its layers and its head as a pass found them; "
            f"expected {limit:.0e} at most: nothing of this model can be measured"
        )
    ids = block.labels if isinstance(block, Example) else block
    loss, expected_loss = (float(cross_entropy(of[:-1].double(), ids[1:])) for of in (logits, expected))
    most = LOSS if limit == EXACT else ROUNDED
    if not abs(loss - expected_loss) <= most * max(1, expected_loss):
        raise UserError(
            f"the loss of '{kind}' by its layers and its head, {loss:.7f}, is not that of the whole model, "
            f"{expected_loss:.7f}; expected the same within {most:.0e}: nothing of this model can be measured"
        )
    return next(((path, worst) for path, worst in sums.differences.items() if not worst <= limit), None)


class _BranchSums:
    """The differences between the change that a layer makes to the stream and the sum of its branches' outputs.

    Layers with routers, or with norms through which the stream itself goes, are not compared.

    differences: by the path of a layer, relative to the largest entry of its output.
    """

    def __init__(self, model: PreTrainedModel):
        self.config = model.config
        self.differences: dict[str, float] = {}

    def hooks(self, layer: Layer) -> Iterator[RemovableHandle]:
        anatomy = layer.anatomy
        if anatomy.norms_of_sums or anatomy.experts or anatomy.router:
            return
        behind = {role: norm for norm, role in anatomy.norms_behind.items()}
        added: dict[str, torch.Tensor] = {}
        for role in WRITES:
            for name in (behind[role],) if role in behind else getattr(anatomy, role):
                see = partial(self._add, added, name)
                yield layer.module.get_submodule(name).register_forward_hook(see)
        scale = getattr(self.config, anatomy.residual_scale) if anatomy.residual_scale else 1.0
        leave = partial(self._leave, layer.path, added, scale)
        yield layer.module.register_forward_hook(leave, with_kwargs=True)

    def _add(self, added: dict, name: str, _module: nn.Module, _inputs: tuple, output: object) -> None:
        added[name] = outputs_of(output)[0].clone()  # Falcon adds to it in place

    def _leave(
        self, path: str, added: dict, scale: float, _module: nn.Module, args: tuple, kwargs: dict, output: object
    ) -> None:
        before = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor) and one.ndim >= 3)
        behind = outputs_of(output)[0].double()
        if any(one.numel() != before.numel() for one in added.values()):
            self.differences[path] = math.inf  # the layer has several streams, and mixes outputs into them
            return
        changed = sum((scale * one.to(behind).view(before.shape) for one in added.values()), before.to(behind))
        self.differences[path] = float((behind - changed).abs().max() / behind.abs().max())


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Take all forward hooks off the modules of a model within this context."""
    kept = [(module, name, getattr(module, name)) for module in model.modules() for name in HOOKS]
    for module, name, _ in kept:
        setattr(module, name, OrderedDict())
    try:
        yield
    finally:
        for module, name, hooks in kept:
            setattr(module, name, hooks)
