"""What `make gpu` does, on a machine without a GPU: it says so; its steps are commands that there are."""

import json
import subprocess
import sys
import zipfile

import pytest
import torch

from outliers.presets.linear_layers import LinearLayers
from outliers.specification.files import make_experiment, read_experiment
from tests import test_docs
from tests.test_docs import ROOT, read

sys.path += [str(ROOT / "scripts"), str(ROOT / "kernels" / "benchmarks")]

import gpu
import linear_layer


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "FOLDER", tmp_path / "gpu")
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.startswith("error: torch ")
    assert "no NVIDIA GPU" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "gpu").exists()


@pytest.mark.parametrize("name", gpu.STEPS)
def test_steps_are_commands_that_there_are(name):
    arguments = gpu.arguments_of(name)
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).samefile(linear_layer.__file__)
        assert linear_layer.parser().parse_args(arguments[1:]).out == gpu.FOLDER / name
    elif arguments[1] == "pytest":
        assert {"tests/test_triton.py"} <= set(arguments[3:])
        assert all("torch.cuda" in read(file) for file in arguments[3:])
    else:
        test_docs.test_commands_take_what_is_typed(["python", *arguments])


def test_what_measures_runs_on_the_gpu():
    """`layers` takes it where there is one."""
    assert [name for name in gpu.MEASURING if "cuda" not in gpu.STEPS[name]] == ["layers", "table5"]
    assert make_experiment(read_experiment(gpu.STEPS["table5"][-1]), LinearLayers).device == "cuda"


def on_a_gpu(monkeypatch, tmp_path, steps: dict, measuring: list) -> None:
    """A machine with one, where there are other steps."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "environment", lambda device: {"device_name": f"a GPU, {device}"})
    for name, value in {"FOLDER": tmp_path / "gpu", "STEPS": steps, "MEASURING": measuring}.items():
        monkeypatch.setattr(gpu, name, value)


def test_a_failed_step_is_recorded_and_the_others_go_on(monkeypatch, capsys, tmp_path):
    steps = {
        "bad": ["-c", "import sys; print('why'); sys.exit(3)"],
        "endless": ["-c", "endless"],
        "good": ["-c", "import pathlib, sys; pathlib.Path(sys.argv[2], 'rows').write_text('1')"],
    }
    on_a_gpu(monkeypatch, tmp_path, steps, ["good"])
    start = subprocess.run

    def wait(command, timeout, **keywords):
        if "endless" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return start(command, timeout=timeout, **keywords)

    monkeypatch.setattr(subprocess, "run", wait)
    (tmp_path / "gpu" / "good").mkdir(parents=True)
    assert gpu.main() == 1
    with zipfile.ZipFile(tmp_path / "gpu.zip") as packed:
        assert {"about.json", "bad.log", "endless.log", "good.log", "good/rows"} <= set(packed.namelist())
        assert packed.read("bad.log") == b"why\n"
        about = json.loads(packed.read("about.json"))
    assert about["device_name"] == "a GPU, cuda"
    assert {step["step"]: step["exit_code"] for step in about["steps"]} == {
        "bad": 3,
        "endless": f"none within {gpu.SECONDS} seconds",
        "good": 0,
    }
    assert all(step["seconds"] >= 0 and step["arguments"] == steps[step["step"]] for step in about["steps"])
    assert "gpu.zip" in capsys.readouterr().out


def test_without_failures_it_exits_with_0(monkeypatch, tmp_path):
    on_a_gpu(monkeypatch, tmp_path, {"good": ["-c", ""]}, [])
    assert gpu.main() == 0
