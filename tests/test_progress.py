"""How far a run is, where no terminal shows a bar; and what is left of it, with a clock of the tests."""

import io
import logging
import os
import re
import sys
import termios
import threading
import time

import pytest
import torch

from outliers import Cells, run
from outliers.metrics import states
from outliers.metrics.latency import latency
from outliers.metrics.records import Perplexity, ZeroShot
from outliers.runs.planner import Planner
from outliers.runs.run import foreseeing, of_all
from outliers.subjects.causal import Causal
from outliers.subjects.cell import Cell
from outliers.terminal import progress as module
from outliers.terminal.progress import Progress, Steps, over
from outliers.variants.quantized import EXACT
from tests.conftest import make_model
from tests.test_commands import SMALL, call

MODEL = "pocket/gpt2-0.1m"
COUNTS = [("one", 2), ("two", 3)]  # experiments, with their blocks
TOTALS = [2, 5]  # of the first, of both


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_is_left_follows_from_what_finished_steps_took(clock):
    with Progress(10, clock=clock) as bar:
        bar.set_description("m, fp32")
        assert bar.left() is None
        clock.now += 90
        assert bar.line() == "m, fp32: 0 of 10 blocks, 0%, since 2 min"
        clock.now += 10
        bar.update(2)
        assert bar.left() == (400, 400)
        assert bar.line() == "m, fp32: 2 of 10 blocks, 20%, about 7 min left"


def test_what_is_left_follows_the_later_half(clock):
    """Of eight steps the first four take a second each, and the others nine."""
    with Progress(8, clock=clock) as bar:
        for _ in range(4):
            clock.now += 1
            bar.update()
        assert bar.left() == (4, 4)
        for left in ((1 + 9) / 2 * 3, (1 + 9 + 9) / 3 * 2):
            clock.now += 9
            bar.update()
            assert bar.left() == pytest.approx((left, left))
        clock.now += 9
        bar.update()
        assert bar.left() == (9, 9)
        clock.now += 4
        assert bar.left() == (5, 5)
        clock.now += 100
        assert bar.left() == (0, 0)


def test_workers_finish_several_steps_at_once(clock):
    with Progress(12, clock=clock) as bar:
        clock.now += 100
        bar.spread(3)
        clock.now += 30
        for left in (11 * 10, 10 * 10, 9 * 10):
            bar.update()
            assert bar.left() == pytest.approx((left, left))
        clock.now += 6
        for _ in range(3):
            bar.update()
        assert bar.left() == pytest.approx((6 * 2, 6 * 2))


def test_a_run_says_once_how_long_it_takes(clock, caplog, monkeypatch):
    monkeypatch.setattr(module, "SHORT", 2)
    with caplog.at_level(logging.INFO, "outliers"), Progress(200, description="m, fp32", clock=clock) as bar:
        for _ in range(3):
            clock.now += 1.1
            with Progress(5, clock=clock) as inner:
                inner.update()
            bar.update()
    assert caplog.messages == ["about 4 min left"]


@pytest.mark.parametrize(
    ("total", "seconds", "said"),
    [
        (1000, (1, 1, 1, 30, *[1] * 40), ["about 17 min left"]),  # of which the fourth is as long as thirty others
        (20, (10, 10, 10, 12, 14, 30, 40, 10), ["about 3 min left", "about 4 min left"]),  # anew, if wrong by a third
        (6, [0.45] * 6, []),  # where less than two seconds are left
    ],
)
def test_what_a_run_says_as_its_steps_end(total, seconds, said, clock, caplog, monkeypatch):
    monkeypatch.setattr(module, "SHORT", 2)
    with caplog.at_level(logging.INFO, "outliers"), Progress(total, clock=clock) as bar:
        for step in seconds:
            clock.now += step
            bar.update()
    assert caplog.messages == said


