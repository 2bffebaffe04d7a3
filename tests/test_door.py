"""Mistakes that a user, a file or a machine makes, each in a line: what is there, what is typed, what the answer says.

To add a case, add a line to the table of its kind. Each is run as a command in a folder of its own; it must end within
ten seconds with exit code 2 and one line, and leave nothing behind.
"""

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

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

CONFIGURATIONS: list[Case] = [
    Case("a model of no known kind", configured(model_type="gpt9"), f"trace m {SMALL}", "cannot load 'm': .*gpt9"),
]

# ---- text ----------------------------------------------------------------------------------------------------------

TEXTS: list[Case] = []

# ---- disks and results ---------------------------------------------------------------------------------------------

RESULTS: list[Case] = []

# ---- options and environment ---------------------------------------------------------------------------------------

POCKET_MODEL = "pocket/gpt2-0.1m"
SWEEP = f"sweep --model {POCKET_MODEL} --scheme fp32"
DEEP = 2000  # brackets, one in the other


def written(text: str | bytes, name: str = "e.yaml") -> Callable[[Path], None]:
    """An experiment file."""
    content = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(content) and None


def fields(**values: str) -> Callable[[Path], None]:
    """An experiment file with a model and some fields, each as YAML has it."""
    return written("".join(f"{name}: {value}\n" for name, value in {"models": f"[{POCKET_MODEL}]", **values}.items()))


def bomb(merged: bool = False) -> Callable[[Path], None]:
    """A file of few bytes with 9**12 values."""
    if merged:
        lines = [f"a{n}: &a{n} {{<<: [{', '.join(9 * [f'*a{n - 1}'])}]}}" for n in range(1, 13)]
        return written("\n".join(["a0: &a0 {k: 1}", *lines]))
    lines = [f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]" for n in range(1, 13)]
    return written("\n".join(["a0: &a0 [x]", *lines, "models: *a12"]))


def both(*makers: Callable[[Path], None]) -> Callable[[Path], None]:
    """Several things."""
    return lambda folder: [make(folder) for make in makers] and None


def pipe(name: str) -> Callable[[Path], None]:
    """A pipe into which nobody writes."""
    return lambda folder: os.mkfifo(folder / name)


def refused(field: str, given: str, answer: str) -> Case:
    """A field of a file with a value that it cannot have."""
    return Case(f"{field}: {given:.30}", fields(**{field: given}), "sweep e.yaml", f"field '{field}.*': .*{answer}")


def broken(factor: float) -> Callable[[Path], None]:
    """A model in the folder `m` that is sure of what is wrong."""

    def make(folder: Path) -> None:
        file = shutil.copytree(POCKET / "gpt2-0.1m", folder / "m") / "model.safetensors"
        tensors = load_file(file)
        tensors["transformer.ln_f.weight"] *= factor
        save_file(tensors, file, {"format": "pt"})

    return make


