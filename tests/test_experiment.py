"""Experiment files, rows on disk, runs that are killed and go on."""

import json
import random
import subprocess
import sys
import time

import pandas as pd
import pytest

from outliers.errors import UserError
from outliers.evaluation.perplexity import perplexity
from outliers.experiment.rows import RowFile
from outliers.experiment.run import sweep
from outliers.experiment.spec import Experiment, experiment_files, make_experiment, read_experiment
from outliers.models.load import load_model, load_tokenizer, pocket_models
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import SCHEMES
from outliers.text.blocks import load_text

SMALL = {"name": "small", "models": ["pocket/gpt2-0.1m", "pocket/gpt2-0.5m"], "block": 64, "blocks": 4}
TIMES = ("wall_seconds", "peak_memory_bytes")


def lasting(rows: list[dict]) -> list[dict]:
    """Rows without what differs from run to run."""
    return [{field: value for field, value in row.items() if field not in TIMES} for row in rows]


def read_rows(folder) -> list[dict]:
    """The rows in a results folder."""
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_shipped_experiments_are_valid():
    assert "pocket" in experiment_files()
    for name in experiment_files():
        experiment = make_experiment(read_experiment(name))
        assert experiment.name == name
        assert experiment.schemes == list(SCHEMES)
    assert set(make_experiment(read_experiment("pocket")).models) == set(pocket_models())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": ["gpt2"]}, "unknown field 'model'; did you mean models"),
        ({"models": []}, "field 'models'"),
        ({"blocks": 0}, "field 'blocks': Input should be greater than 0, got 0"),
        ({"block": "long"}, "field 'block'.*got 'long'"),
        ({"alpha": -1}, "field 'alpha'"),
        ({"name": "../up"}, "field 'name'"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(UserError, match=message):
        make_experiment({**SMALL, **fields})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pockte", None, "unknown experiment 'pockte'; did you mean pocket"),
        ("no.yaml", None, "experiment file .*no.yaml' does not exist"),
        ("a.yaml", "- 1\n- 2\n", "expected a mapping"),
        ("a.yaml", "models: [a\n", "cannot be read"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    path = tmp_path / name if name.endswith("yaml") else name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_experiment(str(path))


def test_repeated_names_count_once():
    assert Experiment(models=["a", "b", "a"]).models == ["a", "b"]


def test_rows_are_what_the_api_measures(tmp_path):
    rows = sweep(Experiment(**SMALL, alpha=4), tmp_path)
    assert len(rows) == 18
    assert read_rows(tmp_path) == rows
    model, tokenizer = load_model("pocket/gpt2-0.5m"), load_tokenizer("pocket/gpt2-0.5m")
    blocks = load_text("sample", tokenizer, 64, 4)
    values = {row["scheme"]: row["value"] for row in rows if row["model"] == "pocket/gpt2-0.5m"}
    assert values["fp32"] == perplexity(model, blocks)
    assert values["zeropoint"] == perplexity(quantize(model, "zeropoint"), blocks)
    row = next(row for row in rows if row["scheme"] == "llm.int8")
    assert row["alpha"] == 4
    assert row["outlier_weights"] == "exact"
    assert {"weights_hash", "tokens_hash", "protocol", "block", "blocks", "parameters", *TIMES} <= set(row)
    assert {"dtype", "device", "device_name", "threads", "python", "torch", "transformers", "version"} <= set(row)
    assert "alpha" not in next(row for row in rows if row["scheme"] == "absmax")


def test_finished_rows_are_used_again(tmp_path, monkeypatch):
    first = sweep(Experiment(**SMALL), tmp_path)
    measured = []
    monkeypatch.setattr(
        "outliers.experiment.run.perplexity", lambda model, blocks: measured.append(list(blocks)) or 1.5
    )
    assert sweep(Experiment(**SMALL), tmp_path) == first
    assert not measured
    with_alpha = sweep(Experiment(**SMALL, alpha=3), tmp_path)
    assert len(measured) == 6, "only the three decomposing schemes of two models depend on alpha"
    assert {row["value"] for row in with_alpha if "alpha" in row} == {1.5}
    assert len(read_rows(tmp_path)) == 24
    sweep(Experiment(**SMALL), tmp_path, force=True)
    assert len(measured) == 24
    assert len(read_rows(tmp_path)) == 24, "a row that is measured again replaces the old one"


def test_mistakes_show_before_anything_is_measured(tmp_path):
    for field, value in [
        ("models", ["pocket/gpt2-0.1m", "pocket/nothing"]),
        ("schemes", ["fp32", "nothing"]),
        ("text", "nothing"),
        ("block", 257),
        ("blocks", 10**6),
        ("device", "cuda:77"),
    ]:
        with pytest.raises(UserError):
            sweep(Experiment(**{**SMALL, field: value}), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_unwritable_and_damaged_folders(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write to '.*' \(.*\); choose another folder with --out"):
        RowFile(tmp_path / "file" / "out")
    (tmp_path / "rows.jsonl").write_text('{"model": "a"}\n{"mod')
    with pytest.raises(UserError, match=r"rows.jsonl' is damaged"):
        RowFile(tmp_path)


# Forks a run that is killed after so many seconds; torch is imported once, before the forks.
KILLER = """
import json, os, signal, sys, time
from outliers.experiment.run import sweep
from outliers.experiment.spec import Experiment
fields, out, seconds = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
for number, after in enumerate(seconds):
    child = os.fork()
    if child == 0:
        sweep(Experiment(**fields), f"{out}/{number}")
        os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_killed_at_any_moment(tmp_path):
    fields = {**SMALL, "schemes": ["fp32", "absmax", "absmax-vector", "llm.int8"], "blocks": 16}
    start = time.monotonic()
    want = lasting(sweep(Experiment(**fields), tmp_path / "undisturbed"))
    duration = time.monotonic() - start
    moments = [(n + random.random()) / 10 * duration for n in range(10)]
    arguments = [json.dumps(fields), str(tmp_path), json.dumps(moments)]
    subprocess.run([sys.executable, "-c", KILLER, *arguments], check=True, timeout=300)
    survived = []
    for number in range(10):
        folder = tmp_path / str(number)
        if (folder / "rows.jsonl").exists():
            finished = lasting(read_rows(folder))
            assert finished == want[: len(finished)]
            survived.append(len(finished))
        assert lasting(sweep(Experiment(**fields), folder)) == want
        assert lasting(read_rows(folder)) == want
        assert [path.name for path in folder.iterdir()] == ["rows.jsonl"]
    assert pd.Series(survived).nunique() > 1, "the kills came at different moments"
