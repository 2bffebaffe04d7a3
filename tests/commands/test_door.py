"""Mistakes that a user, a file or a machine makes: what is there and what is typed. What is answered is in a file.

Each is run as a command in a folder of its own; it must end soon with exit code 2 and one line, and leave nothing
behind. The whole answers are in a file: `pytest tests/commands/test_door.py --keep-views` writes it anew, to be read as
a diff. To add a mistake of what is typed alone, add `$` and the command to the file, with a line for its answer and an
empty one; to add any other, add a line to the table of its kind.
"""

import gzip
import itertools
import json
import os
import re
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.numpy import load_file

import outliers
from outliers.app import commands, entry_of
from outliers.config.files import make_experiment, read_experiment
from outliers.errors import UserError
from outliers.models.names import POCKET
from outliers.models.weight_files import INDEX, WEIGHTS
from tests.conftest import ROOT, answer_within
from tests.typed import call, refused

SECONDS = 30  # for any answer; it takes a fraction of one, but the first of a process imports what it needs
SMALL = "--block 32 --blocks 1"


class Case(NamedTuple):
    """A mistake: its name in the file of answers, how it is made in an empty folder, and what is typed there."""

    what: str
    make: Callable[[Path], None]
    typed: str


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


def sharded(*shards: object, index: str | None = None) -> Callable[[Path], None]:
    """The small model with its weights in `a.safetensors`, and an index that lists these beside it, or says this."""

    def make(folder: Path) -> None:
        configured()(folder)
        weights = (folder / "m" / "model.safetensors").rename(folder / "m" / "a.safetensors")
        listed = dict.fromkeys(load_file(weights), weights.name)
        listed |= {f"more.{number}": shard for number, shard in enumerate(shards)}
        said = json.dumps({"metadata": {}, "weight_map": listed}) if index is None else index
        (folder / "m" / INDEX).write_text(said)

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


# Commands that read a model, each in its own way.
READERS = itertools.cycle(
    [
        *(f"{typed} {SMALL}" for typed in ("trace m", "trace m --stream", "ablate m --features 1 --stream")),
        "latency m --scheme llm.int8 --prompt 8 --tokens 2 --batch 1",
    ]
)
# What no index may list as a file of weights.
SHARDS = ("../outside.safetensors", "x.bin", 7, "..\\x.safetensors", "x\0.safetensors", f"{'x' * 300}.safetensors")
# What is no index.
INDICES = ("{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", '{"weight_map": {"a', "[" * 100_000)


def to(target: str) -> Callable[[Path], None]:
    """A symbolic link."""
    return lambda path: path.symlink_to(target)


def shortened(content: object) -> str:
    """What a name shows of a file's content, the same in every process."""
    text = getattr(content, "__qualname__", repr(content))
    return text if len(text) <= 60 else f"{text[:36]}…{text[-23:]}"


