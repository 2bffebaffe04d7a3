"""The parts of each measurement, of which `outliers.estimate.foresee` makes a calibration."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial

import torch
from transformers import PreTrainedModel

from outliers.estimate.probe import LAYERS, Part, Passes
from outliers.measurements.ablation import plan
from outliers.measurements.attention import top1_softmax
from outliers.measurements.perplexity import perplexity
from outliers.models.anatomy import ROLES, projections, readers
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import Scheme
from outliers.specification.kinds import Ablation, Settings
from outliers.tracing.result import STREAM
from outliers.tracing.trace import trace
from outliers.variants.interventions import Intervention

FEATURE = 0  # stands for outlier features that nobody knows yet


def sweep_parts(schemes: Iterable[Scheme], draws: int = 1) -> Passes:
    """Of a sweep: one part for all schemes that differ in nothing but the granularity of their scales.

    draws: how many times each scheme is measured.
    """
    alike = defaultdict(list)
    for scheme in schemes:
        kinds = (part and (part.format, part.symmetric) for part in (scheme.activations, scheme.weights))
        alike[*kinds, scheme.outlier_threshold, scheme.arithmetic, scheme.transform].append(scheme)
    return [[Part(perplexity, partial(_with_codes, schemes[0]), len(schemes) * draws) for schemes in alike.values()]]


def trace_parts(spec: Settings, roles: Iterable[str] = ROLES, attention: bool = True) -> Passes:
    """Of a trace and its row of Table 4; roles and attention as in `trace`."""
    interventions = [Intervention(()), Intervention((FEATURE,))]
    return [
        [Part(partial(trace, roles=roles, alpha=spec.alpha, attention=attention))],
        [Part(partial(top1_softmax, interventions=interventions))],
        [Part(perplexity)],
    ]


def ablation_parts(spec: Ablation, width: int) -> Passes:
    """Of an ablation of a model with so many features; where none are given, of one."""
    cells = plan(spec.features or [FEATURE], width, spec.methods, spec.controls, spec.seed, spec.where)
    means = {(layer, role): torch.zeros(width) for layer in range(LAYERS) for role in STREAM}

    def intervention(method: str | None, features: tuple[int, ...]) -> Intervention:
        return Intervention(features, method or "zero", spec.seed, means if method == "mean" else {})

    alike = Counter((cell.method, len(cell.features)) for cell in cells)
    all_cells = [intervention(cell.method, cell.features) for cell in cells]
    return [
        [Part(partial(trace, roles=STREAM, alpha=spec.alpha, attention=False))],
        [Part(partial(top1_softmax, interventions=all_cells))],
        [
            Part(partial(_perplexity_without, intervention(method, tuple(range(count))), spec.where), times=times)
            for (method, count), times in alike.items()
        ],
    ]


def _with_codes(scheme: Scheme, model: PreTrainedModel) -> PreTrainedModel:
    """The model under a scheme, its weights quantized now instead of on first use."""
    model = quantize(model, scheme)
    for projection in projections(model):
        getattr(projection.module, "quantized_weight", None)
    return model


def _perplexity_without(
    intervention: Intervention, where: list[str], model: PreTrainedModel, blocks: torch.Tensor
) -> float:
    with intervention.on([reader for reader in readers(model) if reader.role in where]):
        return perplexity(model, blocks)
