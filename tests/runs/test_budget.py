"""Time before a run: the blocks that fit into some minutes, and what a run would measure."""

import re

import pytest

from outliers import Cells, UserError, run
from outliers.runs import budget
from outliers.runs.forecast import FreeBytes, Need
from outliers.runs.rows import read_rows
from tests.typed import SMALL, call

MODEL = "pocket/gpt2-0.1m"


class Machine:
    """A machine with a clock of its own, on which a run takes so many seconds, and so many for each block."""

    def __init__(self, once: float, each: float, load: float = 0.0):
        self.now, self.once, self.each, self.load, self.tried = 0.0, once, each, load, []

    def monotonic(self) -> float:
        return self.now

    def measure(self, spec: Cells) -> None:
        self.tried.append(spec.blocks)
        self.now += self.once + self.each * spec.blocks + (self.load if len(self.tried) == 1 else 0)


def fitted(monkeypatch, tmp_path, machine: Machine, force: bool = False, **fields) -> Cells:
    monkeypatch.setattr(budget, "time", machine)
    spec = Cells(models=[MODEL], block=16, **fields)
    return budget.fit_blocks(spec, tmp_path, force, machine.measure)


@pytest.mark.parametrize(("once", "each", "load"), [(0, 1, 0), (2, 0.5, 5), (0.2, 0.05, 1), (1, 8, 5)])
def test_blocks_fill_the_minutes_and_no_more(monkeypatch, tmp_path, once, each, load):
    machine = Machine(once, each, load)
    spec = fitted(monkeypatch, tmp_path, machine, minutes=1)
    machine.measure(spec)
    assert 30 < machine.now <= 60
    assert machine.tried[:-1] == [1, 2, 4][: len(machine.tried) - 1]


def test_one_block_is_measured_where_none_fits(monkeypatch, tmp_path):
    machine = Machine(100, 50)
    assert fitted(monkeypatch, tmp_path, machine, minutes=1).blocks == 1
    assert machine.tried == [1]


def test_no_more_blocks_than_are_named_or_the_text_has(monkeypatch, tmp_path):
    assert fitted(monkeypatch, tmp_path, Machine(0, 0.01), minutes=1, blocks=7).blocks == 7
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h " * 40)
    blocks = fitted(monkeypatch, tmp_path, Machine(0, 0.01), minutes=1, text=str(text)).blocks
    run(Cells(models=[MODEL], text=str(text), block=16, blocks=blocks), tmp_path / "all")
    with pytest.raises(UserError, match="too short"):
        run(Cells(models=[MODEL], text=str(text), block=16, blocks=blocks + 1), tmp_path / "more")


def test_rows_say_the_minutes_and_a_second_run_takes_their_blocks(tmp_path, caplog, monkeypatch):
    spec = Cells(models=[MODEL], block=16, minutes=0.2, blocks=6, metrics=["perplexity"])
    with caplog.at_level("INFO", "outliers"):
        rows = run(spec, tmp_path)
    (row,) = read_rows(tmp_path)
    assert (row.run["minutes"], row.request["subject"]["blocks"]) == (0.2, rows[0]["blocks"])
    assert f"{rows[0]['blocks']} blocks in 0.2 min" in caplog.messages
    assert run(spec, tmp_path) == rows, "with the time of the first one"
    assert len(read_rows(tmp_path)) == 1
    machine = Machine(0, 1)
    fitted(monkeypatch, tmp_path, machine, force=True, minutes=0.2, blocks=6, metrics=["perplexity"])
    assert machine.tried, "unless all is measured again"


def test_a_dry_run_says_what_would_be_measured(monkeypatch, calls_of, capsys, tmp_path):
    out = tmp_path / "out"
    loaded = calls_of("outliers.subjects.model_cache.load_model")
    said = call(monkeypatch, capsys, *SMALL, "--dry-run", "--out", out)
    assert (said[0], said[2]) == (0, "") and not out.exists() and not loaded
    *what, there, time, memory = said[1].splitlines()
    assert what[1].strip() == f"{MODEL} on sample, 2 blocks of 64 tokens: perplexity under fp32, absmax"
    assert there == "0 of 2 cells have rows."
    assert re.fullmatch(r"All of it takes about .* at the present load\.", time)
    assert re.fullmatch(rf"{MODEL} needs \d+ MB of memory, of which .* are free\.", memory)


def test_a_dry_run_counts_the_rows_that_are_there(monkeypatch, capsys, tmp_path):
    call(monkeypatch, capsys, *SMALL, "--out", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    said = call(monkeypatch, capsys, *SMALL, "--scheme", "llm.int8", "--dry-run", "--out", tmp_path)[1]
    assert "2 of 3 cells have rows." in said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_preview_counts_the_memory_of_the_gpu_that_is_named():
    need, room = Need(MODEL, 10**6, 0, 0, 0), FreeBytes(memory=10**9, gpus=2 * 10**9)
    assert "of GPU memory, of which 1.0 GB are free" in budget._memory(need, room, "cuda:1")
    assert "of GPU memory, of which 2.0 GB are free" in budget._memory(need, room, "auto")
