"""The first numbers of a training step that are not finite, by the name of the layer."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from outliers.errors import BrokenModel


def check_finite(step: int, model: nn.Module, loss: torch.Tensor, again: Callable[[], object]) -> None:
    """Raise BrokenModel unless the loss of a step, and the gradients that it left, are finite.

    step: that is not taken yet, counted from 1. again: runs the model once more, where its loss is not finite.
    """
    if not torch.isfinite(loss):
        where = _first_output(model, again)
        raise BrokenModel(f"step {step}: the loss is {loss.item()}, {where}")
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not torch.isfinite(nn.utils.get_total_norm(gradients.values())):
        broken = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
        place = f"first in '{broken[-1]}'" if broken else "whose norm is too large for a number"
        raise BrokenModel(f"step {step}: NaN or inf in the gradients, {place}, of {len(broken)} that have some")


@torch.no_grad()
def _first_output(model: nn.Module, again: Callable[[], object]) -> str:
    """Run the model again and say of which module the output is the first that is not finite."""
    broken = []

    def look(name: str, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not broken and isinstance(tensor, torch.Tensor) and not torch.isfinite(tensor).all():
            broken.append(name)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(lambda _module, _inputs, output, name=name: look(name, output))
            stack.callback(hook.remove)
        again()
    return f"first in the output of '{broken[0]}'" if broken and broken[0] else "while all outputs of layers are finite"
