"""The progress of a run: a bar on a terminal, and a line a minute where there is none."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from outliers.terminal.amounts import duration, durations

SECONDS = 60  # between two lines
SOON, SHORT = 1, 2  # seconds: how old a run is when it says how long it takes, and what is too short to say
MARKS = 1000  # of finished steps that are kept
# The powers of a model's weights between which the time of a step lies, beside that of a smaller model. On two cores of
# a CPU blocks of eleven models of 0.1 to 135 million took as long as powers of 0.5 to 0.7.
POWERS = np.array([0.5, 0.75])

Thing = TypeVar("Thing")
logger = logging.getLogger(__name__)
_open: "list[Progress]" = []  # the outermost first


class Progress(tqdm):
    """Steps of a run that are finished, and the time that is left, by what the latest of them took.

    The outermost one says, after the first steps, how long the run takes, or the stage of one in which values decide
    what follows. Where standard error is no terminal, it also logs a line a minute, while no step ends too, for which
    it has a thread.

    size: weights of the model whose steps are made now. Work is what steps take, one number for each of `POWERS`.
    """

    def __init__(
        self, total: int, unit: str = "block", description: str = "", clock: Callable[[], float] = time.monotonic
    ):
        self.clock, self.start = clock, clock()
        self.size, self.further = 1.0, False
        self.todo = total * np.ones(len(POWERS))  # work that is left
        self.made = 0 * self.todo  # work of this run, which that of earlier ones says nothing about
        self.together = 1  # steps that are being made at once
        self.inside = 0.0  # how many of them are, as it were
        self.workers, self.marks = 1, [(self.start, self.made)]  # when so much was made
        self.announced = False
        self.ended = threading.Event()
        super().__init__(total=total, unit=unit, disable=None, dynamic_ncols=True)
        self.desc, self.unit = "", unit  # which is not set where there is no bar
        self.set_description(description)
        _open.append(self)
        if self.disable and _open[0] is self:
            threading.Thread(target=self._log, daemon=True).start()

    def expect(self, steps: int, size: float = 1.0) -> None:
        """Add steps of a model with so many weights to those that a run has."""
        self.total += steps
        self.todo = self.todo + steps * size**POWERS
        self.announced = self.announced and not (steps and self.further)

    def enter(self, name: str, steps: int, size: float = 1.0) -> None:
        """Say which measurement comes now, of so many steps; within one of none nothing is seen of any step."""
        self.set_description(name)
        self.size, self.together = size, min(steps, 1)

    def spread(self, workers: int) -> None:
        """Say that so many workers share what comes now, each of which finishes several steps at once."""
        self.workers, self.marks = max(1, workers), [(self.clock(), self.made)]

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
        self.made, self.inside, self.together = self.made + steps * self.size**POWERS, 0.0, 1
        self.skip(steps, self.size)
        self._mark()

    def skip(self, steps: int, size: float = 1.0) -> None:
        """Count steps that an earlier run made: nothing follows from them for those that are left."""
        self.todo = self.todo - steps * size**POWERS
        if self.disable:
            self.n += steps
        else:
            super().update(steps)

    def left(self) -> tuple[float, float] | None:
        """The least and the most seconds, by the later half of what was made so far; None before anything was."""
        marks, step = list(self.marks), self.size**POWERS
        count, todo = len(marks) - 1, self.todo - self.inside * step
        if not count or self.n + self.inside >= self.total:
            return None
        back = max(self.workers, count // 2 // self.workers * self.workers)
        (begin, before), (end, made) = marks[max(0, count - back)], marks[-1]
        # The workers that have finished nothing yet are as far as the others.
        pace = (end - begin) / (made - before) / max(1, self.workers / count)
        seconds = todo * pace - np.minimum(pace * step, self.clock() - end)
        return max(0.0, seconds.min()), max(0.0, seconds.max())

    def line(self) -> str:
        """The current measurement, how much is finished, and the time that is left."""
        steps = self.n + self.inside
        line = f"{self.desc}{self.n} of {self.total} {self.unit}s, {steps / self.total if self.total else 0.0:.0%}"
        return f"{line}, {self._estimate() or f'since {duration(self.clock() - self.start)}'}"

    def _estimate(self) -> str | None:
        left = self.left()
        return left and f"about {durations(*left)} left{' of this stage' if self.further else ''}"

    def close(self) -> None:
        """End it."""
        self.ended.set()
        _open[:] = [bar for bar in _open if bar is not self]  # `remove` would take an equal one, by tqdm's own order
        super().close()

    @property
    def format_dict(self) -> dict:
        """The values that tqdm writes, with the same time left."""
        left = self.left() if hasattr(self, "ended") else None
        return super().format_dict | ({"rate": (self.total - self.n) / left[1]} if left and left[1] else {})

    def _mark(self) -> None:
        now, made = self.clock(), self.made + self.inside * self.size**POWERS
        if made[0] > self.marks[-1][1][0]:
            self.marks.append((now, made))
            if len(self.marks) > MARKS:
                del self.marks[1:-1:2]
        # The first step may have compiled kernels and read files.
        if self.announced or len(self.marks) < 3 or _open[0] is not self or now - self.start < SOON:
            return
        left = self.left()
        if left and left[1] >= SHORT:
            self.announced = True
            logger.info(self._estimate())

    def _log(self) -> None:
        while not self.ended.wait(SECONDS):
            logger.info("; ".join(bar.line() for bar in list(_open)))


def over(things: Iterable[Thing], unit: str, description: str) -> Iterator[Thing]:
    """Each of some things, with a bar over them, which moves the outermost one."""
    things = list(things)
    with Progress(len(things), unit, description) as bar:
        for number, thing in enumerate(things, 1):
            yield thing
            bar.update()
            if _open[0] is not bar:
                _open[0].see(number / len(things))
