"""What a sweep of all nine schemes costs, in fp32 evaluations of the same model.

    python benchmarks/sweep_cost.py

A GPT-2-small-shaped random model (12 layers, d = 768) reads one block of 512 tokens under every scheme, quantization
of the weights included. Both sides are timed in turn, several rounds; the medians and their ratio are printed.
"""

import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from outliers.evaluation.perplexity import perplexity
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import SCHEMES, TABLE1, weight_order

TOKENS, ROUNDS = 512, 5


def seconds(model, blocks: torch.Tensor) -> dict[str, float]:
    """Wall seconds of each scheme, quantization and evaluation, in the order in which a sweep runs them."""
    times = {}
    for scheme in sorted((SCHEMES[name] for name in TABLE1), key=weight_order):
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


def main() -> None:
    """Print a line a scheme and the ratios."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    blocks = torch.randint(model.config.vocab_size, (1, TOKENS))
    seconds(model, blocks)
    rounds = [seconds(model, blocks) | {"transformers' loss": plain_seconds(model, blocks)} for _ in range(ROUNDS)]
    for name in rounds[0]:
        print(f"{name:<20}{1e3 * statistics.median(times[name] for times in rounds):8.0f} ms")
    for baseline in ("fp32", "transformers' loss"):
        ratios = [sum(times[scheme] for scheme in TABLE1) / times[baseline] for times in rounds]
        median, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"nine schemes / {baseline}: median {median:.2f}, {spread}")
    print(
        f"one block of {TOKENS} tokens, {ROUNDS} rounds, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
