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

from outliers.models.names import POCKET
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

MODEL_FILES: list[Case] = []

# ---- what a configuration asks for ---------------------------------------------------------------------------------


def written(content: bytes, name: str = "config.json") -> Callable[[Path], None]:
    """A small model in the folder `m`, with a file of this content."""

    def make(folder: Path) -> None:
        file = shutil.copytree(POCKET / "gpt2-0.1m", folder / "m") / name
        file.unlink(missing_ok=True)
        file.write_bytes(content)

    return make


def piped(folder: Path) -> None:
    """A small model whose configuration is a pipe that nobody writes into."""
    file = shutil.copytree(POCKET / "gpt2-0.1m", folder / "m") / "config.json"
    file.unlink()
    os.mkfifo(file)


def asks_for(field: str, value, answer: str = "", what: str = "trace m", **others) -> Case:
    """A configuration that has this value of a field; the answer names the field."""
    shown = f"{what}, {field} {json.dumps(value)}"[:80]
    return Case(shown, configured(**{field: value}, **others), f"{what} {SMALL}", f"{field}.*{answer}")


def stored_by(method) -> Case:
    """Weights that a library has quantized, installed or not."""
    asked = configured(quantization_config={"quant_method": method, "bits": 4})
    return Case(f"weights of {method}", asked, f"trace m {SMALL}", f"stored quantized by '{method}'; expected 16 or 32")


CONFIGURATIONS: list[Case] = [
    Case("a model of no known kind", configured(model_type="gpt9"), f"trace m {SMALL}", "cannot load 'm': .*gpt9"),
    *(asks_for("n_embd", value, "expected a whole number from 1") for value in (10**9, "64", 0, -64, 1.5, None, True)),
    *(asks_for("n_layer", value, "expected a whole number from 1") for value in (0, 10**5, 10**9, None, [2])),
    *(asks_for("n_head", value, "expected") for value in (0, 5, -4, 10**6)),
    asks_for("n_layer", 10**9, what="sweep --model m"),
    asks_for("n_layer", 10**9, what="ablate m"),
    asks_for("n_layer", 10**9, what="emergence --model m"),
    asks_for("n_layer", 10**9, what="trace m --stream"),
    asks_for("num_hidden_layers", 10**9, "from 1 to 512"),
    asks_for("n_positions", -1, "expected a whole number"),
    asks_for("n_positions", 10**8, "expected a whole number"),
    asks_for("max_position_embeddings", -1, "expected a whole number"),
    asks_for("vocab_size", 10**12, "expected a whole number"),
    asks_for("n_inner", -1, "expected a whole number"),
    asks_for("num_labels", 10**9, "expected a whole number"),
    asks_for("activation_function", "gelu9", "expected one of gelu, "),
    asks_for("dtype", "float9", "expected one of bfloat16, "),
    asks_for("torch_dtype", "nn", "expected one of bfloat16, "),
    asks_for("pad_token_id", 10**6, "in the vocabulary of 4096"),
    asks_for("eos_token_id", "2", "the id of a token"),
    asks_for("layer_norm_epsilon", float("nan"), "from 0 to 1"),
    asks_for("layer_norm_epsilon", -1e-5, "from 0 to 1"),
    asks_for("resid_pdrop", 7, "from 0 to 1"),
    asks_for("tie_word_embeddings", "yes", "true or false"),
    asks_for("rope_parameters", {"rope_type": "spiral"}, "rotary"),
    asks_for("rope_scaling", {"type": "linear", "factor": 0}, "rotary"),
    asks_for("attention_types", [[["global"], 10**9]], "2 layers", model_type="gpt_neo", num_layers=2),
    asks_for("layer_types", ["full_attention"] * 3, "2 entries"),
    asks_for("attn_implementation", "kernels-community/flash-attn", "expected one of eager, "),
    asks_for("_attn_implementation", "paged|kernels-community/flash-attn", "expected one of eager, "),
    asks_for("experts_implementation", "sonicmoe", "expected one of batched_mm, "),
    asks_for("text_config", {"hidden_size": 10**9}, "hidden_size 1000000000"),
    *map(stored_by, ("gptq", "awq", "bitsandbytes", "fp8", "torchao", "nobody", None)),
    Case("no size at all", written(b'{"model_type": "llama"}'), f"trace m {SMALL}", "at least 2.0 GB of weights"),
    Case("no architecture", written(b'{"n_embd": 64}'), f"trace m {SMALL}", "no 'model_type'"),
    Case("a list", written(b"[]"), f"trace m {SMALL}", "holds no JSON object"),
    Case("deep nesting", written(b"[" * 200_000), f"trace m {SMALL}", "nested too deeply"),
    Case("many digits", written(b'{"n_embd": ' + b"9" * 5000 + b"}"), f"trace m {SMALL}", "no JSON that can be read"),
    Case("no UTF-8", written(b'{"a": "\xff"}'), f"trace m {SMALL}", "no JSON that can be read"),
    Case("a value twice", written(b'{"n_embd": 1, "n_embd": 2}'), f"trace m {SMALL}", "two values of 'n_embd'"),
    Case("5 MB", written(b" " * (5 << 20)), f"trace m {SMALL}", "larger than 4 MB"),
    Case("a pipe", piped, f"trace m {SMALL}", "no config.json that can be read"),
    Case("memory of it", configured(n_layer=10**9), "memory m", "n_layer 1000000000"),
    Case("latency of it", configured(n_embd="64"), "latency m", 'n_embd "64"'),
    *(
        Case(f"{name} is {content!r}", written(content, name), f"trace m {SMALL}", "cannot load the tokenizer of 'm'")
        for name in ("tokenizer.json", "tokenizer_config.json")
        for content in (b"", b"[]", b"null", b"[" * 100_000, b"\xff")
    ),
    Case(
        "a length that is no number",
        written(b'{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": "x"}', "tokenizer_config.json"),
        f"trace m {SMALL}",
        "cannot load the tokenizer of 'm'",
    ),
    Case("generation.json", written(b"[1]", "generation_config.json"), f"trace m {SMALL}", "cannot load 'm'"),
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
