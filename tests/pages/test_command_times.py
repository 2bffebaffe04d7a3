"""What the benchmark of README's commands reads from their bars."""

import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import commands


@pytest.mark.parametrize(
    ("drawn", "least", "most"),
    [
        ("12%|#  | 0:12, about 50 s to 2 min left", 50, 120),
        ("about 3 to 8 min left\r 40%|##", 180, 480),
        ("about 9 min left, then about 1.5 h left", 5400, 5400),
    ],
)
def test_the_last_forecast_counts(drawn, least, most):
    assert commands.forecast_in(drawn, 10.0) == (10.0, 10.0 + least, 10.0 + most)
    assert commands.forecast_in("loading: 0:02", 2.0) is None


def test_readme_types_the_commands_that_are_timed():
    readme = (ROOT / "README.md").read_text("utf-8")
    for name, arguments in list(commands.COMMANDS.items())[1:]:
        assert f"python -m outliers.{' '.join(arguments)}" in readme, name
    assert " ".join(commands.COMMANDS["make sweep"][1:]) in (ROOT / "Makefile").read_text("utf-8")
