"""List every sentence that the program composes, to be read and edited as one text: tests/sentences.txt.

    python scripts/sentences.py

First the words of sections of kept rows: titles, findings, captions, headings of tables, notes, words in figures; then
findings of made-up rows, as far as kept ones do not reach them. Then what else stands in the source of views, and the
messages of errors and of the log, with the names of what is filled in. Run it after an edit; a test compares the list
with the code.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests" / "sentences.txt"
VIEWS = [f"outliers/{room}/*.py" for room in ("show", "views", "plot", "paper", "report")]
ERRORS = ("UserError", "BrokenModel", "BadWeights", "CellsFailed", "FieldError", "ValueError", "NotFinite")
SAID = (*ERRORS, "info", "warning", "warn")
PIECE = 20  # characters of a sentence in the source that are looked for in the sentences with examples


def of_section(section) -> Iterator[str]:
    """The words of a section, in the order of its page."""
    yield f"title: {section.title}"
    yield from (f"finding: {finding.text}" for finding in section.findings)
    for table in section.tables:
        yield from (f"table {table.name}: {table.caption}", f"headings: {' | '.join(table.headers)}")
    for drawing in section.drawings:
        yield from (f"figure {drawing.name}: {drawing.caption}", f"words: {' | '.join(in_figure(drawing.figure))}")
    yield from (f"note: {note}" for note in section.notes)


def in_figure(figure) -> Iterable[str]:
    """The titles, labels of axes and legends of a figure, each once."""
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    texts = [text for axes in figure.axes for text in (axes.get_title(), axes.get_xlabel(), axes.get_ylabel())]
    texts += [text.get_text() for legend in legends for text in legend.get_texts()]
    return dict.fromkeys(text.replace("\n", " / ") for text in texts if text)


def of_made_up_rows() -> Iterator[str]:
    """Findings of small rows that tests make up."""
    from tests import test_findings as made

    names, control, point = {"gpt2": "gpt2"}, (0.01, 0.0, 0.02), made.point
    of_models = [made.cost("absmax", 50.0, 0.1, model) for model in "ab"]
    findings = [
        *made.sweep_findings([made.cost("absmax", 0.9, 0.5)], names),
        *made.sweep_findings(of_models, {name: name for name in "ab"})[-1:],
        *made.ablation_findings(made.summary(0.015, (0.012, 0.0, 0.02), 0.41)),
        *made.ablation_findings(made.summary(0.5, control, singles=(0.1, 0.4)))[-1:],
        *made.emergence_findings(made.family(count=[0, 1]), {}, "table4"),
        *made.remedies_findings([point("w8a8", made.NONE, 1.011), point("w8a8", "hadamard", 1.010)]),
        *made.remedies_findings([point("w8a8", made.NONE, 1.055, deviation=0.3)]),
    ]
    damages = (made.damaged(), made.damaged(deviation=30.0), made.damaged(deviation=None), made.damaged(roles=(70, 70)))
    yield from dict.fromkeys([*(finding.text for finding in findings), *damages])


def pieces(node: ast.AST) -> str:
    """A text as the source has it, with the names of what is filled in."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(map(pieces, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return pieces(left) + pieces(right)
    return f"{{{ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)}}}"


def messages(tree: ast.AST) -> Iterator[str]:
    """The messages of a file: the text of each error that it builds, and of each line of the log."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name, texts = getattr(node.func, "id", getattr(node.func, "attr", "")), list(map(pieces, node.args))
            if name == "unknown_name":
                yield f"unknown {texts[0]} '{texts[1]}'; known: {texts[2]} {' '.join(texts[3:])}".strip()
            elif name in SAID and any(isinstance(part, ast.Constant) for part in ast.walk(node.args[0])):
                yield " ".join(texts[0].split())


def composed(tree: ast.AST) -> Iterator[ast.AST]:
    """The texts of a file that are no docstrings, whole."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        if is_text and id(node) not in inside:
            yield node


def constants(node: ast.AST) -> list[str]:
    """The parts of a text that are more than a few words and always the same."""
    parts = [part.value for part in getattr(node, "values", [node]) if isinstance(part, ast.Constant)]
    return [part.strip() for part in parts if len(part) >= PIECE and " " in part.strip()]


def of_source(patterns: Iterable[str], texts_of) -> Iterator[str]:
    """Texts of the files of these patterns, below the name of each."""
    for file in sorted({file for pattern in patterns for file in ROOT.glob(pattern)}):
        if texts := list(dict.fromkeys(texts_of(ast.parse(file.read_text(encoding="utf-8"))))):
            yield from (f"\n{file.relative_to(ROOT)}", *texts)


def listed() -> str:
    """The whole list."""
    from tests.kept import SECTIONS, section_of

    lines = [line for run in SECTIONS for line in (f"\n## {run}", *of_section(section_of(run)))]
    lines += ["\n## made-up rows", *of_made_up_rows()]
    whole = " ".join(" ".join(lines).split())

    def others(tree: ast.AST) -> Iterator[str]:
        yield from (repr(pieces(node)) for node in composed(tree) if any(one not in whole for one in constants(node)))

    lines += ["\n## other sentences of views", *of_source(VIEWS, others)]
    lines += ["\n## messages", *of_source(("outliers/**/*.py", "kernels/**/*.py"), messages)]
    return "\n".join(line.rstrip() for line in lines).strip() + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    LIST.write_text(listed(), encoding="utf-8")