def changed(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """The small model, whose tensors were changed."""

    def make(folder: Path) -> None:
        from tests.small_models import alter_weights

        configured()(folder)
        alter_weights(folder / "m", change)

    return make


def replaced(name: str, like: Callable) -> Callable[[Path], None]:
    """The small model, of which a tensor is another one."""
    return changed(lambda tensors: tensors.update({name: like(tensors[name]).clone()}))


SHARD = "b.safetensors"
NORM = "transformer.ln_f.weight"
FILES = {  # of a model
    "an index that is a pipe": instead(INDEX, os.mkfifo, sharded()),
    "a shard that is not there": sharded(SHARD),
    "a shard that is a pipe": instead(SHARD, os.mkfifo, sharded(SHARD)),
    "a shard from outside": instead(SHARD, outside, sharded(SHARD)),
    "weights that are a pipe": instead(WEIGHTS, os.mkfifo, configured()),
    "weights from outside": instead(WEIGHTS, outside, configured()),
    "weights that lead nowhere": instead(WEIGHTS, to("nothing"), configured()),
    "no weights but pickled ones": instead(WEIGHTS, pickled, configured()),
    "no weights by a known name": instead(WEIGHTS, another_name, configured()),
    "no weights at all": instead(WEIGHTS, nothing, configured()),
    "weights that are empty": instead(WEIGHTS, Path.touch, configured()),
    "weights outside by name": configured(transformers_weights="../../x"),
    "a narrower tensor": replaced(FC, lambda old: old[:, :64]),
    "a tensor of whole numbers": replaced(FC, lambda old: old.char()),
    "a tensor of nan": replaced(NORM, lambda old: old * float("nan")),
    "a tensor that is missing": changed(lambda tensors: tensors.pop(FC)),
    "a tensor by two names": changed(
        lambda tensors: tensors.update({FC.removeprefix("transformer."): tensors[FC] + 1})
    ),
}
MODEL_FILES = [
    *(Case(f"an index with {shortened(shard)}", sharded(shard), next(READERS)) for shard in SHARDS),
    *(Case(f"an index of {shortened(text)}", sharded(index=text), next(READERS)) for text in INDICES),
    *(Case(what, make, next(READERS)) for what, make in FILES.items()),
]

# ---- what a configuration asks for ---------------------------------------------------------------------------------


def written(content: bytes, name: str = "config.json") -> Callable[[Path], None]:
    """A small model in the folder `m`, with a file of this content."""
    return instead(name, lambda path: path.write_bytes(content), configured())


def asks_for(**fields: object) -> Case:
    """A configuration with other fields."""
    return Case(f"a configuration of {shortened(fields)}", configured(**fields), f"trace m {SMALL}")


def stored_by(method: str | None) -> Case:
    """Weights that a library has quantized, installed or not, as their configuration says."""
    asked = configured(quantization_config={"quant_method": method, "bits": 4})
    return Case(f"weights of {method}", asked, f"trace m {SMALL}")


LLAMA = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4}
SEVEN_B = {"n_embd": 8192, "n_layer": 32, "n_head": 64, "n_inner": 32768}  # billion weights, which the files lack
SEVEN_B_CLIP = {"hidden_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 64, "intermediate_size": 32768}
SEVEN_B_CLIP = {"model_type": "clip", "vision_config": SEVEN_B_CLIP}


def with_dropout(path: Path) -> None:
    """A tokenizer that cuts words at random."""
    path.write_bytes((POCKET / "gpt2-0.1m" / path.name).read_bytes().replace(b'"dropout": null', b'"dropout": 0.5'))


FAST = b'{"tokenizer_class": "PreTrainedTokenizerFast"}'
CONFIGURATIONS = [
    *(asks_for(model_type=kind) for kind in ("gpt9", "siglip2")),
    Case("GPT-2 of 7 billion weights", configured(**SEVEN_B), f"trace m {SMALL}"),
    Case("CLIP of 7 billion weights", configured(**SEVEN_B_CLIP), f"trace m --stream {SMALL}"),
    *(asks_for(n_embd=value) for value in (10**9, 0, "64")),
    *(asks_for(n_layer=value) for value in (0, 10**9)),
    *(asks_for(n_head=value) for value in (0, 5, 10**6)),
    asks_for(num_hidden_layers=10**9),
    asks_for(n_positions=10**8),
    asks_for(max_position_embeddings=-1),
    asks_for(vocab_size=10**12),
    asks_for(n_inner=-1),
    asks_for(num_labels=10**9),
    asks_for(activation_function="gelu9"),
    asks_for(dtype="float9"),
    asks_for(pad_token_id=10**6),
    asks_for(eos_token_id="2"),
    *(asks_for(layer_norm_epsilon=value) for value in (float("nan"), -1e-5)),
    asks_for(resid_pdrop=7),
    asks_for(rope_scaling={"rope_type": "spiral", "factor": 2.0}, **LLAMA),
    asks_for(attention_types=[[["global"], 10**9]], model_type="gpt_neo", num_layers=2),
    asks_for(layer_types=["full_attention"] * 3),
    asks_for(text_config={"hidden_size": 10**9}),
    asks_for(num_key_value_heads=3, model_type="llama", num_attention_heads=4),
    asks_for(num_kv_heads=0, model_type="falcon"),
    asks_for(num_experts_per_tok=5, model_type="mixtral", num_local_experts=4),
    asks_for(num_local_experts=10**6, model_type="mixtral"),
    *(asks_for(sliding_window=value, model_type="mistral") for value in (-1, 0)),
    asks_for(encoder_layers=10**9, model_type="bart"),
    asks_for(d_model=10**8, model_type="xglm"),
    *(stored_by(one) for one in ("eetq", None, "gptq", "awq", "bitsandbytes", "fp8", "hqq")),
    Case("a report without a configuration", instead("config.json", nothing, configured()), "report m"),
    *(
        Case(f"the configuration {shortened(content)}", written(content), f"trace m {SMALL}")
        for content in (
            b'{"model_type": "llama"}',
            b'{"n_embd": 64}',
            b"[]",
            b'{"a": "\xff"}',
            b'{"n_embd": 1, "n_embd": 2}',
        )
    ),
    Case("a configuration that nests", written(b"[" * 200_000), f"trace m {SMALL}"),
    Case("a configuration of 5 MB", written(b" " * (5 << 20)), f"trace m {SMALL}"),
    Case("a configuration that is a pipe", instead("config.json", os.mkfifo, configured()), f"trace m {SMALL}"),
    Case("random words", instead("tokenizer.json", with_dropout, configured()), f"trace m {SMALL}"),
    Case("no first token", written(FAST, "tokenizer_config.json"), f"trace m {SMALL} --bos"),
    Case("no tokenizer", instead("tokenizer.json", nothing, configured()), f"trace m {SMALL}"),
    Case("memory of a billion layers", configured(n_layer=10**9), "memory m"),
    *(
        Case(f"the tokenizer {shortened(content)}", written(content, "tokenizer.json"), f"trace m {SMALL}")
        for content in (b"", b"[" * 100_000, b"[]")
    ),
]

# ---- text ----------------------------------------------------------------------------------------------------------

DOCUMENT = json.dumps({"text": "One document of this text."}).encode() + b"\n"


def text(what: str, name: str, content: bytes | Callable[[Path], None], end: int | None = None) -> Case:
    """A file of that name in which something is wrong, or what is made there, cut at its end."""

    def make(folder: Path) -> None:
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content[:end])

    return Case(what, make, f"trace pocket/gpt2-0.1m {SMALL} --text {name}")


