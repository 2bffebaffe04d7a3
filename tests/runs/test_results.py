"""The folder of results: files of several runs at once, rows and traces that were changed, models of the same name."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outliers import Sweep, Trace, UserError, run, sweep
from outliers.commands.ablate import Ablation
from outliers.commands.trace import Tracing
from outliers.files import new_part
from outliers.models.names import POCKET
from outliers.runs.frame import records_in
from outliers.runs.rows import Rows, read_rows
from outliers.runs.run import rows_of, stored_rows
from tests.conftest import a_row, among, lasting, names
from tests.small_models import names_of, trace_model
from tests.typed import call, refused

MODEL = "pocket/gpt2-0.1m"
SMALL = {"block": 32, "blocks": 2}
SWEPT = Sweep(name="small", models=[MODEL], schemes=["fp32", "absmax", "llm.int8"], **SMALL)
TRACED = Tracing(model=MODEL, alpha=3, **SMALL)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A folder with the rows of a sweep."""
    folder = tmp_path_factory.mktemp("swept")
    sweep(SWEPT, folder)
    return folder


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    """A folder with a trace and its rows."""
    folder = tmp_path_factory.mktemp("traced")
    trace_model(TRACED, folder)
    return folder


@pytest.fixture
def folder(request, swept, traced, tmp_path) -> Path:
    """A copy of the one that a test asks for by a parameter, by default of the sweep's."""
    return shutil.copytree(traced if getattr(request, "param", "swept") == "traced" else swept, tmp_path / "out")


def lines(folder: Path) -> list[bytes]:
    return (folder / "rows.jsonl").read_bytes().splitlines(keepends=True)


def change(folder: Path, number: int, part: str, **fields) -> None:
    """Change fields of a part of a row; those that are `...` are taken out."""
    found = lines(folder)
    row = json.loads(found[number])
    place = row[part][0] if part == "values" else row[part]
    place |= fields
    for field in [field for field, value in fields.items() if value is ...]:
        del place[field]
    found[number] = json.dumps(row).encode() + b"\n"
    (folder / "rows.jsonl").write_bytes(b"".join(found))


# Several that write


def test_writers_of_the_same_file_have_parts_of_their_own(tmp_path):
    """With one name for the part of all, one took away what another was about to replace."""
    with new_part(tmp_path / "table1.md") as one, new_part(tmp_path / "table1.md") as other:
        assert one != other
        assert names(tmp_path) == {one.name, other.name}
    assert names(tmp_path) == set(), "what replaces nothing is gone"


def test_a_link_is_replaced_and_what_it_leads_to_is_not(monkeypatch, capsys, folder):
    outside = folder.parent / "outside"
    outside.mkdir()
    for name in ("rows.jsonl", "table1.md", "report.html", "perplexity.png"):
        (outside / name).write_bytes((folder / "rows.jsonl").read_bytes())
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside / name)
    (folder / "table1.csv").symlink_to("nowhere/at/all")
    before = {path: path.read_bytes() for path in outside.iterdir()}
    arguments = ["--model", MODEL, "--scheme", "absmax-row", "--block", 32, "--blocks", 2, "--out", folder]
    assert call(monkeypatch, capsys, *arguments)[0] == 0
    assert {path: path.read_bytes() for path in outside.iterdir()} == before
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert len(records_in(folder)) == 4, "the rows that the link led to were read"


FOLDER, PIPE = (Path.mkdir, "a folder"), (os.mkfifo, "a pipe")


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [("table1.md", *PIPE), ("report.html", *FOLDER), ("perplexity.png", *PIPE), ("rows.parquet", *FOLDER)],
)
def test_what_is_no_file_is_not_replaced(monkeypatch, capsys, folder, name, make, kind):
    make(folder / name)
    arguments = ["--model", MODEL, "--scheme", "fp32", "--block", 32, "--blocks", 2, "--out", folder]
    said = f"'{folder}/{name}' is {kind}; expected a file: move it away or choose another folder with --out\n"
    assert refused(monkeypatch, capsys, *arguments) == said


# Rows


TAILS = [b"", b'{"model": "pocket', b"\0" * 4096, b'{"model": "\xff\xfe', b"\x00\n\n", b'{"value": 1.5, "metric": "per']


