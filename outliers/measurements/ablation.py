"""What a model loses without some features, beside what it loses without random ones."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Integral

import numpy as np
import pandas as pd
import torch
from scipy.stats import bootstrap
from transformers import PreTrainedModel

from outliers.criterion import ALPHA
from outliers.errors import UserError, shown, unknown_name
from outliers.measurements.attention import PROBABILITIES, top1_softmax
from outliers.measurements.bench import Bench, Job, check_schemes, check_uncalibrated
from outliers.measurements.measurement import First, Keeps, Measurement, Question
from outliers.measurements.perplexity import perplexities
from outliers.measurements.sweep import scheme_fields
from outliers.models.anatomy import check_features
from outliers.models.names import short_name
from outliers.models.stream import AS_IT_IS, Variant, is_streamed
from outliers.quantization.schemes import get_scheme
from outliers.specification.kinds import Ablation, alpha_of_schemes, said_under
from outliers.text.blocks import sequences
from outliers.tracing.result import STREAM, Trace
from outliers.tracing.trace import trace
from outliers.variants.ablated import METHODS, SEEDS, Ablated, Intervention, Means, feature_means
from outliers.variants.quantized import Quantized
from outliers.variants.together import Together

METRICS = ("top1_softmax", "perplexity")
CONTROLS = range(10, 10_001)  # random draws of features: fewer make no interval, more no better one
RESAMPLES = 10_000


@dataclass(frozen=True)
class Treatment:
    """One thing to measure: which features are taken out, and how.

    subject: "none" (the model as it is), "outliers" (all given features), "control" (as many random others), or
    "single" (one of several given features). draw: number of the control.
    """

    subject: str
    method: str | None = None
    features: tuple[int, ...] = ()
    draw: int | None = None


class AblationRows(Measurement[Ablation]):
    """One row a treatment and metric of a model: its outlier features, or those of the specification, taken out.

    What features are outliers is what a trace of the model says that is not quantized.
    """

    first = First(STREAM, attention=False, kept=False)
    experiment = "ablate"

    def subjects(self) -> list[Job]:
        job = Job.of(self.spec.model, self.spec.revision, self.spec)
        self.scheme = get_scheme(self.spec.scheme, alpha_of_schemes(self.spec))
        check_uncalibrated([self.scheme])
        check_schemes(job.config, [self.scheme], self.spec.skip)
        planned(self.spec, job.config.hidden_size)  # mistakes show before the text is traced
        return [job]

    def keeps(self, job: Job) -> Keeps:
        variants = len(planned(self.spec, job.config.hidden_size))
        return Keeps(((self.scheme,),), attention=PROBABILITIES, variants=variants, roles=STREAM)

    def total(self, _job: Job) -> int:
        return self.spec.blocks

    def look(self, bench: Bench, job: Job) -> tuple[dict, dict]:
        model, fields = bench.load(job, self.spec)
        under = said_under(scheme_fields(self.scheme, model, self.spec.skip))
        return fields, under | {"where": self.spec.where, "seed": self.spec.seed, "alpha": self.spec.alpha}

    def questions(self, job: Job, facts: dict, trace: Trace) -> list[Question]:
        outliers = trace.outlier_features()["feature"].tolist()
        if not (self.spec.features or outliers):
            raise _no_outlier(trace, self.spec)
        treatments = planned(self.spec, job.config.hidden_size, outliers)
        means = feature_means(trace) if "mean" in self.spec.methods else {}

        def question(metric: str, number: int, treatment: Treatment) -> Question:
            about = metric, treatment, means if treatment.method == "mean" else {}  # which travel with it
            return Question(f"{metric} {number}", facts | _asked(treatment, metric), about, (metric,))

        return [question(metric, *numbered) for metric, numbered in product(METRICS, enumerate(treatments))]

    def together(self, questions: list[Question]) -> list[list[Question]]:
        of_metrics = [[question for question in questions if question.about[0] == metric] for metric in METRICS]
        top1, damage = of_metrics
        sets = [top1, damage] if self.spec.stream else [top1, *([question] for question in damage)]
        return [some for some in sets if some]

    def steps(self, questions: list[Question]) -> int:
        return self.spec.blocks * (1 if questions[0].about[0] == METRICS[0] else len(questions))

    def answer(self, bench: Bench, job: Job, questions: list[Question], _part: slice, fields: dict) -> list[float]:
        model, _ = bench.load(job, self.spec, fields)
        (metric, *_), variant = questions[0].about, AS_IT_IS
        treatments, of_each = zip(*(question.about[1:] for question in questions), strict=True)
        means = next(filter(None, of_each), {})
        if self.scheme.quantizes and is_streamed(model):
            variant = Quantized(self.scheme, tuple(self.spec.skip))
        elif self.scheme.quantizes:
            model = bench.quantized(self.scheme, self.spec.skip)
        blocks, spec = bench.counted(job.blocks), self.spec
        return [value for _, value in measure(model, blocks, treatments, metric, spec.where, spec.seed, means, variant)]

    def rows(self, _question: Question, answers: list[float], _trace: Trace) -> list[dict]:
        return [{"value": answers[0], "unit": "1"}]


def planned(spec: Ablation, width: int, outliers: Sequence[int] = ()) -> list[Treatment]:
    """What a specification asks of a model with so many features: of those that it names, else of its outliers; while
    these are not known, of one feature."""
    features = spec.features or list(outliers) or [0]
    return plan(features, width, spec.methods, spec.controls, spec.seed, spec.where, outliers)


def _asked(treatment: Treatment, metric: str) -> dict:
    """The fields of a row of a treatment."""
    of_treatment = {name: value for name, value in vars(treatment).items() if value is not None}
    return {**of_treatment, "features": list(treatment.features), "metric": metric}


def _no_outlier(found: Trace, spec: Ablation) -> UserError:
    """The error for a model in which there is nothing to ablate."""
    nearest = found.features().iloc[0]
    return UserError(
        f"'{short_name(spec.model)}' has no outlier feature on this text (feature {nearest['feature']} hits "
        f"{nearest['layers']:.0%} of layers and {nearest['positions']:.1%} of positions); name features with "
        "--features or lower --alpha"
    )


def plan(
    features: Iterable[int],
    width: int,
    methods: Iterable[str] = ("zero",),
    controls: int = CONTROLS.start,
    seed: int = 0,
    where: Iterable[str] = ("attn_in",),
    outliers: Iterable[int] = (),
) -> list[Treatment]:
    """What `ablate` measures; the controls of all methods are the same draws.

    outliers: the model's outlier features, of which no control is drawn, ablated or not.

    Raises:
        UserError: as `ablate`.
    """
    features, methods = check_features(features, width), list(methods)
    for method in methods:
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
    for role in where:
        if role not in STREAM:
            raise unknown_name("place", role, STREAM)
    if not _is_in(CONTROLS, controls):
        low, high = CONTROLS[0], CONTROLS[-1]
        raise UserError(
            f"{shown(controls)} controls; expected at least {low} random draws for an interval, {high} at most"
        )
    if not _is_in(SEEDS, seed):
        raise UserError(f"seed is {shown(seed)}; expected a whole number from 0 to 2**63 - 1")
    others = np.setdiff1d(np.arange(width), [*features, *outliers])
    if len(others) < len(features):
        raise UserError(
            f"{len(features)} of {width} features leave {len(others)} others that are no outliers, too few to draw "
            f"{len(features)} random ones from; ablate fewer features, or raise alpha"
        )
    generator = np.random.default_rng(seed)
    draws = [tuple(map(int, np.sort(generator.choice(others, len(features), replace=False)))) for _ in range(controls)]
    treatments = [Treatment("none")]
    for method in methods:
        treatments.append(Treatment("outliers", method, tuple(features)))
        treatments += [Treatment("control", method, draw, number) for number, draw in enumerate(draws)]
        if len(features) > 1:
            treatments += [Treatment("single", method, (feature,)) for feature in features]
    return treatments


def _is_in(numbers: range, value: object) -> bool:
    return isinstance(value, Integral) and int(value) in numbers


def measure(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    treatments: Iterable[Treatment],
    metric: str,
    where: Iterable[str] = ("attn_in",),
    seed: int = 0,
    means: Means | None = None,
    variant: Variant = AS_IT_IS,
) -> Iterator[tuple[Treatment, float]]:
    """Measure "top1_softmax" or "perplexity" of treatments, each as soon as it is known.

    All treatments of "top1_softmax" come from one pass over the text; "perplexity" takes one for each, but of a
    streamed model, whose layers are read once for all treatments. "shuffle" then draws its permutations layer by layer
    instead of block by block, so they are others.

    means: those of `feature_means`, which the method "mean" needs. variant: what the model is under meanwhile.
    """
    treatments = list(treatments)
    interventions = [
        Intervention(treatment.features, treatment.method or "zero", seed, means or {}) for treatment in treatments
    ]
    if not treatments:
        return
    if metric == "top1_softmax":
        yield from zip(treatments, top1_softmax(model, blocks, interventions, variant), strict=True)
        return
    variants = [Together((variant, Ablated(intervention, tuple(where)))) for intervention in interventions]
    if is_streamed(model):
        yield from zip(treatments, perplexities(model, blocks, variants), strict=True)
        return
    for treatment, ablated in zip(treatments, variants, strict=True):
        yield treatment, *perplexities(model, blocks, [ablated])


def ablate(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    features: Iterable[int],
    controls: int = CONTROLS.start,
    seed: int = 0,
    methods: Iterable[str] = ("zero",),
    where: Iterable[str] = ("attn_in",),
    alpha: float = ALPHA,
    attention_mask: Iterable[torch.Tensor] | None = None,
) -> pd.DataFrame:
    """Take features out of a model and measure attention and perplexity (LLM.int8(), section 4.2).

    Top-1 softmax probability: the features are changed in the input of the q/k/v projection of one layer at a time.
    Perplexity: in the inputs of all layers at once, and the altered states propagate. The model is left as it was.

    Args:
        model: a causal language model, quantized or not.
        blocks: token ids, int64 (blocks, T), or a list of (T,), sequences of any lengths.
        features: dimensions of the residual stream, for example those of `trace(...).outlier_features()`.
        controls: how many times as many random other features are drawn, 10 to 10,000.
        seed: of the draws, and of what "shuffle" does; 0 to 2⁶³ − 1.
        methods: "zero" (the paper's), "mean" (over the text) and "shuffle" (over the positions of a sequence).
        where: for perplexity, the inputs that are changed: "attn_in" (the paper's) and "ffn_in".
        alpha: from which magnitude on a value is an outlier; controls are drawn from features that are none.
        attention_mask: as for `outliers.perplexity`.

    Returns:
        One row a measurement: `subject` ("none", "outliers", "control", "single"), `method`, `features`, `draw`,
        `top1_softmax`, `perplexity`, and `damage`, the relative increase of perplexity. `summary` condenses it.

    Raises:
        UserError: there are no features, one is out of range, or there are too few others to draw controls from; a
            method or a place is unknown; controls or seed are out of range; blocks do not fit the model, or
            the mask does not fit them.
    """
    blocks = list(sequences(blocks, attention_mask))
    features, methods, where = list(features), list(methods), list(where)
    width = model.config.hidden_size
    plan(features, width, methods, controls, seed, where)  # mistakes show before the text is traced
    found = trace(model, blocks, STREAM, alpha, attention=False)
    treatments = plan(features, width, methods, controls, seed, where, found.outlier_features()["feature"])
    means = feature_means(found) if "mean" in methods else {}
    values = {
        metric: dict(measure(model, blocks, treatments, metric, where, seed, means))
        for metric in ("top1_softmax", "perplexity")
    }
    return damages(
        [{**vars(treatment), **{metric: of[treatment] for metric, of in values.items()}} for treatment in treatments]
    )


def damages(measurements: list[dict]) -> pd.DataFrame:
    """Measurements, one of them of subject "none", as a table with the column `damage`."""
    table = pd.DataFrame(measurements)
    table["damage"] = table["perplexity"] / table.loc[table["subject"] == "none", "perplexity"].item() - 1
    return table


def summary(measurements: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Condense what `ablate` returns: the controls of a method to one row, single features by their damage.

    Returns:
        Columns `subject`, `method`, `features`, `draws`, and `top1_softmax`, `perplexity` and `damage`: the value, or
        the mean of the controls; for these, `_low` and `_high` bound its 95 % bootstrap interval (percentiles of the
        means of 10,000 resamples).
    """
    order = ["none", "outliers", "control", "single"]
    groups = measurements.assign(method=measurements["method"].fillna(""))
    groups = groups.assign(alone=groups["features"].where(groups["subject"] == "single", ()))
    rows = []
    for (method, subject, alone), group in groups.groupby(["method", "subject", "alone"], sort=False):
        row = {"subject": subject, "method": method, "features": alone or group["features"].iloc[0]}
        if subject == "control":
            row |= {"features": (), "draws": len(group)}
        for metric in ("top1_softmax", "perplexity", "damage"):
            row[metric] = group[metric].mean()
            if subject == "control":
                row[f"{metric}_low"], row[f"{metric}_high"] = interval_of_mean(group[metric], seed)
        rows.append((order.index(subject), -row["damage"], row))
    methods = list(dict.fromkeys(row["method"] for *_, row in rows))
    rows.sort(key=lambda row: (methods.index(row[2]["method"]), *row[:2]))
    return pd.DataFrame([row for *_, row in rows])


def interval_of_mean(values: Iterable[float], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean: percentiles of the means of 10,000 resamples."""
    found = bootstrap((list(values),), np.mean, n_resamples=RESAMPLES, method="percentile", rng=seed)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
