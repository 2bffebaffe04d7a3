"""One linear layer with three outlier features, multiplied in many ways (Table 5)."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from outlier_kernels import dispatch, reference
from outlier_kernels.formats import ROWS, Quantizer
from torch import nn

from outliers.measurements.bench import Bench, check_machine
from outliers.measurements.latency import quartiles, timed
from outliers.measurements.measurement import Measurement, Question
from outliers.models.load import DTYPES, find_device
from outliers.quantization.peers import bitsandbytes_layer, has_bitsandbytes
from outliers.specification.kinds import LinearLayers, layer_shape

BASELINE = "16 bits"
LEAST_ROUNDS = 5
OUTLIERS = {3: 9.0, 5: -20.0, -1: 7.0}  # feature and its value in one token
METRICS = {"milliseconds": "ms", "times_16_bits": "1"}  # with their units


class Layer(NamedTuple):
    """The first feed-forward layer of models of a dimension, or of a shape."""

    dimension: int | str

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"dimension {self.dimension}"


class LinearLayerRows(Measurement[LinearLayers]):
    """Two rows a dimension and way (see `ways`): `linear_layer.milliseconds` and `linear_layer.times_16_bits`, each the
    median over rounds with the quartiles as q1 and q3.

    All ways of one dimension are timed in turn, in this process: beside others, no time is its own.
    """

    unit = "layer"

    def subjects(self) -> list[Layer]:
        check_machine(self.spec)
        return [Layer(dimension) for dimension in self.spec.dimensions]

    def look(self, _bench: Bench, layer: Layer) -> tuple[dict, None]:
        spec = self.spec
        fields = {"dimension": layer.dimension, "outputs": layer_shape(layer.dimension)[1], "seconds": spec.seconds}
        kernels = dispatch.path(find_device(spec.device))
        return fields | {"tokens": spec.tokens, "dtype": spec.dtype, "kernels": kernels}, None

    def questions(self, layer: Layer, _facts: None) -> list[Question]:
        return [Question("all ways", {})]

    def is_whole(self, _question: Question, rows: list[dict]) -> bool:
        """The ways of bitsandbytes are there or not."""
        found = {
            metric: {row["way"] for row in rows if row["metric"] == f"linear_layer.{metric}"} for metric in METRICS
        }
        in_16_bits, in_32_bits = ("LLM.int8()", "bitsandbytes"), ("LLM.int8(), 32 bits in", "bitsandbytes, 32 bits in")
        return all(
            "LLM.int8()" in ways and [way in ways for way in in_16_bits] == [way in ways for way in in_32_bits]
            for ways in found.values()
        )

    def answer(self, bench: Bench, layer: Layer, _question: Question, _fields: dict) -> list[dict]:
        spec, device = self.spec, find_device(self.spec.device)
        shape = spec.tokens, *layer_shape(layer.dimension)
        times = milliseconds(ways(*shape, device, DTYPES[spec.dtype]), device, spec.seconds, bench.bar.see)
        return [row for of_way in rows_of(shape, times) for row in _tidy(of_way)]

    def rows(self, _question: Question, answer: list[dict]) -> list[dict]:
        return answer


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


@torch.inference_mode()
def ways(
    tokens: int, features: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], torch.Tensor]]:
    """The ways to multiply hidden states (tokens, features) with a weight (outputs, features), by name.

    "int8 alone" is `torch._int_mm` of finished codes, "plain torch" the reference kernels, and what has no such
    addition the kernels of the device. All but those with "32 bits" take `dtype`, 16 bits, in and out. bitsandbytes
    takes part where it is installed. Weights and hidden states are the same at every call.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(tokens, features, device=device)
        exact = nn.Linear(features, outputs, device=device)
    for feature, value in OUTLIERS.items():
        x[feature % tokens, feature] = value
    half, in_half = nn.Linear(features, outputs, device=device, dtype=dtype), x.to(dtype)
    half.load_state_dict(exact.state_dict())
    tensor = Quantizer("int8", "tensor")
    of_row, of_tensor = (reference.quantize(exact.weight, quantizer) for quantizer in (ROWS, tensor))
    codes, fast, bias = reference.quantize(x, ROWS).codes, dispatch.prepare(of_row), exact.bias
    peer = bitsandbytes_layer(exact) if has_bitsandbytes() else None
    named = {
        BASELINE: lambda: half(in_half),
        "int8 alone": lambda: reference.int8_matmul(codes, of_row.codes),
        "absmax, plain torch": lambda: reference.linear(in_half, of_tensor, bias, tensor),
        "vector-wise, plain torch": lambda: reference.linear(in_half, of_row, bias),
        "vector-wise": lambda: dispatch.linear(in_half, fast, bias),
        "LLM.int8()": lambda: dispatch.linear(in_half, fast, bias, threshold=6.0),
        "bitsandbytes": lambda: peer(in_half),
        "32 bits": lambda: exact(x),
        "LLM.int8(), 32 bits in": lambda: dispatch.linear(x, fast, bias, threshold=6.0),
        "bitsandbytes, 32 bits in": lambda: peer(x),
    }
    return {name: run for name, run in named.items() if peer or not name.startswith("bitsandbytes")}


@torch.inference_mode()
def milliseconds(
    named: dict[str, Callable[[], torch.Tensor]],
    device: torch.device,
    seconds: float,
    see: Callable[[float], None] = lambda share: None,
) -> dict[str, list[float]]:
    """Wall time of each way, round by round: in a round all are timed in turn, after one that is not timed.

    Args:
        named: what to time.
        device: where it runs; work on a GPU is waited for.
        seconds: until no more rounds begin; there are at least `LEAST_ROUNDS`.
        see: called after each call with how far all are.
    """
    times = {name: [] for name in named}
    for run in named.values():
        run()
    start = time.perf_counter()
    while time.perf_counter() < start + seconds or min(map(len, times.values())) < LEAST_ROUNDS:
        for name, run in named.items():
            times[name].append(timed(run, device)[0])
            rounds = sum(map(len, times.values())) / len(named)
            see(min(rounds / LEAST_ROUNDS, (time.perf_counter() - start) / seconds))
    return times


def rows_of(shape: tuple[int, int, int], times: dict[str, list[float]]) -> list[dict]:
    """One row a way.

    Args:
        shape: tokens, features, outputs.
        times: from `milliseconds`.

    Returns:
        shape and way with the medians over rounds of milliseconds (and their quartiles `milliseconds_q1`, `…_q3`) and
        of `times_16_bits`, how many times faster than 16 bits a way is in the same round (and its quartiles); and, for
        machines that others use as well, `milliseconds_smallest`, and `times_16_bits_smallest` by those.
    """
    tokens, features, outputs = shape
    rows = []
    for name, values in times.items():
        row = {"tokens": tokens, "features": features, "outputs": outputs, "way": name}
        row |= _with_quartiles("milliseconds", values)
        row |= _with_quartiles("times_16_bits", _ratios(times[BASELINE], values))
        smallest = min(values)
        row |= {"milliseconds_smallest": smallest, "times_16_bits_smallest": min(times[BASELINE]) / smallest}
        rows.append(row)
    return rows


def _ratios(of: list[float], own: list[float]) -> list[float]:
    return [one / other for one, other in zip(of, own, strict=True)]


def _with_quartiles(name: str, values: list[float]) -> dict[str, float]:
    low, middle, high = quartiles(values)
    return {name: middle, f"{name}_q1": low, f"{name}_q3": high}
