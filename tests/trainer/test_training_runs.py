"""Training runs as people see them: the command, the tables beside the published ones, the figure, the sentences."""

import csv
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from outliers.commands.training import Training
from outliers.config.recipe import Recipe
from outliers.errors import UserError
from outliers.paper.artefacts import ARTEFACTS
from outliers.paper.report import experiments_of, report
from outliers.published.numbers import TABLE7 as PRINTED
from outliers.runs.rows import Row, read
from outliers.runs.run import rows_of
from outliers.show.page import page
from outliers.show.style import GREY
from outliers.show.value import mean, ratio
from outliers.terminal import progress
from outliers.text.documents import sample
from outliers.views.causes import causes, causes_findings, causes_section, causes_table, checkpoints, ends, trained
from outliers.views.table7 import table7_section, table9_section
from tests.conftest import PAPER_TABLES, among, needs_paper
from tests.kept import KEPT
from tests.training_rows import TABLE7, rows_of_runs
from tests.typed import call

SEEDS = [0, 1, 2]
RECIPE = {"start": "gpt2-0.5m", "steps": 1000}
SPEC = Training(recipe=RECIPE, runs=TABLE7, seeds=SEEDS, watched=[100, 400])
OF_CAUSES = {"as it is": {}, "Muon": {"optimizer": "muon"}, "rotary": {"positions": "rotary"}}
CAUSES = Training(recipe=RECIPE, runs=OF_CAUSES, seeds=SEEDS, watched=[100, 400])
PLAIN = [100.0, 104.0, 98.0]


def ended(costs: dict[str, Sequence[float]]) -> list[dict]:
    """Rows of Table 7 in which runs cost so many per cent, by seed."""
    by_seed = {run: zip(PLAIN, of_run, strict=False) for run, of_run in costs.items()}
    found = {run: [one * (1 + cost / 100) for one, cost in pairs] for run, pairs in by_seed.items()}
    return rows_of_runs(SPEC.model_copy(update={"seeds": SEEDS[: len(next(iter(costs.values())))]}), found)


COSTS = {
    "16 bits": (0, 0, 0),
    "FFN": (0.1, -0.1, 0.0),
    "FFN, linear": (0.5, 0.6, 0.4),
    "FFN, linear, 2 %": (0.2, 0.3, 0.1),
    "FFN, linear, attention, 2 %": (30, 31, 29),
}


# Which rows are an experiment's.


def kept_runs(spec: Training, names: Iterable[str]) -> list[Row]:
    """A row of each run and seed of an experiment, as nobody measured it."""
    value = {"metric": "perplexity", "value": 20.0, "checkpoint": "step-1", "architecture": "gpt2", "parameters": 1}
    told = {"provenance": {"trained_on": "0123456789ab"}, "values": [value], "run": {"experiment": "training"}}
    cells = [cell for plan in spec.plans() for cell in next(plan.stages)]
    return [Row(request=cell.request, **told) for cell in cells if cell.subject.label in names]


def test_rows_of_training_runs_are_those_that_are_asked_for():
    others = [row for run in ("training", "remedies", "training-runs/causes") for row in read(KEPT / run)]
    rows = kept_runs(SPEC, TABLE7)
    assert rows_of(SPEC, among([*reversed(others), *reversed(rows), *others])) == rows, "in the order of the experiment"
    assert rows_of(SPEC, among(rows[1:])) == rows[1:], "as far as they ended"


@pytest.mark.parametrize(
    "fields",
    [
        *({"recipe": RECIPE | other} for other in ({"steps": 900}, {"start": "gpt2-0.1m"}, {"weight_decay": 0.0})),
        *({"recipe": RECIPE | {"stochastic": True}}, {"runs": {"other": {}}}, {"seeds": [7]}, {"blocks": 7}),
        *({"alpha": 7.0}, {"text": "c4"}, {"draws": 1}, {"schemes": ["llm.int8"]}),
    ],
    ids=str,
)
def test_rows_of_what_was_trained_otherwise_are_not_shown(fields):
    request = {"recipe": RECIPE, "runs": TABLE7, "seeds": SEEDS} | fields
    assert rows_of(Training(**request), among(kept_runs(SPEC, TABLE7))) == []


