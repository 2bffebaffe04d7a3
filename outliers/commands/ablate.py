"""Ablation: the loss of a model without some features, compared with its loss without random ones."""

import logging
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from outliers.commands import Command
from outliers.config.experiment import ON_TEXT, Experiment
from outliers.config.fields import Features, Model, Name, Names, OneScheme, Skip
from outliers.criterion import ALPHA, CROSS, LOG_PERPLEXITY, STREAM
from outliers.errors import NoOutlier, UserError
from outliers.metrics.records import Perplexity, Top1, TraceMetric
from outliers.models.names import short_name
from outliers.models.variant import AS_IT_IS, Variant
from outliers.quantization.schemes import BASELINE, Scheme, get_scheme, scheme_fields
from outliers.runs.rows import Row
from outliers.runs.stages.trace import ablated_in, outlier_counts, traced_attention, where
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import Cell, CellPlan, Stages
from outliers.terminal.progress import with_bar
from outliers.variants.ablated import WHERE, Ablated, Intervention
from outliers.variants.dropped import Dropped
from outliers.variants.quantized import EXACT, Quantized
from outliers.variants.together import Together

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from transformers import PreTrainedModel

    from outliers.metrics.ablations import Treatment
    from outliers.models.anatomy.examples import Block

logger = logging.getLogger(__name__)
OF_SCHEME = {"alpha": "scheme_alpha"}  # names in rows for settings of the scheme, if the name is taken


class ToAblate(ModelWithText):
    """A model that is checked together with the features to ablate and the scheme that it is under."""

    experiment: "Ablation"

    def prepare(self) -> None:
        from outliers.quantization.convert import check_calibrated  # late, for it imports torch
        from outliers.subjects.model_cache import check_scheme

        super().prepare()
        self.check_predicted()
        experiment = self.experiment
        check_calibrated(experiment.under.scheme, None)
        check_scheme(self.config, experiment.under.scheme, experiment.skip)
        treatments_of(experiment, self.width, experiment.features or [0])  # [0] stands for outliers not known yet


