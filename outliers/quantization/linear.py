"""A linear projection whose product runs in 8 bits."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from outlier_kernels import dispatch
from outlier_kernels.formats import ARITHMETICS, FORMATS
from outlier_kernels.reference import Exact, Quantized
from outlier_kernels.reference_formats import rounded
from torch import nn
from transformers.pytorch_utils import Conv1D

from outliers.quantization.layer import SchemeLinear
from outliers.quantization.magnitudes import Magnitudes, stored_weight
from outliers.quantization.remedies import SEARCH
from outliers.quantization.schemes import Scheme

# Weights between two codes: rounding decides by one bit which they get, and a draw decides it anew.
HALF_UNIT = 2.0**-24  # in the last place of float32, relative to the weight: how far it may be from the middle
MOVE, MOVE_IN_HALF = 2.0**-22, 2.0**-9  # of a weight: beyond what float32, or float16, loses until it is rounded


class Operand(NamedTuple):
    """A weight as a scheme multiplies it.

    codes: those of all of it. Under transforms, or in a draw, exact: the weight (outputs, features) that they stand
    for; fitted: what each transform made of the one before, and last the quantile at which inputs are clamped, float64
    (), if it was searched.
    """

    codes: Quantized
    exact: torch.Tensor | None = None
    fitted: tuple[torch.Tensor, ...] = ()


class Made(NamedTuple):
    """An operand, and what it was made of.

    weight: that of the projection, detached: as long as it is here, no other tensor has its memory. version: how often
    torch had counted an edit of it in place.
    """

    operand: Operand
    weight: torch.Tensor
    version: int | None

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether a weight is what it was when the operand was made, at the cost of a microsecond."""
        return self.weight.dtype == weight.dtype and self.weight.is_set_to(weight) and self.version == _version(weight)


class Drawn(NamedTuple):
    """An operand in a draw, and what it was made of."""

    operand: Operand
    draw: int
    made: Made


