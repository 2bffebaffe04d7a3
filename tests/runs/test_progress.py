"""How far a run is, where no terminal shows a bar; and what is left of it, with a clock of the tests."""

import logging
import math
import os
import re
import sys
import termios
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from random import Random

import pytest
import torch

from outliers import (
    Cells,
    ablate,
    calibrate,
    damage,
    masks,
    origins,
    perplexities,
    perplexity,
    readers,
    run,
    trace,
    variant,
)
from outliers.metrics.latency import latency
from outliers.metrics.records import Perplexity, ZeroShotMetric
from outliers.runs.planner import Planner
from outliers.runs.run import RENDERING, of_all, rendering, shared_bar
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import BlocksWithProgress
from outliers.terminal import progress as module
from outliers.terminal.forecaster import Forecaster, Left, Mark, Steps
from outliers.terminal.progress import Progress, over
from outliers.variants.quantized import EXACT
from tests.small_models import make_model

MODEL = "pocket/gpt2-0.1m"
COUNTS = [("one", 2), ("two", 3)]  # experiments, with their blocks
TOTALS = [2, 5]  # of the first, of both


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def limits(constants) -> Callable[..., None]:
    """A function that sets after how many seconds a bar or a line is shown."""
    return partial(constants, module.__name__)


@pytest.fixture
def clock() -> Clock:
    return Clock()


# Kinds of steps: how many, the cost that is expected, the seconds that each takes on an idle machine, and before them.
CELLS = {
    "trace fp32": (8, 3, 3.5, 6),
    "states fp32": (8, 1, 1.0, 1),
    "states absmax": (8, 1, 1.3, 2),
    "attention fp32": (20, 1.5, 1.2, 0),
    "places absmax": (24, 1, 0.6, 1),
    "states llm.int8": (8, 1, 1.9, 2),
}


def wandering(share: float) -> float:
    """The load of a machine that others share, which changes by a factor of up to four."""
    random, level = Random(4), 0.0
    for _ in range(int(200 * share)):
        level = 0.9 * level + random.gauss(0, 0.2)
    return 4 * math.exp(level)


# Loads by the share of the work that is made, and the factor within which forecasts are right from a fifth of the time.
LOADS = {
    "none": (lambda share: 1, 1.5),
    "doubles midway": (lambda share: 1 + (share > 0.5), 1.5),
    "doubles early": (lambda share: 1 + (share > 0.1), 1.5),
    "halves": (lambda share: 2 - (share > 0.2), 2),  # of which nobody knew before
    "changes": (lambda share: 1 + int(10 * share) % 2, 1.5),
    "wanders": (wandering, 1.5),
}


def simulated(
    load: Callable[[float], float], clock: Clock, bar: Progress, seed: int = 0, look: Callable[[], object] = bool
) -> list[tuple[float, Left | None]]:
    """The ages of a run whose steps take times as long as a load says, each with what was forecast then.

    load: of the share of the work that is made. seed: of noise; above 0 kinds take other times than in CELLS, as
    much as those of `report look` differ from what is expected of them. look: called after each step.
    """
    random, made, forecasts = Random(seed), 0.0, []
    cells = {
        kind: (count, cost, seconds * (math.exp(random.gauss(0, 0.3)) if seed else 1), first)
        for kind, (count, cost, seconds, first) in CELLS.items()
    }
    whole = sum(count * seconds + first for count, _, seconds, first in cells.values())
    for kind, (count, cost, *_) in cells.items():
        bar.expect(Steps(count, 10**8, kind, cost))
    for kind, (count, cost, seconds, first) in cells.items():
        bar.enter(kind, Steps(count, 10**8, kind, cost))
        for number in range(count):
            usual = seconds * random.uniform(0.8, 1.2) + (first if number == 0 else 0)
            clock.now += usual * load(made / whole)
            made += usual
            bar.update()
            forecasts.append((bar.age, bar.left()))
            look()
    return forecasts[:-1]


@pytest.mark.parametrize("load", LOADS)
def test_forecasts_of_a_run_of_unequal_cells(load, clock, caplog, limits):
    """Also where another program starts midway: the range then has room for it. The bar is of the time that has passed:
    its share never falls."""
    limits(SHORT=2)
    load, factor = LOADS[load]
    shares = []
    with caplog.at_level(logging.INFO, "outliers"), Progress(clock=clock) as bar:
        forecasts = simulated(load, clock, bar, look=lambda: shares.append((bar.age, bar.share() or 0)))
        whole = bar.age
    due = [(age, left) for age, left in forecasts if age > whole / 5]
    late = [(age, left) for age, left in due if left]
    assert len(late) > max(50, 0.95 * len(due)), "few are withheld"
    assert max(abs(math.log((age + left.expected) / whole)) for age, left in late) < math.log(factor)
    held = [age + left.least <= whole <= age + left.most for age, left in late]
    assert sum(held) > 0.6 * len(held), "the range has it"
    assert sum(left.most < 8 * left.least for _, left in late) > 0.9 * len(late), "and is of use"
    assert 1 <= len(caplog.messages) <= 4, caplog.messages
    assert shares == sorted(shares)
    assert max(abs(share - age / whole) for age, share in shares if age > whole / 5) < 0.3


