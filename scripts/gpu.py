"""All that waits for an NVIDIA GPU, in at most eight minutes and without network.

    make gpu

Runs `SECTIONS`, each in a process of its own: the tests of kernels and graphs, and what layers, a trace, schemes and
decoding cost, on models of OPT-1.3B's shape whose weights are drawn from a seed. A section leaves NAME.json, its rows
with versions and code, and their table NAME.md in results/kept/gpu/DEVICE/. One that is there of the same code is not
run again, so that a run which was stopped goes on. A section that fails or takes too long leaves nothing, and the
others go on. Exits with 1 if one failed, and with 2 if there is no GPU.

By what was measured on an H100 at 5a5d541, layers take about 30 seconds, trace, schemes and decoding 40 each. A test
that asks a GPU for many shapes waits for Triton's compiler, for most of the time.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate
from transformers import AutoModelForCausalLM, OPTConfig, PreTrainedModel

import outliers
from outliers.errors import UserError
from outliers.files import write_whole
from outliers.metrics.graphs import capture
from outliers.metrics.latency import latency, timed
from outliers.metrics.linear_layer import ways
from outliers.models.decoder import run_decoder
from outliers.subjects.provenance import environment, hash_files
from outliers.terminal.command import reporting_mistakes

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results" / "kept" / "gpu"
# Tests that skip, or run otherwise, where there is no GPU: all that compare a Triton kernel with the reference.
TESTS = sorted(
    file.relative_to(ROOT).as_posix()
    for file in (ROOT / "tests").glob("*/test_*.py")
    if re.search(r"\bHAS_GPU\b", file.read_text(encoding="utf-8"))
)
WAYS = {"16 bits": "float16", "vector-wise": "vector-wise", "LLM.int8()": "LLM.int8()", "bitsandbytes": "bitsandbytes"}
PEER = "bitsandbytes"  # which waits for the device, and no graph can hold
CALLS = 20  # of a layer at once
ROUNDS = 5  # of which the shortest counts
SCHEMES = (
    *("absmax", "zeropoint", "absmax-row", "absmax-vector", "absmax-row-decomp", "llm.int8", "llm.int8-zeropoint"),
    *("w4a8", "fp8-e4m3", "absmax+hadamard"),
)


class Size(NamedTuple):
    """The sizes of the measurements.

    layers: tokens, features and outputs of each. model: fields of its configuration. blocks: their number, and tokens
    of each. decoded: tokens of the prompt, and tokens that follow it.
    """

    layers: tuple[tuple[int, int, int], ...]
    model: dict
    blocks: tuple[int, int]
    decoded: tuple[int, int]


SIZE = Size(
    layers=(
        *((512, 768, 3072), (512, 2048, 8192), (512, 4096, 4096), (512, 4096, 16384), (512, 12288, 49152)),
        *((2048, 4096, 4096), (8192, 4096, 16384), (16, 4096, 4096), (1, 4096, 4096), (1, 4096, 16384)),
    ),
    model={"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    blocks=(8, 2048),
    decoded=(128, 64),
)


def run_tests(_device: torch.device, _size: Size) -> list[dict]:
    """Run the tests of the GPU but the slow ones; return the failed ones, and a summary."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "not slow and not nightly", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return [{"exit_code": done.returncode, "summary": lines[-1] if lines else done.stderr[-400:], "failed": failed}]


@torch.inference_mode()
def time_layers(device: torch.device, size: Size) -> list[dict]:
    """Return the microseconds of each way to compute a layer: of a call with its launches, and in a replayed graph."""
    rows = []
    for shape in size.layers:
        row = {"tokens × features × outputs": " × ".join(map(str, shape))}
        for way, run in ways(*shape, device, torch.float16).items():
            if way in WAYS:
                calls = partial(repeat, run)
                row[f"{WAYS[way]}, with launches"] = 1e3 * least_time(calls, device) / CALLS
                if way != PEER:
                    row[WAYS[way]] = 1e3 * least_time(in_graph(calls, device), device) / CALLS
        rows.append(row)
    return rows


def repeat(run: Callable[[], object]) -> None:
    for _ in range(CALLS):
        run()


