"""Measurements while a model is trained, and of its final state (LLM.int8(), appendix E)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel

from outliers.criterion import ALPHA
from outliers.errors import UserError
from outliers.metrics.measurement import Measurement
from outliers.metrics.perplexity import (
    Loss,
    PendingLoss,
    finite_losses,
    loss_of,
    losses,
    perplexity_of,
    perplexity_value,
)
from outliers.metrics.records import TrainingMetric
from outliers.metrics.trace import tidy
from outliers.models.anatomy.examples import Block
from outliers.models.anatomy.weights import device_of
from outliers.models.decoder import inference
from outliers.models.load import find_device
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import BASELINE, get_scheme
from outliers.show import units
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache, naming
from outliers.text.blocks import unpad
from outliers.tracing.result import Trace
from outliers.tracing.table4 import trace_row
from outliers.tracing.trace import traces
from outliers.trainer.layers import train_int8
from outliers.trainer.loop import train
from outliers.trainer.start import initial_model
from outliers.variants.draw import drawn

ERROR = "perplexity_error"  # standard error over the text
KURTOSES = ("kurtosis_tensor", "kurtosis_token", "kurtosis_feature")


def watch(model: nn.Module, blocks: Iterable[Block], alpha: float = ALPHA, attention: bool = True) -> dict[str, float]:
    """Return measurements of a model during training, from one pass over held-out text.

    Training is not affected: gradients, modes, the states of random generators and attention functions are restored.
    The model is measured in the dtype of its weights, without dropout and autocast, as its checkpoint would be.

    Args:
        model: a model that has all of its weights, possibly wrapped by `torch.compile`, `accelerate` or
            `DistributedDataParallel`.
        blocks: held-out token ids, int64 (blocks, T), or any iterable of (T,), or examples of another family; on any
            device.
        alpha: magnitude from which an entry is a hit.
        attention: whether to find attention sinks. A custom attention function must then return its probabilities
            beside its outputs.

    Returns:
        Values by flat names, for reporters: those of `table4_row` without the softmax; `perplexity_error`, the standard
            error of the perplexity over the text, for two blocks or more; `max.ROLE`, the largest |x| of
            "attn_in", "attn_out", "ffn_in", "ffn_out", as far as the model has them, and of the residual stream,
            "residual"; `kurtosis_tensor.ROLE`, `kurtosis_token.ROLE` and `kurtosis_feature.ROLE`, the largest over the
            layers (docs/definitions.md#outlier-features); and `attention_sink`, the share of (layer, head) pairs for
            which position 0 is a sink. For an encoder-decoder, names start with that of the view: `encoder.count`.

    Raises:
        UserError: as `trace`, as `perplexity`; or the weights are spread over several processes.

    Example:
        >>> sorted(outliers.watch(model, blocks))[:2]
        ['attention_sink', 'count']
    """
    return flat(watch_views(model, blocks, alpha, attention))


def flat(by_view: dict[str, dict[str, float]]) -> dict[str, float]:
    """Flatten the values of views to one name each."""
    return {f"{view}.{name}".lstrip("."): value for view, values in by_view.items() for name, value in values.items()}


def watch_views(
    model: nn.Module, blocks: Iterable[torch.Tensor], alpha: float, attention: bool
) -> dict[str, dict[str, float]]:
    """Return the measurements of `watch` by view of the model; "" has those of the whole model."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    _check_whole(model)
    with _undisturbed(model):
        return _watch(model, blocks, alpha, attention)


@inference
def _watch(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], alpha: float, attention: bool
) -> dict[str, dict[str, float]]:
    of_blocks: list[Loss | PendingLoss] = []
    see = lambda ids, states: of_blocks.append(loss_of(model, ids, states))  # noqa: E731
    found_traces = traces(model, unpad(blocks, None), alpha=alpha, attention=attention, see_last=see)
    losses = finite_losses(of_blocks)
    perplexity = perplexity_of(losses)
    error = units.standard_error(units.residuals(*zip(*losses, strict=True), perplexity))
    by_view: dict[str, dict[str, float]] = {
        "": {"perplexity": perplexity} | ({} if error is None else {ERROR: error}),
    }
    for view in found_traces:
        by_view.setdefault(view.stack, {}).update(trace_row(view) | _largest(view))
    return by_view


def watched_values(metrics: dict[str, float]) -> list[dict]:
    """Return measurements of a view as values of a row; the standard error becomes a field of the perplexity."""
    error = {"standard_error": metrics[ERROR]} if ERROR in metrics else {}
    values = tidy([{name: value for name, value in metrics.items() if name != ERROR}])
    return [value | (error if value["metric"] == "perplexity" else {}) for value in values]


