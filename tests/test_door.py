"""Mistakes that a user, a file or a machine makes, each in a line: what is there, what is typed, what the answer says.

To add a case, add a line to the table of its kind. Each is run as a command in a folder of its own; it must end within
ten seconds with exit code 2 and one line, and leave nothing behind.
"""

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from outliers.models.names import POCKET
from tests.test_commands import call

SECONDS = 10  # for any answer
SMALL = "--block 32 --blocks 1"


class Case(NamedTuple):
    """A mistake: how it is made in an empty folder, what is typed there, and a pattern of the one line that answers."""

    what: str
    make: Callable[[Path], None]
    typed: str
    answer: str


def nothing(folder: Path) -> None:
    """Nothing is there."""


def configured(**fields) -> Callable[[Path], None]:
    """A small model in the folder `m`, with other fields in its configuration."""

    def make(folder: Path) -> None:
        file = shutil.copytree(POCKET / "gpt2-0.1m", folder / "m") / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return make


# ---- which files are the model -------------------------------------------------------------------------------------

MODEL_FILES: list[Case] = []

# ---- what a configuration asks for ---------------------------------------------------------------------------------

CONFIGURATIONS: list[Case] = [
    Case("a model of no known kind", configured(model_type="gpt9"), f"trace m {SMALL}", "cannot load 'm': .*gpt9"),
]

# ---- text ----------------------------------------------------------------------------------------------------------

TEXTS: list[Case] = []

# ---- disks and results ---------------------------------------------------------------------------------------------

SWEEP = f"sweep --model pocket/gpt2-0.1m --scheme fp32 {SMALL} --out out"
TRACE = f"trace pocket/gpt2-0.1m {SMALL} --out out"
REDRAW = "report pocket/table1 --redraw --out out"
ROW = {"metric": "perplexity", "value": 7.5, "model": "m", "scheme": "fp32", "parameters": 9, "architecture": "gpt2"}


def rows(*lines: str | bytes | dict) -> Callable[[Path], None]:
    """A file of rows in the folder `out`, the first of which is a good one."""

    def as_line(line: str | bytes | dict) -> bytes:
        text = json.dumps(line) if isinstance(line, dict) else line
        return text if isinstance(text, bytes) else text.encode()

    def make(folder: Path) -> None:
        (folder / "out").mkdir()
        (folder / "out" / "rows.jsonl").write_bytes(b"".join(as_line(line) + b"\n" for line in (ROW, *lines)))

    return make


