"""What a mixture of experts costs with each projection of each expert called by itself, exact and in eight bits.

    python benchmarks/experts.py --out results/kept/benchmarks

A random mixture of 8 layers (64 experts, of which each token chooses 8; 512 features, 256 units) reads blocks of 512
tokens. Its forward pass is timed as transformers calls experts in Python ("eager"), by projection, and under schemes
whose codes are made before. All are timed in turn, several rounds; kept are medians, of seconds and of the quotients
within a round.
"""

import statistics
import time

import torch
from kept import keep, parser
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from outliers import quantize
from outliers.models.anatomy.experts import call_by_projection

PLAIN, THEIRS = "by projection", "transformers, eager"
SCHEMES = ("absmax-vector", "llm.int8")
COLUMNS = {
    "experts": "{way}",
    "seconds": "{seconds:.3f}",
    "of transformers": "{of_transformers:.2f}",
    "of by projection": "{of_plain:.2f}",
}


def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=256,
    )
    return Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


@torch.inference_mode()
def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--tokens", type=int, default=512)
    arguments = options.parse_args()
    model = mixture()
    block = torch.randint(model.config.vocab_size, (1, arguments.tokens))
    ways = {THEIRS: mixture(), PLAIN: model, **{scheme: quantize(model, scheme) for scheme in SCHEMES}}
    ways[THEIRS].set_experts_implementation("eager")
    call_by_projection(model)
    assert torch.equal(*(ways[way](block, use_cache=False).logits for way in (THEIRS, PLAIN)))
    for one in ways.values():
        one(block, use_cache=False)  # prepares codes

    def seconds(way: str) -> float:
        start = time.perf_counter()
        ways[way](block, use_cache=False)
        return time.perf_counter() - start

    rounds = [{way: seconds(way) for way in ways} for _ in range(arguments.rounds)]
    rows = [
        {
            "way": way,
            "seconds": statistics.median(times[way] for times in rounds),
            "of_transformers": statistics.median(times[way] / times[THEIRS] for times in rounds),
            "of_plain": statistics.median(times[way] / times[PLAIN] for times in rounds),
        }
        for way in ways
    ]
    keep("experts", rows, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
