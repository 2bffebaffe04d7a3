"""Mistakes that a user, a file or a machine makes, each in a line: what is there, what is typed, what the answer says.

To add a case, add a line to the table of its kind. Each is run as a command in a folder of its own; it must end within
ten seconds with exit code 2 and one line, and leave nothing behind.
"""

import gzip
import json
import os
import re
import shutil
import signal
import socket
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

ROW = json.dumps({"text": "One document of this text."}).encode() + b"\n"


def text(what: str, answer: str, name: str, content: bytes | Callable[[Path], None], end: int | None = None) -> Case:
    """A file of that name in which something is wrong, or what is made there, cut at its end; the answer names it."""

    def make(folder: Path) -> None:
        if callable(content):
            content(folder / name)
        else:
            (folder / name).write_bytes(content[:end])

    return Case(what, make, f"trace pocket/gpt2-0.1m {SMALL} --text {name}", rf"(?=.*'{re.escape(name)}').*{answer}")


def link(target: str) -> Callable[[Path], None]:
    """A symbolic link."""
    return lambda path: path.symlink_to(target)


ZEROS = gzip.compress(bytes(2**20), 1) * 1000  # a gigabyte, in members that follow each other
NO_FILE = "is a folder, a pipe or a device"

TEXTS: list[Case] = [
    text(
        "half a surrogate pair", r"row 2 .* half a surrogate pair, '\\ud800'", "a.jsonl", ROW + rb'{"text": "\ud800"}'
    ),
    text("its other half", r"row 1 .* half a surrogate pair, '\\udfff'", "a.jsonl", rb'{"text": "x\udfffx"}'),
    text("half a pair in bytes", "line 2 .* byte 2 is not UTF-8", "a.txt", b"one\nt\xed\xa0\x80wo"),
    text("Latin-1", "line 3 .* byte 4 is not UTF-8", "a.txt", b"one\r\n\r\ncaf\xe9"),
    text("Latin-1 in a row", "line 2 .* byte 14 is not UTF-8", "a.jsonl", ROW + b'{"text": "caf\xe9"}'),
    text("Latin-1, compressed", "line 2 .* byte 4 is not UTF-8", "a.txt.gz", gzip.compress(b"one\ncaf\xe9")),
    text("UTF-16", "line 1 .* byte 1 is not UTF-8", "a.txt", "words".encode("utf-16")),
    text("half a character at the end", "line 1 .* byte 6 is not UTF-8", "a.txt", b"words\xc3"),
    text("an overlong NUL", "line 1 .* byte 1 is not UTF-8", "a.txt", b"\xc0\x80"),
    text("a byte order mark", "line 1 .* begins with a byte order mark", "a.txt", b"\xef\xbb\xbfwords"),
    text("one before a row", "line 1 .* begins with a byte order mark", "a.jsonl", b"\xef\xbb\xbf" + ROW),
    text("one in front of a later row", "row 2 .* BOM", "a.jsonl", ROW + b"\xef\xbb\xbf" + ROW),
    text("deep lists", "row 2 .* nested too deeply", "a.jsonl", ROW + b'{"x": ' + b"[" * 10**5),
    text("deep objects", "row 1 .* nested too deeply", "a.jsonl", b'{"x":' * 10**5),
    text("a number without end", "row 2 .* more than 4300 digits", "a.jsonl", ROW + b'{"x": ' + b"1" * 5000 + b"}"),
    text("a number for a text", "row 2 .*: 'text' is no string", "a.jsonl", ROW + b'{"text": 3}'),
    text("null for a text", "row 1 .*: 'text' is no string", "a.jsonl", b'{"text": null}'),
    text("NaN for a text", "row 1 .*: 'text' is no string", "a.jsonl", b'{"text": NaN}'),
    text("a list for a text", "row 1 .*: 'text' is no string", "a.jsonl", b'{"text": ["x"]}'),
    text("two texts", "row 1 .*: 'text' is no string", "a.jsonl", b'{"text": "x", "text": 1}'),
    text("no text", "row 2 .*: 'text' is missing", "a.jsonl", ROW + b'{"content": "x"}'),
    text("a list for a row", "row 1 .*: it is no object", "a.jsonl", b'["text"]'),
    text("a string for a row", "row 1 .*: it is no object", "a.jsonl", b'"text"'),
    text("no JSON", "row 2 .*: Expecting value at character 1", "a.jsonl", ROW + b"words\n"),
    text("two rows in a line", "row 1 .*: Extra data at character 39", "a.jsonl", ROW.strip() + ROW),
    text("a torn row", "row 2 .*: Unterminated string", "a.jsonl", ROW + ROW, -10),
    text("a control character", "row 1 .*: Invalid control character", "a.jsonl", b'{"text": "\x01"}'),
    text("JSON over several lines", "row 1 .*: Expecting property name", "a.jsonl", b'{\n"text": "x"\n}'),
    text("a blank line in the middle", "row 2 .* is blank", "a.jsonl", ROW + b"\n" + ROW),
    text("blank lines without end", "row 1 .* is blank", "a.jsonl.gz", gzip.compress(b"\n" * 10**6) * 1000),
    text("blank lines alone", "too short: 0 tokens", "a.jsonl", b"\n \n"),
    text("no rows", "too short: 0 tokens", "a.jsonl", b""),
    text("an empty document", "too short: 1 tokens", "a.jsonl", b'{"text": ""}'),
    text("a gigabyte of zeros", "line 1 .* is longer than 16 MB", "a.txt.gz", ZEROS),
    text("a row of them", "line 1 .* is longer than 16 MB", "a.jsonl.gz", ZEROS),
    text("a long line", "line 2 .* is longer than 16 MB", "a.txt", b"one\n" + b"x" * (2**24 + 1)),
    text("a long row", "line 2 .* is longer than 16 MB", "a.jsonl", ROW + b'{"text": "' + b"x" * 2**24 + b'"}'),
    text("a torn gzip", "line 1 .* cannot be read: .* ended", "a.txt.gz", gzip.compress(b"words" * 10**6), -30),
    text("a torn gzip of rows", "line 2 .* cannot be read: .* ended", "a.jsonl.gz", gzip.compress(ROW), -9),
    text("a torn header of gzip", "line 1 .* cannot be read: .* ended", "a.txt.gz", gzip.compress(b"words"), 5),
    text("a wrong checksum", "line 1 .* cannot be read: CRC", "a.txt.gz", gzip.compress(b"words")[:-8] + bytes(8)),
    text(
        "damage in a gzip", "line 1 .* cannot be read: Error -3", "a.txt.gz", gzip.compress(b"words")[:10] + b"\xff" * 9
    ),
    text("no gzip", "line 1 .* cannot be read: Not a gzipped file", "a.txt.gz", b"words"),
    text("a folder", NO_FILE, "a.txt", Path.mkdir),
    text("a pipe", NO_FILE, "a.txt", os.mkfifo),
    text("a pipe of rows", NO_FILE, "a.jsonl.gz", os.mkfifo),
    text("a socket", NO_FILE, "a.txt", lambda path: socket.socket(socket.AF_UNIX).bind(path.name)),
    text("a device", NO_FILE, "a.txt", link("/dev/zero")),
    text("a file of /proc", "too short", "a.txt", link("/proc/self/mem")),
    text("a link to itself", "does not exist", "a.txt", link("a.txt")),
    text("a link to nothing", "does not exist", "a.txt", link("b.txt")),
    text("another ending", "ends in '.json'; expected .txt, .txt.gz, .jsonl or .jsonl.gz", "a.json", ROW),
    text("an ending in capitals", "ends in '.TXT'; expected .txt", "a.TXT", b"words"),
    text("gz alone", "ends in '.gz'; expected .txt", "a.gz", gzip.compress(b"words")),
    Case(
        "a name of 300 characters", nothing, f"trace pocket/gpt2-0.1m --text {'a' * 300}.txt", "'a{300}.txt' does not"
    ),
    Case(
        "blocks without end", nothing, f"trace pocket/gpt2-0.1m --block 32 --blocks {10**30}", "at most 1,073,741,824"
    ),
    Case("blocks beyond memory", nothing, f"latency pocket/gpt2-0.1m --batch {10**12}", "at most 1,073,741,824"),
]

