"""Draw the rooms of the code, how often they import from each other, and the way of a command through them.

    python scripts/rooms.py [FILE]

Imports are counted in the syntax trees of all files, also those within functions and those that a string names. The way
is that of docs/tour.md, whose list has a function a line. FILE is docs/rooms.svg by default.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
SOURCES = {"outliers": ROOT / "outliers", "outlier_kernels": ROOT / "kernels/outlier_kernels"}
# A room imports from those before it alone; programs, which are outside of them, may use all.
ROOMS = (
    *("errors", "criterion", "terminal", "files", "outlier_kernels", "models", "text", "tracing"),
    *("quantization", "show", "variants", "config", "trainer", "subjects", "metrics", "runs", "published"),
    *("views", "plot", "commands", "paper", "plugins", "programs"),
)
NAMED = re.compile(rf"(outliers\.({'|'.join(ROOMS)})\b[\w.]*)(:\w+)?")  # a module, or what is in one, by a string
HOP = re.compile(r"^\d+\. `(?P<function>[\w.]+)` in \[[^\]]+\]\(\.\./(?P<file>[\w/]+\.py)\)", re.MULTILINE)


class Module(NamedTuple):
    """The room of a module, and the modules of the project that it imports."""

    room: str
    imports: list[str]


class Hop(NamedTuple):
    """A function on the way of a command. file: its path in the repository."""

    file: str
    function: str

    @property
    def room(self) -> str:
        return room_of(self.file.removeprefix("kernels/").removesuffix(".py").replace("/", "."))


def room_of(module: str) -> str:
    first = next((part for part in module.split(".") if part != "outliers"), "")
    return first if first in ROOMS else ROOMS[-1]


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the project that a file imports or names by a string, anywhere in it; not the package
    itself, which knows the homes of public names."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = node.module in SOURCES
            found = [f"{node.module}.{alias.name}" for alias in node.names] if inside else [node.module or "."]
        elif isinstance(node, ast.Constant) and (named := NAMED.fullmatch(str(node.value))):
            found = [named[1]]
        yield from (one for one in found if one.startswith((".", "outliers.", "outlier_kernels")))


def modules() -> dict[str, Module]:
    """Read the room and the imports of each module of the project, by name."""
    found = {}
    for package, folder in SOURCES.items():
        for file in sorted(folder.rglob("*.py")):
            name = ".".join([package, *file.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
            source = file.read_text(encoding="utf-8")
            runs = 'if __name__ == "__main__":' in source  # it is a program, wherever it is
            found[name] = Module(ROOMS[-1] if runs else room_of(name), [*imported(ast.parse(source))])
    return found


def imports() -> Counter[tuple[str, str]]:
    """Count the imports of each room from each other room, (importing, imported)."""
    pairs = ((module.room, room_of(one)) for module in modules().values() for one in module.imports)
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def hops() -> list[Hop]:
    """Read the way of a command from docs/tour.md."""
    tour = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    return [Hop(one["file"], one["function"]) for one in HOP.finditer(tour)]


def draw(rooms: list[str], counts: Counter[tuple[str, str]], way: list[Hop]) -> Figure:
    """Draw a matrix of imports, and beside it the way through the rooms, a column a hop."""
    figure = Figure(figsize=(12, 0.27 * len(rooms) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[len(rooms), max(len(way), 1)])
    _draw_imports(left, rooms, counts)
    places = [rooms.index(hop.room) for hop in way]
    right.plot(range(1, len(way) + 1), places, color="0.6", linewidth=1, zorder=1)
    right.scatter(range(1, len(way) + 1), places, s=170, color="#0072B2", zorder=2)
    for number, place in enumerate(places, 1):
        right.annotate(str(number), (number, place), color="white", fontsize=8, ha="center", va="center")
    right.set_title("the way of the tour, a hop each", fontsize=10, loc="left")
    right.set_xticks([])
    right.grid(axis="y", color="0.9")
    for axes in (left, right):
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    return figure


def _draw_imports(axes: Axes, rooms: list[str], counts: Counter[tuple[str, str]]) -> None:
    table = np.array([[counts[row, column] for column in rooms] for row in rooms])
    axes.imshow(np.ma.masked_equal(np.log1p(table), 0), cmap="Blues", vmax=1.6 * np.log1p(table.max()), aspect="auto")
    for row, column in np.argwhere(table):
        axes.annotate(str(table[row, column]), (column, row), fontsize=7, ha="center", va="center")
    axes.set_xticks(range(len(rooms)), rooms, rotation=45, ha="left")
    axes.set_yticks(range(len(rooms)), rooms)
    axes.xaxis.tick_top()
    axes.set_title("how often the room of a row imports from that of a column", fontsize=10, loc="left")
    axes.plot([-0.5, len(rooms) - 0.5], [-0.5, len(rooms) - 0.5], color="0.8", linewidth=0.8)


def main() -> None:
    """Draw the rooms that have imports, in their order."""
    counts = imports()
    rooms = [room for room in ROOMS if any(room in pair for pair in counts)]
    file = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/rooms.svg"
    with matplotlib.rc_context({"svg.hashsalt": "rooms", "font.size": 9}):
        draw(rooms, counts, hops()).savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
