"""Pages of what is public: the names of `outliers` with their docstrings, and the commands with their own `--help`.

They are written to docs/reference, which git ignores, before pages are read. A new name or command has its place there.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType

import typer
from pydantic import BaseModel
from sphinx.pycode import ModuleAnalyzer
from tabulate import tabulate
from typer.cli import get_docs_for_click

import outliers
from outliers import app as table
from outliers.app import command_of
from outliers.terminal.command import app_of
from outliers.terminal.options import options

# Room of a public name to the page that it shares with others; a room that is not here has a page of its own.
PAGES = {"outlier_kernels": "quantization", "commands": "experiment", "views": "experiment", "errors": "experiment"}
DIRECTIVES = {  # a public value has the first one whose kind it is of
    "autoexception": lambda value: inspect.isclass(value) and issubclass(value, BaseException),
    "autoclass": inspect.isclass,
    "autofunction": callable,
    "autodata": lambda value: True,
}
SETTINGS = {"autoclass": ":members:", "autodata": ":no-value:"}
ENTRY = """```{{eval-rst}}
.. {directive}:: {name}
   {setting}
```
"""


def public_names() -> dict[str, object]:
    """Every public name with its value; of a module those that it makes public."""
    names = {f"outliers.{name}": getattr(outliers, name) for name in outliers.__all__}
    modules = {name: value for name, value in names.items() if isinstance(value, ModuleType)}
    inside = {f"{name}.{one}": getattr(module, one) for name, module in modules.items() for one in module.__all__}
    return {name: value for name, value in names.items() if name not in modules} | inside


def home(name: str) -> str:
    """The module in which a public name is defined."""
    package, _, last = name.rpartition(".")
    module = importlib.import_module(package)._HOME[last]
    return module if "." in module else f"{package}.{module}"


def page_of(name: str) -> str:
    """The page of a public name, after the room that it comes from."""
    package, room, *_ = f"{home(name)}.".split(".")
    return PAGES.get(package) or PAGES.get(room, room)


def reference() -> Iterator[tuple[str, str]]:
    """Each page of public names, and its Markdown."""
    found = public_names()
    for page, names in groupby(sorted(found, key=page_of), page_of):
        entries = []
        for name in names:
            directive = next(directive for directive, fits in DIRECTIVES.items() if fits(found[name]))
            entries.append(ENTRY.format(directive=directive, name=name, setting=SETTINGS.get(directive, "")))
        yield page, "\n".join([f"# {page.capitalize()}\n", *entries])


def commands() -> Iterator[tuple[str, str]]:
    """The page of each command, and its Markdown: what `--help` says."""
    for name in table.commands():
        command = typer.main.get_command(app_of(command_of(name)))
        called = f"python -m outliers.{name}"
        text = get_docs_for_click(obj=command, ctx=typer.Context(command), name=called)
        yield f"commands/{name}", text.replace(f"# `{called}`", f"# {name}", 1)


def write(app) -> None:
    """Write the pages that changed, and remove those of what is no longer there."""
    folder = Path(app.srcdir) / "docs" / "reference"
    pages = {folder / f"{page}.md": text for page, text in [*reference(), *commands()]}
    for old in {*folder.rglob("*.md")} - {*pages}:
        old.unlink()
    for path, text in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def show_defaults(_app, _what, _name, _value, _options, signature: str | None, returned: str | None) -> tuple | None:
    """What stands in a signature for a default that is made anew, in a form that is Python."""
    return (signature.replace("<factory>", "..."), returned) if signature else None


def complete(_app, what: str, name: str, value: object, _options, lines: list[str]) -> None:
    """Let a constant say what the comment in front of it says, and an experiment what its fields are."""
    if what == "data":
        lines[:] = ModuleAnalyzer.for_module(home(name)).find_attr_docs()["", name.rpartition(".")[2]]
    if what == "class" and issubclass(value, BaseModel):
        helps = {name: option.__metadata__[0].help for name, option in options(value, ("name", "shows")).items()}
        lines += ["Keyword Args:", *(f"    {field}: {said}" for field, said in helps.items())]


def from_markdown(_app, _what, _name, _value, _options, lines: list[str]) -> None:
    """Docstrings are Markdown: its tables, links to pages, and signs that mean something else in reStructuredText."""
    text = re.sub(r"(`[^`]*`)|[|*]", lambda found: found[1] or f"\\{found[0]}", "\n".join(lines))
    text = re.sub(r"\bdocs/([\w-]+)\.md(#[\w-]+)?", r"`docs/\1.md\2 <../\1.html\2>`__", text)
    lines[:] = re.sub(r"(?:^\\\|.*\\\|\n)+", _table, text, flags=re.MULTILINE).splitlines()


def _table(found: re.Match) -> str:
    """A table whose bars are escaped, as are those that its cells hold; around these there are no two spaces."""
    bar = r"(?<!\S)\\\|(?!\S)"
    header, _, *rows = [[cell.strip() for cell in re.split(bar, row)[1:-1]] for row in found[0].splitlines()]
    return "\n" + tabulate(rows, header, tablefmt="grid", disable_numparse=True) + "\n\n"


def setup(app) -> dict:
    app.connect("builder-inited", write)
    app.connect("autodoc-process-signature", show_defaults)
    app.connect("autodoc-process-docstring", complete, priority=300)
    app.connect("autodoc-process-docstring", from_markdown, priority=400)  # before napoleon
    return {"parallel_read_safe": True}
