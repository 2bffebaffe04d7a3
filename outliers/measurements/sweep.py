"""What measurements of schemes have in common."""

from collections.abc import Collection, Iterable

import torch
from transformers import PreTrainedModel

from outliers.measurements.bench import left_fields
from outliers.models.anatomy import projections
from outliers.quantization.schemes import Scheme, by_weights, get_scheme
from outliers.specification.kinds import Damage, Experiment, Latency, ZeroShot, alpha_of_schemes
from outliers.text.blocks import tokens_hash
from outliers.variants.quantized import Quantized


def schemes_of(spec: Experiment | Damage | Latency | ZeroShot) -> list[Scheme]:
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


def each_alone(schemes: Iterable[Scheme]) -> tuple[tuple[Scheme, ...], ...]:
    """Sets of one scheme, for `Keeps`: a resident model is under one after the other."""
    return tuple((scheme,) for scheme in schemes)


def coded(model: PreTrainedModel) -> PreTrainedModel:
    """A model under a scheme, its weights quantized now, so that what is made of it shares the codes."""
    for projection in projections(model):
        getattr(projection.module, "quantized_weight", None)
    return model