# ---- disks and results ---------------------------------------------------------------------------------------------

SWEEP = f"sweep --model pocket/gpt2-0.1m --scheme fp32 {SMALL} --out out"
TRACE = f"trace pocket/gpt2-0.1m {SMALL} --out out"
REDRAW = "report pocket/table1 --redraw --out out"
ROW = {"metric": "perplexity", "value": 7.5, "model": "m", "scheme": "fp32", "parameters": 9, "architecture": "gpt2"}


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


def to_outside(path: Path) -> None:
    path.symlink_to("../outside")


def to_nowhere(path: Path) -> None:
    path.symlink_to("nowhere/at/all")


def twice(path: Path) -> None:
    path.hardlink_to(path.parent.parent / "outside")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


def traced(folder: Path) -> None:
    """A trace of another model in the folder `out`."""
    rows({**ROW, "experiment": "trace", "model": "other/gpt2-0.1m"})(folder)


RESULTS: list[Case] = [
    *(
        Case(
            f"a damaged line, {what}",
            rows(line, ROW),
            SWEEP,
            f"line 2 of 'out/rows.jsonl' is damaged \\({reason}.*\\); d",
        )
        for what, line, reason in [
            ("cut", '{"model": "m', "it is not JSON"),
            ("empty of rows", "[]", "it is no JSON object"),
            ("a number", "3", "it is no JSON object"),
            ("null", "null", "it is no JSON object"),
            ("not UTF-8", b'{"model": "\xff"}', "it is not UTF-8"),
            ("zeros", b"\0" * 4096, "it is not JSON"),
            ("nested", "[" * 100_000, "its JSON is nested too deep"),
            ("half a character", {**ROW, "model": "\ud800"}, "'model' holds half a character"),
            ("a field twice", '{"value": 1, "value": 2}', "a field is there twice"),
            ("NaN", '{"value": NaN}', "NaN is no number"),
            ("no end", '{"value": -Infinity}', "-Infinity is no number"),
            ("too large", '{"value": 1e999}', "'value' is Infinity, expected a finite number"),
            ("many digits", '{"value": ' + "9" * 5000 + "}", "Exceeds the limit"),
            ("a large whole number", '{"parameters": ' + "9" * 30 + "}", "'parameters' is a number too large"),
            ("text for a number", {**ROW, "value": "7.5"}, "'value' is \"7.5\", expected a finite number"),
            ("true for a number", {**ROW, "value": True}, "'value' is true"),
            ("a list for a number", {**ROW, "value": [7.5]}, r"'value' is \[7.5\]"),
            ("a perplexity below 0", {**ROW, "value": -1}, "'value' of perplexity is -1, expected a positive"),
            ("a number for text", {**ROW, "model": 3}, "'model' is 3, expected a text"),
            ("an object for text", {**ROW, "scheme": {}}, r"'scheme' is \{\}"),
            ("no parameters", {**ROW, "parameters": 0}, "'parameters' is 0, expected a whole number from 1 on"),
            ("half a parameter", {**ROW, "parameters": 0.5}, "'parameters' is 0.5"),
            ("an object in an unknown field", {**ROW, "new": {"a": 1}}, "'new' is"),
            ("a list of lists", {**ROW, "new": [[1]]}, "'new' is"),
            ("features of text", {**ROW, "features": ["3"]}, "'features' is"),
        ]
    ),
    Case("a damaged line to draw", rows("{", ROW), REDRAW, "line 2 of 'out/rows.jsonl' is damaged"),
    Case("a damaged line to trace", rows("{", ROW), TRACE, "line 2 of 'out/rows.jsonl' is damaged"),
    Case("a last line that is no row", rows({**ROW, "value": "7.5"}), SWEEP, "line 2 of 'out/rows.jsonl' is damaged"),
    Case("nothing to draw again", rows({**ROW, "value": None}), REDRAW, "'out' has no finished rows of it"),
    *(
        Case(
            f"{what} as the rows", instead_of("rows.jsonl", kind), typed, f"'out/rows.jsonl' is {said}; expected a file"
        )
        for typed in (SWEEP, TRACE, REDRAW)
        for what, kind, said in [("a folder", Path.mkdir, "a folder"), ("a pipe", os.mkfifo, "a pipe")]
    ),
    Case(
        "a link to a device as the rows",
        instead_of("rows.jsonl", lambda p: p.symlink_to("/dev/zero")),
        SWEEP,
        "a device",
    ),
    Case("a socket as the rows", instead_of("rows.jsonl", a_socket), SWEEP, "cannot read 'out/rows.jsonl'"),
    *(
        Case(f"{what} as the lock", instead_of(".lock", kind), typed, f"'out/.lock' is {said}; expected a file")
        for typed in (SWEEP, TRACE)
        for what, kind, said in [
            ("a folder", Path.mkdir, "a folder"),
            ("a pipe", os.mkfifo, "a pipe"),
            ("a socket", a_socket, "a socket"),
            ("a link", to_outside, "a link"),
            ("a link to nowhere", to_nowhere, "a link"),
            ("another file", twice, "another name of a file elsewhere"),
        ]
    ),
    *(
        Case(f"{what} as the trace's {end}", instead_of(f"trace.{end}", kind), TRACE, f"'out/trace.{end}' is {what}")
        for end in ("safetensors", "parquet")
        for what, kind in [("a folder", Path.mkdir), ("a pipe", os.mkfifo)]
    ),
    Case("a trace of another model", traced, TRACE, "'out' holds results of 'other/gpt2-0.1m', whose tables"),
    Case(
        "an ablation beside a trace of another model",
        traced,
        TRACE.replace("trace", "ablate", 1),
        "'out' holds results",
    ),
    Case("a file as the folder", lambda folder: (folder / "out").touch(), SWEEP, "cannot write to 'out' "),
    Case("a pipe as the folder", lambda folder: os.mkfifo(folder / "out"), TRACE, "cannot (read|write to) 'out"),
    Case("a link to nowhere as the folder", lambda folder: to_nowhere(folder / "out"), SWEEP, "cannot write to 'out' "),
    Case(
        "a device as the folder", nothing, SWEEP.replace("--out out", "--out /dev/null"), "cannot write to '/dev/null' "
    ),
    Case("a folder in a device", nothing, TRACE.replace("--out out", "--out /dev/null/out"), "'/dev/null/out"),
    Case(
        "too long a name",
        nothing,
        SWEEP.replace("out out", f"out {'o' * 300}"),
        r"cannot write to 'o+' \(File name too",
    ),
    Case("too long a name to trace", nothing, TRACE.replace("out out", f"out {'o' * 300}"), r"'o+/.*' \(File name too"),
    Case(
        "too long a name to redraw", nothing, REDRAW.replace("out out", f"out {'o' * 300}"), r"'o+/.*' \(File name too"
    ),
]

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
