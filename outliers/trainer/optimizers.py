"""Optimizers by the names in recipes."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

Groups = list[dict]  # parameter groups, with their weight decay, and whether they are matrices of a layer


class CombinedOptimizer(Optimizer):
    """Several optimizers of different parameters, used as one."""

    def __init__(self, *optimizers: Optimizer):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Share the parameter groups with the optimizers, so that a changed learning rate reaches them."""
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step(closure)

    def state_dict(self) -> dict:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._share_groups()


_adamw = partial(AdamW, betas=(0.9, 0.95), fused=True)


def _muon(groups: Groups, lr: float) -> Optimizer:
    """Return Muon for matrices of layers and AdamW for the rest; "match_rms_adamw" makes AdamW's learning rate fit
    both."""
    matrices, others = ([group for group in groups if group["matrices"] is inside] for inside in (True, False))
    return CombinedOptimizer(Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"), _adamw(others, lr=lr))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": _adamw,
    "muon": _muon,
    "sgd": partial(SGD, momentum=0.9),
    "adafactor": Adafactor,
}


def optimizer_of(name: str, model: nn.Module, learning_rate: float, weight_decay: float) -> Optimizer:
    """Return the optimizer of a name for all trainable parameters; only matrices and embeddings have weight decay."""
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
