"""Mistakes that a user, a file or a machine makes, each in a line: what is there, what is typed, what the answer says.

To add a case, add a line to the table of its kind. Each is run as a command in a folder of its own; it must end within
ten seconds with exit code 2 and one line, and leave nothing behind.
"""

import gzip
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

READ = "trace pocket/gpt2-0.1m --block 32 --blocks 1 --text"
ROW = json.dumps({"text": "One document of this text."}).encode()


def written(name: str, *lines: bytes) -> Callable[[Path], None]:
    """A file of these lines."""
    return lambda folder: (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))


def compressed(name: str, content: bytes, members: int = 1, end: int | None = None) -> Callable[[Path], None]:
    """A compressed file that repeats the content and is cut at its end."""
    return lambda folder: (folder / name).write_bytes((gzip.compress(content, 1) * members)[:end])


def special(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Something at the place of a file."""
    return lambda folder: make(folder / "a.txt")


TEXTS: list[Case] = [
    Case(
        "half a surrogate pair",
        written("a.jsonl", ROW, rb'{"text": "\ud800"}'),
        f"{READ} a.jsonl",
        r"row 2 of 'a.jsonl' .*half a surrogate pair, '\\ud800'",
    ),
    Case(
        "its other half",
        written("a.jsonl", rb'{"text": "x\udfffx"}'),
        f"{READ} a.jsonl",
        r"row 1 of 'a.jsonl' .*'\\udfff'",
    ),
    Case(
        "half a pair in bytes",
        written("a.txt", b"one", b"t\xed\xa0\x80wo"),
        f"{READ} a.txt",
        r"line 2 of text file 'a.txt' .*byte 2 is not UTF-8",
    ),
    Case(
        "Latin-1",
        written("a.txt", b"one", b"", b"caf\xe9"),
        f"{READ} a.txt",
        r"line 3 of text file 'a.txt' .*byte 4 is not UTF-8",
    ),
    Case(
        "Latin-1 in a row",
        written("a.jsonl", ROW, b'{"text": "caf\xe9"}'),
        f"{READ} a.jsonl",
        r"line 2 of text file 'a.jsonl' .*byte 14 is not UTF-8",
    ),
    Case("UTF-16", written("a.txt", "words".encode("utf-16")), f"{READ} a.txt", r"line 1 .*byte 1 is not UTF-8"),
    Case(
        "a byte order mark",
        written("a.txt", b"\xef\xbb\xbfwords"),
        f"{READ} a.txt",
        "line 1 of 'a.txt' begins with a byte order mark",
    ),
    Case(
        "one before a row",
        written("a.jsonl", b"\xef\xbb\xbf" + ROW),
        f"{READ} a.jsonl",
        "line 1 of 'a.jsonl' begins with a byte order mark",
    ),
    Case("an overlong NUL", written("a.txt", b"\xc0\x80"), f"{READ} a.txt", "line 1 .*byte 1 is not UTF-8"),
    Case(
        "deep nesting",
        written("a.jsonl", ROW, b'{"x": ' + b"[" * 10**5),
        f"{READ} a.jsonl",
        "row 2 of 'a.jsonl' .*nested too deeply",
    ),
    Case(
        "deep objects",
        written("a.jsonl", b'{"x":' * 10**5),
        f"{READ} a.jsonl",
        "row 1 of 'a.jsonl' .*nested too deeply",
    ),
    Case(
        "a number without end",
        written("a.jsonl", ROW, b'{"x": ' + b"1" * 5000 + b', "text": "x"}'),
        f"{READ} a.jsonl",
        "row 2 of 'a.jsonl' .*more than 4300 digits",
    ),
    Case(
        "a number for a text",
        written("a.jsonl", ROW, b'{"text": 3}'),
        f"{READ} a.jsonl",
        "row 2 of 'a.jsonl' .*'text' is no string",
    ),
    Case(
        "null for a text",
        written("a.jsonl", b'{"text": null}'),
        f"{READ} a.jsonl",
        "row 1 of 'a.jsonl' .*'text' is no string",
    ),
    Case(
        "NaN for a text",
        written("a.jsonl", b'{"text": NaN}'),
        f"{READ} a.jsonl",
        "row 1 of 'a.jsonl' .*'text' is no string",
    ),
    Case(
        "a list for a text",
        written("a.jsonl", b'{"text": ["x"]}'),
        f"{READ} a.jsonl",
        "row 1 of 'a.jsonl' .*'text' is no string",
    ),
    Case(
        "a second text that is none",
        written("a.jsonl", b'{"text": "x", "text": 1}'),
        f"{READ} a.jsonl",
        "row 1 of 'a.jsonl' .*'text' is no string",
    ),
    Case(
        "no text",
        written("a.jsonl", ROW, b'{"content": "x"}'),
        f"{READ} a.jsonl",
        "row 2 of 'a.jsonl' .*'text' is missing",
    ),
    Case(
        "a list for a row", written("a.jsonl", b'["text"]'), f"{READ} a.jsonl", "row 1 of 'a.jsonl' .*it is no object"
    ),
    Case(
        "a string for a row", written("a.jsonl", b'"text"'), f"{READ} a.jsonl", "row 1 of 'a.jsonl' .*it is no object"
    ),
    Case(
        "two rows in a line",
        written("a.jsonl", ROW + ROW),
        f"{READ} a.jsonl",
        "row 1 of 'a.jsonl' .*Extra data at character 39",
    ),
    Case("a torn row", written("a.jsonl", ROW, ROW[:20]), f"{READ} a.jsonl", "row 2 of 'a.jsonl' is not a JSON object"),
    Case(
        "a control character",
        written("a.jsonl", b'{"text": "\x01"}'),
        f"{READ} a.jsonl",
        "row 1 of 'a.jsonl' .*Invalid control character",
    ),
    Case(
        "JSON over several lines",
        written("a.jsonl", b"{", b'"text": "x"', b"}"),
        f"{READ} a.jsonl",
        "row 1 of 'a.jsonl' is not a JSON object",
    ),
    Case(
        "a blank line in the middle",
        written("a.jsonl", ROW, b"", ROW),
        f"{READ} a.jsonl",
        "row 2 of 'a.jsonl' is blank",
    ),
    Case("blank lines alone", written("a.jsonl", b"", b" "), f"{READ} a.jsonl", "too short: 0 tokens"),
    Case(
        "blank lines without end",
        compressed("a.jsonl.gz", b"\n" * 10**6, 1000),
        f"{READ} a.jsonl.gz",
        "row 1 of 'a.jsonl.gz' is blank",
    ),
    Case("no rows", written("a.jsonl"), f"{READ} a.jsonl", "too short: 0 tokens"),
    Case("an empty document", written("a.jsonl", b'{"text": ""}'), f"{READ} a.jsonl", "too short: 1 tokens"),
    Case(
        "a gigabyte of zeros",
        compressed("a.txt.gz", bytes(2**20), 1000),
        f"{READ} a.txt.gz",
        "line 1 of 'a.txt.gz' is longer than 16 MB",
    ),
    Case(
        "a row of them",
        compressed("a.jsonl.gz", bytes(2**20), 1000),
        f"{READ} a.jsonl.gz",
        "line 1 of 'a.jsonl.gz' is longer than 16 MB",
    ),
    Case(
        "a long line",
        written("a.txt", b"one", b"x" * (2**24 + 1)),
        f"{READ} a.txt",
        "line 2 of 'a.txt' is longer than 16 MB",
    ),
    Case(
        "a long row",
        written("a.jsonl", ROW, b'{"text": "' + b"x" * 2**24 + b'"}'),
        f"{READ} a.jsonl",
        "line 2 of 'a.jsonl' is longer than 16 MB",
    ),
    Case(
        "a torn gzip",
        compressed("a.txt.gz", b"words" * 10**6, end=-30),
        f"{READ} a.txt.gz",
        "line 1 of text file 'a.txt.gz' cannot be read: .*ended",
    ),
    Case(
        "a torn gzip of rows",
        compressed("a.jsonl.gz", ROW + b"\n", end=-9),
        f"{READ} a.jsonl.gz",
        "line 2 of text file 'a.jsonl.gz' cannot be read: .*ended",
    ),
    Case(
        "a header of gzip",
        compressed("a.txt.gz", b"words", end=5),
        f"{READ} a.txt.gz",
        "line 1 of text file 'a.txt.gz' cannot be read",
    ),
    Case(
        "no gzip",
        written("a.txt.gz", b"words"),
        f"{READ} a.txt.gz",
        "line 1 of text file 'a.txt.gz' cannot be read: Not a gzipped file",
    ),
    Case(
        "a wrong checksum",
        lambda folder: (folder / "a.txt.gz").write_bytes(gzip.compress(b"words")[:-8] + bytes(8)),
        f"{READ} a.txt.gz",
        "line 1 of text file 'a.txt.gz' cannot be read: CRC",
    ),
    Case(
        "damage in a gzip",
        lambda folder: (folder / "a.txt.gz").write_bytes(gzip.compress(b"words")[:10] + b"\xff" * 20),
        f"{READ} a.txt.gz",
        "line 1 of text file 'a.txt.gz' cannot be read: .*decompressing",
    ),
    Case("a folder", special(Path.mkdir), f"{READ} a.txt", "'a.txt' is a folder, a pipe or a device"),
    Case("a pipe", special(os.mkfifo), f"{READ} a.txt", "'a.txt' is a folder, a pipe or a device"),
    Case(
        "a device",
        special(lambda path: path.symlink_to("/dev/zero")),
        f"{READ} a.txt",
        "'a.txt' is a folder, a pipe or a device",
    ),
    Case("a link to itself", special(lambda path: path.symlink_to(path)), f"{READ} a.txt", "'a.txt' does not exist"),
    Case("a file of /proc", special(lambda path: path.symlink_to("/proc/self/mem")), f"{READ} a.txt", "too short"),
    Case(
        "a socket",
        special(lambda path: socket.socket(socket.AF_UNIX).bind("a.txt")),
        f"{READ} a.txt",
        "'a.txt' is a folder, a pipe or a device",
    ),
    Case(
        "another ending",
        written("a.json", ROW),
        f"{READ} a.json",
        "'a.json' ends in '.json'; expected .txt, .txt.gz, .jsonl or .jsonl.gz",
    ),
    Case("an ending in capitals", written("a.TXT", b"x"), f"{READ} a.TXT", "'a.TXT' ends in '.TXT'; expected .txt"),
    Case("gz alone", written("a.gz", b"x"), f"{READ} a.gz", "'a.gz' ends in '.gz'; expected .txt"),
    Case("a name of 300 characters", nothing, f"{READ} {'a' * 300}.txt", "'a{300}.txt' does not exist"),
    Case(
        "more blocks than numbers count",
        nothing,
        f"trace pocket/gpt2-0.1m --block 32 --blocks {10**30}",
        "expected at most 1,073,741,824 tokens",
    ),
    Case(
        "more blocks than memory",
        nothing,
        f"trace pocket/gpt2-0.1m --block 32 --blocks {10**12} --bos",
        "expected at most 1,073,741,824 tokens",
    ),
]

# ---- disks and results ---------------------------------------------------------------------------------------------

RESULTS: list[Case] = []

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
