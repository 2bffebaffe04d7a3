"""What attention in int8 costs with one layer exact, on draws that did not choose the layer.

    python benchmarks/attention_layers.py --out results/kept/attention

The first draw of SmolLM2 on the embedded text, kept in results/kept/attention/layers, chose two of thirty layers:
layer 1, which leaves least if it stays exact, and layer 20, which costs most alone. Kept: the cost in further draws
with neither and with each of them exact.
"""

import statistics
from collections.abc import Iterable

import torch
from kept import keep, parser

from outliers.metrics.perplexity import perplexity_of, variant_losses
from outliers.metrics.states import EXACT
from outliers.models.load import load_model, load_tokenizer
from outliers.quantization.schemes import get_scheme
from outliers.text.blocks import load_text
from outliers.variants.draw import drawn
from outliers.variants.quantized import Quantized

NAME, SCHEME, LAYERS = "smollm2-135m", "fp32+attention", (1, 20)
COLUMNS = {"exact": "{exact}", "cost (%)": "{cost:.2f} ± {standard_deviation:.2f}", "draws": "{draws}"}


def costs(model, blocks: torch.Tensor, draws: Iterable[int]) -> list[dict]:
    """Return by how many per cent int8 attention raises perplexity, with no layer exact and with each of `LAYERS`."""
    skipped = {"no layer": (), **{f"layer {layer}": (f"model.layers.{layer}",) for layer in LAYERS}}
    variants = [EXACT, *(Quantized(get_scheme(SCHEME), skip) for skip in skipped.values())]
    found = []
    for draw in draws:
        with drawn(model, draw):
            exact, *others = map(perplexity_of, variant_losses(model, blocks, variants))
        found.append([100 * (other / exact - 1) for other in others])
        print(draw, *(f"{cost:+.2f} %" for cost in found[-1]), flush=True)
    return [
        {"exact": what, "cost": statistics.fmean(own), "standard_deviation": statistics.stdev(own), "draws": len(own)}
        for what, own in zip(skipped, zip(*found, strict=True), strict=True)
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--draws", type=int, default=8, help="beyond the first, which chose the layers")
    arguments = options.parse_args()
    blocks = load_text("sample", load_tokenizer(NAME), 512, 4)
    found = costs(load_model(NAME), blocks, range(1, 1 + arguments.draws))
    keep("attention_layers", found, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
