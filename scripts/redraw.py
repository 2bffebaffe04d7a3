"""Draw the tables and figures of kept results again, from their rows.

    python scripts/redraw.py [RUN …]

A run is a folder of results/kept, such as damage/smollm2-135m; all of them where none is given. Only files that are
kept already are written. Run it after words of a table or a figure changed; tests see that they are those of the rows.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from outliers.show.section import Section  # noqa: E402
from outliers.show.write import write_files  # noqa: E402
from tests.kept import KEPT, OTHERS, SECTIONS, kept  # noqa: E402

ROWS = {"rows.parquet", "rows.jsonl", "README.md"}


def redraw(run: str, section: Section) -> None:
    """Draw the section of a run again, and print which files have changed."""
    with TemporaryDirectory() as folder:
        write_files(section, Path(folder))
        for drawn in sorted(Path(folder).iterdir()):
            file = KEPT / run / drawn.name
            if drawn.name not in ROWS and file.exists() and file.read_bytes() != drawn.read_bytes():
                file.write_bytes(drawn.read_bytes())
                print(file.relative_to(ROOT))


if __name__ == "__main__":
    options = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("runs", nargs="*", metavar="RUN")
    drawn = [*SECTIONS.items(), *OTHERS]
    known = list(dict.fromkeys(run for run, _ in drawn))
    runs = options.parse_args().runs or known
    if unknown := [run for run in runs if run not in known]:
        options.error(f"no kept run '{unknown[0]}'; expected some of {', '.join(known)}")
    for run, section in drawn:
        if run in runs:
            redraw(run, section(kept(run)))
