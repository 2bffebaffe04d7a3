"""The progress of a run: a bar on a terminal, and a line a minute where there is none."""

import logging
import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from outliers.terminal.amounts import duration, durations

SECONDS = 60  # between two lines
# Seconds: after its first step a run says how long it takes, for several blocks may end at once; what is too short to
# say.
SOON, SHORT = 2, 2
PART = 1 / 100  # of the time that is left, after which a run says it first: one of minutes not by its first steps
WRONG = 4 / 3  # times as long as it said, or as short, from which on a run says it anew
MARKS = 1000  # of finished steps that are kept
# A step of a model takes as long as it has weights, and these more: nine schemes on two cores of a CPU took 10 s and
# 6.2 s for each million weights.
FIXED = 1_500_000
# Times as long as those before that steps of a kind take at most which none was made of yet: a block under int8 takes
# as long as one of the unquantized model, and twice as long on a CPU without int8 units; neither is far from it.
UNSEEN = 1.5
FORM = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
BESIDE = 40  # columns beside the label of a bar: the bar itself, percentage, counts and times
LABEL = 60  # columns of a label in a log

Thing = TypeVar("Thing")
logger = logging.getLogger(__name__)
_open: "list[Progress]" = []  # the outermost first


class Steps(NamedTuple):
    """Steps of a run. size: weights of the model that makes them. kind: of steps that take as long for one model."""

    count: int = 0
    size: int = 0
    kind: str = ""

    @property
    def work(self) -> int:
        """The time that they take, in weights."""
        return self.count * (self.size + FIXED)


