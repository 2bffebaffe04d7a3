"""What it takes to load a model in 8 bits, and to generate with it: `load_int8` beside `load_model`.

    python benchmarks/load_int8.py

A LLaMA-shaped checkpoint of 640 million random weights in bfloat16 is written once, 200 MB a file. Each way to load it
has a process of its own. Kept: the bytes of its weights, how far resident memory rises while it loads, seconds to load,
and milliseconds of a generated token after a prompt of 128 tokens, one sequence.
"""

import multiprocessing
import resource
import time
from pathlib import Path

from checkpoints import SHAPES, checkpoint
from kept import keep, parser

from outliers.metrics.latency import latency, quartiles

PROMPT = 128
COLUMNS = {
    "": "{what}",
    "weights, MB": "{weights_MB:.0f}",
    "rise of resident memory, MB": "{rise_MB:.0f}",
    "seconds to load": "{seconds:.1f}",
    "ms a token": "{milliseconds:.0f}",
}


def measure(what: str, folder: Path, tokens: int, repeats: int) -> dict:
    """A row of the table, measured in this process."""
    import torch

    import outliers

    loaders = {
        "load_model, bfloat16": lambda: outliers.load_model(str(folder), "bfloat16"),
        "load_int8, llm.int8": lambda: outliers.load_int8(str(folder), "llm.int8", "bfloat16"),
    }
    outliers.load_int8("pocket/gpt2-0.1m", "llm.int8", "bfloat16")  # imports, and what is allocated once
    before, start = _peak(), time.perf_counter()
    model = loaders[what]()
    rise, seconds = _peak() - before, time.perf_counter() - start
    weights = sum(tensor.nbytes for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values())
    prompts = torch.randint(4, 4096, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    _, milliseconds, _ = quartiles(latency(model, prompts, tokens, repeats).per_token)
    row = {"what": what, "weights_MB": weights / 1e6, "rise_MB": rise / 1e6}
    return row | {"seconds": seconds, "milliseconds": milliseconds}


def _peak() -> int:
    """Bytes that this process ever had resident at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Write the checkpoint if need be, measure, and keep the table."""
    options = parser(__doc__)
    options.add_argument("--work", type=Path, default=Path("build/checkpoints"), help="where the checkpoint is")
    options.add_argument("--model", choices=SHAPES, default="llama-640m")
    options.add_argument("--tokens", type=int, default=32, help="that are generated and timed")
    options.add_argument("--repeats", type=int, default=3, help="of the generation")
    arguments = options.parse_args()
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        folder = pool.apply(checkpoint, (arguments.model, arguments.work))
        for what in ("load_model, bfloat16", "load_int8, llm.int8"):
            rows.append(pool.apply(measure, (what, folder, arguments.tokens, arguments.repeats)))
            print(rows[-1], flush=True)
    keep("load_int8", rows, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