# Several seeds.

positive = st.floats(0.5, 2.0)


@settings(deadline=None)
@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=6))
def test_intervals_are_those_of_scipy(pairs):
    ours, theirs = (dict(enumerate(values)) for values in zip(*pairs, strict=True))
    found, logarithms = ratio(ours, theirs), np.log([one / other for one, other in pairs])
    assert found.value == pytest.approx(np.exp(logarithms.mean()))
    if logarithms.std() > 1e-6:
        interval = ttest_1samp(logarithms, 0).confidence_interval(0.95)
        assert found.interval == pytest.approx((np.exp(interval.low), np.exp(interval.high)))
        assert found.is_shown == (ttest_1samp(logarithms, 0).pvalue < 0.05)
    of_mean = mean(list(ours.values()))
    assert of_mean.value == pytest.approx(np.mean(list(ours.values())))
    assert ratio(theirs, ours).value == pytest.approx(1 / found.value)


def test_what_one_seed_says():
    assert mean([3.0]) == (3.0, None, 1)
    found = ratio({0: 2.0, 1: 3.0}, {0: 1.0, 7: 9.0})
    of_both = found.value, found.interval, found.seeds, found.is_shown
    assert of_both == (2.0, None, 1, False), "of seeds that both have"
    assert ratio({0: 2.0}, {1: 2.0}) is None
    assert ratio({0: 0.0}, {0: 2.0}) is None


# Tables 7, 9 and 10.


def test_table_7_has_the_papers_columns_and_ours():
    section = table7_section(ended(COSTS))
    (table,) = section.tables
    assert table.headers[1:6] == ["FFN", "Linear", "Attention", "Decomp", "PPL"]
    cells = {tuple(row[1:5]): row for row in table.cells}
    assert cells["", "", "", "0 %"][5:] == ["101±8", "–", "101±8", "–", "–", "–"]
    assert cells["yes", "yes", "", "0 %"][6:] == ["+0.5 [+0.3, +0.7]", *cells["yes", "yes", "", "0 %"][7:]]
    assert cells["yes", "yes", "", "0 %"][-2:] == ["+0.5", "+5.3"], "what the paper's models lost"
    assert cells["yes", "yes", "yes", "2 %"][-2:] == ["+45.3", "–"]
    assert table.data.set_index("run").loc["FFN, linear", "increase"] == pytest.approx(0.005, rel=0.01)
    assert "over 3 seeds" in section.printed
    rows = ended(COSTS)
    fewer = table7_section([row for row in rows if (row["run"], row["seed"]) != (rows[-1]["run"], SEEDS[-1])])
    assert fewer.notes[0].startswith(f"Means over up to {len(SEEDS)} seeds")
    of_one = table7_section(ended({run: costs[:1] for run, costs in COSTS.items()}))
    assert of_one.tables[0].cells[2][5:7] == ["100.50", "+0.5"] and "trained with one seed" in of_one.printed
    alone = table7_section(ended({"FFN": (0, 0, 0)}))
    assert (alone.tables[0].cells[0][6], alone.findings) == ("–", []), "nothing to compare with"


def test_table_7_is_measured_by_the_keys_of_the_published():
    found = ARTEFACTS["table7"].ours(ended(COSTS))
    assert set(found) == {("479k", *key) for _, *key in PRINTED if ("479k", *key) in found}
    assert found["479k", "16 bits", "0 %"] == pytest.approx(np.mean(PLAIN))


