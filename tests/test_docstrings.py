"""Docstrings: they begin with a noun or a verb, and those of public names have an example that runs."""

import ast
import doctest
import re
from pathlib import Path

import outlier_kernels
import pytest

import outliers
from outliers import plot
from tests.kept import KEPT

PUBLIC = {name: getattr(outliers, name) for name in outliers.__all__}
FIGURES = {f"plot.{name}": getattr(plot, name) for name in plot.__all__}
DOCUMENTED = {name: one for name, one in (PUBLIC | FIGURES).items() if callable(one)}
WITHOUT = {  # an example, and why
    "OutlierCallback": "needs a Trainer; docs/training.md has one",
    "export": "needs the library of the format; docs/plans.md has one",
    "Cells": "see run",
    "plot.patch_map": "needs pictures",
}
CLAUSE = re.compile(r"(What|Which|Where|How|Who)\b")
EXAMPLES = doctest.DocTestParser()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_examples(docstring: str, name: str, variables: dict) -> dict:
    """Run the examples of a docstring with some names; returned are these and those that the examples make."""
    examples = EXAMPLES.get_doctest(docstring, variables, name, None, None)
    failed, tried = doctest.DocTestRunner(optionflags=FLAGS).run(examples, clear_globs=False)
    assert tried and not failed, f"the example of {name} fails"
    return examples.globs


@pytest.fixture(scope="module")
def variables() -> dict:
    """The names that the example of the package makes."""
    return run_examples(outliers.__doc__, "outliers", {})


@pytest.mark.parametrize("name", sorted(DOCUMENTED.keys() - WITHOUT.keys()))
def test_examples_run(name, variables, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "kept").symlink_to(KEPT)
    run_examples(DOCUMENTED[name].__doc__, name, variables)


@pytest.mark.parametrize("package", [outliers, outlier_kernels])
def test_docstrings_begin_with_a_noun_or_a_verb(package):
    clauses = [
        f"{file}, line {node.body[0].lineno}"
        for file in sorted(Path(package.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and CLAUSE.match(ast.get_docstring(node) or "")
    ]
    assert not clauses
