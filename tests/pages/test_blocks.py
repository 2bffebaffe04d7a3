"""Every block of code of README and docs: it runs here, on a small model, or says that it needs the hub or a GPU.

A line of a shell that needs something has a comment behind it that says so, or
one above it that holds for all lines up to the next such comment.
"""

import importlib
import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import outliers
from outliers.commands.sweep import Sweep
from outliers.config import files
from outliers.config.files import make_experiment, read_experiment
from outliers.models import anatomy, plugins
from outliers.models.names import POCKET
from tests.conftest import LLAMA, ROOT, read
from tests.gguf_files import save_gguf
from tests.pages.test_docs import CARDS, PAGES
from tests.typed import type_words

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What a line may need that is not here: how one sees that it does, and how it is said.
NEEDS = {
    "the hub": r"(?<![\w/.-])(?:gpt2|gpt2-\w+|facebook/\S+|EleutherAI/\S+|paper/\S+|c4|wikitext2)(?![\w/.-])",
    "a GPU": r"--device (?:cuda|auto)|device: cuda|make gpu",
    "a cluster": r"^(?:sbatch|ray) ",
    "downloads": r"outliers\.get ",
    "texts and a night": r"outliers\.training training/",
    "finished runs": r"outliers\.report training",
}
# Programs beside this project's own: that their files, targets and options are there is tested in test_docs.py.
OTHERS = {"git", "make", ".", "sbatch", "ray", "llama-quantize"}


class Line(NamedTuple):
    """A line of a shell: what is typed, and what it is said to need."""

    typed: str
    said: str

    @property
    def needs(self) -> set[str]:
        return {need for need, sign in NEEDS.items() if re.search(sign, self.typed)}

    @property
    def says(self) -> set[str]:
        return {need for need in NEEDS if re.search(rf"\b{need}\b", self.said.replace("an NVIDIA", "a"))}


def lines(block: str) -> Iterator[Line]:
    """The lines of a block, each with the comments that hold for it."""
    above = ""
    for line in block.splitlines():
        typed, _, behind = line.partition("#")
        if typed.strip():
            yield Line(typed.strip(), f"{above}\n{behind}")
        else:
            above = behind


def blocks_of(*languages: str) -> list:
    """The blocks of some languages, as parameters."""
    return [
        pytest.param(block, id=f"{page}, {language} {number}")
        for page in [*PAGES, *CARDS]
        for number, (language, block) in enumerate(BLOCK.findall(read(page)), 1)
        if language in languages
    ]


def test_blocks_of_every_language_are_tested():
    found = {language for page in [*PAGES, *CARDS] for language, _ in BLOCK.findall(read(page))}
    assert found == {"python", "sh", "yaml", "toml", "text"}, "text is what is printed; anything else is tested below"
    for page in [*PAGES, *CARDS]:
        assert read(page).count("```") == 2 * len(BLOCK.findall(read(page))), f"{page}: a block that nobody finds"


@pytest.mark.parametrize("block", blocks_of("sh"))
def test_a_line_says_what_it_needs(block):
    for line in lines(block):
        assert line.says == line.needs, line.typed
        assert line.typed.startswith("python -m outliers") or line.typed.split()[0] in OTHERS, line.typed


# What is run in the place of what is typed

DOCUMENTS = '{"text": "One of my documents, which is not long. It is repeated."}\n'
# Fields of an experiment, where it has them, so that it takes seconds, offline and on a CPU.
SMALLER = {
    "text": "sample",
    "device": "cpu",
    "block": 32,
    "blocks": 1,
    "draws": 1,
    "limit": 2,
    "tasks": ["piqa-local"],
    "dimensions": [64],
    "seconds": 0.01,
    "batches": [1],
}
SCHEMES = 5  # of an experiment, the first ones
LAYERS = 2  # of the small model
# Options of commands that read text.
READING = ("trace", "ablate", "origins", "damage", "emergence", "sweep", "measure")
SIZES = dict.fromkeys(READING, "--block 32 --blocks 1") | {"plan": "--block 32 --blocks 1 --confirm 1 --draws 2"}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    """A folder with a random model of SmolLM2's architecture that has two outlier features, and a tokenizer."""
    return _save_small("llama", tmp_path_factory.mktemp("models") / "small")


