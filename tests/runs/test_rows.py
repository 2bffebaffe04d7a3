"""What identifies a row, which rows are an experiment's, and what stands beside every number."""

import codecs
import mmap
import shutil
import time
from functools import cache
from pathlib import Path

import outlier_kernels
import pytest
import torch

import outliers
from outliers.commands.latency import Latency
from outliers.commands.memory import Memory
from outliers.commands.sweep import Sweep
from outliers.config.experiment import Experiment
from outliers.metrics.records import Hardware
from outliers.paper.linear_layers import LinearLayers
from outliers.paper.report import experiments_of
from outliers.runs.frame import records_in
from outliers.runs.rows import Row, index, read_rows
from outliers.runs.run import rows_of, run, stored_rows
from outliers.subjects import provenance
from tests.conftest import a_row, among
from tests.kept import KEPT

MODEL = {"models": ["pocket/gpt2-0.1m"]}

# Runs: their kind, and the fields of a small one.

RUNS = {
    "sweep": (Sweep, {**MODEL, "block": 16, "blocks": 1, "schemes": ["fp32", "llm.int8"]}),
    "latency": (Latency, {**MODEL, "batches": [1], "prompt": 8, "tokens": 1, "repeats": 2}),
    "linear layers": (LinearLayers, {"dimensions": [16], "tokens": 8, "seconds": 1e-6}),
    "memory": (Memory, {**MODEL, "hardware": [Hardware(hardware="one", gigabytes=1)], "context": 8}),
}


def spec_of(name: str, **fields) -> Experiment:
    """One of them with other fields."""
    kind, usual = RUNS[name]
    return kind(**usual | fields)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """A folder of results for each of them."""
    folder = tmp_path_factory.mktemp("measured")
    for name in RUNS:
        run(spec_of(name), folder / name)
    return folder


@pytest.fixture
def copied(tmp_path, results):
    """Results of one of them, to be added to."""
    return lambda name: shutil.copytree(results / name, tmp_path / "out")


SWEPT = {"device": "auto", "dtype": "bfloat16", "bos": True, "draws": 2, "block": 17, "alpha": 5, "skip": "*.c_proj"}
ANEW = {
    "sweep": SWEPT,
    "latency": {"device": "auto", "repeats": 3, "prompt": 9, "tokens": 2, "dtype": "float32"},
    "linear layers": {"seconds": 2e-6, "dtype": "float16"},
    "memory": {"context": 9, "batch": 2},
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in ANEW.items() for field in fields])
def test_what_is_asked_otherwise_is_measured_again(copied, name, field):
    folder = copied(name)
    before = records_in(folder)
    assert run(spec_of(name), folder) == before == records_in(folder), "the same is not measured again"
    asked = spec_of(name, **{field: ANEW[name][field]})
    rows = run(asked, folder)
    assert sum(row in before for row in rows) == (field == "alpha"), "without outliers there is no threshold"
    assert records_in(folder)[: len(before)] == before, "and what was measured before stays"
    assert stored_rows(asked, folder) == rows


def torch_0(package: str, own=provenance._version) -> str | None:
    return "0" if package == "torch" else own(package)


HERE = {
    "threads": ("torch.get_num_threads", lambda: 77),
    "device_name": ("outliers.subjects.provenance.processor", lambda: "another processor"),
    "torch": ("outliers.subjects.provenance._version", torch_0),
    "code": ("outliers.subjects.provenance.code_hash", lambda: "0" * 12),
}
TIMED = ("latency", "linear layers")
ELSE = {"latency": HERE, "linear layers": ["torch"], "memory": ["code", "threads"], "sweep": ["code", "threads"]}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in ELSE.items() for field in fields])
def test_time_is_taken_again_on_another_machine_and_all_under_other_code(copied, monkeypatch, name, field):
    folder = copied(name)
    before = records_in(folder)
    monkeypatch.setattr(*HERE[field])
    rows = run(spec_of(name), folder)
    again = field == "code" or name in TIMED
    assert (rows == before) == (not again)
    assert len(records_in(folder)) == (2 if again else 1) * len(before)
    assert stored_rows(spec_of(name), folder) == rows, "the last ones"
    assert len({row.get(field) for row in records_in(folder)}) == (2 if again else 1)


def test_other_kernels_are_timed_again(copied, monkeypatch):
    folder = copied("latency")
    before = records_in(folder)
    monkeypatch.setenv("OUTLIERS_KERNELS", "reference")
    rows = run(spec_of("latency"), folder)
    assert {row["kernels"] for row in rows if row["scheme"] == "llm.int8"} == {"reference"}
    assert [row in before for row in rows] == [row["scheme"] == "fp32" for row in rows]


# Which rows are an experiment's

MEASURED = ("figure1", "table1", "table3", "table5", "table6")
SPECS = {spec.folder.name: spec for spec in experiments_of("pocket")}


@cache
def kept(name: str) -> tuple[Row, ...]:
    """The rows of a kept run."""
    return tuple(read_rows(KEPT / "pocket" / name))


def test_rows_of_a_request_are_found_where_they_are(tmp_path):
    """Behind a mark of an editor, a blank line, a failed row that a later one supersedes, and one that counts twice."""
    first, other, later = a_row("a", block=8), a_row("b", block=8), a_row("a", block=8)
    failed = Row(first.request, {}, [], {"failed": "why"})
    later.values[0]["value"], marked = 8.5, codecs.BOM_UTF8
    lines = [marked + failed.line, b"", first.line, other.line, later.line, b'{"torn']
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    assert read_rows(tmp_path) == [later, other]
    find = index(tmp_path)
    requests = [
        {**row.request, "subject": {"block": 8, "model": row.request["subject"]["model"]}} for row in (first, other)
    ]
    assert [find(request) for request in requests] == [[later], [other]]
    assert find(a_row("c").request) == []


