"""Damaged and hostile files by the thousand: each is read or refused in one line, within ten seconds and 2 GB.

`python scripts/fuzz.py` tries files of every kind for five minutes and prints how many of each were read, refused, and
ended in anything else. A case that failed is made again, with its traceback, by its number:
`python scripts/fuzz.py --only config --case 17`.
"""

import copy
import json
import multiprocessing
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from outliers.errors import UserError

SECONDS = 10  # of a case, at most
MEMORY = 2e9  # bytes of the process that reads, at most
SMALL = Path(__file__).parent.parent / "outliers" / "models" / "pocket" / "gpt2-0.1m"
KEPT = Path(__file__).parent.parent / "results" / "kept" / "pocket"
OUTCOMES = ("read", "refused", "failed")

# Any of them in the place of any value of a JSON document.
SCALARS = (
    *(None, True, False, 0, -1, 1, 2, 63, 65, 10**5, 2**31, 2**63, 2**64, 10**9, 10**30, 0.5, -1e-9, 1e308),
    *(float("nan"), float("inf"), "", " ", "64", "null", "float64", "int4", "\0", "\ud800", "\u2028", "\x1b[2J"),
    *("..", "/etc/passwd", "../outside.safetensors", "x.bin", "C:\\x.safetensors", "kernels-community/flash-attn"),
    *([], {}, [[]], [None], {"": None}, "a" * 300, "gelu_newer", "sdpa", "gptq", "bitsandbytes", "llama", "mamba"),
)


class Target(NamedTuple):
    """A kind of file.

    make: puts sound files into a folder and returns the one to damage. damage: returns the damaged content of the
    file. read: reads the folder; it may raise UserError, and any other exception is a failure.
    """

    make: Callable[[Path], Path]
    damage: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path, random.Random], object]


# ---- damage --------------------------------------------------------------------------------------------------------


