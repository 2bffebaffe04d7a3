"""Standard output of any encoding, and one that takes nothing."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from outliers.terminal.printing import is_line, printing

OVERVIEW = [sys.executable, "-m", "outliers"]  # the quickest of all commands


def test_an_encoding_that_lacks_signs():
    printed = io.TextIOWrapper(io.BytesIO(), "ascii")
    with redirect_stdout(printed), printing():
        print("|x| ≥ 6")
    printed.seek(0)
    assert printed.read() == "|x| \\u2265 6\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk(unbuffered):
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(OVERVIEW, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == ("error: cannot write to standard output (No space left on device); print to another file\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(OVERVIEW, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_have_their_numbers_for_themselves(closed, tmp_path):
    """No file that is opened later may be taken for standard output."""
    program = (
        "import os; from outliers.terminal.printing import printing\n"
        f"with printing(), open({str(tmp_path / 'file')!r}, 'w') as file: print('said'); os.write(1, b'said'); "
        "os.write(2, b'said'); file.write('kept')"
    )
    command = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("gemäß 模型 👍", True), ("a\nb", False), ("\x1b[2J", False), ("\ud800", False), ("a\u2028b", False)],
)
def test_what_is_a_line(text, is_one):
    assert is_line(text) == is_one
