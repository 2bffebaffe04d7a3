"""The command line as a user meets it."""

import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import outliers
from outliers.__main__ import COMMANDS
from outliers.models.load import POCKET

SMALL = ["--model", "pocket/gpt2-0.1m", "--block", "64", "--blocks", "2", "--scheme", "fp32", "--scheme", "absmax"]


def call(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    """Exit code, output and errors of `python -m outliers.sweep …`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
    code = 0
    try:
        runpy.run_module("outliers.sweep", run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
    return code, *capsys.readouterr()


def test_prints_the_table_and_writes_files(monkeypatch, capsys, tmp_path):
    code, out, err = call(monkeypatch, capsys, *SMALL, "--out", tmp_path)
    assert code == 0
    assert "gpt2\n" in out
    assert "absmax" in out
    assert "llm.int8" not in out
    assert err == "", "no progress bar where there is no terminal"
    assert (tmp_path / "table1.md").exists()


def test_default_folder_and_experiment_file(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("models: [pocket/gpt2-0.1m]\nschemes: [fp32]\nblock: 32\nblocks: 1\n")
    code, out, _ = call(monkeypatch, capsys, "mine.yaml", "--blocks", "2", "--scheme", "absmax")
    assert code == 0
    assert "absmax" in out
    assert "fp32" not in out
    assert (tmp_path / "results" / "mine" / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "pocket/gpt2-5.9"], "unknown model 'pocket/gpt2-5.9'; did you mean pocket/gpt2-5.9m"),
        (["--scheme", "zeropont"], "unknown scheme 'zeropont'; did you mean zeropoint"),
        (["--text", "smaple"], "unknown text 'smaple'; did you mean sample"),
        (["--text", "nowhere.jsonl"], "text file 'nowhere.jsonl' does not exist"),
        (["--block", "512"], "blocks of 512 tokens are longer than the model's context of 256; use --block 256"),
        (["--blocks", "100000"], "text 'sample' is too short"),
        (["--alpha", "0"], "field 'alpha'"),
        (["--dtype", "int4"], "field 'dtype': Input should be 'float32', 'float16' or 'bfloat16', got 'int4'"),
        (["--device", "cuda:9"], "device 'cuda:9' is not there"),
        (["no-experiment"], "unknown experiment 'no-experiment'"),
        (["--out", "/dev/null/out"], "cannot write to '/dev/null/out'"),
    ],
)
def test_mistakes(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, *SMALL, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_a_table_that_cannot_be_written(monkeypatch, capsys, tmp_path):
    (tmp_path / "table1.md").mkdir()
    code, out, err = call(monkeypatch, capsys, *SMALL, "--out", tmp_path)
    assert code == 2
    assert out == ""
    assert err == f"error: cannot write to '{tmp_path}' (Is a directory); choose another folder with --out\n"
    assert not list(tmp_path.glob(".*")), "no part of a file is left"


def test_unusable_weights(monkeypatch, capsys, tmp_path):
    folder = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.bias"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, out, err = call(monkeypatch, capsys, "--model", folder, "--blocks", "1", "--out", tmp_path / "out")
    assert code == 2
    assert out == ""
    assert err.startswith(f"error: the weights of '{folder}' hold NaN or inf in 'transformer.ln_f.bias'")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_unknown_option(monkeypatch, capsys):
    code, _, err = call(monkeypatch, capsys, "--modle", "gpt2")
    assert code == 2
    assert "--model" in err


def test_help_does_not_import_torch():
    program = (
        "import sys, runpy; sys.argv = ['sweep', '--help']\n"
        "try: runpy.run_module('outliers.sweep', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in ("--model", "--scheme", "--text", "--blocks", "--alpha", "--device", "--out", "--force", "Examples"):
        assert option in done.stdout


def test_list_of_commands():
    done = subprocess.run([sys.executable, "-m", "outliers"], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert f"python -m outliers.{name}" in done.stdout
        assert runpy.run_module(f"outliers.{name}")["__doc__"].startswith(f"`python -m outliers.{name}`")


def test_public_names():
    """In a process of its own, after every room is imported: a module must not hide a function of the same name."""
    program = (
        "import pkgutil, importlib, outliers\n"
        "for module in pkgutil.iter_modules(outliers.__path__):\n"
        "    if module.ispkg: importlib.import_module(f'outliers.{module.name}')\n"
        "for name in outliers.__all__:\n"
        "    assert callable(getattr(outliers, name)) or name == 'SCHEMES', name\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        outliers.nothing  # noqa: B018
