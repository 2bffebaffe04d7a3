"""Masked language models: blocks between two special tokens, some tokens of which are masked and predicted."""

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from outliers.errors import UserError
from outliers.models.anatomy.examples import IGNORED, Examples
from outliers.models.load import load_tokenizer
from outliers.text.blocks import load_text
from outliers.text.corruption import chosen_positions
from outliers.text.given import Text

if TYPE_CHECKING:
    from outliers.subjects.causal import Causal

REFUSED = {"bos": "reads [CLS] before each block anyway"}  # options that say nothing of this family, and why


def read(subject: "Causal", text: str, blocks: int) -> Examples:
    """The first blocks of a text, masked by the seed of the settings."""
    tokenizer, settings = load_tokenizer(subject.model, subject.revision), subject.settings
    return masked_text(text, tokenizer, settings.block, blocks, settings.mask_seed)


def masked_text(
    text: Text, tokenizer: PreTrainedTokenizerBase, block: int, blocks: int | None = None, seed: int = 0
) -> Examples:
    """A text for a masked language model: blocks of it between [CLS] and [SEP], of which 15 % are to be predicted.

    In each block the same number of tokens, at least one, is masked; a seed decides which. All of them become the mask
    token, where BERT is trained with a tenth of them exchanged and a tenth left: what is measured is prediction alone.

    Args:
        text, tokenizer, blocks: as `outliers.load_text`.
        block: tokens of a block with both special ones, at least 4.
        seed: of the masked positions, the same for all models and block by block.

    Raises:
        UserError: as `outliers.load_text`; the tokenizer has no mask token, or none that begins and ends a sequence.
    """
    if block < 4:
        raise UserError(f"blocks of {block} tokens; expected at least 4, of which two are [CLS] and [SEP]")
    if tokenizer.mask_token_id is None:
        raise UserError("the model's tokenizer has no mask token; expected that of a masked language model")
    first, last = _ends(tokenizer)
    inner = load_text(text, tokenizer, block - 2, blocks)
    chosen = chosen_positions(inner, torch.Generator().manual_seed(seed))
    labels = torch.full_like(inner, IGNORED).scatter_(1, chosen, inner.gather(1, chosen))
    around = [torch.full((len(inner), 1), one) for one in (first, last)]
    ids = torch.cat([around[0], inner.scatter(1, chosen, tokenizer.mask_token_id), around[1]], 1)
    return Examples(ids, torch.nn.functional.pad(labels, (1, 1), value=IGNORED))


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The tokens that begin and end a sequence."""
    firsts, lasts = (tokenizer.cls_token_id, tokenizer.bos_token_id), (tokenizer.sep_token_id, tokenizer.eos_token_id)
    ends = [next((one for one in of_end if one is not None), None) for of_end in (firsts, lasts)]
    if None in ends:
        raise UserError("the model's tokenizer has no token that begins or ends a sequence; expected [CLS] and [SEP]")
    return ends[0], ends[1]