class Ablation(Experiment):
    """An ablation of one model, by the arguments of `outliers.ablate`."""

    takes = (*ON_TEXT, "revision")
    command = "ablate"
    view = "outliers.views.ablation:ablation_section"

    name: Name = "ablate"
    model: Model
    scheme: OneScheme = Field(default=BASELINE, validate_default=True, description="Scheme of the model.")
    skip: Skip = Field(default=[])
    features: Features | None = Field(
        default=None, description="Features, such as 3,17; by default the outlier features of a trace."
    )
    methods: Names = Field(default=["zero"], description="Ways to remove them: zero, mean, shuffle, or several.")
    where: Names = Field(
        default=["attn_in"], description="Inputs without them for perplexity: attn_in, ffn_in, or both."
    )
    controls: int = Field(default=10, description="Draws of random features, as controls.")
    seed: int = Field(default=0, description="Seed of the draws and of shuffling.")
    drop: Literal["experts"] | None = Field(
        default=None, description="Parts that are left out one after the other, in the place of features: experts."
    )

    @property
    def requested_schemes(self) -> list[Scheme | str]:
        return [self.scheme]

    @property
    def under(self) -> Quantized:
        """The scheme of the model as a variant."""
        (quantized,) = self.quantized
        return EXACT if quantized.is_exact else quantized

    @property
    def labels(self) -> dict:
        """The fields of the scheme in rows."""
        scheme = get_scheme(self.scheme, self.alpha_of_schemes)
        return {OF_SCHEME.get(name, name): value for name, value in scheme_fields(scheme, self.skip).items()}

    def plans(self) -> list[CellPlan]:
        """Return cells for the loss without the outlier features (or given ones), and without random features.

        With `drop`, return cells for the loss without each expert. The features of each stack of an encoder-decoder are
        ablated in its layers. Outlier features come from a trace of the unquantized model.
        """
        subject = ToAblate(self.model, self.revision, self)
        if self.drop:
            if of_features := sorted({"features", "methods", "where", "controls", "seed"} & self.model_fields_set):
                raise UserError(
                    f"drop leaves out whole parts, which have no {' and no '.join(of_features)}: expected one of both"
                )
            return [CellPlan(subject, _without_each(subject))]
        treatments = 1 + len(self.methods) * (1 + self.controls)
        return [CellPlan(subject, _stages(subject), passes=lambda: 2 + treatments + treatments // 3)]


COMMAND = Command(
    "loss of a model without its outlier features, or its experts",
    """Measure attention and perplexity of a model without its outlier features, beside random features; or its
perplexity without each of its experts.

Prints the table and writes rows, tables and a figure to results/ablate/NAME. A second run resumes the first.

Examples:

`python -m outliers.ablate pocket/opt-1.7m --method zero,mean,shuffle`

`python -m outliers.ablate gpt2 --features 138,378,447 --text c4 --block 1024`

`python -m outliers.ablate pocket/mixtral-0.7m --drop experts`
""",
    Ablation,
)


def _experts(subject: ToAblate) -> dict[int, int]:
    """Return the number of experts by layer; raise UserError if there are none."""
    from outliers.models.anatomy import experts_of  # late, for it imports torch
    from outliers.models.anatomy.experts import expert_count
    from outliers.models.skeleton import skeleton

    experts = {layer: expert_count(module) for layer, module in experts_of(skeleton(subject.config)).items()}
    if not experts:
        raise UserError(f"'{subject.name}' has no experts; expected a mixture of experts for --drop experts")
    return experts


def _without_each(subject: ToAblate) -> Stages:
    """Yield the cells of the whole model, and of the model without each of its experts."""
    experiment = subject.experiment
    under, labels = experiment.under, experiment.labels
    cells = [Cell(subject, under, Perplexity(), {**labels, "subject": "none"})]
    for layer, experts in _experts(subject).items():
        for number in range(experts):
            dropped = Dropped(((layer, number),))
            variant = dropped if under is EXACT else Together((under, dropped))
            place = {"subject": "expert", "layer": layer, "expert": number}
            cells.append(Cell(subject, variant, Perplexity(), labels | place))
    yield cells


def _stages(subject: ToAblate) -> Stages:
    experiment = subject.experiment
    (traced,) = yield [Cell(subject, EXACT, TraceMetric(roles=STREAM, alpha=experiment.alpha))]
    counts = [count for count in outlier_counts(traced) if experiment.features or count["features"]]
    cross, counts = ([count for count in counts if (count.get("stack") == CROSS) is kind] for kind in (True, False))
    if cross and not experiment.features:
        listed = ", ".join(map(str, cross[0]["features"]))
        logger.info(
            f"outlier features of the encoder's states in cross-attention ({listed}) cannot be ablated, and stay"
        )
    if not counts:
        raise _no_outlier(traced, experiment)
    labels = {"where": experiment.where, "seed": experiment.seed, "alpha": experiment.alpha} | experiment.labels
    metrics = (Top1, Perplexity) if traced_attention(traced) else (Perplexity,)
    yield [cell for count in counts for cell in _stack_cells(subject, count, labels, metrics, count is counts[0])]


def _stack_cells(subject: ToAblate, count: dict, labels: dict, metrics: Sequence[type], first: bool) -> list[Cell]:
    """Return the cells for the features of a stack (encoder, decoder), ablated in its layers.

    count: of its outlier features, see `outlier_counts`. first: whether to add the cells without an ablation.
    """
    experiment = subject.experiment
    treatments = treatments_of(
        experiment, count["hidden_size"], experiment.features or count["features"], count["features"]
    )
    treatments = [treatment for treatment in treatments if treatment.features or first]
    # top-1 attention is measured with one layer ablated at a time, in the inputs of queries and keys
    roles = {Top1: WHERE if "stack" in count else experiment.where, Perplexity: experiment.where}
    return [
        Cell(
            subject,
            _ablated_variant(treatment, experiment, where(count, roles[metric])),
            metric(),
            labels | (ablated_in(count) if treatment.features else {}) | treatment.fields,
        )
        for metric, treatment in product(metrics, treatments)
    ]


def _ablated_variant(treatment: "Treatment", experiment: Ablation, places: tuple[str, ...]) -> Variant:
    """Return the variant that changes the features of a treatment in the inputs at some places."""
    under = experiment.under
    if not treatment.features:
        return under
    ablated = Ablated(Intervention(treatment.features, treatment.method, experiment.seed), places)
    return ablated if under is EXACT else Together((under, ablated))


def _no_outlier(traced: Row, experiment: Ablation) -> NoOutlier:
    nearest = {value["metric"]: value["value"] for value in traced.values}
    return NoOutlier(
        f"'{short_name(experiment.model)}' has no outlier feature on this text (feature {nearest['most_common']:.0f} "
        f"hits {nearest['layers']:.0%} of layers and {nearest['positions']:.1%} of positions): there is none to "
        "remove, and what quantization costs has other causes; to remove others, name features with --features or "
        "lower --alpha"
    )


def treatments_of(
    experiment: Ablation, width: int, features: Sequence[int], outliers: Sequence[int] = ()
) -> list["Treatment"]:
    """Return the sets of features to change and how: none, the given ones, and random controls.

    Args:
        width: number of features of the model.
        features: to ablate.
        outliers: features that are never drawn as controls.
    """
    from outliers.metrics.ablations import treatments  # late, for it imports torch

    return treatments(
        features, width, experiment.methods, experiment.controls, experiment.seed, experiment.where, outliers
    )


@with_bar
def ablate(
    model: "PreTrainedModel",
    blocks: "Iterable[Block]",
    features: Iterable[int],
    controls: int = 10,
    seed: int = 0,
    methods: Iterable[str] = ("zero",),
    where: Iterable[str] = ("attn_in",),
    alpha: float = ALPHA,
    attention_mask: "Iterable[torch.Tensor] | None" = None,
    stack: str | None = None,
    *,
    progress: bool | None = None,
) -> "pd.DataFrame":
    """Return attention and perplexity of a model with features removed (LLM.int8(), section 4.2).

    For the top-1 softmax probability, the features are changed in the input of the q/k/v projection of one layer at a
    time. For perplexity, they are changed in the inputs of all layers at once, and the altered states propagate. The
    model is not changed.

    Args:
        model: a causal language model, quantized or not.
        blocks: token ids, int64 (blocks, T), or a list of (T,), sequences of any lengths.
        features: dimensions of the residual stream, for example those of `trace(...).outlier_features()`.
        controls: number of random draws of as many other features, 10 to 10,000.
        seed: of the draws and of "shuffle"; 0 to 2⁶³ − 1.
        methods: "zero" (the paper's), "mean" (over the text) and "shuffle" (over the positions of a sequence).
        where: for perplexity, the inputs that are changed: "attn_in" (the paper's) and "ffn_in".
        alpha: magnitude from which on a value is an outlier; controls exclude outlier features.
        attention_mask: as for `outliers.perplexity`.
        stack: for an encoder-decoder "encoder" or "decoder", in whose layers the features are removed.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Returns:
        One row per measurement: `subject` ("none", "outliers", "control", "single"), `method`, `features`, `draw`,
            `top1_softmax`, if the model has attention, `perplexity`, and `damage`, the relative increase of perplexity.
            `outliers.metrics.ablations.summary` condenses the table.

    Raises:
        UserError: there are no features, one is out of range, or there are too few others to draw controls from; a
            method or a place is unknown; controls or seed are out of range; blocks do not fit the model, or the mask
            does not fit them.

    Example:
        >>> measurements = outliers.ablate(model, blocks, features=[3])
    """
    from outliers.metrics import ablations
    from outliers.metrics.perplexity import too_large
    from outliers.models.anatomy import features_of, has_attention
    from outliers.models.anatomy.stack_views import stack_view
    from outliers.runs.loaded import measure_loaded
    from outliers.subjects.given import Given
    from outliers.text.blocks import unpad
    from outliers.tracing.trace import trace
    from outliers.variants.ablated import feature_means

    subject = Given(model, list(unpad(blocks, attention_mask)))
    model, features, methods, where = subject.loaded, list(features), list(methods), list(where)
    width = features_of(model)
    ablations.treatments(features, width, methods, controls, seed, where)  # reports mistakes before the text is traced
    if (view := stack_view(model, stack)).cross:
        raise UserError("the encoder's states in cross-attention cannot be ablated; expected 'encoder' or 'decoder'")
    traced = trace(model, subject.blocks, STREAM, alpha, attention=False, stack=stack)
    outliers = traced.outlier_features()["feature"]
    treatments = ablations.treatments(features, width, methods, controls, seed, where, outliers)
    means = feature_means(traced) if "mean" in methods else {}
    measured_in = [(Perplexity, where)]
    if has_attention(model.config):
        measured_in.insert(0, (Top1, WHERE))
    cells = []
    for number, treatment in enumerate(treatments):
        change = Intervention(treatment.features, treatment.method or "zero", seed, means)
        for metric, roles in measured_in:
            places = tuple(f"{view.place}.{role}" if stack else role for role in roles)
            variant = Ablated(change, places) if treatment.features else AS_IT_IS
            cells.append(Cell(subject, variant, metric(), {"treatment": number}))
    measurements: list[dict] = [dict(vars(treatment)) for treatment in treatments]
    for record in measure_loaded(subject, cells):
        if record["metric"] == LOG_PERPLEXITY:
            raise too_large(record["value"])
        if record.get("stack", view.name) == view.name:
            measurements[record["treatment"]][record["metric"]] = record["value"]
    return ablations.with_damage(measurements)
