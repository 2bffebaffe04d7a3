"""How far a run is: a bar on a terminal, and a line a minute where there is none."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TypeVar

from tqdm import tqdm

from outliers.terminal.amounts import duration

SECONDS = 60  # between two lines
FAR_OFF = 1.5  # times: a forecast that is wrong by more is said beside what is left

Thing = TypeVar("Thing")
logger = logging.getLogger(__name__)
_open: "list[Progress]" = []  # without a terminal, the outermost first


class Progress(tqdm):
    """Steps of a run that are finished, and what is left of it.

    Where standard error is no terminal, the outermost one logs a line a minute, also while no step ends, for which it
    has a thread. What is left is computed from what finished steps took; a forecast only says how steps compare.
    """

    def __init__(
        self, total: int, unit: str = "block", description: str = "", clock: Callable[[], float] = time.monotonic
    ):
        self.clock, self.start = clock, clock()
        self.shares = [0.0, 1.0]  # of the whole time, at the ends of parts of equal steps
        self.forecast: float | None = None  # seconds of all steps
        self.skipped = 0.0  # of the whole time
        self.inside = 0.0  # how far the step is that is being made
        self.ended = threading.Event()
        super().__init__(total=total, unit=unit, disable=None, dynamic_ncols=True)
        self.desc, self.unit = "", unit  # which is not set where there is no bar
        self.set_description(description)
        if self.disable:
            _open.append(self)
            if _open[0] is self:
                threading.Thread(target=self._log, daemon=True).start()

    def expect(self, seconds: list[float]) -> None:
        """Take a forecast: what parts of equally many steps, one after the other, will take together.

        The time of the run counts from now on.
        """
        self.start = self.clock()
        if sum(seconds):
            self.forecast = sum(seconds)
            self.shares = [0.0, *(so_far / self.forecast for so_far in accumulate(seconds))]

    def update(self, steps: int = 1) -> None:
        """Count steps that were made."""
        self.inside = 0.0
        if self.disable:
            self.n += steps
        else:
            super().update(steps)

    def skip(self, steps: int) -> None:
        """Count steps that an earlier run made: nothing follows from them for those that are left."""
        self.skipped += self._share(self.n + steps) - self._share(self.n)
        if self.disable:
            self.n += steps
        else:  # whose rate leaves out the initial ones
            self.initial += steps
            super().update(steps)

    def see(self, share: float) -> None:
        """Say how far the step is that is being made, for the lines alone."""
        self.inside = min(share, 1.0)

    def left(self) -> float | None:
        """Seconds: by what the finished steps took, before there are any by the forecast; None without one."""
        done = self._share(self.n + self.inside)
        if done > self.skipped:
            return (1 - done) * (self.clock() - self.start) / (done - self.skipped)
        return None if self.forecast is None else (1 - done) * self.forecast

    def line(self) -> str:
        """What is being measured, how much is finished, and the time that is left."""
        left, steps = self.left(), self.n + self.inside
        line = f"{self.desc}{self.n} of {self.total} {self.unit}s, {steps / self.total if self.total else 0.0:.0%}"
        if left is None:
            return f"{line}, since {duration(self.clock() - self.start)}"
        foreseen = left if self.forecast is None else (1 - self._share(steps)) * self.forecast
        wrong = max(left, foreseen) > FAR_OFF * min(left, foreseen)
        return f"{line}, about {duration(left)} left" + (f" (the forecast said {duration(foreseen)})" if wrong else "")

    def close(self) -> None:
        """End it."""
        self.ended.set()
        _open[:] = [bar for bar in _open if bar is not self]  # `remove` would take an equal one, by tqdm's own order
        super().close()

    def _share(self, steps: float) -> float:
        """The share of the whole time that the first steps take."""
        parts = len(self.shares) - 1
        place = min(steps / self.total, 1.0) * parts if self.total else 0.0
        number = min(int(place), parts - 1)
        begin, end = self.shares[number : number + 2]
        return begin + (place - number) * (end - begin)

    def _log(self) -> None:
        while not self.ended.wait(SECONDS):
            logger.info("; ".join(bar.line() for bar in list(_open)))


def over(things: Iterable[Thing], unit: str, description: str) -> Iterator[Thing]:
    """Each of some things, with a bar over them."""
    things = list(things)
    with Progress(len(things), unit, description) as bar:
        for thing in things:
            yield thing
            bar.update()