def test_steps_of_a_larger_model_take_longer(clock):
    """As long as it has weights, and 1.5 million more."""
    with Progress(0, clock=clock) as bar:
        bar.expect(Steps(4, 10**6))
        bar.expect(Steps(4, 10**8))
        bar.enter("small", Steps(4, 10**6))
        for _ in range(4):
            clock.now += 1
            bar.update()
        assert bar.left() == pytest.approx(2 * (4 * 101.5 / 2.5,))
        assert bar.line() == "small: 4 of 8 blocks, 50%, about 3 min left"
        bar.set_description("a" * 70)
        assert bar.line() == f"{'a' * 57}…: 4 of 8 blocks, 50%, about 3 min left"
        bar.enter("large", Steps(4, 10**8))
        clock.now += 150
        bar.see(0.5)
        clock.now += 150
        bar.update()
        for _ in range(2):
            clock.now += 300
            bar.update()
        assert bar.left() == pytest.approx((300, 300)), "by its own steps"


def test_steps_of_a_kind_that_was_not_seen_may_take_longer(clock):
    """Up to one and a half times as long."""
    with Progress(0, clock=clock) as bar:
        for kind in ("fp32", "absmax"):
            bar.expect(Steps(4, kind=kind))
        bar.enter("m, fp32", Steps(4, kind="fp32"))
        clock.now += 20
        bar.update(2)
        assert bar.left() == pytest.approx((60, 2 * 10 + 4 * 15))
        assert bar.line() == "m, fp32: 2 of 8 blocks, 25%, about 60 to 80 s left"
        clock.now += 20
        bar.update(2)
        bar.enter("m, absmax", Steps(4, kind="absmax"))
        assert bar.left() == pytest.approx((40, 40))


def test_blocks_alone_take_as_long_as_a_model_is_large():
    planner = Planner(None, None, None, "")
    planner.sizes = {MODEL: 118_944}
    subject = Causal(MODEL, None, Cells(models=[MODEL]))
    assert planner.steps([Cell(subject, EXACT, Perplexity())]).size == 118_944
    assert planner.steps([Cell(subject, EXACT, ZeroShot())]).size == 0


def test_each_way_of_measuring_a_variant_is_a_kind(monkeypatch, tmp_path):
    kinds, expect = [], Progress.expect
    monkeypatch.setattr(Progress, "expect", lambda bar, steps: (kinds.append(steps.kind), expect(bar, steps)))
    run(Cells(models=[MODEL], metrics=["perplexity", "top1", "range"], block=16, blocks=1), tmp_path)
    assert len(set(kinds)) == len(kinds) == 3


def test_stages_that_values_decide_are_foreseen(clock, caplog, monkeypatch):
    monkeypatch.setattr(module, "SHORT", 2)
    with caplog.at_level(logging.INFO, "outliers"), Progress(0, clock=clock) as bar:
        bar.expect(Steps(4))
        bar.foresee(Steps(8, kind="later"))
        for _ in range(4):
            clock.now += 10
            bar.update()
        assert (bar.total, bar.left()) == (12, pytest.approx((80, 80)))
        bar.expect(Steps(6))
        bar.foresee(Steps(0, kind="later"))
        assert (bar.total, bar.left()) == (10, pytest.approx((60, 60)))
    assert caplog.messages == ["about 2 min left"], "once"


def test_steps_of_an_earlier_run_took_no_time(clock):
    with Progress(10, clock=clock) as bar:
        bar.skip(Steps(6))
        assert bar.left() is None
        clock.now += 20
        bar.update(2)
        assert bar.left() == pytest.approx((20, 20))
        assert "8 of 10 blocks, 80%" in bar.line()


def test_a_long_step_is_seen_from_inside(clock):
    with Progress(2, "task", clock=clock) as bar:
        clock.now += 30
        bar.see(0.5)
        assert bar.left() == pytest.approx((90, 90))
        assert bar.line() == "0 of 2 tasks, 25%, about 2 min left"
        clock.now += 30
        bar.update()
        assert bar.line() == "1 of 2 tasks, 50%, about 60 s left"


def test_layers_move_steps_that_are_made_at_once(clock):
    """Two passes of ten blocks each through a model that is streamed."""
    with Progress(20, clock=clock) as bar:
        for done in (0, 10):
            bar.begin(10)
            for layer in over(range(5), "layer", ""):
                assert bar.n + bar.inside == done + 2 * layer
                clock.now += 3
        assert bar.left() is None
        bar.update(10)
        assert bar.n == 20