OPTIONS: list[Case] = [
    *(
        Case(f"a broken model, {typed}", broken(1e4), f"{typed} {SMALL}", answer)
        for typed, answer in (
            ("sweep --model m --scheme fp32", r"'m' under fp32: the loss is \d+,\d{3} nats a token"),
            ("sweep --model m --scheme llm.int8 --stream", r"'m' under llm.int8: the loss is \d+,\d{3} nats a token"),
            ("emergence --model m", r"'m': the loss is \d+,\d{3} nats a token"),
        )
    ),
    Case("no such command's model", nothing, f"trace nowhere/at/all {SMALL}", "model folder 'nowhere/at/all'"),
    # numbers
    Case("a negative seed", nothing, f"ablate {POCKET_MODEL} --seed -1", "seed is -1; expected a whole number from 0"),
    Case("a seed of 70 bits", nothing, f"ablate {POCKET_MODEL} --seed {2**70}", f"seed is {2**70}; expected"),
    Case("very many controls", nothing, f"ablate {POCKET_MODEL} --controls 100000000", "100000000 controls; expected"),
    Case("negative controls", nothing, f"ablate {POCKET_MODEL} --controls -1", "-1 controls; expected at least 10"),
    *(
        Case(f"alpha {value}", nothing, f"{command} --alpha {value}", "field 'alpha': expected a positive number")
        for value in ("nan", "inf", "-inf", "1e400", "-0", "1e-50", "1e39")
        for command in (f"trace {POCKET_MODEL}", SWEEP)
    ),
    Case("no draws", nothing, f"{SWEEP} --draws 0", "field 'draws': Input should be greater than 0, got 0"),
    Case("draws without an end", nothing, f"{SWEEP} --draws 1000000000", "field 'draws': .*less than or equal"),
    Case("a block of 10**18", nothing, f"{SWEEP} --block {10**18}", "field 'block': .*less than or equal to 10000000"),
    Case(
        "10**18 blocks with a first token", nothing, f"{SWEEP} --bos --blocks {10**18}", "field 'blocks': .*less than"
    ),
    Case("a million blocks", nothing, f"{SWEEP} --bos --blocks 1000000", "text 'sample' is too short"),
    Case("a number of 5,000 digits", nothing, f"{SWEEP} --block {'9' * 5000}", "Invalid value for '--block'"),
    Case("a word for a number", nothing, f"{SWEEP} --block ten", "Invalid value for '--block'"),
    Case("a fraction for a number", nothing, f"{SWEEP} --blocks 1.5", "Invalid value for '--blocks'"),
    Case("a limit past all integers", nothing, f"zeroshot --model {POCKET_MODEL} --limit {10**20}", "field 'limit'"),
    Case("a batch of nobody", nothing, f"latency {POCKET_MODEL} --batch 0", "field 'batches.0': .*greater than 0"),
    Case("a batch past all memory", nothing, f"latency {POCKET_MODEL} --bos --batch {10**12}", "field 'batches.0'"),
    Case("an endless prompt", nothing, f"latency {POCKET_MODEL} --prompt {10**12}", "field 'prompt'"),
    Case("endless tokens", nothing, f"latency {POCKET_MODEL} --tokens {10**12}", "field 'tokens'"),
    Case("endless repeats", nothing, f"latency {POCKET_MODEL} --repeats {10**12}", "field 'repeats'"),
    Case("a headroom of nan", nothing, f"memory {POCKET_MODEL} --headroom nan", "field 'headroom': .*finite number"),
    Case("an infinite headroom", nothing, f"memory {POCKET_MODEL} --headroom inf", "field 'headroom': .*finite number"),
    Case("an endless context", nothing, f"memory {POCKET_MODEL} --context {10**20}", "field 'context'"),
    Case("GPUs without an end", nothing, f"memory {POCKET_MODEL} --gpu {'9' * 5000}x24", "hardware '9+.*'; expected a"),
    Case("GPUs of inf", nothing, f"memory {POCKET_MODEL} --gpu 8xinf", "hardware '8xinf'; expected a number of GPUs"),
    Case("GPUs of 0", nothing, f"memory {POCKET_MODEL} --gpu 8x0", "field 'hardware.0.gigabytes': .*greater than 0"),
    Case("no GPUs", nothing, f"memory {POCKET_MODEL} --gpu 0x8", "field 'hardware.0.gpus': .*greater than 0"),
    *(
        Case(f"memory {value}", nothing, f"{SWEEP} --stream --memory {value}", "field 'memory': ")
        for value in ("0", "-1", "1e99GB", "∞", "²", "nan", f"{'9' * 400}GB", f"{'9' * 5000}", "0.1kB")
        if value != "0.1kB"
    ),
    *(
        Case(f"feature {value:.12}", nothing, f"ablate {POCKET_MODEL} --features {value} {SMALL}", answer)
        for value, answer in (
            ("-1", "feature -1 is out of range"),
            (str(10**30), f"feature {10**30} is out of range"),
            ("9" * 5000, "field 'features.0': "),
            ("1.5", "field 'features.0': "),
            ("nan", "field 'features.0': "),
        )
    ),
    # names and texts
    *(
        Case(f"an empty {typed.split()[-2]}", nothing, typed, r"an argument is empty \(''\)")
        for typed in (
            *(
                f"{SWEEP} {option} ''"
                for option in ("--text", "--out", "--model", "--revision", "--scheme", "--device")
            ),
            f"latency {POCKET_MODEL} --batch ''",
            f"trace {POCKET_MODEL} --memory ''",
        )
    ),
    Case("an empty model", nothing, "trace ''", r"an argument is empty \(''\)"),
    Case(
        "bytes that are no UTF-8", nothing, f"{SWEEP} --text a\udcffb", r"argument 'a\\udcffb' holds bytes that are no"
    ),
    Case("a terminal's escapes", nothing, f"{SWEEP} --out 'a\x1b[31mb'", r"argument 'a\\x1b\[31mb' holds bytes that"),
    Case("a name of two lines", nothing, "trace 'a\nb'", "argument 'a b' holds bytes that are no text"),
    Case(
        "a model's name too long", nothing, f"trace {'m' * 300}", "field 'model': expected names of at most 255 bytes"
    ),
    Case("a text's name too long", nothing, f"{SWEEP} --text {'t' * 300}.txt", "field 'text': expected names of at"),
    Case("a path too long", nothing, f"{SWEEP} --text {'t/' * 3000}x.txt", "field 'text': expected names of at"),
    Case("a revision too long", nothing, f"{SWEEP} --revision {'r' * 300}", "field 'revision': expected names of at"),
    Case("an experiment's name too long", nothing, f"sweep {'é' * 200}.yaml", "experiment file '.*' cannot be read"),
    Case("a folder's name too long", nothing, f"{SWEEP} {SMALL} --out {'o' * 300}", "cannot write to 'o+.*'"),
    Case("blanks for a scheme", nothing, f"{SWEEP} --scheme '  '", "unknown scheme '  '"),
    Case("no option of that name", nothing, f"{SWEEP} --modle x", "No such option: --modle"),
    # experiment files
    refused("name", "../up", "expected letters, digits and any of"),
    refused("name", "..", "expected letters, digits and any of"),
    refused("name", "''", "expected text in one line, got ''"),
    refused("name", "é" * 200, "expected names of at most 255 bytes, got 'é+…"),
    refused("name", '"a\\nb"', r"expected text in one line, got 'a\\nb'"),
    refused("name", "2024-01-01", "valid string, got datetime.date"),
    refused("models", "[]", "at least 1 item"),
    refused("models", "['']", "expected text in one line, got ''"),
    refused("models", '["a\\0b"]', "expected text in one line"),
    refused("models", "[no]", "valid string, got False"),
    refused("text", '"\\e[2J"', "expected text in one line"),
    refused("text", "{a: [1, 2]}", "valid string, got {"),
    refused("block", ".nan", "finite number, got nan"),
    refused("block", ".inf", "finite number, got inf"),
    refused("block", "true", "expected a number, got True"),
    refused("alpha", "yes", "expected a number, got True"),
    refused("block", f"0x{'f' * 5000}", "got a number of too many digits"),
    refused("memory", "1e300", "expected a size such as 500MB or 4GB"),
    refused("schemes", f"[{'x' * 20000}]", "at most 255 bytes, got 'x{79}…$"),
    Case(
        "a file that extends a folder", fields(extends="."), "sweep e.yaml", "'extends' is '.'; expected another file"
    ),
    Case("one that extends nothing", fields(extends="''"), "sweep e.yaml", "'extends' is ''; expected another file"),
    Case("one that extends a list", fields(extends="[a]"), "sweep e.yaml", r"'extends' is \['a'\]; expected another"),
    Case("one that extends itself", fields(extends="e.yaml"), "sweep e.yaml", "'e.yaml' refers to itself in 'extends'"),
    Case(
        "a ring of files",
        both(fields(extends="f.yaml"), written("extends: ./e.yaml", "f.yaml")),
        "sweep e.yaml",
        "'e.yaml' refers to itself in 'extends'",
    ),
    Case(
        "one that extends a pipe", both(fields(extends="p.yaml"), pipe("p.yaml")), "sweep e.yaml", "'p.yaml' is no file"
    ),
    Case("a pipe", pipe("e.yaml"), "sweep e.yaml", "'e.yaml' is no file of at most 1 MB"),
    Case("a folder", lambda folder: (folder / "e.yaml").mkdir(), "sweep e.yaml", "'e.yaml' is no file of at most 1 MB"),
    Case(
        "a link to a device",
        lambda folder: (folder / "e.yaml").symlink_to("/dev/zero"),
        "sweep e.yaml",
        "'e.yaml' is no file of at most 1 MB",
    ),
    Case("one with a zero in a name", fields(extends=r'"a\0.yaml"'), "sweep e.yaml", "cannot be read|does not exist"),
    Case("a huge file", written("#" * 1_100_000), "sweep e.yaml", "'e.yaml' is no file of at most 1 MB"),
    Case("a bomb of aliases", bomb(), "sweep e.yaml", "'e.yaml' cannot be read: more than 10000 values"),
    Case("a bomb of merged aliases", bomb(merged=True), "report e.yaml", "cannot be read: more than 10000 values"),
    Case("an alias to itself", written("models: &a [*a]"), "sweep e.yaml", "'e.yaml' refers to itself by an alias"),
    Case(
        "brackets in brackets", written("[" * DEEP), "sweep e.yaml", "refers to itself by an alias, or nests too deep"
    ),
    Case("a tab", written("models:\n\t- a\n"), "sweep e.yaml", "'e.yaml' cannot be read: .*line 2, column 1"),
    Case(
        "a field that stands twice", fields(block="3\nblock: 4"), "sweep e.yaml", "line 3: field 'block' stands twice"
    ),
    Case(
        "one that stands twice inside",
        fields(hardware="{a: 1, a: 2}"),
        "report e.yaml",
        "line 2: field 'a' stands twice",
    ),
    Case("a list for a name", written("? [a]\n: 1\n"), "sweep e.yaml", "a field's name is no text"),
    Case("a number for a name", written("1: 2"), "sweep e.yaml", "holds no fields"),
    Case("a number of 5,000 digits in a file", fields(block="9" * 5000), "sweep e.yaml", "'e.yaml' cannot be read: "),
    Case("no date", fields(name="2024-13-45"), "sweep e.yaml", "'e.yaml' cannot be read: month must be in"),
    *(
        Case(f"a value {tag}", fields(block=tag), "sweep e.yaml", "'e.yaml' cannot be read|field 'block'")
        for tag in ("!!int ''", "!!bool maybe", "!!timestamp x", "!!float ''", "!!binary '…'", "!!set {a}", "!x y")
    ),
    Case(
        "a tag that calls",
        fields(block="!!python/object/apply:os.system ['touch here']"),
        "sweep e.yaml",
        "could not determine a constructor",
    ),
    Case("bytes for a file", written(b"models: [\xff\xfe]"), "sweep e.yaml", "'e.yaml' cannot be read: .*utf-8"),
    Case("UTF-16", written("models: [a]".encode("utf-16")), "sweep e.yaml", "'e.yaml' cannot be read: .*utf-8"),
    Case("control characters in a file", written("models: [\x1b]"), "sweep e.yaml", "'e.yaml' cannot be read: "),
    Case("a mark of the byte order and no more", written("\ufeff"), "sweep e.yaml", "'e.yaml' holds no fields"),
    Case("two documents", written("a: 1\n---\nb: 2\n"), "sweep e.yaml", "expected a single document"),
    Case("nothing", written(""), "sweep e.yaml", "'e.yaml' holds no fields"),
    Case("null", written("null"), "report e.yaml", "'e.yaml' holds no fields"),
    Case("a field too many", fields(modles="1"), "sweep e.yaml", "e.yaml, line 2, unknown field 'modles'"),
    Case(
        "a field too many with a long name", fields(**{"x" * 100: "1"}), "sweep e.yaml", "e.yaml, line 2, unknown field"
    ),
    Case(
        "a layer without features",
        written("shows: table5\ndimensions: [0x0]"),
        "report e.yaml",
        "field 'dimensions.0.*': .*expected features and outputs from 1 to 131072|greater than 0",
    ),
    Case("a layer too large", written("shows: table5\ndimensions: [9999999]"), "report e.yaml", "field 'dimensions.0"),
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
    command, *arguments = shlex.split(case.typed)
    code, out, err = call(monkeypatch, capsys, *arguments, command=command)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert re.search(case.answer, err), err
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"
