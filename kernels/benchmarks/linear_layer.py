"""One linear layer with three outlier features from decoding to prefill: LLM.int8() beside 16 bits and other ways.

    python kernels/benchmarks/linear_layer.py

The ways are those of `outliers.measurements.linear_layers`. All ways of one shape are timed in turn, several rounds, on
a GPU (16 bits: float16) if there is one, otherwise on the CPU (bfloat16, for CPUs have no fast float16). Printed, and
written with the processor and versions as CSV to `--out`, are medians in milliseconds with the spread between the
quartiles, and how many times faster than 16 bits each way is (medians of the ratios of a round). The layers of the
paper's Table 5 are the experiments `pocket/table5` and `paper/table5`.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from outlier_kernels import dispatch

from outliers.experiment.provenance import environment
from outliers.measurements.linear_layers import milliseconds, rows_of, ways

# Tokens, features, outputs.
SHAPES = (
    (512, 768, 768),
    (512, 768, 3072),
    (512, 4096, 4096),
    (2048, 1024, 4096),
    (16, 4096, 4096),
    (1, 4096, 4096),
)
QUARTILES = [f"{value}_{quartile}" for value in ("milliseconds", "times_16_bits") for quartile in ("q1", "q3")]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/kernels"))
    parser.add_argument("--seconds", type=float, default=3.0, help="how long the ways of a shape are timed at least")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    rows = []
    for shape in SHAPES:
        rows += rows_of(shape, milliseconds(ways(*shape, device, dtype), device, arguments.seconds))
    table = pd.DataFrame(rows)
    table.insert(5, "spread", table["milliseconds_q3"] - table["milliseconds_q1"])
    table = table.drop(columns=QUARTILES).round(4)
    table = table.assign(**environment(device))
    arguments.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(arguments.out / f"layers-{device.type}.csv", index=False)
    for value in ("milliseconds", "times_16_bits"):
        wide = table.pivot(index="way", columns=["tokens", "features", "outputs"], values=value)
        print(f"\n{value}\n{wide.loc[table['way'].unique()].to_string()}")
    print(f"\n{device}, path {dispatch.path(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
