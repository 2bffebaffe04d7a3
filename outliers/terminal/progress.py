"""The progress of a run: a bar of its time on a terminal, and a line a minute where there is none."""

import contextlib
import functools
import logging
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from outliers.terminal.amounts import duration, durations
from outliers.terminal.forecaster import Forecaster, Left, Mark, Steps

SECONDS, TICK = 60, 1  # between two lines, and between two looks at the clock
DELAY = 2  # seconds before a bar is shown: of what takes less there is none
LOOK = 0.5  # between two looks at what is left
SHORT = 2  # seconds: what is too short to say
AGAIN = 3 / 2  # times as old a run has to be to say anew how long it takes
FORM = "{l_bar}{bar}| {elapsed}{left}"
FORM_BEFORE = "{desc}{elapsed}"  # while nobody knows how long it takes
BESIDE = 50  # columns beside the label of a bar: the bar itself, percentage and times
LABEL = 60  # columns of a label in a log

Thing = TypeVar("Thing")
Function = TypeVar("Function", bound=Callable)
logger = logging.getLogger(__name__)
_open: "list[Progress]" = []  # the outermost first
_passes: "Progress | None" = None  # the bar of a function of Python, which passes of blocks move


class Progress(tqdm):
    """Steps of a run that are finished, and the share of its time that has passed, by what the steps have taken.

    The outermost one says how long the run takes as soon as that is known, and says it anew where it ends at another
    time than it said. Where standard error is no terminal, it also logs a line a minute, while no step ends too, for
    which it has a thread.
    """

    def __init__(
        self,
        total: int = 0,
        description: str = "",
        clock: Callable[[], float] = time.monotonic,
        shown: bool | None = None,
    ):
        """shown: by default whether standard error is a terminal."""
        self.clock, self.start = clock, clock()
        self.forecaster = Forecaster()
        self.forecaster.expect(Steps(total))
        self.step = Steps(1)  # one like those that are made now
        self.foreseen: dict[str, Steps] = defaultdict(Steps)  # that are not decided yet, by kind
        self.made = 0.0  # work of this run, which that of earlier ones says nothing about
        self.marked = self.start, 0.0  # when so much was made
        self.together = 1  # steps that are being made at once
        self.inside = 0.0  # how many of them are, as it were
        self.shown = 0.0  # the share of the time, which does not fall
        self.looked = self.start  # when it was last seen whether there is something to say
        self.said: tuple[float, float, float] | None = None  # seconds: how old it was then, and is in the end
        self.ended = threading.Event()
        super().__init__(total=total, disable=None if shown is None else not shown, dynamic_ncols=True, delay=DELAY)
        self.desc = ""  # which is not set where there is no bar
        self.set_description(description)
        _open.append(self)
        if not self.disable or _open[0] is self:
            threading.Thread(target=self._log if self.disable else self._tick, daemon=True).start()

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return self.clock() - self.start

    def expect(self, steps: Steps) -> None:
        """Add steps to those that a run has."""
        self.total += steps.count
        self.forecaster.expect(steps)

    def foresee(self, steps: Steps) -> None:
        """Expect so many steps of a kind, in the place of those that it was told before."""
        before = self.foreseen[steps.kind]
        self.total += steps.count - before.count
        self.forecaster.expect(before, -1)
        self.forecaster.expect(steps)
        self.foreseen[steps.kind] = steps

    def enter(self, name: str, steps: Steps) -> None:
        """Say which measurement comes now, of so many steps; within one of none nothing is seen of any step."""
        self.set_description(name)
        self.step, self.together = steps._replace(count=1), min(steps.count, 1)

    def spread(self, workers: int) -> None:
        """Say that so many workers share what comes now, each of which finishes several steps at once."""
        self.forecaster.spread(max(1, workers))
        self.marked = self.clock(), self.made

    def begin(self, steps: int) -> None:
        """Say that so many steps are made at once from now on, as far as `see` is told."""
        if self.together > 1:
            self.update(self.together)
        self.together = steps

    def see(self, share: float) -> None:
        """Say how far the steps are that are being made."""
        self.inside = min(share, 1.0) * self.together
        self._mark()

    def update(self, steps: int = 1) -> None:
        """Count steps that were made."""
        self.made, self.inside, self.together = self.made + steps * self.step.work, 0.0, 1
        self.skip(self.step._replace(count=steps))
        self._mark()

    def skip(self, steps: Steps) -> None:
        """Count steps that an earlier run made: nothing follows from them for those that are left."""
        self.forecaster.expect(steps, -1)
        if self.disable:
            self.n += steps.count
        else:
            super().update(steps.count)

    def left(self) -> Left | None:
        """The seconds that are left; None before enough was made to know, and at the end."""
        if self.n + self.inside >= self.total:
            return None
        work, since = self.step.work, self.clock() - self.marked[0]
        step = (self.together - self.inside) * work if self.together else 0.0
        return self.forecaster.left(self.age, self.step.kind, self.inside * work, step, since)

    def share(self) -> float | None:
        """The share of its time that has passed; None while nobody knows."""
        if left := self.left():
            self.shown = max(self.shown, self.age / (self.age + left.expected))
        return self.shown or None

    def line(self) -> str:
        """The current measurement, the share of the time that has passed, and what is left."""
        left, share = self.left(), self.share()
        passed = f"{share:.0%}, {self._estimate(left)}" if left and share else f"since {duration(self.age)}"
        return f"{cut(self.desc, LABEL)}{passed}"

    def _estimate(self, left: Left) -> str:
        return f"about {durations(left.least, left.most)} left"

    def close(self) -> None:
        """End it."""
        self.ended.set()
        _open[:] = [bar for bar in _open if bar is not self]  # `remove` would take an equal one, by tqdm's own order
        super().close()

    @property
    def format_dict(self) -> dict:
        """The values that tqdm writes: of the time, not of the steps, with a label that leaves room for the bar."""
        values = super().format_dict
        if not hasattr(self, "ended"):  # it is being made
            return values
        left, share = self.left(), self.share()
        share = 1.0 if self.total and self.n >= self.total else share
        room = max(1, (values["ncols"] or sys.maxsize) - BESIDE)
        values |= {"prefix": cut(values["prefix"], room), "n": share or 0.0, "total": 1.0}
        values |= {"left": f", {self._estimate(left)}" if left else "", "elapsed": self.age}
        return values | {"bar_format": FORM if share else FORM_BEFORE}

    def _mark(self) -> None:
        now, made = self.clock(), self.made + self.inside * self.step.work
        (before, work), self.marked = self.marked, (now, max(made, self.marked[1]))
        if made > work:
            self.forecaster.made(Mark(now - self.start, self.step.kind, made - work, now - before))
        if now < self.looked + LOOK:
            return
        self.looked, left, age = now, self.left(), self.age
        if not left or left.most < SHORT or _open[0] is not self:
            return
        then, least, most = self.said or (0.0, math.inf, 0.0)
        if age >= AGAIN * then and not least <= age + left.expected <= most:
            self.said = age, age + left.least, age + left.most
            logger.info(self._estimate(left))

    def _log(self) -> None:
        while not self.ended.wait(SECONDS):
            logger.info("; ".join(bar.line() for bar in list(_open)))

    def _tick(self) -> None:
        """Show the time while no step ends."""
        wait = DELAY
        while not self.ended.wait(wait):
            self.refresh()
            self.last_print_t, wait = self._time(), TICK  # so that its end is shown, too


