"""What identifies a row, which rows are an experiment's, and what stands beside every number."""

import json
import shutil
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import outlier_kernels
import pytest
import torch
from outlier_kernels.formats import Quantizer

import outliers
from outliers.experiment import provenance
from outliers.experiment.rows import RowFile, finished, identifying, read_rows, rows_of
from outliers.quantization.schemes import Scheme
from outliers.report.report import experiments
from outliers.runs.run import run, sweep
from outliers.specification.kinds import (
    Ablation,
    Damage,
    Emergence,
    Experiment,
    Hardware,
    Latency,
    LinearLayers,
    Memory,
    OneModel,
)
from tests.conftest import trace_model

KEPT = Path(__file__).parent.parent / "results" / "kept"
MODEL = "pocket/gpt2-0.1m"
ONE = {"models": [MODEL], "block": 16, "blocks": 1}


@cache
def kept(run: str) -> list[dict]:
    """The rows of a kept run."""
    return finished(read_rows(KEPT / run))


def a_row(run: str, **fields) -> dict:
    """One of them that has some fields, as this code would write it."""
    found = next(row for row in kept(run) if all(row.get(field) == value for field, value in fields.items()))
    return found | {"code": "0123456789ab", "revision": "f" * 40}


# What identifies a row

ROWS = {
    "sweep": a_row("pocket/table1", scheme="llm.int8"),
    "zeroshot": a_row("pocket/figure1", scheme="llm.int8"),
    "memory": a_row("pocket/table3", metric="fits"),
    "emergence": a_row("training", metric="perplexity"),
    "trace": a_row("smollm2-135m/trace", metric="largest.value"),
    "ablate": a_row("ablation/gpt2-1.7m", subject="control"),
    "damage": a_row("damage/smollm2-135m", metric="damage.error"),
    "linear_layers": a_row("pocket/table5", dimension=1024) | {"seconds": 3.0},
    "latency": a_row("pocket/table6", scheme="llm.int8"),
}
# All other fields identify.
RESULTS = {"value", "unit", "standard_deviation", "standard_error", "q1", "q3", "examples"}
RESULTS |= {"wall_seconds", "peak_memory_bytes"}
FOLLOWING = {"parameters", "weights_bytes", "outputs", "context_used"}
MACHINE = {"device_name", "threads", "python", "torch", "triton", "bitsandbytes"}
FREE = dict.fromkeys(ROWS, RESULTS | FOLLOWING | {"version", "commit", "experiment"} | MACHINE)
FREE |= {
    kind: FREE[kind] - {"experiment"} for kind in ("emergence", "trace", "ablate", "damage")
}  # nobody else names them
FREE |= {kind: FREE[kind] - MACHINE for kind in ("latency", "linear_layers")}  # the machine decides
KINDS_AND_FIELDS = [(kind, field) for kind, row in ROWS.items() for field in [*row, "skip", "scheme_parts"]]


def other(value):
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case list():
            return [*value, *value]
        case _:
            return f"{value}-2"


@pytest.mark.parametrize(("kind", "field"), KINDS_AND_FIELDS)
def test_every_field_identifies_but_a_few(tmp_path, kind, field):
    """Also one that no row has today, such as which layers a scheme skips."""
    row = ROWS[kind]
    changed = row | {field: other(row.get(field))}
    same = field in FREE[kind]
    with RowFile(tmp_path) as row_file:
        row_file.add(row)
        assert row_file.find_all(row) == [row]
        assert row_file.find_all(changed) == ([row] if same else [])
        row_file.add(changed)
    assert read_rows(tmp_path) == ([changed] if same else [row, changed])
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == (1 if same else 2), "in the place of the old one"


