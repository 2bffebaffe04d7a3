"""What a sweep of all nine schemes costs, in fp32 evaluations of the same model.

    python benchmarks/sweep_cost.py

Two models are read under every scheme, quantization of the weights included: SmolLM2 of 135 M parameters, 8 blocks of
512 tokens of real text, and a random model of GPT-2-small's shape (12 layers, d = 768), one block. All schemes are
timed in turn, several rounds. Kept: the smallest time of each scheme, their sum, and the ratios to fp32 and to what
one would write without this project, transformers' own loss.
"""

import time

import torch
from kept import keep, parser
from transformers import GPT2Config, GPT2LMHeadModel

from outliers.metrics.perplexity import perplexity
from outliers.models.load import load_model, load_tokenizer
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import SCHEMES, TABLE1, by_weights
from outliers.text.blocks import load_text


def seconds(model, blocks: torch.Tensor) -> dict[str, float]:
    """Return the wall seconds of each scheme, quantization and evaluation, in the order of a sweep."""
    times = {}
    for scheme in by_weights(SCHEMES[name] for name in TABLE1):
        start = time.perf_counter()
        model = quantize(model, scheme)
        perplexity(model, blocks)
        times[scheme.name] = time.perf_counter() - start
    return times


def plain_seconds(model, blocks: torch.Tensor) -> float:
    """Return the wall seconds of an evaluation without this project, by the model's own loss."""
    start = time.perf_counter()
    with torch.inference_mode():
        for block in blocks:
            model(block[None], labels=block[None], use_cache=False)
    return time.perf_counter() - start


OWN_LOSS = "transformers' own loss"
ALL = "all nine schemes"
COLUMNS = {
    "": "{what}",
    **{
        f"{label}: {header}": f"{{{model}_{field}}}"
        for model, label in (("smollm2", "SmolLM2, 8 blocks"), ("gpt2", "GPT-2-small shape, 1 block"))
        for header, field in (("ms", "ms:.0f"), ("evaluations by transformers", "of_transformers:.2f"))
    },
}


def smollm2(tokens: int) -> tuple:
    """Return the trained model, and 8 blocks of real text."""
    name = "smollm2-135m"
    return load_model(name), load_text("sample", load_tokenizer(name), tokens, 8)


def gpt2(tokens: int) -> tuple:
    """Return a random model, and a block of random tokens."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    return model, torch.randint(model.config.vocab_size, (1, tokens))


def smallest(model, blocks: torch.Tensor, rounds: int) -> dict[str, float]:
    """Return the milliseconds of each scheme, of all nine together, and of transformers' own loss."""
    seconds(model, blocks[:1])
    found = [seconds(model, blocks) | {OWN_LOSS: plain_seconds(model, blocks)} for _ in range(rounds)]
    times = {name: 1e3 * min(times[name] for times in found) for name in found[0]}
    return times | {ALL: sum(times[scheme] for scheme in TABLE1)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512, help="of a block")
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    times = {make.__name__: smallest(*make(arguments.tokens), arguments.rounds) for make in (smollm2, gpt2)}
    rows = [
        {
            "what": name,
            **{f"{model}_ms": of_model[name] for model, of_model in times.items()},
            **{f"{model}_of_transformers": of_model[name] / of_model[OWN_LOSS] for model, of_model in times.items()},
        }
        for name in (*TABLE1, ALL, OWN_LOSS)
    ]
    keep("sweep_cost", rows, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
