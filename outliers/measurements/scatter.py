"""How far rounding alone scatters a result: the same measurement with embeddings changed in the seventh digit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError

SIZE = 1e-6  # of the change, relative: fp32 perplexity stays where it is


def check_draws(draws: int, dtype: str) -> None:
    """Raise UserError if several draws of a model in a dtype would be one and the same."""
    if draws > 1 and dtype != "float32":
        raise UserError(
            f"{draws} draws in {dtype}, which has too few digits for a change of {SIZE:g}; expected float32 or 1 draw"
        )


@contextmanager
def drawn(model: PreTrainedModel, draw: int) -> Iterator[None]:
    """Multiply every entry of the input embeddings by 1 + 1e-6 · z within this context, z standard normal.

    One code that flips because of it changes what all later layers round. The weights stay as they are, and so does a
    head that is tied to them.

    Args:
        model: a causal language model in float32, quantized or not, resident or streamed.
        draw: seed of z; 0 changes nothing.
    """
    if draw == 0:
        yield
        return
    embeddings = model.get_input_embeddings()
    noise = torch.randn(embeddings.weight.shape, generator=torch.Generator().manual_seed(draw))
    factors = noise.mul_(SIZE).add_(1).to(embeddings.weight.device)
    handle = embeddings.register_forward_hook(lambda _module, inputs, output: output * factors[inputs[0]])
    try:
        yield
    finally:
        handle.remove()
