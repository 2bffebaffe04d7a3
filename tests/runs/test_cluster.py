"""Experiments as tasks of a real Ray of this machine with two workers: the same rows, also where one is killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outliers import Trace, UserError, run, sweep
from outliers.commands.ablate import Ablation
from outliers.commands.damage import Damage
from outliers.commands.emergence import Emergence
from outliers.commands.sweep import Sweep
from outliers.commands.trace import Tracing
from outliers.config.experiment import Experiment
from outliers.runs import cluster
from outliers.runs.cluster import Cluster
from outliers.runs.engine import LocalEngine
from outliers.runs.forecast import PROCESS, FreeBytes, Need
from outliers.runs.frame import records_in as read_rows
from outliers.runs.rows import Rows
from outliers.subjects.cell import Task
from outliers.terminal.forecaster import Steps
from outliers.terminal.progress import Progress
from tests.conftest import lasting, names
from tests.runs.test_failures import test_a_cell_that_fails_costs_itself_alone as costs_itself_alone
from tests.runs.test_survival import own
from tests.small_models import alter_weights, trace_model
from tests.typed import call, refused

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'outliers[cluster]'")
pytestmark = pytest.mark.nightly("outliers/runs/", "outliers/subjects/model_cache.py")
MODELS = ["pocket/gpt2-0.1m", "pocket/gpt2-0.5m"]
SWEEP = {"models": MODELS, "schemes": ["fp32", "absmax", "llm.int8"], "block": 64, "blocks": 6}


@pytest.fixture(scope="module", autouse=True)
def two_workers():
    """A Ray of two cores, and one thread in this process, as its workers have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield
    ray.shutdown()
    torch.set_num_threads(threads)


def sorted_rows(rows: list[dict]) -> list[tuple]:
    return sorted(str(sorted(row.items())) for row in lasting(rows))


IN_PARTS = {"models": MODELS[:1], "schemes": ["llm.int8"], "blocks": 7}
CUT, WHOLE = {"by": ["error"]}, {"by": ["role", "layer"]}  # of a text that is cut, and of one that is not: many cells
MEASURED = {
    "a sweep": Sweep(**SWEEP),
    "a row in parts of the text": Sweep(**SWEEP | IN_PARTS),
    "an ablation": Ablation(model=MODELS[0], block=64, blocks=2, features=[3, 7], methods=["zero", "mean"]),
    "errors": Damage(model=MODELS[0], block=64, blocks=5, schemes=["absmax"], **CUT),
    "damage by place": Damage(model=MODELS[0], block=64, blocks=5, schemes=["absmax"], **WHOLE),
    "an encoder and a decoder": Sweep(models=["pocket/t5-1.9m"], schemes=["absmax"], block=30, blocks=4),
    "masked tokens": Sweep(models=["pocket/bert-1.4m"], schemes=["absmax"], block=32, blocks=4),
    "pictures": Sweep(models=["pocket/vit-0.3m"], schemes=["absmax"], blocks=4),
}


@pytest.mark.parametrize("spec", MEASURED.values(), ids=MEASURED)
def test_two_workers_have_the_same_rows_and_one_writer(spec, tmp_path):
    there, want = spec.model_copy(update={"engine": "ray"}), run(spec, tmp_path / "here")
    rows = run(there, tmp_path / "there")
    assert lasting(rows) == lasting(want)
    assert sorted_rows(read_rows(tmp_path / "there")) == sorted_rows(want)
    assert names(tmp_path / "there") == {"rows.jsonl"}
    assert run(there, tmp_path / "there") == rows, "finished rows are used again"


def test_parts_of_a_text():
    with Progress(0) as bar, Cluster(Experiment(name="parts"), bar) as engine:
        assert engine.parts(7, 1) == [slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 7)]
        assert engine.parts(2, 1) == [slice(0, 1), slice(1, 2)]
        assert engine.parts(7, 4) == [slice(0, 7)]


