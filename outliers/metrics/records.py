"""The records of metrics: the name, the parameters, the row fields and the measurement of each."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from outliers.config.fields import (
    Batch,
    Checked,
    Count,
    Data,
    Draws,
    ExampleLimit,
    Features,
    Finite,
    Line,
    Names,
    Neurons,
    Positions,
    Repeats,
    Schemes,
    Several,
    Threshold,
    Tokens,
    resolved,
)
from outliers.criterion import ALPHA, PAPER
from outliers.errors import UserError
from outliers.models.plugins import plugins
from outliers.models.pocket.ladder import CHECKPOINTS
from outliers.quantization.schemes import get_scheme

if TYPE_CHECKING:
    from outliers.metrics.measurement import LogitsComputation, Measurement, StatesComputation


class Metric(Checked):
    """A measurement of a subject under a variant; its fields are its parameters, and options of commands.

    name: the name in rows and on the command line. home: the file of this package with its `MEASUREMENT`, which is
    imported when something is measured; by default the file of its name. measured_by: the `Measurement` of a custom
    metric. subject: location of the class of its subject, which is made from model, revision and experiment; None if it
    is no model. timed: whether it measures time, so that rows depend on the machine. is_stored: whether the
    planner keeps its result, a trace, in files beside the row. needs: fields of its rows' provenance and of each value
    that its tables and figures use. view: a function of its flat rows that returns an
    `outliers.show.section.Section`, or its location; the field `scheme` of these rows is their variant.
    """

    model_config = ConfigDict(frozen=True)

    name: ClassVar[str]
    home: ClassVar[str | None] = None
    measured_by: "ClassVar[Measurement | None]" = None
    subject: ClassVar[str | None] = "outliers.subjects.causal:ModelWithText"
    timed: ClassVar[bool] = False
    is_stored: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()
    view: ClassVar[str | Callable | None] = None

    @property
    def request(self) -> dict:
        """The fields of the metric in rows: name and parameters.

        Defaults are left out, so that new parameters keep old rows valid.
        """
        return {"name": self.name, **self.model_dump(mode="json", exclude_defaults=True)}

    @property
    def measurement(self) -> "Measurement":
        return self.measured_by or resolved(f"{__package__}.{self.home or self.name}:MEASUREMENT")


class SharedPassMetric(Metric):
    """A metric that shares a pass with others; computed_by: how a custom metric is computed from the pass."""

    computed_by: "ClassVar[StatesComputation | LogitsComputation | None]" = None

    @property
    def computation(self) -> "StatesComputation | LogitsComputation":
        """How the metric is computed from the pass: `COMPUTATION` of the file of its name, unless it is custom."""
        return self.computed_by or resolved(f"{__package__}.{self.name}:COMPUTATION")


class StatesMetric(SharedPassMetric):
    """A metric of the last hidden states; all such metrics of a variant share one pass over the text.

    of_text: whether the predictions must be tokens.
    """

    home = "states"
    of_text: ClassVar[bool] = False

    draws: Draws = 1


class AttentionMetric(SharedPassMetric):
    """A metric of attention probabilities; all such metrics of a variant share one pass over the text.

    In this pass, ablations change the attention of one layer at a time.
    """

    home = "attention"


class Accuracy(StatesMetric):
    """Share of pictures whose most probable class is their own, and the mean cross-entropy, over draws."""

    name = "accuracy"


class Agreement(StatesMetric):
    """Mean KL(p ‖ p_q) over predicted positions, in nats, and the share of them with the same most probable token."""

    name = "agreement"


class Candidates(Metric):
    """Candidates for super weights, with other weights for comparison."""

    name = "candidates"

    count: Count = Field(4, description="Most candidates by activations, and as many by the weights alone.")
    controls: Repeats = Field(default=10, description="Weights nearest in magnitude, to compare each with.")


class Continuation(Metric):
    """The most probable continuation of the beginning of a text, token by token."""

    name = "continuation"
    needs = ("prompt_text", "continuation", "continuation_ids")

    prompt: Count = Field(128, description="Tokens of the text that are continued, at most a block.")
    tokens: Count = Field(40, description="Tokens of the continuation.")


class Errors(Metric):
    """‖Y_q − Y‖² / ‖Y‖² of each projection, over all tokens and for the mean token, from inputs without the scheme."""

    name: ClassVar[str] = "errors"


class Inputs(Metric):
    """The largest |x| of each hidden state that projections read, with its feature, position and token."""

    name = "inputs"
    home = "errors"


ATTENDED = {"q": "queries", "k": "keys", "v": "values"}  # outputs of projections: their roles
BEFORE, AFTER = "before", "after"  # the outputs of projections; the states that attention multiplies

TINY = 1e-30  # used instead of a median of 0


class Keys(Metric):
    """The largest channels of queries, keys and values, before and after the rotation of positions."""

    name = "keys"

    channels: Count = Field(
        default=3, description="Channels listed per layer, those with the largest queries, keys or values."
    )


class Generation(Checked):
    """The timed generation of each batch of prompts."""

    prompt: Tokens = Field(default=128, description="Tokens of the prompt.")
    tokens: Count = Field(default=32, description="Timed decode steps of a generation, after the first token.")
    repeats: Several = Field(default=3, description="Timed generations.")


class LatencyMetric(Generation, Metric):
    """Medians with quartiles of the times of decode steps, of the prefill and of whole generations.

    For a model that generates nothing, the time of a pass of its encoder over the batch, which does not depend on
    `tokens`. The model is alone in memory, and timed in this process, because parallel work would change the times.
    """

    name = "latency"
    subject = "outliers.subjects.served:Served"
    needs = ("q1", "q3", "batch", "prompt", "tokens", "repeats", "device_name", "threads")
    timed = True

    batch: Batch = Field(default=1, description="Batch size.")


class Layers(Metric):
    """Perplexity, KL and top-1 agreement of a model in which a single layer, with its norms, is under a variant."""

    name = "layers"

    draws: Draws = 1


class Timed(Checked):
    """The timing of a layer. tokens: rows of its input. seconds: least duration of the timing."""

    tokens: Count = 512
    seconds: Annotated[Finite, Field(gt=0, le=86400)] = 3.0


class LinearLayer(Timed, Metric):
    """Milliseconds of each implementation, and its speedup over 16 bits: medians with quartiles.

    All implementations are timed in turn, in this process, because parallel work would change the times.
    """

    name = "linear_layer"
    subject = None
    needs = ("way", "q1", "q3", "tokens", "device_name", "threads")
    timed = True


class SequenceSize(Checked):
    """The size of the sequences that are in memory at once."""

    context: Tokens = Field(default=256, description="Tokens per sequence, at most the model's context.")
    batch: Batch = Field(default=1, description="Batch size.")


GIB = 2**30
BITS = (16, 8)


class MemoryMetric(SequenceSize, Metric):
    """Number of parameters, and bytes of weights in 16 and in 8 bits, of the cache and of activations."""

    name = "memory"
    subject = "outliers.subjects.configured:Configured"
    needs = ("parameters", "context_used", "context", "batch")


class Hardware(BaseModel):
    """A number of equal GPUs; gigabytes: memory of one of them, GiB. owner: who has such hardware."""

    model_config = ConfigDict(extra="forbid")

    hardware: Line
    owner: Line | None = None
    gpus: Count = 1
    gigabytes: Annotated[Finite, Field(gt=0)]


class Fits(Hardware, MemoryMetric):
    """Whether equal GPUs can hold a model in 16 and in 8 bits: 1 or 0. headroom: GiB of a GPU that are left free."""

    name = "fits"
    home = "memory"
    needs = (*MemoryMetric.needs, "bits", "candidate", "hardware", "gpus", "gigabytes", "headroom")

    headroom: Annotated[Finite, Field(ge=0)] = 0.75


WRITERS_OF = {  # parts of a layer, and what comes before all layers: the writers of each
    "embedding": ("embedding", "positions", "embedding norm"),
    "attention": ("head", "attention bias", "attention norm"),
    "feed-forward": (
        *("neuron", "shared neuron", "expert neuron", "other neurons", "expert"),
        *("feed-forward bias", "expert bias", "feed-forward norm"),
    ),
}
PART_OF = {writer: part for part, writers in WRITERS_OF.items() for writer in writers}
# Individual writers, no remainders and no constants; an expert is the sum of its neurons and its bias.
SINGLE = ("embedding", "positions", "head", "neuron", "shared neuron", "expert neuron", "expert")


class Origins(Metric):
    """The terms that add up to some features, and the gains of the norms that read these features."""

    name = "origins"

    features: Features | None = Field(default=None, description="Features of the residual stream, such as 3,17.")
    positions: Positions = Field(default=[])
    neurons: Neurons = 3


class Perplexity(StatesMetric):
    """exp of the mean negative log-likelihood of the predicted tokens, over draws."""

    name = "perplexity"


class Places(Metric):
    """Perplexity with only one place under a scheme, and with all others: roles, layers or stacks, or single experts.

    For a cache, places are keys and values, layers, and heads.
    """

    name = "places"

    by: Literal["role", "layer", "stack", "head", "expert"] = Field(
        "role",
        description="Kind of places: roles (of a cache keys and values), layers, stacks, heads of a cache, or experts.",
    )
    draws: Draws = 1


# The largest finite number of each format; e4m3 without a scale.
LIMITS = {"e4m3": 448.0, "float16": 65_504.0, "bfloat16": 3.3895313892515355e38}


class Range(Metric):
    """The largest inputs, outputs and block sums of projections, of the residual stream, and of attention logits."""

    name = "range"


class Sinks(AttentionMetric):
    """By layer and head, the attention of queries to the first position, and by how many nats they prefer it."""

    name = "sinks"


class TokenLosses(StatesMetric):
    """Loss under the variant minus loss without it: by token, type, position and context, and how few carry half."""

    name = "token_losses"
    of_text = True


class Top1(AttentionMetric):
    """Mean over layers, heads, queries and sequences of the largest attention probability."""

    name = "top1"


class TraceMetric(Metric):
    """Outlier features, and their statistics in Table 4, from hidden states."""

    name = "trace"

    roles: Names = Field(list(PAPER), description="Hidden states to trace, by the projections that read them.")
    alpha: Threshold = ALPHA
    attention: bool = Field(False, description="Find attention sinks, for which the model attends eagerly.")
    details: bool = Field(False, description="Also give rows of each feature, layer and position.")


class StoredTrace(TraceMetric):
    """A trace that is also stored in files beside the rows; only stored traces have the tokens that carry the features.

    An importance matrix and masks are further files.
    """

    is_stored = True

    tokens: bool = Field(False, exclude=True)
    imatrix: bool = Field(False, exclude=True)
    masks: bool = Field(False, exclude=True)


AS_NAMES = PlainSerializer(lambda schemes: [scheme.name for scheme in schemes])


class TrainingMetric(Metric):
    """The measurements of `outliers.watch` after some steps and at the end, and perplexity under schemes over draws."""

    name = "training"
    subject = None
    needs = ("checkpoint", "architecture", "parameters")

    alpha: Threshold = ALPHA
    watched: list[Count] = Field(list(CHECKPOINTS))
    schemes: Annotated[Schemes, AS_NAMES] = Field([*map(get_scheme, ("absmax", "llm.int8"))])
    draws: Draws = 3


class Weights(Metric):
    """‖W_other − W‖² / ‖W‖² of each projection, its largest |weight|, and its most changed weight."""

    name = "weights"


class ZeroShotMetric(Metric):
    """`acc`, `acc_norm` and `perplexity` of a task, as far as it has them, with their standard errors."""

    name = "zeroshot"
    subject = "outliers.subjects.causal:Pretrained"
    needs = ("standard_error", "examples", "task", "lm_eval")

    task: Line = Field("lambada-local", description="Task of lm-eval, or lambada-local or piqa-local.")
    data: Data = Field(default=None, exclude=True)
    limit: ExampleLimit = None


def metrics() -> dict[str, type[Metric]]:
    """Return the records of metrics by name: this project's, and those of installed packages, as entry points.

    Raises:
        UserError: a plugin has a name that is taken, or cannot be imported.
    """
    own = [record for record in globals().values() if isinstance(record, type) and "name" in vars(record)]
    by_name = {record.name: record for record in own}
    for name, origin, record in plugins("outliers.metrics"):
        if name in by_name:
            raise UserError(f"{origin} is a metric whose name is taken; remove one of the two")
        by_name[name] = record
    return by_name