def cut(label: str, room: int) -> str:
    """A label, which ends with a colon, of so many columns at most."""
    return label if len(label) <= room else f"{label[: room - 3]}…: "


def over(things: Iterable[Thing], description: str) -> Iterator[Thing]:
    """Each of some things, with a bar over them, which moves the outermost one."""
    things = list(things)
    with Progress(len(things), description) as bar:
        for number, thing in enumerate(things, 1):
            yield thing
            bar.update()
            if _open[0] is not bar:
                _open[0].see(number / len(things))


def with_bar(function: Function) -> Function:
    """Let a function of Python show a bar where it takes longer than two seconds, but not within another one.

    Its argument `progress` says whether to; None: on a terminal and in a notebook, unless TQDM_DISABLE is set.
    """

    @functools.wraps(function)
    def shown(*arguments, progress: bool | None = None, **named):
        global _passes
        if progress is None:
            here = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
            progress = here and not os.environ.get("TQDM_DISABLE")
        if _open or not progress:
            return function(*arguments, **named)
        with Progress(0, function.__name__, shown=True) as _passes:
            try:
                return function(*arguments, **named)
            finally:
                _passes = None

    return shown


def expect_passes(count: int) -> None:
    """Let the bar of a function of Python expect at least so many passes of blocks from now on."""
    if _passes is not None:
        _passes.expect(Steps(max(0, count - (_passes.total - _passes.n))))


def pass_made() -> None:
    """Move the bar of a function of Python by a block that has passed a model."""
    if _passes is not None:
        expect_passes(1)
        _passes.update()


@contextlib.contextmanager
def taken() -> Iterator[Progress | None]:
    """The bar of a function of Python, if there is one, for what counts its steps itself."""
    global _passes
    bar, _passes = _passes, None
    try:
        yield bar
    finally:
        _passes = bar