def test_ranges_hold_the_time_of_nine_runs_in_ten():
    """Their factors were chosen by other runs, under other loads."""
    held = []
    for load, _ in LOADS.values():
        for seed in (0, 7):
            clock = Clock()
            with Progress(clock=clock) as bar:
                forecasts = simulated(load, clock, bar, seed)
                whole = bar.age
            held += [
                age + left.least <= whole <= age + left.most for age, left in forecasts if left and age > whole / 5
            ]
    assert sum(held) > 0.9 * len(held)


def happen(bar: Progress, clock: Clock, what: str, *given) -> None:
    """Let something happen to a bar, or look at it."""
    if what == "work":  # steps, each in so many seconds
        work(bar, clock, *given)
    elif what == "wait":
        clock.now += given[0]
    elif what == "layers":  # so many, each in so many seconds
        for _ in over(range(given[0]), ""):
            clock.now += given[1]
    elif what == "left":  # seconds that are left, or none is said
        left = bar.left()
        assert (left and left.expected) == (given[0] if given[0] is None else pytest.approx(given[0]))
    elif what == "about":
        assert bar.left().expected == pytest.approx(given[0], rel=0.2)
    elif what == "range":  # how many times as much as expected may be left
        assert given[0] < bar.left().most / bar.left().expected < given[1]
    elif what == "rendering":
        with rendering(bar, "trace"):
            assert bar.line() == given[0]
    elif what in ("line", "n", "total", "inside"):
        found = getattr(bar, what)
        assert (found() if callable(found) else found) == given[0], what
    else:
        getattr(bar, what)(*given)


def work(bar: Progress, clock: Clock, *seconds: float) -> None:
    for passed in seconds:
        clock.now += passed
        bar.update()


