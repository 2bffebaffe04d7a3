"""Masked language models: blocks between two special tokens, in which some tokens are masked and predicted."""

from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from outliers.errors import UserError
from outliers.models.anatomy.examples import IGNORED, Examples
from outliers.text.blocks import cut_text
from outliers.text.corruption import chosen_positions
from outliers.text.given import Text

if TYPE_CHECKING:
    from outliers.subjects.causal import ModelWithText

READS_TEXT = True
REFUSED = {  # options that do not apply to this family, and why
    "bos": "reads [CLS] before each block anyway",
    "stride": "reads blocks that do not overlap",
    "scored": "does not predict the tokens of a block one after the other",
}


def read(subject: "ModelWithText", text: str, blocks: int, seed: int) -> Examples:
    """Return the first blocks of a text, masked at random by a seed, or with each token masked by itself."""
    tokenizer, experiment = subject.preprocessor, subject.experiment
    if experiment.objective is None:
        return masked_text(text, tokenizer, experiment.block, blocks, seed)
    if experiment.objective != "each":
        raise UserError(
            f"objective '{experiment.objective}' is of encoder-decoders; expected each, or leave --objective out"
        )
    if seed or experiment.mask_seeds > 1:
        raise UserError("each token is masked by itself, without a seed; leave --mask-seed and --mask-seeds out")
    return each_masked(text, tokenizer, experiment.block, blocks)


def masked_text(
    text: Text, tokenizer: PreTrainedTokenizerBase, block: int, blocks: int | None = None, seed: int = 0
) -> Examples:
    """Return a text for a masked language model: blocks of it between [CLS] and [SEP], with 15 % of the tokens masked.

    In each block the same number of tokens, at least one, is masked, chosen by a seed. All of them become the mask
    token, although BERT was trained with a tenth replaced at random and a tenth unchanged: only prediction is measured
    here.

    Args:
        text, tokenizer, blocks: as `outliers.load_text`.
        block: tokens of a block with both special ones, at least 4.
        seed: of the masked positions, the same for all models and block by block.

    Raises:
        UserError: as `outliers.load_text`; the block is too short; the tokenizer has no mask token, or none that begins
            and ends a sequence.
    """
    whole, sizes = _between_ends(text, tokenizer, block, blocks)
    chosen = 1 + chosen_positions(whole[:, 1:-1], torch.Generator().manual_seed(seed))
    return _masked_examples(whole, sizes, chosen, tokenizer, "+masked")


def each_masked(text: Text, tokenizer: PreTrainedTokenizerBase, block: int, blocks: int | None = None) -> Examples:
    """Return a text with each token predicted from all others of its block, so that perplexity is pseudo-perplexity.

    Salazar et al., "Masked Language Model Scoring", 2020.

    Args:
        text, tokenizer, block, blocks: as `masked_text`.

    Returns:
        block − 2 examples of each block, each with one token masked.

    Raises:
        UserError: as `masked_text`.
    """
    whole, sizes = _between_ends(text, tokenizer, block, blocks)
    chosen = torch.arange(1, block - 1).repeat(len(whole))[:, None]
    whole, sizes = (part if part is None else part.repeat_interleave(block - 2, 0) for part in (whole, sizes))
    return _masked_examples(whole, sizes, chosen, tokenizer, "+each-masked")


def _between_ends(
    text: Text, tokenizer: PreTrainedTokenizerBase, block: int, blocks: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return token ids (blocks, T) with a special token at either end, and their bytes as `cut_text` has them."""
    if block < 4:
        raise UserError(f"blocks of {block} tokens; expected at least 4, of which two are [CLS] and [SEP]")
    if tokenizer.mask_token_id is None:
        raise UserError("the model's tokenizer has no mask token; expected that of a masked language model")
    first, last = _ends(tokenizer)
    cut = cut_text(text, tokenizer, block - 2, blocks)
    before, after = (torch.full((len(cut.ids), 1), token) for token in (first, last))
    return torch.cat([before, cut.ids, after], 1), None if cut.sizes is None else functional.pad(cut.sizes, (1, 1))


def _masked_examples(
    whole: torch.Tensor,
    sizes: torch.Tensor | None,
    chosen: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    protocol: str,
) -> Examples:
    """Return blocks (blocks, T) with the mask token at the chosen positions (blocks, predicted).

    protocol: what is predicted, as rows name it.
    """
    labels = torch.full_like(whole, IGNORED).scatter_(1, chosen, whole.gather(1, chosen))
    predicted = None if sizes is None else sizes.gather(1, chosen).sum(1)
    return Examples(whole.scatter(1, chosen, tokenizer.mask_token_id), labels, protocol, sizes=predicted)


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    firsts, lasts = (tokenizer.cls_token_id, tokenizer.bos_token_id), (tokenizer.sep_token_id, tokenizer.eos_token_id)
    ends = [next((token for token in tokens if token is not None), None) for tokens in (firsts, lasts)]
    if None in ends:
        raise UserError("the model's tokenizer has no token that begins or ends a sequence; expected [CLS] and [SEP]")
    return ends[0], ends[1]
