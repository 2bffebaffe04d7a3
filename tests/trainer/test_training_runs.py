"""Training runs as people see them: the command, the tables beside the published ones, the figure, the sentences."""

import csv
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

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
from outliers.metrics.training import RunResult, TrainingMeasurement
from outliers.paper.artefacts import ARTEFACTS
from outliers.paper.report import experiments_of
from outliers.published.numbers import TABLE7 as PRINTED
from outliers.runs.rows import Row
from outliers.runs.run import rows_of
from outliers.show.page import page
from outliers.show.section import Section
from outliers.show.value import mean, ratio
from outliers.text.documents import sample
from outliers.views.causes import causes, causes_section, checkpoints, trained
from outliers.views.table7 import table7_section, table9_section
from tests.conftest import PAPER_TABLES, among, needs_paper
from tests.training_rows import TABLE7, rows_of_runs
from tests.typed import call
from tests.views.shown import shown

SEEDS = [0, 1, 2]
RECIPE = {"start": "gpt2-0.5m", "steps": 1000}
SPEC = Training(recipe=RECIPE, runs=TABLE7, seeds=SEEDS, watched=[100, 400])
RUNS = {"as it is": {}, "Muon": {"optimizer": "muon"}, "rotary": {"positions": "rotary"}}
CAUSES = Training(recipe=RECIPE, runs=RUNS, seeds=SEEDS, watched=[100, 400])
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


def test_rows_of_training_runs_are_those_that_ended():
    rows = kept_runs(SPEC, TABLE7)
    assert rows_of(SPEC, among([*reversed(rows[1:])])) == rows[1:], "in the order of the experiment"


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
        assert found.differs_from_one == (ttest_1samp(logarithms, 0).pvalue < 0.05)
    of_mean = mean(list(ours.values()))
    assert of_mean.value == pytest.approx(np.mean(list(ours.values())))
    assert ratio(theirs, ours).value == pytest.approx(1 / found.value)


def test_what_one_seed_says():
    assert mean([3.0]) == (3.0, None, 1)
    found = ratio({0: 2.0, 1: 3.0}, {0: 1.0, 7: 9.0})
    of_both = found.value, found.interval, found.seeds, found.differs_from_one
    assert of_both == (2.0, None, 1, False), "of seeds that both have"
    assert ratio({0: 2.0}, {1: 2.0}) is None
    assert ratio({0: 0.0}, {0: 2.0}) is None


# Tables 7, 9 and 10.


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


# What tables, the figure and sentences say.


def of_int8(*costs: float) -> Section:
    """Table 7 of a run in int8 that costs so many per cent, by seed."""
    return table7_section(ended({"16 bits": (0,) * len(costs), "FFN, linear": costs}))


WORSE = COSTS | {"FFN": (1, 1.1, 0.9), "FFN, linear, 2 %": (0.5, 0.6, 0.41)}
ENDS = {"as it is": PLAIN, "Muon": [95.0, 99.0, 93.0], "rotary": [90.0, 104.0, 99.0]}
ONE_SEED = CAUSES.model_copy(update={"seeds": [0]})
OF_CAUSES = rows_of_runs(CAUSES, ENDS, {"as it is": 20.0, "Muon": 5.0})
SECTIONS = {
    "table 7": lambda: table7_section(ended(COSTS)),
    "table 7 of worse parts": lambda: table7_section(ended(WORSE)),
    "table 7 of fewer seeds of a run": lambda: table7_section(ended(COSTS)[:-1]),
    "table 7 of one seed": lambda: table7_section(ended({run: costs[:1] for run, costs in COSTS.items()})),
    "table 7 of one run": lambda: table7_section(ended({"FFN": (0, 0, 0)})),
    "table 7 within 2 percent": lambda: of_int8(0.5, 0.6, 0.4),
    "table 7 beyond 2 percent": lambda: of_int8(5.5, 5.6, 5.4),
    "table 7 better by 5 percent": lambda: of_int8(-5.5, -5.6, -5.4),
    "table 7 unresolved": lambda: of_int8(1.0, 4.0, -2.0),
    "table 7 beyond 2 percent in one seed": lambda: of_int8(2.5),
    "table 9": lambda: table9_section(ended(COSTS)),
    "causes": lambda: causes_section(OF_CAUSES),
    "causes of one seed": lambda: causes_section(rows_of_runs(ONE_SEED, ENDS, {"as it is": 20.0})),
    "causes of fewer seeds": lambda: causes_section(
        [row for row in rows_of_runs(CAUSES, ENDS) if row["run"] == "as it is" or not row["seed"]]
    ),
    "causes of equal runs": lambda: causes_section(rows_of_runs(CAUSES, dict.fromkeys(ENDS, PLAIN))),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_section(name, as_kept):
    as_kept(name, shown(SECTIONS[name]()))


def test_a_run_has_fewer_rows_along_its_training_than_at_its_end():
    logged = [{"step": step, "epoch": 0.5, "perplexity": 9.0, "max.ffn_in": 7.0, "loss": 1.0} for step in (2, 4)]
    ended = SimpleNamespace(subject=SimpleNamespace(recipe=SimpleNamespace(steps=4)))
    rows = TrainingMeasurement().values(ended, [RunResult({}, logged, [])])
    metrics = {step: [row["metric"] for row in rows if row["checkpoint"] == step] for step in ("step-2", "step-4")}
    assert metrics == {"step-2": ["perplexity", "max.ffn_in"], "step-4": ["perplexity", "max.ffn_in", "loss"]}


def test_runs_of_causes_as_data():
    found = checkpoints(pd.DataFrame(OF_CAUSES))
    assert set(found["step"]) == {100, 400, 1000} and len(trained(OF_CAUSES)) == 9
    assert ">9 training runs. Text" in page("t", [causes_section(OF_CAUSES)], "c")
    with pytest.raises(UserError, match="unknown run 'Moun'; did you mean Muon"):
        causes(OF_CAUSES, run="Moun")


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # as Python does outside of tests
@pytest.mark.nightly("outliers/trainer/", "outliers/commands/training.py", "outliers/subjects/training_run.py")
def test_a_training_experiment_from_the_command_line(train, folder, constants, calls_of, caplog):
    steps = []
    constants("outliers.terminal.progress", SECONDS=3600)  # a slow machine says nothing either
    update = "outliers.terminal.progress.Progress.update"
    calls_of(update, lambda calls: steps.append((calls[-1][0].desc, calls[-1][1:] or (1,))))
    code, out, err = train("tiny.yaml")
    assert (code, err) == (0, ""), "no bars of a library"
    assert "FFN, linear" in out and "trained once" not in out
    assert sum(count for line, (count,) in steps if line.endswith("training: ")) == 4 * 6
    assert "FFN, linear, seed 1, training: " in {line for line, _ in steps}
    results = folder / "results" / "tiny"
    assert all((results / name).exists() for name in ("rows.jsonl", "causes.png", "trained.csv", "report.html"))
    assert train("tiny.yaml") == (0, out, ""), "nothing is trained again"
    code, out, _ = train("seven.yaml", "--out", "results/tiny")
    assert code == 0 and "Table 7" in (results / "report.html").read_text()
    assert (results / "table7_published.md").exists()


def test_the_experiments_of_trainings():
    found = {spec.shows: spec for spec in experiments_of("training")}
    assert list(found) == ["table7", "table10", "table9", "causes"]
    assert found["table9"].runs == found["table10"].runs
    assert all(isinstance(run, Recipe) for spec in found.values() for run in spec.runs.values())
