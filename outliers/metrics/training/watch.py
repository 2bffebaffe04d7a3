"""Outlier features while a model trains: one pass over held-out blocks, which changes nothing of it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel

from outliers.criterion import ALPHA
from outliers.errors import UserError
from outliers.metrics.perplexity.measure import Loss, finite_loss, perplexity_of
from outliers.models.anatomy.examples import Block
from outliers.models.decoder import inference
from outliers.text.blocks import sequences
from outliers.tracing.result import Trace
from outliers.tracing.table4 import trace_row
from outliers.tracing.trace import traces

KURTOSES = ("kurtosis_tensor", "kurtosis_token", "kurtosis_feature")


def watch(model: nn.Module, blocks: Iterable[Block], alpha: float = ALPHA, attention: bool = True) -> dict[str, float]:
    """Return measurements of a model in the middle of its training, from one pass over held-out text.

    The training goes on as if nothing had happened: gradients, modes, the states of random generators and attention
    functions are what they were. The model is measured in the dtype of its weights, without dropout and autocast, and
    so as its checkpoint would be.

    Args:
        model: a model that has all of its weights; or what `torch.compile`, `accelerate` or
            `DistributedDataParallel` made of one.
        blocks: held-out token ids, int64 (blocks, T), or any iterable of (T,), or examples of another family; on any
            device.
        alpha: magnitude from which an entry is a hit.
        attention: whether to find attention sinks. An attention function that somebody registered under a name of their
            own has to return its probabilities beside its outputs then.

    Returns:
        Flat names, as reporters plot them: those of `table4_row` without the softmax; `max.ROLE`, the largest |x| of
        "attn_in", "attn_out", "ffn_in", "ffn_out", as far as the model has them, and of the residual stream,
        "residual"; `kurtosis_tensor.ROLE`, `kurtosis_token.ROLE` and `kurtosis_feature.ROLE`, the largest over the
        layers (docs/definitions.md#outlier-features); and `attention_sink`, the share of (layer, head) pairs for which
        position 0 is a sink. Of an encoder-decoder those of each view after its name: `encoder.count`.

    Raises:
        UserError: as `trace`, as `perplexity`; or the weights are spread over several processes.

    Example:
        >>> sorted(outliers.watch(model, blocks))[:2]
        ['attention_sink', 'count']
    """
    return flat(watch_views(model, blocks, alpha, attention))


def flat(by_view: dict[str, dict[str, float]]) -> dict[str, float]:
    """The values of views by one name each."""
    return {f"{view}.{name}".lstrip("."): value for view, values in by_view.items() for name, value in values.items()}


def watch_views(
    model: nn.Module, blocks: Iterable[torch.Tensor], alpha: float, attention: bool
) -> dict[str, dict[str, float]]:
    """The measurements of `watch` by the views of the model; under "" those of all of it."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    _check_whole(model)
    with _undisturbed(model):
        return _watch(model, blocks, alpha, attention)


@inference
def _watch(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], alpha: float, attention: bool
) -> dict[str, dict[str, float]]:
    losses: list[Loss] = []
    see = lambda ids, states: losses.append(finite_loss(model, ids, states))  # noqa: E731
    found_traces = traces(model, sequences(blocks, None), alpha=alpha, attention=attention, see_last=see)
    by_view: dict[str, dict[str, float]] = {"": {"perplexity": perplexity_of(losses)}}
    for view in found_traces:
        by_view.setdefault(view.stack, {}).update(trace_row(view) | _largest(view))
    return by_view


def _largest(trace: Trace) -> dict[str, float]:
    """The extreme values of a trace, over all layers."""
    residual = trace.statistics["residual.largest"][:, 0].max().item()
    by_role = trace.hidden_states().groupby("role", sort=False).max()
    row = {f"max.{role}": float(norm) for role, norm in by_role["infinity_norm"].items()} | {"max.residual": residual}
    row |= {f"{name}.{role}": float(value) for name in KURTOSES for role, value in by_role[name].items()}
    return row | ({"attention_sink": float(trace.attention_sinks()["share"][0])} if trace.heads else {})


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Keep what a training would notice beside the model itself: random generators, autocast, what is compiled."""
    kind = model.device.type
    with (
        torch.random.fork_rng([model.device] if kind == "cuda" else []),
        torch.autocast(kind, enabled=False),
        torch.compiler.set_stance("force_eager"),  # compiled layers would be compiled again for each hook
    ):
        yield


def _check_whole(model: nn.Module) -> None:
    """Raise UserError where a process has parts of the weights only, as under FSDP or ZeRO-3."""
    for name, parameter in model.named_parameters():
        if not parameter.numel() or hasattr(parameter, "device_mesh"):
            raise UserError(
                f"the weights of '{name}' are spread over several processes; expected a model that has all of them: "
                "watch one under DistributedDataParallel, or the checkpoints with python -m outliers.emergence"
            )
