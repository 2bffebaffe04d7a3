"""Docstrings of public names: a first line that says what it is or returns, and an example that runs."""

import doctest

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
EXAMPLES = doctest.DocTestParser()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_examples(docstring: str, name: str, variables: dict) -> None:
    examples = EXAMPLES.get_doctest(docstring, variables, name, None, None)
    failed, tried = doctest.DocTestRunner(optionflags=FLAGS).run(examples, clear_globs=False)
    assert tried and not failed, f"the example of {name} fails"


@pytest.fixture(scope="module")
def variables() -> dict:
    """The names that the example of the package makes."""
    found: dict = {}
    run_examples(outliers.__doc__, "outliers", found)
    return found


@pytest.mark.parametrize("name", DOCUMENTED.keys() - WITHOUT.keys())
def test_examples_run(name, variables, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "kept").symlink_to(KEPT)
    run_examples(DOCUMENTED[name].__doc__, name, dict(variables))
