"""Ablations: the loss of a model without some features, compared with its loss without random ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import pandas as pd
import torch
from scipy.stats import bootstrap
from transformers import PreTrainedModel

from outliers.criterion import ALPHA
from outliers.errors import UserError, shown, unknown_name
from outliers.metrics.perplexity import perplexities
from outliers.metrics.top1 import top1_softmax
from outliers.models.anatomy import attends, check_features, features_of
from outliers.models.anatomy.examples import Block
from outliers.models.anatomy.stack_views import stack_view
from outliers.models.stream import apart
from outliers.terminal.progress import expect_passes, with_bar
from outliers.text.blocks import sequences
from outliers.tracing.result import STREAM
from outliers.tracing.trace import trace
from outliers.variants.ablated import METHODS, SEEDS, Ablated, Intervention, feature_means

CONTROLS = range(10, 10_001)  # numbers of random draws: fewer give no interval, more no better one
RESAMPLES = 10_000


@dataclass(frozen=True)
class Treatment:
    """A measurement of an ablation: which features are removed, and how.

    subject: "none" (the unchanged model), "outliers" (all given features), "control" (the same number of random other
    ones), or "single" (one of several given features). draw: number of the control.
    """

    subject: str
    method: str | None = None
    features: tuple[int, ...] = ()
    draw: int | None = None

    @property
    def fields(self) -> dict:
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return fields | {"features": list(self.features)}


def plan(
    features: Iterable[int],
    width: int,
    methods: Iterable[str] = ("zero",),
    controls: int = CONTROLS.start,
    seed: int = 0,
    where: Iterable[str] = ("attn_in",),
    outliers: Iterable[int] = (),
) -> list[Treatment]:
    """Return the measurements of `ablate`; the controls of all methods are the same draws.

    outliers: the model's outlier features, which no control includes, whether ablated or not.

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
    draws = random_features(len(features), controls, width, seed, features, outliers)
    treatments = [Treatment("none")]
    for method in methods:
        treatments.append(Treatment("outliers", method, tuple(features)))
        treatments += [Treatment("control", method, draw, number) for number, draw in enumerate(draws)]
        if len(features) > 1:
            treatments += [Treatment("single", method, (feature,)) for feature in features]
    return treatments


def random_features(
    count: int, draws: int, width: int, seed: int, features: Sequence[int], outliers: Iterable[int]
) -> list[tuple[int, ...]]:
    """Draw sets of features without replacement, excluding some features and outliers.

    count: features of a draw. draws: number of draws. width: features to draw from. features, outliers: those to
    exclude.

    Raises:
        UserError: too few features are left; or the seed is invalid.
    """
    if not _is_in(SEEDS, seed):
        raise UserError(f"seed is {shown(seed)}; expected a whole number from 0 to 2**63 - 1")
    others = np.setdiff1d(np.arange(width), [*features, *outliers])
    if len(others) < count:
        raise UserError(
            f"{len(features)} of {width} features leave {len(others)} others that are not outliers, too few to draw "
            f"{count} random ones from; ablate fewer features, or raise alpha"
        )
    generator = np.random.default_rng(seed)
    return [tuple(map(int, np.sort(generator.choice(others, count, replace=False)))) for _ in range(draws)]


def _is_in(numbers: range, value: object) -> bool:
    return isinstance(value, Integral) and int(value) in numbers


@with_bar
def ablate(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    features: Iterable[int],
    controls: int = CONTROLS.start,
    seed: int = 0,
    methods: Iterable[str] = ("zero",),
    where: Iterable[str] = ("attn_in",),
    alpha: float = ALPHA,
    attention_mask: Iterable[torch.Tensor] | None = None,
    stack: str | None = None,
    *,
    progress: bool | None = None,
) -> pd.DataFrame:
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
            `summary` condenses the table.

    Raises:
        UserError: there are no features, one is out of range, or there are too few others to draw controls from; a
            method or a place is unknown; controls or seed are out of range; blocks do not fit the model, or the mask
            does not fit them.

    Example:
        >>> measurements = outliers.ablate(model, blocks, features=[3])
    """
    model, blocks = apart(model), list(sequences(blocks, attention_mask))
    features, methods, where = list(features), list(methods), list(where)
    width = features_of(model)
    plan(features, width, methods, controls, seed, where)  # reports mistakes before the text is traced
    if (view := stack_view(model, stack)).cross:
        raise UserError("the encoder's states in cross-attention cannot be ablated; expected 'encoder' or 'decoder'")
    before = f"{view.written}." if stack else ""
    traced = trace(model, blocks, STREAM, alpha, attention=False, stack=stack)
    treatments = plan(features, width, methods, controls, seed, where, traced.outlier_features()["feature"])
    expect_passes(len(blocks) * (len(treatments) + 1))  # for perplexities, and one for attention
    means = feature_means(traced) if "mean" in methods else {}
    interventions = [Intervention(treated.features, treated.method or "zero", seed, means) for treated in treatments]
    values = {}
    if attends(model.config):
        in_attention = [Ablated(change, (f"{before}attn_in",)) for change in interventions]
        values["top1_softmax"] = top1_softmax(model, blocks, in_attention, stack=stack)
    in_places = [Ablated(change, tuple(f"{before}{role}" for role in where)) for change in interventions]
    values["perplexity"] = perplexities(model, blocks, in_places)
    return damages(
        [
            {**vars(treatment), **{metric: by_treatment[number] for metric, by_treatment in values.items()}}
            for number, treatment in enumerate(treatments)
        ]
    )


def damages(measurements: list[dict]) -> pd.DataFrame:
    """Return measurements as a table with the column `damage`; one of them must be of subject "none"."""
    table = pd.DataFrame(measurements)
    table["damage"] = table["perplexity"] / table.loc[table["subject"] == "none", "perplexity"].item() - 1
    return table


def summary(measurements: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Condense the result of `ablate`: the controls of a method to one row, single features sorted by their damage.

    Returns:
        Columns `subject`, `method`, `features`, `draws`, and `top1_softmax`, `perplexity` and `damage`: the value, or
        the mean of the controls. For controls, `_low` and `_high` bound the 95 % bootstrap interval of the mean
        (percentiles of the means of 10,000 resamples).
    """
    order = ["none", "outliers", "control", "single"]
    groups = measurements.assign(method=measurements["method"].fillna(""))
    groups = groups.assign(alone=groups["features"].where(groups["subject"] == "single", ()))
    rows = []
    for (method, subject, alone), group in groups.groupby(["method", "subject", "alone"], sort=False):
        row = {"subject": subject, "method": method, "features": alone or group["features"].iloc[0]}
        if subject == "control":
            row |= {"features": (), "draws": len(group)}
        for metric in [name for name in ("top1_softmax", "perplexity", "damage") if name in group]:
            row[metric] = group[metric].mean()
            if subject == "control":
                row[f"{metric}_low"], row[f"{metric}_high"] = interval_of_mean(group[metric], seed)
        rows.append((order.index(subject), -row["damage"], row))
    methods = list(dict.fromkeys(row["method"] for *_, row in rows))
    rows.sort(key=lambda row: (methods.index(row[2]["method"]), *row[:2]))
    return pd.DataFrame([row for *_, row in rows])


def interval_of_mean(values: Iterable[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean: percentiles of the means of 10,000 resamples."""
    resampled = bootstrap((list(values),), np.mean, n_resamples=RESAMPLES, method="percentile", rng=seed)
    return float(resampled.confidence_interval.low), float(resampled.confidence_interval.high)
