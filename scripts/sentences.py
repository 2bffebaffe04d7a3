"""List every sentence that the program composes, to be read and edited as one text: tests/sentences.txt.

    python scripts/sentences.py

First what sections of kept rows say: titles, findings, captions, headings of tables, notes, words in figures. Then what
else of the views' sentences stands in the source, for rows that no kept run has. Then the messages of errors and of
the log, with the names of what is filled in. Run it after an edit; a test compares the list with the code.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests" / "sentences.txt"
COMPOSED = ("outliers/metrics/*/view.py", "outliers/report/**/*.py", "outliers/plot/*.py")
SAID = ("UserError", "BrokenModel", "FieldError", "unknown_name", "ValueError", "NotFinite", "info", "warning", "warn")
PIECE = 20  # characters of a sentence that are looked for among those of kept rows


def of_section(section) -> Iterator[str]:
    """What a section says, in the order of its page."""
    yield f"title: {section.title}"
    for finding in section.findings:
        yield f"finding: {finding.text}"
    for table in section.tables:
        yield f"table {table.name}: {table.caption}"
        yield f"headings: {' | '.join(table.headers)}"
    for drawing in section.drawings:
        yield f"figure {drawing.name}: {drawing.caption}"
        yield f"words: {' | '.join(in_figure(drawing.figure))}"
    for note in section.notes:
        yield f"note: {note}"


def in_figure(figure) -> Iterable[str]:
    """The titles, labels of axes and legends of a figure, each once."""
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    texts = [text for axes in figure.axes for text in (axes.get_title(), axes.get_xlabel(), axes.get_ylabel())]
    texts += [text.get_text() for legend in legends for text in legend.get_texts()]
    return dict.fromkeys(text.replace("\n", " / ") for text in texts if text)


def pieces(node: ast.AST) -> str:
    """A text as the source has it, with the names of what is filled in."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(map(pieces, values))
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return pieces(left) + pieces(right)
    return f"{{{ast.unparse(node)}}}"


def said(tree: ast.AST) -> Iterator[str]:
    """The messages of a file: the text of each error that it builds, and of each line of the log."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            texts = [pieces(one) for one in (*node.args, *(word.value for word in node.keywords))]
            if name == "unknown_name":
                yield f"unknown {texts[0]} '{texts[1]}'; known: {texts[2]} {' '.join(texts[3:])}".strip()
            elif name in SAID and any(isinstance(one, ast.Constant) for one in ast.walk(node.args[0])):
                yield " ".join(texts[0].split())


def composed(tree: ast.AST) -> Iterator[ast.AST]:
    """The texts of a file that are no docstrings, whole."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        if text and id(node) not in inside:
            yield node


def constants(node: ast.AST) -> list[str]:
    """Of a text the constant parts that are more than a few words."""
    parts = [part.value for part in getattr(node, "values", [node]) if isinstance(part, ast.Constant)]
    return [part for part in parts if len(part) >= PIECE and " " in part.strip()]


def listed() -> str:
    """The whole list."""
    from tests.kept import SECTIONS, kept

    lines = []
    for run, section_of in SECTIONS.items():
        lines += [f"\n## {run}", *of_section(section_of(kept(run)))]
    whole = " ".join(" ".join(lines).split())
    lines += ["\n## other sentences of views"]
    for file in sorted({file for pattern in COMPOSED for file in ROOT.glob(pattern)}):
        texts = composed(ast.parse(file.read_text(encoding="utf-8")))
        new = [pieces(node) for node in texts if any(one.strip() not in whole for one in constants(node))]
        lines += [f"\n{file.relative_to(ROOT)}", *map(repr, dict.fromkeys(new))] if new else []
    lines += ["\n## messages"]
    for folder in ("outliers", "kernels"):
        for file in sorted(ROOT.glob(f"{folder}/**/*.py")):
            if texts := list(dict.fromkeys(said(ast.parse(file.read_text(encoding="utf-8"))))):
                lines += [f"\n{file.relative_to(ROOT)}", *texts]
    return "\n".join(line.rstrip() for line in lines).strip() + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    LIST.write_text(listed(), encoding="utf-8")
