"""Optimizers, by the names that recipes have for them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

Groups = list[dict]  # of parameters, with their weight decay, and whether they are matrices of a layer


class Together(Optimizer):
    """Several optimizers of different parameters as one: what one does, all do."""

    def __init__(self, *optimizers: Optimizer):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Let the groups be those of the optimizers, so that who sets a learning rate here sets it there."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Update all parameters."""
        for optimizer in self.optimizers:
            optimizer.step(closure)

    def state_dict(self) -> dict:
        """The states of all, in their order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict) -> None:
        """Go on with the states of all."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._share_groups()


_adamw = partial(AdamW, betas=(0.9, 0.95), fused=True)


def _muon(groups: Groups, lr: float) -> Optimizer:
    """For the matrices of layers, scaled so that AdamW's learning rate fits ("match_rms_adamw"); AdamW for others."""
    matrices, others = ([group for group in groups if group["matrices"] is inside] for inside in (True, False))
    return Together(Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"), _adamw(others, lr=lr))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": _adamw,
    "muon": _muon,
    "sgd": partial(SGD, momentum=0.9),
    "adafactor": Adafactor,
}


def optimizer_of(name: str, model: nn.Module, learning_rate: float, weight_decay: float) -> Optimizer:
    """The optimizer of this name for all parameters that are trained; embeddings and matrices alone decay."""
    outside = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside = {id(p) for module in (*outside, model.get_output_embeddings()) if module for p in module.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2 and id(p) not in outside]
    embeddings = [p for p in trained if p.ndim >= 2 and id(p) in outside]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "matrices": True},
        {"params": embeddings, "weight_decay": weight_decay, "matrices": False},
        {"params": vectors, "weight_decay": 0.0, "matrices": False},
    ]
    return OPTIMIZERS[name]([group for group in groups if group["params"]], lr=learning_rate)
