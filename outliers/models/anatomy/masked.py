"""Masked language models."""

import torch
from transformers import AutoModelForMaskedLM

from outliers.models.anatomy.examples import IGNORED, Example, states_at_labels
from outliers.models.anatomy.family import Family
from outliers.models.internals import MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _unmasked(block: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the text before masking, and the masked positions."""
    masked = block.labels != IGNORED
    return torch.where(masked, block.labels, block.ids), masked.nonzero()[:, 0]


MASKED = Family("masked", MODEL_FOR_MASKED_LM_MAPPING_NAMES, AutoModelForMaskedLM, states_at_labels, targets=_unmasked)
