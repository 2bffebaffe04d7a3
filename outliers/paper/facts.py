"""Published facts about public models by kind, with their sources, and whether a model agrees.

The facts are data, a file a source in `experiments/published`. Here are their kinds: how each is written, how it is
said, and how a model that was looked at (`outliers.paper.agreement`) is compared with it. Nothing here imports torch.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from outliers.criterion import SPIKE
from outliers.paper.published import key_of
from outliers.show.tables import Table
from outliers.show.words import amount, listed, part, ranges
from outliers.specification.files import make_experiment, published_files, read_experiment
from outliers.specification.kinds import Named

if TYPE_CHECKING:
    from outliers.paper.agreement import Seen

SIGMAS, LAYERS = 3.0, 4  # of an outlier weight of a norm, and in how many layers it is one: Puccetti et al., 2022
# How far a measured value may be from a published one, for texts, dtypes and tokenizers differ.
MAGNITUDE, SHARE, PERPLEXITY = 0.1, 0.05, 0.01  # relative; of all (layer, head) pairs; relative
POSITIONS = 0.5  # relative, of the share of positions with a high norm

Index = Annotated[int, Field(ge=0)]
Compared = tuple[str, bool]  # what is measured, in words, and whether it agrees


class Fact(BaseModel, ABC):
    """Something published for a model, measured on blocks of so many tokens, or on pictures where `block` is null; bos:
    whether blocks begin with the model's first token."""

    model_config = ConfigDict(extra="forbid")
    measured_by: ClassVar[str | None] = None  # what a model is compared by: "trace", "perplexity", or nothing

    model: str
    block: Annotated[int, Field(ge=2)] | None = 512
    bos: bool = False
    note: str = ""

    @property
    @abstractmethod
    def claim(self) -> str:
        """The fact in words, without the model."""


class Measured(Fact):
    """A fact with which a model is compared."""

    measured_by = "trace"

    @abstractmethod
    def compared(self, seen: "Seen") -> Compared:
        """The value of a model instead, and whether that is the same."""


class SuperWeight(Measured):
    """Weights of second feed-forward projections, each (layer, output, input), or (layer, output) for a whole row.

    They agree where they are what the largest inputs and outputs of the layer name: as many of each as are published.
    """

    kind: Literal["super_weight"]
    weights: Annotated[list[Annotated[list[Index], Field(min_length=2, max_length=3)]], Field(min_length=1)]

    @property
    def claim(self) -> str:
        what = "row" if any(len(weight) == 2 for weight in self.weights) else "super weight"
        return f"{what}{'s' if len(self.weights) > 1 else ''} {listed(map(_place, self.weights))}"

    def compared(self, seen: "Seen") -> Compared:
        by_layer = defaultdict(list)
        for layer, *place in self.weights:
            by_layer[layer].append(place)
        compared = [_named_by_spikes(seen, layer, places) for layer, places in by_layer.items()]
        return "; ".join(words for words, _ in compared), all(same for _, same in compared)


def _place(weight: list[int]) -> str:
    return f"{weight[0]}[{', '.join(map(str, [*weight[1:], ':'][:2]))}]"


def _named_by_spikes(seen: "Seen", layer: int, places: list[list[int]]) -> Compared:
    """The largest outputs and inputs of a layer, as many as are published, and whether they are the published ones."""
    if layer >= seen.trace.layers:
        return f"the model has {seen.trace.layers} layers", False
    words, same = [], True
    for axis, what, sizes in ((0, "output", seen.outputs[layer]), (1, "input", seen.inputs[layer])):
        published = {place[axis] for place in places if len(place) > axis}
        largest = sizes.argsort()[::-1][: max(1, len(published))]
        same &= published <= set(largest.tolist()) and (not published or sizes[largest].min() > SPIKE)
        words.append(f"{what} {listed(f'{index} ({amount(sizes[index])})' for index in largest)}")
    return f"layer {layer}: {', '.join(words)}", bool(same)


