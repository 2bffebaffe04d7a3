"""The rooms of the house: data goes one way, so that a room imports from those on its left alone."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import outliers

PACKAGE = Path(outliers.__file__).parent
# From left to right; `terminal`, `errors`, `criterion` and `files` are for all.
ROOMS = (
    *("errors", "criterion", "terminal", "files", "outlier_kernels", "models", "text", "tracing"),
    *("quantization", "show", "variants", "specification", "trainer", "subjects", "metrics", "runs", "published"),
    *("views", "plot", "commands", "paper", "plugins"),
)
NAMED = re.compile(rf"(outliers\.({'|'.join(ROOMS)})\b[\w.]*)(:\w+)?")  # a module, or what is in one, by a string
PROGRAMS = "app"  # programs, which may use all, and the table of them
MOST_FILES = 16
A_FILE_EACH = {".", "metrics", "variants", "views", "commands"}  # rooms of many things of one kind, a file each
FILES = sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py"))


def room_of(module: str) -> int:
    """The place of a module's room, from the left."""
    parts = [part for part in module.split(".") if part != "outliers"]
    first = next(iter(parts), PROGRAMS)
    return ROOMS.index(first) if first in ROOMS else len(ROOMS)


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules of the project that a file imports or names by a string, anywhere in it; not the package itself,
    which knows the homes of public names."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = node.module in ("outliers", "outlier_kernels")
            found = [f"{node.module}.{alias.name}" for alias in node.names] if inside else [node.module or "."]
        elif isinstance(node, ast.Constant) and (named := NAMED.fullmatch(str(node.value))):
            found = [named[1]]
        yield from (one for one in found if one.startswith((".", "outliers.", "outlier_kernels")))


def test_a_room_imports_from_its_left():
    to_its_right = []
    for file in FILES:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        runs = 'if __name__ == "__main__":' in source  # it is a program, wherever it is
        own = len(ROOMS) if runs else room_of(".".join(file.with_suffix("").parts).removesuffix("__init__"))
        to_its_right += [f"{file}: {name}" for name in imported(ast.parse(source)) if room_of(name) > own]
    assert to_its_right == []


def test_no_files_import_each_other_in_a_circle():
    modules = {f"outliers.{'.'.join(file.with_suffix('').parts)}".removesuffix(".__init__"): file for file in FILES}

    def module_of(name: str) -> str:
        return name if name in modules or "." not in name else module_of(name.rpartition(".")[0])

    graph = {}
    for module, file in modules.items():
        found = map(module_of, imported(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))))
        graph[module] = {*found} & {*modules} - {module, "outliers"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_no_folder_is_crowded():
    folders = {file.parent for file in FILES if str(file.parent) not in A_FILE_EACH}
    assert [str(folder) for folder in folders if len(list((PACKAGE / folder).glob("*.py"))) > MOST_FILES] == []
