"""Mistakes that a user, a file or a machine makes, each in a line: what is there, what is typed, what the answer says.

To add a case, add a line to the table of its kind. Each is run as a command in a folder of its own; it must end within
ten seconds with exit code 2 and one line, and leave nothing behind.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from outliers.models.names import POCKET
from outliers.models.weight_files import INDEX, WEIGHTS
from tests.test_commands import call

SECONDS = 10  # for any answer
SMALL = "--block 32 --blocks 1"


class Case(NamedTuple):
    """A mistake: how it is made in an empty folder, what is typed there, and a pattern of the one line that answers."""

    what: str
    make: Callable[[Path], None]
    typed: str
    answer: str


def nothing(folder: Path) -> None:
    """Nothing is there."""


def configured(**fields) -> Callable[[Path], None]:
    """A small model in the folder `m`, with other fields in its configuration."""

    def make(folder: Path) -> None:
        file = shutil.copytree(POCKET / "gpt2-0.1m", folder / "m") / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return make


# ---- which files are the model -------------------------------------------------------------------------------------

FC = "transformer.h.1.mlp.c_fc.weight"  # a tensor of the small model, (24, 96) in float32


def sharded(*shards: object, index: str | bytes | None = None) -> Callable[[Path], None]:
    """The small model with its weights in `a.safetensors`, and an index that lists these beside it, or says this."""

    def make(folder: Path) -> None:
        configured()(folder)
        weights = (folder / "m" / "model.safetensors").rename(folder / "m" / "a.safetensors")
        listed = dict.fromkeys(load_file(weights), weights.name)
        listed |= {f"more.{number}": shard for number, shard in enumerate(shards)}
        said = json.dumps({"metadata": {}, "weight_map": listed}) if index is None else index
        (folder / "m" / INDEX).write_bytes(said.encode() if isinstance(said, str) else said)

    return make


def weights(**changes: Callable[[dict], object]) -> Callable[[Path], None]:
    """The small model, whose tensors were changed."""

    def make(folder: Path) -> None:
        configured()(folder)
        tensors = load_file(folder / "m" / WEIGHTS)
        for change in changes.values():
            change(tensors)
        save_file(tensors, folder / "m" / WEIGHTS, {"format": "pt"})

    return make


def instead(name: str, put: Callable[[Path], object], make: Callable[[Path], None]) -> Callable[[Path], None]:
    """What `make` makes, with something else in the place of a file of the model."""

    def make_then_put(folder: Path) -> None:
        make(folder)
        (folder / "m" / name).unlink(missing_ok=True)
        put(folder / "m" / name)

    return make_then_put


def outside(path: Path) -> None:
    """A link to the weights in a folder that the model is not in."""
    shutil.copy(POCKET / "gpt2-0.1m" / WEIGHTS, path.parent.parent / "theirs.safetensors")
    path.symlink_to("../theirs.safetensors")


def pickled(path: Path) -> None:
    """Weights that run code as they are read; the folder would show it."""
    path.with_name("pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch here'\ntR.")


def another_name(path: Path) -> None:
    """The weights under a name that no loader knows."""
    shutil.copy(POCKET / "gpt2-0.1m" / WEIGHTS, path.with_name("model.fp16.safetensors"))


LISTS = "lists .* as weights; expected names of .safetensors files in its folder"
NO_INDEX = "is no index of weight files; expected JSON with a 'weight_map'"
NO_FILE = "is no regular file"
LEADS_OUT = "is a link that leads out of its folder"
TRACE, STREAM = f"trace m {SMALL}", f"trace m {SMALL} --stream"
SWEEP = f"sweep --model m {SMALL} --scheme absmax"
EMERGENCE = f"emergence --model m {SMALL}"
ABLATE = f"ablate m {SMALL} --features 1 --stream"
LATENCY = "latency m --scheme llm.int8 --prompt 8 --tokens 2 --batch 1"

MODEL_FILES: list[Case] = [
    Case("an index with an absolute path", sharded("/etc/x.safetensors"), TRACE, LISTS),
    Case("an index with a path outside", sharded("../outside.safetensors"), STREAM, LISTS),
    Case("an index with a system's file", sharded("../../etc/passwd"), SWEEP, LISTS),
    Case("an index with a pickle", sharded("x.bin"), ABLATE, LISTS),
    Case("an index with a folder's file", sharded("in/x.safetensors"), LATENCY, LISTS),
    Case("an index with another system's path", sharded("..\\x.safetensors"), EMERGENCE, LISTS),
    Case("an index with a hidden character", sharded("x\0.safetensors"), TRACE, LISTS),
    Case("an index with a line feed", sharded("x\n.safetensors"), STREAM, LISTS),
    Case("an index with a lone surrogate", sharded("x\ud800.safetensors"), TRACE, LISTS),
    Case("an index with a long name", sharded("x" * 300 + ".safetensors"), STREAM, LISTS),
    Case("an index with a number", sharded(7), TRACE, LISTS),
    Case("an index with null", sharded(None), STREAM, LISTS),
    Case("an index with a list", sharded(["a.safetensors"]), TRACE, NO_INDEX),
    Case("an index with nothing", sharded(index="{}"), TRACE, NO_INDEX),
    Case("an index with no files", sharded(index='{"weight_map": {}}'), STREAM, NO_INDEX),
    Case("an index that is a list", sharded(index="[]"), TRACE, NO_INDEX),
    Case("an index that is torn", sharded(index='{"weight_map": {"a'), STREAM, NO_INDEX),
    Case("an index that is nested deeply", sharded(index="[" * 100_000), TRACE, NO_INDEX),
    Case("an index with a long number", sharded(index='{"weight_map": ' + "7" * 5_000), STREAM, NO_INDEX),
    Case("an index that is no UTF-8", sharded(index=b'{"weight_map": {"\xff": "a.safetensors"}}'), TRACE, NO_INDEX),
    Case("an index that is a folder", instead(INDEX, Path.mkdir, sharded()), TRACE, NO_FILE),
    Case("an index that is a pipe", instead(INDEX, os.mkfifo, sharded()), STREAM, NO_FILE),
    Case("a shard that is not there", sharded("b.safetensors"), LATENCY, "'m' lacks 'b.safetensors'"),
    Case("a shard that is a folder", instead("b.safetensors", Path.mkdir, sharded("b.safetensors")), TRACE, NO_FILE),
    Case("a shard that is a pipe", instead("b.safetensors", os.mkfifo, sharded("b.safetensors")), STREAM, NO_FILE),
    Case("a shard from outside", instead("b.safetensors", outside, sharded("b.safetensors")), SWEEP, LEADS_OUT),
    Case("weights that are a folder", instead(WEIGHTS, Path.mkdir, configured()), TRACE, NO_FILE),
    Case("weights that are a pipe", instead(WEIGHTS, os.mkfifo, configured()), LATENCY, NO_FILE),
    Case("weights from outside", instead(WEIGHTS, outside, configured()), TRACE, LEADS_OUT),
    Case(
        "weights that never end",
        instead(WEIGHTS, lambda path: path.symlink_to("/dev/zero"), configured()),
        STREAM,
        LEADS_OUT,
    ),
    Case(
        "weights that lead nowhere",
        instead(WEIGHTS, lambda path: path.symlink_to("nothing"), configured()),
        TRACE,
        NO_FILE,
    ),
    Case(
        "weights that lead to themselves",
        instead(WEIGHTS, lambda path: path.symlink_to(WEIGHTS), configured()),
        STREAM,
        NO_FILE,
    ),
    Case("no weights but pickled ones", instead(WEIGHTS, pickled, configured()), TRACE, "pickled ones are not read"),
    Case(
        "no weights by a known name",
        instead(WEIGHTS, another_name, configured()),
        STREAM,
        r"neither model.safetensors nor .*\(model.fp16.safetensors\).*; rename that one to model.safetensors",
    ),
    Case("no weights at all", instead(WEIGHTS, nothing, configured()), LATENCY, "has no safetensors weights"),
    Case("weights that are empty", instead(WEIGHTS, Path.touch, configured()), STREAM, "'m' are corrupt .*too small"),
    Case(
        "weights that a configuration names",
        configured(transformers_weights="../../x.safetensors"),
        TRACE,
        "names '../../x.safetensors' as its weights",
    ),
    Case(
        "a tensor of another shape",
        weights(narrower=lambda of: of.update({FC: of[FC][:, :64].clone()})),
        STREAM,
        rf"holds '{FC}' with the shape \(24, 64\); its configuration asks for \(24, 96\)",
    ),
    Case(
        "a tensor of one number",
        weights(one=lambda of: of.update({"transformer.ln_f.weight": of["transformer.ln_f.weight"][:1].clone()})),
        TRACE,
        r"holds 'transformer.ln_f.weight' with the shape \(1,\); its configuration asks for \(24,\)",
    ),
    Case(
        "a tensor of whole numbers",
        weights(whole=lambda of: of.update({FC: of[FC].to(torch.int8)})),
        SWEEP,
        f"holds '{FC}' as I8; expected F64, F32, F16, BF16",
    ),
    Case(
        "a tensor of eight bits",
        weights(small=lambda of: of.update({FC: of[FC].to(torch.float8_e4m3fn)})),
        LATENCY,
        f"holds '{FC}' as F8_E4M3; expected F64",
    ),
    Case("a tensor that is missing", weights(gone=lambda of: of.pop(FC)), STREAM, rf"lacks 1 tensors \({FC}\)"),
    Case(
        "a tensor by two names",
        weights(twice=lambda of: of.update({FC.removeprefix("transformer."): of[FC] + 1})),
        STREAM,
        f"holds a tensor twice: 'h.1.mlp.c_fc.weight' in '{WEIGHTS}' and '{FC}' in",
    ),
]

# ---- what a configuration asks for ---------------------------------------------------------------------------------

CONFIGURATIONS: list[Case] = [
    Case("a model of no known kind", configured(model_type="gpt9"), f"trace m {SMALL}", "cannot load 'm': .*gpt9"),
]

# ---- text ----------------------------------------------------------------------------------------------------------

TEXTS: list[Case] = []

# ---- disks and results ---------------------------------------------------------------------------------------------

RESULTS: list[Case] = []

# ---- options and environment ---------------------------------------------------------------------------------------

OPTIONS: list[Case] = [
    Case("no such command's model", nothing, f"trace nowhere/at/all {SMALL}", "model folder 'nowhere/at/all'"),
]

CASES = [*MODEL_FILES, *CONFIGURATIONS, *TEXTS, *RESULTS, *OPTIONS]


@pytest.fixture(autouse=True)
def _no_hang():
    def hung(*_):
        raise TimeoutError(f"no answer after {SECONDS} s")

    usual = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, usual)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_one_line(monkeypatch, capsys, tmp_path, case):
    monkeypatch.chdir(tmp_path)
    case.make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    command, *arguments = case.typed.split()
    code, out, err = call(monkeypatch, capsys, *arguments, command=command)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert re.search(case.answer, err), err
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