def test_layers_within_a_measurement_of_no_steps_say_nothing_of_those_that_come(clock):
    with Progress(0, clock=clock) as bar:
        bar.expect(Steps(10, 10**8))
        bar.enter("m, its weights", Steps())
        for _ in over(range(5), "layer", ""):
            clock.now += 2
        assert bar.left() is None
        bar.enter("m, fp32", Steps(10, 10**8))
        clock.now += 2
        bar.update(5)
        assert bar.left() == pytest.approx((12, 12)), "all that it took so far, for as many again"


def test_a_total_that_grows_and_one_of_nothing(clock):
    with Progress(0, clock=clock) as bar:
        clock.now += 10
        assert bar.line() == "0 of 0 blocks, 0%, since 10 s"
        bar.expect(Steps(4))
        bar.update()
        assert bar.left() == (30, 30)


def test_lines_come_also_while_no_step_ends(monkeypatch, caplog):
    monkeypatch.setattr(module, "SECONDS", 0.02)
    with caplog.at_level(logging.INFO, "outliers"), Progress(3, description="m, fp32") as bar:
        bar.update()
        for _ in over(range(2), "layer", "m, layers"):
            time.sleep(0.1)
    lines = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"m, fp32: 1 of 3 blocks, 33%, about .*left; m, layers: 0 of 2 layers, 0%, since 1 s", lines[0])
    assert any("1 of 2 layers, 50%, about 1 s left" in line for line in lines)
    time.sleep(0.05)
    assert len(caplog.records) == len(lines), "none after the end"
    assert not module._open


def test_a_terminal_has_a_bar_and_no_lines(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(module, "SECONDS", 0.01)
    threads = threading.active_count()
    with Progress(4, description="m") as bar:
        bar.skip(Steps(2))
        bar.update()
        bar.refresh()
        assert threading.active_count() == threads
    assert "m:  75%" in sys.stderr.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_long_label_is_cut_and_the_bar_is_not(monkeypatch, columns):
    master, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    with open(master, "rb"), open(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Progress(4000, description="pocket/gpt2-5.9m, llm.int8-zeropoint, perplexity, " * 2) as bar:
            bar.update(1000)
            line = str(bar)
    assert len(line) < columns
    assert re.fullmatch(r"pocket/gpt2-5.9m.*…:  25%\|█[^|]+\| 1000/4000 \[00:00<00:\d\d\]", line)


def test_a_command_says_a_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(module, "SECONDS", 0.2)
    usual = states._resident
    monkeypatch.setattr(states, "_resident", lambda *given: time.sleep(0.3) or usual(*given))
    code, _, err = call(monkeypatch, capsys, *SMALL, "--out", tmp_path)
    lines = err.splitlines()
    assert code == 0
    first = "pocket/gpt2-0.1m, fp32, perplexity, blocks 0 to 1: 0 of 4 blocks, 0%, since "
    assert any(line.startswith(first) for line in lines)
    assert any(
        re.match(r"pocket/gpt2-0.1m, absmax, perplexity, blocks 0 to 1: 2 of 4 blocks, 50%, about \d+ s left", line)
        for line in lines
    )


@pytest.mark.parametrize("several", [1, 2])
def test_several_experiments_have_one_bar(monkeypatch, tmp_path, several):
    """It expects the steps of all from the start, those of an experiment as they are once it runs."""
    specs = [Cells(name=name, models=[MODEL], block=16, blocks=blocks) for name, blocks in COUNTS[:several]]
    total = TOTALS[several - 1]
    with foreseeing(specs) as bar:
        assert bar.total == total
        bar.foresee(bar.foreseen[of_all(specs[0])]._replace(count=9))
        for number, spec in enumerate(specs):
            assert len(run(spec, tmp_path / str(number), bar=bar)) == 1
            assert (bar.total, bar.n) == (total, TOTALS[number])
    assert not module._open


def test_generations_say_how_far_they_are():
    seen = []
    latency(make_model("gpt2"), torch.zeros(1, 4, dtype=torch.int64), 3, 2, seen.append)
    assert seen == [passes / 12 for passes in range(1, 13)]
