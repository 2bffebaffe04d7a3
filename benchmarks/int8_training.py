"""What a training step in int8 costs beside one in 16 bits.

    python benchmarks/int8_training.py gpt2-1.7m

A rung of the pocket ladder takes steps as it is trained: its batch, bfloat16 autocast, a compiled loss, clipping and
AdamW, on random tokens. Products are in 16 bits, or in int8 in the settings of Table 7. All settings take steps in
turn on one thread, several rounds; kept is the least of the processor's time, of which others on the machine take less
than of the clock's.
"""

import time
from collections.abc import Callable

import torch
from kept import keep, parser
from torch.nn import functional

from outliers.config.recipe import Recipe
from outliers.models.pocket.ladder import CONTEXT, LADDER, VOCABULARY
from outliers.trainer.optimizers import optimizer_of
from outliers.trainer.start import initial_model

PROJECTIONS = ["ffn", "linear"]
SETTINGS = {
    "16 bits": {},
    "FFN": {"int8": ["ffn"]},
    "FFN and linear": {"int8": PROJECTIONS},
    "FFN and linear, rounded by chance": {"int8": PROJECTIONS, "stochastic": True},
    "FFN and linear, 2 % decomposed": {"int8": PROJECTIONS, "decomposition": 0.02},
    "FFN, linear and attention, 2 % decomposed": {"int8": [*PROJECTIONS, "attention"], "decomposition": 0.02},
}
COLUMNS = {"in int8": "{setting}", "ms a step": "{milliseconds:.0f}", "of 16 bits": "{of_16_bits:.2f}"}


def step_of(recipe: Recipe) -> Callable[[], None]:
    """Return a function that makes a step of training."""
    model = initial_model(recipe, 0)
    optimizer = optimizer_of(recipe.optimizer, model, recipe.learning_rate, recipe.weight_decay)

    @torch.compile
    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())

    def step() -> None:
        loss_of(torch.randint(VOCABULARY, (recipe.batch, CONTEXT))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(rung: str, rounds: int) -> list[dict]:
    """Return a row for each setting."""
    torch.compiler.reset()  # which gives up after some models of one process
    steps = {name: step_of(Recipe(start=rung, **setting)) for name, setting in SETTINGS.items()}
    times = {name: [] for name in SETTINGS}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            before = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - before))
    least = {name: min(found) for name, found in times.items()}
    return [
        {"setting": name, "milliseconds": found, "of_16_bits": found / least["16 bits"]}
        for name, found in least.items()
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", choices=LADDER)
    options.add_argument("--rounds", type=int, default=7)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    keep(f"int8_training_{arguments.model}", measure(arguments.model, arguments.rounds), COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
