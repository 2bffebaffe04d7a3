"""Forecast the time that a run still takes from the time that its steps have taken so far."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# The time of a step is proportional to the weights of the model plus this number: nine schemes on two cores of a CPU
# took 10 s and 6.2 s for each million weights.
FIXED = 1_500_000
RECENT, LEAST_RECENT = 1 / 2, 5  # share of the age of a run, and seconds at least, of the steps that count as recent
CERTAIN = 2  # recent steps from whose slowdown half (in logarithms) is believed
DRIFT = 1 / 2  # share of the age of a run: forecasts may move again as far as they did since then
# Factors of a range: for other load of the machine, for a kind without finished steps, and at most for drift.
LOAD, UNKNOWN, MOVED = 1.5, 2.0, 3.0
SOON, LONG, SEVERAL = 2, 10, 3  # a forecast needs SOON seconds in SEVERAL steps, or LONG seconds in fewer
WIDEST = 10  # largest ratio of most to least; a wider range, as of small models before a large one, is useless
APART = 1.01  # ratio of ages of a run between two forecasts that are kept
MARKS = 500  # finished steps that are kept


class Steps(NamedTuple):
    """Steps of a run.

    count: number of steps. size: weights of the model that makes them. kind: steps of one kind take equally long for
    one model. cost: time of a step, in times that a block passes the model. seconds: of each step, if that does not
    depend on a model.
    """

    count: int = 0
    size: int = 0
    kind: str = ""
    cost: float = 1.0
    seconds: float = 0.0

    @property
    def work(self) -> float:
        """The time that the steps take, in weights that a block passes."""
        return self.count * (self.size + FIXED) * self.cost


RENDERING = Steps(1, kind="drawing", seconds=3.0)  # making tables, figures and page of an experiment


class Left(NamedTuple):
    """Seconds that are left: expected, at least and at most."""

    expected: float
    least: float
    most: float


class Pace(NamedTuple):
    """Seconds per unit of work of a kind of steps, expected, and the factor by which they may be fewer or more."""

    expected: float
    factor: float


class Mark(NamedTuple):
    """Finished work.

    age: of the run when the work ended, in seconds. kind: of its steps. work: amount, as `Steps.work`. seconds: time
    taken.
    """

    age: float
    kind: str
    work: float
    seconds: float


class Forecaster:
    """A forecast of the time that is left of a run.

    Steps of a kind are expected to take as long as finished steps of the kind. If there are none, steps take, relative
    to their work, as long as those of their group (the first word of the kind), or else as all others (of models, if
    they are of a model, as one of its tasks takes much longer than its blocks), and the range is as wide as their
    scatter. The latest steps tell how busy the machine is. The range has room for other programs that
    start or end, and is wider if forecasts changed lately.
    """

    def __init__(self):
        self.todo: Counter = Counter()  # remaining work, by kind
        self.fixed: Counter = Counter()  # remaining seconds, by kind, if known from the start
        self.of_models: dict[str, bool] = {}  # whether the steps take longer in larger models, by kind
        self.marks: list[Mark] = []
        self.totals: list[tuple[float, float]] = []  # (age, forecast of the whole run) in seconds
        self.workers, self.first = 1, 0  # number of workers, and the mark since which they share the work

    def expect(self, steps: Steps, sign: int = 1) -> None:
        """Add steps to those that are left, or remove them with sign -1."""
        if steps.seconds:
            self.fixed[steps.kind] += sign * steps.count * steps.seconds
        else:
            self.todo[steps.kind] += sign * steps.work
            self.of_models[steps.kind] = steps.size > 0

    def set_workers(self, workers: int) -> None:
        """Set the number of workers that share the work from now on."""
        self.workers, self.first = workers, len(self.marks)

    def learn(self, mark: Mark) -> None:
        """Learn from finished work; the caller removes its steps from what is left by `expect` with sign -1."""
        self.marks.append(mark)
        if len(self.marks) > MARKS:
            del self.marks[1 : MARKS // 2 : 2]

    def left(
        self, age: float, working: str = "", done: float = 0.0, rest: float = 0.0, since: float = 0.0
    ) -> Left | None:
        """Return the time that is left, in seconds; None if too little is finished to know, or nothing is left.

        Args:
            age: seconds since the run began.
            working: kind of the step that is running.
            done: finished work of that step, as `Steps.work`.
            rest: unfinished work of that step.
            since: seconds since work was last finished.
        """
        taken = sum(mark.seconds for mark in self.marks[1:])  # the first one includes loading a model
        if taken < (SOON if len(self.marks) >= SEVERAL else LONG):
            return None
        counted = self._counted()  # read once, as another thread may finish steps meanwhile
        rates = _rates(counted)
        share = max(1.0, self.workers / max(1, len(self.marks) - self.first))
        todo = Counter(self.todo)
        todo[working] -= done
        made = Counter(mark.kind for mark in counted)
        paces = {kind: self._near(kind, rates, made) for kind in todo}
        usual = rest * paces[working].expected
        if working in rates:
            busy = _busy(counted, age, rates, usual, since)
        else:  # a lower bound for steps of this kind, which tells nothing about others
            busy = _busy(counted, age, rates)
            longer = max(1.0, since / usual / busy) if rest else 1.0
            paces[working] = paces[working]._replace(expected=longer * paces[working].expected)
        times = {kind: busy * work * paces[kind].expected / share for kind, work in todo.items()}
        expected = sum([*self.fixed.values()]) / share + sum(times.values())
        if expected <= 0:
            return None
        unknown: Counter = Counter()  # logarithms of factors, weighted by time, of the groups, which are independent
        for kind, seconds in times.items():
            unknown[_group(kind)] += seconds / expected * math.log(paces[kind].factor)
        self.totals = [(then, total) for then, total in self.totals if then >= DRIFT * age]
        if not self.totals or age > APART * self.totals[-1][0]:
            self.totals.append((age, age + expected))
        moved = max(abs(math.log((age + expected) / total)) for _, total in self.totals)
        factor = math.exp(math.hypot(math.log(LOAD), min(moved, math.log(MOVED)), *unknown.values()))
        gone = min(since, busy * rest * paces[working].expected / share)
        expected = max(0.0, expected - gone)
        return Left(expected, expected / factor, expected * factor) if factor**2 <= WIDEST else None

    def _near(self, kind: str, rates: dict[str, float], made: Mapping[str, int]) -> Pace:
        """Return the pace of a kind from the nearest kinds with finished work.

        Args:
            kind: of steps.
            rates: seconds per unit of work, by kind.
            made: number of finished steps, by kind, which is its weight.
        """
        if kind in rates:
            return Pace(rates[kind], 1.0)
        group = [other for other in rates if _group(other) == _group(kind)]
        alike = [other for other in rates if self.of_models.get(other) == self.of_models.get(kind)]
        near = group or alike or [*rates]
        logs, weights = [math.log(rates[other]) for other in near], [made[other] for other in near]
        mean = _weighted_mean(logs, weights)
        variance = _weighted_mean([(log - mean) ** 2 for log in logs], weights)
        beyond = 0.0 if len(group) >= SEVERAL else math.log(UNKNOWN)
        return Pace(math.exp(mean), math.exp(math.hypot(math.sqrt(variance), beyond)))

    def _counted(self) -> list[Mark]:
        """Return the marks that determine the pace: those since the workers share the work, or all but the first step.

        The first step also loads a model.
        """
        return self.marks[self.first if self.workers > 1 else 1 :] or self.marks


def _rates(marks: Sequence[Mark]) -> dict[str, float]:
    """Return seconds per unit of work for each kind.

    If there are few steps of a kind, steps of the other kinds in the group are counted too.
    """
    kinds, groups = defaultdict(list), defaultdict(list)
    for mark in marks:
        kinds[mark.kind].append(mark)
        groups[_group(mark.kind)].append(mark)
    mean, rates = _rate(marks), {}
    for kind, of_kind in kinds.items():
        others = [mark for mark in groups[_group(kind)] if mark.kind != kind]
        near = Mark(0.0, kind, of_kind[0].work, of_kind[0].work * (_rate(others) if others else mean))
        rates[kind] = _rate([*of_kind, *[near] * (SEVERAL - len(of_kind))])
    return rates


def _busy(marks: Sequence[Mark], age: float, rates: dict[str, float], step: float = 0.0, since: float = 0.0) -> float:
    """Return the factor by which the latest steps took longer than usual, with the running one if it is overdue.

    Args:
        marks: finished work.
        age: seconds since the run began.
        rates: usual seconds per unit of work, by kind.
        step: seconds that the rest of the running step usually takes.
        since: seconds since work was last finished.
    """
    count, begun = Counter(mark.kind for mark in marks), {marks[0].kind}
    later = [mark for mark in marks if mark.kind in begun or begun.add(mark.kind) or count[mark.kind] < SEVERAL]
    latest = [mark for mark in later if mark.age > age - max(LEAST_RECENT, RECENT * age)] or later[-1:]
    taken = sum(mark.seconds for mark in latest)
    usual = sum(mark.work * rates[mark.kind] for mark in latest)
    busy = max(taken / usual, (taken + since) / (usual + step)) if step else taken / usual
    return busy ** (len(latest) / (len(latest) + CERTAIN))


def _group(kind: str) -> str:
    return kind.partition(" ")[0]


def _weighted_mean(values: Iterable[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _rate(marks: Sequence[Mark]) -> float:
    return sum(mark.seconds for mark in marks) / sum(mark.work for mark in marks)