def _largest(trace: Trace) -> dict[str, float]:
    residual = trace.statistics["residual.largest"][:, 0].max().item()
    by_role = trace.hidden_states().groupby("role", sort=False).max()
    row = {f"max.{role}": float(norm) for role, norm in by_role["infinity_norm"].items()} | {"max.residual": residual}
    row |= {f"{name}.{role}": float(value) for name in KURTOSES for role, value in by_role[name].items()}
    return row | ({"attention_sink": float(trace.attention_sinks()["share"][0])} if trace.heads else {})


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Preserve the global state of a training beside the model itself: random generators, autocast, compiled code."""
    kind = device_of(model).type
    with (
        torch.random.fork_rng([device_of(model)] if kind == "cuda" else []),
        torch.autocast(kind, enabled=False),
        torch.compiler.set_stance("force_eager"),  # else layers would be compiled again for each hook
    ):
        yield


def _check_whole(model: nn.Module) -> None:
    """Raise UserError if a process has only parts of the weights, as under FSDP or ZeRO-3."""
    for name, parameter in model.named_parameters():
        if not parameter.numel() or hasattr(parameter, "device_mesh"):
            raise UserError(
                f"the weights of '{name}' are spread over several processes; expected a model that has all of them: "
                "watch one under DistributedDataParallel, or the checkpoints with python -m outliers.emergence"
            )


# The measurements of `watch` that are kept during training; all are kept of the trained model.
ALONG = ("perplexity", ERROR, "count", "layers", "positions", "attention_sink", "max")  # max is that of each role


class RunResult(NamedTuple):
    """The outcome of a run: fields of its model, its log, and the values of the perplexity under each scheme."""

    fields: dict
    logged: list[dict]
    perplexities: list[dict]


class TrainingMeasurement(Measurement):
    """The measurement of a training run, from its start to the schemes at its end."""

    unit = "step"
    splits = False

    def provenance(self, cell: Cell, _model_cache: ModelCache) -> dict:
        return {"alpha": cell.metric.alpha, "draws": cell.metric.draws}

    def steps(self, cells: Sequence[Cell]) -> int:
        return sum(cell.subject.recipe.steps for cell in cells)

    def memory_needs(self, _cells: Sequence[Cell]) -> None:
        """Return None: memory is not forecast."""

    def measure(
        self, model_cache: ModelCache, cells: Sequence[Cell], _part: slice, _provenance: dict
    ) -> list[RunResult]:
        run, metric = cells[0].subject, cells[0].metric
        model = initial_model(run.recipe, run.seed, find_device(run.experiment.device))
        fields = {"architecture": model.config.model_type, "parameters": model.num_parameters()}
        with naming(run.name):
            steps = {*metric.watched, run.recipe.steps}
            observe = lambda model, _step: watch(model, run.blocks, metric.alpha)  # noqa: E731
            logged = train(model, run.recipe, run.training_blocks(), run.folder, observe, steps, model_cache.bar.update)
            return [RunResult(fields, logged, _under_schemes(model, run.blocks, metric))]

    def values(self, cell: Cell, results: list[RunResult]) -> list[dict]:
        fields, logged, perplexities = results[0]
        steps = cell.subject.recipe.steps
        along = [
            {"checkpoint": f"step-{entry['step']}"} | value
            for entry in logged
            if "perplexity" in entry
            for value in watched_values(
                {metric: number for metric, number in entry.items() if _is_kept(metric, entry["step"] == steps)}
            )
        ]
        at_the_end = [{"checkpoint": f"step-{steps}", **perplexity} for perplexity in perplexities]
        return [fields | value for value in along + at_the_end]


def _is_kept(metric: str, is_last: bool) -> bool:
    """Return whether a row has a measurement: during training only some, at the end all."""
    return metric in ALONG or metric.startswith("max.") or (is_last and metric not in ("step", "epoch"))


def _under_schemes(model: PreTrainedModel, blocks: torch.Tensor, metric: TrainingMetric) -> list[dict]:
    """Return the perplexity of a trained model under each scheme; BASELINE stands for its weights in float32."""
    train_int8(model, ffn=False, linear=False)
    perplexities = []
    for scheme in dict.fromkeys(map(get_scheme, [BASELINE, *metric.schemes])):
        changed, draws = quantize(model, scheme), []
        for draw in range(metric.draws):
            with drawn(changed, draw):
                draws.append(losses(changed, blocks))
        perplexities.append(perplexity_value(f"perplexity.{scheme.name}", draws))
    return perplexities


MEASUREMENT = TrainingMeasurement()
