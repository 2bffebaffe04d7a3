"""The benchmarks of kernels and of commands: that the right things are timed and written."""

import sys

import pandas as pd
import pytest
import torch

from outliers.metrics.linear_layer import ways
from outliers.published.numbers import numbers_of
from tests.conftest import ROOT, read
from tests.small_models import needs_int8_units

sys.path.insert(0, str(ROOT / "benchmarks"))

import commands
import linear_layer

from tests.typed import type_words

CPU = torch.device("cpu")
PASSES = ["feature extremes", "absmax codes", "finish packed"]


@pytest.mark.parametrize(
    ("name", "units", "expected"),
    [
        ("Intel(R) Xeon(R) Processor, 2 cores", "amx", "intel-xeon-amx"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, 8 cores", "amx", "intel-xeon-platinum-8481c-amx"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics, 16 cores", "avx512-vnni", "amd-ryzen-7-7840u-avx512-vnni"),
        ("AMD Ryzen 5 2400G with Radeon Vega Graphics, 8 cores", "avx2", "amd-ryzen-5-2400g-avx2"),
        ("AMD Ryzen 9 5950X Sixteen-Core Processor, 4 cores", "avx2", "amd-ryzen-9-5950x-avx2"),
        ("aarch64, 4 cores", None, "aarch64"),
        ("NVIDIA H100 80GB HBM3", None, "nvidia-h100-80gb-hbm3"),
    ],
)
def test_types_of_machines(name, units, expected):
    assert linear_layer.machine_type(name, units) == expected


@pytest.fixture
def unknown_layout(lacking):
    """Weights whose layout is not known to the passes, so that a layer has several parts."""
    lacking("outlier_kernels.cpu.packed._lies_in_blocks")


@needs_int8_units
def test_a_layer_in_one_pass_has_its_product_beside_it(lacking):
    lacking("torch.cpu._is_amx_tile_supported")  # with such units 33 tokens take four calls
    layer = ways(33, 64, 48, CPU, torch.bfloat16)["LLM.int8()"]
    parts = linear_layer.work_of(layer)
    assert list(parts) == ["product"]
    with torch.inference_mode():
        parts["product"].run()


@needs_int8_units
def test_parts_of_a_layer_are_what_it_calls(unknown_layout):
    """A layer of 33 tokens, whose product is one call: what each part is given, and that it runs again alone."""
    tokens, features, outputs = 33, 64, 48
    layer = ways(tokens, features, outputs, CPU, torch.bfloat16)["LLM.int8()"]
    parts, before = linear_layer.work_of(layer), layer()
    assert sorted(parts) == sorted([*PASSES, "product"])
    assert all(len(part.calls) == 1 for part in parts.values())
    entries, inputs = tokens * outputs, tokens * features
    assert parts["feature extremes"].bytes == 2 * inputs + 2 * 4 * features
    assert parts["absmax codes"].bytes >= (2 + 1) * inputs
    assert parts["finish packed"].bytes >= (4 + 2) * entries
    for part in parts.values():
        with torch.inference_mode():
            part.run()
    assert torch.equal(layer(), before)


@needs_int8_units
def test_every_chunk_of_a_product_is_timed(unknown_layout):
    parts = linear_layer.work_of(ways(300, 4096, 4096, CPU, torch.bfloat16)["LLM.int8()"])
    assert len(parts["product"].calls) == len(parts["finish packed"].calls) > 1
    assert parts["finish packed"].bytes >= (4 + 2) * 300 * 4096


@pytest.fixture
def timed(monkeypatch) -> dict[str, list[float]]:
    """Milliseconds of each way, round by round."""
    times = {
        "16 bits": [9.0, 6.0],
        "int8 alone": [2.0, 3.0],
        "vector-wise": [5.0, 4.0],
        "LLM.int8()": [5.0, 6.0],
        "bitsandbytes": [10.0, 20.0],
        "LLM.int8(): product": [2.5, 3.0],
        "LLM.int8(): feature extremes": [1.0, 0.5],
        "LLM.int8(): absmax codes": [1.0, 1.0],
        "LLM.int8(): finish packed": [1.0, 1.0],
        "copy": [1.0, 0.5],
    }
    monkeypatch.setattr(linear_layer, "milliseconds", lambda named, *_: {way: times[way] for way in named})
    return times


