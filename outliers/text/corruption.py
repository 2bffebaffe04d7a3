"""Corruption of token ids for masked and denoising models: single tokens or spans are removed, to be predicted."""

import re
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

SHARE = 0.15  # of tokens to predict: Devlin et al., "BERT", 2019, section 3.1; Raffel et al., 2020, section 3.1.4
SENTINEL = re.compile(r"▁?<extra_id_(\d+)>")  # as in T5, or with the word mark of mT5
SPAN = 3  # mean tokens per span: Raffel et al., section 3.3.4


def chosen_positions(blocks: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Choose the same number of random positions, at least one, in each block (blocks, T): int64 (blocks, chosen)."""
    count = max(1, round(SHARE * blocks.shape[1]))
    return torch.stack([torch.randperm(blocks.shape[1], generator=generator)[:count] for _ in blocks])


def sentinels_of(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the ids of <extra_id_0>, <extra_id_1>, …, which replace spans: int64 (sentinels,)."""
    by_number = {int(name[1]): id for token, id in tokenizer.get_vocab().items() if (name := SENTINEL.fullmatch(token))}
    return torch.tensor([by_number[number] for number in sorted(by_number)])


class Spans(NamedTuple):
    """The sizes of the corruption of a text of `tokens` tokens: predicted tokens and spans of them, at least one
    each."""

    tokens: int
    predicted: int
    spans: int

    @classmethod
    def of(cls, tokens: int) -> "Spans":
        """Return the numbers for a text of at least 2 tokens, rounded as in T5's `random_spans_noise_mask`."""
        predicted = min(max(1, round(SHARE * tokens)), tokens - 1)
        return cls(tokens, predicted, max(1, round(predicted / SPAN)))

    @classmethod
    def fit(cls, block: int) -> "Spans":
        """Return the numbers for the longest text (at least 2 tokens) whose corrupted form fits in `block` tokens of
        the encoder, as in T5's `random_spans_helper`."""
        spans = cls.of(2)
        while (longer := cls.of(spans.tokens + 1)).encoder_tokens <= block:
            spans = longer
        return spans

    @property
    def encoder_tokens(self) -> int:
        """The number of tokens that the encoder reads: the kept ones, a sentinel per span, and the end."""
        return self.tokens - self.predicted + self.spans + 1

    @property
    def targets(self) -> int:
        """The number of tokens that the decoder predicts: each span after its sentinel, and the end."""
        return self.predicted + self.spans + 1


def corrupted(
    tokens: torch.Tensor, sentinels: torch.Tensor, end: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace random spans of token ids by sentinels; return the text to read, and the targets: each span after its
    sentinel.

    Kept and removed pieces alternate, beginning with a kept one. The lengths of both are drawn uniformly from all ways
    that leave no piece empty, as in T5's `random_spans_noise_mask`.

    Args:
        tokens: int64 (n,), at least 2; or (n, k), tokens with k − 1 further numbers each, which are moved along.
        sentinels: int64 (sentinels,) or (sentinels, k), in their order, at least as many as there are spans.
        end: the token that ends both, int64 (1,) or (1, k).

    Returns:
        The text to read and the targets, int64 (`Spans.of(n).encoder_tokens`, …) and (`Spans.of(n).targets`, …).
    """
    _, predicted, spans = Spans.of(len(tokens))
    kept = _cut(len(tokens) - predicted, spans, generator)
    lengths = torch.stack([kept, _cut(predicted, spans, generator)], 1).flatten()
    pieces, marks = tokens.split(lengths.tolist()), sentinels[:spans].split(1)
    read = [piece for pair in zip(pieces[::2], marks, strict=True) for piece in pair]
    targets = [piece for pair in zip(marks, pieces[1::2], strict=True) for piece in pair]
    return torch.cat([*read, end]), torch.cat([*targets, end])


def _cut(tokens: int, pieces: int, generator: torch.Generator) -> torch.Tensor:
    """Cut a number of tokens into non-empty pieces of random lengths: int64 (pieces,)."""
    cuts = torch.randperm(tokens - 1, generator=generator)[: pieces - 1].sort().values + 1
    return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([tokens]))