@pytest.mark.parametrize("name", MEASURED)
def test_an_experiment_has_all_its_kept_rows_and_none_of_others(name):
    of_others = [row for other in MEASURED if other != name for row in kept(other)]
    for rows in ([*of_others, *kept(name)], [*kept(name), *of_others]):
        assert sorted(map(str, rows_of(SPECS[name], among(rows)))) == sorted(map(str, kept(name)))


OTHERWISE = {
    "models": ["other"],
    "schemes": ["llm.int8-bnb"],
    "tasks": ["other"],
    "batches": [77],
    "dimensions": [77],
    "text": "other",
    "bos": True,
    "dtype": "float16",
    "device": "cuda",
    "revision": "other",
    "limit": 7,
    **dict.fromkeys(("prompt", "tokens", "repeats", "context", "batch"), 77),
    "alpha": 77.0,
    "headroom": 0.1,
    "seconds": 7.0,
    "hardware": [Hardware(hardware="other", gigabytes=1)],
    "skip": ["lm_head"],
    "transform": "hadamard",
    "attention": ["int8"],
    "router": True,
}
ELSEWHERE = {"name", "shows", "engine", "data", "candidates"}
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
    rows = rows_of(type(asked)(**dict(asked)), among(kept(name)))
    metrics = [row.request["metric"]["name"] for row in rows if row.values]
    assert [metric for metric in metrics if metric == OF_SOME.get(field, metric)] == []


# What stands beside every number


CODE = {
    "twice.py": '"""A module."""\n\nALPHA = 6.0\n\n\ndef twice(x):\n    """Return it."""\n    return 2 * x\n',
    "configs.yaml": "layers: 2\n",
}


def hash_of(folder: Path, old: str, new: str) -> str:
    """The hash of a package of this code, in which a text is replaced."""
    (folder / "package").mkdir(parents=True)
    for name, text in CODE.items():
        (folder / "package" / name).write_text(text.replace(old, new))
    return provenance.hash_files([folder / "package"])


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("A module", "Other words", True),
        ("Return it", "Other words", True),
        ("\n\nALPHA", "\n\n\n# a comment\nALPHA", True),
        ("6.0", "6.5", False),
        (" * ", " / ", False),
        ("return", "yield", False),
        ("layers: 2", "layers: 3", False),
    ],
)
def test_a_hash_is_of_code_wherever_it_is_and_not_of_words(tmp_path, old, new, same):
    assert (hash_of(tmp_path / "here", "", "") == hash_of(tmp_path / "there", old, new)) == same


def test_what_git_does_not_know_has_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(outliers, "__file__", str(tmp_path / "outliers" / "__init__.py"))
    assert provenance._commit.__wrapped__() is None


def test_code_is_parsed_again_where_a_file_of_it_changed(tmp_path, constants):
    constants(provenance.__name__, PARSED=tmp_path / "code")
    code_hash, code, parsed = provenance.code_hash.__wrapped__, provenance.code_hash(), []
    assert code_hash() == code
    assert len(code) == 12
    constants(provenance.__name__, hash_files=lambda places: parsed.append(places) or "0" * 12)
    assert code_hash() == code
    constants(provenance.__name__, ROOMS=provenance.ROOMS[1:])
    assert code_hash() == "0" * 12
    (tmp_path / "code").write_text("torn")
    assert code_hash() == "0" * 12
    package, kernels = (Path(module.__file__).parent for module in (outliers, outlier_kernels))
    assert parsed == 2 * [[*(package / room for room in provenance.ROOMS), kernels]]
    assert all(place.exists() for place in parsed[0])


def megabytes(spent: provenance.Spent) -> float:
    return spent.fields["peak_memory_bytes"] / 1e6


def two_hundred_megabytes() -> torch.Tensor:
    """Fresh from the system: an allocator may reuse what earlier tests freed, which is resident already."""
    return torch.frombuffer(mmap.mmap(-1, 200_000_000), dtype=torch.uint8).fill_(1)


@pytest.mark.parametrize("clear", [provenance.CLEAR, Path("/nowhere/at/all")])
def test_a_measurement_has_its_own_memory(constants, clear):
    """Not that of an earlier one in the same process, also where no system resets a high-water mark."""
    constants("outliers.subjects.provenance", CLEAR=clear)
    with provenance.measuring("cpu") as outer:
        with provenance.measuring("cpu") as large:
            tensor = two_hundred_megabytes()
            time.sleep(0.1)
            del tensor
        with provenance.measuring("cpu") as small:
            pass
    assert megabytes(large) - megabytes(small) == pytest.approx(200, abs=40)
    assert megabytes(outer) == pytest.approx(megabytes(large), abs=40)
    assert outer.fields["wall_seconds"] >= large.fields["wall_seconds"] >= 0.1
    assert set(outer.fields) == {*provenance.environment("cpu"), "wall_seconds", "peak_memory_bytes"}
    assert not provenance._measuring


def test_rows_say_all_machines_that_measured_their_parts():
    part = kept("figure1")[0].run | {"wall_seconds": 1.5, "peak_memory_bytes": 7}
    other = part | {"device_name": "AMD EPYC, 4 cores", "threads": 4, "wall_seconds": 2.0, "peak_memory_bytes": 5}
    row = provenance.joined_provenance([part, other, part])
    assert row == part | {
        "device_name": f"{part['device_name']}, AMD EPYC, 4 cores",
        "threads": "2, 4",
        "wall_seconds": 5.0,
        "peak_memory_bytes": 7,
    }
    assert provenance.joined_provenance([part, part]) == part | {"wall_seconds": 3.0}