@needs_paper
def test_table_7_is_as_published():
    with (PAPER_TABLES / "table7_int8_training.csv").open() as file:
        rows = list(csv.DictReader(file))
    named = {"ffn_int8": "FFN", "linear_int8": "linear", "attention_int8": "attention"}
    published = {}
    for row in rows:
        parts = ", ".join(name for column, name in named.items() if row[column] == "yes") or "16 bits"
        published[row["params"], parts, f"{row['decomposition_pct']} %"] = float(row["ppl"])
    assert published == PRINTED


@needs_paper
def test_tables_9_and_10_are_as_published():
    text = (PAPER_TABLES / "llm_int8_paper.txt").read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.count("|") > 8]
    scores = [[float(cell) for cell in line if re.fullmatch(r"\d\d\.\d+", cell)] for line in lines]
    table9, table10 = (ARTEFACTS[name].published for name in ("table9", "table10"))
    tasks = dict.fromkeys(task for _, task in table9.values)
    scores = [of_line for of_line in scores if len(of_line) == len(tasks)]
    for published, taken in ((table9, slice(0, 6)), (table10, slice(6, 12))):
        rows: dict[tuple, list] = {}
        for (*row, _task), value in published.values.items():
            rows.setdefault(tuple(row), []).append(value)
        assert list(rows.values()) == scores[taken]
    methods = [line[0].partition(" (")[0] for line in lines if line[0] and line[-2].startswith("8")]
    assert methods[:6] == [method for method, *_ in dict.fromkeys((key[0],) for key in table9.values)]


def test_methods_that_were_not_run():
    (table,) = table9_section(ended(COSTS)).tables
    assert [row[0] for row in table.cells if row[1] != "not run"] == ["32-bit Baseline", "Vector-wise"]
    assert table.cells[-1][1:] == ["101±7", "+0.0 [-0.2, +0.2]"]


def said(section) -> str:
    return " ".join(finding.text for finding in section.findings)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ((0.5, 0.6, 0.4), "its final perplexity by +0.5 % [+0.3, +0.7] relative to 16 bits: within 2 %, as is"),
        ((5.5, 5.6, 5.4), "by +5.5 % [+5.3, +5.7] relative to 16 bits: beyond 2 %, as is the whole interval over 3"),
        ((-5.5, -5.6, -5.4), "relative to 16 bits: beyond 2 %"),
        ((1.0, 4.0, -2.0), "3 seeds do not resolve whether this is within 2 %."),
        ((0.5,), "by +0.5 % relative to 16 bits: within 2 % in the one seed trained."),
        ((2.5,), "by +2.5 % relative to 16 bits: beyond 2 % in the one seed trained."),
    ],
)
def test_whether_int8_holds_16_bits_is_said_as_far_as_seeds_show_it(costs, words):
    rows = ended({"16 bits": (0,) * len(costs), "FFN, linear": costs})
    assert words in said(table7_section(rows))


def test_what_parts_and_decomposition_cost():
    words = said(table7_section(ended(COSTS)))
    assert "Feed-forward projections alone in int8 have no measurable cost: 0.00 % [−0.2, +0.2]." in words
    assert "Keeping 2 % of features in 16 bits reduces the change to +0.20 % [−0.05, +0.4]." in words
    assert "attention in int8 too, and 2 % of features in 16 bits, the change is +30.0 % [+27.5, +32.5]." in words
    assert "Of the +0.5 % [+0.3, +0.7] of 'FFN, linear', " in words
    worse = COSTS | {"FFN": (1, 1.1, 0.9), "FFN, linear, 2 %": (0.5, 0.6, 0.41)}
    words = said(table7_section(ended(worse)))
    assert "With the feed-forward projections alone in int8 the change is +1.0 % [+0.8, +1.2]." in words
    assert "Keeping 2 % of features in 16 bits has no measurable benefit." in words


# Causes of outlier features

ENDS = {"as it is": PLAIN, "Muon": [95.0, 99.0, 93.0], "rotary": [90.0, 104.0, 99.0]}


