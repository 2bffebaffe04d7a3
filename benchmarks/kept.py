"""Where a benchmark leaves what it measured: numbers with their provenance, and the table that the pages show."""

import json
import shlex
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import pandas as pd

from outliers.experiment.provenance import environment
from outliers.files import write_whole
from outliers.report.section import Table

FOLDER = Path("results/kept/benchmarks")


def parser(description: str) -> ArgumentParser:
    """The options that every benchmark has; description: its docstring."""
    options = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=FOLDER, help="where the numbers and their table go")
    return options


def keep(name: str, rows: list[dict], columns: dict[str, str], out: Path, names: int = 1) -> None:
    """Write NAME.json and NAME.md, and print the table.

    Args:
        rows: what was measured.
        columns: the table's headers, each with the format of its cells, such as {"seconds": "{seconds:.1f}"}.
        names: so many columns from the left are text.
    """
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    about = environment("cpu")
    numbers = {"command": command, **about, "rows": rows}
    cells = [[form.format(**row) for form in columns.values()] for row in rows]
    table = Table(name, provenance(command, about), list(columns), cells, pd.DataFrame(rows), names)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{name}.json", json.dumps(numbers, indent=1, ensure_ascii=False) + "\n")
    write_whole(out / f"{name}.md", f"{table.form('github')}\n\n{table.caption}\n")
    print(f"\n{table.form('simple')}\n\n{table.caption}\n\nNumbers and table: {out}/{name}.json, .md")


def provenance(command: str, about: dict) -> str:
    """One sentence: what measured a table, and on what."""
    versions = ", ".join(f"{package} {about[package]}" for package in ("torch", "transformers") if package in about)
    threads = f"{about['threads']} thread{'' if about['threads'] == 1 else 's'}"
    return f"Measured by `{command}` on: {about['device_name']}; {threads}; {versions}."
