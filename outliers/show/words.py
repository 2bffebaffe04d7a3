"""Numbers and lists as sentences write them."""

import math
from collections.abc import Callable, Iterable, Sequence

COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NAMED = 6  # longer lists are counted, not named
TWO_DIGITS = 2  # an error bar has two digits if its leading digit is 1, otherwise one
MANY = 1  # from a doubling on, a change is written as a factor, not as a percentage
TokenNamer = Callable[[int], str]  # the name of a token by its id, see `outliers.text.tokens`


def count(number: int) -> str:
    """Write a number of things: none, one, twelve, 1,024."""
    return COUNTS[number] if number < len(COUNTS) else f"{number:,}"


def listed(things: Iterable) -> str:
    """Join things into a list: a; a and b; a, b and c."""
    *others, last = map(str, things)
    return f"{', '.join(others)} and {last}" if others else last


def features(numbers: Sequence[int]) -> str:
    """Name features, or count them if there are many: feature 3; features 3 and 17."""
    if len(numbers) > NAMED:
        return f"{count(len(numbers))} features"
    return f"feature{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def ranges(numbers: list[int]) -> str:
    """Write ascending numbers as ranges: 2–5, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def span(first: int, last: int) -> str:
    """Write a range of whole numbers: 2 to 5, or 7."""
    return f"{first} to {last}" if first < last else f"{first}"


def precision(bar: float | None, usual: int) -> tuple[int, str]:
    """Return how many decimals of a number its error bar supports, and the bar with as many: 3 and "0.012".

    Return the usual decimals and no bar if the bar is unknown or too small to be seen in them.
    """
    if bar is None or math.isnan(bar) or bar < 0.05 * 10**-usual:
        return usual, ""
    exponent = math.floor(math.log10(bar)) if math.isfinite(bar) else 0
    digits = max(0, (bar < TWO_DIGITS * 10**exponent) - exponent)
    return digits, f"{bar:,.{digits}f}"


def percent(share: float, bar: float | None = None, unit: str = " %") -> str:
    """Write a change in per cent with its sign and, if known, its error bar: +110.6 % ± 1.4."""
    usual = 0 if abs(share) >= 10 else 1 if abs(share) >= 0.002 else 2
    digits, ending = precision(None if bar is None else 100 * bar, usual)
    value = round(100 * share, digits) or 0.0  # −0 becomes 0
    form = f"{'+' if value else ''}{',' if abs(share) >= 10 else ''}.{digits}f"
    return f"{value:{form}}{unit}{ending and f' ± {ending}'}".replace("-", "−")


def rise(share: float, bar: float | None = None) -> str:
    """Write an increase in per cent without its sign, for use behind a verb: 110.6 % ± 1.4."""
    return percent(share, bar).removeprefix("+")


def changed(share: float, bar: float | None = None) -> str:
    """Describe a relative change: rises by 3.4 % ± 0.2; falls by 1.5 %; is multiplied by 26,517."""
    if share >= MANY:
        return f"is multiplied by {times(1 + share)}"
    return f"{'falls' if share < 0 else 'rises'} by {rise(abs(share), bar)}"


def part(share: float) -> str:
    """Write a share in per cent, with one decimal if it is below 10 %."""
    return f"{share:.1%}".replace("%", " %") if 0 < share < 0.1 else f"{share:.0%}".replace("%", " %")


def amount(value: float) -> str:
    """Write a magnitude in about three digits: 2,960; 31.4; 1.40."""
    form = ",.0f" if abs(value) >= 100 else ".1f" if abs(value) >= 10 else ".2f"
    return f"{value:{form}}".replace("-", "−")


def signed(value: float) -> str:
    """Write a magnitude with its sign: +31.4; −1.40."""
    return f"{'+' if value > 0 else ''}{amount(value)}"


def decibels(db: float) -> str:
    """Write an error in dB: −25.3; −∞ if there is none."""
    return "−∞" if math.isinf(db) else f"{round(db, 1) + 0.0:.1f}".replace("-", "−")  # −0 becomes 0


def threads(number: int) -> str:
    """Write a number of threads: 1 thread, 2 threads."""
    return f"{number} thread{'s' if number > 1 else ''}"


def times(ratio: float) -> str:
    """Write a factor: 9.9; 1.006."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.3f}"