GIGABYTE = gzip.compress(bytes(2**20), 1) * 1000  # a gigabyte, in members that follow each other

TEXTS = [
    text("half a surrogate", "a.jsonl", DOCUMENT + rb'{"text": "\ud800"}'),
    text("its other half", "a.jsonl", rb'{"text": "x\udfffx"}'),
    text("Latin-1", "a.txt", b"one\r\n\r\ncaf\xe9"),
    text("a byte order mark", "a.txt", b"\xef\xbb\xbfwords"),
    text("deep lists", "a.jsonl", DOCUMENT + b'{"x": ' + b"[" * 10**5),
    text("a number without end", "a.jsonl", DOCUMENT + b'{"x": ' + b"1" * 5000 + b"}"),
    text("a number for a text", "a.jsonl", DOCUMENT + b'{"text": 3}'),
    text("no text", "a.jsonl", DOCUMENT + b'{"content": "x"}'),
    text("a list for a row", "a.jsonl", b'["text"]'),
    text("a torn row", "a.jsonl", DOCUMENT + DOCUMENT, -10),
    text("a blank line in the middle", "a.jsonl", DOCUMENT + b"\n" + DOCUMENT),
    text("blank lines without end", "a.jsonl.gz", gzip.compress(b"\n" * 10**6) * 1000),
    text("blank lines alone", "a.jsonl", b"\n \n"),
    text("a gigabyte of zeros", "a.txt.gz", GIGABYTE),
    text("a torn gzip of rows", "a.jsonl.gz", gzip.compress(DOCUMENT), -9),
    text("a wrong checksum", "a.txt.gz", gzip.compress(b"words")[:-8] + bytes(8)),
    text("damage in a gzip", "a.txt.gz", gzip.compress(b"words")[:10] + b"\xff" * 9),
    text("a pipe", "a.txt", os.mkfifo),
    text("a file of /proc", "a.txt", to("/proc/self/mem")),
    text("another ending", "a.json", DOCUMENT),
]

# ---- disks and results ---------------------------------------------------------------------------------------------

