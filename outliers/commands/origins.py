"""Writers and readers of features of one model, given ones or those that stand out."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pydantic import Field

from outliers.commands import Command
from outliers.config.experiment import ON_TEXT, Experiment
from outliers.config.fields import Features, Model, Name, Names, Neurons, Positions, Several
from outliers.criterion import STREAM
from outliers.errors import UserError, unknown_name
from outliers.metrics.records import Keys, Origins, TraceMetric
from outliers.runs.rows import Row
from outliers.runs.stages.readers import readers_stages
from outliers.runs.stages.super_weights import massive_stages, weights_stages
from outliers.runs.stages.trace import outlier_counts
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import Cell, CellPlan, Stages
from outliers.variants.quantized import EXACT

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Argument = TypeVar("Checked")


class AccountPart(NamedTuple):
    """One question of the account of features, such as which weights write them, or which projections read them.

    stages: function that returns the cells for a subject, the features, and the model's outlier features; invalid
    features raise an error in its first stage. passes: its duration in passes of all blocks, measured with
    SmolLM2-135M. needs_outliers: whether the outlier features must be known. fits: whether a model of a configuration
    has this part.
    """

    stages: Callable[[ModelWithText, Sequence[int], Sequence[int]], Stages]
    passes: int
    needs_outliers: bool = False
    fits: "Callable[[PretrainedConfig], bool]" = lambda _config: True


class ToAccount(ModelWithText):
    """A model that is checked together with the features to account for."""

    experiment: "Account"

    def prepare(self) -> None:
        super().prepare()
        for part in self.parts:
            for cell in next(part.stages(self, self.experiment.features or [0], ())):  # errors show before the trace
                cell.metric.measurement.check(cell)

    @property
    def parts(self) -> list[AccountPart]:
        """The requested parts; by default all that the model has."""
        given = "by" in self.experiment.model_fields_set
        return [
            part
            for name, part in ACCOUNT_PARTS.items()
            if name in self.experiment.by and (given or part.fits(self.config))
        ]


class Account(Experiment):
    """The writers and readers of features of one model, by the arguments of `outliers.origins` and `readers`."""

    takes = (*ON_TEXT, "revision")
    command = "origins"
    view = "outliers.views.account:account_section"

    name: Name = "origins"
    model: Model
    features: Features | None = Field(
        default=None, description="Features, such as 3,17; by default the outlier features of a trace, and the largest."
    )
    positions: Positions = Field(default=[])
    neurons: Neurons = 3
    by: Names = Field(
        default=["writers", "readers", "weights", "massive", "keys"],
        description="Parts of the account: writers and readers of features, single weights, massive activations, keys.",
    )
    places: Names | None = Field(
        default=None,
        description="Readers without the features, such as q, layers.9:12.k or norm; by default all, alone and "
        "together.",
    )
    controls: Several = Field(default=5, description="Draws of random features, as controls.")
    seed: int = Field(default=0, description="Seed of random draws.", ge=0, lt=2**63)

    def plans(self) -> list[CellPlan]:
        if unknown := sorted(set(self.by).difference(ACCOUNT_PARTS)):
            raise unknown_name("part of the account", unknown[0], ACCOUNT_PARTS)
        subject = ToAccount(self.model, self.revision, self)
        return [CellPlan(subject, _stages(subject), passes=lambda: 1 + sum(part.passes for part in subject.parts))]


COMMAND = Command(
    "writers and readers of features, norms that suppress them, weights that matter",
    """\
Account for features: the heads, neurons and biases that write them, the projections that read them, single weights.

Prints the contributions to each feature, the norms that suppress it, the cost of removing it at its readers, super
weights beside their controls, massive activations and attention sinks after removals, and the key channels that it
enlarges; writes rows, tables and figures to results/origins/NAME. A second run resumes the first.

Examples:

`python -m outliers.origins pocket/gpt2-1.7m`

`python -m outliers.origins smollm2-135m --features 247,507 --text c4 --block 512 --blocks 4`

`python -m outliers.origins smollm2-135m --features 247 --by readers --place k,up,norm`

`python -m outliers.origins smollm2-135m --by weights --blocks 4 --block 512`
""",
    Account,
)


def _stages(subject: ToAccount) -> Stages:
    experiment, features, outliers = subject.experiment, subject.experiment.features, []
    parts = subject.parts
    if not features or any(part.needs_outliers for part in parts):
        (traced,) = yield [Cell(subject, EXACT, TraceMetric(roles=STREAM, alpha=experiment.alpha, details=True))]
        (count,) = outlier_counts(traced)
        features, outliers = features or standing_out(traced), count["features"]
    for part in parts:
        yield from part.stages(subject, features, outliers)


def standing_out(traced: Row) -> list[int]:
    """Return the outlier features, and the feature of the largest entry of the residual stream."""
    largest = [value for value in traced.values if value["metric"] == "residual.value"]
    massive = max(largest, key=lambda value: abs(value["value"]))["feature"]
    return list(dict.fromkeys([*outlier_counts(traced)[0]["features"], massive]))


def _writers_stages(subject: ToAccount, features: Sequence[int], _outliers: Sequence[int]) -> Stages:
    """Yield one stage: the metric `origins` of the exact model."""
    experiment = subject.experiment
    yield [Cell(subject, EXACT, Origins(features=features, positions=experiment.positions, neurons=experiment.neurons))]


def _has_neurons(config: "PretrainedConfig") -> bool:
    """Return whether there are second feed-forward projections to search."""
    from outliers.models.anatomy import anatomy_of  # late, for it imports torch

    anatomy = anatomy_of(config)
    kinds = anatomy.layer_kinds
    return any(kind.ffn_out for kind in kinds)


def _has_attention(config: "PretrainedConfig") -> bool:
    from outliers.models.anatomy import has_attention  # late, for it imports torch

    return has_attention(config)


def _has_keys(config: "PretrainedConfig") -> bool:
    """Return whether queries, keys and values can be measured as attention multiplies them."""
    from outliers.metrics.keys import check_shows  # late, for it imports torch
    from outliers.models.skeleton import skeleton

    return _passes_check(check_shows, skeleton(config))


def _has_writers(config: "PretrainedConfig") -> bool:
    """Return whether each layer adds the outputs of one attention and one feed-forward part."""
    from outliers.metrics.origins import check_writers

    return _passes_check(check_writers, config)


def _passes_check(check: Callable[[Argument], None], checked: Argument) -> bool:
    try:
        check(checked)
    except UserError:
        return False
    return True


def _keys_stages(subject: ToAccount, _features: Sequence[int], _outliers: Sequence[int]) -> Stages:
    yield [Cell(subject, EXACT, Keys())]


ACCOUNT_PARTS = {  # in the order in which they are measured
    "writers": AccountPart(_writers_stages, 1, fits=_has_writers),
    "readers": AccountPart(readers_stages, 62, needs_outliers=True),
    "weights": AccountPart(weights_stages, 40, fits=_has_neurons),
    "massive": AccountPart(massive_stages, 12, fits=lambda config: _has_neurons(config) and _has_attention(config)),
    "keys": AccountPart(_keys_stages, 1, fits=_has_keys),
}
