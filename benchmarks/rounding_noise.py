"""How far an 8-bit perplexity scatters by rounding alone.

    python benchmarks/rounding_noise.py pocket/gpt2-5.9m

One code that flips changes what all later layers round. The embeddings are multiplied by 1 + 1e-6 · N(0, 1), which
leaves the fp32 perplexity where it is, and each scheme is measured again; mean and standard deviation over the draws
are printed in per cent over fp32. Differences between schemes below this scatter mean nothing.
"""

import argparse
import statistics

import torch

from outliers.evaluation.perplexity import perplexity
from outliers.models.load import load_model, load_tokenizer
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import SCHEMES
from outliers.text.blocks import load_text


def main() -> None:
    """Print a line a scheme."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", default="sample")
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--draws", type=int, default=6)
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    blocks = load_text(arguments.text, load_tokenizer(arguments.model), arguments.block, arguments.blocks)
    exact = perplexity(model, blocks)
    embeddings = model.get_input_embeddings().weight.data
    unchanged = embeddings.clone()
    for scheme in SCHEMES:
        increases = []
        for seed in range(arguments.draws):
            noise = torch.randn(unchanged.shape, generator=torch.Generator().manual_seed(seed))
            embeddings.copy_(unchanged * (1 + 1e-6 * noise))
            increases.append(100 * (perplexity(quantize(model, scheme), blocks) / exact - 1))
        print(f"{scheme:<20}{statistics.mean(increases):+8.4f} %  ± {statistics.stdev(increases):.4f}", flush=True)


if __name__ == "__main__":
    main()
