"""Measurement of memory: of a configuration, on torch's meta device, in about a second a model."""

from collections.abc import Sequence

from outliers.metrics.measurement import Measurement
from outliers.metrics.memory import Fits, Memory
from outliers.metrics.memory.footprint import BITS, Footprint, fits, measure_footprint
from outliers.subjects.bench import Bench
from outliers.subjects.cell import Cell


class OfConfigurations(Measurement):
    """One footprint answers all that is asked of a model with as much context and as many sequences."""

    unit = "model"
    splits = False

    def facts(self, cell: Cell, _bench: Bench) -> dict:
        """All that is asked, for tables take defaults too."""
        return cell.metric.model_dump(exclude_none=True)

    def bundles(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """All cells of a model."""
        return [list(cells)]

    def steps(self, _cells: Sequence[Cell]) -> int:
        """One a model."""
        return 1

    def keeps(self, _cells: Sequence[Cell]) -> None:
        """Nothing."""

    def answer(self, _bench: Bench, cells: Sequence[Cell], _part: slice, _facts: dict) -> list[Footprint]:
        """The footprint of each cell."""
        config = cells[0].subject.config
        sizes = {(cell.metric.context, cell.metric.batch) for cell in cells}
        footprints = {size: measure_footprint(config, *size) for size in sizes}
        return [footprints[cell.metric.context, cell.metric.batch] for cell in cells]

    def values(self, cell: Cell, answers: list[Footprint]) -> list[dict]:
        """A value each number of bits, and what is the same in all."""
        (footprint,) = answers
        about = {"parameters": footprint.parameters, "context_used": footprint.context}
        values_of = _fitting if isinstance(cell.metric, Fits) else _needed
        return [about | value for value in values_of(cell.metric, footprint)]


def _fitting(metric: Fits, footprint: Footprint) -> list[dict]:
    place = metric.gpus, metric.gigabytes, metric.headroom
    return [{"metric": "fits", "bits": bits, "value": int(fits(footprint, bits, *place)), "unit": "1"} for bits in BITS]


def _needed(_metric: Memory, footprint: Footprint) -> list[dict]:
    return [
        {"metric": "parameters", "value": footprint.parameters, "unit": "1"},
        *({"metric": "weights", "bits": bits, "value": footprint.weights(bits), "unit": "bytes"} for bits in BITS),
        *(
            {"metric": "loaded", "bits": bits, "value": loaded, "unit": "bytes"}
            for bits, loaded in footprint.loaded.items()
            if loaded != footprint.weights(bits)
        ),
        *({"metric": name, "value": getattr(footprint, name), "unit": "bytes"} for name in ("cache", "activations")),
    ]


MEMORY = OfConfigurations()
