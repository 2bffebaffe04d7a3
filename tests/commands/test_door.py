"""Mistakes that a user, a file or a machine makes, each in a line: what is there, what is typed, what the answer says.

To add a case, add a line to the table of its kind. Each is run as a command in a folder of its own; it must end
soon with exit code 2 and one line, and leave nothing behind.
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
from tests.conftest import answer_within
from tests.typed import call, refused

SECONDS = 30  # for any answer; it takes a fraction of one, but the first of a process imports what it needs
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


NO_INDEX = "is not an index of weight files; expected JSON with a 'weight_map'"
NO_FILE = "is not a regular file"
LEADS_OUT = "is a link that leads out of its folder"
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


def _of_file(content: str | bytes | Callable) -> str:
    """The name of a case, the same in every process."""
    return f"a file {getattr(content, '__qualname__', repr(content)):.60}"


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
FILES = {  # of a model, and what is said of them
    "an index that is a pipe": (instead(INDEX, os.mkfifo, sharded()), NO_FILE),
    "a shard that is not there": (sharded(SHARD), "'m' lacks 'b.safetensors'"),
    "a shard that is a pipe": (instead(SHARD, os.mkfifo, sharded(SHARD)), NO_FILE),
    "a shard from outside": (instead(SHARD, outside, sharded(SHARD)), LEADS_OUT),
    "weights that are a pipe": (instead(WEIGHTS, os.mkfifo, configured()), NO_FILE),
    "weights from outside": (instead(WEIGHTS, outside, configured()), LEADS_OUT),
    "weights that lead nowhere": (instead(WEIGHTS, to("nothing"), configured()), NO_FILE),
    "no weights but pickled ones": (instead(WEIGHTS, pickled, configured()), "pickled ones are not read"),
    "no weights by a known name": (instead(WEIGHTS, another_name, configured()), "; rename that one to model.saf"),
    "no weights at all": (instead(WEIGHTS, nothing, configured()), "has no safetensors weights"),
    "weights that are empty": (instead(WEIGHTS, Path.touch, configured()), "'m' are corrupt .*too small"),
    "weights outside by name": (configured(transformers_weights="../../x"), "names '../../x' as its weights"),
    "a narrower tensor": (replaced(FC, lambda old: old[:, :64]), rf"'{FC}' .*\(24, 64\); .* asks for \(24, 96\)"),
    "a tensor of whole numbers": (replaced(FC, lambda old: old.char()), f"'{FC}' as I8; expected F64, F32"),
    "a tensor of nan": (
        replaced(NORM, lambda old: old * float("nan")),
        rf"'m' hold NaN or inf in '{NORM}'",
    ),
    "a tensor that is missing": (changed(lambda tensors: tensors.pop(FC)), rf"lacks 1 tensors \({FC}\)"),
    "a tensor by two names": (
        changed(lambda tensors: tensors.update({FC.removeprefix("transformer."): tensors[FC] + 1})),
        f"holds a tensor twice: 'h.1.mlp.c_fc.weight' in '{WEIGHTS}' and '{FC}' in",
    ),
}
MODEL_FILES: list[Case] = [
    *(
        Case(f"an index with {shard!r:.40}", sharded(shard), next(READERS), "lists .* as weights; expected names of")
        for shard in SHARDS
    ),
    *(Case(f"an index of {text[:20]}", sharded(index=text), next(READERS), NO_INDEX) for text in INDICES),
    *(Case(what, make, next(READERS), answer) for what, (make, answer) in FILES.items()),
]

# ---- what a configuration asks for ---------------------------------------------------------------------------------


def written(content: bytes, name: str = "config.json") -> Callable[[Path], None]:
    """A small model in the folder `m`, with a file of this content."""
    return instead(name, lambda path: path.write_bytes(content), configured())


def asks_for(field: str, value, answer: str = "", what: str = "trace m", shown: str | None = None, **others) -> Case:
    """A configuration that has this value of a field; the answer names the field, or what is shown in its place."""
    name = f"{what}, {field} {json.dumps(value)}"[:80]
    shown = field if shown is None else shown
    return Case(name, configured(**{field: value}, **others), f"{what} {SMALL}", f"{shown}.*{answer}")


def stored_by(method, answer: str) -> Case:
    """Weights that a library has quantized, installed or not, as their configuration says."""
    asked = configured(quantization_config={"quant_method": method, "bits": 4})
    return Case(f"weights of {method}", asked, f"trace m {SMALL}", f"stored quantized by '{method}'{answer}")


LLAMA = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4}
SEVEN_B = {"n_embd": 8192, "n_layer": 32, "n_head": 64, "n_inner": 32768}  # billion weights, which the files lack
SEVEN_B_CLIP = {"hidden_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 64, "intermediate_size": 32768}
SEVEN_B_CLIP = {"model_type": "clip", "vision_config": SEVEN_B_CLIP}
TOO_FEW = r"asks for at least 2\.7 GB of weights, and its files have 0\.000"


def with_dropout(path: Path) -> None:
    """A tokenizer that cuts words at random."""
    path.write_bytes((POCKET / "gpt2-0.1m" / path.name).read_bytes().replace(b'"dropout": null', b'"dropout": 0.5'))


FAST = b'{"tokenizer_class": "PreTrainedTokenizerFast"}'
CONFIGURATIONS: list[Case] = [
    Case("a model of no known kind", configured(model_type="gpt9"), f"trace m {SMALL}", "^unknown architecture 'gpt9'"),
    asks_for("hidden_size", 0, "'siglip2'", model_type="siglip2", shown="^unknown architecture"),
    Case("GPT-2 of 7 billion weights", configured(**SEVEN_B), f"trace m {SMALL}", TOO_FEW),
    Case("CLIP of 7 billion weights", configured(**SEVEN_B_CLIP), f"trace m --stream {SMALL}", TOO_FEW),
    *(asks_for("n_embd", value, "expected a whole number from 1") for value in (10**9, 0)),
    asks_for("n_embd", "64", "expected int, got"),
    *(asks_for("n_layer", value, "expected a whole number from 1") for value in (0, 10**9)),
    *(asks_for("n_head", value, "expected") for value in (0, 5, 10**6)),
    asks_for("num_hidden_layers", 10**9, "from 1 to 512"),
    asks_for("n_positions", 10**8, "from 1 to 65,536"),
    asks_for("max_position_embeddings", -1, "expected a whole number"),
    asks_for("vocab_size", 10**12, "expected a whole number"),
    asks_for("n_inner", -1, "expected a whole number"),
    asks_for("num_labels", 10**9, "expected a whole number"),
    asks_for("activation_function", "gelu9", "'gelu9'", shown="transformers knows no"),
    asks_for("dtype", "float9", "float9", shown="torch"),
    asks_for("pad_token_id", 10**6, "in the vocabulary of 4096"),
    asks_for("eos_token_id", "2", "'2' doesn't match"),
    *(asks_for("layer_norm_epsilon", value, "from 0 to 1") for value in (float("nan"), -1e-5)),
    asks_for("resid_pdrop", 7, "between 0 and 1", shown="dropout"),
    asks_for("rope_scaling", {"rope_type": "spiral", "factor": 2.0}, "'spiral'", shown="", **LLAMA),
    asks_for("attention_types", [[["global"], 10**9]], "from 1 to 512", model_type="gpt_neo", num_layers=2),
    asks_for("layer_types", ["full_attention"] * 3, "must be equal", shown="num_hidden_layers"),
    asks_for("text_config", {"hidden_size": 10**9}, "hidden_size 1000000000"),
    asks_for("num_key_value_heads", 3, "divides the 4 heads", model_type="llama", num_attention_heads=4),
    asks_for("num_kv_heads", 0, "from 1 to", model_type="falcon"),
    asks_for("num_experts_per_tok", 5, "from 1 to 4", model_type="mixtral", num_local_experts=4),
    asks_for("num_local_experts", 10**6, "from 0 to 4,096", model_type="mixtral"),
    asks_for("sliding_window", -1, "from 0", model_type="mistral"),
    asks_for("sliding_window", 0, "expected a whole number from 1 on, or null", model_type="mistral"),
    asks_for("encoder_layers", 10**9, "from 1 to 512", model_type="bart"),
    asks_for("d_model", 10**8, "from 1 to", model_type="xglm"),
    *(stored_by(one, "; expected 16 or 32") for one in ("eetq", None)),
    *(stored_by(one, ", and its files hold none so") for one in ("gptq", "awq", "bitsandbytes", "fp8", "hqq")),
    Case("no size at all", written(b'{"model_type": "llama"}'), f"trace m {SMALL}", "at least 0.5 GB of weights"),
    Case("a report of it", instead("config.json", nothing, configured()), "report m", "'m': it has no config.json"),
    Case("no architecture", written(b'{"n_embd": 64}'), f"trace m {SMALL}", "no 'model_type'"),
    Case("a list", written(b"[]"), f"trace m {SMALL}", "holds no JSON object"),
    Case("deep nesting", written(b"[" * 200_000), f"trace m {SMALL}", "nested too deeply"),
    Case("no UTF-8", written(b'{"a": "\xff"}'), f"trace m {SMALL}", "not valid JSON"),
    Case("a value twice", written(b'{"n_embd": 1, "n_embd": 2}'), f"trace m {SMALL}", "two values of 'n_embd'"),
    Case("5 MB", written(b" " * (5 << 20)), f"trace m {SMALL}", "larger than 4 MB"),
    Case(
        "a pipe", instead("config.json", os.mkfifo, configured()), f"trace m {SMALL}", "no config.json that can be read"
    ),
    Case("random words", instead("tokenizer.json", with_dropout, configured()), f"trace m {SMALL}", "at random"),
    Case(
        "no first token",
        written(FAST, "tokenizer_config.json"),
        f"trace m {SMALL} --bos",
        "^the model's tokenizer has no first token",
    ),
    Case("no tokenizer", instead("tokenizer.json", nothing, configured()), f"trace m {SMALL}", "^no tokenizer in 'm'"),
    Case("memory of it", configured(n_layer=10**9), "memory m", "n_layer 1000000000"),
    *(
        Case(f"{name} is {content!r}", written(content, name), f"trace m {SMALL}", f"^'m/{name}' {answer}")
        for name, answer, *contents in (
            ("tokenizer.json", "is not valid JSON", b"", b"[" * 100_000),
            ("tokenizer.json", "holds .*; expected a JSON object", b"[]"),
        )
        for content in contents
    ),
]

# ---- text ----------------------------------------------------------------------------------------------------------

ROW = json.dumps({"text": "One document of this text."}).encode() + b"\n"


def text(what: str, answer: str, name: str, content: bytes | Callable[[Path], None], end: int | None = None) -> Case:
    """A file of that name in which something is wrong, or what is made there, cut at its end; the answer names it."""

    def make(folder: Path) -> None:
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content[:end])

    return Case(what, make, f"trace pocket/gpt2-0.1m {SMALL} --text {name}", rf"(?=.*'{re.escape(name)}').*{answer}")


ZEROS = gzip.compress(bytes(2**20), 1) * 1000  # a gigabyte, in members that follow each other

TEXTS: list[Case] = [
    text("half a surrogate", r"row 2 .* half a surrogate pair, '\\ud800'", "a.jsonl", ROW + rb'{"text": "\ud800"}'),
    text("its other half", r"row 1 .* half a surrogate pair, '\\udfff'", "a.jsonl", rb'{"text": "x\udfffx"}'),
    text("Latin-1", "line 3 .* byte 4 is not UTF-8", "a.txt", b"one\r\n\r\ncaf\xe9"),
    text("a byte order mark", "line 1 .* begins with a byte order mark", "a.txt", b"\xef\xbb\xbfwords"),
    text("deep lists", "row 2 .* nested too deeply", "a.jsonl", ROW + b'{"x": ' + b"[" * 10**5),
    text("a number without end", "row 2 .* more than 4300 digits", "a.jsonl", ROW + b'{"x": ' + b"1" * 5000 + b"}"),
    text("a number for a text", "row 2 .*: 'text' is no string", "a.jsonl", ROW + b'{"text": 3}'),
    text("no text", "row 2 .*: 'text' is missing", "a.jsonl", ROW + b'{"content": "x"}'),
    text("a list for a row", "row 1 .*: it is not an object", "a.jsonl", b'["text"]'),
    text("a torn row", "row 2 .*: Unterminated string", "a.jsonl", ROW + ROW, -10),
    text("a blank line in the middle", "row 2 .* is blank", "a.jsonl", ROW + b"\n" + ROW),
    text("blank lines without end", "row 1 .* is blank", "a.jsonl.gz", gzip.compress(b"\n" * 10**6) * 1000),
    text("blank lines alone", "too short: 0 tokens", "a.jsonl", b"\n \n"),
    text("a gigabyte of zeros", "line 1 .* is longer than 16 MB", "a.txt.gz", ZEROS),
    text("a torn gzip of rows", "line 2 .* cannot be read: .* ended", "a.jsonl.gz", gzip.compress(ROW), -9),
    text("a wrong checksum", "line 1 .* cannot be read: CRC", "a.txt.gz", gzip.compress(b"words")[:-8] + bytes(8)),
    text("damage in a gzip", "line 1 .* read: Error -3", "a.txt.gz", gzip.compress(b"words")[:10] + b"\xff" * 9),
    text("a pipe", "is a folder, a pipe or a device", "a.txt", os.mkfifo),
    text("a file of /proc", "too short", "a.txt", to("/proc/self/mem")),
    text("another ending", "ends in '.json'; expected .txt, .txt.gz, .jsonl or .jsonl.gz", "a.json", ROW),
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


DAMAGED = "line 2 of 'out/rows.jsonl' is damaged"
ZEROS = [b"\0" * 4096]  # as a system leaves where it lost power
LINES = [  # that are no row, and why not
    ('{"request": {"metric', ""),
    ("[]", r"the line: expected an object of request, provenance, values, run, got \[\]"),
    (b'{"request": "\xff"}', ""),
    *((line, "") for line in ZEROS),
    ("[" * 100_000, ""),
    ({"metric": "perplexity", "value": 7.5}, "the line: expected an object of"),  # of an older version
    ('{"request": "\\ud800"}', ""),
    (json.dumps(ROW).replace("7.5", "7" * 5000), "number out of range"),
    (json.dumps(ROW).replace('"m"', '"é"').encode("latin-1"), "invalid unicode code point"),
]
ROWS = [  # that hold what no row may
    ({**ROW, "more": {}}, "the line: expected an object of request, provenance, values, run, got {"),
    (with_fields("run", new=[[1]]), "run.new: expected text, "),
    ({**ROW, "values": []}, "expected values, or in 'run' why it 'failed'"),
    (with_fields("values", value=float("nan")), "values.0.value: expected a finite number"),
    (with_fields("values", value="7.5"), "values.0.value: .*got '7.5'"),
    (with_fields("values", value=True), "values.0.value: .*got True"),
    (with_fields("values", value=0), "values.0: 'value' of"),
    (with_fields("values", value=2**63), "values.0.value"),
    (with_fields("values", metric="damage.perplexity_only", value=-1.0), "values.0: 'value' of damage"),
    (with_fields("values", layer=-1), "values.0.layer: expected a whole number from 0 on, got -1"),
    (with_fields("provenance", parameters=2**63), "provenance.parameters"),
    (with_fields("provenance", parameters=0), "provenance.parameters: expected a whole number from 1 on, got 0"),
    (with_fields("provenance", parameters=0.5), "provenance.parameters: expected a whole number from 1 on, got 0.5"),
    (with_fields("subject", model=3), "request.subject.model: expected text, got 3"),
    (with_fields("subject", seed=float("inf")), "request.subject.seed: expected text, a finite number, .* got inf"),
    (with_fields("metric", alpha=float("nan")), "request.metric.alpha: expected a positive number, got nan"),
    (with_fields("provenance", new={"a": 1}), "provenance.new: expected text, a finite number, "),
    (with_fields("provenance", features=["3"]), "provenance.features: expected a list of whole numbers, got"),
]
IN_THE_WAY = [  # of a file: what it is, how it is made
    ("a folder", Path.mkdir),
    ("a pipe", os.mkfifo),
    ("a socket", a_socket),
    ("a link", to("../outside")),
    ("a link", to("nowhere/at/all")),
    ("another name of a file elsewhere", lambda path: path.hardlink_to(path.parent.parent / "outside")),
]
LONG = "o" * 300
RESULTS: list[Case] = [
    *(
        Case(f"a line {line!r:.60}", rows(line, ROW), typed, f"{DAMAGED} \\({reason}.*\\); d")
        for (line, reason), typed in zip(LINES + ROWS, itertools.cycle((SWEEP, REDRAW)))
    ),
    *(Case(f"a last line {line!r:.60}", rows(line), SWEEP, DAMAGED) for line, _ in LINES if line not in ZEROS),
    Case("several damaged lines", rows("{", ROW, "[]"), SWEEP, r"lines 2, 4 of '.*' are damaged \(the first: .*; del"),
    Case("a damaged line to trace", rows("{", ROW), TRACE, DAMAGED),
    Case("nothing to draw again", rows(with_fields("subject", block=33)), REDRAW, "'out' has no finished rows of this"),
    *(
        Case(f"{what} as {name}, {typed}", instead_of(name, kind), typed, f"'out/{name}' is {what}; expected a file")
        for name, commands, kinds in (
            ("rows.jsonl", (SWEEP, TRACE, REDRAW), IN_THE_WAY[:2]),
            ("rows.jsonl", (SWEEP,), [IN_THE_WAY[2], ("a device", to("/dev/zero"))]),
            (".lock", (SWEEP, TRACE), IN_THE_WAY),
            ("trace.safetensors", (TRACE,), IN_THE_WAY[:2]),
        )
        for typed in commands
        for what, kind in kinds
    ),
    Case("a trace of another model", traced, TRACE, "'out' holds results of 'other/gpt2-0.1m', whose tables"),
    Case("a file as the folder", lambda folder: (folder / "out").touch(), SWEEP, "cannot write to 'out' "),
    Case("a pipe as the folder", lambda folder: os.mkfifo(folder / "out"), TRACE, "cannot (read|write to) 'out"),
    *(
        Case(f"the folder {out:.20}, {typed}", nothing, typed.replace("--out out", f"--out {out}"), answer)
        for typed, out, answer in (
            (SWEEP, "/dev/null", "cannot write to '/dev/null' "),
            (SWEEP, LONG, r"cannot write to 'o+' \(File name too"),
            (REDRAW, LONG, r"'o+/.*' \(File name too"),
        )
    ),
]

# ---- options and environment ---------------------------------------------------------------------------------------

POCKET_MODEL = "pocket/gpt2-0.1m"
SWEEP = f"sweep --model {POCKET_MODEL} --scheme fp32"
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
    ("name", "../up", "expected letters, digits and any of"),
    ("name", "''", "expected text in one line, got ''"),
    ("models", "[]", "expected at least 1, got"),
    ("models", '["a\\0b"]', "expected text in one line"),
    ("block", "true", "expected a number, got True"),
    ("name", "é" * 200, "expected names of at most 255 bytes, got 'é+…"),
    ("name", "2024-01-01", "expected text, got datetime.date"),
    ("models", "[no]", "expected text, got False"),
    ("block", ".nan", "finite number, got nan"),
    ("block", f"0x{'f' * 5000}", "got a number of too many digits"),
    ("memory", "1e300", "expected a size such as 500MB or 4GB"),
]
NO_YAML = "'e.yaml' is not a file of at most 1 MB"
# A file of few bytes with 9**12 values.
BOMB = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]" for n in range(1, 13))])
TAGS = ("!!bool maybe", "!!timestamp x", "!!binary '…'", "!!set {a}", "2024-13-45")
YAML = [  # what an experiment file holds, and the answer
    *((fields(**{field: value}), f"field '{field}.*': .*{answer}") for field, value, answer in VALUES),
    *((fields(block=tag), "'e.yaml' cannot be read|field 'block'") for tag in TAGS),
    (fields(extends="."), "'extends' is '.'; expected another file"),
    (fields(extends="[a]"), r"'extends' is \['a'\]; expected another"),
    (fields(extends="e.yaml"), "'e.yaml' refers to itself in 'extends'"),
    (os.mkfifo, NO_YAML),
    ("#" * 1_100_000, NO_YAML),
    (BOMB, "'e.yaml' cannot be read: more than 10000 values"),
    ("models: &a [*a]", "'e.yaml' refers to itself by an alias"),
    ("[" * DEEP, "refers to itself by an alias, or nests too deep"),
    ("models:\n\t- a\n", "'e.yaml' cannot be read: .*line 2, column 1"),
    (fields(hardware="{a: 1, a: 2}"), "line 2: field 'a' stands twice"),
    ("? [a]\n: 1\n", "a field's name is no text"),
    ("", "holds no fields"),
    ("1: 2", "holds no fields"),
    ("models:\n  - a\n  - [b]\n", "e.yaml, line 3, field 'models.1': expected text, got"),
    ("text: c4\nblock: 8\n", "e.yaml, line 1, field 'models' is missing"),
    (fields(block="!!python/object/apply:os.system ['touch here']"), "could not determine a constructor"),
    (b"models: [\xff\xfe]", "'e.yaml' cannot be read: .*utf-8"),
    ("a: 1\n---\nb: 2\n", "expected a single document"),
]
SHOWN = {  # of an experiment file of a report
    "models: [a]\nshows: tabel1\n": "e.yaml, line 2, unknown table or figure 'tabel1'; did you mean table1",
    "shows: table3\nmodels: [a]\nhardware:\n  - {hardware: A, gpus: 0, gigabytes: 1}": "line 4, field 'hardware.0.gp",
    "shows: figure1\nmodels: [a]\nblock: 3\n": "line 3, unknown field 'block'",
    "shows: table5\ndimensions: [0x0]": "field 'dimensions.0': expected",
    "shows: table5\ndimensions: [9999999]": "field 'dimensions.0': expected at most 131,072",
}
TRAINED = {  # of one of training runs
    "runs: {a: {start: bert-1.4m}}": "'a' trains 'bert-1.4m', which learns masked tokens; expected a rung that learns",
    "runs:\n  a:\n    epochs: 3\n": "e.yaml, line 3, unknown field of runs.a 'epochs'; did you mean steps",
    "shows: table1\nruns: {a: {}}": "unknown table or figure 'table1'; did you mean table10",
}
RING = [file(fields(extends=f"{one}.yaml")) for one in "fp"]
BASE = file("models: [a]\nalpha: -1\n", "b.yaml")
EXTENDING = [both(BASE, file(f"extends: b.yaml\nblocks: {blocks}")) for blocks in (0, 3)]
OPTIONS: list[Case] = [
    *(Case(_of_file(content), file(content), "sweep e.yaml", answer) for content, answer in YAML),
    Case("a ring of files", both(RING[0], file("extends: ./e.yaml", "f.yaml")), "sweep e.yaml", "itself in 'extends'"),
    Case("one that extends a pipe", both(RING[1], file(os.mkfifo, "p.yaml")), "sweep e.yaml", "'p.yaml' is not a file"),
    *(Case(_of_file(content), file(content), "report e.yaml", answer) for content, answer in SHOWN.items()),
    *(Case(_of_file(content), file(content), "training e.yaml", answer) for content, answer in TRAINED.items()),
    Case("a mistake that extends", EXTENDING[0], "sweep e.yaml", "e.yaml, line 2, field 'blocks'"),
    Case("a mistake that is extended", EXTENDING[1], "sweep e.yaml", "b.yaml, line 2, field 'alpha'"),
]

# What is typed where nothing is, and a pattern of the answer.
REFUSED = {
    "training pocket/table1": "field 'runs' is missing",
    f"ablate {POCKET_MODEL} --seed -1": "seed is -1; expected a whole number from 0",
    f"ablate {POCKET_MODEL} --seed {2**70}": f"seed is {2**70}; expected",
    f"ablate {POCKET_MODEL} --controls 100000000": "100000000 controls; expected",
    f"plan {POCKET_MODEL} --cost -5%": "field 'cost': expected a share such as 5% or 0.05, got '-5%'",
    f"plan {POCKET_MODEL} --cost 1": "field 'cost': expected a share: 1 % is written 1% or 0.01",
    f"trace {POCKET_MODEL} --imatrix out.gguf": "--imatrix takes no value, got 'out.gguf'; --out names the folder",
    f"trace {__file__}": "test_door.py' is a file; expected a model folder or a GGUF file",
    f"trace {POCKET / 'gpt2-0.1m' / 'config.json'}": "config.json' is a file; expected its folder, '.*gpt2-0.1m'",
    **{
        f"sweep --model {POCKET_MODEL} --scheme '{written}'": answer
        for written, answer in (
            ("hadamard+w4a4", "'hadamard.w4a4': a remedy stands behind its scheme: w4a4.hadamard"),
            ("gptq", "'gptq': a remedy stands behind its scheme: absmax.gptq"),
            ("absmax+llm.int8", "'absmax.llm.int8' has two schemes; expected one"),
            ("absmax+prefix", "'absmax.prefix': a prefix stands first: prefix.absmax"),
            ("absmax+kv=int4", "'absmax.kv=int4' is a variant, not a scheme; use `python -m outliers.measure"),
        )
    },
    **{
        f"plan {POCKET_MODEL} {SMALL} {options}": answer
        for options, answer in (
            ("--scheme fp32", "which quantizes no projection"),
            ("--instead fp32", "'fp32' in the place of 'absmax'"),
            ("--instead absmax+smoothing", "without a calibration"),
            ("--cost 0", "expected more than 0"),
            ("--export gguf", "unknown format of an export 'gguf'"),
        )
    },
    f"{SWEEP} --block ten": "field 'block': expected a whole number, got 'ten'",
    f"{SWEEP} --draws 3 --dtype bfloat16": "3 draws in bfloat16.*expected float32 or 1 draw",
    f"{SWEEP} --mask-seed 2": "leave --mask-seed out",
    f"{SWEEP} --mask-seeds 2": "leave --mask-seeds out",
    f"{SWEEP} --objective each": "leave --objective out",
    **{
        f"sweep {POCKET_MODEL} {SMALL} --scheme absmax+smoothing --{options}": answer
        for options, answer in (
            ("calibration sample", "block 1 to calibrate on is block 1 of what is measured, .* with --cali"),
            ("calibration-blocks 100000", "no 100000 blocks to calibrate on: text 'sample' is too short"),
            ("calibration no.txt", "text file 'no.txt' does not exist"),
        )
    },
    "zeroshot pocket/bert-1.4m --task piqa-local": "is of the family 'masked'; expected a causal language model",
    "trace pocket/t5-1.9m --masks": "several stacks",
    f"memory {POCKET_MODEL} --headroom nan": "field 'headroom': .*finite number",
    f"memory {POCKET_MODEL} --gpu {'9' * 5000}x24": "hardware '9+.*'; expected a",
    f"memory {POCKET_MODEL} --gpu 8x0": "field 'hardware.0.gigabytes': expected more than 0",
    f"{SWEEP} --out 'a\x1b[31mb'": r"argument 'a\\x1b\[31mb' holds bytes that",
    f"{SWEEP} --text {'t/' * 3000}x.txt": "field 'text': expected names of at",
    f"sweep {'é' * 200}.yaml": "experiment file '.*' cannot be read",
    f"{SWEEP} --modle x": "No such option: --modle",
    f"{SWEEP} --engine ray --device cuda:1": "device 'cuda:1' with engine 'ray', which chooses GPUs; expected",
    f"{SWEEP} --stream --device auto": "device 'auto' with --stream: a streamed model computes on one device; expected",
    **{
        f"measure {POCKET_MODEL} {SMALL} {options}": answer
        for options, answer in (
            ("--metric perplexty", "unknown metric 'perplexty'; did you mean perplexity"),
            ("--variant 'zreo(3)'", "unknown variant 'zreo'; did you mean zero"),
            ("--variant 'zero(transformer.h.9.mlp.c_fc[0,0])'", "unknown weight 'transformer.h.9.mlp.c_fc'; did you"),
            ("--variant 'zero(3@layers.0.gate)'", "place 'layers.0.gate': layer 0 has no such reader of the residual"),
            ("--variant 'absmax+against(m)'", r"another model stands first: against\(m\).absmax"),
            ("--variant alpha=4+llm.int8", "'alpha=4.llm.int8': an option stands behind its scheme: llm.int8.alpha=4"),
            ("--variant 'prefix(999999)'", "token 999999 in a prefix; expected ids below 4096, of the vocabulary"),
            ("--variant prefix=0", "'prefix=0' is not a prefix; expected prefix, prefix=2 or the ids of tokens"),
            ("--variant 'prefix(3)' --stream", r"prefix\(3\) in a streamed model; .* in memory: leave --stream out"),
            ("--variant kv=int4/layers=2", "in a model with 2 layers of keys; expected some of 0:2"),
            ("--variant kv=int4/heads=1:3", "in a model with 2 heads of keys; expected some of 0:2"),
            ("--variant kv=mxfp4", "blocks of 32 channels, which do not divide the 12 of a head"),
            ("--variant kv=bfp4/block=8", "blocks of 8 channels, which do not divide the 12 of a head"),
            ("--metric latency --prompt 16 --variant 'prefix(3)+kv=int4'", "generates behind a prefix in kv=int4"),
            ("--variant values=int4/before", "which no rotation changes; leave before out"),
            ("--variant absmax+bitsandbytes", "'absmax.bitsandbytes' has two schemes"),
            ("--variant 'mean(3)'", r"'mean\(3\)' needs the mean of each feature over the text"),
            ("--metric top1 --draws 2", r"field 'draws' is a parameter of none of the requested metrics \(top1\)"),
            ("--metric latency --prompt 33", "prompts of 33 tokens from 1 blocks of 32"),
            ("--metric zeroshot --stream", "zero-shot tasks of a streamed model; expected one in memory"),
            ("--variant bitsandbytes --stream", "bitsandbytes in a streamed model; expected one in memory"),
            ("--metric origins", "no feature is given"),
        )
    },
    "measure pocket/gptj-1.7m --variant kv=int4": "the attention of 'gptj' cannot be replaced",
    "measure pocket/bert-1.4m --variant kv=int4": "a cache of keys and values of 'bert'; expected a causal",
    "measure pocket/bert-1.4m --variant 'prefix(3)'": "a prefix before what 'bert' reads; expected a causal language m",
    "measure pocket/gptj-1.7m --metric keys": "^queries, keys and values of 'gptj', whose attention cannot be replaced",
    "origins pocket/gptj-1.7m --by keys": "^queries, keys and values of 'gptj', whose attention cannot be replaced",
    **{
        f"damage {POCKET_MODEL} {options}": answer
        for options, answer in (
            ("--by head", "schemes have no heads"),
            ("--cache kv=int4 --by error", "'kv=int4' quantizes no projection"),
            ("--cache kv=int4/layers=0", "quantizes some places already"),
            ("--cache absmax", "unknown part of a cache 'absmax'"),
        )
    },
    **{
        f"origins {POCKET_MODEL} {SMALL} {options}": answer
        for options, answer in (
            ("--features 3 --positions 32", "position 32 in blocks of 32 tokens"),
            ("--by reader", "unknown part of the account 'reader'; did you mean readers"),
        )
    },
    **{
        f"{SWEEP} --alpha {value}": "field 'alpha': expected a positive number"
        for value in ("nan", "-0", "1e-50", "1e39")
    },
    **{
        f"{SWEEP} --stream --memory {value}": "field 'memory': "
        for value in ("-1", "1e99GB", "²", "nan", f"{'9' * 5000}")
    },
    f"ablate {POCKET_MODEL} --features {'9' * 5000}": "field 'features.0': ",
    f"{SWEEP} --revision ''": r"an argument is empty \(''\)",
}

MODELS = "--model pocket/gpt2-0.1m --model pocket/gpt2-0.5m"

# What is typed where nothing is, and how the answer begins.
TYPED = {
    f"{SWEEP} --text smaple": "unknown text 'smaple'; did you mean sample",
    f"{SWEEP} --text nowhere.jsonl": "text file 'nowhere.jsonl' does not exist",
    f"{SWEEP} --block 512": "blocks of 512 tokens are longer than the model's context of 256; use --block 256",
    f"{SWEEP} --dtype int4": "field 'dtype': expected float32, float16 or bfloat16, got 'int4'",
    "trace pocket/gpt2-01m": "unknown model 'pocket/gpt2-01m'; did you mean pocket/gpt2-0.1m",
    "trace pocket/gpt2-0.1m --revision step1": "'pocket/gpt2-0.1m' is a local model and has no revision",
    "ablate pocket/gpt2-0.1m --features 3,x": "field 'features.1': expected the numbers of features, such as 3,17",
    f"{SWEEP} --scheme nf4": "unknown scheme 'nf4', which is not implemented; the nearest is w4-g64",
    f"{SWEEP} --scheme Q4_K_M": "unknown scheme 'Q4_K_M', which is not implemented; the nearest is w4-g32",
    f"{SWEEP} --scheme int8": "unknown scheme 'int8'; here it is llm.int8",
    f"{SWEEP} --scheme smoothquant": "unknown scheme 'smoothquant'; here it is w8a8+smoothing=0.5",
    f"{SWEEP} --scheme bf16": "unknown scheme 'bf16', which is a dtype; expected fp32, with --dtype bfloat16",
    f"{SWEEP} --scheme xyz": "unknown scheme 'xyz'; nearest: mxfp4, flexq, mxint8 (docs/schemes.md lists all)",
    "sweep pocket/gpt2-0.1m --schemes absmax hadamard": "'hadamard' stands where a model does; a remedy stands",
    "trace smollm2": "no model 'smollm2' is on this machine; did you mean smollm2-135m?",
    "trace Pocket/GPT2": "unknown model 'pocket/gpt2'; did you mean pocket/gpt2-1m or ",
    f"{SWEEP} --scheme ABSMX": "unknown scheme 'ABSMX'; did you mean absmax",
    f"{SWEEP} --alpha x": "field 'alpha': expected a number, got 'x'",
    "sweep Absmax": "'Absmax' stands where a model does; schemes are one option",
    "trace pocket/gpt2-0.1m --device mps": "device 'mps' is not supported; expected cpu, cuda, cuda:N or auto",
    "ablate pocket/gpt2-0.1m --drop experts": "'pocket/gpt2-0.1m' has no experts; expected a mixture of experts",
    "sweep --model pocket/mixtral-0.7m --scheme absmax --skip layers.1.experts.8": "skip has 'layers.1.experts.8', of",
    "ablate pocket/mixtral-0.7m --drop experts --features 3": "drop leaves out whole parts, which have no features",
    "ablate pocket/gpt2-0.1m --method men": "unknown method 'men'; did you mean mean",
    "ablate pocket/gpt2-0.1m --controls 3": "3 controls; expected at least 10",
    f"emergence {MODELS} --revisions a,b": "revisions of 2 models; expected revisions of one model",
    "trace": "no model is named; expected one, such as `python -m outliers.trace pocket/gpt2-1.7m`",
    "anatomy": "no model is named; expected some, such as `outliers anatomy smollm2-135m`",
    "anatomy clap": "unknown architecture 'clap': transformers makes no",
    "trace a --model b": "trace takes one model, got 2: a, b; run it once for each model",
    "latency pocket/gpt2-0.1m --batch 1,0": "field 'batches.1': expected more than 0, got '0'",
    "sweep ,": "no model is named; expected some",
    "sweep pocket/tabel1": "unknown experiment 'pocket/tabel1'; did you mean pocket/table1",
    "sweep pocket": "unknown experiment 'pocket'; did you mean pocket/",
    "latency gpt2 --model pocket/gpt2-0.1m": "unknown experiment 'gpt2'",
    "training": "no experiment is named; expected one, such as `python -m outliers.training training/causes`",
    "training causes": "unknown experiment 'causes'; did you mean training/causes",
    "training training/table10": "text file 'wikitext2_train.txt.gz' does not exist; expected WikiText-2",
    "training training/causes --runs x": "No such option: --runs",
    "trace 'a b c'": "unknown model 'a b c'",
    "memory ./nowhere": "model folder './nowhere' does not exist",
    "report pocket/table1 pocket/nothing": "unknown model 'pocket/nothing'",
    "report pocke": "unknown experiment 'pocke'; did you mean pocket",
    "report mine.yaml": "experiment file 'mine.yaml' does not exist",
    "report pocket --redraw": "'results/pocket/table1' has no finished rows",
    "emergence --redraw nothing": "'nothing' has no finished rows of emergence; expected a folder with",
    "emergence a --redraw b": "--redraw 'b' with models or options of a measurement",
}
CASES = [*MODEL_FILES, *CONFIGURATIONS, *TEXTS, *RESULTS, *OPTIONS]
CASES += [Case(typed[:80], nothing, typed, said) for typed, said in REFUSED.items()]
CASES += [Case(typed, nothing, typed, f"^{re.escape(said)}") for typed, said in TYPED.items()]


@pytest.fixture(autouse=True)
def _no_hang():
    with answer_within(SECONDS):
        yield


def written(folder: Path) -> dict:
    """What is in a folder, and when each file was written."""
    return {path: path.is_dir() or path.lstat().st_mtime_ns for path in folder.rglob("*")}


# Cases that show as weights are read, once there is a folder of results.
OF_WEIGHTS = {
    *("weights that are empty", "weights outside by name", "a narrower tensor", "a tensor of whole numbers"),
    *("a tensor of nan", "a tensor that is missing", "a tensor by two names", "weights of gptq"),
    *("weights of awq", "weights of bitsandbytes", "weights of fp8", "weights of hqq"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_one_line(monkeypatch, capsys, tmp_path, case):
    monkeypatch.chdir(tmp_path)
    case.make(tmp_path)
    before = written(tmp_path)
    command, *arguments = shlex.split(case.typed)
    said = refused(monkeypatch, capsys, *arguments, command=command)
    assert re.search(case.answer, said), said
    assert case.what in OF_WEIGHTS or written(tmp_path) == before, "something was left behind, or written anew"


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
