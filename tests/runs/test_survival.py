"""Runs that are interrupted, killed, out of disk, doubled, or whose checkpoint changes: what is finished stays."""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from outliers import Sweep, UserError, sweep
from outliers.files import LOCK, OWNER, locked, write_whole
from outliers.models.load import load_model, weights_hash
from outliers.models.names import POCKET
from outliers.runs.frame import records_in as read_rows
from outliers.runs.rows import Rows
from outliers.show.value import PAIRED
from tests.conftest import a_row, lasting, names
from tests.small_models import alter_weights
from tests.typed import call, refused

MODEL = "pocket/gpt2-0.1m"
SCHEMES = ["fp32", "absmax", "absmax-vector", "llm.int8"]
FIELDS = {"name": "small", "models": [MODEL, "pocket/gpt2-0.5m"], "schemes": SCHEMES, "block": 64, "blocks": 2}
ARGUMENTS = ["--model", MODEL, "--block", "64", "--blocks", "2", *(f"--scheme={scheme}" for scheme in SCHEMES)]


@pytest.fixture(autouse=True)
def usual_interrupt():
    """Ctrl-C as on a terminal, also where the tests run in the background, which ignores it, and SIGTERM as in a new
    process, also where Ray began in this one; no run may change them."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == usual


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in the runs that are killed: a fork has no more than the thread that made it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def want(one_thread, tmp_path_factory) -> list[dict]:
    """The rows of an undisturbed run."""
    return lasting(sweep(Sweep(**FIELDS), tmp_path_factory.mktemp("undisturbed")))


# Ctrl-C


RESIDENT = "outliers.metrics.states._resident"  # measures a row


@pytest.fixture
def before_call(calls_of) -> Callable[[str, int, Callable[[], object]], None]:
    """A function that does something before the n-th call of another."""
    return lambda function, at, act: calls_of(function, lambda calls: act() if len(calls) == at else None)


def press(number: int = signal.SIGINT, times: int = 1) -> None:
    """Press Ctrl-C so many times, or send another signal."""
    for _ in range(times):
        signal.raise_signal(number)


@pytest.mark.parametrize(
    ("times", "number", "finished"), [(1, signal.SIGINT, 3), (2, signal.SIGINT, 2), (1, signal.SIGTERM, 3)]
)
def test_ctrl_c_finishes_the_row_and_says_how_to_go_on(
    monkeypatch, capsys, tmp_path, before_call, want, times, number, finished
):
    before_call(RESIDENT, 3, lambda: press(number, times))  # in the middle of a row
    code, out, err = call(monkeypatch, capsys, *ARGUMENTS, "--out", tmp_path)
    assert (code, out) == (130, "")
    said = f"interrupted: {finished} finished rows in '{tmp_path}'; run the same command again to go on\n"
    assert err == said
    assert names(tmp_path) == {"rows.jsonl"}
    kept = read_rows(tmp_path)
    assert len(kept) == finished
    code, _, err = call(monkeypatch, capsys, *ARGUMENTS, "--out", tmp_path)
    assert (code, err) == (0, "")
    rows = read_rows(tmp_path)
    assert rows[:finished] == kept, "what was finished was not measured again"
    assert [row["value"] for row in rows] == [row["value"] for row in want[:4]]


def test_ctrl_c_where_nothing_is_missing_or_finished(before_call, tmp_path):
    with pytest.raises(KeyboardInterrupt, match=r"^0 finished rows in"), Rows(tmp_path / "none"):
        signal.raise_signal(signal.SIGINT)
    assert not any(tmp_path.iterdir())
    rows = sweep(Sweep(**FIELDS), tmp_path)
    before_call("outliers.subjects.model_cache.load_model", 1, press)
    with pytest.raises(KeyboardInterrupt, match=r"^8 finished rows in"):
        sweep(Sweep(**FIELDS), tmp_path)
    assert read_rows(tmp_path) == rows


def test_ctrl_c_with_force_and_before_a_run(monkeypatch, capsys, tmp_path, before_call):
    before_call(RESIDENT, 1, press)
    _, _, err = call(monkeypatch, capsys, *ARGUMENTS, "--out", tmp_path, "--force")
    assert err == f"interrupted: 1 finished row in '{tmp_path}'; run the same command without --force to go on\n"
    before_call("outliers.models.load.read_config", 1, press)
    code, _, err = call(monkeypatch, capsys, *ARGUMENTS, "--out", tmp_path / "none")
    assert (code, err) == (130, "interrupted; run the same command again to go on\n")
    assert not (tmp_path / "none").exists()


def test_other_uses_of_ctrl_c_are_left_alone(tmp_path):
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Rows(tmp_path):
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, ignored)
    done = []
    thread = threading.Thread(target=lambda: done.append(Rows(tmp_path / "a").__enter__().__exit__(None, None, None)))
    thread.start()
    thread.join()
    assert done == [None], "outside of the main thread, where no handler can be set"


# SIGKILL


def sweep_and_die(folder: Path, number: int, part: int) -> None:
    """Measure until this process is killed at the n-th write of rows: before it, in its middle, or after it."""
    add, written = Rows.add, []

    def counted(rows: Rows, *new) -> None:
        written.append(new)
        if len(written) < number:
            add(rows, *new)
            return
        content = b"".join(row.line + b"\n" for row in new)
        with open(rows.path, "ab") as file:
            file.write(content[: len(content) * part // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Rows.add = counted
    sweep(Sweep(**FIELDS), folder)


def apart(rows: list[dict]) -> list[dict]:
    """Rows without the errors of their differences, which are known where there are others to compare with."""
    return [{field: value for field, value in row.items() if field not in PAIRED} for row in rows]


@pytest.mark.nightly("outliers/runs/", "outliers/files.py")
@pytest.mark.parametrize(("number", "part"), [(1, 0), (1, 1), (1, 2), (5, 1), (8, 1), (8, 2)])
def test_killed_at_any_write(tmp_path, want, number, part):
    child = get_context("fork").Process(target=sweep_and_die, args=(tmp_path, number, part))
    child.start()
    child.join(600)
    assert child.exitcode == -signal.SIGKILL
    assert {LOCK, OWNER} < names(tmp_path)
    kept = apart(read_rows(tmp_path))
    assert len(kept) == (number if part == 2 else number - 1)
    assert lasting(kept) == apart(want)[: len(kept)]
    rows = sweep(Sweep(**FIELDS), tmp_path)
    assert apart(rows)[: len(kept)] == kept, "no finished row was measured again"
    assert lasting(rows) == want
    assert read_rows(tmp_path) == rows
    assert names(tmp_path) - {"rows.jsonl.torn"} == {"rows.jsonl"}


def test_what_a_kill_left_is_no_row(tmp_path, want):
    sweep(Sweep(**FIELDS), tmp_path)
    (tmp_path / ".rows.jsonl.0123abcd.part").write_text('{"model"')
    (tmp_path / ".rows.jsonl.4567abcd.part").mkdir()
    (tmp_path / LOCK).write_text("process 1 on nowhere since long ago (none)\n")
    assert lasting(sweep(Sweep(**FIELDS), tmp_path)) == want
    assert names(tmp_path) == {"rows.jsonl", ".rows.jsonl.4567abcd.part"}, "a folder is not of a run"


# Two runs


def test_two_runs_into_one_folder_do_not_mix(monkeypatch, capsys, tmp_path):
    with Rows(tmp_path) as row_file:
        err = refused(monkeypatch, capsys, *ARGUMENTS, "--out", tmp_path)
        owner = rf"process {os.getpid()} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \(.*\)"
        said = rf"'{tmp_path}' is in use by {owner}; wait until it ends, or choose another folder with --out\n"
        assert re.fullmatch(said, err)
        assert read_rows(tmp_path) == [], "reading needs no lock"
        row_file.add(a_row("a"))
    assert names(tmp_path) == {"rows.jsonl"}
    assert [row["model"] for row in read_rows(tmp_path)] == ["a"]


@pytest.mark.nightly("outliers/runs/", "outliers/files.py")
def test_many_that_want_the_same_folder_have_it_one_after_the_other(tmp_path):
    inside, most = [], []

    def want_it(_) -> None:
        for _ in range(100):
            with contextlib.suppress(UserError), locked(tmp_path / "out"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(want_it, range(4)))
    assert max(most) == 1
    assert not (tmp_path / "out").exists()


# A full disk


@pytest.fixture
def small_disk(tmp_path):
    """A function that gives a folder on a disk of so many bytes."""
    mounted = []

    def mount(size: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]).returncode:
            pytest.skip("needs to mount a small disk, as root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def full(folder: Path) -> str:
    """What is said of a full disk."""
    return f"error: cannot write to '{folder}' (No space left on device); choose another folder with --out\n"


@pytest.mark.nightly("outliers/runs/", "outliers/files.py")
def test_rows_survive_a_full_disk(monkeypatch, capsys, small_disk):
    """Also one on which they fit, and tables and figures do not."""
    disk = small_disk("8k")  # room for the lock and a page of rows
    out = disk / "out"
    every = [*ARGUMENTS, *(f"--scheme={name}" for name in ("zeropoint", "absmax-row", "zeropoint-vector"))]
    assert call(monkeypatch, capsys, *every, "--out", out) == (2, "", full(out))
    assert names(out) == {"rows.jsonl"}
    finished = read_rows(out)
    assert 0 < len(finished) < 7
    subprocess.run(["mount", "-o", "remount,size=64k", disk], check=True)
    assert call(monkeypatch, capsys, *every, "--out", out) == (2, "", full(out))
    assert (out / "table1.csv").exists()
    assert not (out / "report.html").exists()
    assert not list(out.glob(".*")), "no part of a file is left"
    rows = read_rows(out)
    assert rows[: len(finished)] == finished
    assert len(rows) == 7
    subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
    code, _, err = call(monkeypatch, capsys, *every, "--out", out)
    assert (code, err) == (0, "")
    assert read_rows(out) == rows


STREAMED = [*ARGUMENTS[:4], "--blocks=20", "--scheme=fp32", "--stream", "--memory", "1000"]


def unsupported(*_):
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.mark.slow
@pytest.mark.parametrize("reserve", [os.posix_fallocate, unsupported, None])
def test_hidden_states_that_do_not_fit_on_their_disk(monkeypatch, capsys, small_disk, tmp_path, reserve):
    """Without their space reserved, the first page that finds none kills this process by SIGBUS."""
    if reserve:
        monkeypatch.setattr(os, "posix_fallocate", reserve)
    else:
        monkeypatch.delattr(os, "posix_fallocate")  # macOS
    disk = small_disk("64k")
    monkeypatch.setenv("TMPDIR", str(disk))
    code, _, err = call(monkeypatch, capsys, *STREAMED, "--out", tmp_path / "out")
    assert code == 1
    assert (
        f"no room for 0.1 MB of hidden states in '{disk}' (No space left on device); set TMPDIR to a folder "
        "on a disk with room, take fewer --blocks, or hold more of them in memory with a larger --memory\n"
    ) in err
    assert not any(disk.iterdir())
    subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
    code, _, err = call(monkeypatch, capsys, *STREAMED, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert not any(disk.iterdir()), "the file has no name"
    assert os.statvfs(disk).f_bfree == os.statvfs(disk).f_blocks, "and is gone"


def test_a_folder_of_temporary_files_that_is_not_there(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    code, _, err = call(monkeypatch, capsys, *STREAMED, "--out", tmp_path / "out")
    assert code == 1
    assert re.search(r"^failed: .*: no room for .* in '.*/none' \(No such file or directory\); set TMPDIR ", err)


@pytest.mark.parametrize("measuring", ["interrupt.finishing()", "contextlib.nullcontext()"])
def test_sigterm_ends_a_process_before_a_scheduler_kills_it(measuring):
    """While a cell is measured, and before, where a library may swallow what Ctrl-C raises."""
    program = f"""
