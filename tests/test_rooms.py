"""The rooms of the house: data goes one way, so that a room imports from those on its left alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import outliers

PACKAGE = Path(outliers.__file__).parent
# From left to right; `terminal`, `errors`, `criterion` and `files` are for all.
ROOMS = (
    *("errors", "criterion", "terminal", "files", "outlier_kernels", "models", "text", "tracing"),
    *("quantization", "show", "variants", "specification", "training", "subjects", "metrics", "runs", "presets"),
    *("views", "plot", "paper", "report", "plugins"),
)
COMMANDS = "commands"  # programs, which may use all, and what they have in common
MOST_FILES = 15
A_FILE_EACH = {"metrics", "variants", "views"}  # rooms of many things of one kind, a file each
FILES = sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py"))


def room_of(module: str) -> int:
    """The place of a module's room, from the left."""
    parts = [part for part in module.split(".") if part != "outliers"]
    first = next(iter(parts), COMMANDS)
    return ROOMS.index(first) if first in ROOMS else len(ROOMS)


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules of the project that a file imports, anywhere in it; not the package itself, which imports nothing."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = node.module in ("outliers", "outlier_kernels")
            found = [f"{node.module}.{alias.name}" for alias in node.names] if inside else [node.module or "."]
        yield from (one for one in found if one.startswith((".", "outliers.", "outlier_kernels")))


def test_a_room_imports_from_its_left():
    to_its_right = []
    for file in FILES:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        runs = 'if __name__ == "__main__":' in source  # it is a program, wherever it is
        own = len(ROOMS) if runs else room_of(".".join(file.with_suffix("").parts).removesuffix("__init__"))
        to_its_right += [f"{file}: {name}" for name in imported(ast.parse(source)) if room_of(name) > own]
    assert to_its_right == []


def test_no_folder_is_crowded():
    folders = {file.parent for file in FILES if str(file.parent) not in A_FILE_EACH}
    assert [str(folder) for folder in folders if len(list((PACKAGE / folder).glob("*.py"))) > MOST_FILES] == []