def in_bytes(content: bytes, choose: random.Random) -> bytes:
    """Flip, cut out or insert some bytes, or cut off the end."""
    damaged = bytearray(content)
    for _ in range(choose.choice([1, 1, 2, 8])):
        place, length = choose.randrange(len(damaged) + 1), choose.choice([1, 4, 64])
        match choose.randrange(4):
            case 0:
                damaged[place : place + length] = choose.randbytes(length)
            case 1:
                del damaged[place : place + length]
            case 2:
                damaged[place:place] = choose.choice([b"\0" * length, b"[" * 5000, b"\xff", b"\xef\xbb\xbf", b"\n"])
            case 3:
                del damaged[max(place, len(damaged) // 2) :]
    return bytes(damaged)


def in_json(content: bytes, choose: random.Random) -> bytes:
    """Replace, remove, move or repeat some values of a JSON document."""
    document = json.loads(content)
    for _ in range(choose.choice([1, 1, 1, 2, 4])):
        holders = [holder for holder in _holders(document) if holder]
        if not holders:
            break
        _change(choose.choice(holders), choose)
    text = json.dumps(document)
    if choose.random() < 0.05:
        text = re.sub(r"\d+", "9" * 5000, text, count=1)
    return text.encode()


def _holders(value) -> list:
    """Return all lists and mappings of a JSON document, itself first."""
    if not isinstance(value, list | dict):
        return []
    inside = value if isinstance(value, list) else value.values()
    return [value, *(holder for one in inside for holder in _holders(one))]


def _change(holder: list | dict, choose: random.Random) -> None:
    place = choose.choice(range(len(holder)) if isinstance(holder, list) else list(holder))
    match choose.randrange(5):
        case 0 | 1:
            holder[place] = copy.deepcopy(choose.choice(SCALARS))
        case 2:
            del holder[place]
        case 3:
            other = choose.choice(range(len(holder)) if isinstance(holder, list) else list(holder))
            holder[place], holder[other] = holder[other], holder[place]
        case 4 if isinstance(holder, dict):
            holder[choose.choice(["", "x", f"{place}.0", "__metadata__", "auto_map"])] = copy.deepcopy(holder[place])
        case 4:
            holder.insert(0, copy.deepcopy(holder[place]))


def in_json_or_bytes(content: bytes, choose: random.Random) -> bytes:
    """Damage mostly the values of a JSON document, sometimes its bytes."""
    return (in_json if choose.random() < 0.8 else in_bytes)(content, choose)


def in_a_line(content: bytes, choose: random.Random) -> bytes:
    """Damage some lines of JSON lines, or their bytes."""
    if choose.random() < 0.3:
        return in_bytes(content, choose)
    lines = content.splitlines(keepends=True)
    for _ in range(choose.choice([1, 3])):
        number = choose.randrange(len(lines))
        lines[number] = in_json(lines[number], choose) + choose.choice([b"\n", b"\n", b"\n\n", b""])
    return b"".join(lines)


def in_safetensors(content: bytes, choose: random.Random) -> bytes:
    """Damage the header of a safetensors file, or the length that the file states for it."""
    length = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + length], content[8 + length :]
    header = in_json_or_bytes(header, choose)
    said = len(header) if choose.random() < 0.9 else choose.choice([0, 1, length, 2**31, 2**63, 2**64 - 1])
    return said.to_bytes(8, "little") + header + rest


def in_header(content: bytes, choose: random.Random) -> bytes:
    """Damage the first bytes of a GGUF file, which hold sizes, types, names and counts."""
    end = choose.choice([32, 200, 1000, 4000])
    damaged = bytearray(content)
    for _ in range(choose.choice([1, 1, 2, 6])):
        place = choose.randrange(min(end, len(damaged)))
        value = choose.choice([0, 1, 2, 8, 9, 12, 255, 2**31, 2**63, 2**64 - 1, choose.getrandbits(64)])
        size = choose.choice([1, 4, 8])
        damaged[place : place + size] = value.to_bytes(8, "little")[:size]
    return bytes(damaged) if choose.random() < 0.9 else in_bytes(content, choose)


# ---- files and their readers; long imports are late, for the process that only watches -------------------------------


def model_folder(file: str) -> Callable[[Path], Path]:
    """Return a function that makes the folder of a small model, of which one file is to be damaged."""

    def make(folder: Path) -> Path:
        return shutil.copytree(SMALL, folder / "m") / file

    return make


def sharded(folder: Path) -> Path:
    """Make the folder of a small model in two files with an index, and return the index."""
    from safetensors.torch import load_file, save_file

    whole = shutil.copytree(SMALL, folder / "m") / "model.safetensors"
    tensors, index = load_file(whole), {}
    whole.unlink()
    for number, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({key: tensors[key] for key in part}, whole.with_name(name), {"format": "pt"})
        index |= dict.fromkeys(part, name)
    file = whole.with_name("model.safetensors.index.json")
    file.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    return file


def gguf_file(folder: Path) -> Path:
    """Make a GGUF file of a LLaMA with one layer and its tokenizer, as llama.cpp writes them."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    (folder / "m").mkdir(parents=True)
    file = folder / "m" / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    vocabulary = [*sorted(ByteLevel.alphabet()), "ab", "<|end|>"]
    numbers = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
    numbers |= {"head_count": 2, "head_count_kv": 2}
    for field, value in numbers.items():
        getattr(writer, f"add_{field}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * len(vocabulary))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    shapes = {"token_embd": (258, 32), "output_norm": (32,), "output": (258, 32)}
    shapes |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.full(shape, 0.01, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def load_a_model(folder: Path, choose: random.Random) -> None:
    """Load a model by one of the three loaders, drawn at random."""
    import outliers
    from outliers.models.stream import stream_model

    load = choose.choice([outliers.load_model, stream_model, outliers.load_int8])
    model = load(str(folder / "m"))
    if load is stream_model:
        from outliers.models.anatomy import decoder_layers

        for number in range(len(decoder_layers(model))):
            with model.stream.layer(model, number):
                pass


def load_a_tokenizer(folder: Path, _choose: random.Random) -> None:
    """Load a tokenizer and tokenize a text with it."""
    import outliers

    outliers.load_text("sample", outliers.load_tokenizer(str(folder / "m")), 16, 2)


def read_text(folder: Path, choose: random.Random) -> None:
    """Read some blocks of a text, or more than it has."""
    import outliers

    tokenizer = outliers.load_tokenizer("pocket/gpt2-0.1m")
    outliers.load_text(str(folder / "text.jsonl"), tokenizer, 16, choose.choice([1, 40, 10_000]))


def text_file(folder: Path) -> Path:
    """Make a text of forty documents."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"text": f"Document {number} says “hello”.\nAgain.", "url": None}) for number in range(40)]
    (folder / "text.jsonl").write_text("\n".join(rows) + "\n")
    return folder / "text.jsonl"


def rows_file(name: str) -> Callable[[Path], Path]:
    """Return a function that makes a file of kept rows of an artefact of the paper."""

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        lines = (KEPT / name / "rows.jsonl").read_bytes().splitlines(keepends=True)
        (folder / "rows.jsonl").write_bytes(b"".join(lines[:120]))
        return folder / "rows.jsonl"

    return make


def show_rows(*names: str) -> Callable[[Path, random.Random], None]:
    """Return a function that reads rows, and shows them as one of some artefacts of the paper."""

    def read(folder: Path, choose: random.Random) -> None:
        import matplotlib.pyplot as plt

        from outliers.paper.report import experiments_of, shown_section
        from outliers.runs.run import stored_rows

        (experiment,) = experiments_of(f"pocket/{choose.choice(names)}")
        if rows := stored_rows(experiment, folder):
            shown_section(experiment, folder, rows)
        plt.close("all")

    return read


def trace_file(folder: Path) -> Path:
    import torch

    import outliers

    folder.mkdir(parents=True, exist_ok=True)
    blocks = torch.arange(64).view(2, 32)
    outliers.trace(outliers.load_model("pocket/gpt2-0.1m"), blocks, alpha=3.0).save(folder / "trace")
    return folder / "trace.safetensors"


def load_a_trace(folder: Path, _choose: random.Random) -> None:
    """Load a trace and make all tables that a report makes of it."""
    import outliers

    trace = outliers.Trace.load(folder / "trace")
    for table in (trace.features, trace.outlier_features, trace.hidden_states, trace.massive_activations):
        table()
    trace.largest_values(by="layer")
    trace.attention_sinks()
    trace.sink_tokens()


EXPERIMENT = b"""name: mine
models: [pocket/gpt2-0.1m, pocket/gpt2-0.5m]
schemes: [fp32, absmax, llm.int8]
text: sample
block: 64
blocks: 2
alpha: 6.0
draws: 1
"""


def experiment_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.yaml").write_bytes(EXPERIMENT)
    return folder / "mine.yaml"


def read_experiment(folder: Path, _choose: random.Random) -> None:
    """Read the experiment file of a sweep."""
    from outliers.commands.sweep import Sweep
    from outliers.config.files import specify

    specify(str(folder / "mine.yaml"), {}, "pocket/table1", Sweep)


def in_yaml(content: bytes, choose: random.Random) -> bytes:
    """Damage an experiment file with hostile values, aliases and nesting."""
    if choose.random() < 0.3:
        return in_bytes(content, choose)
    lines = content.decode().splitlines()
    for _ in range(choose.choice([1, 2])):
        number = choose.randrange(len(lines))
        field = lines[number].partition(":")[0]
        odd = ["*a", "&a [*a]", "!!python/object:os.system {}", "[" * 3000, "2026-11-22", "0x10", "1e999", "9" * 5000]
        value = choose.choice([*odd, *(json.dumps(scalar) for scalar in SCALARS)])
        lines[number] = f"{choose.choice([field, field, 'extends', '<<'])}: {value}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


TARGETS = {
    "safetensors": Target(model_folder("model.safetensors"), in_safetensors, load_a_model),
    "index": Target(sharded, in_json_or_bytes, load_a_model),
    "config": Target(model_folder("config.json"), in_json_or_bytes, load_a_model),
    "generation": Target(model_folder("generation_config.json"), in_json_or_bytes, load_a_model),
    "gguf": Target(gguf_file, in_header, load_a_model),
    "gguf-tokenizer": Target(gguf_file, in_header, load_a_tokenizer),
    "tokenizer": Target(model_folder("tokenizer.json"), in_json_or_bytes, load_a_tokenizer),
    "tokenizer-config": Target(model_folder("tokenizer_config.json"), in_json_or_bytes, load_a_tokenizer),
    "text": Target(text_file, in_a_line, read_text),
    "experiment": Target(experiment_file, in_yaml, read_experiment),
    "trace": Target(trace_file, in_safetensors, load_a_trace),
    **{
        f"rows-{name}": Target(rows_file(name), in_a_line, show_rows(name))
        for name in ("table1", "table3", "table5", "table6", "figure1")
    },
    "rows-table4": Target(
        rows_file("table4"), in_a_line, show_rows("table4", "figure3a", "figure3b", "figure4a", "figure4b")
    ),
}


# ---- running -------------------------------------------------------------------------------------------------------


def try_case(name: str, number: int, sound: Path, folder: Path) -> tuple[str, str]:
    """Damage the file of a case in a copy of its sound folder and read it; return the outcome and the message.

    sound: the folder that `sound_folder` made.
    """
    target, choose = TARGETS[name], random.Random(f"{name} {number}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    file = folder / (sound / "damaged").read_text()
    file.write_bytes(target.damage(file.read_bytes(), choose))
    try:
        target.read(folder, choose)
    except UserError as error:
        said = str(error)
        return ("refused", said) if said.isprintable() else ("failed", f"not one line: {said!r}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # what it is, is what we look for
        return "failed", traceback.format_exc()
    return "read", ""


def sound_folder(name: str, folder: Path) -> Path:
    """Make a folder with the sound files of a target, and note in it which one is to be damaged."""
    file = TARGETS[name].make(folder)
    (folder / "damaged").write_text(str(file.relative_to(folder)))
    return folder


def serve(pipe, temporary: str) -> None:
    """Try the cases that come through a pipe, in a process of its own."""
    place = Path(temporary)
    while True:
        name, number = pipe.recv()
        sound = place / name
        if not sound.exists():
            sound_folder(name, sound)
        pipe.send("begin")
        pipe.send(try_case(name, number, sound, place / "case"))


class Reader:
    """A process that tries cases; a new one replaces it after it was too slow or too large."""

    def __init__(self, temporary: str):
        self.temporary = temporary
        self.process = None

    def try_case(self, name: str, number: int) -> tuple[str, str]:
        """Try a case; return its outcome and the message."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, other = context.Pipe()
            self.process = context.Process(target=serve, args=(other, self.temporary), daemon=True)
            self.process.start()
            for warm in TARGETS:  # imports are no part of a case
                self._ask(warm, -1, 300)
        return self._ask(name, number, SECONDS)

    def _ask(self, name: str, number: int, seconds: float) -> tuple[str, str]:
        self.pipe.send((name, number))
        try:
            self.pipe.recv()
            end = time.monotonic() + seconds
            while not self.pipe.poll(0.05):
                if time.monotonic() > end:
                    return self._kill(f"no answer after {seconds} s")
                if psutil.Process(self.process.pid).memory_info().rss > MEMORY:
                    return self._kill(f"more than {MEMORY / 1e9:g} GB")
            return self.pipe.recv()
        except (EOFError, OSError, psutil.Error):
            return self._kill("the process died")

    def _kill(self, reason: str) -> tuple[str, str]:
        self.process.kill()
        self.process.join()
        self.process = None
        return "failed", reason


def fuzz(names: list[str], seconds: float, first: int) -> int:
    """Try cases of each target in turn; print counts and failures, and return how many failed."""
    counts, end, number, failed = Counter(), time.monotonic() + seconds, first, []
    with tempfile.TemporaryDirectory() as temporary:
        reader = Reader(temporary)
        while time.monotonic() < end:
            for name in names:
                outcome, said = reader.try_case(name, number)
                counts[name, outcome] += 1
                if outcome == "failed":
                    failed.append((name, number))
                    print(f"--only {name} --case {number}: {said.strip().splitlines()[-1]}", file=sys.stderr)
            number += 1
        if reader.process:
            reader.process.kill()
    print("kind".ljust(18), *(outcome.rjust(8) for outcome in OUTCOMES))
    for name in [*names, "together"]:
        of = names if name == "together" else [name]
        print(name.ljust(18), *(str(sum(counts[one, outcome] for one in of)).rjust(8) for outcome in OUTCOMES))
    return len(failed)


def main() -> None:
    options = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=5.0, help="how long")
    options.add_argument("--only", choices=TARGETS, help="files of one kind")
    options.add_argument("--first", type=int, default=0, help="number of the first case")
    options.add_argument("--case", type=int, help="one case alone, of --only, with all that it says")
    given = options.parse_args()
    if given.case is not None and given.only:
        with tempfile.TemporaryDirectory() as temporary:
            sound = sound_folder(given.only, Path(temporary) / "sound")
            print("\n".join(try_case(given.only, given.case, sound, Path(temporary) / "case")))
        return
    sys.exit(min(1, fuzz([given.only] if given.only else list(TARGETS), 60 * given.minutes, given.first)))


if __name__ == "__main__":
    main()
