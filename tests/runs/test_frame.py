"""Results as a data frame: rows, folders and trees of them."""

import json

import pandas as pd
import pytest

import outliers
from outliers.errors import UserError
from outliers.runs.frame import PROVENANCE, RESULT
from outliers.runs.frame import records_in as read_rows
from tests.kept import KEPT

FIELDS = {"models": ["pocket/gpt2-0.1m"], "schemes": ["fp32", "absmax", "llm.int8"], "block": 32, "blocks": 2}
FOLDERS = sorted(file.parent for file in KEPT.rglob("rows.jsonl"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(KEPT)))
def test_every_kept_run(folder):
    """All that its rows say, in their order; and without where it was computed what is left is of what."""
    rows = read_rows(folder)
    whole, short = outliers.frame(folder, provenance=True), outliers.frame(rows)
    for row, found in zip(rows, whole.to_dict("records"), strict=True):
        row = {name: value for name, value in row.items() if value is not None}
        assert {name: value for name, value in found.items() if name in row} == row
        assert all(pd.isna(value) for name, value in found.items() if name not in row)
    assert list(whole.columns) == [*short.columns, *(name for name in PROVENANCE if name in whole)]
    pd.testing.assert_frame_equal(whole[short.columns], short)
    which = list(short.columns[: short.columns.get_loc("value")])
    how = [name for name in ("protocol", "draws") if name in short]
    assert not short.astype(str).duplicated([*which, *how]).any()
    assert "metric" in which
    assert not {*which} & {*RESULT}
    assert all(short[name].dtype != float for name in ("layer", "feature", "position", "token") if name in short)


def test_a_sweep_in_a_line(tmp_path):
    table = outliers.frame(outliers.sweep(**FIELDS, out=tmp_path / "a"))
    assert table[["model", "scheme"]].to_numpy().tolist() == [[FIELDS["models"][0], name] for name in FIELDS["schemes"]]
    assert (table["alpha"].dropna() == 6.0).all()
    pd.testing.assert_frame_equal(table, outliers.frame(str(tmp_path / "a")))
    outliers.sweep(**FIELDS | {"block": 16}, out=tmp_path / "b" / "c")
    both = outliers.frame(tmp_path)
    assert both["block"].tolist() == [32] * 3 + [16] * 3
    assert both["value"].tolist()[:3] == table["value"].tolist()


def test_no_results(tmp_path):
    with pytest.raises(UserError, match=r"no results in '.*nothing'; expected a folder that a run has written"):
        outliers.frame(tmp_path / "nothing")
    assert outliers.frame([]).empty
    (tmp_path / "rows.jsonl").write_text(json.dumps({"metric": "x"})[:-1] + "\n\n{}\n")
    with pytest.raises(UserError, match=r"lines 1, 3 of .* are damaged"):
        outliers.frame(tmp_path)
