"""Numbers as sentences have them."""

import math
from collections.abc import Callable, Iterable, Sequence

COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NAMED = 6  # more things are counted, not named
TWO_DIGITS = 2  # a bar has two digits where its leading one is 1, else one
MANY = 1  # as a share: from a doubling on a change is a ratio, not a percentage
Names = Callable[[int], str]  # what a token is called, by its id, as `outliers.text.tokens` has it


def count(number: int) -> str:
    """A number of things: one, twelve, 1,024; none for 0."""
    return COUNTS[number] if number < len(COUNTS) else f"{number:,}"


def listed(things: Iterable) -> str:
    """Things in a row: a; a and b; a, b and c."""
    *others, last = map(str, things)
    return f"{', '.join(others)} and {last}" if others else last


def features(numbers: Sequence[int]) -> str:
    """Features by their numbers, or, where they are many, how many they are: feature 3; features 3 and 17."""
    if len(numbers) > NAMED:
        return f"{count(len(numbers))} features"
    return f"feature{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as people write them: 2–5, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def precision(bar: float | None, usual: int) -> tuple[int, str]:
    """The digits of a number behind the point that its bar bears out, and the bar in as many: 0.736 and 0.012.

    The usual digits and no bar where that is unknown, or too small to be seen in them.
    """
    if bar is None or math.isnan(bar) or bar < 0.05 * 10**-usual:
        return usual, ""
    exponent = math.floor(math.log10(bar)) if math.isfinite(bar) else 0
    digits = max(0, (bar < TWO_DIGITS * 10**exponent) - exponent)
    return digits, f"{bar:,.{digits}f}"


def percent(share: float, bar: float | None = None) -> str:
    """A change in per cent with its sign and, where that is known, its bar: +110.6 % ± 1.4."""
    usual = 0 if abs(share) >= 10 else 1 if abs(share) >= 0.002 else 2
    digits, ending = precision(None if bar is None else 100 * bar, usual)
    value = round(100 * share, digits) or 0.0  # of −0 the sign goes
    form = f"{'+' if value else ''}{',' if abs(share) >= 10 else ''}.{digits}f"
    return f"{value:{form}} %{ending and f' ± {ending}'}".replace("-", "−")


def rise(share: float, bar: float | None = None) -> str:
    """An increase in per cent behind a verb that says that it is one: 110.6 % ± 1.4."""
    return percent(share, bar).removeprefix("+")


def changed(share: float) -> str:
    """The change of a quantity by a share: rises by 3.4 %; falls by 1.5 %; is multiplied by 26,517."""
    if share >= MANY:
        return f"is multiplied by {times(1 + share)}"
    return f"{'falls' if share < 0 else 'rises'} by {rise(abs(share))}"


def part(share: float) -> str:
    """A share in per cent, with a digit behind the point where it is small."""
    return f"{share:.1%}".replace("%", " %") if 0 < share < 0.1 else f"{share:.0%}".replace("%", " %")


def amount(value: float) -> str:
    """A magnitude, short: 2,960; 31.4; 1.40."""
    form = ",.0f" if abs(value) >= 100 else ".1f" if abs(value) >= 10 else ".2f"
    return f"{value:{form}}".replace("-", "−")


def signed(value: float) -> str:
    """A magnitude with its sign: +31.4; −1.40."""
    return f"{'+' if value > 0 else ''}{amount(value)}"


def decibels(db: float) -> str:
    """An error: −25.3; −∞ where there is none."""
    return "−∞" if math.isinf(db) else f"{round(db, 1) + 0.0:.1f}".replace("-", "−")  # of −0 the sign goes


def threads(number: int) -> str:
    """A number of threads: 1 thread, 2 threads."""
    return f"{number} thread{'s' if number > 1 else ''}"


def times(ratio: float) -> str:
    """A factor: 9.9; 1.006."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.3f}"