def instead_of(name: str, kind: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else than a file in the folder `out`."""

    def make(folder: Path) -> None:
        (folder / "out").mkdir()
        (folder / "outside").write_text("of another")
        kind(folder / "out" / name)

    return make


def to_outside(path: Path) -> None:
    path.symlink_to("../outside")


def to_nowhere(path: Path) -> None:
    path.symlink_to("nowhere/at/all")


def twice(path: Path) -> None:
    path.hardlink_to(path.parent.parent / "outside")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


def traced(folder: Path) -> None:
    """A trace of another model in the folder `out`."""
    rows({**ROW, "experiment": "trace", "model": "other/gpt2-0.1m"})(folder)


RESULTS: list[Case] = [
    *(
        Case(
            f"a damaged line, {what}",
            rows(line, ROW),
            SWEEP,
            f"line 2 of 'out/rows.jsonl' is damaged \\({reason}.*\\); d",
        )
        for what, line, reason in [
            ("cut", '{"model": "m', "it is not JSON"),
            ("empty of rows", "[]", "it is no JSON object"),
            ("a number", "3", "it is no JSON object"),
            ("null", "null", "it is no JSON object"),
            ("not UTF-8", b'{"model": "\xff"}', "it is not UTF-8"),
            ("zeros", b"\0" * 4096, "it is not JSON"),
            ("nested", "[" * 100_000, "its JSON is nested too deep"),
            ("half a character", {**ROW, "model": "\ud800"}, "'model' holds half a character"),
            ("a field twice", '{"value": 1, "value": 2}', "a field is there twice"),
            ("NaN", '{"value": NaN}', "NaN is no number"),
            ("no end", '{"value": -Infinity}', "-Infinity is no number"),
            ("too large", '{"value": 1e999}', "'value' is Infinity, expected a finite number"),
            ("many digits", '{"value": ' + "9" * 5000 + "}", "Exceeds the limit"),
            ("a large whole number", '{"parameters": ' + "9" * 30 + "}", "'parameters' is a number too large"),
            ("text for a number", {**ROW, "value": "7.5"}, "'value' is \"7.5\", expected a finite number"),
            ("true for a number", {**ROW, "value": True}, "'value' is true"),
            ("a list for a number", {**ROW, "value": [7.5]}, r"'value' is \[7.5\]"),
            ("a perplexity below 0", {**ROW, "value": -1}, "'value' of perplexity is -1, expected a positive"),
            ("a number for text", {**ROW, "model": 3}, "'model' is 3, expected a text"),
            ("an object for text", {**ROW, "scheme": {}}, r"'scheme' is \{\}"),
            ("no parameters", {**ROW, "parameters": 0}, "'parameters' is 0, expected a whole number from 1 on"),
            ("half a parameter", {**ROW, "parameters": 0.5}, "'parameters' is 0.5"),
            ("an object in an unknown field", {**ROW, "new": {"a": 1}}, "'new' is"),
            ("a list of lists", {**ROW, "new": [[1]]}, "'new' is"),
            ("features of text", {**ROW, "features": ["3"]}, "'features' is"),
        ]
    ),
    Case("a damaged line to draw", rows("{", ROW), REDRAW, "line 2 of 'out/rows.jsonl' is damaged"),
    Case("a damaged line to trace", rows("{", ROW), TRACE, "line 2 of 'out/rows.jsonl' is damaged"),
    Case("a last line that is no row", rows({**ROW, "value": "7.5"}), SWEEP, "line 2 of 'out/rows.jsonl' is damaged"),
    Case("nothing to draw again", rows({**ROW, "value": None}), REDRAW, "'out' has no finished rows of it"),
    *(
        Case(
            f"{what} as the rows", instead_of("rows.jsonl", kind), typed, f"'out/rows.jsonl' is {said}; expected a file"
        )
        for typed in (SWEEP, TRACE, REDRAW)
        for what, kind, said in [("a folder", Path.mkdir, "a folder"), ("a pipe", os.mkfifo, "a pipe")]
    ),
    Case(
        "a link to a device as the rows",
        instead_of("rows.jsonl", lambda p: p.symlink_to("/dev/zero")),
        SWEEP,
        "a device",
    ),
    Case("a socket as the rows", instead_of("rows.jsonl", a_socket), SWEEP, "cannot read 'out/rows.jsonl'"),
    *(
        Case(f"{what} as the lock", instead_of(".lock", kind), typed, f"'out/.lock' is {said}; expected a file")
        for typed in (SWEEP, TRACE)
        for what, kind, said in [
            ("a folder", Path.mkdir, "a folder"),
            ("a pipe", os.mkfifo, "a pipe"),
            ("a socket", a_socket, "a socket"),
            ("a link", to_outside, "a link"),
            ("a link to nowhere", to_nowhere, "a link"),
            ("another file", twice, "another name of a file elsewhere"),
        ]
    ),
    *(
        Case(f"{what} as the trace's {end}", instead_of(f"trace.{end}", kind), TRACE, f"'out/trace.{end}' is {what}")
        for end in ("safetensors", "parquet")
        for what, kind in [("a folder", Path.mkdir), ("a pipe", os.mkfifo)]
    ),
    Case("a trace of another model", traced, TRACE, "'out' holds results of 'other/gpt2-0.1m', whose tables"),
    Case(
        "an ablation beside a trace of another model",
        traced,
        TRACE.replace("trace", "ablate", 1),
        "'out' holds results",
    ),
    Case("a file as the folder", lambda folder: (folder / "out").touch(), SWEEP, "cannot write to 'out' "),
    Case("a pipe as the folder", lambda folder: os.mkfifo(folder / "out"), TRACE, "cannot (read|write to) 'out"),
    Case("a link to nowhere as the folder", lambda folder: to_nowhere(folder / "out"), SWEEP, "cannot write to 'out' "),
    Case(
        "a device as the folder", nothing, SWEEP.replace("--out out", "--out /dev/null"), "cannot write to '/dev/null' "
    ),
    Case("a folder in a device", nothing, TRACE.replace("--out out", "--out /dev/null/out"), "'/dev/null/out"),
    Case(
        "too long a name",
        nothing,
        SWEEP.replace("out out", f"out {'o' * 300}"),
        r"cannot write to 'o+' \(File name too",
    ),
    Case("too long a name to trace", nothing, TRACE.replace("out out", f"out {'o' * 300}"), r"'o+/.*' \(File name too"),
    Case(
        "too long a name to redraw", nothing, REDRAW.replace("out out", f"out {'o' * 300}"), r"'o+/.*' \(File name too"
    ),
]

# ---- options and environment ---------------------------------------------------------------------------------------

OPTIONS: list[Case] = [
    Case("no such command's model", nothing, f"trace nowhere/at/all {SMALL}", "model folder 'nowhere/at/all'"),
]

CASES = [*MODEL_FILES, *CONFIGURATIONS, *TEXTS, *RESULTS, *OPTIONS]


@pytest.fixture(autouse=True)
def _no_hang():
    def hung(*_):
        raise TimeoutError(f"no answer after {SECONDS} s")

    usual = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, usual)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_one_line(monkeypatch, capsys, tmp_path, case):
    monkeypatch.chdir(tmp_path)
    case.make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    command, *arguments = case.typed.split()
    code, out, err = call(monkeypatch, capsys, *arguments, command=command)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert re.search(case.answer, err), err
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
