"""Time the linear layers of Table 5 to rows, going on where an earlier run stopped."""

from pathlib import Path

import torch
from outlier_kernels.dispatch import path

from outliers.experiment.interrupt import stop_if_asked
from outliers.experiment.job import check_kernels
from outliers.experiment.provenance import environment, measuring
from outliers.experiment.rows import RowFile
from outliers.measurements.linear_layer import milliseconds, rows_of, ways
from outliers.models.load import DTYPES
from outliers.specification.kinds import LinearLayers, layer_shape
from outliers.terminal.progress import Progress

METRICS = {"milliseconds": "ms", "times_16_bits": "1"}  # with their units


def measure_linear_layers(spec: LinearLayers, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Time the first feed-forward layer of models of some dimensions in many ways (Table 5).

    All ways of one dimension are timed in turn, several rounds, and are on disk before the next one starts; a
    dimension found there is not timed again.

    Args:
        spec: what to run.
        out: folder for `rows.jsonl`; by default `results/<name>`.
        force: measure again what is finished.

    Returns:
        Two rows a dimension and way (see `outliers.measurements.linear_layer.ways`): `linear_layer.milliseconds` and
        `linear_layer.times_16_bits`, each the median over rounds with the quartiles as q1 and q3.

    Raises:
        UserError: the device does not exist.
    """
    device = check_kernels(spec)
    common = {"experiment": spec.name, "tokens": spec.tokens, "seconds": spec.seconds, "dtype": spec.dtype}
    common |= {"kernels": path(device), **environment(device)}
    with RowFile(Path(out or spec.folder)) as row_file, Progress(len(spec.dimensions), "layer") as bar:
        return [
            row
            for dimension in spec.dimensions
            for row in _measure(common | {"dimension": dimension}, spec, row_file, force, bar)
        ]


def _measure(cell: dict, spec: LinearLayers, row_file: RowFile, force: bool, bar: Progress) -> list[dict]:
    """The rows of one dimension."""
    bar.set_description(f"dimension {cell['dimension']}")
    rows = [] if force else row_file.find_all(cell)
    if _is_whole(rows):
        bar.skip(1)
    else:
        stop_if_asked()
        device = torch.device(cell["device"])
        shape = spec.tokens, *layer_shape(cell["dimension"])
        with measuring(cell["device"]) as spent:
            times = milliseconds(ways(*shape, device, DTYPES[spec.dtype]), device, spec.seconds, bar.see)
        outputs = {"outputs": shape[-1]}
        rows = [cell | outputs | row | spent.fields for of_way in rows_of(shape, times) for row in _tidy(of_way)]
        row_file.add(*rows)
        bar.update()
    return rows


def _is_whole(rows: list[dict]) -> bool:
    """Whether rows that were found are all of a dimension; the ways of bitsandbytes are there or not."""
    found = {metric: {row["way"] for row in rows if row["metric"] == f"linear_layer.{metric}"} for metric in METRICS}
    in_16_bits, in_32_bits = ("LLM.int8()", "bitsandbytes"), ("LLM.int8(), 32 bits in", "bitsandbytes, 32 bits in")
    return all(
        "LLM.int8()" in ways and [way in ways for way in in_16_bits] == [way in ways for way in in_32_bits]
        for ways in found.values()
    )


def _tidy(of_way: dict) -> list[dict]:
    """One row a metric of a row of `rows_of`."""
    return [
        {
            "way": of_way["way"],
            "metric": f"linear_layer.{metric}",
            "value": of_way[metric],
            "q1": of_way[f"{metric}_q1"],
            "q3": of_way[f"{metric}_q3"],
            "unit": unit,
        }
        for metric, unit in METRICS.items()
    ]
