"""Show the progress of a run: a bar on a terminal, and a line a minute elsewhere."""

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

SECONDS, TICK = 60, 1  # between two lines of a log, and between two redraws
DELAY = 2  # seconds before a bar is shown, so that short runs have none
LOOK = 0.5  # seconds between two checks whether the forecast is worth a line
SHORT = 2  # seconds: shorter forecasts are not logged
AGAIN = 3 / 2  # ratio of ages of a run between two logged forecasts
FORM = "{l_bar}{bar}| {elapsed}{left}"
FORM_BEFORE = "{desc}{elapsed}"  # until there is a forecast
BESIDE = 50  # columns of a bar without its label: bar, percentage and times
LABEL = 60  # columns of a label in a log

Thing = TypeVar("Thing")
Function = TypeVar("Function", bound=Callable)
logger = logging.getLogger(__name__)
_open: "list[Progress]" = []  # open bars, the outermost first
_passes: "Progress | None" = None  # bar of a Python function, moved by passes of blocks


class Progress(tqdm):
    """A progress bar of the steps of a run, which shows the share of its time that has passed.

    The outermost bar logs how long the run takes as soon as that is known, and again if that changes. If standard error
    is no terminal, it also logs a line a minute, from a thread of its own, even while no step ends.
    """

    def __init__(
        self,
        total: int = 0,
        description: str = "",
        clock: Callable[[], float] = time.monotonic,
        shown: bool | None = None,
    ):
        """
        Args:
            total: steps that are known at the start.
            description: of the current measurement.
            clock: function that returns seconds.
            shown: whether to draw the bar; by default if standard error is a terminal.
        """
        self.clock, self.start = clock, clock()
        self.forecaster = Forecaster()
        self.forecaster.expect(Steps(total))
        self.step = Steps(1)  # one of the running steps
        self.estimates: dict[str, Steps] = defaultdict(Steps)  # undecided steps, by kind
        self.made = 0.0  # work of this run, without rows of earlier ones
        self.marked = self.start, 0.0  # time of the last mark, and the work until then
        self.together = 1  # number of running steps
        self.inside = 0.0  # finished part of them, in steps
        self.shown = 0.0  # share of the time shown last; it never falls
        self.looked = self.start  # time of the last check for a forecast to log
        self.logged: tuple[float, float, float] | None = None  # last logged: age, least and most age at the end
        self.ended = threading.Event()
        super().__init__(total=total, disable=None if shown is None else not shown, dynamic_ncols=True, delay=DELAY)
        self.desc = ""  # tqdm does not set it if the bar is disabled
        self.set_description(description)
        _open.append(self)
        if not self.disable or _open[0] is self:
            threading.Thread(target=self._log if self.disable else self._tick, daemon=True).start()

    @property
    def age(self) -> float:
        return self.clock() - self.start

    def expect(self, steps: Steps) -> None:
        """Add steps that the run will make."""
        self.total += steps.count
        self.forecaster.expect(steps)

    def estimate(self, steps: Steps) -> None:
        """Expect steps of a kind, in place of the steps estimated for this kind before."""
        before = self.estimates[steps.kind]
        self.total += steps.count - before.count
        self.forecaster.expect(before, -1)
        self.forecaster.expect(steps)
        self.estimates[steps.kind] = steps

    def enter(self, name: str, steps: Steps) -> None:
        """Begin a measurement of some steps; one without steps shows no progress within it."""
        self.set_description(name)
        self.step, self.together = steps._replace(count=1), min(steps.count, 1)

    def set_workers(self, workers: int) -> None:
        """Set the number of workers that share the next steps; each worker finishes several steps at once."""
        self.forecaster.set_workers(max(1, workers))
        self.marked = self.clock(), self.made

    def begin(self, steps: int) -> None:
        """Begin steps of the entered measurement that run at once; `set_share` then sets their finished share."""
        if self.together > 1:
            self.update(self.together)
        self.together = steps

    def set_share(self, share: float) -> None:
        """Set the finished share of the steps that are running."""
        self.inside = min(share, 1.0) * self.together
        self._mark()

    def update(self, steps: int = 1) -> None:
        """Count finished steps."""
        self.made, self.inside, self.together = self.made + steps * self.step.work, 0.0, 1
        self.skip(self.step._replace(count=steps))
        self._mark()

    def skip(self, steps: Steps) -> None:
        """Count steps that an earlier run made, without an influence on the forecast."""
        self.forecaster.expect(steps, -1)
        if self.disable:
            self.n += steps.count
        else:
            super().update(steps.count)

    def left(self) -> Left | None:
        """Return the forecast of the seconds that are left; None if too little is finished, and at the end."""
        if self.n + self.inside >= self.total:
            return None
        work, since = self.step.work, self.clock() - self.marked[0]
        step = (self.together - self.inside) * work if self.together else 0.0
        return self.forecaster.left(self.age, self.step.kind, self.inside * work, step, since)

    def share(self) -> float | None:
        """Return the share of the run's time that has passed; None while it is unknown."""
        if left := self.left():
            self.shown = max(self.shown, self.age / (self.age + left.expected))
        return self.shown or None

    def line(self) -> str:
        """Return a line with the current measurement, the share of the time that has passed, and what is left."""
        left, share = self.left(), self.share()
        passed = f"{share:.0%}, {self._time_left(left)}" if left and share else f"since {duration(self.age)}"
        return f"{shortened(self.desc, LABEL)}{passed}"

    def _time_left(self, left: Left) -> str:
        return f"about {durations(left.least, left.most)} left"

    def close(self) -> None:
        self.ended.set()
        _open[:] = [bar for bar in _open if bar is not self]  # list.remove would use tqdm's equality
        super().close()

    @property
    def format_dict(self) -> dict:
        """tqdm's values: of time instead of steps, and with a label that leaves room for the bar."""
        values = super().format_dict
        if not hasattr(self, "ended"):  # during __init__
            return values
        left, share = self.left(), self.share()
        share = 1.0 if self.total and self.n >= self.total else share
        room = max(1, (values["ncols"] or sys.maxsize) - BESIDE)
        values |= {"prefix": shortened(values["prefix"], room), "n": share or 0.0, "total": 1.0}
        values |= {"left": f", {self._time_left(left)}" if left else "", "elapsed": self.age}
        return values | {"bar_format": FORM if share else FORM_BEFORE}

    def _mark(self) -> None:
        now, made = self.clock(), self.made + self.inside * self.step.work
        (before, work), self.marked = self.marked, (now, max(made, self.marked[1]))
        if made > work:
            self.forecaster.learn(Mark(now - self.start, self.step.kind, made - work, now - before))
        if now < self.looked + LOOK:
            return
        self.looked, left, age = now, self.left(), self.age
        if not left or left.most < SHORT or _open[0] is not self:
            return
        then, least, most = self.logged or (0.0, math.inf, 0.0)
        if age >= AGAIN * then and not least <= age + left.expected <= most:
            self.logged = age, age + left.least, age + left.most
            logger.info(self._time_left(left))

    def _log(self) -> None:
        while not self.ended.wait(SECONDS):
            logger.info("; ".join(bar.line() for bar in list(_open)))

    def _tick(self) -> None:
        """Redraw the bar every second, also while no step ends."""
        wait = DELAY
        while not self.ended.wait(wait):
            self.refresh()
            self.last_print_t, wait = self._time(), TICK  # so that tqdm draws the end, too


