"""Find candidates for super weights: in one pass over a text, and in the weights alone."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.criterion import SPIKE
from outliers.errors import UserError, not_finite
from outliers.metrics.candidates import Candidates
from outliers.metrics.measurement import Measurement
from outliers.models.anatomy import Projection, anatomy_of, check_one_stack, check_plain, projections
from outliers.models.decoder import inference, run_decoder, under
from outliers.models.hooks import residual_hooks
from outliers.models.skeleton import skeleton
from outliers.models.stream import AS_IT_IS, Variant, Watched
from outliers.quantization.linear import stored_weight
from outliers.subjects.bench import Bench, naming_under
from outliers.subjects.cell import Cell

ROLE = "ffn_out"  # the input of the second feed-forward projection, which has the super weights
NEAREST = 4  # times as many weights as are drawn have the magnitude that is nearest to a candidate's


class Spike(NamedTuple):
    """The entry of the largest magnitude of a hidden state over a text."""

    value: float
    feature: int
    position: int

    @classmethod
    def of(cls, x: torch.Tensor) -> "Spike":
        """That of x (T, features); raise BrokenModel where that is NaN or inf."""
        position, feature = divmod(int(x.abs().argmax()), x.shape[1])
        value = x[position, feature].item()
        if not math.isfinite(value):
            raise not_finite(f"at a second feed-forward projection, position {position}")
        return cls(value, feature, position)

    def larger(self, other: "Spike | None") -> "Spike":
        """Of both the larger one; of equal ones the other."""
        return self if other is None or abs(self.value) > abs(other.value) else other


class Peaks(NamedTuple):
    """Of each feature, float64 (features,), the sum over sequences of the entry of the largest magnitude of each, the
    smallest of these magnitudes, and how many sequences there were."""

    total: torch.Tensor
    least: torch.Tensor
    sequences: int

    @classmethod
    def of(cls, x: torch.Tensor) -> "Peaks":
        """Those of one sequence, x (T, features)."""
        peak = x.gather(0, x.abs().argmax(0, keepdim=True))[0].double().cpu()
        return cls(peak, peak.abs(), 1)

    def joined(self, other: "Peaks | None") -> "Peaks":
        """Those of the sequences of both."""
        if other is None:
            return self
        least = torch.minimum(self.least, other.least)
        return Peaks(self.total + other.total, least, self.sequences + other.sequences)

    def at(self, feature: int) -> dict:
        """Of a feature the mean of these entries and the smallest magnitude, as the name of a variant can say them."""
        both = {"state": self.total[feature] / self.sequences, "least": self.least[feature]}
        return {name: float(f"{value.item():.6g}") for name, value in both.items()}


class _Observer:
    """Sees the spikes of each layer, and what its weight says while it is there."""

    def __init__(self, metric: Candidates):
        self.metric = metric
        self.inputs: dict[int, Spike] = {}
        self.outputs: dict[int, Spike] = {}
        self.peaks: dict[int, Peaks] = {}
        self.paths: dict[int, str] = {}
        self.candidates: list[dict] = []  # of each layer the candidate by activations, and that by the weights

    @contextmanager
    def hooks(self, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
        """Those on all layers of a model, or on one; at their end the weights are looked at."""
        read = [part for part in projections(model) if part.role == ROLE and layer in (None, part.layer)]
        with ExitStack() as stack:
            for projection in read:
                hook = projection.module.register_forward_hook(partial(self._see, projection.layer))
                stack.callback(hook.remove)
            stack.enter_context(residual_hooks(model, self._see_state, layer))
            yield
        for projection in read:
            if projection.layer in self.inputs:
                self.paths[projection.layer] = projection.path
                self.candidates += self._candidates(projection)

    def _see(self, layer: int, _module, inputs: tuple, output: torch.Tensor) -> None:
        for spikes, x in ((self.inputs, inputs[0]), (self.outputs, output)):
            spikes[layer] = Spike.of(x.flatten(0, -2)).larger(spikes.get(layer))

    def _see_state(self, layer: int, x: torch.Tensor) -> None:
        self.peaks[layer] = Peaks.of(x).joined(self.peaks.get(layer))

    def _candidates(self, projection: Projection) -> Iterator[dict]:
        """The weight where both spikes of a layer meet, and the entry that stands out most of its row and its column:
        |w| over the geometric mean of their mean magnitudes."""
        plain = getattr(projection.module, "projection", projection.module)  # under a scheme
        check_plain(projection._replace(module=plain))
        weight, layer = stored_weight(plain).detach().float(), projection.layer
        magnitudes = weight.abs()
        usual = magnitudes.mean(1, keepdim=True).sqrt() * magnitudes.mean(0, keepdim=True).sqrt()
        scores = magnitudes / usual.clamp(min=torch.finfo(torch.float32).tiny)
        both = {"activations": (self.outputs[layer].feature, self.inputs[layer].feature)}
        both["weights"] = divmod(int(scores.argmax()), scores.shape[1])
        largest, peaks = divmod(int(magnitudes.argmax()), scores.shape[1]), self.peaks[layer]
        for found_by, place in both.items():
            equal = self._equal(magnitudes, magnitudes[place], {*both.values(), largest})
            yield {
                "found_by": found_by,
                "value": weight[place].item(),
                "score": scores[place].item(),
                "layer": layer,
                "path": projection.path,
                **dict(zip(("output", "input"), place, strict=True)),
                "largest": list(largest),
                "equal": equal,
                **peaks.at(place[0]),
            }

    def _equal(self, magnitudes: torch.Tensor, magnitude: torch.Tensor, without: set[tuple]) -> list[str]:
        """Random entries OUTPUT,INPUT of about a magnitude: drawn from those that are nearest to it."""
        distances = (magnitudes - magnitude).abs()
        for place in without:
            distances[place] = torch.inf
        count = min(self.metric.controls, distances.numel() - len(without))
        among = min(NEAREST * count, distances.numel() - len(without))
        limit = distances.flatten().kthvalue(among).values
        nearest = (distances <= limit).nonzero().cpu()
        order = torch.randperm(len(nearest), generator=torch.Generator().manual_seed(self.metric.seed))
        return [f"{output},{input}" for output, input in nearest[order[:count]].tolist()]

    def records(self) -> list[dict]:
        """The spikes of each layer, and the candidates: those by activations first."""
        layers = [self._layer(layer) for layer in sorted(self.paths)]
        chosen: dict[tuple, dict] = {}
        for candidate in [*self._by_activations(), *self._by_weights()]:
            chosen.setdefault((candidate["layer"], candidate["output"], candidate["input"]), candidate)
        return [*layers, *({"metric": "candidates.weight", **candidate} for candidate in chosen.values())]

    def _layer(self, layer: int) -> dict:
        spike, written = self.inputs[layer], self.outputs[layer]
        return {
            "metric": "candidates.layer",
            "value": written.value,
            "layer": layer,
            "path": self.paths[layer],
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
            and min(abs(spikes[candidate["layer"]].value) for spikes in (self.inputs, self.outputs)) > SPIKE
        ]
        return sorted(spiking, key=lambda candidate: -abs(self.outputs[candidate["layer"]].value))[: self.metric.count]

    def _by_weights(self) -> list[dict]:
        largest = [candidate for candidate in self.candidates if candidate["found_by"] == "weights"]
        return sorted(largest, key=lambda candidate: -candidate["score"])[: self.metric.count]


@inference
def candidates(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    metric: Candidates,
    variant: Variant = AS_IT_IS,
) -> list[dict]:
    """The candidates of a model under a variant, a dictionary for each layer and each candidate.

    Raises:
        UserError: no layer has a second feed-forward projection.
    """
    check_searched(model)
    observer = _Observer(metric)
    with under(model, Watched(variant, observer.hooks)) as (changed, left):
        for _ in run_decoder(changed, blocks, variant=left):
            pass
    return observer.records()


def check_searched(model: PreTrainedModel) -> None:
    """Raise UserError unless a model, which may be on the meta device, has one stack, with feed-forward projections."""
    check_one_stack(model.config)
    if not any(part.role == ROLE for part in projections(model)):
        raise UserError(
            f"the layers of this model ({model.config.model_type}) have experts, whose weights are stored together; "
            "super weights are looked for in second feed-forward projections"
        )


class OfWeights(Measurement):
    """The candidates of each cell; the whole text at once, for where it spikes decides which weights are looked at."""

    splits = False

    def check(self, cell: Cell) -> None:
        check_one_stack(cell.subject.config)
        if anatomy_of(cell.subject.config).mixture:
            check_searched(skeleton(cell.subject.config))

    def answer(self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict) -> list[list[dict]]:
        (cell,) = cells
        subject = cell.subject
        model, blocks = subject.load(bench, facts), bench.counted(subject.blocks[part])
        with naming_under(subject, cell.variant):
            (variant,) = bench.knowing([cell.variant], subject)
            return [candidates(model, blocks, cell.metric, variant)]

    def values(self, cell: Cell, answers: list[list[dict]]) -> list[dict]:
        (candidates,) = answers
        return [value | {"unit": "1"} for value in candidates]


CANDIDATES = OfWeights()
