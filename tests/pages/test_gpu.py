"""What `make gpu` does, on a machine without a GPU: it says so; its sections run on a CPU with a tiny model."""

import json
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT, read

sys.path.append(str(ROOT / "scripts"))

import gpu

from tests.typed import type_words

CPU = torch.device("cpu")
TINY = gpu.Size(
    layers=((4, 64, 32), (40, 64, 32)),
    model=gpu.SIZE.model | {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    blocks=(2, 24),
    decoded=(8, 4),
)
ROWS = {
    "layers": ["4 × 64 × 32", "40 × 64 × 32"],
    "trace": ["decoder", "perplexity", "trace"],
    "schemes": ["exact", *gpu.SCHEMES],
    "decoding": ["exact", "llm.int8", "absmax-vector"],
}


@pytest.fixture(autouse=True)
def folder(monkeypatch, constants, tmp_path):
    constants("gpu", FOLDER=tmp_path)
    type_words(monkeypatch, "gpu.py")
    return gpu.folder_of(CPU)


def test_without_a_gpu_it_says_so(lacking, capsys, tmp_path):
    lacking("torch.cuda.is_available")
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err.startswith("error: torch ")
    assert "no NVIDIA GPU" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ROWS)
def test_a_section_leaves_its_rows_and_their_table(name, folder, constants):
    constants("gpu", ROUNDS=1, CALLS=1)
    assert gpu.run_section(name, CPU, TINY) == 0
    left = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert [next(iter(row.values())) for row in left["rows"]] == ROWS[name]
    numbers = [value for row in left["rows"] for value in row.values() if not isinstance(value, str)]
    assert min(numbers) > 0
    assert left["about"]["code"] == gpu.about(CPU)["code"]
    assert all(first in read(folder / f"{name}.md") for first in ROWS[name])


def test_sections_take_eight_minutes_at_most():
    assert sum(seconds for _, seconds in gpu.SECTIONS.values()) <= 480
    assert set(gpu.SECTIONS) == {*ROWS, "tests"}


def test_tests_are_those_that_ask_for_a_gpu():
    assert {"tests/kernels/test_triton.py", "tests/metrics/test_graphs.py"} <= set(gpu.TESTS)
    assert all("torch.cuda" in read(file) for file in gpu.TESTS)


def test_tests_that_fail_are_named(constants, tmp_path):
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text("def test_it(): assert False\n")
    constants("gpu", TESTS=[str(wrong)])
    ((row),) = gpu.run_tests(CPU, TINY)
    assert row["exit_code"] == 1
    assert "test_it" in row["failed"][0]
    assert row["summary"].startswith("1 failed")


def test_what_is_there_is_not_run_again(monkeypatch, constants, folder, capsys):
    """A section that fails or hangs leaves nothing, and the others go on; one of other code is run again."""
    ran, bad, of_code = [], {"trace", "schemes"}, gpu.about(CPU)

    def run(command, timeout, **_keywords):
        ran.append(command[-1])
        if command[-1] == "schemes":
            raise subprocess.TimeoutExpired(command, timeout)
        if command[-1] in bad:
            raise subprocess.CalledProcessError(1, command)
        gpu.run_section(command[-1], CPU, TINY)

    monkeypatch.setattr(subprocess, "run", run)
    sections = {name: (lambda *_: [{"run": "one", "milliseconds": 1.0}], 9) for name in gpu.SECTIONS}
    constants("gpu", SECTIONS=sections)
    assert gpu.run_all(CPU) == 1
    assert ran == list(sections)
    assert {file.stem for file in folder.iterdir()} == set(sections) - bad
    bad.remove("trace")
    ran.clear()
    assert gpu.run_all(CPU) == 1
    assert ran == ["trace", "schemes"]
    assert "layers: there already" in capsys.readouterr().out
    constants("gpu", about=lambda _device: of_code | {"code": "other"})
    ran.clear()
    gpu.run_all(CPU)
    assert ran == list(sections)