@pytest.mark.parametrize(("tail", "kept"), [(tail, 2) for tail in TAILS] + [(b"", 0)])
def test_a_torn_last_line_is_moved_aside_and_measured_again(monkeypatch, capsys, folder, tail, kept):
    want, found = records_in(folder), lines(folder)
    torn = tail or found[kept][:-9]
    (folder / "rows.jsonl").write_bytes(b"".join(found[:kept]) + torn)
    assert records_in(folder) == want[:kept]
    assert names(folder) == {"rows.jsonl"}, "a reader moves nothing"
    capsys.readouterr()
    arguments = ["--model", MODEL, *(f"--scheme={scheme}" for scheme in names_of(SWEPT)), "--block", 32, "--blocks", 2]
    code, _, err = call(monkeypatch, capsys, *arguments, "--out", folder)
    assert code == 0
    assert err == (
        f"the last line of '{folder}/rows.jsonl' was torn; it is in 'rows.jsonl.torn' now, and its "
        "measurement is repeated\n"
    )
    assert (folder / "rows.jsonl.torn").read_bytes() == torn.rstrip()
    again = records_in(folder)
    assert again[:kept] == want[:kept], "what was whole was not measured again"
    assert [row["value"] for row in again] == [row["value"] for row in want]


def test_what_was_torn_earlier_is_kept(folder):
    for number, name in enumerate(["rows.jsonl.torn", "rows.jsonl.torn-2", "rows.jsonl.torn-3"]):
        with (folder / "rows.jsonl").open("ab") as file:
            file.write(b'{"torn": %d' % number)
        with Rows(folder):
            assert len(read_rows(folder)) == 3
        assert (folder / name).read_bytes() == b'{"torn": %d' % number


def test_a_whole_last_line_without_an_end_is_a_row(folder):
    want = records_in(folder)
    (folder / "rows.jsonl").write_bytes(b"".join(lines(folder)).rstrip())
    assert sweep(SWEPT, folder) == want
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(map(bytes.strip, lines(folder))) + b"\r\n\n")
    assert sweep(SWEPT, folder) == want, "as an editor of another system writes it"
    assert names(folder) == {"rows.jsonl"}


@pytest.mark.parametrize(
    ("part", "field"),
    [*(("provenance", field) for field in ("parameters", "architecture", "weights_hash")), ("request", "variant")],
)
def test_a_row_of_something_else_is_measured_again(folder, part, field):
    want = records_in(folder)
    change(folder, 1, part, **{field: "other" if part == "request" else ...})
    missing = [row for row in stored_rows(SWEPT, folder) if row.get("failed") == "not measured yet"]
    assert len(missing) == (0 if field == "weights_hash" else 1), "tables and figures need the others"
    rows = sweep(SWEPT, folder)
    assert lasting(rows) == lasting(want)
    assert len(stored_rows(SWEPT, folder)) == 3
    measured = [row["wall_seconds"] for row in rows]
    assert [measured[number] == want[number]["wall_seconds"] for number in (0, 2)] == [True, True]


def test_of_several_rows_of_one_measurement_the_last_one_counts(folder):
    first = read_rows(folder)[0]
    later = replace(first, values=[first.values[0] | {"value": 1.25}])
    with Rows(folder) as rows:
        rows.add(later)
        assert rows.find(first.request, first.provenance) == later
    assert len(lines(folder)) == 4, "rows are never rewritten"
    assert [row["value"] for row in records_in(folder)].count(1.25) == 1
    assert len(records_in(folder)) == 3
    assert sweep(SWEPT, folder)[0]["value"] == 1.25
    other = replace(first, run=first.run | {"experiment": "ablate"})
    stored = rows_of(SWEPT, among([first, later, other]))
    assert [row for row in stored if row.values] == [later], "not one of another experiment"


def test_rows_with_the_parts_of_earlier_versions_are_read_and_found(folder):
    rows, names = read_rows(folder), {"request": "asked", "provenance": "facts", "run": "made"}
    earlier = [{names.get(name, name): part for name, part in json.loads(line).items()} for line in lines(folder)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in earlier))
    assert read_rows(folder) == rows
    with Rows(folder) as found:
        assert found.find(rows[0].request, rows[0].provenance) == rows[0]


