"""What a model loses without some features, beside what it loses without random ones."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import pandas as pd
import torch
from scipy.stats import bootstrap
from torch import nn
from transformers import PreTrainedModel

from outliers.criterion import ALPHA
from outliers.errors import UserError, shown, unknown_name
from outliers.measurements.attention import top1_softmax
from outliers.measurements.perplexity import perplexities, perplexity
from outliers.models.anatomy import Projection, check_features, decoder_layers, readers
from outliers.models.stream import Variant, is_streamed
from outliers.tracing.result import STREAM, Trace
from outliers.tracing.trace import trace
from outliers.variants.interventions import METHODS, Intervention, Means

CONTROLS = range(10, 10_001)  # random draws of features: fewer make no interval, more no better one
SEEDS = range(2**63)  # what the generators of numpy and torch both take
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
) -> Iterator[tuple[Treatment, float]]:
    """Measure "top1_softmax" or "perplexity" of treatments, each as soon as it is known.

    All treatments of "top1_softmax" come from one pass over the text; "perplexity" takes one for each, but of a
    streamed model, whose layers are read once for all treatments. "shuffle" then draws its permutations layer by layer
    instead of block by block, so they are others. means: those of `feature_means`, which the method "mean"
    needs.
    """
    treatments = list(treatments)
    if not treatments:
        return
    interventions = [
        Intervention(treatment.features, treatment.method or "zero", seed, means or {}) for treatment in treatments
    ]
    if metric == "top1_softmax":
        yield from zip(treatments, top1_softmax(model, blocks, interventions), strict=True)
        return
    inputs = [reader for reader in readers(model) if reader.role in where]
    if is_streamed(model):
        variants = [_variant(intervention, inputs) for intervention in interventions]
        yield from zip(treatments, perplexities(model, blocks, variants), strict=True)
        return
    for treatment, intervention in zip(treatments, interventions, strict=True):
        with intervention.on(inputs):
            value = perplexity(model, blocks)
        yield treatment, value


def _variant(intervention: Intervention, inputs: list[Projection]) -> Variant:
    """A streamed model's layers under an intervention."""

    @contextmanager
    def variant(model: PreTrainedModel, number: int) -> Iterator[nn.Module]:
        with intervention.on([projection for projection in inputs if projection.layer == number]):
            yield decoder_layers(model)[number]

    return variant


def ablate(
    model: PreTrainedModel,
    blocks: torch.Tensor,
    features: Iterable[int],
    controls: int = CONTROLS.start,
    seed: int = 0,
    methods: Iterable[str] = ("zero",),
    where: Iterable[str] = ("attn_in",),
    alpha: float = ALPHA,
) -> pd.DataFrame:
    """Take features out of a model and measure attention and perplexity (LLM.int8(), section 4.2).

    Top-1 softmax probability: the features are changed in the input of the q/k/v projection of one layer at a time.
    Perplexity: in the inputs of all layers at once, and the altered states propagate. The model is left as it was.

    Args:
        model: a causal language model, quantized or not.
        blocks: token ids, int64 (blocks, T).
        features: dimensions of the residual stream, for example those of `trace(...).outlier_features()`.
        controls: how many times as many random other features are drawn, 10 to 10,000.
        seed: of the draws, and of what "shuffle" does; 0 to 2⁶³ − 1.
        methods: "zero" (the paper's), "mean" (over the text) and "shuffle" (over the positions of a sequence).
        where: for perplexity, the inputs that are changed: "attn_in" (the paper's) and "ffn_in".
        alpha: from which magnitude on a value is an outlier; controls are drawn from features that are none.

    Returns:
        One row a measurement: `subject` ("none", "outliers", "control", "single"), `method`, `features`, `draw`,
        `top1_softmax`, `perplexity`, and `damage`, the relative increase of perplexity. `summary` condenses it.

    Raises:
        UserError: there are no features, one is out of range, or there are too few others to draw controls from; a
            method or a place is unknown; controls or seed are out of range; blocks do not fit the model.
    """
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


def feature_means(found: Trace) -> Means:
    """Mean of every feature over the text of a trace, by layer and role."""
    means = {role: found.statistics[f"{role}.sum"] / (found.block * found.sequences) for role in STREAM}
    return {(layer, role): mean for role, of_role in means.items() for layer, mean in enumerate(of_role)}
