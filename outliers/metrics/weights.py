"""The error of a variant in the weights themselves, by projection."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.measurement import Measurement, loaded
from outliers.models.anatomy import Projection, projections
from outliers.models.decoder import inference
from outliers.models.variant import Variant
from outliers.quantization.peers import weight_of
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache


@inference
def weight_errors(model: PreTrainedModel, variant: Variant) -> list[dict]:
    """Return the values of all projections; the error is missing where the variant leaves no readable weight."""
    with variant.on(model) as changed:
        pairs = zip(projections(model), projections(changed), strict=True)
        return [value for exact, other in pairs for value in _values(exact, weight_of(other.module))]


def _values(projection: Projection, other: torch.Tensor | None) -> list[dict]:
    exact = weight_of(projection.module)
    metrics = {"damage.largest_weight": _largest(exact)}
    if other is not None:
        change, energy = other.to(exact) - exact, exact.double().square().sum().item()
        error = change.double().square().sum().item() / energy if energy else 0.0
        metrics |= {"damage.weight_error": {"value": error}, "damage.largest_change": _largest(change)}
    place = {"layer": projection.layer, "role": projection.role, "projection": projection.path, "unit": "1"}
    return [{"metric": metric, **value, **place} for metric, value in metrics.items()]


def _largest(weight: torch.Tensor) -> dict:
    """Return the entry of a weight (outputs, features) with the largest magnitude: its signed value and its place."""
    output, feature = divmod(weight.abs().argmax().item(), weight.shape[1])
    return {"value": weight[output, feature].item(), "output": output, "feature": feature}


class WeightsMeasurement(Measurement):
    """The measurement of all projections of a resident model; it does not read the text."""

    splits = False

    def check(self, cell: Cell) -> None:
        if cell.subject.experiment.stream:
            raise UserError("weights under a variant of a streamed model; expected one in memory: leave --stream out")

    def steps(self, cells: Sequence[Cell]) -> int:
        return len(cells)

    def measure(
        self, model_cache: ModelCache, cells: Sequence[Cell], part: slice, provenance: dict
    ) -> list[list[dict]]:
        model, variants = loaded(model_cache, cells[0].subject, [cell.variant for cell in cells], provenance)
        errors = [weight_errors(model, variant) for variant in variants]
        model_cache.bar.update(len(cells))
        return errors

    def values(self, cell: Cell, results: list[list[dict]]) -> list[dict]:
        return results[0]


MEASUREMENT = WeightsMeasurement()