import contextlib, os, signal, time
from outliers.terminal import interrupt
interrupt.SECONDS = 0.5
with interrupt.ending_alike(), {measuring}:
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == (
        "interrupted: what was being measured is lost, finished rows are kept; run the same command again to go on\n"
    )


# A checkpoint that changes


def own(tmp_path: Path) -> Path:
    """A checkpoint with weights as they are in memory, so that they are mapped and not converted."""
    folder = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")
    return alter_weights(folder, lambda tensors: tensors.update({name: x.float() for name, x in tensors.items()}))


def truncate(file: Path) -> None:
    os.truncate(file, 1000)


def alter(file: Path) -> None:
    """Write into the file without changing its length."""
    with open(file, "r+b") as opened:
        opened.seek(-400, os.SEEK_END)
        opened.write(b"\0" * 400)


def replace(file: Path) -> None:
    write_whole(file, file.read_bytes())


@pytest.mark.parametrize("change", [truncate, alter, replace, Path.unlink])
def test_a_checkpoint_that_changes_under_a_sweep_is_named(monkeypatch, capsys, tmp_path, before_call, change):
    model, out = own(tmp_path), tmp_path / "out"
    file = model / "model.safetensors"
    before_call(RESIDENT, 3, lambda: change(file))
    code, _, err = call(monkeypatch, capsys, "--model", model, *ARGUMENTS[2:], "--out", out)
    assert code == 1
    assert f"the weights of '{model}' changed while they were measured ('{file}'); " in err
    assert [row["scheme"] for row in read_rows(out) if "failed" not in row] == SCHEMES[:2]


@pytest.mark.parametrize("change", [truncate, alter])
def test_weights_in_memory_are_not_those_of_a_changed_file(tmp_path, change):
    """Without a copy, a truncated file kills this process by SIGBUS, and an altered one changes the weights."""
    folder = own(tmp_path)
    model = load_model(str(folder))
    before = weights_hash(model)
    change(folder / "model.safetensors")
    assert weights_hash(model) == before
    assert model.lm_head.weight is model.transformer.wte.weight
