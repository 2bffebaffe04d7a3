"""Causal language models."""

import torch
from transformers import AutoModelForCausalLM, Cache
from transformers.cache_utils import DynamicLayer

from outliers.models.anatomy.examples import IGNORED, Block, Example, states_at_labels
from outliers.models.anatomy.family import Family
from outliers.models.internals import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


class NothingBefore(Cache):
    """A cache that is empty and stays so.

    Without a cache, transformers tests whether positions restart, which makes the host wait for the GPU.
    """

    def __init__(self):
        super().__init__(layers=[DynamicLayer()])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_arguments, **_keywords) -> tuple:
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, _layer: int) -> torch.Tensor:
        return indexer_key_states


def _predicted(block: Block, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states that predict something and their labels: all but the last with the next tokens, or those of an
    example that have a label."""
    return states_at_labels(block, states) if isinstance(block, Example) else (states[:-1], block[1:])


def _targets(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of a block, and the positions of those that are predicted from the ones before."""
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
    targets=_targets,
)
