"""The three tiers of the tests, what thins them, and the mistakes by which they are judged."""

import ast
import os
import re
import subprocess
import sys

import pytest

from tests import conftest
from tests.conftest import ROOT, SLOW, TORCHLESS, changed_since, read

sys.path.insert(0, str(ROOT / "scripts"))

import mutations


def test_continuous_integration_runs_what_make_test_leaves():
    # `make test-all SINCE=…` hands its settings down, SINCE too.
    plain = {"PATH": os.environ["PATH"]}
    asked = {
        target: subprocess.check_output(["make", "-n", *target.split()], cwd=ROOT, env=plain, text=True)
        for target in ("test", "test-all", "test-nightly", "test-all SINCE=HEAD~", "docs SINCE=HEAD~")
    }
    tiers = ('-m "not slow"', '-m "not nightly"', "-m nightly", "--since HEAD~", "--since HEAD~ tests/pages")
    assert all(tier in said for tier, said in zip(tiers, asked.values(), strict=True))
    assert ["--torch no\n" in said and "--torch yes" in said for said in asked.values()] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert ["--ignore tests/pages" in said for said in asked.values()] == [True, True, False, True, False]
    assert {'make docs SINCE="$since"', 'make test-all SINCE="$since"'} <= {*read(".ci/run").splitlines()}


def test_what_needs_no_torch_runs_without_it():
    """And with it nowhere: each test of a file is in one of the two runs."""
    file = "tests/show/test_spreadsheet.py"
    run = [sys.executable, "-m", "pytest", "-q", "--collect-only", file, "--torch"]
    free, other = (subprocess.check_output([*run, torch], cwd=ROOT, text=True).splitlines() for torch in ("no", "yes"))
    tests = [{line for line in said if line.startswith(file)} for said in (free, other)]
    assert tests[0] == {test for test in TORCHLESS if test.startswith(file)}
    assert tests[1] and not tests[0] & tests[1]
    with pytest.raises(conftest.TorchError, match="import it later"):
        conftest.NoTorch().find_spec("torch")


def test_what_is_nightly_runs_where_its_files_changed():
    marks = re.findall(r"mark\.nightly\((.+?)\)", "".join(read(path) for path in ROOT.glob("tests/*/test_*.py")))
    paths = {path for mark in marks for path in ast.literal_eval(f"[{mark}]")}
    assert len(paths) > 5 and all((ROOT / path).exists() for path in paths)
    assert changed_since(None)(("nowhere",)) and changed_since("no-commit")(("nowhere",))
    assert not changed_since("HEAD")(("nowhere",))


def test_what_is_called_slow_or_free_of_torch_is_there():
    named = {one.partition("[")[0] for one in SLOW | TORCHLESS}
    assert [one for one in named if f"def {one.partition('::')[2]}(" not in read(one.partition("::")[0])] == []


def test_mistakes_can_be_made_and_have_tests():
    found = [(module, *pair) for module, pairs in mutations.MUTATIONS.items() for pair in pairs]
    assert len(found) >= 60
    assert [one for one in found if read(one[0]).count(one[1]) != 1 or one[1] == one[2]] == []
    assert all((ROOT / file).exists() for module, *_ in found for file in mutations.test_files(module))