class MassiveActivation(Measured):
    """Massive activations of these features in the outputs of layers first to last, of these magnitudes.

    They agree where all of these layers have some, the largest of each layer is of these features and at this position,
    each of these features is massive in one of them, and the largest values of all layers are within the magnitudes.
    """

    kind: Literal["massive_activation"]
    layers: tuple[Index, Index]
    features: list[Index] = []
    position: Index | None = None
    magnitude: tuple[float, float] | None = None

    @property
    def claim(self) -> str:
        where = f" at position {self.position}" if self.position is not None else ""
        which = f", feature {listed(self.features)}" if self.features else ""
        sizes = f", {_range(*self.magnitude)}" if self.magnitude else ""
        return f"massive activations in layers {_range(*self.layers)}{which}{where}{sizes}"

    def compared(self, seen: "Seen") -> Compared:
        first, last = self.layers
        table = seen.trace.massive_activations()
        if last >= seen.trace.layers:
            return f"the model has {seen.trace.layers} layers", False
        rows = table.iloc[first : last + 1]
        massive = seen.trace.statistics["residual.massive"][first : last + 1].sum(0).nonzero()[:, 0].tolist()
        same = bool((rows["massive"] > 0).all())
        if self.features:
            same &= set(rows["feature"]) <= set(self.features) <= set(massive)
        if self.position is not None:
            same &= set(rows["position"]) == {self.position}
        if self.magnitude:
            low, high = self.magnitude
            same &= rows["max"].between((1 - MAGNITUDE) * low, (1 + MAGNITUDE) * high).all()
        layers = rows["layer"][rows["massive"] > 0].tolist()
        features, positions = (listed(sorted(set(rows[name]))) for name in ("feature", "position"))
        where = f"in layers {ranges(layers)}" if layers else f"in none of layers {_range(first, last)}"
        sizes = _range(rows["max"].min(), rows["max"].max())
        return f"{where}; largest: feature {features} at position {positions}, {sizes}", bool(same)


def _range(low: float, high: float) -> str:
    numbers = list(dict.fromkeys(amount(value) if isinstance(value, float) else str(value) for value in (low, high)))
    return " to ".join(numbers)


class OutlierFeatures(Measured):
    """Features that are outliers: by LLM.int8()'s criterion, the largest of the residual stream at position 0, by the
    weights of the norms that end the layers, or beyond six standard deviations, which is not measured here.

    They agree where they are among those of the criterion; at position 0, where they are the largest ones.
    """

    kind: Literal["outlier_features"]
    criterion: Literal["llm.int8", "position 0", "layer norm", "six sigma"]
    features: Annotated[list[Index], Field(min_length=1)]

    @property
    def measured_by(self) -> str | None:
        return "trace" if self.criterion in CRITERIA else None

    @property
    def claim(self) -> str:
        return f"outlier features {listed(self.features)} ({self.criterion})"

    def compared(self, seen: "Seen") -> Compared:
        features = CRITERIA[self.criterion](seen, len(self.features))
        return f"{self.criterion}: {listed(features) if features else 'none'}", set(self.features) <= set(features)


def _by_llm_int8(seen: "Seen", _count: int) -> list[int]:
    return sorted(seen.trace.outlier_features()["feature"].tolist())


def _at_position_0(seen: "Seen", count: int) -> list[int]:
    return sorted(seen.first.argsort()[::-1][:count].tolist())


def _by_layer_norm(seen: "Seen", _count: int) -> list[int]:
    """Features whose weight, or whose bias, is an outlier of its norm in enough layers."""
    weights = seen.norm_weights
    far = abs(weights - weights.mean(2, keepdims=True)) > SIGMAS * weights.std(2, ddof=1, keepdims=True)
    return (far.sum(0) >= LAYERS).any(0).nonzero()[0].tolist()


CRITERIA = {"llm.int8": _by_llm_int8, "position 0": _at_position_0, "layer norm": _by_layer_norm}


class HighNorm(Measured):
    """Positions whose state after a layer, the last unless said, has a norm beyond a cutoff: the share of all, or some.

    They agree where the share is the same, give or take a half of it; without a share, where there are some.
    """

    kind: Literal["high_norm"]
    norm: Annotated[float, Field(gt=0)]
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    layer: Index | None = None

    @property
    def claim(self) -> str:
        where = "the last layer" if self.layer is None else f"layer {self.layer}"
        share = "some" if self.share is None else part(self.share)
        return f"{share} of the positions have a norm above {amount(self.norm)} after {where}"

    def compared(self, seen: "Seen") -> Compared:
        if (self.layer or 0) >= len(seen.norms):
            return f"the model has {len(seen.norms)} layers", False
        norms = seen.norms[-1 if self.layer is None else self.layer]
        share = float((norms > self.norm).mean())
        same = share > 0 if self.share is None else abs(share - self.share) <= POSITIONS * self.share
        return f"{part(share)}, up to {amount(norms.max())}", same


