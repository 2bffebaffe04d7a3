"""What measurements of schemes have in common."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import partial

import torch
from transformers import PreTrainedModel

from outliers.measurements.bench import left_fields
from outliers.measurements.measurement import Part, Passes
from outliers.metrics.perplexity.measure import perplexity
from outliers.models.anatomy import projections
from outliers.quantization.calibration import neutral
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import Scheme, by_weights, get_scheme
from outliers.specification.kinds import Experiment, Latency, ZeroShot, alpha_of_schemes
from outliers.text.blocks import tokens_hash
from outliers.variants.variant import Quantized


def schemes_of(spec: Experiment | Latency | ZeroShot) -> list[Scheme]:
    """The schemes of a specification; those that share weight codes are side by side."""
    return by_weights(get_scheme(scheme, alpha_of_schemes(spec)) for scheme in spec.schemes)


def scheme_fields(
    scheme: Scheme, model: PreTrainedModel, skip: Collection[str] = (), calibration: torch.Tensor | None = None
) -> dict:
    """The settings of a scheme, its name among them, which kernels run it, what of a model it leaves, and the hash of
    the blocks that it is calibrated on, if it is."""
    left = left_fields(model, model.num_parameters()) if scheme.quantizes else {}
    text = {"calibration_hash": tokens_hash(calibration)} if scheme.needs_calibration else {}
    return Quantized(scheme, tuple(skip)).fields(model) | left | text


def sweep_parts(schemes: Iterable[Scheme], draws: int = 1) -> Passes:
    """One part for all schemes that differ in nothing but the granularity of their scales.

    draws: how many times each scheme is measured.
    """
    alike = defaultdict(list)
    for scheme in schemes:
        kinds = (part and (part.format, part.symmetric, part.group) for part in (scheme.activations, scheme.weights))
        remedies = scheme.transform, scheme.token_threshold, scheme.token_roles, scheme.clip, scheme.clip_roles
        attention = scheme.attention, scheme.attention_products
        alike[*kinds, scheme.outlier_threshold, scheme.arithmetic, *remedies, *attention].append(scheme)
    return [[Part(perplexity, partial(with_codes, some[0]), len(some) * draws) for some in alike.values()]]


def with_codes(scheme: Scheme, model: PreTrainedModel) -> PreTrainedModel:
    """The model under a scheme, its weights quantized now instead of on first use; calibrated on nothing."""
    return coded(quantize(model, scheme, calibration=neutral(model)))


def coded(model: PreTrainedModel) -> PreTrainedModel:
    """A model under a scheme, its weights quantized now, so that what is made of it shares the codes."""
    for projection in projections(model):
        getattr(projection.module, "quantized_weight", None)
    return model