def shortened(label: str, room: int) -> str:
    """Shorten a label, whose colon at the end stays, to some columns."""
    return label if len(label) <= room else f"{label[: room - 3]}…: "


def over(things: Iterable[Thing], description: str) -> Iterator[Thing]:
    """Yield some things with a bar over them, which also moves the outermost bar."""
    things = list(things)
    with Progress(len(things), description) as bar:
        for number, thing in enumerate(things, 1):
            yield thing
            bar.update()
            if _open[0] is not bar:
                _open[0].set_share(number / len(things))


def with_bar(function: Function) -> Function:
    """Make a public Python function show a bar if it takes longer than two seconds, unless another bar is open.

    The argument `progress` turns it on or off; by default there is one on a terminal and in a notebook, unless
    TQDM_DISABLE is set.
    """

    @functools.wraps(function)
    def shown(*arguments, progress: bool | None = None, **named):
        global _passes
        if progress is None:
            interactive = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
            progress = interactive and not os.environ.get("TQDM_DISABLE")
        if _open or not progress:
            return function(*arguments, **named)
        with Progress(0, function.__name__, shown=True) as _passes:
            try:
                return function(*arguments, **named)
            finally:
                _passes = None

    return shown


def expect_passes(count: int) -> None:
    """Make the bar of a Python function expect at least this number of further passes of blocks."""
    if _passes is not None:
        _passes.expect(Steps(max(0, count - (_passes.total - _passes.n))))


def pass_made() -> None:
    """Move the bar of a Python function by one block that has passed a model."""
    if _passes is not None:
        expect_passes(1)
        _passes.update()


@contextlib.contextmanager
def manual_bar() -> Iterator[Progress | None]:
    """Provide the bar that `with_bar` opened, or None: the caller counts its steps, and `pass_made` does nothing."""
    global _passes
    bar, _passes = _passes, None
    try:
        yield bar
    finally:
        _passes = bar
