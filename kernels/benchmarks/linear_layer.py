"""One linear layer with three outlier columns: LLM.int8() beside fp32, bf16, bitsandbytes and the bare product.

    python kernels/benchmarks/linear_layer.py

The layers of one shape are timed in turn, several rounds, on this machine's CPU; printed are the medians in
milliseconds, and how many times faster LLM.int8() is (medians of the ratios of a round). "int8 alone" is
`torch._int_mm` of the codes. bitsandbytes runs in eval mode, where it is installed (in training mode its CPU path does
not quantize activations).
"""

import logging
import statistics
import time

import torch
from outlier_kernels import dispatch, reference
from tabulate import tabulate
from torch import nn

# Tokens, features, outputs.
SHAPES = (
    (512, 768, 768),
    (512, 768, 3072),
    (512, 4096, 4096),
    (2048, 1024, 4096),
    (16, 4096, 4096),
    (1, 4096, 4096),
)
SECONDS, LEAST_ROUNDS = 3.0, 7
OUTLIERS = {3: 9.0, 5: -20.0, -1: 7.0}


def ways(tokens: int, features: int, outputs: int) -> dict:
    """What to time, by name."""
    x = torch.randn(tokens, features)
    for feature, value in OUTLIERS.items():
        x[feature % tokens, feature] = value
    in_bf16 = x.bfloat16()
    exact, half = nn.Linear(features, outputs), nn.Linear(features, outputs).bfloat16()
    quantized = reference.quantize(exact.weight, symmetric=True, per_row=True)
    codes, weight = reference.quantize(x, symmetric=True, per_row=True).codes, dispatch.prepare(quantized)
    named = {
        "fp32": lambda: exact(x),
        "bf16": lambda: half(in_bf16),
        "int8 alone": lambda: torch._int_mm(codes, quantized.codes.T),
        "LLM.int8, fp32 in": lambda: dispatch.linear(x, weight, exact.bias, threshold=6.0),
        "LLM.int8, bf16 in": lambda: dispatch.linear(in_bf16, weight, exact.bias, threshold=6.0),
    }
    peer = bitsandbytes_layer(exact)
    if peer:
        named |= {"bitsandbytes, fp32 in": lambda: peer(x), "bitsandbytes, bf16 in": lambda: peer(in_bf16)}
    return named


def bitsandbytes_layer(exact: nn.Linear) -> nn.Module | None:
    """The same layer by bitsandbytes; None where it is not installed."""
    try:
        import bitsandbytes
    except ImportError:
        return None
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    layer = bitsandbytes.nn.Linear8bitLt(exact.in_features, exact.out_features, has_fp16_weights=False, threshold=6.0)
    layer.load_state_dict(exact.state_dict())
    return layer.to("cpu").eval()


def milliseconds(named: dict) -> dict[str, list[float]]:
    """Wall time of each, in turn, a list of rounds."""
    times = {name: [] for name in named}
    for run in named.values():
        run()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times["fp32"]) < LEAST_ROUNDS:
        for name, run in named.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times longer `slow` takes: the median over rounds."""
    return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    measured = {shape: milliseconds(ways(*shape)) for shape in SHAPES}
    names = list(next(iter(measured.values())))
    rows = [
        [" × ".join(map(str, shape)), *(statistics.median(times[name]) for name in names)]
        for shape, times in measured.items()
    ]
    print(tabulate(rows, ["milliseconds", *names], floatfmt=".2f"), "\n")
    fast = {"fp32": "LLM.int8, fp32 in", "bf16": "LLM.int8, bf16 in", "int8 alone": "LLM.int8, fp32 in"}
    fast |= {name: name.replace("bitsandbytes", "LLM.int8") for name in names if name.startswith("bitsandbytes")}
    ratios = {shape: [ratio(times, slow, by) for slow, by in fast.items()] for shape, times in measured.items()}
    rows = [[" × ".join(map(str, shape)), *values] for shape, values in ratios.items()]
    rows.append(["geometric mean", *map(statistics.geometric_mean, zip(*ratios.values(), strict=True))])
    print(tabulate(rows, ["times faster than", *fast], floatfmt=".2f"))
    print(f"\npath: {dispatch.path(torch.device('cpu'))}, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
