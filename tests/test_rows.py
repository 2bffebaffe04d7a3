"""What identifies a row, which rows are an experiment's, and what stands beside every number."""

import shutil
import threading
import time
from functools import cache
from pathlib import Path

import outlier_kernels
import pytest
import torch

import outliers
from outliers.report.report import experiments
from outliers.runs.frame import records_in as read_rows
from outliers.runs.rows import Row, read
from outliers.runs.run import rows_of, run
from outliers.specification.kinds import (
    Hardware,
    Latency,
    LinearLayers,
    Memory,
)
from outliers.subjects import provenance

KEPT = Path(__file__).parent.parent / "results" / "kept"
MODEL = "pocket/gpt2-0.1m"
ONE = {"models": [MODEL], "block": 16, "blocks": 1}


# Runs


def timed(out: Path, **fields) -> list[dict]:
    spec = Latency(models=[MODEL], batches=[1], **{"prompt": 8, "tokens": 1, "repeats": 2} | fields)
    return run(spec, out)


def timed_layers(out: Path, **fields) -> list[dict]:
    return run(LinearLayers(dimensions=[16], **{"tokens": 8, "seconds": 1e-6} | fields), out)


def footprints(out: Path, **fields) -> list[dict]:
    hardware = [Hardware(hardware="one", gigabytes=1)]
    return run(Memory(models=[MODEL], **{"hardware": hardware, "context": 8} | fields), out)


