"""How long README's commands take, alone and beside a busy process, and how well they forecast it.

    python benchmarks/commands.py [COMMAND …] [--minutes 25] [--alone]

Each command is run in an empty folder, on a terminal, so that its bar shows a forecast each second: first all of them
alone, then all beside a process that keeps one core busy; the shortest first. A command that would not end within the
minutes, as it was kept before, or that does not, is left out, and what is kept of it stays. Run it where nothing else
runs.

Kept are wall seconds, processor seconds and two forecasts of the whole time, each a range: the first one, and the one
that was made nearest to half of the time.
"""

import csv
import io
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kept import FOLDER, from_other_folders, parser

from outliers.files import write_whole
from outliers.subjects.provenance import environment
from outliers.terminal.amounts import TIMES

MODEL = "smollm2-135m"
COMMANDS = {  # as README types them; `make sweep` installs before
    "make sweep": ["sweep", "--block", "64", "--blocks", "8"],
    "look": ["report", "look", MODEL],
    "ablate": ["ablate", MODEL],
    "damage": ["damage", MODEL, "--scheme", "absmax"],
    "origins": ["origins", MODEL],
    "plan": ["plan", MODEL, "--scheme", "absmax", "--cost", "5%"],
}
NAME = "commands.csv"
LEFT = re.compile(r"about (?:([\d.]+)( \w+)? to )?([\d.]+) (\w+) left")
UNITS = dict(TIMES)
BUSY = "beside_"  # prefix of the columns of a run beside a busy process
END = 10  # seconds in which a command ends after SIGTERM


class Forecast(NamedTuple):
    """A forecast of the whole time of a run, in seconds, and the age of the run at which it was made."""

    age: float
    least: float
    most: float


def forecast_in(text: str, age: float) -> Forecast | None:
    """Return the last forecast in what a bar drew; None if there is none."""
    found = LEFT.findall(text)
    if not found:
        return None
    least, unit, most, last = found[-1]
    of_most = float(most) * UNITS[last]
    of_least = float(least) * UNITS[unit.strip() or last] if least else of_most
    return Forecast(age, age + of_least, age + of_most)


def run(arguments: list[str], limit: float) -> dict | None:
    """Time a command with its forecasts; return None if it takes longer than a limit in seconds.

    Raises:
        RuntimeError: the command failed.
    """
    ours, its = pty.openpty()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        inside = {"cwd": folder, "env": from_other_folders() | {"COLUMNS": "120"}}
        program = [sys.executable, "-m", f"outliers.{arguments[0]}", *arguments[1:]]
        process = subprocess.Popen(program, stdout=its, stderr=its, stdin=subprocess.DEVNULL, **inside)
        os.close(its)
        forecasts, text = [], ""
        for part in _drawn(ours):
            age, text = time.perf_counter() - start, text[-10_000:] + part
            if forecast := forecast_in(part, age):
                forecasts.append(forecast)
            if age > limit:
                process.send_signal(signal.SIGTERM)
                process.wait(END)
                return None
        code, seconds = process.wait(), time.perf_counter() - start
    if code:
        raise RuntimeError(f"{' '.join(arguments)} ended with exit code {code}:\n{text[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    middle = sorted(forecasts, key=lambda forecast: abs(forecast.age - seconds / 2))
    return {"seconds": round(seconds), "processor_seconds": round(processor)} | {
        f"{name}_{end}": round(getattr(one, end))
        for name, some in (("first", forecasts[:1]), ("middle", middle[:1]))
        for one in some
        for end in ("least", "most")
    }


def _drawn(terminal: int) -> Iterator[str]:
    """Yield what a process draws on a terminal, until it ends."""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # as Linux says that nobody writes any more
            part = b""
        if not part:
            os.close(terminal)
            return
        yield part.decode("utf-8", "replace")


@contextmanager
def alone() -> Iterator[None]:
    yield


@contextmanager
def beside() -> Iterator[None]:
    """Keep one core busy within this context."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(names: list[str], ways: dict[str, Callable], minutes: float, kept: dict[str, dict]) -> dict[str, dict]:
    """Return the kept rows of commands, with new ones for those that could be measured in time."""
    end = time.perf_counter() + 60 * minutes
    shortest_first = sorted(names, key=lambda name: float(kept.get(name, {}).get("seconds") or 0))
    for prefix, surroundings in ways.items():
        for name in shortest_first:
            left = end - time.perf_counter()
            usual = float(kept.get(name, {}).get(f"{prefix}seconds") or kept.get(name, {}).get("seconds") or 0)
            with surroundings():
                found = run(COMMANDS[name], left) if usual < left else None
            print(f"{name}{' beside a busy process' * bool(prefix)}: {_said(found, usual)}", flush=True)
            if found:
                old = {column: value for column, value in kept.get(name, {}).items() if _prefix(column) != prefix}
                fresh = {f"{prefix}{column}": value for column, value in found.items()}
                kept[name] = old | fresh | {"command": name, "processor": environment("cpu")["device_name"]}
    return kept


def _prefix(column: str) -> str:
    return BUSY if column.startswith(BUSY) else ""


def _said(found: dict | None, usual: float) -> str:
    if not found:
        return f"left out, for it {f'took {usual:.0f} s before' if usual else 'takes longer than is left'}"
    ranges = [
        f"{name} forecast {found[f'{name}_least']} to {found[f'{name}_most']}"
        for name in ("first", "middle")
        if f"{name}_least" in found
    ]
    return ", ".join([f"{found['seconds']} s", *ranges])


COLUMNS = ("seconds", "processor_seconds", "first_least", "first_most", "middle_least", "middle_most")


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "commands", nargs="*", metavar="COMMAND", help=f"some of {', '.join(COMMANDS)}; by default all"
    )
    options.add_argument("--minutes", type=float, default=25, help="the most minutes that all of it takes")
    options.add_argument("--alone", action="store_true", help="do not run commands beside a busy process")
    arguments = options.parse_args()
    if unknown := sorted({*arguments.commands} - {*COMMANDS}):
        options.error(f"no command '{unknown[0]}'; expected some of {', '.join(COMMANDS)}")
    file = arguments.out / NAME
    with (file if file.exists() else FOLDER / NAME).open(encoding="utf-8", newline="") as lines:
        kept = {row["command"]: row for row in csv.DictReader(lines)}
    ways = {"": alone} | ({} if arguments.alone else {BUSY: beside})
    kept = measure(arguments.commands or list(COMMANDS), ways, arguments.minutes, kept)
    columns = ["command", *COLUMNS, *(f"{BUSY}{column}" for column in COLUMNS), "processor"]
    lines = [columns, *([row.get(column, "") for column in columns] for row in kept.values())]
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_whole(file, text.getvalue())
    print(f"\n{file}")


if __name__ == "__main__":
    main()