def in_graph(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays the call as a CUDA graph; on a CPU the call itself."""
    return capture(run) if device.type == "cuda" else run


def least_time(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of the fastest of some rounds, after one that is not timed."""
    return min([timed(run, device)[0] for _ in range(1 + ROUNDS)][1:])


def model_and_blocks(device: torch.device, size: Size) -> tuple[PreTrainedModel, torch.Tensor]:
    """Return a model in float16 drawn from a seed, with some large features, and blocks of random tokens."""
    torch.manual_seed(0)
    config = OPTConfig(word_embed_proj_dim=size.model["hidden_size"], **size.model)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    norms = [module for name, module in model.named_modules() if name.endswith("self_attn_layer_norm")]
    for norm in norms:
        norm.weight.data[:3] = 30
    return model, torch.randint(4, config.vocab_size, size.blocks)


@torch.inference_mode()
def time_trace(device: torch.device, size: Size) -> list[dict]:
    """Return the milliseconds of a trace and a perplexity, also relative to a pass of the decoder alone."""
    model, blocks = model_and_blocks(device, size)
    runs = {
        "decoder": lambda: [None for _ in run_decoder(model, blocks)],
        "perplexity": lambda: outliers.perplexity(model, blocks),
        "trace": lambda: outliers.trace(model, blocks),
    }
    return shares({name: least_time(run, device) for name, run in runs.items()})


def time_schemes(device: torch.device, size: Size) -> list[dict]:
    """Return the milliseconds of a perplexity under each scheme, also relative to the exact model."""
    model, blocks = model_and_blocks(device, size)
    times = {"exact": least_time(lambda: outliers.perplexity(model, blocks), device)}
    for scheme in SCHEMES:
        with outliers.variant(scheme).on(model) as changed:
            times[scheme] = least_time(lambda changed=changed: outliers.perplexity(changed, blocks), device)
    return shares(times)


def time_decoding(device: torch.device, size: Size) -> list[dict]:
    """Return the milliseconds of a prefill and of a decode step of one sequence, exact and in int8."""
    model, blocks = model_and_blocks(device, size)
    prompt, tokens = size.decoded
    rows = []
    for name in ("exact", "llm.int8", "absmax-vector"):
        served = model if name == "exact" else outliers.quantize(model, name, keep="int8")
        timings = latency(served, blocks[:1, :prompt], tokens, 2)
        rows.append({"model": name, "prefill": min(timings.prefills), "step": min(timings.per_token)})
    return rows


def shares(times: dict[str, float]) -> list[dict]:
    """Return a row for each run, with its milliseconds, and its multiple of the first run."""
    first = next(iter(times.values()))
    return [{"run": name, "milliseconds": spent, "times": spent / first} for name, spent in times.items()]


# By name: what makes the rows, and the seconds after which it counts as hung. All together are eight minutes.
SECTIONS = {
    "layers": (time_layers, 60),
    "trace": (time_trace, 60),
    "schemes": (time_schemes, 70),
    "decoding": (time_decoding, 60),
    "tests": (run_tests, 220),
}


def about(device: torch.device) -> dict:
    """Return versions, device, and the hashes of the code and of this script."""
    return environment(device) | {"cuda": torch.version.cuda, "script": hash_files([Path(__file__)])}


def folder_of(device: torch.device) -> Path:
    """Return the folder of the results of a type of device."""
    return FOLDER / "-".join(re.findall(r"[a-z0-9]+", about(device)["device_name"].lower()))


def is_done(name: str, device: torch.device) -> bool:
    """Return whether the results of a section exist and were made by this code and these versions."""
    file = folder_of(device) / f"{name}.json"
    if not file.exists():
        return False
    found = json.loads(file.read_text(encoding="utf-8"))
    before, now = found["about"], about(device)
    same = all(before[key] == now[key] for key in now if key not in ("commit", "threads"))
    return same and not any(row.get("exit_code") for row in found["rows"])


def run_section(name: str, device: torch.device, size: Size = SIZE) -> int:
    """Run a section and write its rows and their table; return 1 if a test failed, otherwise 0."""
    rows, folder = SECTIONS[name][0](device, size), folder_of(device)
    folder.mkdir(parents=True, exist_ok=True)
    table = tabulate(rows, headers="keys", tablefmt="pipe", floatfmt=".4g")
    write_whole(folder / f"{name}.md", f"{table}\n")
    write_whole(folder / f"{name}.json", json.dumps({"about": about(device), "rows": rows}, indent=1) + "\n")
    return max(row.get("exit_code", 0) for row in rows)


def run_all(device: torch.device) -> int:
    """Run all sections without current results; return 1 if one failed, otherwise 0."""
    failed = []
    for name, (_, seconds) in SECTIONS.items():
        if is_done(name, device):
            print(f"{name}: there already", flush=True)
            continue
        print(f"{name}: at most {seconds} seconds", flush=True)
        try:
            subprocess.run([sys.executable, __file__, name], cwd=ROOT, timeout=seconds, check=True)
        except subprocess.SubprocessError as error:
            print(f"{name}: {error}", flush=True)
            failed.append(name)
    print(f"\nIn {folder_of(device)}: send this folder back, with an issue of the repository.")
    return int(bool(failed))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("section", nargs="?", choices=SECTIONS)
    section = options.parse_args().section
    with reporting_mistakes():
        if not torch.cuda.is_available():
            raise UserError(
                f"torch {torch.__version__} finds no NVIDIA GPU, which all of this is for; "
                "expected one with its driver, and a build of torch for CUDA"
            )
    device = torch.device("cuda")
    return run_all(device) if section is None else run_section(section, device)


if __name__ == "__main__":
    sys.exit(main())