RUNS = {
    "latency": timed,
    "linear layers": timed_layers,
    "memory": footprints,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder of results for each of them."""
    folder = tmp_path_factory.mktemp("measured")
    for name, one in RUNS.items():
        one(folder / name)
    return folder


@pytest.mark.parametrize(
    ("run", "fields"),
    [
        *(("latency", fields) for fields in ({"device": "auto"}, {"repeats": 3})),
        *(("linear layers", fields) for fields in ({"seconds": 2e-6}, {"dtype": "float16"})),
        *(("memory", fields) for fields in ({"context": 9}, {"batch": 2})),
    ],
)
def test_what_is_asked_otherwise_is_measured_again(tmp_path, measured, run, fields):
    folder = shutil.copytree(measured / run, tmp_path / "out")
    before = read_rows(folder)
    RUNS[run](folder)
    assert read_rows(folder) == before, "the same is not measured again"
    rows = RUNS[run](folder, **fields)
    assert not any(row in before for row in rows)
    assert read_rows(folder)[: len(before)] == before, "and what was measured before stays"


def torch_0(package: str, own=provenance._version) -> str | None:
    return "0" if package == "torch" else own(package)


HERE = {
    "threads": ("torch.get_num_threads", lambda: 77),
    "device_name": ("outliers.subjects.provenance._processor", lambda: "another processor"),
    "torch": ("outliers.subjects.provenance._version", torch_0),
    "code": ("outliers.subjects.provenance.code_hash", lambda: "0" * 12),
}
OF_TIMINGS = [(run, field) for run in ("latency", "linear layers") for field in HERE]


@pytest.mark.parametrize(("run", "field"), [*OF_TIMINGS, *(("memory", field) for field in HERE)])
def test_time_is_taken_again_on_another_machine_and_all_under_other_code(tmp_path, measured, monkeypatch, run, field):
    folder = shutil.copytree(measured / run, tmp_path / "out")
    before = read_rows(folder)
    monkeypatch.setattr(*HERE[field])
    rows = RUNS[run](folder)
    again = field == "code" or (run, field) in OF_TIMINGS
    assert (rows == before) == (not again)
    assert len(read_rows(folder)) == (2 if again else 1) * len(before)
    if again:
        assert len({row[field] for row in read_rows(folder)}) == 2


def test_other_kernels_are_timed_again(tmp_path, measured, monkeypatch):
    folder = shutil.copytree(measured / "latency", tmp_path / "out")
    before = read_rows(folder)
    monkeypatch.setenv("OUTLIERS_KERNELS", "reference")
    rows = timed(folder)
    assert {row["kernels"] for row in rows if row["scheme"] == "llm.int8"} == {"reference"}
    assert [row in before for row in rows] == [row["scheme"] == "fp32" for row in rows]


# Which rows are an experiment's

MEASURED = ("figure1", "table3", "table5", "table6")
SPECS = {spec.folder.name: spec for spec in experiments("pocket")}


@cache
def kept(name: str) -> tuple[Row, ...]:
    """The rows of a kept run."""
    return tuple(read(KEPT / "pocket" / name))


@pytest.mark.parametrize("name", MEASURED)
def test_an_experiment_has_all_its_kept_rows_and_none_of_others(name):
    of_others = [row for other in MEASURED if other != name for row in kept(other)]
    assert rows_of(SPECS[name], [*of_others, *kept(name)]) == list(kept(name))
    assert rows_of(SPECS[name], [*kept(name), *of_others]) == list(kept(name))


OTHERWISE = {
    "models": ["other"],
    "revisions": ["other"],
    "schemes": ["llm.int8-bnb"],
    "tasks": ["other"],
    "batches": [77],
    "dimensions": [77],
    "methods": ["other"],
    "text": "other",
    "bos": True,
    "dtype": "float16",
    "device": "cuda",
    "revision": "other",
    "limit": 7,
    **dict.fromkeys(("block", "blocks", "draws", "prompt", "tokens", "repeats", "context", "batch"), 77),
    "alpha": 77.0,
    "headroom": 0.1,
    "seconds": 7.0,
    "hardware": [Hardware(hardware="other", gigabytes=1)],
    "where": ["ffn_in"],
    "seed": 77,
    "scheme": "absmax",
    "skip": ["lm_head"],
    "transform": "hadamard",
    "attention": ["int8"],
}
ELSEWHERE = {"name", "shows", "stream", "memory", "engine", "data", "features", "controls", "candidates"}
ELSEWHERE |= {"calibration", "calibration_blocks", "by_token"}
ASKED = {
    "figure1": SPECS["figure1"].model_copy(update={"schemes": ["llm.int8"]}),
    "table6": SPECS["table6"].model_copy(update={"schemes": ["llm.int8"]}),
    **{name: SPECS[name] for name in ("table3", "table5")},
}
OF_SOME = {"headroom": "fits", "hardware": "fits"}  # metrics of the only rows that say it


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field) for name, spec in ASKED.items() for field in type(spec).model_fields if field not in ELSEWHERE],
)
def test_rows_of_what_was_asked_otherwise_are_not_shown(name, field):
    others = {"candidates": None} if (name, field) == ("table3", "models") else {}
    asked = ASKED[name].model_copy(update={field: OTHERWISE[field], **others})
    rows = rows_of(type(asked)(**dict(asked)), kept(name))
    assert [row for row in rows if row.asked["metric"]["name"] == OF_SOME.get(field, row.asked["metric"]["name"])] == []


# What stands beside every number


def sources(tmp_path: Path, *changes: tuple[str, str, str]) -> str:
    """The hash of a copy of what it is of, in which texts of files are replaced."""
    places = []
    for package in (outliers, outlier_kernels):
        folder = Path(package.__file__).parent
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
        copy = shutil.copytree(folder, tmp_path / folder.name, ignore=ignored)
        places += [copy / room for room in provenance.ROOMS] if package is outliers else [copy]
    for name, old, new in changes:
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new, 1))
    return provenance.hash_of(places)


def test_words_are_no_code(tmp_path):
    name = "outliers/metrics/perplexity/measure.py"
    text = (Path(outliers.__file__).parent.parent / name).read_text()
    line = next(line for line in text.splitlines() if line.startswith("import "))
    changes = [(name, '"""', '"""Other words. '), (name, line, f"# a comment\n\n\n{line}  # and one more")]
    assert sources(tmp_path, *changes) == provenance.code_hash()
    assert len(provenance.code_hash()) == 12


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("outliers/criterion.py", "ALPHA = 6.0", "ALPHA = 6.5"),
        ("outliers/metrics/perplexity/measure.py", "math.exp", "math.expm1"),
        ("outliers/models/configs.yaml", "layers: ", "layers: 1"),
        ("outlier_kernels/reference.py", ".amin(", ".amax("),
        ("outliers/tracing/sketch.py", "def ", "async def "),
        ("outliers/quantization/gradient.py", "return", "yield"),
        ("outliers/text/blocks.py", "def ", "def _"),
        ("outliers/variants/plant.py", " * ", " / "),
    ],
)
def test_other_code_has_another_hash(tmp_path, name, old, new):
    assert sources(tmp_path, (name, old, new)) != provenance.code_hash()


def test_all_places_of_code_are_there():
    package = Path(outliers.__file__).parent
    assert all((package / room).exists() for room in provenance.ROOMS)


def megabytes(spent: provenance.Spent) -> float:
    return spent.fields["peak_memory_bytes"] / 1e6


@pytest.mark.parametrize("clear", [provenance.CLEAR, Path("/nowhere/at/all")])
def test_a_measurement_has_its_own_memory(monkeypatch, clear):
    """Not that of an earlier one in the same process, also where no system resets a high-water mark."""
    monkeypatch.setattr(provenance, "CLEAR", clear)
    with provenance.measuring("cpu") as outer:
        with provenance.measuring("cpu") as large:
            tensor = torch.ones(50_000_000)
            time.sleep(0.1)
            del tensor
        with provenance.measuring("cpu") as small:
            pass
    assert megabytes(large) - megabytes(small) == pytest.approx(200, abs=40)
    assert megabytes(outer) == pytest.approx(megabytes(large), abs=40)
    assert outer.fields["wall_seconds"] >= large.fields["wall_seconds"] >= 0.1
    assert set(outer.fields) == {*provenance.environment("cpu"), "wall_seconds", "peak_memory_bytes"} - {"device"}
    assert not provenance._measuring


def test_measurements_of_several_threads(monkeypatch):
    """One that begins while another one lasts takes nothing from it."""
    found, allocated = {}, threading.Event()

    def long():
        with provenance.measuring("cpu") as spent:
            tensor = torch.ones(50_000_000)
            del tensor
            allocated.set()
            time.sleep(0.2)
        found["long"] = spent

    thread = threading.Thread(target=long)
    thread.start()
    allocated.wait()
    with provenance.measuring("cpu") as spent:
        time.sleep(0.05)
    thread.join()
    assert megabytes(found["long"]) - megabytes(spent) == pytest.approx(200, abs=40)


def test_a_measurement_that_fails_is_over():
    with pytest.raises(ValueError, match="broken"), provenance.measuring("cpu") as spent:
        raise ValueError("broken")
    assert not provenance._measuring
    assert not spent.fields


def test_rows_say_all_machines_that_measured_their_parts():
    part = kept("figure1")[0].made | {"wall_seconds": 1.5, "peak_memory_bytes": 7}
    other = part | {"device_name": "AMD EPYC, 4 cores", "threads": 4, "wall_seconds": 2.0, "peak_memory_bytes": 5}
    row = provenance.joined([part, other, part])
    assert row == part | {
        "device_name": f"{part['device_name']}, AMD EPYC, 4 cores",
        "threads": "2, 4",
        "wall_seconds": 5.0,
        "peak_memory_bytes": 7,
    }
    assert provenance.joined([part, part]) == part | {"wall_seconds": 3.0}