@pytest.mark.parametrize(
    ("part", "fields", "said"),
    [
        ("values", {"value": float("inf")}, "values.0.value: expected a finite number, got inf"),
        ("request", {"more": 1}, "request: expected an object of metric, subject, variant, got {"),
        ("run", {"model": "\udcff"}, "surrogates not allowed"),
    ],
)
def test_no_row_is_written_that_could_not_be_read(folder, part, fields, said):
    row = read_rows(folder)[0]
    place = [row.values[0] | fields] if part == "values" else getattr(row, part) | fields
    before = lines(folder)
    with Rows(folder) as rows, pytest.raises(UserError, match=rf"^a row cannot be kept: .*{re.escape(said)}"):
        rows.add(replace(row, **{part: place}))
    assert lines(folder) == before


@pytest.mark.parametrize("folder", ["traced"], indirect=True)
def test_a_row_of_a_trace_that_is_kept_is_made_of_it(folder):
    want = trace_model(TRACED, folder)[1]
    (folder / "rows.jsonl").unlink()
    written = (folder / "trace.safetensors").stat().st_mtime_ns
    assert lasting(trace_model(TRACED, folder)[1]) == lasting(want)
    assert (folder / "trace.safetensors").stat().st_mtime_ns == written, "nothing is traced again"


# Traces


def damaging(make):
    """What changes the files of a trace: called with how, then with where they are."""
    return lambda *how, **fields: lambda stem: make(stem, *how, **fields)


@damaging
def tensors(stem: Path, change) -> None:
    """Change the statistics of a trace."""
    path = stem.with_name(f"{stem.name}.safetensors")
    header = {"trace": json.dumps(Trace.load(stem)._header())}
    found = load_file(path)
    change(found)
    save_file(found, path, header)


@damaging
def header(stem: Path, **fields) -> None:
    """Change the header of a trace."""
    found, own = Trace.load(stem), Trace._header
    found.__class__ = type("Changed", (Trace,), {"_header": lambda self: own(self) | fields})
    found.save(stem)


@damaging
def content(stem: Path, change) -> None:
    """Change the bytes of a trace."""
    path = stem.with_name(f"{stem.name}.safetensors")
    path.write_bytes(change(path.read_bytes()))


def put(name: str, place: tuple, value: float):
    return tensors(lambda found: found[name].__setitem__(place, value))


def sketch(change):
    """Change the keys and counts of the sketch."""
    names = ("sketch.keys", "sketch.counts")
    return tensors(lambda found: found.update(zip(names, change(*map(found.get, names)), strict=True)))


