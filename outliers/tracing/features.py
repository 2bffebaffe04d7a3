"""Which features of the hidden states are outliers, by the paper's criterion (section 4.1)."""

from collections.abc import Iterable
from contextlib import ExitStack

import pandas as pd
import torch
from transformers import PreTrainedModel

from outliers.criterion import ALPHA, LAYERS, POSITIONS
from outliers.models.anatomy import projections


class Hits:
    """Where |x| ≥ alpha in the hidden states of sequences: sums over sequences, of fixed size (features,)."""

    def __init__(self, alpha: float):
        self.alpha, self.sequences = alpha, 0
        self.layers = self.positions = self.positions_mean = self.max = 0

    def update(self, hidden_states: dict[tuple[int, str], torch.Tensor]) -> None:
        """Add one sequence: its tracked hidden states (positions, features) by layer and role."""
        hits = {key: x.abs() >= self.alpha for key, x in hidden_states.items()}
        by_layer = {}
        for (layer, _), hit in hits.items():
            by_layer[layer] = by_layer.get(layer, False) | hit.any(0)
        stacked = torch.stack(list(hits.values()))
        self.sequences += 1
        self.layers = self.layers + torch.stack(list(by_layer.values())).double().mean(0)
        self.positions = self.positions + stacked.any(0).double().mean(0)
        self.positions_mean = self.positions_mean + stacked.double().mean((0, 1))
        self.max = torch.stack([x.abs().amax(0) for x in hidden_states.values()]).amax(0).clamp(min=self.max)


@torch.inference_mode()
def outlier_features(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    alpha: float = ALPHA,
    layers: float = LAYERS,
    positions: float = POSITIONS,
) -> pd.DataFrame:
    """Trace the inputs of the q/k/v and the first feed-forward projections over blocks (T,), each one a sequence.

    Returns:
        One row a feature, the most affected first: `feature`; `layers`, `positions` and `positions_mean`, fractions
        averaged over sequences; `max`, the largest |x|; `outlier`, whether `layers`
        and `positions` reach the given fractions.
    """
    hits = Hits(alpha)
    for block in blocks:
        hits.update(_hidden_states(model, block.to(model.device)))
    sums = {"layers": hits.layers, "positions": hits.positions, "positions_mean": hits.positions_mean}
    table = pd.DataFrame({name: (total / hits.sequences).cpu().numpy() for name, total in sums.items()})
    table.insert(0, "feature", table.index)
    table["max"] = hits.max.float().cpu().numpy()
    table["outlier"] = (table["layers"] >= layers) & (table["positions"] >= positions)
    return table.sort_values(["positions", "max"], ascending=False, ignore_index=True)


def _hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """The tracked hidden states of one sequence (T,) by layer and role; the hooks come off again."""
    found = {}

    def keep(key):
        def hook(_module, inputs):
            found[key] = inputs[0].flatten(0, -2)  # OPT joins sequences and positions by itself

        return hook

    with ExitStack() as stack:
        for projection in projections(model):
            if projection.role in ("attn_in", "ffn_in"):
                handle = projection.module.register_forward_pre_hook(keep((projection.layer, projection.role)))
                stack.callback(handle.remove)
        model(ids[None], use_cache=False)
    return found
