"""What the int8 codes of attention probabilities lose.

    python benchmarks/attention_codes.py

SmolLM2 of 135 M parameters, not quantized, reads blocks of the embedded text. Kept: how often the first key of a block
gets the largest probability of a query, and which share of its probabilities has codes of 0, over layers, heads and
queries; and the same without the 2 % of keys that have the largest probabilities.
"""

import statistics

import torch
from kept import keep, parser

from outliers.models.decoder import inference, run_decoder
from outliers.models.hooks import attention_hooks
from outliers.models.load import load_model, load_tokenizer
from outliers.quantization.products import outlier_dimensions
from outliers.text.blocks import load_text

NAME, SHARE = "smollm2-135m", 0.02
COLUMNS = {"in int8": "{what}", "codes of 0 (%)": "{lost:.1f}", "first key largest (%)": "{first:.0f}"}


@inference
def lost(model, blocks: torch.Tensor) -> list[dict]:
    """Return how much of the probabilities int8 codes lose, over all queries: with all keys, and without the largest
    ones."""
    first, found = [], {0.0: [], SHARE: []}

    def visit(_layer: int, probabilities: torch.Tensor, _recompute, _visible) -> None:
        first.append((probabilities.argmax(-1) == 0).double().mean().item())
        for share, of_share in found.items():
            exact = outlier_dimensions(probabilities, share)
            of_share.append(_of_code_0(probabilities if exact is None else _without(probabilities, exact)))

    with attention_hooks(model, visit):
        for _ in run_decoder(model, blocks):
            pass
    whats = {0.0: "all keys", SHARE: f"all but the {100 * SHARE:g} % of keys with the largest probabilities"}
    shared = {"first": 100 * statistics.fmean(first)}
    return [{"what": whats[share], "lost": 100 * statistics.fmean(found[share]), **shared} for share in found]


def _without(probabilities: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return probabilities (…, heads, queries, keys) with 0 for some keys of each head, (…, heads, count)."""
    return probabilities.scatter(-1, keys[..., None, :].expand(*probabilities.shape[:-1], -1), 0)


def _of_code_0(probabilities: torch.Tensor) -> float:
    """Return the mean over queries of the probabilities whose codes are 0."""
    codes = (127 * probabilities / probabilities.amax(-1, keepdim=True)).nan_to_num().round()
    return probabilities.masked_fill(codes > 0, 0).sum(-1).double().mean().item()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512, help="of a block")
    options.add_argument("--blocks", type=int, default=4)
    arguments = options.parse_args()
    blocks = load_text("sample", load_tokenizer(NAME), arguments.tokens, arguments.blocks)
    keep("attention_codes", lost(load_model(NAME), blocks), COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
