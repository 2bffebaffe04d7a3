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

ROW = json.dumps({"text": "One document of this text."}).encode() + b"\n"


def text(what: str, answer: str, name: str, content: bytes | Callable[[Path], None], end: int | None = None) -> Case:
    """A file of that name in which something is wrong, or what is made there, cut at its end; the answer names it."""

    def make(folder: Path) -> None:
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content[:end])

    return Case(what, make, f"trace pocket/gpt2-0.1m {SMALL} --text {name}", rf"(?=.*'{re.escape(name)}').*{answer}")


def link(target: str) -> Callable[[Path], None]:
    """A symbolic link."""
    return lambda path: path.symlink_to(target)


ZEROS = gzip.compress(bytes(2**20), 1) * 1000  # a gigabyte, in members that follow each other
NO_FILE = "is a folder, a pipe or a device"

TEXTS: list[Case] = [
    text(
        "half a surrogate pair", r"row 2 .* half a surrogate pair, '\\ud800'", "a.jsonl", ROW + rb'{"text": "\ud800"}'
    ),
    text("its other half", r"row 1 .* half a surrogate pair, '\\udfff'", "a.jsonl", rb'{"text": "x\udfffx"}'),
    text("half a pair in bytes", "line 2 .* byte 2 is not UTF-8", "a.txt", b"one\nt\xed\xa0\x80wo"),
    text("Latin-1", "line 3 .* byte 4 is not UTF-8", "a.txt", b"one\r\n\r\ncaf\xe9"),
    text("Latin-1 in a row", "line 2 .* byte 14 is not UTF-8", "a.jsonl", ROW + b'{"text": "caf\xe9"}'),
    text("Latin-1, compressed", "line 2 .* byte 4 is not UTF-8", "a.txt.gz", gzip.compress(b"one\ncaf\xe9")),
    text("UTF-16", "line 1 .* byte 1 is not UTF-8", "a.txt", "words".encode("utf-16")),
    text("half a character at the end", "line 1 .* byte 6 is not UTF-8", "a.txt", b"words\xc3"),
    text("an overlong NUL", "line 1 .* byte 1 is not UTF-8", "a.txt", b"\xc0\x80"),
    text("a byte order mark", "line 1 .* begins with a byte order mark", "a.txt", b"\xef\xbb\xbfwords"),
    text("one before a row", "line 1 .* begins with a byte order mark", "a.jsonl", b"\xef\xbb\xbf" + ROW),
    text("one in front of a later row", "row 2 .* BOM", "a.jsonl", ROW + b"\xef\xbb\xbf" + ROW),
    text("deep lists", "row 2 .* nested too deeply", "a.jsonl", ROW + b'{"x": ' + b"[" * 10**5),
    text("deep objects", "row 1 .* nested too deeply", "a.jsonl", b'{"x":' * 10**5),
    text("a number without end", "row 2 .* more than 4300 digits", "a.jsonl", ROW + b'{"x": ' + b"1" * 5000 + b"}"),
    text("a number for a text", "row 2 .*: 'text' is no string", "a.jsonl", ROW + b'{"text": 3}'),
    text("null for a text", "row 1 .*: 'text' is no string", "a.jsonl", b'{"text": null}'),
    text("NaN for a text", "row 1 .*: 'text' is no string", "a.jsonl", b'{"text": NaN}'),
    text("a list for a text", "row 1 .*: 'text' is no string", "a.jsonl", b'{"text": ["x"]}'),
    text("two texts", "row 1 .*: 'text' is no string", "a.jsonl", b'{"text": "x", "text": 1}'),
    text("no text", "row 2 .*: 'text' is missing", "a.jsonl", ROW + b'{"content": "x"}'),
    text("a list for a row", "row 1 .*: it is no object", "a.jsonl", b'["text"]'),
    text("a string for a row", "row 1 .*: it is no object", "a.jsonl", b'"text"'),
    text("no JSON", "row 2 .*: Expecting value at character 1", "a.jsonl", ROW + b"words\n"),
    text("two rows in a line", "row 1 .*: Extra data at character 39", "a.jsonl", ROW.strip() + ROW),
    text("a torn row", "row 2 .*: Unterminated string", "a.jsonl", ROW + ROW, -10),
    text("a control character", "row 1 .*: Invalid control character", "a.jsonl", b'{"text": "\x01"}'),
    text("JSON over several lines", "row 1 .*: Expecting property name", "a.jsonl", b'{\n"text": "x"\n}'),
    text("a blank line in the middle", "row 2 .* is blank", "a.jsonl", ROW + b"\n" + ROW),
    text("blank lines without end", "row 1 .* is blank", "a.jsonl.gz", gzip.compress(b"\n" * 10**6) * 1000),
    text("blank lines alone", "too short: 0 tokens", "a.jsonl", b"\n \n"),
    text("no rows", "too short: 0 tokens", "a.jsonl", b""),
    text("an empty document", "too short: 1 tokens", "a.jsonl", b'{"text": ""}'),
    text("a gigabyte of zeros", "line 1 .* is longer than 16 MB", "a.txt.gz", ZEROS),
    text("a row of them", "line 1 .* is longer than 16 MB", "a.jsonl.gz", ZEROS),
    text("a long line", "line 2 .* is longer than 16 MB", "a.txt", b"one\n" + b"x" * (2**24 + 1)),
    text("a long row", "line 2 .* is longer than 16 MB", "a.jsonl", ROW + b'{"text": "' + b"x" * 2**24 + b'"}'),
    text("a torn gzip", "line 1 .* cannot be read: .* ended", "a.txt.gz", gzip.compress(b"words" * 10**6), -30),
    text("a torn gzip of rows", "line 2 .* cannot be read: .* ended", "a.jsonl.gz", gzip.compress(ROW), -9),
    text("a torn header of gzip", "line 1 .* cannot be read: .* ended", "a.txt.gz", gzip.compress(b"words"), 5),
    text("a wrong checksum", "line 1 .* cannot be read: CRC", "a.txt.gz", gzip.compress(b"words")[:-8] + bytes(8)),
    text(
        "damage in a gzip", "line 1 .* cannot be read: Error -3", "a.txt.gz", gzip.compress(b"words")[:10] + b"\xff" * 9
    ),
    text("no gzip", "line 1 .* cannot be read: Not a gzipped file", "a.txt.gz", b"words"),
    text("a folder", NO_FILE, "a.txt", Path.mkdir),
    text("a pipe", NO_FILE, "a.txt", os.mkfifo),
    text("a pipe of rows", NO_FILE, "a.jsonl.gz", os.mkfifo),
    text("a socket", NO_FILE, "a.txt", lambda path: socket.socket(socket.AF_UNIX).bind(path.name)),
    text("a device", NO_FILE, "a.txt", link("/dev/zero")),
    text("a file of /proc", "too short", "a.txt", link("/proc/self/mem")),
    text("a link to itself", "does not exist", "a.txt", link("a.txt")),
    text("a link to nothing", "does not exist", "a.txt", link("b.txt")),
    text("another ending", "ends in '.json'; expected .txt, .txt.gz, .jsonl or .jsonl.gz", "a.json", ROW),
    text("an ending in capitals", "ends in '.TXT'; expected .txt", "a.TXT", b"words"),
    text("gz alone", "ends in '.gz'; expected .txt", "a.gz", gzip.compress(b"words")),
    Case(
        "a name of 300 characters", nothing, f"trace pocket/gpt2-0.1m --text {'a' * 300}.txt", "'a{300}.txt' does not"
    ),
    Case(
        "blocks without end", nothing, f"trace pocket/gpt2-0.1m --block 32 --blocks {10**30}", "at most 1,073,741,824"
    ),
    Case("blocks beyond memory", nothing, f"latency pocket/gpt2-0.1m --batch {10**12}", "at most 1,073,741,824"),
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
