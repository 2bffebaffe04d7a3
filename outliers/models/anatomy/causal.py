"""Causal language models."""

import torch
from transformers import AutoModelForCausalLM, Cache
from transformers.cache_utils import DynamicLayer

from outliers.models.anatomy.examples import IGNORED, Block, Example, labelled
from outliers.models.anatomy.family import Family
from outliers.models.internals import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


class NothingBefore(Cache):
    """No keys and values of earlier positions, and none are kept. Without a cache transformers looks whether positions
    begin anew, for which the host would wait for the GPU."""

    def __init__(self):
        super().__init__(layers=[DynamicLayer()])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_arguments, **_keywords) -> tuple:
        """The states themselves."""
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, _layer: int) -> torch.Tensor:
        """The same of the keys by which positions are chosen."""
        return indexer_key_states


def _predicted(block: Block, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every position predicts the next one; of an example those that have a label."""
    return labelled(block, states) if isinstance(block, Example) else (states[:-1], block[1:])


def _places(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(block, Example):
        return block.ids, 1 + (block.labels != IGNORED).nonzero()[:, 0]
    return block, torch.arange(1, len(block))


CAUSAL = Family(
    "causal",
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForCausalLM,
    _predicted,
    keywords={"use_cache": False},
    cache=NothingBefore(),
    places=_places,
)