ALONE = """
import runpy
import sys
import psutil
from outliers.runs.rows import Rows

add, names = Rows.add, sys.argv.pop().split(",")

def kill(kept, *rows):
    add(kept, *rows)
    for process in psutil.Process().children():
        if process.name() in names:
            process.kill()

Rows.add = kill
sys.argv[0] = "sweep"
runpy.run_module("outliers.sweep", run_name="__main__")
"""  # a sweep, which has a Ray of its own


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_ray_that_ends_costs_what_is_not_finished(tmp_path, name):
    """What it says of its own ends is not printed; the same command goes on."""
    arguments = ["--model", MODELS[1], "--blocks", "8", "--engine", "ray", "--out", str(tmp_path / "out")]
    alone = os.environ | {"RAY_ADDRESS": "local"}  # not that of this process

    def sweep_in_a_process(killed: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", ALONE, *arguments, killed]
        done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout, done.stderr

    def finished() -> list[str]:
        """The lines of finished rows: one at least, as processes do not end at the moment of a signal."""
        return [line for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines() if '"failed"' not in line]

    code, out, err = sweep_in_a_process(name)
    kept = finished()
    said = [line for line in err.splitlines() if not re.fullmatch("about .* left|(.*: )?since .*", line)]
    assert code == 1
    assert 1 <= len(kept) < 8
    assert said == [
        f"error: Ray has ended on this machine (its process '{name}' is gone): {9 - len(kept)} cells are lost, all "
        "others are finished; run the same command again to measure them once more"
    ]
    assert "Rows, tables, figures and page: " in out, out
    assert (tmp_path / "out" / "report.html").exists()
    code, _, err = sweep_in_a_process("nothing")
    assert (code, "failed" in err) == (0, False)
    rows = [row for row in read_rows(tmp_path / "out") if "failed" not in row]
    assert len({row["scheme"] for row in rows}) == 9
    assert set(kept) < set(finished())


def dies(_model_cache, _job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_once(model_cache, job, died: Path) -> str:
    if not died.exists():
        died.touch()
        dies(model_cache, job)
    return "another worker"


def number(_model_cache, _job, value: int) -> int:
    if value == 3:
        raise ValueError("three")
    return value


def test_a_task_whose_worker_dies_runs_again_or_fails_alone(constants, tmp_path):
    constants("outliers.runs.cluster", RETRIES=1)
    job = SimpleNamespace(name="model")
    cells = [Task(f"cell {value}", number, job, (value,), Steps(1)) for value in range(5)]
    dying = [Task("once", dies_once, job, (tmp_path / "died",), Steps(1)), Task("always", dies, job, (), Steps(1))]
    with Progress(0) as bar, Cluster(Experiment(name="cells"), bar) as engine:
        found = {task.what: value for task, value in engine.run([*dying, *cells[:3], cells[4]])}
        with pytest.raises(ValueError, match="three"):  # an error of a program ends the run
            list(engine.run(cells))
    assert str(found.pop("always")).startswith("WorkerCrashedError: ")
    assert found == {"once": "another worker", "cell 0": 0, "cell 1": 1, "cell 2": 2, "cell 4": 4}


def test_a_variant_that_fails_costs_its_cells_alone(tmp_path):
    costs_itself_alone(tmp_path, {"engine": "ray"})


def test_a_trace_in_parts_is_the_trace_of_all(tmp_path):
    spec = {"model": "pocket/gpt2-1.7m", "block": 64, "blocks": 6, "alpha": 3, "by_token": True}
    want, want_rows = trace_model(Tracing(**spec), tmp_path / "here")
    found, rows = trace_model(Tracing(**spec, engine="ray"), tmp_path / "there")
    assert found.sketch == want.sketch
    assert found.labels == want.labels
    assert found.names == want.names
    for name, value in want.statistics.items():
        torch.testing.assert_close(found.statistics[name], value, rtol=1e-12, atol=0)
    for row, other in zip(lasting(rows), lasting(want_rows), strict=True):
        assert row | {"value": 0} == other | {"value": 0}
        assert row["value"] == pytest.approx(other["value"], rel=1e-12)
    assert Trace.load(tmp_path / "there" / "trace").sequences == 6
    (tmp_path / "there" / "rows.jsonl").unlink()  # as if it was killed between the trace and its rows
    assert lasting(trace_model(Tracing(**spec, engine="ray"), tmp_path / "there")[1]) == lasting(rows)


def test_of_equal_weights_the_first_name_is_measured(tmp_path, monkeypatch):
    """Whichever model a worker looked at first."""
    fields = {"models": [MODELS[0], str(own(tmp_path))], "block": 64, "blocks": 2}
    forwards = LocalEngine.run
    monkeypatch.setattr(LocalEngine, "run", lambda engine, cells: forwards(engine, list(cells)[::-1]))
    monkeypatch.setattr(LocalEngine, "groups", lambda _engine, subjects: [subjects])
    rows = run(Emergence(**fields), tmp_path / "backwards")
    assert {row["model"] for row in rows if "same_weights_as" in row} == {fields["models"][1]}


def test_ctrl_c_finishes_what_is_being_measured(monkeypatch, tmp_path):
    usual, add, added = signal.signal(signal.SIGINT, signal.default_int_handler), Rows.add, []

    def press(kept, *rows):
        add(kept, *rows)
        added.extend(rows)
        if len(added) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Rows, "add", press)
    fields = {"models": MODELS[1:], "block": 256, "blocks": 8}
    with pytest.raises(KeyboardInterrupt, match=rf"finished rows in '{tmp_path}'"):
        sweep(Sweep(**fields, engine="ray"), tmp_path)
    signal.signal(signal.SIGINT, usual)
    monkeypatch.undo()
    rows = read_rows(tmp_path)
    assert 2 < len(rows) < 9, "what was being measured is finished, and nothing else has begun"
    want = {row["scheme"]: row["value"] for row in sweep(Sweep(**fields, engine="ray"), tmp_path)}
    assert len(want) == 9
    assert all(row["value"] == want[row["scheme"]] for row in rows)


def test_what_no_machine_has_is_refused(monkeypatch, constants, capsys, tmp_path):
    with Progress(0) as bar, Cluster(Experiment(name="large"), bar) as engine:
        engine.alone = True
        engine.forecasts = {"m": Need("m", 9000 * 10**9, 0, 0, 0)}
        tasks = [Task("cell", number, SimpleNamespace(name=name), (1,)) for name in ("m", "small")]
        (_, failed), (_, answer) = engine.run(tasks)
    assert answer == 1
    assert "'m, cell' needs 1 CPUs, 9000.0 GB of memory; this machine has " in str(failed)
    constants("outliers.runs.cluster", _free_bytes=little)
    code, _, err = call(monkeypatch, capsys, "--model", MODELS[1], "--engine", "ray", "--out", tmp_path / "out")
    assert code == 2
    assert "'pocket/gpt2-0.5m' needs 7" in err
    assert " MB of memory in float32 and 1 MB are free; " in err


def little(_model_cache, _request) -> FreeBytes:
    """As much as no worker has."""
    return FreeBytes(10**6, 10**6, 10**15, 10**15)


def test_cells_ask_for_what_their_model_needs(monkeypatch):
    nodes = [{"CPU": 64, "GPU": 8, "memory": 512e9}, {"CPU": 16, "GPU": 0, "memory": 64e9}]
    cell = Task("cell", number, SimpleNamespace(name="m"), (1,))
    room = FreeBytes(80 * 10**9, 512 * 10**9, 1, 1, 8 * 80 * 10**9)

    def needs(device: str, memory: float, host: float = 0) -> dict:
        with Progress(0) as bar, Cluster(Experiment(name="needs", device=device), bar) as engine:
            monkeypatch.setattr(engine, "_nodes", lambda: nodes)
            assert engine._needs(cell)["memory"] == PROCESS
            engine.forecasts, engine.room = {"m": Need("m", int(memory), int(host), 0, 0)}, room
            return engine._needs(cell) | {"slots": engine._slots(cell)}

    assert needs("cpu", 1e9) == {"CPU": 1, "GPU": 0, "memory": 1e9, "slots": 80}
    # Two at once by memory on the first machine: each has half of its cores, and there is room for none on the second.
    assert needs("cpu", 200e9) == {"CPU": 25, "GPU": 0, "memory": 200e9, "slots": 2}
    assert needs("cuda", 30e9, 60e9) == {"CPU": 1, "GPU": 1, "memory": 60e9, "slots": 8}
    assert needs("auto", 150e9, 1e9) == {"CPU": 1, "GPU": 3, "memory": 1e9, "slots": 2}
    assert needs("auto", 600e9, 1e9)["GPU"] == 8


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:9"])
def test_an_address_where_nobody_listens_is_one_line(monkeypatch, lacking, capsys, tmp_path, address):
    lacking("ray.is_initialized")
    monkeypatch.setenv("RAY_ADDRESS", address)
    said = refused(monkeypatch, capsys, "--model", MODELS[0], "--engine", "ray", "--out", tmp_path / "a" / "b")
    assert said.startswith(f"no Ray cluster accepts a connection at RAY_ADDRESS={address} (")
    assert not any(tmp_path.iterdir())


def test_a_cluster_that_is_there_is_used_and_else_one_is_made(monkeypatch, constants, lacking, calls_of):
    asked = []
    lacking("ray.shutdown", "ray.is_initialized", "outliers.runs.cluster._check_answers")
    calls_of("ray.shutdown", lambda _calls: asked.append("shutdown"))

    def init(address=None, **options):
        asked.append((address, options.get("object_store_memory")))
        if address:
            raise ConnectionError("nobody answers")
        signal.signal(signal.SIGTERM, lambda *_: None)  # as Ray takes it where it begins

    usual = signal.getsignal(signal.SIGTERM)
    here = SimpleNamespace(get_node_id=lambda: "here")
    constants("ray", init=init, get_runtime_context=lambda: here, nodes=list)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with Progress(0) as bar, Cluster(Experiment(name="alone"), bar) as engine:
        assert engine.alone
        assert signal.getsignal(signal.SIGTERM) is usual
    assert asked == [("auto", None), (None, cluster.OBJECT_STORE), "shutdown"]


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"engine 'ray' needs Ray; pip install 'outliers\[cluster\]'"):
        sweep(Sweep(models=MODELS, engine="ray"), tmp_path)


def test_what_a_worker_warns_of_is_said_once(tmp_path, caplog):
    """Here of a tensor that the model has no place for, of which both workers warn."""
    folder = alter_weights(own(tmp_path), lambda tensors: tensors.update(beside=torch.ones(1)))
    fields = {"models": [str(folder)], "schemes": ["fp32", "absmax"], "block": 64, "blocks": 4}
    rows = sweep(Sweep(**fields, engine="ray"), tmp_path / "out")
    assert all(row["ignored_tensors"] == ["beside"] for row in rows)
    assert len([record for record in caplog.records if "has no place (beside)" in record.getMessage()]) == 1
