"""What the damage of schemes costs, beside the sweep of the same text and in evaluations of the same model.

    python benchmarks/damage_cost.py

SmolLM2 of 135 M parameters reads 4 blocks of 512 tokens of real text. Timed in turn, several rounds, quantization
included: the sweep of the nine schemes of Table 1, and the errors of all projections under them; an evaluation of the
unquantized model, and the perplexities of each role and of each layer under one scheme, alone and all but it. Kept: the
smallest times, and the ratios to the sweep and to as many evaluations as there are perplexities.
"""

import time
from collections.abc import Callable

import torch
from kept import keep, parser

from outliers.metrics.errors import block_errors
from outliers.metrics.perplexity import perplexity
from outliers.metrics.places import make_codes, place_choices, place_losses
from outliers.models.load import load_model, load_tokenizer
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import SCHEMES, TABLE1, by_weights
from outliers.text.blocks import load_text
from outliers.variants.quantized import Quantized

NAME, BLOCKS = "smollm2-135m", 4
SWEEP, ERRORS, EVALUATION = "sweep of nine schemes", "errors under nine schemes", "one evaluation"
COLUMNS = {
    "": "{what}",
    "ms": "{ms:.0f}",
    "of the sweep": "{of_sweep:.2f}",
    "of as many evaluations": "{of_evaluations}",
}


def sweep(model, blocks: torch.Tensor) -> None:
    """Compute the perplexity under every scheme of Table 1, in the order of a sweep."""
    for scheme in by_weights(SCHEMES[name] for name in TABLE1):
        model = quantize(model, scheme)
        perplexity(model, blocks)


def errors(model, blocks: torch.Tensor) -> None:
    """Compute the errors of all projections under the schemes of Table 1, except fp32, which makes none."""
    block_errors(model, blocks, [Quantized(scheme) for scheme in by_weights(SCHEMES[name] for name in TABLE1[1:])])


def perplexities(model, blocks: torch.Tensor, scheme: str, field: str) -> None:
    """Compute the perplexity with each role or layer quantized alone, and with all but it."""
    variant = Quantized(SCHEMES[scheme])
    place_losses(make_codes(quantize(model, variant.scheme)), blocks, variant, place_choices(model, variant, field))


def seconds(what: Callable, *arguments) -> float:
    start = time.perf_counter()
    what(*arguments)
    return time.perf_counter() - start


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512, help="of a block")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--scheme", default="llm.int8", help="of the perplexities by role and layer")
    arguments = options.parse_args()
    model, tokenizer = load_model(NAME), load_tokenizer(NAME)
    blocks = load_text("sample", tokenizer, arguments.tokens, BLOCKS)
    calls = {SWEEP: (sweep,), ERRORS: (errors,), EVALUATION: (perplexity,)}
    counts = {EVALUATION: 1}
    for field in ("role", "layer"):
        counts[f"{field}s"] = len(place_choices(model, Quantized(SCHEMES[arguments.scheme]), field))
        calls[f"{field}s"] = perplexities, arguments.scheme, field
    perplexity(model, blocks[:1])
    rounds = [
        {name: seconds(what, model, blocks, *more) for name, (what, *more) in calls.items()}
        for _ in range(arguments.rounds)
    ]
    times = {name: 1e3 * min(found[name] for found in rounds) for name in calls}
    rows = []
    for name, ms in times.items():
        count = counts.get(name)
        said = f"{count} perplexities by {name[:-1]}, {arguments.scheme}" if count and count > 1 else name
        as_many = f"{ms / count / times[EVALUATION]:.2f}" if count else "–"
        rows.append({"what": said, "ms": ms, "of_sweep": ms / times[SWEEP], "of_evaluations": as_many})
    keep("damage_cost", rows, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