@needs_int8_units
def test_shares_of_limits(timed, unknown_layout):
    rows = {row["way"]: row for row in linear_layer.measure((8, 16, 32), CPU, torch.bfloat16, 1.0, 1e6)}
    assert rows["LLM.int8()"]["milliseconds_smallest"] == 5
    assert rows["LLM.int8()"]["times_16_bits_smallest"] == 6 / 5
    assert rows["LLM.int8()"]["share_of_limit"] == 2.5 / 5
    assert rows["vector-wise"]["share_of_limit"] == 2.5 / 4
    extremes = rows["LLM.int8(): feature extremes"]
    assert extremes["share_of_limit"] == extremes["bytes"] / 0.5e-3 / 1e6
    assert all("share_of_limit" not in rows[way] for way in ("16 bits", "int8 alone", "LLM.int8(): product"))


def test_bandwidth_is_that_of_what_is_read_and_written(timed, constants):
    constants("linear_layer", COPIED=4000)
    assert linear_layer.bandwidth(CPU, 1.0) == 8000 / 0.5e-3


def test_a_result_file(timed, monkeypatch, constants, lacking, tmp_path, capsys):
    """One a type of machine; every row says what it was measured on."""
    work = {"product": linear_layer.LayerWork([], 0)}
    constants("linear_layer", COPIED=4000, SHAPES=((8, 16, 32), (512, 768, 3072)), work_of=lambda _layer: work)
    lacking("torch.cuda.is_available")
    type_words(monkeypatch, "linear_layer.py", "--out", tmp_path / "out")
    linear_layer.main()
    (written,) = (tmp_path / "out").iterdir()
    name = written.stem.removeprefix("layers-")
    found = pd.read_csv(written)
    assert written.name == f"layers-{name}.csv"
    assert name.split("-")[0] in found["device_name"][0].lower()
    assert found[["device_name", "threads", "torch", "code"]].notna().all(axis=None)
    printed = capsys.readouterr().out
    assert linear_layer.table(found, "simple") in printed
    *_, first, second = linear_layer.table(found).partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (first, second)]
    peer = ["0.60"] if "bitsandbytes" in set(found["way"]) else []
    assert cells[0] == ["8 × 16 → 32", "6.00", "3.00", "1.50", "1.20", *peer, "–", "50%"]
    assert cells[1][-2:] == ["0.14", "50%"], "what the paper found at this dimension"
    if peer:
        assert "2.00 times as fast as bitsandbytes (geometric mean), at least 2.00" in printed


def test_shapes_are_those_of_the_papers_table_and_others():
    assert len(set(linear_layer.SHAPES)) == len(linear_layer.SHAPES)
    dimensions = {features for tokens, features, outputs in linear_layer.SHAPES if outputs == 4 * features}
    published = {int(dimension) for _, dimension in numbers_of("table5", ("way", "dimension"))}
    assert published == dimensions


# Commands


@pytest.mark.parametrize(
    ("drawn", "least", "most"),
    [
        ("12%|#  | 0:12, about 50 s to 2 min left", 50, 120),
        ("about 3 to 8 min left\r 40%|##", 180, 480),
        ("about 9 min left, then about 1.5 h left", 5400, 5400),
    ],
)
def test_the_last_forecast_counts(drawn, least, most):
    assert commands.forecast_in(drawn, 10.0) == (10.0, 10.0 + least, 10.0 + most)
    assert commands.forecast_in("loading: 0:02", 2.0) is None


def test_readme_types_the_commands_that_are_timed():
    for name, arguments in list(commands.COMMANDS.items())[1:]:
        assert f"python -m outliers.{' '.join(arguments)}" in read("README.md"), name
    assert " ".join(commands.COMMANDS["make sweep"][1:]) in read("Makefile")