SMALL_MODEL, LARGE_MODEL = Steps(4, 10**6), Steps(4, 10**8)
KINDS = ["states fp32", "states a", "states b", "states c", "places fp32"]
STORIES = {
    "nothing in the first seconds, and nothing of hours": (
        *(1000, ("work", 30, 0.5, 0.5, 0.5), ("left", None), ("line", "since 32 s"), ("work", 0.5), ("left", 995 / 2)),
    ),
    "a long step of a new kind says nothing of others": (
        *(0, ("expect", Steps(4, kind="trace")), ("expect", Steps(2, kind="attention"))),
        *(("expect", Steps(100, kind="states")), ("enter", "", Steps(4, kind="trace")), ("work", 1, 1, 1, 1)),
        *(("enter", "", Steps(2, kind="attention")), ("wait", 50), ("left", 150)),
    ),
    "a larger model as long as it has weights, and 1.5 million more": (
        *(0, ("expect", SMALL_MODEL), ("expect", LARGE_MODEL), ("enter", "small", SMALL_MODEL)),
        *(("work", 1, 1, 1, 1), ("left", 4 * 101.5 / 2.5), ("set_description", "a" * 70)),
        ("line", f"{'a' * 57}…: 2%, about 2 to 4 min left"),
    ),
    "kinds that were not seen by their cost, or as others of their group": (
        *(0, *(("expect", Steps(3, kind=kind, cost=1 + (kind == "places fp32"))) for kind in KINDS)),
        *(one for kind in KINDS[:3] for one in (("enter", kind, Steps(3, kind=kind)), ("work", 10, 10, 10))),
        *(("left", 3 * 10 + 3 * 20), ("range", 1.5, 2)),
    ),
    "a range too wide to be of use is not said": (
        *(0, *(("expect", Steps(100 if kind == "new" else 4, kind=kind)) for kind in ("fast", "slow", "new"))),
        *(("enter", "", Steps(4, kind="fast")), ("work", 1, 1, 1, 1), ("enter", "", Steps(4, kind="slow"))),
        *(("work", 30, 30, 30, 30), ("left", None)),
        *(("enter", "new", Steps(100, kind="new")), ("work", 5, 5, 5, 5), ("about", 96 * 5)),
    ),
    "tasks of a model, which take long, say nothing of blocks": (
        *(0, ("expect", SMALL_MODEL), ("expect", Steps(8, kind="tasks")), ("enter", "small", SMALL_MODEL)),
        *(("work", 1, 1, 1, 1), ("enter", "tasks", Steps(8, kind="tasks")), ("work", *[100] * 8)),
        *(("expect", SMALL_MODEL._replace(kind="later")), ("left", 4)),
    ),
    "what takes its time on any model": (
        *(0, ("expect", SMALL_MODEL), ("expect", RENDERING), ("enter", "m", SMALL_MODEL)),
        *(("work", 60, 60, 60, 60), ("left", RENDERING.seconds)),
        *(("rendering", "trace, tables and figures: 99%, about 2 to 4 s left"), ("n", 4 + RENDERING.count)),
    ),
    "stages that values decide are estimated": (
        *(0, ("expect", Steps(4)), ("estimate", Steps(8, kind="later")), ("work", 10, 10, 10, 10)),
        *(("total", 12), ("left", 80), ("expect", Steps(6)), ("estimate", Steps(0, kind="later"))),
        *(("total", 10), ("left", 60)),
    ),
    "steps of an earlier run took no time": (
        *(10, ("skip", Steps(6)), ("left", None), ("work", 20, 10), ("left", 20)),
    ),
    "a long step is seen from inside": (
        *(
            2,
            ("wait", 15),
            ("set_share", 0.25),
            ("wait", 15),
            ("set_share", 0.5),
            ("wait", 15),
            ("set_share", 0.75),
            ("left", 75),
        ),
        *(("work", 15), ("left", 60)),
    ),
    "layers move steps that are made at once, of two passes of a streamed model": (
        *(20, ("begin", 10), ("layers", 5, 3), ("begin", 10), ("layers", 3, 3), ("n", 10), ("left", None)),
        *(("update", 10), ("n", 20)),
    ),
    "layers of no steps say nothing of those that come": (
        *(0, ("expect", Steps(10, 10**8)), ("enter", "m, its weights", Steps()), ("layers", 5, 2), ("left", None)),
        *(("enter", "m, fp32", Steps(10, 10**8)), ("work", 2, 2, 2), ("left", 14)),
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_what_is_left(story, clock):
    total, *events = STORIES[story]
    with Progress(total, clock=clock) as bar:
        for event in events:
            happen(bar, clock, *event)


def test_layers_of_a_streamed_model_move_the_steps_of_all_blocks(clock):
    with Progress(8, clock=clock) as bar:
        assert list(BlocksWithProgress(torch.arange(4), bar, 2, streamed=True)) == [0, 1, 2, 3]
        bar.set_share(0.5)
        assert bar.n + bar.inside == 4


def test_workers_finish_several_steps_at_once(clock):
    with Progress(12, clock=clock) as bar:
        clock.now += 100
        bar.set_workers(3)
        for _ in range(2):
            work(bar, clock, 30, 0, 0)
        assert bar.left().expected == pytest.approx(60, rel=0.3)


def test_a_forecast_while_another_thread_ends_steps_of_new_kinds():
    class Growing(list):
        """Marks of which one more is made whenever they are read."""

        def __getitem__(self, place):
            read = super().__getitem__(place)
            if isinstance(place, slice):
                self.append(Mark(5.0, f"kind {len(self)}", 10**6, 5.0))
            return read

    forecaster = Forecaster()
    forecaster.expect(Steps(9, 10**6, "kind 0"))
    forecaster.marks = Growing(Mark(5.0, "kind 0", 10**6, 5.0) for _ in range(4))
    assert forecaster.left(20.0)


@pytest.mark.parametrize(
    ("total", "seconds", "said"),
    [
        (200, [1] * 8, ["about 2 to 5 min left"]),
        (40, [*[10] * 4, *[30] * 36], ["about 4 to 10 min left", "about 5 to 20 min left"]),
        (6, [0.45] * 6, []),  # where less than two seconds are left
    ],
)
def test_what_a_run_says_as_its_steps_end(total, seconds, said, clock, caplog, limits):
    """Once, and anew where it ends at another time than it said; nothing of bars within it."""
    limits(SHORT=2)
    with caplog.at_level(logging.INFO, "outliers"), Progress(total, description="m, fp32", clock=clock) as bar:
        for passed in seconds:
            work(bar, clock, passed)
            with Progress(5, clock=clock) as inner:
                inner.update()
    assert caplog.messages[:2] == said, caplog.messages


def test_blocks_alone_take_as_long_as_a_model_is_large():
    planner = Planner(None, None, None, "")
    planner.sizes = {MODEL: 118_944}
    subject = ModelWithText(MODEL, None, Cells(models=[MODEL]))
    assert planner.steps([Cell(subject, EXACT, Perplexity())]).size == 118_944
    assert planner.steps([Cell(subject, EXACT, ZeroShotMetric())]).size == 0


def test_each_way_of_measuring_a_variant_is_a_kind(calls_of, tmp_path):
    expected = calls_of("outliers.terminal.progress.Progress.expect")
    run(Cells(models=[MODEL], metrics=["perplexity", "top1", "range"], block=16, blocks=1), tmp_path)
    assert len({steps.kind for _, steps in expected}) == len(expected) == 3


def test_lines_come_also_while_no_step_ends(limits, caplog):
    limits(SECONDS=0.02)
    with caplog.at_level(logging.INFO, "outliers"), Progress(3, description="m, fp32") as bar:
        bar.update()
        for _ in over(range(2), "m, layers"):
            time.sleep(0.1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "m, fp32: since 1 s; m, layers: since 1 s"
    time.sleep(0.05)
    assert len(caplog.records) == len(lines), "none after the end"
    assert not module._open


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_long_label_is_cut_and_the_bar_is_not(columns):
    master, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    with open(master, "rb"), open(terminal, "w") as stderr, redirect_stderr(stderr):
        clock = Clock()
        with Progress(4, description="pocket/gpt2-5.9m, llm.int8-zeropoint, perplexity, " * 2, clock=clock) as bar:
            begun = str(bar)
            work(bar, clock, 30, 30)
            line = str(bar)
    assert re.fullmatch(r"pocket.*…: 00:00", begun)
    assert len(line) < columns
    assert re.fullmatch(r"pocket.*…:  50%\|█[^|]+\| 01:00, about 40 s to 2 min left", line)


@pytest.mark.parametrize("several", [1, 2])
def test_several_experiments_have_one_bar(monkeypatch, tmp_path, several):
    """It expects the steps of all from the start, those of an experiment as they are once it runs."""
    specs = [Cells(name=name, models=[MODEL], block=16, blocks=blocks) for name, blocks in COUNTS[:several]]
    total = TOTALS[several - 1]
    with shared_bar(specs) as bar:
        assert bar.total == total
        bar.estimate(bar.estimates[of_all(specs[0])]._replace(count=9))
        for number, spec in enumerate(specs):
            assert len(run(spec, tmp_path / str(number), bar=bar)) == 1
            assert (bar.total, bar.n) == (total, TOTALS[number])
    assert not module._open


def test_generations_say_how_far_they_are():
    seen = []
    latency(make_model("gpt2"), torch.zeros(1, 4, dtype=torch.int64), 3, 2, seen.append)
    assert seen == [passes / 12 for passes in range(1, 13)]


BLOCKS = torch.arange(60).view(6, 10)
CALLS = {  # functions of Python, each with the passes that it makes of six blocks, or as much time in other steps
    "perplexity": (lambda model, **shown: perplexity(model, BLOCKS, **shown), 6),
    "perplexities": (lambda model, **shown: perplexities(model, BLOCKS, [EXACT, variant("absmax")], **shown), 12),
    "trace": (lambda model, **shown: trace(model, BLOCKS, alpha=0.1, **shown), 6),
    "masks": (lambda model, **shown: masks(model, BLOCKS, **shown), 12),
    "calibrate": (lambda model, **shown: calibrate(model, BLOCKS, **shown), 6),
    "origins": (lambda model, **shown: origins(model, BLOCKS, [1], **shown), 6),
    "ablate": (lambda model, **shown: ablate(model, BLOCKS, [1], **shown), 6 * (1 + 12 + 1 + 12 // 3)),
    "damage": (lambda model, **shown: damage(model, BLOCKS, "absmax", by=["model", "role", "layer"], **shown), 72),
    "readers": (lambda model, **shown: readers(model, BLOCKS, [1], places=["q"], controls=2, **shown), 42),
}


@pytest.mark.parametrize("called", CALLS)
def test_a_function_of_python_shows_a_bar(called, limits, calls_of, capsys):
    """One of all its passes, which are known before they are made; none where nobody would see it."""
    function, passes = CALLS[called]
    model, seen = make_model("gpt2"), []
    limits(DELAY=0)
    leave = "outliers.terminal.progress.Progress.__exit__"
    calls_of(leave, lambda calls: seen.append((calls[-1][0].desc, calls[-1][0].n, calls[-1][0].total)))
    function(model)
    assert (seen, capsys.readouterr().err) == ([], "")
    function(model, progress=True)
    assert {*seen} == {(f"{called}: ", passes, passes)}
    assert f"{called}: " in capsys.readouterr().err
    assert not module._open and module._passes is None


@pytest.mark.parametrize(("ipykernel", "disabled", "shown"), [(True, "", True), (True, "1", False), (False, "", False)])
def test_a_notebook_has_bars_unless_tqdm_is_disabled(ipykernel, disabled, shown, monkeypatch, calls_of):
    if ipykernel:
        monkeypatch.setitem(sys.modules, "ipykernel", module)
    monkeypatch.setenv("TQDM_DISABLE", disabled)
    made = calls_of("outliers.terminal.progress.Progress.__enter__")
    perplexity(make_model("gpt2"), BLOCKS)
    assert bool(made) == shown