@pytest.mark.parametrize(("kind", "field"), KINDS_AND_FIELDS)
def test_a_cell_finds_no_rows_that_say_more_than_it_does(tmp_path, kind, field):
    """But which of its rows they are. There may be rows of what the cell does not say, such as its weights."""
    row = ROWS[kind] | {"skip": ["lm_head"], "scheme_parts": "int8"}
    cell = {name: value for name, value in row.items() if name != field}
    which = {"metric", "subject", "method", "features", "draw", "feature", "layer", "role", "position", "token", "way"}
    which |= {"projection", "bits", "hardware", "owner", "gpus", "gigabytes", "headroom"}
    with RowFile(tmp_path) as row_file:
        row_file.add(row)
        assert row_file.find_all(cell) == ([row] if field in which | FREE[kind] else [])
        assert row_file.may_have(cell)
        if field != "experiment":
            assert row_file.may_have(row | {field: other(row.get(field))}) == (field in FREE[kind])


def test_null_says_nothing():
    assert identifying({"limit": None, "block": 8}) == {"block": 8}


# Runs


def ablated(out: Path, **fields) -> list[dict]:
    return run(Ablation(model=MODEL, features=[3], **{"block": 16, "blocks": 1} | fields), out)


def damaged(out: Path, **fields) -> list[dict]:
    asked = {"schemes": ["llm.int8"], "by": ["error", "role"], "block": 16, "blocks": 1}
    return run(Damage(model=MODEL, **asked | fields), out)


def swept(out: Path, **fields) -> list[dict]:
    return sweep(Experiment(models=[MODEL], schemes=["fp32", "llm.int8"], **{"block": 16, "blocks": 1} | fields), out)


def traced(out: Path, **fields) -> list[dict]:
    return trace_model(OneModel(model=MODEL, **{"block": 16, "blocks": 1} | fields), out)[1]


def followed(out: Path, **fields) -> list[dict]:
    return run(Emergence(models=[MODEL], **{"block": 16, "blocks": 1} | fields), out)


def timed(out: Path, **fields) -> list[dict]:
    spec = Latency(models=[MODEL], batches=[1], **{"prompt": 8, "tokens": 1, "repeats": 2} | fields)
    return run(spec, out)


def timed_layers(out: Path, **fields) -> list[dict]:
    return run(LinearLayers(dimensions=[16], **{"tokens": 8, "seconds": 1e-6} | fields), out)


def footprints(out: Path, **fields) -> list[dict]:
    hardware = [Hardware(hardware="one", gigabytes=1)]
    return run(Memory(models=[MODEL], **{"hardware": hardware, "context": 8} | fields), out)


RUNS = {
    "ablation": ablated,
    "damage": damaged,
    "sweep": swept,
    "trace": traced,
    "emergence": followed,
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
        *(("ablation", fields) for fields in ({"seed": 1}, {"where": ["ffn_in"]})),
        *(("damage", fields) for fields in ({"device": "auto"}, {"dtype": "bfloat16"}, {"block": 17})),
        *(("sweep", fields) for fields in ({"device": "auto"}, {"dtype": "bfloat16"}, {"bos": True}, {"draws": 2})),
        *(("trace", fields) for fields in ({"device": "auto"}, {"alpha": 5}, {"block": 17})),
        *(("emergence", fields) for fields in ({"device": "auto"}, {"alpha": 5})),
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
    "device_name": ("outliers.experiment.provenance._processor", lambda: "another processor"),
    "torch": ("outliers.experiment.provenance._version", torch_0),
    "code": ("outliers.experiment.provenance.code_hash", lambda: "0" * 12),
}
OF_TIMINGS = [(run, field) for run in ("latency", "linear layers") for field in HERE]


@pytest.mark.parametrize(
    ("run", "field"), [*OF_TIMINGS, *((run, field) for run in ("sweep", "trace", "memory") for field in HERE)]
)
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


