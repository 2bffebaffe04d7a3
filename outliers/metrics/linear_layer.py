"""Timings of the implementations of a linear layer."""

import time
from collections.abc import Callable, Sequence

import torch
from outlier_kernels import dispatch, reference
from outlier_kernels.formats import ROWS, Quantizer
from torch import nn

from outliers.metrics.latency import quartiles, timed
from outliers.metrics.measurement import Measurement
from outliers.models.load import DTYPES, find_device
from outliers.quantization.peers import bitsandbytes_layer, has_bitsandbytes
from outliers.subjects.cell import Cell
from outliers.subjects.layer import layer_shape
from outliers.subjects.model_cache import ModelCache

BASELINE = "16 bits"
LEAST_ROUNDS = 5
OUTLIERS = {3: 9.0, 5: -20.0, -1: 7.0}  # feature and its value in one token
METRICS = {"milliseconds": "ms", "times_16_bits": "1"}  # with their units


class LinearLayerMeasurement(Measurement):
    """The measurement of all implementations of a layer in turn."""

    unit = "layer"
    splits = False

    def provenance(self, cell: Cell, _model_cache: ModelCache) -> dict:
        """Return all parameters, including defaults, because tables show them."""
        return cell.metric.model_dump()

    def memory_needs(self, _cells: Sequence[Cell]) -> None:
        """Return None: memory is not forecast."""

    def measure(
        self, model_cache: ModelCache, cells: Sequence[Cell], _part: slice, _provenance: dict
    ) -> list[dict[str, list[float]]]:
        """Return milliseconds by implementation and round."""
        (cell,), experiment = cells, cells[0].subject.experiment
        device, shape = find_device(experiment.device), _shape(cell)
        seconds, set_share = cell.metric.seconds, model_cache.bar.set_share
        return [milliseconds(ways(*shape, device, DTYPES[experiment.dtype]), device, seconds, set_share)]

    def values(self, cell: Cell, results: list[dict[str, list[float]]]) -> list[dict]:
        return [value for row in timing_rows(_shape(cell), *results) for value in _tidy(cell.metric.name, row)]


def _shape(cell: Cell) -> tuple[int, int, int]:
    return cell.metric.tokens, *layer_shape(cell.subject.dimension)


MEASUREMENT = LinearLayerMeasurement()


def _tidy(name: str, row: dict) -> list[dict]:
    return [
        {
            "way": row["way"],
            "metric": f"{name}.{metric}",
            "value": row[metric],
            "q1": row[f"{metric}_q1"],
            "q3": row[f"{metric}_q3"],
            "unit": unit,
        }
        for metric, unit in METRICS.items()
    ]


def layer_and_inputs(tokens: int, features: int, outputs: int, device: torch.device) -> tuple[nn.Linear, torch.Tensor]:
    """Return a layer and hidden states (tokens, features) with outlier features, float32, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(tokens, features, device=device)
        exact = nn.Linear(features, outputs, device=device)
    for feature, value in OUTLIERS.items():
        x[feature % tokens, feature] = value
    return exact, x


@torch.inference_mode()
def ways(
    tokens: int, features: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return implementations that multiply hidden states (tokens, features) by a weight (outputs, features), by name.

    "int8 alone" is `torch._int_mm` of finished codes, "plain torch" stands for the reference kernels, and the others
    use the kernels of the device. All except those with "32 bits" have inputs and outputs in `dtype`, 16 bits.
    bitsandbytes is included if it is installed. Weights and hidden states are identical at every call.
    """
    exact, x = layer_and_inputs(tokens, features, outputs, device)
    half, in_half = nn.Linear(features, outputs, device=device, dtype=dtype), x.to(dtype)
    half.load_state_dict(exact.state_dict())
    tensor = Quantizer("int8", "tensor")
    by_row, by_tensor = (reference.quantize(exact.weight, quantizer) for quantizer in (ROWS, tensor))
    codes, fast, bias = reference.quantize(x, ROWS).codes, dispatch.prepare(by_row), exact.bias
    peer = bitsandbytes_layer(exact) if has_bitsandbytes() else None
    runs = {
        BASELINE: lambda: half(in_half),
        "int8 alone": lambda: reference.int8_matmul(codes, by_row.codes),
        "absmax, plain torch": lambda: reference.linear(in_half, by_tensor, bias, tensor),
        "vector-wise, plain torch": lambda: reference.linear(in_half, by_row, bias),
        "vector-wise": lambda: dispatch.linear(in_half, fast, bias),
        "LLM.int8()": lambda: dispatch.linear(in_half, fast, bias, threshold=6.0),
        "bitsandbytes": lambda: peer(in_half),
        "32 bits": lambda: exact(x),
        "LLM.int8(), 32 bits in": lambda: dispatch.linear(x, fast, bias, threshold=6.0),
        "bitsandbytes, 32 bits in": lambda: peer(x),
    }
    return {name: run for name, run in runs.items() if peer or not name.startswith("bitsandbytes")}


@torch.inference_mode()
def milliseconds(
    runs: dict[str, Callable[[], torch.Tensor]],
    device: torch.device,
    seconds: float,
    set_share: Callable[[float], None] = lambda share: None,
) -> dict[str, list[float]]:
    """Return the wall times of each function by round; a round times all in turn, after a warm-up.

    There are at least `LEAST_ROUNDS` rounds, and `seconds` of timing. set_share: called after each call with the
    completed share.
    """
    times = {name: [] for name in runs}
    for run in runs.values():
        run()
    start = time.perf_counter()
    while time.perf_counter() < start + seconds or min(map(len, times.values())) < LEAST_ROUNDS:
        for name, run in runs.items():
            times[name].append(timed(run, device)[0])
            rounds = sum(map(len, times.values())) / len(runs)
            set_share(min(rounds / LEAST_ROUNDS, (time.perf_counter() - start) / seconds))
    return times


def timing_rows(shape: tuple[int, int, int], times: dict[str, list[float]]) -> list[dict]:
    """Return one row per implementation: the layer's shape, the way, and medians over rounds with quartiles.

    Medians are of `milliseconds` and of `times_16_bits`, the speedup over 16 bits in the same round. For machines that
    other programs use, too, there are also `milliseconds_smallest`, and `times_16_bits_smallest` computed from these.
    """
    labels, rows = dict(zip(("tokens", "features", "outputs"), shape, strict=True)), []
    for way, values in times.items():
        ratios = [half / whole for half, whole in zip(times[BASELINE], values, strict=True)]
        smallest = {"milliseconds_smallest": min(values), "times_16_bits_smallest": min(times[BASELINE]) / min(values)}
        medians = _with_quartiles("milliseconds", values) | _with_quartiles("times_16_bits", ratios)
        rows.append({**labels, "way": way, **medians, **smallest})
    return rows


def _with_quartiles(name: str, values: list[float]) -> dict[str, float]:
    low, middle, high = quartiles(values)
    return {name: middle, f"{name}_q1": low, f"{name}_q3": high}