class QuantizedLinear(SchemeLinear):
    """A projection under a scheme, with the unquantized weights at hand.

    It shares the weight and bias of the projection that it replaces (`nn.Linear`, or the `Conv1D` of GPT-2, which
    stores its weight transposed) and quantizes them on first use, and again once they were replaced or edited in place
    (not through `.data`, where torch counts no edits; call `.to()` then). Outlier features are multiplied with the
    exact weights, as the paper's equation 8 has it, and both operands' scales are taken without them.

    draw: how weights between two codes fall, see `untie`; 0 to even. It never passes a gradient on.
    """

    draw = 0

    def __init__(
        self,
        projection: nn.Linear | Conv1D,
        scheme: Scheme,
        role: str | None = None,
        magnitudes: Magnitudes | None = None,
    ):
        super().__init__(scheme, role, magnitudes)
        self.projection = projection
        self.made: Made | None = None  # in one step, so that threads see all of it or nothing
        self.drawn: Drawn | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The unquantized weight (outputs, features)."""
        return stored_weight(self.projection)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and features."""
        return self.weight.shape

    @property
    def operand(self) -> Operand:
        """The weight as the scheme multiplies it.

        Not prepared for a faster product: a sweep changes its schemes more often than that would pay.
        """
        made, weight = self.made, self.projection.weight
        if made is None or not made.is_of(weight):
            version = _version(weight)
            # Made as ordinary tensors also in inference mode: they are kept, and autograd refuses inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                made = Made(operand_of(self.weight, self.here, self.magnitudes), weight.detach(), version)
            self.made = made
        return self._in_draw(made) if self.draw else made.operand

    def _in_draw(self, made: Made) -> Operand:
        drawn = self.drawn
        if drawn is None or drawn.draw != self.draw or drawn.made is not made:
            with torch.inference_mode(False), torch.no_grad():
                operand = drawn_operand(made.operand, self.weight, self.here, self.magnitudes, self.draw)
            drawn = self.drawn = Drawn(operand, self.draw, made)
        return drawn.operand

    @property
    def quantized_weight(self) -> Quantized:
        """The whole weight, quantized by the scheme."""
        return self.operand.codes

    def path(self, dtype: torch.dtype) -> str:
        """The path of the kernels that multiplies it with hidden states of a dtype, see `dispatch.backend_of`."""
        return path_under(self.here, self.weight.device, dtype)

    def share_codes(self, other: "QuantizedLinear") -> None:
        """Take the codes of another layer over the same weight, if it has any and they would come out alike."""
        if self.here.weight_operand == other.here.weight_operand and self.magnitudes is other.magnitudes:
            self.made = other.made

    def _apply(self, fn, recurse=True):
        self.made = None  # the codes are no buffer: quantize again where the model moves to
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "made": None, "drawn": None}

    def _quantized(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scheme, operand = self.here, self.operand
        weight = self.weight if operand.exact is None else operand.exact
        hidden_states = prepared(hidden_states, scheme, operand.fitted)
        keeps = scheme.outlier_threshold is not None and scheme.exact_outliers
        exact = Exact(weight, scheme.weights) if keeps else None
        bias, arguments = self.projection.bias, scheme.kernel_arguments
        return dispatch.linear(hidden_states, operand.codes, bias, **arguments, exact=exact)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return around(self.here, rows, self.projection, self._quantized)


def _version(weight: torch.Tensor) -> int | None:
    """Number of edits of a tensor in place; None of those that were made in inference mode, which do not count."""
    return None if weight.is_inference() else weight._version


def operand_of(weight: torch.Tensor, scheme: Scheme, magnitudes: Magnitudes | None = None) -> Operand:
    """A weight (outputs, features) as a scheme multiplies it: transformed first, then quantized.

    magnitudes: of the inputs that it will meet, where a remedy of the scheme has to know them.
    """
    asked, scheme = scheme, searched_numbers(weight, scheme, magnitudes) if scheme.searches else scheme
    exact, fitted = in_float32(weight) if scheme.transforms else weight, []
    for step in scheme.transforms:
        fitted.append(step.fit(exact, magnitudes))
        exact = step.do("weight", exact, fitted[-1])
        magnitudes = magnitudes and magnitudes.behind(step, fitted[-1])
    codes = _codes(exact, scheme, magnitudes)
    for step, found in zip(asked.doing("clips"), scheme.doing("clips"), strict=True):
        if step.number == SEARCH:
            fitted.append(torch.tensor(found.number, dtype=torch.float64, device=weight.device))
    return Operand(codes, exact if scheme.transforms else None, tuple(fitted))


def _codes(exact: torch.Tensor, scheme: Scheme, magnitudes: Magnitudes | None) -> Quantized:
    """The codes of a transformed weight; magnitudes: under the transforms."""
    codes = dispatch.quantize(exact, scheme.weights, scheme.arithmetic)
    for step in () if exact.is_meta else scheme.doing("codes"):
        codes = step.do("codes", in_float32(exact), codes, magnitudes, scheme.weights, step.number)
    return codes


def drawn_operand(
    operand: Operand, weight: torch.Tensor, scheme: Scheme, magnitudes: Magnitudes | None, draw: int
) -> Operand:
    """The operand of a weight (outputs, features) in a draw above 0: itself where no weight ties."""
    exact = weight if operand.exact is None else operand.exact
    untied = exact if scheme.weights is None else untie(exact, operand.codes, scheme, draw)
    if untied is exact:
        return operand
    for step, numbers in zip(scheme.transforms, operand.fitted, strict=False):
        magnitudes = magnitudes and magnitudes.behind(step, numbers)
    exact = operand.exact if scheme.outlier_threshold is None else untied  # which outlier features meet
    return operand._replace(codes=_codes(untied, scheme, magnitudes), exact=exact)


def untie(weight: torch.Tensor, codes: Quantized, scheme: Scheme, draw: int) -> torch.Tensor:
    """The weight with each entry between two codes moved up or down, as often by a draw; itself where there is none.

    How such an entry falls depends on the order of operations: `127 · (w / max)` and `(127 · w) / max` differ in it.
    What moves is as little as float32 needs to tell both apart, so that a scale stays where it is.

    weight: float (outputs, features), which has these codes, or compensated ones, under the scheme. draw: seed.
    """
    half = ARITHMETICS[scheme.arithmetic].half
    places = _ties(weight.half() if half else weight, codes, scheme)
    if not len(places):
        return weight
    up = torch.randint(2, places.shape, generator=torch.Generator().manual_seed(draw)).to(weight.device)
    moved = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True).contiguous()
    moved.view(-1)[places] *= 1 + (2 * up - 1) * (MOVE_IN_HALF if half else MOVE)
    return moved


