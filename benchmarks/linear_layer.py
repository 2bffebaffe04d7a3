"""One linear layer with three outlier features, from decoding to prefill, and how near LLM.int8() comes to its limits.

    python benchmarks/linear_layer.py

On a GPU (16 bits: float16) if there is one, otherwise on the CPU (bfloat16, for CPUs have no fast float16). The ways
are `WAYS` of `outliers.metrics.linear_layer`, and each part of LLM.int8() alone: its product, or oneDNN's where
the layer is one pass, and each pass over memory, whose limit is the memory bandwidth: what a copy of a tensor larger
than the caches reads and writes in a second. A pass that finds its tensors in a cache may be beyond it. All of one
shape are timed in turn, several rounds.

Prints how many times faster than 16 bits each way is, by the smallest times, and the shares of the limits. Writes all
of it, with medians, processor, threads, versions and code, to `layers-MACHINE.csv` in `--out`, one file a type of
machine.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pandas as pd
import torch
from kept import FOLDER
from outlier_kernels import reference
from outlier_kernels.cpu import packed
from outlier_kernels.cpu.compiled import Pass
from scipy.stats import gmean
from tabulate import tabulate

from outliers.metrics.linear_layer import BASELINE, milliseconds, timing_rows, ways
from outliers.published.numbers import numbers_of
from outliers.subjects.provenance import environment

# Tokens, features, outputs: the layers of the paper's Table 5, then others from prefill to decoding.
SHAPES = (
    *((512, dimension, 4 * dimension) for dimension in (768, 1024, 1536, 2048, 2560, 4096, 5140, 12288)),
    (512, 768, 768),
    (512, 4096, 4096),
    (2048, 1024, 4096),
    (2048, 4096, 4096),
    (16, 4096, 4096),
    (1, 4096, 4096),
)
LAYER, PEER, PRODUCT = "LLM.int8()", "bitsandbytes", "product"
WAYS = (BASELINE, "int8 alone", "vector-wise", LAYER, PEER)
PRODUCTS = ((packed, "_product"), (reference, "int8_matmul"))  # functions that multiply codes, in every backend
COPIED = 1 << 29  # bytes, more than all caches hold
# The int8 units of a processor, the fastest first.
UNITS = {
    "amx": torch.cpu._is_amx_tile_supported,
    "avx512-vnni": torch.cpu._is_vnni_supported,
    "avx512": torch.cpu._is_avx512_supported,
    "avx2": torch.cpu._is_avx2_supported,
}
# Parts of a processor's name that its type lacks: trademarks, number of cores, frequency, companions.
NOT_ITS_TYPE = re.compile(r"\((?:R|TM)\)|\bCPU\b|\bProcessor\b|\b[\w-]+-Core\b|(?:,|@|\bwith\b|\bw/).*", re.IGNORECASE)


class LayerWork(NamedTuple):
    """The work of one function in a layer: its calls, and the bytes of the tensors that they are given."""

    calls: list[Callable[[], object]]
    bytes: int

    def run(self) -> None:
        for call in self.calls:
            call()


def _tensors(arguments: Iterable) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


@torch.inference_mode()
def work_of(layer: Callable[[], torch.Tensor]) -> dict[str, LayerWork]:
    """Return the parts of a layer on a CPU by name; none on a GPU, whose kernels are launched differently.

    If the layer is one pass, its only part is oneDNN's product.
    """
    layer()  # the first call compiles, which must not be timed
    parts, product, in_one_pass = {}, packed._product, packed._in_one_pass

    def kept(name: str, function: Callable, arguments: tuple, keywords: dict) -> object:
        run, before = partial(function, *arguments, **keywords), parts.get(name, LayerWork([], 0))
        moved = sum(tensor.nbytes for tensor in _tensors([*arguments, *keywords.values()]))
        parts[name] = LayerWork([*before.calls, run], before.bytes + moved)
        return run()

    with ExitStack() as stack:
        call = Pass.in_phases

        def of_pass(step: Pass, *arguments, **keywords) -> int:
            return kept(step.function.__name__.replace("_", " "), partial(call, step), arguments, keywords)

        stack.enter_context(mock.patch.object(Pass, "in_phases", of_pass))
        for module, name in PRODUCTS:
            of_product = partial(
                lambda product, *arguments: kept(PRODUCT, product, arguments, {}), getattr(module, name)
            )
            stack.enter_context(mock.patch.object(module, name, of_product))

        def of_layer(x: torch.Tensor, weight: packed.Packed, *rest: object) -> object:
            codes, scales = torch.full(x.shape, 128, dtype=torch.uint8), torch.ones(weight.shape[0])
            kept(PRODUCT, product, (codes, weight, scales), {})
            return in_one_pass(x, weight, *rest)

        stack.enter_context(mock.patch.object(packed, "_in_one_pass", of_layer))
        layer()
    parts.pop("packed layer", None)  # the whole layer
    return parts


def bandwidth(device: torch.device, seconds: float) -> float:
    """Return the bytes per second that a copy reads and writes, in the fastest of several rounds."""
    source = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(source)
    times = milliseconds({"copy": lambda: target.copy_(source)}, device, seconds)["copy"]
    return 2e3 * COPIED / min(times)


def measure(
    shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, seconds: float, copied: float
) -> list[dict]:
    """Return one row per way and per part of LLM.int8(), named `LLM.int8(): PART`; see `timing_rows`.

    Rows of our kernels also have `share_of_limit`: for a way, relative to the speed of the product alone; for a pass,
    which also has `bytes`, relative to `copied`, the memory bandwidth in bytes per second.
    """
    functions = ways(*shape, device, dtype)
    timed = {way: functions[way] for way in WAYS if way in functions}
    parts = {f"{LAYER}: {name}": part for name, part in work_of(timed[LAYER]).items()}
    timed |= {way: part.run for way, part in parts.items()}
    rows = {row["way"]: row for row in timing_rows(shape, milliseconds(timed, device, seconds))}
    product = f"{LAYER}: {PRODUCT}"
    for way in ("vector-wise", LAYER):
        if product in rows:
            limit = rows[product]["milliseconds_smallest"]
            rows[way]["share_of_limit"] = limit / rows[way]["milliseconds_smallest"]
    for way, part in parts.items():
        if way != product:
            spent = rows[way]["milliseconds_smallest"] / 1e3
            rows[way] |= {"bytes": part.bytes, "share_of_limit": part.bytes / spent / copied}
    return list(rows.values())


def machine_type(name: str, units: str | None) -> str:
    """Return a file name for machines of one type: the model of their processor, and its int8 units.

    Args:
        name: as `environment` returns it.
        units: a key of `UNITS`; None for a GPU, or if there are none.
    """
    words = re.findall(r"[a-z0-9]+", NOT_ITS_TYPE.sub(" ", name).lower())
    return "-".join([*words, *([units] if units else [])])


def table(results: pd.DataFrame, form: str = "pipe") -> str:
    """Format the table of a result file in a format of the tabulate library, followed by its caption."""
    smallest = "milliseconds_smallest" in results  # older results have medians only
    times, spent = (f"{name}_smallest" if smallest else name for name in ("times_16_bits", "milliseconds"))
    columns = [way for way in WAYS[1:] if way in set(results["way"])]
    passes = [way for way in results["way"].unique() if way.startswith(f"{LAYER}: ") and way != f"{LAYER}: {PRODUCT}"]
    limits = [LAYER, *passes] if "share_of_limit" in results and results["share_of_limit"].any() else []
    cells, published = [], numbers_of("table5", ("way", "dimension"))
    for (tokens, features, outputs), rows in results.groupby(["tokens", "features", "outputs"], sort=False):
        of = rows.set_index("way")
        paper = published.get((LAYER, str(features))) if (tokens, outputs) == (512, 4 * features) else None
        cells.append(
            [
                f"{tokens} × {features} → {outputs}",
                f"{of.loc[BASELINE, spent]:.2f}",
                *(f"{of[times].get(way, float('nan')):.2f}" for way in columns),
                "–" if paper is None else f"{paper:.2f}",
                *(f"{of['share_of_limit'].get(way, float('nan')):.0%}" for way in limits),
            ]
        )
    headers = ["tokens × features → outputs", "16 bits, ms", *columns, f"the paper's {LAYER}, A100"]
    headers += [f"{LAYER} / its product" if way == LAYER else way.partition(": ")[2] for way in limits]
    align = ["left", *(len(headers) - 1) * ["right"]]
    drawn = tabulate(cells, headers, tablefmt=form, disable_numparse=True, colalign=align)
    return f"{drawn}\n\n{_caption(results, spent)}"


def _caption(results: pd.DataFrame, spent: str) -> str:
    first, wide = results.iloc[0], results.pivot(index=["tokens", "features", "outputs"], columns="way", values=spent)
    caption = "Smallest times" if spent.endswith("smallest") else "Medians"
    if PEER in wide:
        ratios = wide[PEER] / wide[LAYER]
        caption += (
            f"; {LAYER} is {gmean(ratios):.2f} times as fast as {PEER} (geometric mean), at least {min(ratios):.2f}"
        )
    if "copied" in results:
        caption += f"; a copy moves {first['copied'] / 1e9:.1f} GB/s"
    on = f"on {first['device_name']}, " if "device_name" in results else ""
    code = f", code {first['code']}" if "code" in results else ""
    return f"{caption}. Measured {on}with {first['threads']} threads; torch {first['torch']}{code}."


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=FOLDER)
    options.add_argument("--seconds", type=float, default=6.0, help="how long the ways of a shape are timed at least")
    return options


def main() -> None:
    arguments = parser().parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    about, copied, rows = environment(device), bandwidth(device, 1.0), []
    for shape in SHAPES:
        print(*shape, flush=True)
        rows += measure(shape, device, dtype, arguments.seconds, copied)
    results = pd.DataFrame(rows).assign(copied=copied).round(4).assign(**about)
    units = next((name for name, there in UNITS.items() if device.type == "cpu" and there()), None)
    path = arguments.out / f"layers-{machine_type(about['device_name'], units)}.csv"
    arguments.out.mkdir(parents=True, exist_ok=True)
    results.to_csv(path, index=False)
    print(f"\n{table(results, 'simple')}\n\n{path}")


if __name__ == "__main__":
    main()