SWEEP = f"sweep --model pocket/gpt2-0.1m --scheme fp32 {SMALL} --out out"
TRACE = f"trace pocket/gpt2-0.1m {SMALL} --out out"
REDRAW = "report pocket/table1 --redraw --out out"
SUBJECT = {"model": "m", "text": "sample", "block": 32, "blocks": 1, "dtype": "float32"}
ROW = {
    "request": {"metric": {"name": "perplexity"}, "subject": SUBJECT, "variant": "fp32"},
    "provenance": {"architecture": "gpt2", "parameters": 9, "scheme": "fp32"},
    "values": [{"metric": "perplexity", "value": 7.5}],
    "run": {"experiment": "sweep"},
}


def with_fields(part: str, **fields) -> dict:
    """That row with other fields in a part of it."""
    before = ROW["values"][0] if part == "values" else ROW["request"][part] if part in ROW["request"] else ROW[part]
    after = before | fields
    if part in ROW["request"]:
        return {**ROW, "request": {**ROW["request"], part: after}}
    return {**ROW, part: [after] if part == "values" else after}


def rows(*lines: str | bytes | dict) -> Callable[[Path], None]:
    """A file of rows in the folder `out`, the first of which is a good one."""

    def as_line(line: str | bytes | dict) -> bytes:
        text = json.dumps(line) if isinstance(line, dict) else line
        return text if isinstance(text, bytes) else text.encode()

    def make(folder: Path) -> None:
        (folder / "out").mkdir()
        (folder / "out" / "rows.jsonl").write_bytes(b"".join(as_line(line) + b"\n" for line in (ROW, *lines)))

    return make


