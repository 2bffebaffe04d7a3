"""One linear layer with three outlier columns: LLM.int8() beside 16 bits, plain torch, bitsandbytes, the bare product.

    python kernels/benchmarks/linear_layer.py layers
    python kernels/benchmarks/linear_layer.py table5

`layers` are shapes from decoding to prefill; `table5` are the first feed-forward layers of the paper's Table 5 (model
dimension d: d features, 4 d outputs) at 512 tokens. All ways of one shape are timed in turn, several rounds, on a GPU
if there is one; CUDA work is waited for. Printed, and written as CSV to `--out`, are medians in milliseconds with the
spread between the quartiles, and how many times faster than 16 bits each way is (medians of the ratios of a round);
for Table 5 beside the published numbers. "int8 alone" is `torch._int_mm` of finished codes. bitsandbytes takes part
where it is installed, in eval mode (in training mode its CPU path does not quantize activations).
"""

import argparse
import itertools
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from outlier_kernels import dispatch, reference
from torch import nn

# Tokens, features, outputs.
SHAPES = {
    "layers": (
        (512, 768, 768),
        (512, 768, 3072),
        (512, 4096, 4096),
        (2048, 1024, 4096),
        (16, 4096, 4096),
        (1, 4096, 4096),
    ),
    "table5": tuple((512, d, 4 * d) for d in (768, 1024, 1536, 2048, 2560, 4096, 5140, 12288)),
}
# Times faster than 16 bits, by model dimension (LLM.int8(), Table 5).
PUBLISHED = {
    "int8 alone": (0.99, 1.08, 1.43, 1.61, 1.63, 1.67, 2.13, 2.29),
    "absmax, plain torch": (0.25, 0.24, 0.36, 0.45, 0.53, 0.70, 0.96, 1.50),
    "vector-wise, plain torch": (0.21, 0.22, 0.33, 0.41, 0.50, 0.65, 0.91, 1.50),
    "vector-wise": (0.43, 0.49, 0.74, 0.91, 0.94, 1.18, 1.59, 2.00),
    "LLM.int8()": (0.14, 0.20, 0.36, 0.51, 0.64, 0.86, 1.22, 1.81),
}
BASELINE = "16 bits"
SECONDS, LEAST_ROUNDS = 3.0, 5
OUTLIERS = {3: 9.0, 5: -20.0, -1: 7.0}


def ways(tokens: int, features: int, outputs: int, device: torch.device) -> dict[str, Callable]:
    """What to time, by name."""
    x = torch.randn(tokens, features, device=device)
    for feature, value in OUTLIERS.items():
        x[feature % tokens, feature] = value
    exact = nn.Linear(features, outputs, device=device)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16  # CPUs have no fast float16
    half, in_half = nn.Linear(features, outputs, device=device, dtype=dtype), x.to(dtype)
    of_row, of_tensor = (reference.quantize(exact.weight, symmetric=True, per_row=row) for row in (True, False))
    codes, fast, bias = reference.quantize(x, True, True).codes, dispatch.prepare(of_row), exact.bias
    named = {
        BASELINE: lambda: half(in_half),
        "32 bits": lambda: exact(x),
        "int8 alone": lambda: reference.int8_matmul(codes, of_row.codes),
        "absmax, plain torch": lambda: reference.linear(in_half, of_tensor, bias, per_row=False),
        "vector-wise, plain torch": lambda: reference.linear(in_half, of_row, bias),
        "vector-wise": lambda: dispatch.linear(in_half, fast, bias),
        "LLM.int8()": lambda: dispatch.linear(in_half, fast, bias, threshold=6.0),
        "LLM.int8(), 32 bits in": lambda: dispatch.linear(x, fast, bias, threshold=6.0),
    }
    peer = bitsandbytes_layer(exact)
    if peer:
        named |= {"bitsandbytes": lambda: peer(in_half), "bitsandbytes, 32 bits in": lambda: peer(x)}
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
    return layer.to(exact.weight.device).eval()


def milliseconds(named: dict[str, Callable], device: torch.device) -> dict[str, list[float]]:
    """Wall time of each, in turn, a list of rounds."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = {name: [] for name in named}
    for run in named.values():
        run()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times[BASELINE]) < LEAST_ROUNDS:
        for name, run in named.items():
            wait()
            start = time.perf_counter()
            run()
            wait()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def rows_of(shape: tuple[int, int, int], times: dict[str, list[float]]) -> list[dict]:
    """One row a way: medians of time and of its ratios to the baseline, spread, and operations a second."""
    tokens, features, outputs = shape
    rows = []
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        ratio = statistics.median(base / own for base, own in zip(times[BASELINE], values, strict=True))
        alone = statistics.median(base / own for base, own in zip(times["int8 alone"], values, strict=True))
        speed = 2 * tokens * features * outputs / middle / 1e9
        rows.append(
            {
                "tokens": tokens,
                "features": features,
                "outputs": outputs,
                "way": name,
                "milliseconds": round(middle, 4),
                "spread": round(high - low, 4),
                "times_16_bits": round(ratio, 3),
                "share_of_int8_alone": round(alone, 3),
                "TOP/s": round(speed, 3),
            }
        )
    return rows


@torch.inference_mode()
def main() -> None:
    """Measure, print and write one of the sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SHAPES)
    parser.add_argument("--out", type=Path, default=Path("results/kernels"))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES[arguments.set]:
        rows += rows_of(shape, milliseconds(ways(*shape, device), device))
    table = pd.DataFrame(rows)
    if arguments.set == "table5":
        places = [(shape[1], way) for way in PUBLISHED for shape in SHAPES["table5"]]
        published = dict(zip(places, itertools.chain(*PUBLISHED.values()), strict=True))
        table["published"] = [published.get(place) for place in zip(table["features"], table["way"], strict=True)]
    table["device"], table["threads"], table["torch"] = str(device), torch.get_num_threads(), torch.__version__
    arguments.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(arguments.out / f"{arguments.set}-{device.type}.csv", index=False)
    for value in ("milliseconds", "times_16_bits"):
        wide = table.pivot(index="way", columns=["tokens", "features", "outputs"], values=value)
        print(f"\n{value}\n{wide.loc[table['way'].unique()].to_string()}")
    print(f"\n{device}, path {dispatch.path(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
