"""The error that schemes make in the output of each projection, from the inputs of the unquantized model."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.models.anatomy import Projection, projections
from outliers.models.decoder import inference, run_decoder, under
from outliers.models.hooks import input_hooks
from outliers.models.stream import Watched
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.schemes import BASELINE, SCHEMES
from outliers.variants.quantized import Quantized

EXACT = Quantized(SCHEMES[BASELINE])  # the unquantized model, whatever it is under


class Largest(NamedTuple):
    """The largest |x| of a hidden state, with its feature, position in the block and token id."""

    value: float
    feature: int
    position: int
    token: int


class Error(NamedTuple):
    """Of the output of a projection, Y and Y_q under a scheme.

    square: ‖Y_q − Y‖². energy: ‖Y‖². ratios: the same of each token, one divided by the other, and summed over the
    tokens whose output is not zero. tokens: how many these are.
    """

    square: float
    energy: float
    ratios: float
    tokens: int


class BlockErrors(NamedTuple):
    """What a block shows.

    errors: of each projection, by its path, under every scheme, in their order. largest: of each hidden state that
    projections read, by layer and role.
    """

    errors: dict[str, list[Error]]
    largest: dict[tuple[int, str], Largest]


@inference
def block_errors(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variants: Sequence[Quantized]
) -> list[BlockErrors]:
    """Of each block the errors under some schemes, all in one pass.

    The hidden states that pass are those of the unquantized model; each projection multiplies its input once more under
    each scheme, and nothing of that goes on. Sums are taken in float64. Codes are made once for schemes side by side
    that share them; they stay in memory for all layers of a resident model, and for one layer of a streamed one.

    Args:
        model: a causal language model, quantized or not, resident or streamed.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,).
        variants: the schemes.

    Raises:
        UserError: a block does not fit the model; as `outliers.quantize`.
    """
    observer = _Observer()
    watched = Watched(EXACT, partial(_hooks, observer, variants))
    with under(model, watched) as (exact, left):
        for _ in run_decoder(exact, blocks, observer.begin, left):
            pass
    return list(observer.found.values())


class _Observer:
    """Takes down what hooks see of blocks, whose turns may come layer by layer."""

    def __init__(self):
        self.found: dict[int, BlockErrors] = {}

    def begin(self, number: int, ids: torch.Tensor) -> None:
        """What the hooks see next is of this block, ids (T,)."""
        self.ids, self.block = ids, self.found.setdefault(number, BlockErrors({}, {}))

    def see_input(self, layer: int, role: str, x: torch.Tensor) -> None:
        """Of a hidden state (T, features)."""
        of_tokens = x.abs().amax(1)
        position = of_tokens.argmax().item()
        place = x[position].abs().argmax().item(), position, self.ids[position].item()
        self.block.largest[layer, role] = Largest(of_tokens[position].item(), *place)

    def see_output(self, path: str, layers: list[QuantizedLinear], x: torch.Tensor, output: torch.Tensor) -> None:
        """Of a projection with its input x (..., features) and output (..., outputs), and what it is under schemes."""
        exact, errors = _by_token(output), []
        energies = _energies(exact)
        for layer, before in zip(layers, [layers[0], *layers], strict=False):
            layer.share_codes(before)
            errors.append(_error(_energies(_by_token(layer(x)) - exact), energies))
        self.block.errors[path] = errors


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """As (tokens, outputs), in float32 or better: differences in 16 bits would be rounded."""
    return x.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))


def _energies(x: torch.Tensor) -> torch.Tensor:
    """Of each token, float64 (tokens,)."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square()


def _error(squares: torch.Tensor, energies: torch.Tensor) -> Error:
    there = energies > 0
    ratios = (squares[there] / energies[there]).sum()
    return Error(squares.sum().item(), energies.sum().item(), ratios.item(), int(there.sum()))


@contextmanager
def _hooks(
    observer: _Observer, variants: Sequence[Quantized], model: PreTrainedModel, layer: int | None
) -> Iterator[None]:
    """Those by which an observer sees the projections of all layers of an exact model, or of one."""
    with ExitStack() as stack:
        changed = [stack.enter_context(variant.on(model, layer)) for variant in variants]  # before there are hooks
        under_schemes = zip(*map(projections, changed), strict=True) if changed else ()
        seen = [one for one in projections(model) if layer in (None, one.layer)]
        layers = {of_one[0].path: [one.module for one in of_one] for of_one in under_schemes}
        stack.enter_context(input_hooks(seen, observer.see_input))
        for projection in seen:
            quantized = [one for one in layers.get(projection.path, ()) if isinstance(one, QuantizedLinear)]
            if quantized:  # and not skipped
                stack.callback(projection.module.register_forward_hook(_hook(observer, projection, quantized)).remove)
        yield


def _hook(observer: _Observer, projection: Projection, layers: list[QuantizedLinear]):
    return lambda _module, inputs, output: observer.see_output(projection.path, layers, inputs[0], output)
