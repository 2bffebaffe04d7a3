"""What a sweep of all nine schemes costs, in fp32 evaluations of the same model.

    python benchmarks/sweep_cost.py

A GPT-2-small-shaped random model (12 layers, d = 768) reads one block of 512 tokens under every scheme, quantization
of the weights included. All are timed in turn, several rounds. Kept: the median of each scheme and of all nine
together, and their ratios to fp32 and to what one would write without this project, transformers' own loss.
"""

import statistics
import time

import torch
from kept import keep, parser
from transformers import GPT2Config, GPT2LMHeadModel

from outliers.measurements.perplexity import perplexity
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import SCHEMES, TABLE1, by_weights


def seconds(model, blocks: torch.Tensor) -> dict[str, float]:
    """Wall seconds of each scheme, quantization and evaluation, in the order in which a sweep runs them."""
    times = {}
    for scheme in by_weights(SCHEMES[name] for name in TABLE1):
        start = time.perf_counter()
        model = quantize(model, scheme)
        perplexity(model, blocks)
        times[scheme.name] = time.perf_counter() - start
    return times


def plain_seconds(model, blocks: torch.Tensor) -> float:
    """Wall seconds of what one would write without this project: the model's own loss."""
    start = time.perf_counter()
    with torch.inference_mode():
        model(blocks, labels=blocks, use_cache=False)
    return time.perf_counter() - start


COLUMNS = {
    "": "{what}",
    "ms": "{milliseconds:.0f}",
    "fp32 evaluations": "{of_fp32:.2f}",
    "evaluations by transformers": "{of_transformers:.2f}",
}
OWN_LOSS = "transformers' own loss"


def main() -> None:
    """Measure and keep a row a scheme."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512, help="of the block")
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    blocks = torch.randint(model.config.vocab_size, (1, arguments.tokens))
    seconds(model, blocks)
    rounds = [seconds(model, blocks) | {OWN_LOSS: plain_seconds(model, blocks)} for _ in range(arguments.rounds)]
    for times in rounds:
        times["all nine schemes"] = sum(times[scheme] for scheme in TABLE1)
    rows = [
        {
            "what": name,
            "milliseconds": 1e3 * statistics.median(times[name] for times in rounds),
            "of_fp32": statistics.median(times[name] / times["fp32"] for times in rounds),
            "of_transformers": statistics.median(times[name] / times[OWN_LOSS] for times in rounds),
        }
        for name in rounds[0]
    ]
    keep("sweep_cost", rows, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
