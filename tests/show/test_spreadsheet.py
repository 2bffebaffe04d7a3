"""CSV files, in which no cell is a formula to a spreadsheet, and which read back as what was written."""

import csv
import io
import re
import shutil

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outliers.models.names import POCKET
from outliers.show.spreadsheet import escaped, read_csv, to_csv
from tests.typed import call

NAME = "=cmd|calc!A1"
# As the guide of OWASP on CSV injection has it; where a spreadsheet divides at semicolons, a cell begins after one.
FORMULA = re.compile(r"(?:^|[;\t\r\n])[=+\-@＝＋－＠]")
TEXTS = [
    *(NAME, "=1+1", "+1+cmd", "-1+cmd", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "a;=1", "＝1", "'=1", "''=1", "'-'", '"=1'),
    *("a=b", "a-b", "-1", "+3.5", "1e-3", "", "nan", "null", "None", "it's", "'", ";", "[1, 2]"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_is_a_formula_but_for_numbers(text):
    found = escaped(text)
    assert not FORMULA.search(found) or float(found) == float(text)
    assert found == text or FORMULA.search(text.replace("'", "")), "nothing else is changed"


@given(st.lists(st.text(alphabet="=+-@'\";,\t\n\ra1＝ ", max_size=6), min_size=1))
def test_what_was_written_is_read(tmp_path_factory, texts):
    frame = pd.DataFrame({"=text": [f"{text}x" for text in texts], "number": [-0.5] * len(texts)})
    file = tmp_path_factory.mktemp("csv") / "table.csv"
    file.write_bytes(to_csv(frame).encode())
    found = read_csv(file)
    assert found.to_dict("list") == frame.to_dict("list")


def test_words_for_nothing_are_words(tmp_path):
    (tmp_path / "t.csv").write_text(
        to_csv(pd.DataFrame({"token": ["null", "NA", "nan", None], "n": [1.5, None, 2, 3]}))
    )
    found = read_csv(tmp_path / "t.csv")
    assert found["token"].tolist()[:3] == ["null", "NA", "nan"]
    assert found["token"].isna().tolist() == [False, False, False, True]
    assert found["n"].isna().tolist() == [False, True, False, False]


def test_a_model_that_is_named_like_a_formula(monkeypatch, capsys, tmp_path):
    """In cells, and as the header of a column."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / NAME)
    options = ("--metric", "perplexity", "--metric", "token_losses", "--blocks", 1, "--block", 64, "--out", "out")
    assert call(monkeypatch, capsys, NAME, *options, command="measure")[0] == 0
    cells = []
    for file in tmp_path.glob("out/*.csv"):
        cells += [cell for row in csv.reader(io.StringIO(file.read_bytes().decode(), newline="")) for cell in row]
    assert f"'{NAME}" in cells
    assert [cell for cell in cells if FORMULA.search(cell) and not re.fullmatch(r"-?[\d.e+-]+", cell)] == []
