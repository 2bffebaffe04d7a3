"""Objectives of training, one a family: how models read, and the examples that they see."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, ViTImageProcessorPil

from outliers.models.anatomy.examples import IGNORED, Examples
from outliers.models.pocket.ladder import CONTEXT
from outliers.specification.recipe import Recipe
from outliers.text.corruption import Spans, chosen_positions, corrupted, sentinels_of
from outliers.text.digits import SIDE, digits
from outliers.training.corpus import Corpus, Vocabulary, blocks_in_order, prepare

SENTINELS = 32  # of T5's 100: enough for blocks of twice the context
MASKED, EXCHANGED = 0.8, 0.1  # of the tokens that BERT predicts, how many it reads as [MASK], and as any others


def _next_tokens(corpus: Corpus, recipe: Recipe, seed: int) -> np.ndarray:
    return blocks_in_order(corpus.ids, recipe.steps, recipe.batch, seed)


def _corrupted_spans(corpus: Corpus, recipe: Recipe, seed: int) -> Examples:
    """Raffel et al., 2020, section 3.1.4: spans of each block anew, of which the encoder reads as much as fits."""
    tokenizer, generator = PreTrainedTokenizerFast.from_pretrained(corpus.reader), torch.Generator().manual_seed(seed)
    blocks = blocks_in_order(corpus.ids, recipe.steps, recipe.batch, seed, Spans.read_in(CONTEXT).tokens)
    marks, end = sentinels_of(tokenizer), torch.tensor([tokenizer.eos_token_id])
    pairs = [corrupted(block, marks, end, generator) for block in torch.from_numpy(blocks.astype(np.int64))]
    return Examples(*map(torch.stack, zip(*pairs, strict=True)))


def _masked_tokens(corpus: Corpus, recipe: Recipe, seed: int) -> Examples:
    """Devlin et al., 2019, section 3.1: 15 % of the tokens of each block between [CLS] and [SEP], at random."""
    tokenizer, generator = PreTrainedTokenizerFast.from_pretrained(corpus.reader), torch.Generator().manual_seed(seed)
    blocks = blocks_in_order(corpus.ids, recipe.steps, recipe.batch, seed, CONTEXT - 2)
    inner = torch.from_numpy(blocks.astype(np.int64))
    chosen = chosen_positions(inner, generator)
    labels = torch.full_like(inner, IGNORED).scatter_(1, chosen, inner.gather(1, chosen))
    drawn, others = torch.rand(chosen.shape, generator=generator), chosen.new_empty(chosen.shape)
    read = inner.gather(1, chosen).where(drawn >= MASKED, tokenizer.mask_token_id)
    others.random_(len(tokenizer), generator=generator)
    inner.scatter_(1, chosen, others.where((drawn >= MASKED) & (drawn < MASKED + EXCHANGED), read))
    ends = [torch.full((len(inner), 1), token) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    return Examples(torch.cat([ends[0], inner, ends[1]], 1), torch.nn.functional.pad(labels, (1, 1), value=IGNORED))


def _digits(corpus: Corpus, recipe: Recipe, seed: int) -> Examples:
    """The pictures that are not held out, in another order in each epoch; of which the last incomplete batch is not
    seen."""
    seen, generator = digits(held_out=False), np.random.default_rng(seed)
    whole = len(seen.digits) // recipe.batch * recipe.batch
    epochs = -(-recipe.steps * recipe.batch // whole)
    order = np.concatenate([generator.permutation(len(seen.digits))[:whole] for _ in range(epochs)])
    values = ViTImageProcessorPil.from_pretrained(corpus.reader)(list(seen.pictures), return_tensors="pt").pixel_values
    order = torch.from_numpy(order[: recipe.steps * recipe.batch])
    return Examples(values[order], torch.from_numpy(seen.digits)[order])


def _prepare_digits(_c4: Path, _wikitext: Path, work: Path) -> Corpus:
    """No text, and what makes values of −1 to 1 of a picture of any size."""
    folder, grey = work / "digits", [0.5] * 3
    size = {"height": SIDE, "width": SIDE}
    ViTImageProcessorPil(size=size, image_mean=grey, image_std=grey).save_pretrained(folder)
    return Corpus(np.empty(0, np.uint16), folder)


class Objective(NamedTuple):
    """The objective of a rung.

    prepare: of the files of C4 and WikiText-2 and a folder to work in, what is learnt from. examples: of that, a recipe
    and a seed, the blocks or examples that are seen, (steps · batch), in their order.
    """

    prepare: Callable[[Path, Path, Path], Corpus]
    examples: Callable[[Corpus, Recipe, int], np.ndarray | Examples]


END_OF_TEXT = "<|endoftext|>"
NEXT = Vocabulary({"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "unk_token": END_OF_TEXT})
SPANS = Vocabulary(
    {"pad_token": "<pad>", "eos_token": "</s>"}, tuple(f"<extra_id_{n}>" for n in range(SENTINELS)), ("$A </s>", None)
)
MASKS = Vocabulary(
    {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "eos_token": "[SEP]"},
    template=("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
)

OBJECTIVES = {
    "next tokens": Objective(partial(prepare, vocabulary=NEXT), _next_tokens),
    "corrupted spans": Objective(partial(prepare, vocabulary=SPANS), _corrupted_spans),
    "masked tokens": Objective(partial(prepare, vocabulary=MASKS), _masked_tokens),
    "pictures": Objective(_prepare_digits, _digits),
}
