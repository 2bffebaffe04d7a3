"""What tracing costs beside a plain forward pass, and beside storing every hidden state.

    python benchmarks/trace_cost.py

A GPT-2-small-shaped random model (12 layers, d = 768) reads 8 blocks of 512 tokens, one at a time: the plain forward
pass, its decoder alone (tracing does not need the head), the trace, the trace without attention sinks, and the forward
pass that stores what `output_hidden_states=True` returns. All are timed in turn, several rounds; medians are printed.
Then each of them reads 4 and 16 blocks in a process of its own; printed is how far its resident memory rises at most
above that of the loaded model.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from outliers import trace

TOKENS, BLOCKS, ROUNDS, MEMORY_BLOCKS = 512, 8, 3, (4, 16)


def store(model, blocks: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """What a first script does: keep all hidden states."""
    return [model(block[None], use_cache=False, output_hidden_states=True).hidden_states for block in blocks]


WAYS = {
    "plain forward pass": lambda model, blocks: [model(block[None], use_cache=False) and None for block in blocks],
    "decoder alone": lambda model, blocks: [
        model.base_model(block[None], use_cache=False) and None for block in blocks
    ],
    "trace": trace,
    "trace without sinks": lambda model, blocks: trace(model, blocks, attention=False),
    "storing all hidden states": store,
}


def prepare(blocks: int) -> tuple[GPT2LMHeadModel, torch.Tensor]:
    """The model and its token blocks."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    return model, torch.randint(model.config.vocab_size, (blocks, TOKENS))


def seconds(way: str, model, blocks: torch.Tensor) -> float:
    """Wall seconds of one way to read the blocks."""
    start = time.perf_counter()
    WAYS[way](model, blocks)
    return time.perf_counter() - start


def resident(field: str) -> float:
    """MB of this process: VmRSS, now, or VmHWM, at most since the high-water mark was reset (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def rise(way: str, blocks: int) -> float:
    """How far resident memory rises, in MB, in a process that does nothing else."""
    command = [sys.executable, __file__, way, str(blocks)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@torch.inference_mode()
def main() -> None:
    """Print the table; or, with a way and a number of blocks, how far memory rises in this process."""
    if len(sys.argv) == 3:
        model, ids = prepare(int(sys.argv[2]))
        WAYS["decoder alone"](model, ids[:1, :8])  # what is allocated once, such as the libraries' own buffers
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = resident("VmRSS")
        WAYS[sys.argv[1]](model, ids)
        print(resident("VmHWM") - before)
        return
    model, ids = prepare(BLOCKS)
    for way in WAYS:
        WAYS[way](model, ids[:1])
    rounds = [{way: seconds(way, model, ids) for way in WAYS} for _ in range(ROUNDS)]
    print(f"{'':<26}{'seconds':>8}{'/ plain':>9}{'/ decoder':>11}   MB at {MEMORY_BLOCKS} blocks")
    for way in WAYS:
        median = statistics.median(times[way] for times in rounds)
        ratios = [
            statistics.median(times[way] / times[base] for times in rounds)
            for base in ("plain forward pass", "decoder alone")
        ]
        rises = ", ".join(f"{rise(way, blocks):.0f}" for blocks in MEMORY_BLOCKS)
        print(f"{way:<26}{median:>8.2f}{ratios[0]:>9.2f}{ratios[1]:>11.2f}   {rises}")
    print(f"{BLOCKS} blocks of {TOKENS} tokens, {ROUNDS} rounds, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
