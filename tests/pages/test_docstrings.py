"""The docstrings of public names are complete: every argument is described, and the example runs."""

import doctest
import inspect
import re

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
ARGUMENTS = re.compile(r"^Args:\n((?:    .+\n?|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)
EXAMPLES = doctest.DocTestParser()
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_examples(docstring: str, name: str, variables: dict) -> dict:
    """Run the examples of a docstring with these variables, and return them with those that the examples assign."""
    examples = EXAMPLES.get_doctest(docstring, variables, name, None, None)
    failed, tried = doctest.DocTestRunner(optionflags=FLAGS).run(examples, clear_globs=False)
    assert tried and not failed, f"the example of {name} fails"
    return examples.globs


@pytest.fixture(scope="module")
def variables() -> dict:
    """The variables that the example in the docstring of the package assigns."""
    return run_examples(outliers.__doc__, "outliers", {})


@pytest.mark.parametrize("name", sorted(DOCUMENTED.keys() - WITHOUT.keys()))
def test_examples_run(name, variables, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "kept").symlink_to(KEPT)
    run_examples(DOCUMENTED[name].__doc__, name, variables)


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_arguments_are_described(name):
    docstring = inspect.getdoc(DOCUMENTED[name])
    assert docstring
    if not inspect.isfunction(DOCUMENTED[name]):
        return  # classes describe their fields in sentences
    described = ARGUMENTS.search(docstring)
    entries = ", ".join(ENTRY.findall(described[1])) if described else ""
    parameters = inspect.signature(DOCUMENTED[name]).parameters
    assert parameters.keys() - set(entries.split(", ")) == set()
