"""The errors of schemes in the outputs of projections given exact inputs, and the largest inputs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import BrokenModel, UserError
from outliers.metrics.measurement import Measurement, MemoryNeeds, loaded, stored_bytes
from outliers.metrics.records import Inputs
from outliers.models.anatomy import Projection, check_positions, projections, state_readers
from outliers.models.decoder import inference, watched_pass
from outliers.models.hooks import expert_hooks, input_hooks
from outliers.models.stream import Variant
from outliers.quantization.linear import QuantizedLinear
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache, naming
from outliers.variants.peer import Against
from outliers.variants.quantized import EXACT, Quantized
from outliers.variants.together import Together

ProjectionPlace = tuple[int, str, str]  # of a projection: layer, role and path


class Largest(NamedTuple):
    """The largest |x| of a hidden state, with its feature, position in the block and token id."""

    value: float
    feature: int
    position: int
    token: int


class Error(NamedTuple):
    """The error of a projection's output Y_q under a scheme, relative to its exact output Y.

    square: ‖Y_q − Y‖². energy: ‖Y‖². ratios: the same ratio for each token, summed over the tokens whose output is not
    zero. tokens: the number of these tokens.
    """

    square: float
    energy: float
    ratios: float
    tokens: int


class BlockErrors(NamedTuple):
    """The errors of one block.

    errors: by path of the projection, then by number of the scheme that quantizes it. largest: the largest input of
    each hidden state, by layer and role.
    """

    errors: dict[str, dict[int, Error]]
    largest: dict[tuple[int, str], Largest]


@inference
def block_errors(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    variants: Sequence[Quantized | Against],
    base: Variant = EXACT,
) -> list[BlockErrors]:
    """Return the errors under some schemes for each block, all in one pass.

    The model computes exact hidden states. Each projection also multiplies its input under each scheme, and these
    outputs are dropped after comparison. Sums are taken in float64. Successive schemes that quantize weights alike
    share their codes, which stay in memory for all layers of a resident model, and for one layer of a streamed one.

    Args:
        model: a causal language model, quantized or not, resident or streamed.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,).
        variants: the schemes; or other models, of which all projections are compared.
        base: a change of the model, such as an ablation, under which its hidden states are exact; by default none.

    Raises:
        UserError: a block does not fit the model; as `outliers.quantize`.
    """
    observer = _ErrorObserver(variants)
    watched_pass(model, blocks, observer.hooks, base, observer.begin)
    return list(observer.blocks.values())


class _ErrorObserver:
    """A recorder of errors under schemes and of largest inputs, block by block; layers may take turns."""

    def __init__(self, variants: Sequence[Quantized | Against]):
        self.variants = variants
        self.blocks: dict[int, BlockErrors] = {}
        self.stacks: dict[tuple[int, str], int] = {}  # the stack whose positions a state has, by layer and role

    def begin(self, number: int, inputs: tuple[torch.Tensor, ...]) -> None:
        """Announce the next block to the hooks; inputs: what each stack reads of it."""
        self.inputs, self.block = inputs, self.blocks.setdefault(number, BlockErrors({}, {}))

    @contextmanager
    def hooks(self, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
        with ExitStack() as stack:
            changed = [stack.enter_context(variant.on(model, layer)) for variant in self.variants]  # before the hooks
            under_schemes = zip(*map(projections, changed), strict=True) if changed else ()
            layers = {same[0].path: [part.module for part in same] for same in under_schemes}
            observed = list(projections(model, layer))
            self.stacks |= {_state(part): part.position_stack for part in observed}
            whole = [
                one for one in state_readers(model, layer) if one.expert is None and one.layer_state in self.stacks
            ]
            stack.enter_context(input_hooks(whole, self._see_input))
            stack.enter_context(expert_hooks(model, self._see_neurons, only=layer))
            for projection in observed:
                modules = enumerate(layers.get(projection.path, ()))
                others = {number: module for number, module in modules if self._is_changed(number, module)}
                if others:  # else the projection is skipped
                    see = partial(self._see_output, projection.path, others)
                    stack.callback(projection.module.register_forward_hook(see).remove)
            yield

    def _is_changed(self, number: int, module: nn.Module) -> bool:
        """Return whether a module under a variant, by its number, is quantized or another model's."""
        return isinstance(module, QuantizedLinear) or bool(self.variants[number].swaps)

    def _see_neurons(self, layer: int, _expert: int, tokens: torch.Tensor, x: torch.Tensor) -> None:
        self._see_input(layer, "ffn_out", x, tokens)

    def _see_input(self, layer: int, role: str, x: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """Record the largest input of projections; positions: of its tokens, if it has only some of the block."""
        magnitudes = x.abs().amax(1)
        token = magnitudes.argmax().item()
        position = token if positions is None else positions[token].item()
        ids = self.inputs[self.stacks[layer, role]]
        if positions is None:
            check_positions(layer, len(x), len(ids))
        place = x[token].abs().argmax().item(), position, ids[position].item()
        largest, known = Largest(magnitudes[token].item(), *place), self.block.largest.get((layer, role))
        if positions is None or known is None or largest.value > known.value:
            self.block.largest[layer, role] = largest

    def _see_output(
        self, path: str, layers: Mapping[int, nn.Module], _module, inputs: tuple, output: torch.Tensor
    ) -> None:
        """Record the errors of a projection for its input (..., features) and output (..., outputs).

        layers: the projection under each scheme, by the scheme's number.
        """
        exact, errors, before = _by_token(output), {}, None
        energies = _energies(exact)
        for number, layer in layers.items():
            if isinstance(layer, QuantizedLinear):
                layer.share_codes(before or layer)
                before = layer
            errors[number] = _error(_energies(_by_token(layer(inputs[0])) - exact), energies)
        self.block.errors[path] = errors


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """Return outputs as (tokens, outputs) in float32 or better, so that differences are not rounded to 16 bits."""
    return x.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))