def test_every_run_is_a_row_with_what_grew_in_it():
    (table,) = causes_section(rows_of_runs(CAUSES, ENDS, {"as it is": 20.0})).tables
    cells = [dict(zip(table.headers, row, strict=True)) for row in table.cells]
    assert [row["run"] for row in cells] == list(ENDS)
    assert cells[0]["outlier features"] == "1" and cells[1]["outlier features"] == "0"
    assert cells[0]["residual"].startswith("202±")
    assert cells[0]["absmax (%)"] == "+10.00", "over the same weights in float32"
    data = table.data.set_index("run")
    assert data.loc["as it is", "max.residual"] == pytest.approx(np.mean([200, 202, 204.02]))
    one = causes_table(ends(rows_of_runs(CAUSES.model_copy(update={"seeds": [0]}), ENDS)))
    assert one.cells[0][1] == "100.0"
    assert one.cells[0][-1] == "+1.00±0.10", "by rounding"


def test_a_run_with_fewer_seeds_has_no_scatter_that_is_not_of_seeds():
    rows = rows_of_runs(CAUSES, ENDS)
    table = causes_table(ends([row for row in rows if row["run"] == "as it is" or not row["seed"]]))
    cells = [dict(zip(table.headers, row, strict=True))["residual"] for row in table.cells]
    assert "±" in cells[0] and not any("±" in cell for cell in cells[1:])
    assert "runs without it have one seed" in table.caption


def test_what_differs_beyond_the_scatter_of_seeds_is_said():
    rows = rows_of_runs(CAUSES, ENDS, {"as it is": 20.0, "Muon": 5.0})
    assert ">9 training runs. Text" in page("t", [causes_section(rows)], "c")
    words = said(causes_section(rows)).replace("\xa0", " ")
    assert "Outlier features by the criterion emerged in one of three runs: 'as it is'." in words
    assert "Relative to 'as it is', the largest |x| of the residual stream is × 0.2 [0.2, 0.2] in 'rotary'" in words
    assert "the perplexity is × 0.95 [0.947, 0.954] in 'Muon'." in words, "of rotary it is not shown"
    of_one = causes_section(rows_of_runs(CAUSES.model_copy(update={"seeds": [0]}), ENDS, {"as it is": 20.0}))
    assert "Relative" not in said(of_one) and "one seed" in of_one.notes[0]
    assert "ranges from 40.0 in 'Muon' to 200 in 'as it is'" in said(of_one)
    same = said(causes_section(rows_of_runs(CAUSES, dict.fromkeys(ENDS, PLAIN))))
    assert "Outlier features by the criterion emerged in none of three runs." in same
    assert "No run differs measurably from 'as it is' in the perplexity." in same
    assert "absmax raises the perplexity by at most 10.00 % ± 0.10." in same, "all cost the same"


@pytest.mark.parametrize(
    ("having", "sentence"),
    [
        ("a", "in one of six runs: 'a'."),
        ("abcd", "in four of six runs: 'a', 'b', 'c' and 'd'."),
        ("abcdef", "in six of six runs: 'a', 'b', 'c', 'd', 'e' and 'f'."),
    ],
)
def test_the_runs_are_named(having, sentence):
    ends = pd.DataFrame([{"run": run, "seed": 0, "count": int(run in having), "max.residual": 1} for run in "abcdef"])
    assert causes_findings(ends, "causes")[0].text == f"Outlier features by the criterion emerged {sentence}"