@pytest.mark.parametrize("run", ["trace", "sweep", "ablation", "emergence"])
def test_rows_without_a_hash_of_the_code_are_shown_and_not_used_again(tmp_path, measured, run):
    folder = shutil.copytree(measured / run, tmp_path / "out")
    old = [{field: value for field, value in row.items() if field != "code"} for row in read_rows(folder)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    specs = {"sweep": Experiment(**ONE, schemes=["fp32", "llm.int8"]), "emergence": Emergence(**ONE)}
    if run in specs:
        spec = specs[run]
        assert rows_of(spec, read_rows(folder)) == old
    rows = RUNS[run](folder)
    assert not any(row in old for row in rows)
    assert all(row["code"] == provenance.code_hash() for row in rows)
    assert read_rows(folder) == [*old, *rows]
    if run in specs:
        assert rows_of(spec, read_rows(folder)) == rows, "of both the last one"


@pytest.mark.parametrize(("first", "then"), [("emergence", "trace"), ("trace", "emergence"), ("sweep", "trace")])
def test_a_run_takes_no_rows_of_another_command(tmp_path, measured, first, then):
    folder = shutil.copytree(measured / first, tmp_path / "out")
    for file in folder.glob("trace.*"):
        file.unlink()
    before = read_rows(folder)
    rows = RUNS[then](folder)
    assert not any(row in before for row in rows)
    want = [(row["metric"], row["value"]) for row in read_rows(measured / then)]
    assert [(row["metric"], row["value"]) for row in rows] == want
    assert read_rows(folder) == [*before, *rows]


# Which rows are an experiment's

FOLDERS = {"ablation": "ablation/gpt2-1.7m", "trace": "smollm2-135m/trace"}
SPECS = {spec.folder.name: spec for spec in experiments("pocket")}


@pytest.mark.parametrize("name", ["table1", "figure1", "table3", "table4", "table5", "table6"])
def test_an_experiment_has_all_its_kept_rows_and_none_of_others(name):
    rows = kept(f"pocket/{name}")
    others = [*(f"pocket/{other}" for other in SPECS if other != name), *FOLDERS.values(), "training"]
    of_others = [row for run in others for row in kept(run)]
    assert rows_of(SPECS[name], [*of_others, *rows]) == rows
    assert rows_of(SPECS[name], [*rows, *of_others]) == rows


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
ABLATED = {"model": "pocket/gpt2-1.7m", "text": "build/pocket/held_out.jsonl", "block": 256, "blocks": 64}
ASKED = {
    "table1": SPECS["table1"].model_copy(update={"schemes": ["llm.int8"]}),
    "figure1": SPECS["figure1"].model_copy(update={"schemes": ["llm.int8"]}),
    "table6": SPECS["table6"].model_copy(update={"schemes": ["llm.int8"]}),
    **{name: SPECS[name] for name in ("table3", "table4", "table5")},
    "ablation": Ablation(**ABLATED, methods=["shuffle"]),
    "trace": OneModel(model="smollm2-135m", text="../shared/text/c4_en_1000.jsonl", block=512, blocks=8),
}
OF_SOME = {"headroom": "fits", "hardware": "fits"}  # metrics of the only rows that say it


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (name, field)
        for name, spec in ASKED.items()
        for field in type(spec).model_fields
        if field not in ELSEWHERE and (name, field) != ("ablation", "skip")  # of kept ones, where nothing is quantized
    ],
)
def test_rows_of_what_was_asked_otherwise_are_not_shown(name, field):
    spec = ASKED[name]
    rows = kept(FOLDERS.get(name, f"pocket/{name}"))
    if field == "seconds":
        rows = [row | {"seconds": spec.seconds} for row in rows]
    if name == "ablation":
        rows = [row for row in rows if row["subject"] != "none"]  # to which no method was applied
    assert rows_of(spec, rows)
    value = "other" if field == "model" else OTHERWISE[field]
    asked = spec.model_copy(update={field: value})
    found = rows_of(type(spec)(**dict(asked)), rows)
    assert [row for row in found if row["metric"] == OF_SOME.get(field, row["metric"])] == []


