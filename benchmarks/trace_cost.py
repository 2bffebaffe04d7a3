"""What tracing costs beside a plain forward pass, and beside storing every hidden state.

    python benchmarks/trace_cost.py                                                   # a GPT-2-small shape
    python benchmarks/trace_cost.py --model smollm2-135m --text c4_en_1000.jsonl --rounds 15

A GPT-2-small-shaped random model (12 layers, d = 768), or a model that is loaded by its name and a text, reads 8 blocks
of 512 tokens, one at a time: the plain forward pass, its decoder alone (tracing does not need the head), the trace, the
trace with tokens, the trace without attention sinks, and the forward pass that stores what `output_hidden_states=True`
returns. All are timed in turn, several rounds; kept are medians, and the smallest times as shares of the decoder's
smallest one. Then each of them reads 4, 16 and 64 blocks in a process of its own; kept is how far its resident memory
rises at most above that of the loaded model. The result of a loaded model is kept under its name.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from kept import keep, parser
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase

from outliers import trace
from outliers.models.load import load_model, load_tokenizer
from outliers.text.blocks import load_text

MEMORY_BLOCKS = (4, 16, 64)
NAMES = "pocket/gpt2-1.7m"  # whose tokenizer names the tokens of the random model


def store(model, blocks: torch.Tensor, _tokenizer) -> list[tuple[torch.Tensor, ...]]:
    """Keep all hidden states, as a first script would."""
    return [model(block[None], use_cache=False, output_hidden_states=True).hidden_states for block in blocks]


WAYS = {
    "plain forward pass": lambda model, blocks, _: [model(block[None], use_cache=False) and None for block in blocks],
    "decoder alone": lambda model, blocks, _: [
        model.base_model(block[None], use_cache=False) and None for block in blocks
    ],
    "trace": lambda model, blocks, _: trace(model, blocks),
    "trace with tokens": lambda model, blocks, tokenizer: trace(model, blocks, tokens=tokenizer),
    "trace without sinks": lambda model, blocks, _: trace(model, blocks, attention=False),
    "storing all hidden states": store,
}


def prepare(
    model: str | None, text: str | None, blocks: int, tokens: int
) -> tuple[PreTrainedModel, torch.Tensor, PreTrainedTokenizerBase]:
    """Return the model, its token blocks, from a text or else random, and the tokenizer that names their tokens."""
    tokenizer = load_tokenizer(model or NAMES)
    if model:
        return load_model(model), load_text(text, tokenizer, tokens, blocks), tokenizer
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    return model, torch.randint(model.config.vocab_size, (blocks, tokens)), tokenizer


def seconds(way: str, *read) -> float:
    """Return the wall seconds of one way to read the blocks. read: what `prepare` returns."""
    start = time.perf_counter()
    WAYS[way](*read)
    return time.perf_counter() - start


def resident(field: str) -> float:
    """Return the MB of this process: VmRSS, now, or VmHWM, the most since the high-water mark was reset (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def rise(way: str, model: str | None, text: str | None, blocks: int, tokens: int) -> float:
    """Return how many MB resident memory rises in a process that does nothing else."""
    command = [sys.executable, __file__, "--rise", way, "--blocks", str(blocks), "--tokens", str(tokens)]
    command += ["--model", model, "--text", text] if model else []
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def own_rise(way: str, model, blocks: torch.Tensor, tokenizer) -> float:
    """Return how many MB resident memory rises in this process."""
    WAYS["decoder alone"](model, blocks[:1, :8], tokenizer)  # what is allocated once, as the libraries' own buffers
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    WAYS[way](model, blocks, tokenizer)
    return resident("VmHWM") - before


COLUMNS = {
    "": "{what}",
    "seconds": "{seconds:.2f}",
    "of a forward pass": "{of_forward:.2f}",
    "of its decoder alone": "{of_decoder:.3f}",
    "smallest of smallest": "{smallest:.3f}",
    **{f"MB at {blocks} blocks": f"{{MB_{blocks}:.0f}}" for blocks in MEMORY_BLOCKS},
}


@torch.inference_mode()
def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", help="a model's name; by default a random one of GPT-2 small's shape")
    options.add_argument("--text", help="what it reads")
    options.add_argument("--blocks", type=int, default=8)
    options.add_argument("--tokens", type=int, default=512, help="of a block")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--rise", choices=WAYS, help="print the rise of memory of one of them, and nothing else")
    arguments = options.parse_args()
    if bool(arguments.model) != bool(arguments.text):
        options.error("--model and --text go together")
    read = arguments.model, arguments.text
    model, ids, tokenizer = prepare(*read, arguments.blocks, arguments.tokens)
    if arguments.rise:
        print(own_rise(arguments.rise, model, ids, tokenizer))
        return
    for way in WAYS:
        WAYS[way](model, ids[:1], tokenizer)
    rounds = [{way: seconds(way, model, ids, tokenizer) for way in WAYS} for _ in range(arguments.rounds)]
    least = {way: min(times[way] for times in rounds) for way in WAYS}
    rows = [
        {
            "what": way,
            "seconds": statistics.median(times[way] for times in rounds),
            "of_forward": statistics.median(times[way] / times["plain forward pass"] for times in rounds),
            "of_decoder": statistics.median(times[way] / times["decoder alone"] for times in rounds),
            "smallest": least[way] / least["decoder alone"],
            **{f"MB_{blocks}": rise(way, *read, blocks, arguments.tokens) for blocks in MEMORY_BLOCKS},
        }
        for way in WAYS
    ]
    keep("_".join(["trace_cost", *filter(None, [arguments.model])]), rows, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