def test_the_figure_shows_every_seed_and_the_first_run_in_grey():
    rows = rows_of_runs(CAUSES, ENDS, {"as it is": 20.0})
    panels = causes(rows)
    titles = [axes.get_title(loc="left").split("\nperplexity ") for axes in panels]
    assert titles == [["as it is", "100.7"], ["Muon", "95.7"], ["rotary", "97.7"]]
    own = [line for line in panels[1].lines if line.get_linewidth() == 1]
    assert len(own) == 2 * len(SEEDS)
    assert own[0].get_xydata().tolist()[-1] == [1000, 40]
    grey = [line for line in panels[1].lines if line.get_color() == GREY]
    assert len(grey) == 2 * len(SEEDS) and grey[0].get_xydata().tolist()[-1] == [1000, 200]
    found = checkpoints(pd.DataFrame(rows))
    assert set(found["step"]) == {100, 400, 1000} and len(trained(rows)) == 9
    with pytest.raises(UserError, match="unknown run 'Moun'; did you mean Muon"):
        causes(rows, run="Moun")


# The command.

TINY = {
    "recipe": {"start": "gpt2-0.1m", "steps": 6, "batch": 2},
    "runs": {"as it is": {}, "FFN, linear": {"int8": ["ffn", "linear"]}},
}
SMALL = ["--blocks", "1", "--draws", "2", "--watched", "3", "--seeds", "0,1", "--work", "work"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One with an experiment, and texts to train on."""
    folder = tmp_path_factory.mktemp("training")
    documents = sample()
    (folder / "tiny.yaml").write_text(json.dumps(TINY))
    (folder / "seven.yaml").write_text(json.dumps(TINY | {"shows": "table7"}))
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents))
    (folder / "text.txt").write_text("\n".join(f" = {n} = \n {text}" for n, text in enumerate(documents)))
    return folder


@pytest.fixture
def train(folder, monkeypatch, capsys):
    """Exit code, output and errors of the command in that folder."""
    monkeypatch.chdir(folder)
    texts = ["--c4", "rows.jsonl", "--wikitext", "text.txt"]

    def typed(*arguments) -> tuple[int, str, str]:
        with torch.compiler.set_stance("force_eager"):
            return call(monkeypatch, capsys, *arguments, *texts, *SMALL, command="training")

    return typed


@pytest.mark.nightly("outliers/trainer/", "outliers/commands/training.py", "outliers/subjects/training_run.py")
def test_a_training_experiment_from_the_command_line(train, folder, monkeypatch, caplog):
    steps, update = [], progress.Progress.update
    monkeypatch.setattr(progress, "SECONDS", 3600)  # a slow machine says nothing either
    noting = lambda bar, count=1: (steps.append((bar.desc, count)), update(bar, count))  # noqa: E731
    monkeypatch.setattr(progress.Progress, "update", noting)
    code, out, err = train("tiny.yaml")
    assert (code, err) == (0, ""), "no bars of a library"
    assert "FFN, linear" in out and "trained once" not in out
    assert sum(count for line, count in steps if line.endswith("training: ")) == 4 * 6
    names = ["as it is, seed 0", "FFN, linear, seed 1"]
    assert {line for line, _ in steps} >= {f"{name}, training: " for name in names}
    results = folder / "results" / "tiny"
    assert all((results / name).exists() for name in ("rows.jsonl", "causes.png", "trained.csv", "report.html"))
    kept = (results / "causes.md").read_text()
    assert train("tiny.yaml") == (0, out, ""), "nothing is trained again"
    again = {"shows": "causes", "seeds": [0, 1], "blocks": 1, "draws": 2, "watched": [3]}
    (folder / "tiny-redrawn.yaml").write_text(json.dumps(TINY | again))
    report("tiny-redrawn.yaml", results, redraw=True)
    assert (results / "causes.md").read_text() == kept
    code, out, _ = train("seven.yaml", "--out", "results/tiny")
    assert code == 0 and "Table 7" in (results / "report.html").read_text()
    assert (results / "table7_published.md").exists()


def test_the_experiments_of_trainings():
    found = {spec.shows: spec for spec in experiments_of("training")}
    assert list(found) == ["table7", "table10", "table9", "causes"]
    assert found["table9"].runs == found["table10"].runs
    assert all(isinstance(run, Recipe) for spec in found.values() for run in spec.runs.values())