def _energies(x: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of each token, float64 (tokens,)."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square()


def _error(squares: torch.Tensor, energies: torch.Tensor) -> Error:
    nonzero = energies > 0
    ratios = (squares[nonzero] / energies[nonzero]).sum()
    return Error(squares.sum().item(), energies.sum().item(), ratios.item(), int(nonzero.sum()))


class ErrorsMeasurement(Measurement):
    """The measurement of projections: the errors of all schemes, and the largest inputs, share one exact pass."""

    cost = 1.5

    def shared(self, cell: Cell) -> str:
        return _split_scheme(cell)[0].name

    def memory_needs(self, cells: Sequence[Cell]) -> MemoryNeeds:
        schemes = (quantized.scheme for cell in cells for quantized in cell.variant.schemes)
        return MemoryNeeds((stored_bytes(schemes),), other_models=sum(len(cell.variant.swaps) for cell in cells))

    def steps(self, cells: Sequence[Cell]) -> int:
        return len(cells) * len(cells[0].subject.blocks)

    def measure(
        self, model_cache: ModelCache, cells: Sequence[Cell], part: slice, provenance: dict
    ) -> list[list[dict]]:
        """Return, for each cell and block, the errors by projection, or the largest inputs by layer and role."""
        subject = cells[0].subject
        base, schemes = _split_scheme(cells[0])[0], [scheme for cell in cells for scheme in _split_scheme(cell)[1]]
        model, schemes = loaded(model_cache, subject, schemes, provenance)
        blocks = model_cache.with_progress(subject.blocks[part], len(cells))
        with naming(subject.name, *(scheme.name for scheme in schemes)):
            errors = block_errors(model, blocks, schemes, base)
        places, numbers = list(projections(model)), iter(range(len(schemes)))
        return [_of_cell(errors, places, next(numbers) if _split_scheme(cell)[1] else None) for cell in cells]

    def values(self, cell: Cell, results: list[list[dict]]) -> list[dict]:
        blocks = list(chain.from_iterable(results))
        return _errors(blocks) if _split_scheme(cell)[1] else _largest(blocks)


def _split_scheme(cell: Cell) -> tuple[Variant, list[Quantized | Against]]:
    """Split a variant into the change under which blocks pass and, for errors, the scheme or model that is measured.

    Raises:
        UserError: errors are measured of a variant that does not end in a scheme.
    """
    if isinstance(cell.metric, Inputs):
        return cell.variant, []
    *others, scheme = cell.variant.parts
    if not scheme.has_output_errors:
        raise UserError(
            f"errors under '{cell.variant.name}', which leaves no projection quantized; expected a scheme such as "
            "absmax, or another model"
        )
    return Together(tuple(others)) if others else EXACT, [scheme]


def _of_cell(blocks: list[BlockErrors], places: list[Projection], number: int | None) -> list[dict]:
    """Return the errors of blocks under the scheme with a number, or without one the largest inputs."""
    if number is None:
        states = dict.fromkeys(map(_state, places))
        return [{state: block.largest[state] for state in states if state in block.largest} for block in blocks]
    quantized = [place for place in places if any(number in block.errors.get(place.path, ()) for block in blocks)]
    none = Error(0.0, 0.0, 0.0, 0)  # for experts that no token of a block chose
    return [{place[:3]: block.errors.get(place.path, {}).get(number, none) for place in quantized} for block in blocks]


def _state(part: Projection) -> tuple[int, str]:
    """Return the layer and role of a projection's input; all experts of a layer share them."""
    return part.layer_state if part.expert is None else (part.layer, part.role)


def _largest(blocks: list[dict[tuple[int, str], Largest]]) -> list[dict]:
    """Return the largest value of each hidden state that projections read, the first one among equals."""
    states = dict.fromkeys(chain.from_iterable(blocks))  # a block may lack states that experts read
    largest = {
        state: max((block[state] for block in blocks if state in block), key=lambda value: value.value)
        for state in states
    }
    return [
        {"metric": "damage.largest_input", "layer": layer, "role": role, **value._asdict(), "unit": "1"}
        for (layer, role), value in largest.items()
    ]


def _errors(blocks: list[dict[ProjectionPlace, Error]]) -> list[dict]:
    """Return the error of each projection over all tokens, and the mean of the errors of single tokens."""
    values = []
    for layer, role, path in blocks[0]:
        errors = [block[layer, role, path] for block in blocks]
        square, energy, ratios, tokens = map(math.fsum, zip(*errors, strict=True))
        if not (math.isfinite(square) and math.isfinite(energy)):
            raise BrokenModel(
                f"the output of '{path}' has the energy {energy:g}, and its error {square:g}; expected finite numbers: "
                "try another dtype (float32, bfloat16) or check the weights"
            )
        place = {"layer": layer, "role": role, "projection": path, "unit": "1"}
        over_all, by_token = square / energy if energy else 0.0, ratios / tokens if tokens else 0.0
        metrics = {"damage.error": over_all, "damage.error_by_token": by_token}
        values += [{"metric": metric, "value": value, **place} for metric, value in metrics.items()]
    return values


MEASUREMENT = ErrorsMeasurement()
