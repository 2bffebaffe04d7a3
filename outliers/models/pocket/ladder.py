"""The rungs of the pocket family: what is trained from nothing."""

from typing import NamedTuple

VOCABULARY = 4096
CONTEXT = 256
STEPS = 2000
WARMUP = 100
CHECKPOINTS = (25, 50, 100, 150, 200, 250, 300, 400, 500, 600, 800, 1000, 1200, 1400, 1600, 1800, 2000)


class Rung(NamedTuple):
    """One model of the family.

    layers: of each stack. learning_rate: the peak, about 3e-3 · sqrt(128 / width) and at most 5e-3. objective: what it
    learns, a name in `OBJECTIVES` of scripts/train_pocket.py. autocast: whether it is trained in bfloat16, where
    autocast has it, and not in float32 alone, which is many times as fast on a CPU without such units.
    """

    architecture: str
    width: int
    layers: int
    heads: int
    learning_rate: float
    batch: int = 16
    objective: str = "next tokens"
    autocast: bool = True


LADDER = {
    "gpt2-0.1m": Rung("gpt2", 24, 2, 2, 5e-3),
    "gpt2-0.5m": Rung("gpt2", 64, 4, 4, 4.2e-3),
    "gpt2-1m": Rung("gpt2", 96, 5, 4, 3.5e-3),
    "gpt2-1.7m": Rung("gpt2", 128, 6, 4, 3e-3, batch=32),
    "gpt2-5.9m": Rung("gpt2", 256, 6, 8, 2.1e-3),
    "opt-1.7m": Rung("opt", 128, 6, 4, 3e-3),
    "gptj-1.7m": Rung("gptj", 128, 6, 4, 3e-3),
    "mixtral-0.7m": Rung("mixtral", 64, 4, 4, 4.2e-3, batch=4, autocast=False),
    "t5-1.9m": Rung("t5", 128, 3, 4, 3e-3, batch=32, objective="corrupted spans", autocast=False),
    "bert-1.4m": Rung("bert", 128, 4, 4, 2e-3, objective="masked tokens", autocast=False),
    "vit-0.3m": Rung("vit", 64, 6, 4, 1e-3, batch=32, objective="pictures", autocast=False),
}
