"""Corruption of token ids: single tokens, or spans of them, are taken out to be predicted."""

import re
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

SHARE = 0.15  # of the tokens: Devlin et al., "BERT", 2019, section 3.1; Raffel et al., 2020, section 3.1.4
SENTINEL = re.compile(r"▁?<extra_id_(\d+)>")  # as T5, and with the mark of a word as mT5 has it
SPAN = 3  # tokens of a span in the mean: Raffel et al., section 3.3.4


def chosen_positions(blocks: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same number of positions of each block (blocks, T), at least one, at random: int64 (blocks, chosen)."""
    count = max(1, round(SHARE * blocks.shape[1]))
    return torch.stack([torch.randperm(blocks.shape[1], generator=generator)[:count] for _ in blocks])


def sentinels_of(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The ids of <extra_id_0>, <extra_id_1>, …, which stand in the place of spans: int64 (sentinels,)."""
    by_number = {int(name[1]): id for token, id in tokenizer.get_vocab().items() if (name := SENTINEL.fullmatch(token))}
    return torch.tensor([by_number[number] for number in sorted(by_number)])


class Spans(NamedTuple):
    """The number of predicted tokens of so many, and the number of their spans; at least one of each."""

    tokens: int
    predicted: int
    spans: int

    @classmethod
    def of(cls, tokens: int) -> "Spans":
        """Of so many tokens, at least 2, rounded as in T5's `random_spans_noise_mask`."""
        predicted = min(max(1, round(SHARE * tokens)), tokens - 1)
        return cls(tokens, predicted, max(1, round(predicted / SPAN)))

    @classmethod
    def read_in(cls, block: int) -> "Spans":
        """Of the most tokens, at least 2, of which an encoder reads `block`, as in T5's `random_spans_helper`."""
        spans = cls.of(2)
        while (longer := cls.of(spans.tokens + 1)).read <= block:
            spans = longer
        return spans

    @property
    def read(self) -> int:
        """The number of tokens that the encoder reads: those that are kept, a sentinel for each span, and the end."""
        return self.tokens - self.predicted + self.spans + 1

    @property
    def targets(self) -> int:
        """The number of tokens that the decoder predicts: each span behind its sentinel, and the end."""
        return self.predicted + self.spans + 1


def corrupted(
    tokens: torch.Tensor, sentinels: torch.Tensor, end: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids with a sentinel in the place of each of some spans, and the spans, each behind its sentinel.

    What is kept and what is taken alternate, and the first is kept. How both are cut is drawn uniformly from all ways
    that leave no piece empty, as in T5's `random_spans_noise_mask`.

    Args:
        tokens: int64 (n,), at least 2; or (n, k), of tokens with what else is known of each, which goes along.
        sentinels: int64 (sentinels,) or (sentinels, k), in their order, at least as many as there are spans.
        end: the token behind both, int64 (1,) or (1, k).

    Returns:
        What is read and what is predicted, int64 (`Spans.of(n).read`, …) and (`Spans.of(n).targets`, …).
    """
    _, predicted, spans = Spans.of(len(tokens))
    kept = _cut(len(tokens) - predicted, spans, generator)
    lengths = torch.stack([kept, _cut(predicted, spans, generator)], 1).flatten()
    pieces, marks = tokens.split(lengths.tolist()), sentinels[:spans].split(1)
    read = [piece for pair in zip(pieces[::2], marks, strict=True) for piece in pair]
    targets = [piece for pair in zip(marks, pieces[1::2], strict=True) for piece in pair]
    return torch.cat([*read, end]), torch.cat([*targets, end])


def _cut(tokens: int, pieces: int, generator: torch.Generator) -> torch.Tensor:
    """Lengths of pieces, none of them empty, into which so many tokens are cut at random: int64 (pieces,)."""
    cuts = torch.randperm(tokens - 1, generator=generator)[: pieces - 1].sort().values + 1
    return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([tokens]))