def instead_of(name: str, kind: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else than a file in the folder `out`."""

    def make(folder: Path) -> None:
        (folder / "out").mkdir()
        (folder / "outside").write_text("of another")
        kind(folder / "out" / name)

    return make


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


def traced(folder: Path) -> None:
    """A trace of another model in the folder `out`."""
    rows(with_fields("subject", model="other/gpt2-0.1m") | {"run": {"experiment": "trace"}})(folder)


ZEROS = b"\0" * 4096  # as a system leaves where it lost power
LINES = [  # that are no row
    '{"request": {"metric',
    "[]",
    b'{"request": "\xff"}',
    ZEROS,
    "[" * 100_000,
    {"metric": "perplexity", "value": 7.5},  # of an older version
    '{"request": "\\ud800"}',
    json.dumps(ROW).replace("7.5", "7" * 5000),
    json.dumps(ROW).replace('"m"', '"é"').encode("latin-1"),
]
FIELDS = [  # of parts of a row, that no row may hold
    ("run", {"new": [[1]]}),
    *(("values", {"value": value}) for value in (float("nan"), "7.5", True, 0, 2**63)),
    ("values", {"metric": "damage.perplexity_only", "value": -1.0}),
    ("values", {"layer": -1}),
    *(("provenance", {"parameters": value}) for value in (2**63, 0, 0.5)),
    ("subject", {"model": 3}),
    ("subject", {"seed": float("inf")}),
    ("metric", {"alpha": float("nan")}),
    ("provenance", {"new": {"a": 1}}),
    ("provenance", {"features": ["3"]}),
]
DAMAGED = {f"a line {shortened(line)}": line for line in LINES}
DAMAGED |= {"a row with more parts": {**ROW, "more": {}}, "a row without values": {**ROW, "values": []}}
DAMAGED |= {f"a row with {fields} in {part}": with_fields(part, **fields) for part, fields in FIELDS}
IN_THE_WAY = [  # of a file: what it is, how it is made
    ("a folder", Path.mkdir),
    ("a pipe", os.mkfifo),
    ("a socket", a_socket),
    ("a link", to("../outside")),
    ("a link that leads nowhere", to("nowhere/at/all")),
    ("another name of a file elsewhere", lambda path: path.hardlink_to(path.parent.parent / "outside")),
]
LONG = "o" * 300
RESULTS = [
    *(
        Case(what, rows(line, ROW), typed)
        for (what, line), typed in zip(DAMAGED.items(), itertools.cycle((SWEEP, REDRAW)))
    ),
    *(Case(f"a last line {shortened(line)}", rows(line), SWEEP) for line in LINES if line != ZEROS),
    Case("several damaged lines", rows("{", ROW, "[]"), SWEEP),
    Case("a damaged line to trace", rows("{", ROW), TRACE),
    Case("nothing to draw again", rows(with_fields("subject", block=33)), REDRAW),
    *(
        Case(f"{what} as {name}, {typed}", instead_of(name, kind), typed)
        for name, commands, kinds in (
            ("rows.jsonl", (SWEEP, TRACE, REDRAW), IN_THE_WAY[:2]),
            ("rows.jsonl", (SWEEP,), [IN_THE_WAY[2], ("a device", to("/dev/zero"))]),
            (".lock", (SWEEP, TRACE), IN_THE_WAY),
            ("trace.safetensors", (TRACE,), IN_THE_WAY[:2]),
        )
        for typed in commands
        for what, kind in kinds
    ),
    Case("a trace of another model", traced, TRACE),
    Case("a file as the folder", lambda folder: (folder / "out").touch(), SWEEP),
    Case("a pipe as the folder", lambda folder: os.mkfifo(folder / "out"), TRACE),
    *(
        Case(f"a long name of the folder, {typed}", nothing, typed.replace("--out out", f"--out {LONG}"))
        for typed in (SWEEP, REDRAW)
    ),
]

# ---- options and environment ---------------------------------------------------------------------------------------

POCKET_MODEL = "pocket/gpt2-0.1m"
DEEP = 600  # brackets, one in the other


def fields(**values: str) -> str:
    """An experiment file with a model and some fields, each as YAML has it."""
    return "".join(f"{name}: {value}\n" for name, value in {"models": f"[{POCKET_MODEL}]", **values}.items())


def file(content: str | bytes | Callable[[Path], None], name: str = "e.yaml") -> Callable[[Path], None]:
    """An experiment file of this content, or what else is made in its place."""
    text = content.encode() if isinstance(content, str) else content
    return lambda folder: text(folder / name) if callable(text) else (folder / name).write_bytes(text) and None


def both(*makers: Callable[[Path], None]) -> Callable[[Path], None]:
    """Several things."""
    return lambda folder: [make(folder) for make in makers] and None


VALUES = [  # of a field that cannot have them
    ("name", "../up"),
    ("name", "''"),
    ("models", "[]"),
    ("models", '["a\\0b"]'),
    ("block", "true"),
    ("name", "é" * 200),
    ("name", "2024-01-01"),
    ("models", "[no]"),
    ("block", ".nan"),
    ("block", f"0x{'f' * 5000}"),
    ("memory", "1e300"),
]
# A file of few bytes with 9**12 values.
BOMB = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]" for n in range(1, 13))])
TAGS = ("!!bool maybe", "!!timestamp x", "!!binary '…'", "!!set {a}", "2024-13-45")
YAML = [  # what an experiment file holds
    *(fields(**{field: value}) for field, value in VALUES),
    *(fields(block=tag) for tag in TAGS),
    fields(extends="."),
    fields(extends="[a]"),
    fields(extends="e.yaml"),
    os.mkfifo,
    "#" * 1_100_000,
    BOMB,
    "models: &a [*a]",
    "[" * DEEP,
    "models:\n\t- a\n",
    fields(hardware="{a: 1, a: 2}"),
    "? [a]\n: 1\n",
    "",
    "1: 2",
    "models:\n  - a\n  - [b]\n",
    "text: c4\nblock: 8\n",
    fields(block="!!python/object/apply:os.system ['touch here']"),
    b"models: [\xff\xfe]",
    "a: 1\n---\nb: 2\n",
]
SHOWN = [  # of an experiment file of a report
    "models: [a]\nshows: tabel1\n",
    "shows: table3\nmodels: [a]\nhardware:\n  - {hardware: A, gpus: 0, gigabytes: 1}",
    "shows: figure1\nmodels: [a]\nblock: 3\n",
    "shows: table5\ndimensions: [0x0]",
    "shows: table5\ndimensions: [9999999]",
]
TRAINED = [  # of one of training runs
    "runs: {a: {start: bert-1.4m}}",
    "runs:\n  a:\n    epochs: 3\n",
    "shows: table1\nruns: {a: {}}",
]
RING = [file(fields(extends=f"{one}.yaml")) for one in "fp"]
BASE = file("models: [a]\nalpha: -1\n", "b.yaml")
EXTENDING = [both(BASE, file(f"extends: b.yaml\nblocks: {blocks}")) for blocks in (0, 3)]
OPTIONS = [
    *(
        Case(f"{command} of a file {shortened(content)}", file(content), f"{command} e.yaml")
        for command, contents in (("sweep", YAML), ("report", SHOWN), ("training", TRAINED))
        for content in contents
    ),
    Case("a ring of files", both(RING[0], file("extends: ./e.yaml", "f.yaml")), "sweep e.yaml"),
    Case("one that extends a pipe", both(RING[1], file(os.mkfifo, "p.yaml")), "sweep e.yaml"),
    Case("a mistake that extends", EXTENDING[0], "sweep e.yaml"),
    Case("a mistake that is extended", EXTENDING[1], "sweep e.yaml"),
]

# ---- what is typed where nothing is --------------------------------------------------------------------------------

# Too long for the file of answers, or different on each machine; it holds all others.
TYPED = {
    "a file for a model": f"trace {__file__}",
    "a file of a model": f"trace {POCKET / 'gpt2-0.1m' / 'config.json'}",
    "hardware of many digits": f"memory {POCKET_MODEL} --gpu {'9' * 5000}x24",
    "memory of many digits": f"sweep {POCKET_MODEL} --stream --memory {'9' * 5000}",
    "features of many digits": f"ablate {POCKET_MODEL} --features {'9' * 5000}",
    "a long path of text": f"sweep {POCKET_MODEL} --text {'t/' * 3000}x.txt",
    "an escape": f"sweep {POCKET_MODEL} --out 'a\x1b[31mb'",
}
CASES = [*MODEL_FILES, *CONFIGURATIONS, *TEXTS, *RESULTS, *OPTIONS]
CASES += [Case(what, nothing, typed) for what, typed in TYPED.items()]
ANSWERS = ROOT / "tests/commands/answers.txt"


def answers() -> dict[str, str]:
    """The answer of each mistake, by its name or by `$` and what is typed."""
    lines = ANSWERS.read_text(encoding="utf-8").splitlines()
    return dict(zip(lines[::3], lines[1::3], strict=True))


CASES += [Case(name, nothing, name.removeprefix("$ ")) for name in answers() if name.startswith("$ ")]


@pytest.fixture(autouse=True)
def _no_hang():
    with answer_within(SECONDS):
        yield


def contents(folder: Path) -> dict:
    """What is in a folder, and when each file was written."""
    return {path: path.is_dir() or path.lstat().st_mtime_ns for path in folder.rglob("*")}


# Cases that show as weights are read, once there is a folder of results.
OF_WEIGHTS = {
    *("weights that are empty", "weights outside by name", "a narrower tensor", "a tensor of whole numbers"),
    *("a tensor of nan", "a tensor that is missing", "a tensor by two names", "weights of gptq"),
    *("weights of awq", "weights of bitsandbytes", "weights of fp8", "weights of hqq"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what[:80])
def test_one_line(monkeypatch, constants, capsys, tmp_path, request, case):
    monkeypatch.chdir(tmp_path)
    constants("outliers.models.names", CACHE=tmp_path / "cache")  # without SmolLM2, wherever it is
    case.make(tmp_path)
    before = contents(tmp_path)
    command, *arguments = shlex.split(case.typed)
    said = refused(monkeypatch, capsys, *arguments, command=command).rstrip("\n").replace(f"{ROOT}/", "")
    if request.config.getoption("keep_views"):
        kept = answers() | {case.what: said}
        lines = [f"{one.what}\n{kept[one.what]}\n\n" for one in CASES if one.what in kept]
        ANSWERS.write_text("".join(lines), encoding="utf-8")
    assert said == answers()[case.what]
    assert case.what in OF_WEIGHTS or contents(tmp_path) == before, "something was left behind, or written anew"


def test_each_mistake_has_one_answer():
    assert sorted(answers()) == sorted(case.what for case in CASES)


# ---- every field of every experiment -------------------------------------------------------------------------------

KINDS = {name: kind for name in commands() if isinstance(kind := entry_of(name).runs, type)}
BEYOND = {"gt": 0, "exclusiveMinimum": 0, "ge": -1, "minimum": -1, "le": 1, "maximum": 1, "exclusiveMaximum": 0}
ODD = [None, True, -1, 1e300, float("nan"), "", "x", [], [[]], {}, {"a": 1}, [b"x"]]
OF_PYDANTIC = r"Input should|Field required|valid (string|integer|number|list|dictionary)|not permitted|another value"


def beyond(schema: dict) -> list:
    """Values that a field of this JSON schema cannot have: beyond its bounds, of no choice, of another type."""
    kinds = schema.get("anyOf", [schema])
    bounds = [kind[bound] + further for kind in kinds for bound, further in BEYOND.items() if bound in kind]
    choices = ["none of them" for kind in kinds if "enum" in kind]
    entries = [[value] for kind in kinds if "items" in kind for value in beyond(kind["items"])]
    is_mapping = any(kind.get("type") == "object" or "$ref" in kind for kind in kinds)
    return [*bounds, *choices, *entries, 7 if is_mapping else {"a": 1}]


BY_MODEL = {"features", "controls", "seed"}  # which `ablate` checks itself, as metrics those of `measure`
LEAST, MOST = {"gt", "ge", "minimum", "exclusiveMinimum"}, {"le", "maximum", "exclusiveMaximum"}


def is_bounded(schema: dict) -> bool:
    """Whether whole numbers of a field have a least and a most, beyond which a run would never end."""
    kinds = schema.get("anyOf", [schema])
    numbers = [kind.keys() for kind in kinds if kind.get("type") == "integer"]
    entries = [kind["items"] for kind in kinds if "items" in kind]
    return all(LEAST & bounds and MOST & bounds for bounds in numbers) and all(map(is_bounded, entries))


@pytest.mark.parametrize("command", KINDS)
def test_a_field_is_named_whose_value_cannot_be(command):
    """With the exit code of a mistake, and never in the words of pydantic."""
    kind = KINDS[command]
    others = {"model": "m", "models": ["m"], "runs": {"a": {}}}
    others = {field: value for field, value in others.items() if field in kind.model_fields}
    for field, schema in kind.model_json_schema()["properties"].items():
        assert field in BY_MODEL or command == "measure" or is_bounded(schema), f"{field} has no least or no most"
        for value in beyond(schema):
            with pytest.raises(UserError) as refused:
                kind(**others | {field: value})
            found = refused.value
            assert (found.code, found.field.partition(".")[0]) == (2, field), value
            assert f"'{field}" in str(found)
        for value in ODD:
            try:
                kind(**others | {field: value})
            except UserError as error:
                assert not re.search(OF_PYDANTIC, str(error)), (field, value)


def test_an_error_of_a_file_names_its_field(tmp_path):
    (tmp_path / "e.yaml").write_text("models: [a]\nschemes: [fp32, 7]\n")
    with pytest.raises(UserError, match="line 2, ") as refused:
        make_experiment(read_experiment(str(tmp_path / "e.yaml")), KINDS["sweep"])
    assert refused.value.field == "schemes.1"


ALL = "--memory 4GB --calibration-blocks 2 --skip ffn_out --alpha 5"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"sweep --model {POCKET_MODEL} {ALL} --scheme fp32", {"memory", "calibration-blocks", "skip", "alpha"}),
        (f"sweep --model {POCKET_MODEL} {ALL} --scheme llm.int8+smoothing=0.5 --stream", set()),
        (f"trace {POCKET_MODEL} --alpha 5", set()),
        (f"origins {POCKET_MODEL} --by weights --places q --neurons 3", {"places", "neurons"}),
    ],
)
def test_options_without_effect(monkeypatch, capsys, tmp_path, line, said):
    monkeypatch.chdir(tmp_path)
    command, *arguments = shlex.split(line)
    code, _, err = call(monkeypatch, capsys, *arguments, "--block", 32, "--blocks", 1, command=command)
    assert (code, {*re.findall("--(.+) has no effect without", err)}) == (0, said)


@pytest.mark.parametrize("share", [25, "x", -0.1, True])
def test_shares_of_a_criterion(share):
    import torch

    model = outliers.load_model(POCKET_MODEL)
    trace = outliers.trace(model, torch.arange(32)[None], attention=False)
    assert trace.outlier_features(layers="25%").equals(trace.outlier_features())
    with pytest.raises(outliers.UserError, match="expected a share"):
        trace.outlier_features(layers=share)