def _save_small(kind: str, folder: Path, **more) -> Path:
    fields = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS} | more
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=4096, bos_token_id=0, eos_token_id=0, **fields)
    outliers.plant(AutoModelForCausalLM.from_config(config).eval(), [3, 40], 16.0).save_pretrained(folder)
    for file in (POCKET / "gpt2-0.1m").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def place(small_model, tmp_path_factory) -> Path:
    """A folder with what readers have, and small experiments. What one block has measured, the next ones use again."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "my_documents.jsonl").write_text(DOCUMENTS * 50)
    (folder / "my_experiment.yaml").write_text(_smaller(my_experiment(), small_model))
    save_gguf(AutoModelForCausalLM.from_pretrained(small_model), folder / "model.gguf")
    _save_small("mixtral", folder / "mixture", num_local_experts=8)
    plan = folder / "results" / "plan" / "smollm2-135m" / "plan.yaml"  # of a command of the block before
    plan.parent.mkdir(parents=True)
    outliers.Plan(model="small", scheme="absmax", exact=["model.layers.1.mlp.down_proj"], projections=7 * LAYERS).write(
        plan
    )
    watched = folder / "my-training" / "outliers"
    watched.mkdir(parents=True)
    shutil.copy(ROOT / "results" / "kept" / "growth" / "rows.jsonl", watched)
    for name, path in files.experiment_files().items():
        small = folder / "experiments" / f"{name}.yaml"
        small.parent.mkdir(parents=True, exist_ok=True)
        small.write_text(_smaller(path.read_text(encoding="utf-8"), small_model))
    return folder


def my_experiment() -> str:
    """The experiment file that a page shows."""
    (block,) = (block.values[0] for block in blocks_of("yaml"))
    return block


def _smaller(experiment: str, model: Path) -> str:
    """An experiment with small fields, and these models in the place of its own."""
    fields = yaml.safe_load(experiment)
    of_one = len(fields.get("models", [])) == 1
    several = [str(model)] if of_one else ["pocket/gpt2-0.1m", str(model)]
    models = {"model": str(model), "models": several, "candidates": several}
    small = SMALLER | models | {"schemes": fields.get("schemes", [])[:SCHEMES]}
    return yaml.safe_dump(fields | {field: value for field, value in small.items() if field in fields})


def run(typed: str, small_model: Path, monkeypatch) -> None:
    """Run what is typed, on a small model and little text where it names others."""
    module = shlex.split(typed)[2]
    stands_for = {
        "smollm2-135m": str(small_model),
        "pocket/gpt2-5.9m": str(small_model),
        "pocket/gpt2-1.7m": str(small_model),
        "path/to/folder": str(small_model),
        "path/to/model.gguf": "model.gguf",
        "path/to/mixture": "mixture",
        "247,507": "3,17",  # features of a model of 576
        "247": "3",
    }
    if "published" in typed.split():
        stands_for["smollm2-135m"] = "--redraw"  # nobody published anything about the small one
    last = re.sub(r"\b(layers|blocks)\.\d+(:\d+)?", rf"\1.{LAYERS - 1}", typed)  # in the place of one of many
    arguments = [stands_for.get(argument, argument) for argument in shlex.split(last)[3:]]
    sizes = "" if "--redraw" in arguments else SIZES.get(module.rpartition(".")[2], "")
    type_words(monkeypatch, module, *arguments, *sizes.split())
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, typed


@pytest.mark.nightly(
    "README.md", "docs/", "experiments/", "outliers/app.py", "outliers/commands/", "outliers/terminal/"
)
@pytest.mark.parametrize("block", blocks_of("sh"))
def test_lines_that_need_nothing_run(block, place, small_model, ship, monkeypatch, capsys):
    ours = [line.typed for line in lines(block) if not line.needs and line.typed.startswith("python")]
    if not ours:
        pytest.skip("every line needs what is not here, and says so")
    known = {name: place / "experiments" / f"{name}.yaml" for name in files.experiment_files()}
    ship(known)
    monkeypatch.chdir(place)
    for line in ours:
        run(line, small_model, monkeypatch)
        assert capsys.readouterr().out, line


def test_the_experiment_file_is_one_and_says_what_it_needs(tmp_path):
    block = my_experiment()
    above, _, fields = block.partition("\n")
    needed = {need for need, sign in NEEDS.items() if re.search(sign, re.sub(r"[\[\],]", " ", fields))}
    assert Line("", above).says == needed
    (tmp_path / "my_experiment.yaml").write_text(block)
    spec = make_experiment(read_experiment(str(tmp_path / "my_experiment.yaml")), Sweep)
    assert (spec.models, spec.blocks, spec.device) == (["gpt2", "gpt2-medium"], 64, "cuda")


def test_entry_points_are_of_groups_that_are_read(install, monkeypatch):
    """A plugin of schemes is installed in `quantization/test_schemes.py`; one of families here."""
    shown = [tomllib.loads(block.values[0])["project"]["entry-points"] for block in blocks_of("toml")]
    assert sorted(group for groups in shown for group in groups) == ["outliers.families", plugins.SCHEMES]
    code = """
from dataclasses import replace
from outliers.models.anatomy.causal import CAUSAL
BACKWARD = replace(CAUSAL, name="of-a-page", kinds=["of-a-page"])
"""
    install("my_package", code, "backward = my_package:BACKWARD", "outliers.families")
    monkeypatch.setattr(anatomy, "FAMILIES", dict(anatomy.FAMILIES))  # what is added goes with the test
    config = SimpleNamespace(model_type="of-a-page", is_encoder_decoder=False, architectures=None)
    assert anatomy.family_of(config).name == "of-a-page"


# Python


@pytest.mark.parametrize("block", blocks_of("python"))
def test_python_runs(block, monkeypatch, tmp_path):
    """Each block by itself, with a pocket model in the place of the one that is downloaded, and few steps."""
    tables = [
        ("outliers.models.anatomy", "FAMILIES"),
        ("outliers.quantization.schemes", "SCHEMES"),
        ("outlier_kernels.formats", "FORMATS"),
        ("outliers.text.documents", "TEXTS"),
        ("outliers.paper.artefacts", "ARTEFACTS"),
    ]
    tables = [getattr(importlib.import_module(module), name) for module, name in tables]
    before = [dict(table) for table in tables]
    if "from peft " in block:
        pytest.importorskip("peft", reason="needs peft of outliers[peers]")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    try:
        small = block.replace("smollm2-135m", "pocket/gpt2-1.7m").replace("max_steps=400", "max_steps=3")
        exec(compile(small, "block", "exec"), {"__name__": "block"})
    finally:
        for table, rows in zip(tables, before, strict=True):  # what a block adds goes with it
            table.clear()
            table.update(rows)
