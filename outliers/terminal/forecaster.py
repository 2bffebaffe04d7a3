"""A forecast of the time that a run still takes, from what its steps have taken so far; without clock and bar."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

# A step of a model takes as long as it has weights, and these more: nine schemes on two cores of a CPU took 10 s and
# 6.2 s for each million weights.
FIXED = 1_500_000
RECENT, LEAST_RECENT = 1 / 4, 5  # of the age of a run, in seconds at least: its steps say how busy the machine is now
DRIFT = 1 / 2  # of its age: how far forecasts moved since then, they may still move
KNOWN, UNKNOWN, MOVED = 1.1, 1.7, 2.0  # factors of a range: by steps that were made, by others, and by drift at most
SOON, LONG, SEVERAL = 2, 10, 3  # a forecast needs so many seconds and steps, or so many seconds in a step
WIDEST = 10  # times its least that a range may reach; a wider one, as of small models before a large one, says nothing
APART = 1.01  # times as old a run is at the next forecast that is kept
MARKS = 500  # of finished steps that are kept


class Steps(NamedTuple):
    """Steps of a run.

    size: weights of the model that makes them. kind: of steps that take as long for one model. cost: times as long as a
    block passes the model. seconds: that each takes where that does not depend on a model.
    """

    count: int = 0
    size: int = 0
    kind: str = ""
    cost: float = 1.0
    seconds: float = 0.0

    @property
    def work(self) -> float:
        """The time that they take, in weights that a block passes."""
        return self.count * (self.size + FIXED) * self.cost


DRAWN = Steps(1, kind="drawing", seconds=3.0)  # tables, figures and page of a specification


class Left(NamedTuple):
    """Seconds that are left: expected, at least and at most."""

    expected: float
    least: float
    most: float


class Mark(NamedTuple):
    """Work that was made: when it ended, of which kind it is, how much, and how long it took."""

    age: float
    kind: str
    work: float
    seconds: float


class Forecaster:
    """The time that is left of a run.

    Steps of a kind take as long as those of it that were made. Of a kind that none was made of they take, by their
    work, as long as those of its group, the first word of its name, or else as all others, and between the shortest and
    the longest of these. The latest steps say how busy the machine is. A range is wider where forecasts moved lately.
    """

    def __init__(self):
        self.todo: Counter = Counter()  # work that is left, by kind
        self.fixed: Counter = Counter()  # seconds that are left, by kind, where they are known from the start
        self.marks: list[Mark] = []
        self.totals: list[tuple[float, float]] = []  # ages, and seconds that the whole run was expected to take then
        self.workers, self.first = 1, 0  # that share the work since this mark

    def expect(self, steps: Steps, sign: int = 1) -> None:
        """Add steps to those that are left, or with sign -1 take them away."""
        if steps.seconds:
            self.fixed[steps.kind] += sign * steps.count * steps.seconds
        else:
            self.todo[steps.kind] += sign * steps.work

    def spread(self, workers: int) -> None:
        """Say that so many workers share the work from now on."""
        self.workers, self.first = workers, len(self.marks)

    def made(self, mark: Mark) -> None:
        """Learn from work that was made, which `expect` takes from what is left."""
        self.marks.append(mark)
        if len(self.marks) > MARKS:
            del self.marks[1 : MARKS // 2 : 2]

    def left(
        self, age: float, working: str = "", inside: float = 0.0, step: float = 0.0, since: float = 0.0
    ) -> Left | None:
        """The time that is left at an age; None while too little was made to know, or nothing is left.

        working, inside: the kind of a step that is being made, and how much of its work is. step: what is left of it.
        since: how many seconds ago the last work was made.
        """
        if not self._is_ready():
            return None
        rates = self._rates()
        share = max(1.0, self.workers / max(1, len(self.marks) - self.first))
        todo = Counter(self.todo)
        todo[working] -= inside
        paces = {kind: _near(kind, rates) for kind in todo}
        usual = step * paces[working].expected
        if working in rates:
            busy = self._busy(age, rates, usual, since)
        else:  # a step of it takes so long at least, which says nothing of others
            busy = self._busy(age, rates)
            longer = max(1.0, since / usual / busy) if step else 1.0
            paces[working] = Left(*(longer * pace for pace in paces[working]))
        fixed = sum(self.fixed.values())
        expected, least, most = (
            (fixed + busy * sum(work * getattr(paces[kind], end) for kind, work in todo.items())) / share
            for end in Left._fields
        )
        if expected <= 0:
            return None
        self.totals = [(then, total) for then, total in self.totals if then >= DRIFT * age]
        if not self.totals or age > APART * self.totals[-1][0]:
            self.totals.append((age, age + expected))
        moved = max(abs(math.log((age + expected) / total)) for _, total in self.totals)
        factor = math.exp(min(moved, math.log(MOVED)))
        gone = min(since, busy * step * paces[working].expected / share)
        ahead = max(0.0, 1 - gone / expected)
        left = Left(ahead * expected, ahead * least / factor, ahead * most * factor)
        return left if left.most <= WIDEST * left.least else None

    def _is_ready(self) -> bool:
        taken = sum(mark.seconds for mark in self.marks[1:])  # before the first one a model was loaded
        return taken >= (SOON if len(self.marks) >= SEVERAL else LONG)

    def _counted(self) -> list[Mark]:
        """The work by which the pace is known: that of all workers, or but for the first step, which read a model."""
        return self.marks[self.first if self.workers > 1 else 1 :] or self.marks

    def _rates(self) -> dict[str, float]:
        """Seconds for a piece of work of each kind.

        The first step of all, and of a kind, also reads, converts or compiles something: where there are several it
        does not count, and where there are few others of its group do.
        """
        kinds, groups = defaultdict(list), defaultdict(list)
        counted = self._counted()
        for mark in counted:
            kinds[mark.kind].append(mark)
            groups[_group(mark.kind)].append(mark)
        mean, rates = _rate(counted), {}
        for kind, marks in kinds.items():
            others = [mark for mark in groups[_group(kind)] if mark.kind != kind]
            near = Mark(0.0, kind, marks[0].work, marks[0].work * (_rate(others) if others else mean))
            first = len(marks) >= SEVERAL and kind != self.marks[0].kind and self.workers == 1
            rates[kind] = _rate([*marks[first:], *[near] * (SEVERAL - len(marks))])
        return rates

    def _busy(self, age: float, rates: dict[str, float], step: float = 0.0, since: float = 0.0) -> float:
        """Times as long as usual the latest steps took, with one that is being made for longer than it should.

        step: seconds that what is left of it usually takes.
        """
        marks = self._counted()
        count, seen = Counter(mark.kind for mark in marks), {self.marks[0].kind}
        later = [mark for mark in marks if mark.kind in seen or seen.add(mark.kind) or count[mark.kind] < SEVERAL]
        latest = [mark for mark in later if mark.age > age - max(LEAST_RECENT, RECENT * age)] or later[-1:]
        taken = sum(mark.seconds for mark in latest)
        usual = sum(mark.work * rates[mark.kind] for mark in latest)
        return max(taken / usual, (taken + since) / (usual + step)) if step else taken / usual


def _group(kind: str) -> str:
    return kind.partition(" ")[0]


def _near(kind: str, rates: dict[str, float]) -> Left:
    """Seconds for a piece of work of a kind, by the nearest kinds of which some was made: as expected, at least and at
    most."""
    if kind in rates:
        return Left(rates[kind], rates[kind] / KNOWN, rates[kind] * KNOWN)
    groups: dict[str, list[float]] = defaultdict(list)
    for other, rate in rates.items():
        groups[_group(other)].append(rate)
    means = [sum(of_group) / len(of_group) for of_group in groups.values()]
    near = groups.get(_group(kind)) or means
    beyond = KNOWN if len(groups.get(_group(kind), ())) >= SEVERAL else UNKNOWN
    return Left(math.exp(sum(map(math.log, near)) / len(near)), min(near) / beyond, max(near) * beyond)


def _rate(marks: Sequence[Mark]) -> float:
    return sum(mark.seconds for mark in marks) / sum(mark.work for mark in marks)
