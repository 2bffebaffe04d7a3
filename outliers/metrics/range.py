"""The largest magnitudes in one pass in float32, by layer and place."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from outliers.criterion import RESIDUAL
from outliers.errors import not_finite
from outliers.metrics.measurement import CellMeasurement
from outliers.models.anatomy import state_readers
from outliers.models.attention import AttentionCall, product_hooks
from outliers.models.decoder import inference, watched_pass
from outliers.models.hooks import input_hooks, residual_hooks
from outliers.models.stream import Variant
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache

BLOCK = 32  # consecutive inputs whose sum is stored in float16 by formats such as Q8_1
RangePlace = tuple[str, int, str, str]  # metric, layer, role, and path of a projection where one output is meant


def block_sums(x: torch.Tensor) -> torch.Tensor:
    """Return sums of `BLOCK` consecutive inputs of each token: (tokens, features) to (tokens, blocks), in float32."""
    padded = functional.pad(x.float(), (0, -x.shape[1] % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).sum(2)


class _Largest(dict[RangePlace, float]):
    """The largest magnitude at each place so far."""

    def add(self, place: RangePlace, x: torch.Tensor) -> None:
        """Keep the largest magnitude at a place."""
        value = x.abs().amax().item() if x.numel() else 0.0
        if not math.isfinite(value):
            raise not_finite(f"in layer {place[1]}, {place[3] or place[2] or 'attention logits'}")
        self[place] = max(self.get(place, 0.0), value)

    def see_state(self, layer: int, role: str, x: torch.Tensor) -> None:
        self.add(("range.input", layer, role, ""), x.float())
        self.add(("range.block_sum", layer, role, ""), block_sums(x))

    def see_logits(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, _value: torch.Tensor, call: AttentionCall
    ) -> None:
        """Record the scores of queries and keys (1, heads, T, head size), one head at a time to save memory."""
        groups = query.shape[1] // key.shape[1]
        hidden = ~call.visible(query.shape[2], key.shape[2]).to(query.device)
        for head in range(query.shape[1]):
            scores = query[0, head].float() @ key[0, head // groups].float().T
            self.add(("range.attention_logit", layer, "", ""), scores.masked_fill_(hidden, 0) * call.scale(query))

    @contextmanager
    def hooks(self, model: PreTrainedModel, number: int | None) -> Iterator[None]:
        readers = list(state_readers(model, number))
        with ExitStack() as stack:
            stack.enter_context(input_hooks(readers, self.see_state))
            stack.enter_context(residual_hooks(model, lambda layer, x: self.see_state(layer, RESIDUAL, x), number))
            for part in readers:
                hook = _on_output(partial(self.add, ("range.output", part.layer, part.role, part.path)))
                stack.callback(part.module.register_forward_hook(hook).remove)
            stack.enter_context(product_hooks(model, self.see_logits, number))
            yield


def _on_output(see: Callable[[torch.Tensor], None]) -> Callable:
    def hook(_module: nn.Module, _inputs: tuple, output: torch.Tensor | tuple) -> None:
        see((output[0] if isinstance(output, tuple) else output).float())  # a mixture may add router logits

    return hook


@inference
def largest_numbers(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Variant
) -> dict[RangePlace, float]:
    """Return the largest magnitude at each place of a model under a variant, in float32 or the model's own dtype.

    Raises:
        BrokenModel: a value is NaN or inf.
    """
    largest = _Largest()
    watched_pass(model, blocks, largest.hooks, variant)
    return dict(largest)


class RangeMeasurement(CellMeasurement):
    """The measurement of the largest numbers, in one pass per cell."""

    def measure_cell(
        self, _model_cache: ModelCache, _cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Variant
    ) -> dict[RangePlace, float]:
        return largest_numbers(model, blocks, variant)

    def values(self, cell: Cell, results: list[dict[RangePlace, float]]) -> list[dict]:
        places = {place: max(result[place] for result in results) for place in results[0]}
        names = ("metric", "layer", "role", "projection")
        whole = {"metric": "range", "value": max(places.values()), "unit": "1"}
        return [whole] + [
            {name: part for name, part in zip(names, place, strict=True) if part != ""} | {"value": value, "unit": "1"}
            for place, value in places.items()
        ]


MEASUREMENT = RangeMeasurement()
