"""A short run of what `scripts/fuzz.py` does for minutes, in this process."""

import random
import sys

import pytest

from outliers.errors import UserError
from tests.conftest import ROOT, answer_within

sys.path.insert(0, str(ROOT / "scripts"))

import fuzz

CASES = 12  # of each kind


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_damage_is_read_or_refused(tmp_path, name):
    sound = fuzz.sound_folder(name, tmp_path / "sound")
    fuzz.TARGETS[name].read(sound, random.Random(1))  # or all damage would be refused for another reason

    for number in range(CASES):
        with answer_within(fuzz.SECONDS):
            outcome, said = fuzz.try_case(name, number, sound, tmp_path / "case")
        assert outcome != "failed", f"--only {name} --case {number}: {said}"


def test_a_message_is_one_line_that_a_terminal_prints():
    assert str(UserError("a\nb \x1b[2J \ud800 é␣")) == r"a b \x1b[2J \ud800 é␣"
    assert len(str(UserError("x" * 10_000))) < 1000