def _ties(weight: torch.Tensor, codes: Quantized, scheme: Scheme) -> torch.Tensor:
    """The entries between two codes, int64 (ties,), counted row by row: of those that float32 finds, those that are
    there in float64."""
    element, (_, groups) = FORMATS[scheme.weights.format].element, codes.scale.shape
    grouped = weight.reshape(len(weight), groups, -1)

    def tie(scaled: torch.Tensor, distance: float) -> torch.Tensor:
        below, above = (scaled * (1 + side * distance) for side in (-1, 1))
        return (
            below.round_() != above.round_() if element is None else rounded(below, element) != rounded(above, element)
        )

    found = tie((grouped.float() / codes.scale[..., None]).flatten(), MOVE).nonzero()[:, 0]
    scale = codes.scale.expand(len(weight), groups).flatten()[found // grouped.shape[2]]
    return found[tie(weight.reshape(-1)[found].double() / scale.double(), HALF_UNIT)]


def searched_numbers(weight: torch.Tensor, scheme: Scheme, magnitudes: Magnitudes) -> Scheme:
    """A scheme with a number for each remedy whose number is searched, in the order in which they act: the one of its
    grid with the least ‖Y' − Y‖², Y the product of the exact weight (outputs, features) with the calibration's rows,
    and Y' the layer's without the remedies whose numbers are not yet found, weights rounded to nearest."""
    projection = nn.Linear(1, 1, bias=False)
    projection.weight = nn.Parameter(in_float32(weight), requires_grad=False)
    rows = magnitudes.rows.to(projection.weight)
    exact, magnitudes = projection(rows), magnitudes._replace(gram=None, rows=None)

    def error(candidate: Scheme) -> float:
        known = [remedy for remedy in candidate.remedies if remedy.number != SEARCH and not remedy.kind.codes]
        product = QuantizedLinear(projection, replace(candidate, remedies=known), None, magnitudes)(rows)
        return float((product - exact).double().square().sum())

    for place, remedy in enumerate(scheme.remedies):
        if remedy.number == SEARCH:
            before, after = scheme.remedies[:place], scheme.remedies[place + 1 :]
            tried = [remedy._replace(number=number) for number in remedy.kind.number.grid]
            candidates = [replace(scheme, remedies=(*before, each, *after)) for each in tried]
            scheme = candidates[0] if weight.is_meta else min(candidates, key=error)
    return scheme


def prepared(hidden_states: torch.Tensor, scheme: Scheme, fitted: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Hidden states (tokens, features) as a scheme quantizes them: under its transforms, and then clipped; fitted: of
    its `Operand`."""
    if fitted:
        hidden_states = in_float32(hidden_states)
    for step, numbers in zip(scheme.transforms, fitted, strict=False):
        hidden_states = step.do("hidden_states", hidden_states, numbers)
    for step in scheme.doing("clips"):
        number = float(fitted[-1]) if step.number == SEARCH else step.number
        hidden_states = step.do("clips", hidden_states, number, scheme)
    return hidden_states


def around(scheme: Scheme, rows: torch.Tensor, exact: Callable, quantized: Callable) -> torch.Tensor:
    """The product of hidden states (tokens, features) as a scheme puts it together of exact and quantized ones."""
    for step in scheme.doing("around"):
        quantized = partial(step.do, "around", number=step.number, exact=exact, quantized=quantized)
    return quantized(rows)


def in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float32, or in what has more digits already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def path_under(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> str:
    """The path of the kernels that multiplies plain codes, whatever they are, with hidden states of a dtype."""
    dtype = torch.promote_types(dtype, torch.float32)  # as a layer with exact weights multiplies
    features = 2 * (scheme.group or 1)  # so that groups are not the whole row
    zeros = torch.zeros(1, features, device=device, dtype=dtype)
    weight = dispatch.quantize(zeros, scheme.weights, scheme.arithmetic)
    return dispatch.backend_of(weight, scheme.activations, scheme.arithmetic, dtype).path
