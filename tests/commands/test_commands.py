"""The command line as a user meets it."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

import outliers
from outliers.__main__ import main
from outliers.app import command_of, commands, entry_of
from outliers.commands.damage import Damage
from outliers.commands.measure import Cells
from outliers.commands.sweep import Sweep
from outliers.commands.training import Training
from outliers.commands.zeroshot import ZeroShot
from outliers.config.experiment import BLOCK, BLOCKS
from outliers.models.names import POCKET
from outliers.paper import report as artefacts
from outliers.runs.reprint import output_key
from outliers.terminal.command import app_of, run_command
from tests.conftest import needs_harness, read
from tests.small_models import names_of
from tests.typed import SMALL, call, refused, type_words

COMMANDS = commands()


def test_a_finished_run_prints_again_without_torch(monkeypatch, calls_of, capsys, tmp_path):
    model = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")
    arguments = [str(model), *SMALL[2:], "--out", str(tmp_path / "out")]
    first = call(monkeypatch, capsys, *arguments)
    program = (
        "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); "
        f"sys.argv = {['sweep', *arguments]}; runpy.run_module('outliers.sweep', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{first[1]}False\n", "")

    ran = calls_of("outliers.runs.run.run")
    assert call(monkeypatch, capsys, *arguments) == first
    assert not ran
    changes = [
        lambda: (tmp_path / "out" / "table1.md").unlink(),
        lambda: (tmp_path / "out" / "perplexity.svg").write_text("changed"),
        lambda: os.utime(model / "model.safetensors", (1, 1)),
        lambda: monkeypatch.setenv("OMP_NUM_THREADS", "2"),
        lambda: (tmp_path / "out" / ".printed.json").write_text("[]"),
    ]
    for number, change in enumerate(changes, 1):
        change()
        assert call(monkeypatch, capsys, *arguments)[:2] == first[:2]
        assert len(ran) == number
        assert (tmp_path / "out" / "table1.md").exists()
    call(monkeypatch, capsys, *arguments, "--force")
    call(monkeypatch, capsys, *arguments[:-2], "--blocks", "1", *arguments[-2:])
    assert len(ran) == len(changes) + 2


def bare(page: Path) -> str:
    """A page without what keeps its options whole."""
    return re.sub('<span class="whole">(.*?)</span>', r"\1", page.read_text())


def test_a_page_of_another_request_stays(monkeypatch, calls_of, capsys, tmp_path):
    """Each is shown in its turn, the others beside it, and none is drawn again."""
    out = tmp_path / "out"
    small = [*SMALL[:4], *SMALL[6:], "--out", str(out)]
    arguments = {blocks: [*small, "--blocks", blocks] for blocks in ("1", "2", "3")}
    first = {blocks: call(monkeypatch, capsys, *given) for blocks, given in arguments.items()}
    ran = calls_of("outliers.runs.run.run")
    for blocks in ("1", "3", "2", "2", "1"):
        assert call(monkeypatch, capsys, *arguments[blocks]) == (0, first[blocks][1], "")
        page, _, others = bare(out / "report.html").partition('<p id="others">')
        assert f"--blocks {blocks}<" in page
        links = re.findall(r'<a href="(earlier/\w+/report.html)"><code>(.*?)</code>', others)
        assert len(links) == 2
        for place, command in links:
            page, _, others = bare(out / place).partition('<p id="others">')
            assert command in page and 'href="../../report.html"' in others
            assert (out / place).with_name("table1.csv").exists()
        assert {path.name for path in out.iterdir()} >= {"rows.jsonl", "table1.csv", "perplexity.png"}
    assert not ran


def test_a_trace_stays_beside_those_of_other_requests(monkeypatch, calls_of, capsys, tmp_path):
    """Each is printed again, and lies in its place then; also where one of tokens has written it again."""
    small = ["pocket/gpt2-0.1m", "--block", "64", "--out", str(tmp_path)]
    arguments = {blocks: [*small, "--blocks", *blocks.split()] for blocks in ("2", "1", "2 --tokens")}
    first = {blocks: call(monkeypatch, capsys, *given, command="trace") for blocks, given in arguments.items()}
    ran = calls_of("outliers.runs.run.run")
    for blocks in ("2", "1", "2 --tokens", "2"):
        assert call(monkeypatch, capsys, *arguments[blocks], command="trace") == (0, first[blocks][1], "")
        assert outliers.Trace.load(tmp_path / "trace").sequences == int(blocks[0])
    assert not ran


def test_a_finished_page_of_a_model_prints_again_at_once(monkeypatch, calls_of, capsys, tmp_path):
    """Also where there was no outlier feature to remove, which is said and has not failed."""
    look = ["look", "pocket/gpt2-0.1m", "--out", str(tmp_path)]
    spec = [one for one in artefacts.experiments_of(*look[:1], models=look[1:2]) if one.shows in ("trace", "ablation")]
    monkeypatch.setattr(artefacts, "experiments_of", lambda *given: spec)
    first = call(monkeypatch, capsys, *look, command="report")
    assert "Not run" not in first[1] and "'gpt2-0.1m' has no outlier feature on this text" in first[1]
    measured = calls_of("outliers.paper.report.report_experiments")
    assert call(monkeypatch, capsys, *look, command="report") == (0, first[1], "")
    assert not measured
    (tmp_path / "report.html").write_text("")
    call(monkeypatch, capsys, *look, command="report")
    assert len(measured) == 1


def test_what_is_of_the_hub_is_never_taken_as_it_was():
    fields = {"models": ["pocket/gpt2-0.1m"], "text": "sample"}
    keys = [output_key(Sweep(**fields | of_hub), "sweep") for of_hub in ({}, {"text": "c4"}, {"models": ["gpt2"]})]
    assert [key is None for key in keys] == [False, True, True]


def test_words_of_an_experiment_are_no_paths(monkeypatch, tmp_path):
    """Nor is what stands beside a model in its folder of it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "models")
    spec = Sweep(models=["models"])  # of the text "sample"
    key = output_key(spec, "sweep")
    for word in ("local", "sample", "cpu", "float32", "fp32", "sweep", "models/results"):
        (tmp_path / word).mkdir()
        (tmp_path / word / "file").write_text("changed")
        assert output_key(spec, "sweep") == key, word