class Sink(Measured):
    """The share of all (layer, head) pairs for which a position is an attention sink."""

    kind: Literal["sink"]
    position: Index
    share: Annotated[float, Field(ge=0, le=1)]

    @property
    def claim(self) -> str:
        return f"position {self.position} is a sink of {part(self.share)} of the heads"

    def compared(self, seen: "Seen") -> Compared:
        shares = seen.trace.attention_sinks()["share"]
        share = float(shares[self.position]) if self.position < len(shares) else 0.0
        return part(share), abs(share - self.share) <= SHARE


class Nothing(Measured):
    """A thing that was looked for and not found."""

    kind: Literal["none"]
    of: Literal["massive_activation", "super_weight", "outlier_features"]

    @property
    def claim(self) -> str:
        return f"no {self.of.replace('_', ' ')}"

    def compared(self, seen: "Seen") -> Compared:
        words = FOUND[self.of](seen)
        return words or "none", not words


def _massive(seen: "Seen") -> str:
    table = seen.trace.massive_activations()
    layers = table["layer"][table["massive"] > 0].tolist()
    return layers and f"in layers {ranges(layers)}"


def _spikes(seen: "Seen") -> str:
    both = [layer for layer, sizes in enumerate(zip(seen.outputs, seen.inputs, strict=True)) if _both_spike(*sizes)]
    return both and f"spikes in layers {ranges(both)}"


def _both_spike(outputs, inputs) -> bool:
    return min(outputs.max(), inputs.max()) > SPIKE


def _outliers(seen: "Seen") -> str:
    return listed(_by_llm_int8(seen, 0)) if _by_llm_int8(seen, 0) else ""


FOUND = {"massive_activation": _massive, "super_weight": _spikes, "outlier_features": _outliers}


class Perplexity(Measured):
    """A perplexity on the whole of a text that `outliers.load_text` reads; under: what was done to the model, if
    anything, which is not done here."""

    measured_by = "perplexity"

    kind: Literal["perplexity"]
    text: str
    value: Annotated[float, Field(gt=0)]
    under: str = ""

    @property
    def claim(self) -> str:
        return f"perplexity on {self.text} {self.value:,.2f}{f', {self.under}' if self.under else ''}"

    def compared(self, seen: float) -> Compared:
        return f"{seen:,.2f}", abs(seen / self.value - 1) <= PERPLEXITY


class Task(Fact):
    """A number of a zero-shot task, which `outliers.zeroshot` measures."""

    kind: Literal["task"]
    task: str
    metric: str
    value: float
    under: str = ""

    @property
    def claim(self) -> str:
        return f"{self.task}, {self.metric} {self.value:g}{f', {self.under}' if self.under else ''}"


Kinds = SuperWeight | MassiveActivation | OutlierFeatures | HighNorm | Sink | Nothing | Perplexity | Task


class Source(Named):
    """A published source; looked_up: whether the numbers were read there, or are as another one cites them."""

    source: str
    where: str
    licence: str
    protocol: str
    looked_up: bool = True
    facts: Annotated[list[Annotated[Kinds, Field(discriminator="kind")]], Field(min_length=1)]

    @property
    def short(self) -> str:
        """The source as a table has it."""
        return self.source.partition(", arXiv:")[0]


class Published(NamedTuple):
    """A fact and its source."""

    fact: Fact
    source: Source

    @property
    def protocol(self) -> tuple[int | None, bool]:
        """The blocks on which it is measured: their length, and whether they begin with the model's first token."""
        return self.fact.block, self.fact.bos


def read_sources(files: Sequence[str | Path] = ()) -> list[Source]:
    """The sources in these files, by default in those that come with the project.

    Raises:
        UserError: a file is damaged, or a field of it unknown, missing or out of range; it says where.
    """
    return [make_experiment(read_experiment(str(file)), Source) for file in files or published_files()]


def facts_of(sources: Sequence[Source], models: Sequence[str]) -> list[Published]:
    """The facts of some models, in the order of the sources."""
    keys = set(map(key_of, models))
    return [Published(fact, source) for source in sources for fact in source.facts if key_of(fact.model) in keys]


def elsewhere(models: list[str]) -> Table | None:
    """Published values of these models from elsewhere; None where nothing is known."""
    known = [
        [key_of(published.fact.model), published.fact.claim, published.fact.note, published.source.short]
        for published in facts_of(read_sources(), models)
    ]
    caption = "Published elsewhere, each under the protocol of its source."
    return Table.of_words("elsewhere", caption, ["model", "published", "note", "source"], known) if known else None
