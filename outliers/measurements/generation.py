"""Milliseconds a generated token, with a KV cache."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import check_block, context_length
from outliers.models.decoder import inference


class Timings(NamedTuple):
    """What some equal generations took, in milliseconds, and what they generated.

    prefills: of each generation, the pass over the prompts that gives the first new token of each. steps: of each
    generation, its decode steps, one further token of each sequence a step. ids: int64 (batch, 1 + tokens).
    """

    prefills: list[float]
    steps: list[list[float]]
    ids: torch.Tensor

    @property
    def per_token(self) -> list[float]:
        """Milliseconds a generated token of every decode step: its time over the batch (Table 6)."""
        return [step / len(self.ids) for steps in self.steps for step in steps]

    @property
    def end_to_end(self) -> list[float]:
        """Milliseconds a generated token of every generation, the prefill included."""
        return [
            (prefill + sum(steps)) / self.ids.numel() for prefill, steps in zip(self.prefills, self.steps, strict=True)
        ]


@inference
def latency(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    tokens: int,
    repeats: int,
    see: Callable[[float], None] = lambda share: None,
) -> Timings:
    """Time the greedy generation of tokens (appendix D.2), after one whole generation that is not timed.

    Each pass through the model is timed on its own, with the choice of the next token; on a GPU each is waited for.
    Only the logits of the last position are made. No token ends a sequence.

    Args:
        model: a causal language model, quantized or not.
        prompts: token ids, int64 (batch, P).
        tokens: decode steps of a generation, which follow its first token.
        repeats: timed generations.
        see: called between passes with the share of them that are made.

    Raises:
        UserError: prompt and tokens exceed the model's context, an id is outside its vocabulary, or there is nothing
            to time.
    """
    check_generation(model.config, prompts.shape[1], tokens)
    check_block(model.config, prompts.shape[1], int(prompts.max()))
    if min(tokens, repeats) < 1:
        raise UserError(f"{repeats} generations of {tokens} tokens; expected at least 1 of 1")
    prompts = prompts.to(model.device)
    passes, made = (1 + repeats) * (1 + tokens), itertools.count(1)
    generations = [_generate(model, prompts, tokens, lambda: see(next(made) / passes)) for _ in range(1 + repeats)][1:]
    prefills, steps = zip(*((times[0], times[1:]) for times, _ in generations), strict=True)
    return Timings(list(prefills), list(steps), generations[-1][1].cpu())


def check_generation(config: PretrainedConfig, prompt: int, tokens: int) -> None:
    """Raise UserError if a prompt of so many tokens, and so many decode steps after it, exceed a model's context."""
    limit = context_length(config)
    if limit is not None and prompt + tokens > limit:
        raise UserError(
            f"prompts of {prompt} tokens and {tokens} generated ones exceed the model's context of {limit}; use less"
        )


def _generate(
    model: PreTrainedModel, prompts: torch.Tensor, tokens: int, made: Callable[[], None]
) -> tuple[list[float], torch.Tensor]:
    """Milliseconds of the prefill and of each step after it, and the ids that they chose, (batch, 1 + tokens).

    made: called after each.
    """
    cache = DynamicCache(config=model.config)
    times, ids = [], [prompts]

    def step() -> torch.Tensor:
        logits = model(ids[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    for _ in range(1 + tokens):
        spent, chosen = timed(step, model.device)
        times.append(spent)
        ids.append(chosen)
        made()
    return times, torch.cat(ids[1:], 1)


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Milliseconds of wall time of a call, all its work on a GPU included, and what it returned."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _device: None
    wait(device)
    start = time.perf_counter()
    result = run()
    wait(device)
    return 1e3 * (time.perf_counter() - start), result


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, all within the values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, middle, high
