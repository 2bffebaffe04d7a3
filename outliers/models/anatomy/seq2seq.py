"""Encoder-decoders, whose second stack reads the output of the first."""

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from outliers.models.anatomy.examples import IGNORED, Example, states_at_labels
from outliers.models.anatomy.family import Family
from outliers.models.internals import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def _shifted(model: PreTrainedModel, block: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoder's input, and the decoder's: the labels shifted by one position behind a start token."""
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        return block.ids, own(labels=block.labels[None])[0]
    shifted = block.labels.roll(1)
    shifted[0] = model.config.decoder_start_token_id
    return block.ids, shifted.masked_fill(shifted == IGNORED, model.config.pad_token_id)


SEQ2SEQ = Family(
    "seq2seq",
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForSeq2SeqLM,
    states_at_labels,
    _shifted,
    {"use_cache": False},
    targets=lambda block: (block.labels, (block.labels != IGNORED).nonzero()[:, 0]),  # all targets
)