def twice(keys: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same hits, those of a bucket in two entries."""
    most = int(counts.argmax())
    entries = torch.ones_like(keys).index_fill_(0, torch.tensor([most]), 2)
    keys, counts = (values.repeat_interleave(entries) for values in (keys, counts))
    counts[most + 1] = 1
    counts[most] -= 1
    return keys, counts


DAMAGES = {
    "cut": content(lambda value: value[:-8]),
    "no header": lambda stem: save_file({"a": torch.ones(1)}, stem.with_name("trace.safetensors")),
    "a header that is no JSON": lambda stem: save_file({}, stem.with_name("trace.safetensors"), {"trace": "{"}),
    "another alpha": header(alpha="3"),
    "alpha NaN": header(alpha=float("nan")),
    "roles that are none": header(roles=["attn_in", "nothing"]),
    "no roles": header(roles=[]),
    "blocks of one token": header(block=1),
    "more sequences than there are numbers": header(sequences=-1),
    "an unknown field": header(extra=1),
    "about text": header(labels="text"),
    "another shape": tensors(lambda found: found.update({"attn_in.max": found["attn_in.max"][:, :-1].clone()})),
    "another dtype": tensors(lambda found: found.update({"attn_in.hits": found["attn_in.hits"].float()})),
    "a negative count": put("residual.massive", (0, 0), -1),
    "other hits": put("attn_in.hits", (0, 0), 1),
    "a token that is not there": put("ffn_in.largest", (0, 4), 10**9),
    "half a feature": put("residual.largest", (0, 2), 0.5),
    "other names": tensors(lambda found: found.update(keys=found.pop("sketch.keys"))),
    "keys of another dtype": tensors(lambda found: found.update({"sketch.keys": found["sketch.keys"].double()})),
    "a lost key": sketch(lambda keys, counts: (keys[1:], counts)),
    "a lost count": sketch(lambda keys, counts: (keys[1:], counts[1:])),
    "a key twice": sketch(twice),
    "a layer that is not there": sketch(lambda keys, counts: (keys + (99 << 46), counts)),
    "a feature that is not there": sketch(lambda keys, counts: (keys + (1 << 33), counts)),
    "keys below none": sketch(lambda keys, counts: (keys - (1 << 60), counts)),
}


@pytest.mark.parametrize("folder", ["traced"], indirect=True)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_trace_is_not_read(folder, damage):
    DAMAGES[damage](folder / "trace")
    with pytest.raises(UserError, match=r"^cannot read a trace from"):
        Trace.load(folder / "trace")


@pytest.mark.parametrize("folder", ["traced"], indirect=True)
def test_a_damaged_trace_is_made_again(caplog, folder):
    want = Trace.load(folder / "trace")
    DAMAGES["a lost count"](folder / "trace")
    with caplog.at_level("INFO", logger="outliers"):
        found, _ = trace_model(TRACED, folder)
    assert found.sketch == want.sketch
    assert re.search(r"cannot read a trace from .*; trace again; this run does", caplog.text)


@pytest.mark.parametrize("folder", ["traced"], indirect=True)
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_trace(folder, make):
    (folder / "trace.safetensors").unlink()
    make(folder / "trace.safetensors")
    with pytest.raises(UserError, match=r"'.*trace\.safetensors' is a (folder|pipe|device); expected a file"):
        Trace.load(folder / "trace")


@pytest.mark.parametrize("folder", ["traced"], indirect=True)
def test_a_trace_stays_where_that_of_another_request_does_not_end(folder, calls_of):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def stop(_calls) -> None:
        raise KeyboardInterrupt

    calls_of("outliers.metrics.trace.traces", stop)
    with pytest.raises(KeyboardInterrupt):
        trace_model(TRACED.model_copy(update={"alpha": 2}), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_trace_of_more_blocks_is_not_that_of_fewer(traced, tmp_path):
    found = Trace.load(traced / "trace")
    more = replace(found.merge(found), labels=found.labels)
    more.save(tmp_path / "trace")
    again, _ = trace_model(TRACED, tmp_path)
    assert again.sequences == TRACED.blocks


# Models of the same name


@pytest.fixture
def two(monkeypatch, tmp_path) -> tuple[Ablation, Ablation]:
    """What is asked of two models of one name."""
    for place in "ab":
        shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / place / "hf")
    monkeypatch.chdir(tmp_path)
    return tuple(Ablation(model=f"{place}/hf", features=[3], block=32, blocks=1) for place in "ab")


def test_a_folder_is_of_one_model_however_that_is_written(two):
    first, second = two
    run(first)
    assert first.folder == second.folder == Path("results/ablate/hf")
    for spelling in ("./a/hf/", str(Path("a/hf").absolute()), "b/../a/hf"):
        assert run(first.model_copy(update={"model": spelling}), first.folder)
    said = "'results/ablate/hf' holds results of 'a/hf', whose tables and page those of 'b/hf' would replace; choose "
    with pytest.raises(UserError, match=said):
        run(second)
    with Rows(Path("revision")) as rows:
        rows.add(a_row("a/hf", "ablate", checkpoint="step8"))
    with pytest.raises(UserError, match="'revision' holds results of 'a/hf@step8'"):
        run(first, "revision")


def test_rows_of_other_experiments_are_of_any_model(two):
    sweep(models=["a/hf"], schemes=["fp32"], block=32, blocks=1, out="out")
    assert run(two[1], "out")


def test_a_trace_without_rows_is_of_its_model(traced, tmp_path):
    """As Ctrl-C leaves it."""
    other = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "other")
    (tmp_path / "out").mkdir()
    shutil.copy(traced / "trace.safetensors", tmp_path / "out")
    with pytest.raises(UserError, match=f"holds results of '{MODEL}'"):
        trace_model(TRACED.model_copy(update={"model": str(other)}), tmp_path / "out")
