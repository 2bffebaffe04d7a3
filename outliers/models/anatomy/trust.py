"""Checks of an anatomy that a pass has found, by the weights of a model."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import family_of, inputs_of, layers_of, projections, run_stack, stacks_of
from outliers.models.anatomy.examples import Example
from outliers.models.head import Head
from outliers.models.hooks import attached

TOKENS = 16
EXACT, ROUNDED = 1e-5, 0.05  # by which logits may differ, of the largest one: in float32, and in fewer bits
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_checked: WeakSet[nn.Module] = WeakSet()


def check_found(model: PreTrainedModel) -> None:
    """Check once that a model does what was found of it, on a few tokens, which no hook of others sees.

    Raises:
        UserError: a projection is not called once in a pass, so that what is seen of it would be of several layers or
            of none; or the model's logits are others than those of its layers and its head.
    """
    if model in _checked or not stacks_of(model.config)[0].found or any(one.is_meta for one in model.parameters()):
        return
    with _without_hooks(model):
        _check_calls(model)
    _checked.add(model)


def check_planted(model: PreTrainedModel, planted: PreTrainedModel) -> None:
    """Raise UserError unless a model of a found anatomy, and the same with planted features, have the same logits."""
    if stacks_of(model.config)[0].found:
        with _without_hooks(model), _without_hooks(planted):
            before, after = (_logits(one, _few_tokens(one)) for one in (model, planted))
        if not _difference(after, before) <= 10 * _limit(model):
            raise UserError(
                f"a planted feature changes what '{model.config.model_type}' computes, for more reads the norms' "
                "outputs than a pass has found; plant in another model"
            )


def _few_tokens(model: PreTrainedModel) -> Example | torch.Tensor:
    ids = torch.arange(1, TOKENS + 1, device=model.device) % model.config.vocab_size
    return Example(ids, ids) if model.config.is_encoder_decoder or stacks_of(model.config)[0].bidirectional else ids


def _logits(model: PreTrainedModel, block: Example | torch.Tensor) -> torch.Tensor:
    """Return the logits (T, vocabulary) of a block by the model's own forward."""
    inputs = zip(("input_ids", "decoder_input_ids"), (read[None] for read in inputs_of(model, block)), strict=False)
    return model(**dict(inputs), **family_of(model.config).keywords).logits[0]


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected.to(logits.dtype)).abs().max() / expected.abs().max())


def _limit(model: PreTrainedModel) -> float:
    return EXACT if next(model.parameters()).dtype == torch.float32 else ROUNDED


def _check_calls(model: PreTrainedModel) -> None:
    block, calls = _few_tokens(model), Counter()
    there = list(projections(model))

    def count(path: str) -> None:
        calls[path] += 1

    state = None
    with attached(
        one.module.register_forward_pre_hook(lambda _module, _inputs, path=one.path: count(path)) for one in there
    ):
        for stack, read in zip(stacks_of(model.config), inputs_of(model, block), strict=True):
            state = run_stack(model, stack, read, None if state is None else state[None])
    kind = model.config.model_type
    for one in there:
        if calls[one.path] != 1 and (one.expert is None or calls[one.path]):
            raise UserError(
                f"'{one.path}' of '{kind}' runs {calls[one.path]} times in a pass; expected once, for what is measured "
                f"of layer {one.layer} of {len(layers_of(model))} would be of several uses"
            )
    expected, head = _logits(model, block), Head(model, state)
    worst = _difference(torch.cat([head.logits(part) for part in head.parts], -1), expected)
    limit = _limit(model)
    if not worst <= limit and bool(expected.isfinite().all()):
        raise UserError(
            f"the logits of '{kind}' differ by {worst:.1e} from those of its layers and its head as a pass found them; "
            f"expected {limit:.0e} at most: nothing of this model can be measured"
        )


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
