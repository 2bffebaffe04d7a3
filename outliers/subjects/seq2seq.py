"""Encoder-decoders: the text that the encoder reads, and the part that the decoder predicts."""

from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from outliers.errors import UserError
from outliers.models.anatomy.examples import Examples
from outliers.text.blocks import cut_text
from outliers.text.corruption import Spans, corrupted, sentinels_of
from outliers.text.given import Text

if TYPE_CHECKING:
    from outliers.subjects.causal import ModelWithText

READS_TEXT = True
REFUSED = {  # options that do not apply to this family, and why
    "bos": "reads what its tokenizer puts around each block",
    "stride": "reads blocks that do not overlap",
    "scored": "does not predict the tokens of a block one after the other",
}
SHORTEST = Spans.of(2).encoder_tokens  # tokens of a block: one, a sentinel and the end of the sequence


def read(subject: "ModelWithText", text: str, blocks: int, seed: int) -> Examples:
    """Return the first blocks of a text with their targets: spans chosen by a seed, or the second halves.

    Raises:
        UserError: as `span_corrupted` and `prefixed`; or a seed is given although no spans depend on it.
    """
    tokenizer, experiment = subject.preprocessor, subject.experiment
    if (experiment.objective or ("span" if len(sentinels_of(tokenizer)) else "prefix")) == "span":
        return span_corrupted(text, tokenizer, experiment.block, blocks, seed)
    if experiment.objective == "each":
        raise UserError("objective 'each' is of masked language models; expected span or prefix")
    if seed or experiment.mask_seeds > 1:
        raise UserError(
            f"'{subject.model}' predicts the second half of each block, without a seed; leave --mask-seed and "
            "--mask-seeds out"
        )
    return prefixed(text, tokenizer, experiment.block, blocks)


def span_corrupted(
    text: Text, tokenizer: PreTrainedTokenizerBase, block: int, blocks: int | None = None, seed: int = 0
) -> Examples:
    """Return a text for an encoder-decoder that was trained on span corruption, as T5 was.

    Raffel et al., "T5", 2020, sections 3.1.4 and 3.3.4, and their `random_spans_helper` and `random_spans_noise_mask`.

    15 % of the tokens of a block are predicted, in spans of three on average. In the encoder's input a sentinel
    replaces each span; the decoder predicts the spans, each after its sentinel; </s> ends both. As in T5, a block is
    cut so long that the encoder reads exactly `block` tokens of it: of 568 tokens it reads 512, and the decoder
    predicts 114. Everything that the decoder predicts counts.

    Args:
        text, tokenizer, blocks: as `outliers.load_text`.
        block: tokens that the encoder reads with sentinels and </s>, at least 3.
        seed: of the spans, the same for all models and block by block.

    Returns:
        ids (examples, block) and labels (examples, targets), the same number for each.

    Raises:
        UserError: as `outliers.load_text`; the block is too short; the tokenizer has no end of a sequence, no
            sentinels, or fewer than a block has spans.
    """
    if block < SHORTEST:
        raise UserError(
            f"blocks of {block} tokens; expected at least {SHORTEST}: a token, a sentinel and the end of the sequence"
        )
    spans, sentinels, end = Spans.fit(block), sentinels_of(tokenizer), tokenizer.eos_token_id
    if end is None or not len(sentinels):
        raise UserError(
            "the model's tokenizer has no sentinels (<extra_id_0>, …) or no end of a sequence; span corruption expects "
            "that of a T5: for other encoder-decoders predict the second half of each block from the first"
        )
    if spans.spans > len(sentinels):
        raise UserError(
            f"blocks of {block} tokens have {spans.spans} spans, and the model's tokenizer {len(sentinels)} sentinels; "
            "use shorter blocks"
        )
    generator = torch.Generator().manual_seed(seed)
    cut = cut_text(text, tokenizer, spans.tokens, blocks)
    sized = torch.stack([cut.ids, torch.zeros_like(cut.ids) if cut.sizes is None else cut.sizes], 2)
    # special tokens have 0 bytes
    marks, last = (functional.pad(special[:, None], (0, 1)) for special in (sentinels, torch.tensor([end])))
    pairs = [corrupted(tokens, marks, last, generator) for tokens in sized]
    read, targets = map(torch.stack, zip(*pairs, strict=True))
    predicted = None if cut.sizes is None else targets[..., 1].sum(1)
    return Examples(read[..., 0], targets[..., 0], "+span", sizes=predicted)


def prefixed(text: Text, tokenizer: PreTrainedTokenizerBase, block: int, blocks: int | None = None) -> Examples:
    """Return a text for any encoder-decoder: the first half of each block is read, the second half is predicted.

    Special tokens of the tokenizer, such as </s>, surround the part that is read, and count among its tokens.

    Args:
        text, tokenizer, blocks: as `outliers.load_text`.
        block: tokens of a block, both halves together.

    Returns:
        ids (examples, block // 2) and labels (examples, block − block // 2).

    Raises:
        UserError: as `outliers.load_text`; half a block has no room for a token.
    """
    before, after = _around(tokenizer)
    around = len(before) + len(after)
    text_tokens = block // 2 - around
    if text_tokens < 1:
        raise UserError(
            f"blocks of {block} tokens; expected at least {2 * (around + 1)}: half of it is read, with special ones"
        )
    cut = cut_text(text, tokenizer, block - around, blocks)
    first, second = cut.ids.tensor_split([text_tokens], 1)
    before, after = (torch.tensor(ends).long().expand(len(first), -1) for ends in (before, after))
    predicted = None if cut.sizes is None else cut.sizes[:, text_tokens:].sum(1)
    return Examples(torch.cat([before, first, after], 1), second, "+prefix", sizes=predicted)


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer puts before and after a text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    return ids[: special.index(0)], ids[len(ids) - special[::-1].index(0) :]