class Progress(tqdm):
    """Steps of a run that are finished, and the time that is left, by what the latest of them took.

    The outermost one says, after the first steps, how long the run takes, and says it anew where that was wrong by a
    third, each time after twice as long. Where standard error is no terminal, it also logs a line a minute, while no
    step ends too, for which it has a thread.
    """

    def __init__(
        self, total: int, unit: str = "block", description: str = "", clock: Callable[[], float] = time.monotonic
    ):
        self.clock, self.start = clock, clock()
        self.step, self.begun = Steps(1), {""}  # one like those that are made now, and the kinds of all so far
        self.todo = Counter({"": Steps(total).work})  # work that is left, by kind
        self.foreseen: dict[str, Steps] = defaultdict(Steps)  # that are not decided yet, by kind
        self.made = 0.0  # work of this run, which that of earlier ones says nothing about
        self.together = 1  # steps that are being made at once
        self.inside = 0.0  # how many of them are, as it were
        self.workers, self.marks = 1, [(self.start, self.made)]  # when so much was made
        self.said: tuple[float, ...] | None = None  # seconds: how old it was then, and is in the end, least and most
        self.ended = threading.Event()
        super().__init__(total=total, unit=unit, disable=None, dynamic_ncols=True, bar_format=FORM)
        self.desc, self.unit = "", unit  # which is not set where there is no bar
        self.set_description(description)
        _open.append(self)
        if self.disable and _open[0] is self:
            threading.Thread(target=self._log, daemon=True).start()

    def expect(self, steps: Steps) -> None:
        """Add steps to those that a run has."""
        self.total += steps.count
        self.todo[steps.kind] += steps.work

    def foresee(self, steps: Steps) -> None:
        """Expect so many steps of a kind, in the place of those that it was told before."""
        before = self.foreseen[steps.kind]
        self.total += steps.count - before.count
        self.todo[steps.kind] += steps.work - before.work
        self.foreseen[steps.kind] = steps
        self.begun.add(steps.kind)  # the usual number stands for steps that take as long

    def enter(self, name: str, steps: Steps) -> None:
        """Say which measurement comes now, of so many steps; within one of none nothing is seen of any step."""
        self.set_description(name)
        self.step, self.together = steps._replace(count=1), min(steps.count, 1)
        self.begun.add(steps.kind)

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
        self.made, self.inside, self.together = self.made + steps * self.step.work, 0.0, 1
        self.skip(self.step._replace(count=steps))
        self._mark()

    def skip(self, steps: Steps) -> None:
        """Count steps that an earlier run made: nothing follows from them for those that are left."""
        self.todo[steps.kind] -= steps.work
        if self.disable:
            self.n += steps.count
        else:
            super().update(steps.count)

    def left(self) -> tuple[float, float] | None:
        """The least and the most seconds, by the later half of what was made so far; None before anything was."""
        marks, step = list(self.marks), self.step.work
        count = len(marks) - 1
        if not count or self.n + self.inside >= self.total:
            return None
        back = max(self.workers, count // 2 // self.workers * self.workers)
        (begin, before), (end, made) = marks[max(0, count - back)], marks[-1]
        # The workers that have finished nothing yet are as far as the others.
        pace = (end - begin) / (made - before) / max(1, self.workers / count)
        todo = sum(self.todo.values()) - self.inside * step
        unseen = sum(work for kind, work in self.todo.items() if kind not in self.begun)
        seconds = pace * todo - min(pace * step, self.clock() - end)
        return max(0.0, seconds), max(0.0, seconds + (UNSEEN - 1) * pace * unseen)

    def line(self) -> str:
        """The current measurement, how much is finished, and the time that is left."""
        steps, left = self.n + self.inside, self.left()
        made = f"{self.n} of {self.total} {self.unit}s, {steps / self.total if self.total else 0.0:.0%}"
        line = f"{cut(self.desc, LABEL)}{made}"
        return f"{line}, {self._estimate(left) if left else f'since {duration(self.clock() - self.start)}'}"

    def _estimate(self, left: tuple[float, float]) -> str:
        return f"about {durations(*left)} left"

    def close(self) -> None:
        """End it."""
        self.ended.set()
        _open[:] = [bar for bar in _open if bar is not self]  # `remove` would take an equal one, by tqdm's own order
        super().close()

    @property
    def format_dict(self) -> dict:
        """The values that tqdm writes, with the same time left, and a label that leaves room for the bar."""
        values, left = super().format_dict, self.left() if hasattr(self, "ended") else None
        room = max(1, (values["ncols"] or sys.maxsize) - BESIDE)
        values["prefix"] = cut(values["prefix"], room)
        return values | ({"rate": (self.total - self.n) / left[1]} if left and left[1] else {})

    def _mark(self) -> None:
        now, made = self.clock(), self.made + self.inside * self.step.work
        if made > self.marks[-1][1]:
            self.marks.append((now, made))
            if len(self.marks) > MARKS:
                del self.marks[1:-1:2]
        # The first step may have compiled kernels and read files.
        if len(self.marks) < 3 or _open[0] is not self or now - self.marks[1][0] < SOON:
            return
        left, age = self.left(), now - self.start
        if not left or left[1] < SHORT or (not self.said and now - self.marks[1][0] < PART * left[1]):
            return
        before, least, most = self.said or (0, math.inf, 0)
        if age >= 2 * before and (age + left[0] > WRONG * most or WRONG * (age + left[1]) < least):
            self.said = age, age + left[0], age + left[1]
            logger.info(self._estimate(left))

    def _log(self) -> None:
        while not self.ended.wait(SECONDS):
            logger.info("; ".join(bar.line() for bar in list(_open)))


def cut(label: str, room: int) -> str:
    """A label, which ends with a colon, of so many columns at most."""
    return label if len(label) <= room else f"{label[: room - 3]}…: "


def over(things: Iterable[Thing], unit: str, description: str) -> Iterator[Thing]:
    """Each of some things, with a bar over them, which moves the outermost one."""
    things = list(things)
    with Progress(len(things), unit, description) as bar:
        for number, thing in enumerate(things, 1):
            yield thing
            bar.update()
            if _open[0] is not bar:
                _open[0].see(number / len(things))