def test_a_revision_is_shown_alone(tmp_path):
    """Of a checkpoint that was asked for, of none, and of several."""
    rows = [ROWS["sweep"] | {"checkpoint": step, "value": value} for step, value in (("step-1", 1.5), ("step-2", 2.5))]
    plain = {name: value for name, value in ROWS["sweep"].items() if name != "checkpoint"}
    fields = {"models": [plain["model"]], "block": 256, "blocks": 16, "draws": 3}
    for number, step in enumerate(["step-1", "step-2", None]):
        spec = Experiment(**fields, revision=step)
        assert rows_of(spec, [*rows, plain]) == [[*rows, plain][number]]
    family = kept("training")
    steps = list(dict.fromkeys(row["checkpoint"] for row in family))
    fields = {"models": [family[0]["model"]], "text": family[0]["text"], "blocks": 64}
    assert rows_of(Emergence(**fields, revisions=steps), family) == family
    assert {row["checkpoint"] for row in rows_of(Emergence(**fields, revisions=steps[2:4]), family)} == set(steps[2:4])
    assert rows_of(Emergence(**fields), family) == []


@pytest.mark.parametrize(
    "field", ["revision", "weights_hash", "tokens_hash", "code", "torch", "kernels", "version", "experiment"]
)
def test_of_a_number_that_was_measured_twice_the_last_is_shown(field):
    """As after a branch of the hub moved, or kernels were fixed; two rows in one cell of a table would be an error."""
    rows = [ROWS["sweep"] | {"value": 1.5}, ROWS["sweep"] | {field: "later", "value": 2.5}]
    spec = Experiment(models=[rows[0]["model"]], block=256, blocks=16, draws=3)
    assert rows_of(spec, rows) == rows[1:]


MINE = Scheme("mine", Quantizer("int8", "row"), Quantizer("int8", "column"), 3.0)
SCHEMES = [
    ("fp32", []),
    ("llm.int8", []),
    (MINE, []),
    (MINE, ["*.c_proj"]),
    (replace(MINE, outlier_threshold=4.0), []),
    (replace(MINE, outlier_threshold=None), []),
    (replace(MINE, weights=None), []),
]


@pytest.mark.parametrize("kind", [Experiment, Ablation])
def test_rows_under_a_scheme_are_those_of_all_that_was_asked_of_it(tmp_path, kind):
    """Its parts, its threshold and what it skips, not its name alone."""
    small = {"block": 16, "blocks": 1}
    if kind is Experiment:
        specs = [kind(models=[MODEL], schemes=[scheme], skip=skip, **small) for scheme, skip in SCHEMES]
    else:
        specs = [kind(model=MODEL, features=[3], scheme=scheme, skip=skip, **small) for scheme, skip in SCHEMES[2:5]]
    found = [run(spec, tmp_path) for spec in specs]
    rows = read_rows(tmp_path)
    assert rows == [row for of_one in found for row in of_one], "none is taken for another"
    assert [rows_of(spec, rows) for spec in specs] == found


def test_rows_stand_in_the_order_of_what_is_asked_and_of_its_kind():
    """Also where those of another kind of experiment say nothing that this one does not."""
    one, other = ROWS["sweep"], ROWS["sweep"] | {"model": "other"}
    spec = Experiment(models=["other", one["model"]], block=256, blocks=16, draws=3)
    assert rows_of(spec, [one, other]) == [other, one]
    assert rows_of(spec, [one, other | {"experiment": "zeroshot"}]) == [one]


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


def test_rows_say_all_machines_that_measured_their_parts(tmp_path):
    part = ROWS["sweep"] | {"wall_seconds": 1.5, "peak_memory_bytes": 7}
    other = part | {"device_name": "AMD EPYC, 4 cores", "threads": 4, "wall_seconds": 2.0, "peak_memory_bytes": 5}
    row = provenance.joined([part, other, part])
    assert row == part | {
        "device_name": f"{part['device_name']}, AMD EPYC, 4 cores",
        "threads": "2, 4",
        "wall_seconds": 5.0,
        "peak_memory_bytes": 7,
    }
    assert provenance.joined([part, part]) == part | {"wall_seconds": 3.0}
    with RowFile(tmp_path) as row_file:
        row_file.add(row)
        assert row_file.find_all(part) == [row], "which machines they were does not matter where no time is measured"
    assert read_rows(tmp_path) == [row]