@pytest.mark.parametrize(
    "spec",
    [
        lambda folder: Sweep(models=[str(folder)]),
        lambda folder: Sweep(models=["pocket/gpt2-0.1m"], text=str(folder / "config.json")),
        lambda folder: Cells(models=["pocket/gpt2-0.1m"], variants=[f"against({folder})+absmax"]),
        lambda folder: Damage(model="pocket/gpt2-0.1m", against=[str(folder)]),
        lambda folder: Training(runs={"further": {"start": str(folder)}}),
        lambda folder: Training(runs={"new": None}, wikitext=str(folder / "config.json")),
        lambda folder: ZeroShot(models=["pocket/gpt2-0.1m"], tasks=["piqa-local"], data=str(folder)),
    ],
)
def test_a_change_of_any_file_that_is_named_is_seen(tmp_path, spec):
    folder = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")
    key = output_key(spec(folder), "command")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "compiled.pyc").touch()
    assert key == output_key(spec(folder), "command") is not None
    os.utime(folder / "config.json", (1, 1))
    assert output_key(spec(folder), "command") != key


def test_a_mistyped_command_is_one_line():
    typed = [sys.executable, "-W", "ignore", "-moutliers.swep"]
    done = subprocess.run(typed, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown command 'swep'; did you mean sweep?\n"


def test_case_alone_is_forgiven(specified):
    """In names of models and schemes, which rows and folders have as they are written here."""
    schemes = "FP32,LLM.int8,AbsMax+Hadamard@ffn_out,W4A8-G64"
    spec = specified(f"sweep Pocket/GPT2-0.1M SmolLM2-135M --schemes {schemes}")
    assert spec.models == ["pocket/gpt2-0.1m", "smollm2-135m"]
    assert names_of(spec) == ["fp32", "llm.int8", "absmax+hadamard@ffn_out", "w4a8-g64"]
    assert specified("trace POCKET/gpt2-0.1m").folder == Path("results/trace/gpt2-0.1m")
    assert names_of(specified("latency pocket/gpt2-0.1m --schemes BitsAndBytes")) == ["bitsandbytes"]
    assert outliers.variant("LLM.int8+kv=int4").name == "llm.int8+kv=int4"
    assert outliers.load_model("Pocket/GPT2-0.1M").config.n_layer == 2


def test_kernels_that_do_not_exist(monkeypatch, capsys):
    monkeypatch.setenv("OUTLIERS_KERNELS", "cuda")
    said = refused(monkeypatch, capsys, *SMALL)
    assert said == "OUTLIERS_KERNELS is 'cuda'; expected one of triton, formats, packed, cpu, plain, reference\n"


TRACE = ["pocket/gpt2-0.1m", "--block", "64", "--blocks", "2", "--alpha", "3"]
ABSMAX = [*TRACE[:-2], "--scheme", "absmax"]
TASK = ["--model", "pocket/gpt2-0.1m", "--scheme", "fp32,llm.int8", "--task", "piqa-local", "--limit", "3"]
TIMED = ["pocket/gpt2-0.1m", "pocket/gpt2-0.5m", "--prompt", "8", "--tokens", "2", "--repeats", "2"]
EMERGENCE = ["--model", "pocket/gpt2-0.1m", "--model", "pocket/gpt2-0.5m", *TRACE[1:]]


@pytest.mark.parametrize(
    ("command", "arguments", "folder", "printed", "written"),
    [
        ("trace", [*TRACE, "--tokens"], "trace/gpt2-0.1m", "mean |x|", "contexts.csv"),
        ("ablate", [*TRACE, "--method", "zero,mean"], "ablate/gpt2-0.1m", "random features", "ablation.md"),
        ("damage", ABSMAX, "damage/gpt2-0.1m", "with the largest mean error per token", "damage_errors.png"),
        ("origins", TRACE, "origins/gpt2-0.1m", "main writer", "life_line.png"),
        ("emergence", EMERGENCE, "emergence", "layers", "figure3.png"),
        ("latency", [*TIMED, "--batch", "1,2"], "latency", "llm.int8", "table6.csv"),
        pytest.param("zeroshot", TASK, "zeroshot", "llm.int8", "figure1.csv", marks=needs_harness),
        ("report", ["table.yaml"], "table", "Table 1: perplexity by scheme", "table1_published.md"),
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


# One way to name models and lists


@pytest.fixture
def specified(monkeypatch, capsys):
    """What a command would measure with some arguments."""
    found = []
    monkeypatch.setattr("outliers.app._measure", lambda name, spec, *_: found.append((name, spec)))

    def experiment(typed: str | list):
        command, *arguments = typed.split() if isinstance(typed, str) else typed
        assert call(monkeypatch, capsys, *arguments, command=command) == (0, "", "")
        name, spec = found.pop()
        assert name == command
        return spec

    return experiment


@pytest.mark.parametrize(
    ("typed", "fields"),
    [
        ("sweep paper/table1 gpt2 a,b", {"name": "paper/table1", "models": ["gpt2", "a", "b"], "text": "c4"}),
        ("sweep mine.yaml a", {"name": "mine", "models": ["a"], "blocks": 3}),
        ("trace --model a --memory 4GB --revision r", {"model": "a", "revision": "r", "memory": 4 * 10**9}),
        ("trace a --tokens --stream --alpha 3", {"by_token": True, "bos": False, "stream": True, "alpha": 3.0}),
        ("ablate a --feature 3 --features 17,4", {"features": [3, 17, 4], "where": ["attn_in"], "seed": 0}),
        ("emergence", {"name": "emergence", "shows": None, "block": 256, "blocks": 32}),
        ("latency paper/table6 --batch 1", {"models": ["bigscience/bloom"], "batches": [1], "device": "cuda"}),
        ("memory paper/table3 a", {"name": "paper/table3", "models": ["a"], "candidates": ["a"]}),
        ("memory", {"name": "paper/table3", "context": 256, "batch": 1}),
        ("memory --gpu 8", {"name": "memory", "candidates": None}),
    ],
)
def test_models_and_lists(specified, tmp_path, monkeypatch, typed, fields):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("models: [pocket/gpt2-0.1m]\nblocks: 3\n")
    found = specified(typed).model_dump()
    assert {name: found[name] for name in fields} == fields


KINDS = {
    name: kind
    for name in COMMANDS
    if isinstance(kind := entry_of(name).runs, type) and {"model", "models"} & {*kind.model_fields}
}  # of what a command measures of models


def test_all_commands_read_one_text_by_default():
    texts = {
        (kind.model_fields["text"].default, kind.model_fields["block"].default, kind.model_fields["blocks"].default)
        for kind in KINDS.values()
        if {"text", "block", "blocks"} <= {*kind.model_fields}
    }
    assert texts == {("sample", BLOCK, BLOCKS)}
    assert {(spec.text, spec.block, spec.blocks) for spec in artefacts.experiments_of("look")} == texts


@pytest.mark.parametrize("command", KINDS)
def test_a_model_is_named_in_the_same_way(specified, command):
    """In place, behind `--model`, and where there may be several with commas or repeated."""
    alone = "model" in KINDS[command].model_fields

    def named(*typed) -> list[str]:
        found = specified([command, *typed])
        return [found.model] if alone else found.models

    assert named("m") == named("--model", "m") == named("--models", "m") == ["m"]
    if not alone:
        for typed in (["a", "b"], ["a,b"], ["--model", "a,b"], ["--model", "a", "--model", "b"], ["--models", "a,b"]):
            assert named(*typed) == ["a", "b"]


def test_models_of_a_report(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("outliers.config.validate.check_configs", list)
    monkeypatch.setattr(artefacts, "report_experiments", lambda *arguments: asked.append(arguments) or ("the page", []))
    for typed in (["a,b"], ["paper/table4", "a", "--models", "b,c"]):
        assert call(monkeypatch, capsys, *typed, command="report") == (0, "the page\n", "")
    assert [(one[0], one[-1]) for one in asked] == [("pocket", ["a", "b"]), ("paper/table4", ["a", "b", "c"])]


def test_models_to_get(monkeypatch, constants, capsys, tmp_path):
    packaged = dict.fromkeys("ab", SimpleNamespace(licence="MIT", source="here", sha256=sha256(b"").hexdigest()))
    constants("outliers.commands.get", PACKAGED=packaged, packaged_file=tmp_path.joinpath)
    for name in packaged:
        (tmp_path / name).touch()
    said = "".join(f"{name} (MIT, here): {tmp_path / name}\n" for name in packaged)
    assert call(monkeypatch, capsys, "a", "--models", "b", command="get") == (0, said, "")
    assert call(monkeypatch, capsys, command="get")[1] == said.splitlines(keepends=True)[0]


def test_schemes_have_fp32_beside_them(specified):
    """On a command line: from Python one gets what one asks for."""
    assert names_of(specified("sweep m --schemes absmax,absmax-row")) == ["fp32", "absmax", "absmax-row"]
    variants = specified("measure m --variant absmax --variant absmax-row").variants
    assert [one.name for one in variants] == ["fp32", "absmax", "absmax-row"]


def test_hardware(specified):
    found = specified("memory a --gpu 8x24,16 --gpus 2x40.5").hardware
    assert [(of.hardware, of.gpus, of.gigabytes) for of in found] == [
        ("8x GPU", 8, 24.0),
        ("1x GPU", 1, 16.0),
        ("2x GPU", 2, 40.5),
    ]


def test_a_path_with_a_comma(specified, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m,n").mkdir()
    assert specified("latency --model m,n --models a,b").models == ["m,n", "a", "b"]


def test_a_report_of_other_models(tmp_path):
    a, b = (shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / name) for name in "ab")
    models = [str(a), str(b)]
    assert artefacts.experiments_of("paper/table4", models=models)[0].models == models
    for spec in artefacts.experiments_of("paper", "cpu", models[:1]):
        assert spec.models in ([], models[:1])
        assert getattr(spec, "candidates", models[:1]) == models[:1]
        assert getattr(spec, "device", "cpu") == "cpu"


def test_a_warning_is_a_line(monkeypatch, capsys):
    def warn():
        warnings.warn("the kettle\nis hot", stacklevel=1)

    type_words(monkeypatch, "warn")
    run_command(warn)
    assert capsys.readouterr().err == "warning: the kettle\nis hot\n"


def test_a_field_is_an_option(monkeypatch, capsys):
    """With its flags, type, help and default; a list by its singular too; those of a command before those of many."""
    monkeypatch.setenv("COLUMNS", "200")
    _, said, _ = call(monkeypatch, capsys, "--help", command="latency")
    lines = [" ".join(line.strip("│ ").split()) for line in said.splitlines()]
    expected = [
        "--dtype <str> Type of all that is not quantized: float32, float16 or bfloat16; by default bfloat16.",
        "--batch,--batches A,B,… Batch size; by default 1, 8, 32.",
        "--router <bool> Quantize routers of mixtures too, which otherwise stay exact.",
        "--prompt <int> Tokens of the prompt; by default 128.",
    ]
    assert [line for line in lines if line in expected] == expected
    assert "--alpha <float> Magnitude from which a value is an outlier; by default 6." in lines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help(name):
    for parameter in typer.main.get_command(app_of(command_of(name))).params:
        assert parameter.help.endswith("."), parameter.name


# The script `outliers`, and what is quick


def test_the_scripts_answers(monkeypatch, capsys):
    assert 'outliers = "outliers.__main__:main"' in read("pyproject.toml")

    def script(*arguments) -> tuple[int, str, str]:
        type_words(monkeypatch, "/usr/bin/outliers", *arguments)
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    assert script() == script("--help")
    out = script()[1]
    for name in COMMANDS:
        assert f"  outliers {name:<10} {entry_of(name).purpose}\n" in out
        said = script(name, "--help")[1]
        assert f"Usage: outliers {name} " in said
        assert f"outliers {name}" in said.partition("Example")[2]
        assert "python -m" not in said
    assert script("swep") == (2, "", "error: unknown command 'swep'; did you mean sweep?\n")
    assert script("look", "gpt2")[2].endswith("no command but experiments; `outliers report look` runs them\n")
    assert script("trace")[2].endswith("such as `outliers trace pocket/gpt2-1.7m`\n")
    assert "Traceback" in script("trace", "pocket/gpt2-01m", "--debug")[2]


# Packages of measuring: reading arguments and saying what there is imports none of them, and so answers at once.
LATE = {"torch", "numpy", "numba", "scipy", "pandas", "pyarrow", "matplotlib", "jinja2", "accelerate"}
LATE |= {"transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "datasets"}


# Runs modules one after the other, and says of each its exit code, its output and errors, and what of some it imported.
RUN_ALL = """
import contextlib, io, json, runpy, sys

typed, late, answers = *map(json.loads, sys.argv[1:]), []
for module, *arguments in typed:
    sys.argv, out, err, code = [module, *arguments], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
    answers.append([code, out.getvalue(), err.getvalue(), [name for name in late if name in sys.modules]])
print(json.dumps(answers))
"""


def answers(typed: list[list[str]], late: set[str] = LATE, **environment: str) -> list[list]:
    """What modules answer, run with their arguments in one process of their own: see `RUN_ALL`."""
    command = [sys.executable, "-c", RUN_ALL, json.dumps(typed), json.dumps(sorted(late))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return json.loads(done.stdout)


def test_help_imports_nothing_that_measures():
    typed = [["outliers"], *([f"outliers.{command}", "--help"] for command in COMMANDS)]
    for (code, out, err, imported), (module, *_) in zip(answers(typed), typed, strict=True):
        assert (code, err, imported) == (0, "", []), module
        assert "--help" in out


@pytest.mark.slow
def test_public_names():
    """In a process of its own, after every module of such a name is imported: none hides the function."""
    program = (
        "import pkgutil, importlib, outliers\n"
        "for module in pkgutil.iter_modules(outliers.__path__):\n"
        "    if module.name in outliers.__all__: importlib.import_module(f'outliers.{module.name}')\n"
        "for name in outliers.__all__:\n"
        "    assert callable(getattr(outliers, name)) or name in ('SCHEMES', 'plot'), name\n"
        "import outliers.trace as function; assert outliers.trace is function"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        outliers.nothing  # noqa: B018


@pytest.mark.parametrize(("file", "found"), [("__init__.py", True), ("outlier_kernels/__init__.py", False)])
def test_the_folder_kernels_of_a_clone_is_not_taken_for_the_public_package(tmp_path, file, found):
    path = tmp_path / "kernels" / file
    path.parent.mkdir(parents=True)
    path.touch()
    program = "import outliers, sys; print('kernels' not in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{found}\n"
