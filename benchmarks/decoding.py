"""What a generated token and the reading of a prompt take: bfloat16 and int8, as they are and compiled.

    python benchmarks/decoding.py --compile

The ways of one model take turns in one process, several rounds: one-token steps of one sequence after a prompt of 16
tokens, with a cache of keys and values, and the prefill of 512 tokens. Compiled, which takes minutes a model, are the
steps, each one graph (`fullgraph=True`), with a cache of fixed size. Kept: medians of CPU time on one thread, in which
other work on the machine does not count, and their ratios to bfloat16.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from kept import keep, parser
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import outliers

BASELINE, SCHEMES = "bfloat16", ("absmax-vector", "llm.int8")
PROMPT, PREFILL = 16, 512
COLUMNS = {
    "": "{way}",
    "ms a token": "{token:.1f}",
    "/ bfloat16": "{token_ratio:.2f}",
    "prefill, ms": "{prefill:.0f}",
    "/ bfloat16's prefill": "{prefill_ratio:.2f}",
}
OF_COMPILED = {"compiled, ms a token": "{compiled:.1f}", "/ bfloat16 compiled": "{compiled_ratio:.2f}"}


def timed(call: Callable) -> float:
    """Return the milliseconds of CPU time of a call."""
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def steps(model: PreTrainedModel, step: Callable, cache: Cache, ids: torch.Tensor, tokens: int) -> list[float]:
    """Return the milliseconds of each decoding step after a prompt; ids: (1, T), of which each step reads one."""
    model(ids[:, :PROMPT], past_key_values=cache, use_cache=True, logits_to_keep=1)
    times = []
    for place in range(PROMPT, PROMPT + tokens):
        position, one = torch.tensor([[place]]), ids[:, place : place + 1].clone()
        call = partial(step, one, position_ids=position, past_key_values=cache, use_cache=True)
        times.append(timed(call))
    return times


@torch.inference_mode()
def measure(name: str, rounds: int, tokens: int, compiles: bool) -> list[dict]:
    """Return a row for each way to run the model."""
    models = {BASELINE: outliers.load_model(name, "bfloat16")}
    models |= {scheme: outliers.load_int8(name, scheme, "bfloat16") for scheme in SCHEMES}
    ids = torch.randint(4, models[BASELINE].config.vocab_size, (1, PREFILL), generator=torch.Generator().manual_seed(0))
    compiled = {way: torch.compile(model, fullgraph=True, dynamic=False) for way, model in models.items()}

    def of_way(way: str) -> dict[str, float]:
        model, config = models[way], models[way].config
        found = {
            "token": median(steps(model, model, DynamicCache(config=config), ids, tokens)),
            "prefill": timed(partial(model, ids, use_cache=True, logits_to_keep=1)),
        }
        if compiles:
            fixed = StaticCache(config=config, max_cache_len=PROMPT + tokens)
            found["compiled"] = median(steps(model, compiled[way], fixed, ids, tokens))
        return found

    for way in models:  # what is compiled now is not timed
        print(way, of_way(way), flush=True)
    found = [{way: of_way(way) for way in models} for _ in range(rounds)]
    rows = [{"way": way, **{what: median(one[way][what] for one in found) for what in found[0][way]}} for way in models]
    return [row | {f"{what}_ratio": row[what] / rows[0][what] for what in row if what != "way"} for row in rows]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--tokens", type=int, default=16, help="that are timed in a round")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--compile", action="store_true", help="time compiled steps as well")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.model, arguments.rounds, arguments.tokens, arguments.compile)
    columns = COLUMNS | (OF_COMPILED if arguments.compile else {})
    keep(f"decoding_{arguments.model}", rows, columns, arguments.out)


if __name__ == "__main__":
    main()
