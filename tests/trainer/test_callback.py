"""The callback of transformers' Trainer: what it says and writes, and that the training does not notice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import rewrite_logs

import outliers
from outliers.errors import BrokenModel, UserError
from outliers.models.load import weights_hash
from outliers.runs.frame import records_in
from outliers.runs.rows import read_rows
from tests.show.test_plot import KEPT
from tests.trainer.test_watch import BLOCKS, HELD_OUT, small
from tests.typed import call

STEPS = 6
KEPT_LINES = (KEPT / "growth" / "rows.jsonl").read_bytes().splitlines(keepends=True)
TEXTS = torch.randint(128, (32, 24), generator=torch.Generator().manual_seed(9))


class Told(TrainerCallback):
    """A reporter that keeps what it is told, at which step."""

    def __init__(self):
        self.logs = []

    def on_log(self, _args, state, _control, logs=None, **_others):
        self.logs.append((state.global_step, dict(logs)))


def trainer_of(folder: Path, every: int | None = 2, told: Told | None = None, **arguments) -> Trainer:
    """A Trainer of a small model with dropout; every: None without the callback."""
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    given = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, **quiet, **arguments}
    data = [{"input_ids": ids, "labels": ids} for ids in TEXTS]
    trainer = Trainer(small(), TrainingArguments(str(folder), **given), train_dataset=data, callbacks=[told or Told()])
    if every:
        trainer.add_callback(outliers.OutlierCallback(trainer, HELD_OUT, every))
    return trainer


def trained(*given, **arguments) -> Trainer:
    """A Trainer that has trained from where it was made, which seeds random numbers."""
    trainer = trainer_of(*given, **arguments)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Trainer, str, Path]:
    """A Trainer that has trained, the hash of the weights that it began with, and its folder of rows."""
    trainer = trainer_of(tmp_path_factory.mktemp("training"))
    first = weights_hash(trainer.model)
    trainer.train()
    return trainer, first, Path(trainer.args.output_dir) / "outliers"


def losses_of(trainer: Trainer) -> list[tuple]:
    """What the Trainer logged by itself: losses and norms of gradients by step."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["step"], entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in history]


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.model.parameters()]


def test_reporters_are_told(tmp_path):
    told = Told()
    trainer = trainer_of(tmp_path, 4, told, logging_steps=4)
    trainer.train()
    found = [(step, logs) for step, logs in told.logs if "outliers/count" in logs]
    assert [step for step, _ in found] == [0, 4, STEPS]
    last = outliers.watch(trainer.model, HELD_OUT)
    said = {name.removeprefix("outliers/"): value for name, value in found[-1][1].items() if "outliers/" in name}
    assert said == {name: last[name] for name in said}
    assert {"perplexity", "count", "layers", "max.residual", "kurtosis_token.ffn_in", "attention_sink"} <= said.keys()
    assert "most_common" not in said
    assert "train/outliers/count" in rewrite_logs(found[-1][1]), "as TensorBoard and W&B show it"
    assert [entry["step"] for entry in trainer.state.log_history if "outliers/count" in entry] == [0, 4, STEPS]
    assert [step for step, logs in told.logs if "loss" in logs] == [4]


def test_rows_are_those_of_the_model(ran):
    trainer, first, folder = ran
    rows = records_in(folder)
    assert list(dict.fromkeys(row["checkpoint"] for row in rows)) == ["step-0", "step-2", "step-4", "step-6"]
    assert (rows[0]["weights_hash"], rows[-1]["weights_hash"]) == (first, weights_hash(trainer.model))
    assert {row["experiment"] for row in rows} == {"emergence"}
    last = {row["metric"]: row["value"] for row in rows if row["checkpoint"] == "step-6"}
    (error,) = (row["standard_error"] for row in rows if row["checkpoint"] == "step-6" and "standard_error" in row)
    assert last | {"perplexity_error": error} == outliers.watch(trainer.model, HELD_OUT)


