"""A linear projection that keeps its exact weights and multiplies in few bits.

A weight halfway between two codes is a tie, whose rounding depends on its last bit; a draw, numbered by its seed,
rounds ties at random. Draw 0 rounds them to even.
"""

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

from outliers.quantization.layer import SchemeLinear
from outliers.quantization.magnitudes import InputSummary, PlainLinear, stored_weight
from outliers.quantization.remedies import SEARCH
from outliers.quantization.schemes import Scheme

HALF_UNIT = 2.0**-24  # largest distance of a tie from the midpoint, relative to the weight, in float32
MOVE, MOVE_IN_HALF = 2.0**-22, 2.0**-9  # relative shifts of a tie, beyond the rounding error of float32, or float16


class Operand(NamedTuple):
    """A weight prepared for products under a scheme.

    codes: of the whole weight. exact: under transforms, or in a draw, the weight (outputs, features) that the codes
    approximate; else None. fitted: the tensor that each transform fitted, and last the searched quantile at which
    inputs are clamped, float64 (), if there is one.
    """

    codes: Quantized
    exact: torch.Tensor | None = None
    fitted: tuple[torch.Tensor, ...] = ()


class CachedOperand(NamedTuple):
    """A cached operand and the weight it was made from.

    weight: the projection's weight, detached; holding it keeps its memory from being reused for another tensor.
    version: torch's counter of edits in place. ties: flat indices of the entries halfway between two codes, int64
    (ties,); None until a draw needs them.
    """

    operand: Operand
    weight: torch.Tensor
    version: int | None
    ties: torch.Tensor | None = None

    def is_of(self, weight: torch.Tensor) -> bool:
        """Return whether a weight is unchanged since the operand was made, in about a microsecond."""
        return (
            self.weight.dtype == weight.dtype and self.weight.is_set_to(weight) and self.version == version_of(weight)
        )


class CachedDraw(NamedTuple):
    """A cached operand with its ties rounded by a draw, and the cached operand it was made from."""

    operand: Operand
    draw: int
    made: CachedOperand


