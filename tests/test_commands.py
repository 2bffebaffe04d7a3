"""The command line as a user meets it."""

import resource
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import outliers
from outliers.__main__ import COMMANDS
from outliers.models.load import load_tokenizer
from outliers.models.names import POCKET

SMALL = ["--model", "pocket/gpt2-0.1m", "--block", "64", "--blocks", "2", "--scheme", "fp32", "--scheme", "absmax"]


def call(monkeypatch, capsys, *arguments, command="sweep") -> tuple[int, str, str]:
    """Exit code, output and errors of `python -m outliers.sweep …`, or another command, run in this process."""
    monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
    code = 0
    try:
        runpy.run_module(f"outliers.{command}", run_name="__main__")
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


@pytest.mark.parametrize("command", ["sweep", "trace", "ablate", "emergence", "latency"])
def test_a_tokenizer_without_a_first_token(monkeypatch, capsys, tmp_path, command):
    folder = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.bos_token = None
    tokenizer.save_pretrained(folder)
    model = ["--model", folder] if command in ("sweep", "emergence") else [folder]
    code, out, err = call(monkeypatch, capsys, *model, "--bos", "--out", tmp_path / "out", command=command)
    assert (code, out) == (2, "")
    assert err == "error: the model's tokenizer has no first token (bos_token_id); run without --bos\n"


def test_a_table_that_cannot_be_written(monkeypatch, capsys, tmp_path):
    (tmp_path / "table1.md").mkdir()
    code, out, err = call(monkeypatch, capsys, *SMALL, "--out", tmp_path)
    assert code == 2
    assert out == ""
    said = f"error: '{tmp_path}/table1.md' is a folder; expected a file: move it away or choose another folder"
    assert err == f"{said} with --out\n"
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


def test_kernels_that_do_not_exist(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTLIERS_KERNELS", "cuda")
    code, out, err = call(monkeypatch, capsys, *SMALL)
    assert (code, out) == (2, "")
    assert err == "error: OUTLIERS_KERNELS is 'cuda'; expected one of reference, cpu, triton\n"
    assert not any(tmp_path.iterdir())


def test_unknown_option(monkeypatch, capsys):
    code, _, err = call(monkeypatch, capsys, "--modle", "gpt2")
    assert code == 2
    assert "--model" in err


TRACE = ["pocket/gpt2-0.1m", "--block", "64", "--blocks", "2", "--alpha", "3"]
EMERGENCE = ["--model", "pocket/gpt2-0.1m", "--model", "pocket/gpt2-0.5m", *TRACE[1:]]


@pytest.mark.parametrize(
    ("command", "arguments", "folder", "printed", "written"),
    [
        ("trace", TRACE, "trace/gpt2-0.1m", "Outlier features: ", "heat_map.png"),
        (
            "ablate",
            [*TRACE, "--method", "zero,mean"],
            "ablate/gpt2-0.1m",
            "random features, 10 draws  mean",
            "ablation.md",
        ),
        ("ablate", [*TRACE, "--features", "3,17"], "ablate/gpt2-0.1m", "outliers 3, 17", "ablation.md"),
        ("emergence", EMERGENCE, "emergence", "layers", "figure3.png"),
        ("report", ["table.yaml"], "table", "Table 1: perplexity under 8-bit schemes", "table1_published.md"),
    ],
)
def test_other_commands(monkeypatch, capsys, tmp_path, command, arguments, folder, printed, written):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.yaml").write_text(
        "shows: table1\nmodels: [pocket/gpt2-0.1m]\nschemes: [fp32]\nblock: 64\nblocks: 1\n"
    )
    code, out, err = call(monkeypatch, capsys, *arguments, command=command)
    assert (code, err) == (0, "")
    assert printed in out
    assert {"rows.jsonl", "rows.parquet", "report.html", written} <= {
        path.name for path in (tmp_path / "results" / folder).iterdir()
    }
    again = call(monkeypatch, capsys, *arguments, command=command)
    assert again == (0, out, "")


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("trace", ["pocket/gpt2-01m"], "unknown model 'pocket/gpt2-01m'; did you mean pocket/gpt2-0.1m"),
        ("trace", ["pocket/gpt2-0.1m", "--block", "512"], "blocks of 512 tokens are longer"),
        ("trace", ["pocket/gpt2-0.1m", "--alpha", "-1"], "field 'alpha'"),
        (
            "trace",
            ["pocket/gpt2-0.1m", "--revision", "step1"],
            "'pocket/gpt2-0.1m' is a local model and has no revision",
        ),
        (
            "ablate",
            ["pocket/gpt2-0.1m", "--features", "3,x"],
            "field 'features.1': Input should be a valid integer",
        ),
        ("ablate", ["pocket/gpt2-0.1m", "--features", "24"], "feature 24 is out of range"),
        ("ablate", ["pocket/gpt2-0.1m", "--features", ","], "field 'features'"),
        ("ablate", ["pocket/gpt2-0.1m", "--method", "men"], "unknown method 'men'; did you mean mean"),
        ("ablate", ["pocket/gpt2-0.1m", "--where", "ffn_out"], "unknown place 'ffn_out'; did you mean ffn_in"),
        ("ablate", ["pocket/gpt2-0.1m", "--controls", "3"], "3 controls; expected at least 10"),
        ("ablate", ["pocket/gpt2-0.1m", "--blocks", "1"], "'gpt2-0.1m' has no outlier feature on this text"),
        ("emergence", ["--model", "pocket/nothing"], "unknown model 'pocket/nothing'"),
        ("emergence", [*EMERGENCE[:4], "--revisions", "a,b"], "revisions of 2 models; expected one model"),
        ("emergence", ["--text", "nowhere.txt"], "text file 'nowhere.txt' does not exist"),
        ("report", ["pocke"], "unknown experiment 'pocke'; did you mean pocket"),
        ("report", ["mine.yaml"], "experiment file 'mine.yaml' does not exist"),
        ("report", ["pocket", "--redraw"], "'results/pocket/table1' has no finished rows"),
    ],
)
def test_mistakes_with_other_commands(monkeypatch, capsys, tmp_path, command, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, *arguments, command=command)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.*")), "nothing half-written"


MEASURING = ("--out", "--force", "Examples")
OPTIONS = {
    "get": ("smollm2-135m", "Example"),
    "memory": (*MEASURING, "--gpu", "--context"),
    "zeroshot": (*MEASURING, "--task", "--limit"),
    "report": (*MEASURING, "--redraw"),
}
LATE = {"torch", "transformers", "pandas", "matplotlib"}


def python(*arguments) -> tuple[str, float]:
    """Output of a Python process, and the seconds that it computed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_import_torch(command):
    program = (
        f"import sys, runpy; sys.argv = ['{command}', '--help']\n"
        f"try: runpy.run_module('outliers.{command}', run_name='__main__')\n"
        "except SystemExit: pass\n"
        f"assert not {LATE} & set(sys.modules)"
    )
    out, _ = python("-c", program)
    for option in OPTIONS.get(command, (*MEASURING, "--text", "--alpha", "--device")):
        assert option in out


def test_what_measures_nothing_answers_at_once():
    assert python("-m", "outliers")[1] < 0.5
    assert python("-m", "outliers.get", "--help")[1] < 0.5
    python(
        "-c",
        f"import sys, runpy; runpy.run_module('outliers', run_name='__main__'); assert not {LATE} & {{*sys.modules}}",
    )


def test_list_of_commands():
    out, _ = python("-m", "outliers")
    for name in COMMANDS:
        assert f"python -m outliers.{name}" in out
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
