"""Examples: inputs of a model for one pass, with the labels to predict."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

IGNORED = -100  # the label of positions that are not predicted, as in transformers


class Example(NamedTuple):
    """An input with its labels, for a model that is no causal language model.

    ids: token ids, int64 (T,), for an encoder-decoder those of the encoder; for a picture its pixels, float32
    (channels, height, width). labels: the targets of the last hidden states, int64 (T,), `IGNORED` where nothing is
    predicted; for an encoder-decoder those of the decoder, for a picture its class (1,).
    """

    ids: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Example":
        return Example(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))


Block = torch.Tensor | Example  # for a causal language model token ids alone, which are its labels too


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of one length. ids: int64 (examples, T), or pixels; labels: int64 (examples, labels); see `Example`.

    protocol: what is predicted, such as "+masked", which rows append to the way in which the text was cut, as in
    "first-blocks+masked"; that of pictures stands alone. seeds: how many
    times the text is repeated with other tokens predicted. sizes: the UTF-8 bytes of the text that the labels of each
    example stand for, int64 (examples,), if known.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    protocol: str = ""
    seeds: int = 1
    sizes: torch.Tensor | None = None

    @classmethod
    def joined(cls, of_seeds: "Sequence[Examples]") -> "Examples":
        """Join the examples of one text by several seeds."""
        ids, labels = (torch.cat([getattr(examples, part) for examples in of_seeds]) for part in ("ids", "labels"))
        sizes = None if of_seeds[0].sizes is None else torch.cat([examples.sizes for examples in of_seeds])
        return cls(ids, labels, of_seeds[0].protocol, len(of_seeds), sizes)

    @property
    def shape(self) -> torch.Size:
        """The number of examples and their length."""
        return self.ids.shape

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: int | slice) -> "Example | Examples":
        ids, labels = self.ids[part], self.labels[part]
        if not isinstance(part, slice):
            return Example(ids, labels)
        return Examples(ids, labels, self.protocol, sizes=None if self.sizes is None else self.sizes[part])

    def __iter__(self) -> Iterator[Example]:
        return (self[number] for number in range(len(self)))


def input_ids(block: Block | Examples) -> torch.Tensor:
    """Return the token ids of a block, int64 (T,), or of examples, (examples, T); of pictures the pixels."""
    return block.ids if isinstance(block, (Example, Examples)) else block


def states_at_labels(block: Example, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last hidden states (predicted, features) that have a label, and the labels, int64 (predicted,)."""
    predicted = block.labels != IGNORED
    return states[predicted.to(states.device)], block.labels[predicted]
