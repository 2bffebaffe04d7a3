"""Where a benchmark leaves what it measured: numbers with their provenance, of which the pages' tables are made."""

import json
import os
import shlex
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from tabulate import tabulate

from outliers.files import write_whole
from outliers.subjects.provenance import environment

FOLDER = Path("results/kept/benchmarks")


def parser(description: str) -> ArgumentParser:
    """Return a parser with the options that every benchmark has; description: the benchmark's docstring."""
    options = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=FOLDER, help="folder for the numbers")
    return options


def keep(name: str, rows: list[dict], columns: dict[str, str], out: Path) -> None:
    """Write NAME.json and print its table.

    Args:
        rows: what was measured.
        columns: the table's headers, each with the format of its cells, such as {"seconds": "{seconds:.1f}"}.
    """
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    kept = {"command": command, **environment("cpu"), "columns": columns, "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{name}.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(f"\n{table(kept, 'simple')}\n\n{out}/{name}.json")


def from_other_folders() -> dict[str, str]:
    """Return the environment of a process in another folder that imports from the same places as this one."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path or ".") for path in sys.path)}


def kept_rows(name: str, out: Path) -> list[dict]:
    """Return the rows that `keep` wrote before; none if it did not."""
    path = out / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def table(kept: dict, form: str = "pipe") -> str:
    """Return the table of what `keep` wrote, in a format of the tabulate library, and a sentence on how it was
    measured."""
    cells = [[cell.format(**row) for cell in kept["columns"].values()] for row in kept["rows"]]
    versions = ", ".join(f"{package} {kept[package]}" for package in ("torch", "transformers"))
    threads = f"{kept['threads']} thread{'' if kept['threads'] == 1 else 's'}"
    numbers = [all(cell[:1].isdigit() for cell in column) for column in zip(*cells, strict=True)]
    align = ["right" if number else "left" for number in numbers]
    return (
        f"{tabulate(cells, list(kept['columns']), tablefmt=form, disable_numparse=True, colalign=align)}\n\n"
        f"Measured by `{kept['command']}` on {kept['device_name']}, {threads}; {versions}."
    )
