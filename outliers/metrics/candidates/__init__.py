"""Which single weights may be super weights: where activations spike, and which are largest in their layer."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from outliers.criterion import MASSIVE
from outliers.metrics.metric import Metric
from outliers.specification.kinds import CONTROLS, SEED, Count, Repeats

if TYPE_CHECKING:
    from outliers.models.stream import Variant

FACTORS = (0.5, 1.5, 2)  # by which a super weight is multiplied, beside 0 (Yu et al., 2024, section 3.3)


class Candidates(Metric):
    """Candidates for super weights, with the weights that they are compared with."""

    name = "candidates"
    measured_by = "outliers.metrics.candidates.measure:CANDIDATES"

    count: Count = Field(4, description="Candidates by activations, and as many by the weights alone, at most.")
    controls: Repeats = Field(5, description=CONTROLS)
    seed: int = Field(0, description=SEED, ge=0, lt=2**63)


def treatments(candidate: Mapping) -> Iterator[tuple[str, "Variant"]]:
    """What is done to find whether a candidate matters, and with what it is compared.

    Kind and variant of each: the "weight" set to zero, then its controls: "random" weights of equal magnitude, the
    "largest" of its layer, its whole "neuron" and its whole "row", and its "massive" activation at its mean, if there
    is one.
    """
    from outliers.variants.massive import Massive
    from outliers.variants.term import Weight
    from outliers.variants.weights import Scaled

    path, output, input = candidate["path"], candidate["output"], candidate["input"]
    yield "weight", Scaled(Weight(path, output, input))
    for place in candidate["equal"]:
        yield "random", Scaled(Weight(path, *map(int, place.split(","))))
    if candidate["largest"] != [output, input]:
        yield "largest", Scaled(Weight(path, *candidate["largest"]))
    yield "neuron", Scaled(Weight(path, None, input))
    yield "row", Scaled(Weight(path, output, None))
    if candidate["least"] > MASSIVE:
        yield "massive", Massive((output,), candidate["layer"], candidate["state"], candidate["least"] / 2)


def removals(records: Iterable[Mapping]) -> dict[str, "Variant"]:
    """What is taken away to see what becomes of the largest entry of the residual stream and of the attention to it.

    records: values of a trace and of candidates, of the model as it is. Nothing at first; where the entry is a massive
    activation the weight and the neuron that write most of it, the entry itself, behind the layer that writes it, and
    its feature, for all that read it; then its position, for all attention to it.
    """
    from outliers.models.stream import AS_IT_IS
    from outliers.variants.ablated import Ablated, Intervention
    from outliers.variants.massive import Massive
    from outliers.variants.term import Weight
    from outliers.variants.unattended import Unattended
    from outliers.variants.weights import Scaled

    records = list(records)
    largest = max((one for one in records if one["metric"] == "residual.value"), key=lambda one: abs(one["value"]))
    layers = [one for one in records if one["metric"] == "candidates.layer" and one["output"] == largest["feature"]]
    removed: dict[str, Variant] = {"nothing": AS_IT_IS}
    if abs(largest["value"]) > MASSIVE and layers:
        layer = max(layers, key=lambda one: abs(one["value"]))
        feature, path = layer["output"], layer["path"]
        removed["weight"] = Scaled(Weight(path, feature, layer["input"]))
        removed["neuron"] = Scaled(Weight(path, None, layer["input"]))
        removed["activation"] = Massive((feature,), layer["layer"], 0.0, layer["least"] / 2)
        # by their parts, for the attention under whole roles is that of a layer at a time
        removed["feature"] = Ablated(Intervention((feature,)), ("q", "k", "v", "ffn_in"))
    return removed | {"position": Unattended((0,))}


def scalings(candidate: Mapping) -> Iterator["Variant"]:
    """A candidate multiplied by each of `FACTORS`."""
    from outliers.variants.term import Weight
    from outliers.variants.weights import Scaled

    weight = Weight(candidate["path"], candidate["output"], candidate["input"])
    yield from (Scaled(weight, factor) for factor in FACTORS)