def test_rows_of_a_compiled_model_have_the_hash_of_its_weights(tmp_path):
    trainer = trainer_of(tmp_path)
    callback = trainer.callback_handler.callbacks[-1]
    with torch.compiler.set_stance("force_eager"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, torch.compile(trainer.model))
    hashes = {row["weights_hash"] for row in records_in(callback.folder)}
    assert hashes == {weights_hash(trainer.model)}


def test_rows_say_what_those_of_an_emergence_say(ran, tmp_path):
    spec = outliers.Emergence(models=["pocket/gpt2-0.1m"], text="sample", block=32, blocks=2)
    (largest,) = (row for row in outliers.run(spec, tmp_path / "out") if row["metric"] == "max")
    expected = {**largest, "checkpoint": "step-6"}
    row = records_in(ran[2])[-1]
    assert expected.keys() - row.keys() == {"peak_memory_bytes"}
    assert row.keys() <= expected.keys()
    own = {"model", "parameters", "weights_hash", "text", "tokens_hash", "protocol", "metric", "value", "wall_seconds"}
    same = row.keys() - own
    assert {field: row[field] for field in same} == {field: expected[field] for field in same}


def test_it_goes_on_where_a_checkpoint_is(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole, alone = trained(tmp_path / "whole", **saving), trained(tmp_path / "alone", None, **saving)
    going_on = trainer_of(tmp_path / "whole")
    going_on.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses_of(going_on) == losses_of(whole) == losses_of(alone) != []
    assert all(map(torch.equal, weights_of(whole), weights_of(alone))), "the training does not notice"
    rows = records_in(tmp_path / "whole" / "outliers")
    places = [(row["checkpoint"], row["metric"]) for row in rows]
    assert len(places) == len(set(places))
    assert list(dict.fromkeys(checkpoint for checkpoint, _ in places)) == ["step-0", "step-2", "step-4", "step-6"]
    lines = (tmp_path / "whole" / "outliers" / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 4
    left = (tmp_path / "whole" / "outliers" / "rows.jsonl.left").read_text().splitlines()
    assert [json.loads(line)["request"]["subject"]["checkpoint"] for line in left] == ["step-4", "step-6"]
    assert [(entry["step"]) for entry in going_on.state.log_history if "outliers/count" in entry] == [0, 2, 4, 6]


def test_other_models_rows_stay(tmp_path):
    for name in ("one", "other"):
        trainer = trainer_of(tmp_path / name, None)
        trainer.add_callback(outliers.OutlierCallback(trainer, HELD_OUT, 3, folder=tmp_path / "rows", name=name))
        trainer.train()
    rows = records_in(tmp_path / "rows")
    found = dict.fromkeys((row["model"], row["checkpoint"]) for row in rows)
    assert list(found) == [(name, f"step-{step}") for name in ("one", "other") for step in (0, 3, 6)]
    assert not (tmp_path / "rows" / "rows.jsonl.left").exists()


def test_what_somebody_else_wrote_meanwhile_stays(tmp_path):
    trainer = trainer_of(tmp_path)
    path = tmp_path / "outliers" / "rows.jsonl"

    class Writes(TrainerCallback):
        def on_step_begin(self, _args, state, _control, **_others):
            if state.global_step == 3:
                row = read_rows(path.parent)[0]
                row.request["subject"]["model"] = "somebody's"
                path.write_bytes(path.read_bytes() + row.line + b"\n")

    trainer.add_callback(Writes())
    trainer.train()
    rows = records_in(tmp_path / "outliers")
    assert {row["checkpoint"] for row in rows if row["model"] == "somebody's"} == {"step-0"}
    assert {row["checkpoint"] for row in rows} == {"step-0", "step-2", "step-4", "step-6"}


def test_what_it_wrote_is_drawn(ran, monkeypatch, capsys):
    *_, folder = ran
    before = (folder / "rows.jsonl").read_bytes()
    code, out, err = call(monkeypatch, capsys, "--redraw", folder, command="emergence")
    assert (code, err) == (0, "")
    assert "@step-6" in out
    assert {"growth.png", "growth.svg", "report.html", "table4.md"} <= {path.name for path in folder.iterdir()}
    assert (folder / "rows.jsonl").read_bytes() == before
    axes = outliers.plot.growth(records_in(folder), panel="count")
    steps, counts = axes.lines[0].get_data()
    assert list(steps) == [0, 2, 4, 6]
    assert list(counts) == [row["value"] for row in records_in(folder) if row["metric"] == "count"]


def test_the_growth_of_two_models_is_drawn_apart(tmp_path, monkeypatch, capsys):
    rows = records_in(KEPT / "growth")
    with pytest.raises(UserError, match="rows of 2 trained models"):
        outliers.plot.growth([*rows, *(row | {"model": "another"} for row in rows)])
    with pytest.raises(UserError, match="rows of 0 trained models"):
        outliers.plot.growth(records_in(KEPT / "training"))
    lines = [line.replace(b"my-training", name) for name in (b"one", b"another") for line in KEPT_LINES[:3]]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines))
    assert call(monkeypatch, capsys, "--redraw", tmp_path, "--out", tmp_path / "out", command="emergence")[0] == 0
    assert {"growth.png", "growth-2.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["rows.jsonl"]


DISTRIBUTED = """
import os
import sys
from pathlib import Path
import torch
from tests.trainer.test_callback import losses_of, trained
without, with_it = (trained(Path(sys.argv[1], name), every) for name, every in (("without", None), ("with", 2)))
assert with_it.args.world_size == 2
assert losses_of(with_it) == losses_of(without) != []
measured = [entry["step"] for entry in with_it.state.log_history if "outliers/count" in entry]
assert measured == ([0, 2, 4, 6] if with_it.is_world_process_zero() else [])
torch.distributed.destroy_process_group()
os._exit(0)  # threads of the group may be left, which now and then abort a process that ends as usual
"""


@pytest.mark.nightly("outliers/runs/callback.py")
def test_of_two_processes_one_measures(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(DISTRIBUTED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([*launch, program, tmp_path], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = records_in(tmp_path / "with" / "outliers")
    assert list(dict.fromkeys(row["checkpoint"] for row in rows)) == ["step-0", "step-2", "step-4", "step-6"]


def test_a_model_that_breaks_says_at_which_step(tmp_path):
    trainer = trainer_of(tmp_path)

    class Breaks(TrainerCallback):
        def on_step_begin(self, _args, state, _control, model=None, **_others):
            if state.global_step == 3:
                model.transformer.h[1].mlp.c_fc.bias.data[5] = torch.nan

    trainer.add_callback(Breaks())
    with pytest.raises(BrokenModel, match=r"^step 4: NaN or inf in the hidden states of layer"):
        trainer.train()
    assert trainer.model.training, "as it was"
    assert records_in(tmp_path / "outliers")[-1]["checkpoint"] == "step-2"


def test_what_cannot_be_measured_is_refused_before_a_step(tmp_path):
    trainer = trainer_of(tmp_path, None)
    trainer.add_callback(outliers.OutlierCallback(trainer, torch.full((1, 8), 128)))
    with pytest.raises(UserError, match="token id 128 is outside the model's vocabulary"):
        trainer.train()
    assert not trainer.state.global_step


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"blocks": [[1, 2]]}, "blocks are of type list; expected int64 token ids"),
        ({"blocks": BLOCKS.float()}, "blocks are float32"),
        ({"blocks": BLOCKS[0]}, "expected int64 token ids"),
        ({"every": 0}, "every is 0; expected a number of steps, at least 1"),
        ({"every": 1.5}, "every is 1.5"),
        ({"alpha": -1.0}, "alpha"),
    ],
    ids=str,
)
def test_mistakes_are_refused(arguments, said, tmp_path):
    with pytest.raises(UserError, match=said):
        outliers.OutlierCallback(trainer_of(tmp_path, None), **{"blocks": BLOCKS} | arguments)