class QuantizedLinear(SchemeLinear):
    """A projection under a scheme that keeps its exact weights.

    It shares the weight and bias of the projection that it replaces (`nn.Linear`, or the `Conv1D` of GPT-2, which
    stores its weight transposed). It quantizes them on first use, and again after they were replaced or edited in place
    (edits through `.data` go undetected, because torch does not count them; call `.to()` then). Outlier features are
    multiplied with the exact weights, as in the paper's equation 8, and both operands' scales are computed without
    them.

    The layer never passes a gradient on.
    """

    draw = 0

    def __init__(
        self, projection: PlainLinear, scheme: Scheme, role: str | None = None, magnitudes: InputSummary | None = None
    ):
        super().__init__(scheme, role, magnitudes)
        self.projection = projection
        self.made: CachedOperand | None = None  # one assignment, so that threads see all of it or nothing
        self.drawn: CachedDraw | None = None

    @property
    def weight(self) -> torch.Tensor:
        return stored_weight(self.projection)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def operand(self) -> Operand:
        """The weight as the scheme multiplies it, cached unless the weight itself is read for each call.

        It is not repacked for a faster product: a sweep changes its schemes too often for that to pay.
        """
        made, weight = self.made, self.projection.weight
        if made is None or not made.is_of(weight):
            version = version_of(weight)
            # Ordinary tensors even in inference mode: they are cached, and autograd refuses inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                made = CachedOperand(operand_of(self.weight, self.here, self.magnitudes), weight.detach(), version)
            if self._is_cacheable:
                self.made = made
        return self._draw_operand(made) if self.draw else made.operand

    def _draw_operand(self, made: CachedOperand) -> Operand:
        """Return the weight's operand in the layer's current draw, which rounds ties at random; cache the last one."""
        drawn = self.drawn
        if drawn is None or drawn.draw != self.draw or drawn.made is not made:
            with torch.inference_mode(False), torch.no_grad():
                if made.ties is None:
                    made = made._replace(ties=ties_of(made.operand, self.weight, self.here))
                operand = drawn_operand(made, self.weight, self.here, self.magnitudes, self.draw)
            drawn = CachedDraw(operand, self.draw, made)
            if self._is_cacheable:
                self.made, self.drawn = made, drawn
        return drawn.operand

    @property
    def _is_cacheable(self) -> bool:
        return not getattr(self.projection, "is_transient", False)

    @property
    def quantized_weight(self) -> Quantized:
        return self.operand.codes

    def kernels(self, dtype: torch.dtype) -> str:
        """Return the name of the kernels that multiply the weight with hidden states of a dtype, see
        `dispatch.backend_of`."""
        return kernels_of(self.here, self.weight.device, dtype)

    def share_codes(self, other: "QuantizedLinear") -> None:
        """Take over the codes of another layer with the same weight if both schemes quantize it alike."""
        if self.here.weight_operand == other.here.weight_operand and self.magnitudes is other.magnitudes:
            self.made = other.made

    def _apply(self, fn, recurse=True):
        self.made = None  # codes are no buffer: quantize again on the new device
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "made": None, "drawn": None}

    def _quantized(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scheme, operand = self.here, self.operand
        weight = self.weight if operand.exact is None else operand.exact
        hidden_states = transform_input(hidden_states, scheme, operand.fitted)
        keeps = scheme.outlier_threshold is not None and scheme.exact_outliers
        exact = Exact(weight, scheme.weights) if keeps else None
        bias, arguments = self.projection.bias, scheme.kernel_arguments
        return dispatch.linear(hidden_states, operand.codes, bias, **arguments, exact=exact)

    @torch.compiler.disable  # traced, a layer is seven graphs instead of two
    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return combine_products(self.here, rows, self.projection, self._quantized)


def version_of(weight: torch.Tensor) -> int | None:
    """Return torch's counter of in-place edits; None for inference tensors, which have none."""
    return None if weight.is_inference() else weight._version


def operand_of(weight: torch.Tensor, scheme: Scheme, magnitudes: InputSummary | None = None) -> Operand:
    """Transform and quantize a weight (outputs, features) for products under a scheme.

    magnitudes: statistics of its inputs, for remedies that require them.
    """
    given, scheme = scheme, fill_searched_numbers(weight, scheme, magnitudes) if scheme.searches else scheme
    exact, fitted = in_float32(weight) if scheme.transforms else weight, []
    for step in scheme.transforms:
        fitted.append(step.fit(exact, magnitudes))
        exact = step.call("weight", exact, fitted[-1])
        magnitudes = magnitudes and magnitudes.transform(step, fitted[-1])
    codes = _codes(exact, scheme, magnitudes)
    for step, found in zip(given.remedies_with("clips"), scheme.remedies_with("clips"), strict=True):
        if step.number == SEARCH:
            fitted.append(torch.tensor(found.number, dtype=torch.float64, device=weight.device))
    return Operand(codes, exact if scheme.transforms else None, tuple(fitted))


def _codes(exact: torch.Tensor, scheme: Scheme, magnitudes: InputSummary | None) -> Quantized:
    """Return the codes of a transformed weight; magnitudes: statistics of the transformed inputs."""
    codes = dispatch.quantize(exact, scheme.weights, scheme.arithmetic)
    for step in () if exact.is_meta else scheme.remedies_with("codes"):
        codes = step.call("codes", in_float32(exact), codes, magnitudes, scheme.weights, step.number)
    return codes


def ties_of(operand: Operand, weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the flat indices of the entries of a weight (outputs, features) halfway between two codes of its operand,
    int64 (ties,).

    Candidates are found in float32 and confirmed in float64.
    """
    if scheme.weights is None:
        return torch.empty(0, dtype=torch.int64)
    exact = weight if operand.exact is None else operand.exact
    exact = exact.half() if ARITHMETICS[scheme.arithmetic].half else exact
    element, scale = FORMATS[scheme.weights.format].element, operand.codes.scale
    grouped = exact.reshape(len(exact), scale.shape[1], -1)

    def tie(scaled: torch.Tensor, distance: float) -> torch.Tensor:
        sides = (scaled * (1 + side * distance) for side in (-1, 1))
        below, above = (side.round_() if element is None else rounded(side, element) for side in sides)
        return below != above

    candidates = tie((grouped.float() / scale[..., None]).flatten(), MOVE).nonzero()[:, 0]
    scale = scale.expand(len(exact), -1).flatten()[candidates // grouped.shape[2]]
    return candidates[tie(exact.reshape(-1)[candidates].double() / scale.double(), HALF_UNIT)]


def drawn_operand(
    made: CachedOperand, weight: torch.Tensor, scheme: Scheme, magnitudes: InputSummary | None, draw: int
) -> Operand:
    """Return an operand with its ties rounded by a draw above 0; the same operand if it has no ties.

    weight: float (outputs, features).
    """
    operand = made.operand
    if not len(made.ties):
        return operand
    exact = weight if operand.exact is None else operand.exact
    untied = break_ties(exact, made.ties, scheme, draw)
    for step, numbers in zip(scheme.transforms, operand.fitted, strict=False):
        magnitudes = magnitudes and magnitudes.transform(step, numbers)
    exact = operand.exact if scheme.outlier_threshold is None else untied  # outlier features are multiplied with it
    return operand._replace(codes=_codes(untied, scheme, magnitudes), exact=exact)


def break_ties(weight: torch.Tensor, ties: torch.Tensor, scheme: Scheme, draw: int) -> torch.Tensor:
    """Return a weight whose entries halfway between two codes are moved up or down at random.

    How such a tie is rounded depends on the order of operations: `127 · (w / max)` and `(127 · w) / max` differ in it.
    An entry moves by as little as float32 can tell apart, so that scales stay the same.

    weight: float (outputs, features). ties: flat indices of these entries, int64 (ties,). draw: seed.
    """
    half = ARITHMETICS[scheme.arithmetic].half
    up = torch.randint(2, ties.shape, generator=torch.Generator().manual_seed(draw)).to(weight.device)
    moved = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True).contiguous()
    moved.view(-1)[ties] *= 1 + (2 * up - 1) * (MOVE_IN_HALF if half else MOVE)
    return moved


def fill_searched_numbers(weight: torch.Tensor, scheme: Scheme, magnitudes: InputSummary) -> Scheme:
    """Return a scheme with the searched numbers of its remedies filled in, one after the other in the order in which
    they act.

    Each number is that of its `RemedyNumber.grid` with the least ‖Y' − Y‖². Y is the product of the exact weight
    (outputs, features) with the calibration's rows; Y' is that of the layer without the remedies whose numbers are
    still unknown and with weights rounded to nearest.
    """
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
            options = [remedy._replace(number=number) for number in remedy.kind.number.grid]
            candidates = [replace(scheme, remedies=(*before, option, *after)) for option in options]
            scheme = candidates[0] if weight.is_meta else min(candidates, key=error)
    return scheme


def transform_input(hidden_states: torch.Tensor, scheme: Scheme, fitted: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Apply a scheme's transforms to hidden states (tokens, features) and clip them; fitted: see `Operand`."""
    if fitted:
        hidden_states = in_float32(hidden_states)
    for step, numbers in zip(scheme.transforms, fitted, strict=False):
        hidden_states = step.call("hidden_states", hidden_states, numbers)
    for step in scheme.remedies_with("clips"):
        number = float(fitted[-1]) if step.number == SEARCH else step.number
        hidden_states = step.call("clips", hidden_states, number, scheme)
    return hidden_states


def combine_products(scheme: Scheme, rows: torch.Tensor, exact: Callable, quantized: Callable) -> torch.Tensor:
    """Multiply hidden states (tokens, features) by the functions of exact and of quantized products, which remedies
    such as `tokens` combine, the last remedy outermost."""
    for step in scheme.remedies_with("around"):
        quantized = partial(step.call, "around", number=step.number, exact=exact, quantized=quantized)
    return quantized(rows)


def in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32, or in its own dtype if that is more precise."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def kernels_of(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the kernels that multiply plain codes with hidden states of a dtype under a scheme."""
    dtype = torch.promote_types(dtype, torch.float32)  # the dtype in which a layer with exact weights multiplies
    features = 2 * (scheme.group or 1)  # two groups, so that one is not the whole row
    zeros = torch.zeros(1, features, device=device, dtype=dtype)
    weight = dispatch.quantize(zeros, scheme.weights, scheme.arithmetic)
    return dispatch.backend_of(weight, scheme.activations, scheme.arithmetic, dtype).row_name
