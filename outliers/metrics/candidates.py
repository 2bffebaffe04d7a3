"""The search for super weights: by activations in one pass over a text, and in the weights alone."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outliers.criterion import SPIKE
from outliers.errors import UserError, not_finite
from outliers.metrics.measurement import CellMeasurement
from outliers.metrics.records import Candidates
from outliers.models.anatomy import Projection, anatomy_of, check_one_stack, check_plain, projections
from outliers.models.decoder import inference, watched_pass
from outliers.models.hooks import residual_hooks
from outliers.models.stream import AS_IT_IS, Variant, is_streamed
from outliers.quantization.linear import stored_weight
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache
from outliers.variants.term import WeightEntry

ROLE = "ffn_out"  # the input of the second feed-forward projection, which has the super weights


class Spike(NamedTuple):
    """The entry of a hidden state with the largest magnitude over a text."""

    value: float
    feature: int
    position: int

    @classmethod
    def of(cls, x: torch.Tensor, tokens: torch.Tensor | None = None) -> "Spike":
        """Return the spike of x (T, features); raise BrokenModel if it is NaN or inf.

        tokens: the positions of the rows, if x is of an expert, which has only some.
        """
        row, feature = divmod(int(x.abs().argmax()), x.shape[1])
        value, position = x[row, feature].item(), row if tokens is None else int(tokens[row])
        if not math.isfinite(value):
            raise not_finite(f"at a second feed-forward projection, position {position}")
        return cls(value, feature, position)

    def larger(self, other: "Spike | None") -> "Spike":
        """Return the larger of two spikes; the other one if they are equal."""
        return self if other is None or abs(self.value) > abs(other.value) else other


class Peaks(NamedTuple):
    """Statistics of peaks: a feature's peak in a sequence is its entry of the largest magnitude.

    total: float64 (features,), the sum of peaks. least: float64 (features,), the smallest magnitude of a peak.
    sequences: the number of sequences.
    """

    total: torch.Tensor
    least: torch.Tensor
    sequences: int

    @classmethod
    def of(cls, x: torch.Tensor) -> "Peaks":
        peak = x.gather(0, x.abs().argmax(0, keepdim=True))[0].double().cpu()
        return cls(peak, peak.abs(), 1)

    def joined(self, other: "Peaks | None") -> "Peaks":
        if other is None:
            return self
        least = torch.minimum(self.least, other.least)
        return Peaks(self.total + other.total, least, self.sequences + other.sequences)

    def at(self, feature: int) -> dict:
        """Return the mean entry of a feature and the smallest magnitude, in six digits, as names of variants have."""
        both = {"state": self.total[feature] / self.sequences, "least": self.least[feature]}
        return {name: float(f"{value.item():.6g}") for name, value in both.items()}


class _CandidateObserver:
    """An observer of the spikes at each second feed-forward projection, and of its weight while it is in memory.

    inputs, outputs, layers_of: by path of the projection. peaks: by layer.
    """

    def __init__(self, metric: Candidates):
        self.metric = metric
        self.inputs: dict[str, Spike] = {}
        self.outputs: dict[str, Spike] = {}
        self.peaks: dict[int, Peaks] = {}
        self.layers_of: dict[str, int] = {}
        self.candidates: list[dict] = []  # for each projection, the candidate by activations and the one by weights

    @contextmanager
    def hooks(self, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
        """Observe all layers of a model, or one, within this context; inspect the weights at its end."""
        read = [part for part in projections(model, layer) if part.role == ROLE]
        with ExitStack() as stack:
            for projection in read:
                owner = model.get_submodule(projection.path.rpartition(".")[0])
                hook = partial(self._see, projection.path, owner)
                stack.callback(projection.module.register_forward_hook(hook).remove)
            stack.enter_context(residual_hooks(model, self._see_state, layer))
            yield
        for projection in read:
            if projection.path in self.inputs:
                self.layers_of[projection.path] = projection.layer
                self.candidates += self._candidates(projection)

    def _see(self, path: str, owner: nn.Module, _module, inputs: tuple, output: torch.Tensor) -> None:
        tokens = getattr(owner, "tokens", None)  # of an expert
        for spikes, x in ((self.inputs, inputs[0]), (self.outputs, output)):
            spikes[path] = Spike.of(x.flatten(0, -2), tokens).larger(spikes.get(path))

    def _see_state(self, layer: int, x: torch.Tensor) -> None:
        self.peaks[layer] = Peaks.of(x).joined(self.peaks.get(layer))

    def _candidates(self, projection: Projection) -> Iterator[dict]:
        """Yield the weight that connects both spikes of a projection, and the entry that stands out most.

        An entry stands out by |w| over the smaller of the mean magnitudes of its row and its column.
        """
        weight, layer, path = _exact_weight(projection), projection.layer, projection.path
        magnitudes = weight.abs()
        mean = torch.minimum(magnitudes.mean(1, keepdim=True), magnitudes.mean(0, keepdim=True))
        scores = magnitudes / mean.clamp(min=torch.finfo(torch.float32).tiny)
        both = {"activations": (self.outputs[path].feature, self.inputs[path].feature)}
        both["weights"] = divmod(int(scores.argmax()), scores.shape[1])
        largest, peaks = divmod(int(magnitudes.argmax()), scores.shape[1]), self.peaks[layer]
        for found_by, place in both.items():
            yield {
                "metric": "candidates.weight",
                "found_by": found_by,
                "value": weight[place].item(),
                "score": scores[place].item(),
                "layer": layer,
                "path": path,
                **dict(zip(("output", "input"), place, strict=True)),
                "largest": list(largest),
                **peaks.at(place[0]),
            }

    def layers(self) -> list[dict]:
        """Return the spikes of each layer; of a layer of experts, the spikes of the expert with the largest output."""
        paths = sorted(self.layers_of, key=lambda path: abs(self.outputs[path].value))
        of_layers = {self.layers_of[path]: path for path in paths}
        return [self._layer(layer, of_layers[layer]) for layer in sorted(of_layers)]

    def chosen(self) -> list[dict]:
        """Return the candidates without duplicates, those by activations first."""
        chosen: dict[WeightEntry, dict] = {}
        for candidate in [*self._by_activations(), *self._by_weights()]:
            chosen.setdefault(_entry_of(candidate), candidate)
        return list(chosen.values())

    def _layer(self, layer: int, path: str) -> dict:
        spike, written = self.inputs[path], self.outputs[path]
        return {
            "metric": "candidates.layer",
            "value": written.value,
            "layer": layer,
            "path": path,
            "output": written.feature,
            "input": spike.feature,
            "position": written.position,
            "spike": spike.value,
            **self.peaks[layer].at(written.feature),
        }

    def _by_activations(self) -> list[dict]:
        spiking = [
            candidate
            for candidate in self.candidates
            if candidate["found_by"] == "activations"
            and min(abs(spikes[candidate["path"]].value) for spikes in (self.inputs, self.outputs)) > SPIKE
        ]
        return sorted(spiking, key=lambda candidate: -abs(self.outputs[candidate["path"]].value))[: self.metric.count]

    def _by_weights(self) -> list[dict]:
        largest = [candidate for candidate in self.candidates if candidate["found_by"] == "weights"]
        return sorted(largest, key=lambda candidate: -candidate["score"])[: self.metric.count]


class _Nearest:
    """A second pass over all weights that finds, for each candidate, the weights nearest in magnitude, for comparison.

    The candidates themselves are excluded.
    """

    def __init__(self, chosen: list[dict], count: int):
        self.chosen, self.count = chosen, count
        self.found: list[list[tuple]] = [[] for _ in chosen]  # for each candidate: distance, layer, place and value

    @contextmanager
    def hooks(self, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
        """Inspect the weights of all layers, or of one, at the end of this context, when they are in memory."""
        yield
        for projection in projections(model, layer):
            if projection.role == ROLE:
                self._find_nearest(projection)

    def _find_nearest(self, projection: Projection) -> None:
        weight, places = _exact_weight(projection), map(_entry_of, self.chosen)
        taken = [place[1:] for place in places if place.path == projection.path]
        for number, candidate in enumerate(self.chosen):
            distances = (weight.abs() - abs(candidate["value"])).abs()
            for place in taken:
                distances[place] = torch.inf
            count = min(self.count, distances.numel() - len(taken))
            near = (distances <= distances.flatten().kthvalue(count).values).nonzero()
            near = near[distances[tuple(near.T)].argsort(stable=True)[:count]].tolist()  # the first ones among ties
            entries = [
                (distances[place].item(), projection.layer, WeightEntry(projection.path, *place), weight[place].item())
                for place in map(tuple, near)
            ]
            self.found[number] = sorted(self.found[number] + entries)[: self.count]

    def records(self) -> Iterator[dict]:
        for candidate, nearest in zip(self.chosen, self.found, strict=True):
            weights = {"nearest": [str(place) for *_, place, _ in nearest]}
            yield candidate | weights | {"nearest_values": [value for *_, value in nearest]}


def _exact_weight(projection: Projection) -> torch.Tensor:
    plain = getattr(projection.module, "projection", projection.module)  # under a scheme
    check_plain(projection._replace(module=plain))
    return stored_weight(plain).detach().float()


def _entry_of(candidate: dict) -> WeightEntry:
    return WeightEntry(*(candidate[part] for part in WeightEntry._fields))


@inference
def candidates(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    metric: Candidates,
    variant: Variant = AS_IT_IS,
) -> list[dict]:
    """Return the super weight candidates of a model under a variant: a dictionary for each layer and each candidate.

    Raises:
        UserError: no layer has a second feed-forward projection.
    """
    check_searched(model.config)
    observer = _CandidateObserver(metric)
    last = [block for _, block, _ in watched_pass(model, blocks, observer.hooks, variant)]
    nearest = _Nearest(observer.chosen(), metric.controls)
    # a streamed model reads its layers only if there is some text
    watched_pass(model, last if is_streamed(model) else (), nearest.hooks, variant)
    return [*observer.layers(), *nearest.records()]


def check_searched(config: PretrainedConfig) -> None:
    """Raise UserError unless the models of a configuration have one stack, with feed-forward projections."""
    check_one_stack(config)
    stack = anatomy_of(config)
    if not any(getattr(kind, ROLE) for kind in stack.layer_kinds):
        raise UserError(
            f"'{config.model_type}' has no second feed-forward projection, in which super weights are looked for"
        )


class CandidatesMeasurement(CellMeasurement):
    """The measurement of candidates, of the whole text at once: its spikes decide which weights are inspected."""

    splits = False

    def check(self, cell: Cell) -> None:
        check_searched(cell.subject.config)

    def measure_cell(
        self, _model_cache: ModelCache, cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Variant
    ) -> list[dict]:
        return candidates(model, blocks, cell.metric, variant)

    def values(self, cell: Cell, results: list[list[dict]]) -> list[dict]:
        (candidates,) = results
        return [value | {"unit": "1"} for value in candidates]


MEASUREMENT = CandidatesMeasurement()
