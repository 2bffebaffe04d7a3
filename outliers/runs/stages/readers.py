"""Readers of a feature: the loss of a model if some projections do not read it, compared with random features."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from outliers.errors import UserError, shown
from outliers.metrics.records import Perplexity, Sinks, Top1
from outliers.quantization.schemes import BASELINE
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import Cell, Stages, Subject
from outliers.terminal.progress import with_bar
from outliers.variants.ablated import Ablated, Intervention
from outliers.variants.edges import ROLES
from outliers.variants.quantized import EXACT

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from transformers import PreTrainedModel

    from outliers.models.anatomy.examples import Block

CONTROLS = range(2, 10_001)  # allowed numbers of random features: a single one has no scatter
VALUES = {  # columns of the values of each metric, by field
    "perplexity": {"value": "perplexity"},
    "top1_softmax": {"value": "top1_softmax"},
    "sinks": {"value": "share", "margin": "margin", "heads": "sinks"},
    "sinks.head": {},
}


def readers_stages(subject: ModelWithText, features: Sequence[int], outliers: Sequence[int]) -> Stages:
    """Yield the cells of the unchanged model, and of the model without each feature and control at each place."""
    from outliers.models.skeleton import skeleton

    experiment = subject.experiment
    places = _places(skeleton(subject.config), experiment.places)
    drawn = _drawn(features, subject.width, experiment.controls, experiment.seed, outliers)
    yield _cells(subject, features, places, drawn)


def _drawn(features: Sequence[int], width: int, controls: int, seed: int, outliers: Iterable[int]) -> tuple[int, ...]:
    """Return random features that are neither among the given ones nor outliers."""
    from outliers.metrics.ablations import random_features
    from outliers.models.anatomy import check_features

    check_features(features, width)
    if controls not in CONTROLS:
        low, high = CONTROLS[0], CONTROLS[-1]
        raise UserError(f"{shown(controls)} controls; expected at least {low} random features, {high} at most")
    (drawn,) = random_features(controls, 1, width, seed, features, outliers)
    return drawn


def _places(model: "PreTrainedModel", chosen: Sequence[str] | None) -> list[str]:
    """Return the chosen places; by default all that read the residual stream in every layer, one by one and together.

    Raises:
        UserError: the model lacks one of the places.
    """
    from outliers.models.anatomy import check_one_stack, decoder_layers
    from outliers.models.anatomy.parts import stream_readers

    check_one_stack(model.config)
    if chosen is not None:
        for place in chosen:
            Ablated(Intervention((0,)), (place,)).check(model)
        return list(chosen)
    layers = [{part.name for part in stream_readers(model, layer)} for layer in range(len(decoder_layers(model)))]
    everywhere, somewhere = set.intersection(*layers), set().union(*layers)
    places = []
    for role, names in ROLES.items():
        present = [name for name in names if name in everywhere]
        places += [*present, role] if len(present) > 1 else [role] if somewhere & {*names} else []
    return places


def _cells(subject: Subject, features: Sequence[int], places: Sequence[str], controls: Sequence[int]) -> list[Cell]:
    """Return the cells for perplexity, then those for attention, if only queries, keys and values read the change."""
    from outliers.models.anatomy import has_attention

    removed = [(feature, {"subject": "feature"}) for feature in features]
    removed += [(feature, {"subject": "control", "draw": draw}) for draw, feature in enumerate(controls)]
    ablations = [
        (Ablated(Intervention((feature,)), (place,)), labels) for place in places for feature, labels in removed
    ]
    attends = has_attention(subject.config)
    in_attention = [(ablated, labels) for ablated, labels in ablations if attends and ablated.in_attention]
    measurements = [((EXACT, {}), Perplexity()), *((pair, Perplexity()) for pair in ablations)]
    if in_attention:
        measurements += [(pair, metric) for metric in (Top1(), Sinks()) for pair in ((EXACT, {}), *in_attention)]
    return [Cell(subject, variant, metric, labels) for (variant, labels), metric in measurements]


@with_bar
def readers(
    model: "PreTrainedModel",
    blocks: "Iterable[Block]",
    features: Iterable[int],
    places: Iterable[str] | None = None,
    controls: int = 5,
    seed: int = 0,
    attention_mask: "Iterable[torch.Tensor] | None" = None,
    *,
    progress: bool | None = None,
) -> "pd.DataFrame":
    """Return attention and perplexity with a feature removed at the inputs of some projections only.

    For perplexity, the feature is removed in all layers of a place at once, and the altered states propagate. For
    attention, if only queries, keys and values read the change, it is removed in one layer at a time. The model is left
    as it was.

    Args:
        model: a causal language model, resident or streamed, quantized or not.
        blocks: token ids, int64 (blocks, T), or a list of (T,), sequences of any lengths.
        features: dimensions of the residual stream.
        places: where they are removed, such as q, k, v, gate, up, attn_in, ffn_in, norm, layers.9:12.k and
            layers.9.heads.3, see `outliers.variant`; by default all that read the stream in every layer, one by one and
            together.
        controls: how many random features, none of them an outlier, are removed instead for comparison; 2 to 10,000.
        seed: of their draw; 0 to 2⁶³ − 1.
        attention_mask: as for `outliers.perplexity`.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Returns:
        One row of the unchanged model ("none"), and one of each feature ("feature") and random one ("control") at each
        place. The columns are `subject`, `place`, `feature`, `draw`, `perplexity`, `cost`, the relative increase of
        perplexity, and `cost_error`, its paired standard error over the text. If the place is of the attention, there
        are `top1_softmax`; `share` and `margin`, the means over heads of the attention to the first position and of the
        nats by which queries prefer it (docs/writers.md); `sinks`, the share of heads that give it more than 30 %;
        `shares` and `margins`, both by head, float64 (layers, heads).

    Raises:
        UserError: there are no features, one is out of range, or too few others are left to draw from; a place is
            unknown, or the model does not have it; controls or seed are out of range; blocks do not fit the model, or
            the mask does not fit them.

    Example:
        >>> found = outliers.readers(model, blocks, features=[3], places=["q", "k"], controls=2)
    """
    from outliers.models.anatomy import features_of
    from outliers.runs.loaded import measure_loaded
    from outliers.subjects.given import Given
    from outliers.text.blocks import unpad
    from outliers.tracing.result import STREAM
    from outliers.tracing.trace import trace

    blocks, features = list(unpad(blocks, attention_mask)), list(dict.fromkeys(features))
    places, width = _places(model, None if places is None else list(places)), features_of(model)
    _drawn(features, width, controls, seed, ())  # errors show before the text is traced
    outliers = trace(model, blocks, STREAM, attention=False).outlier_features()["feature"]
    drawn = _drawn(features, width, controls, seed, outliers)
    given = Given(model, blocks)
    return readings(measure_loaded(given, _cells(given, features, places, drawn))).drop(columns="increase")


def readings(records: Iterable[dict]) -> "pd.DataFrame":
    """Return the table of `readers` from flat rows; rows of other cells are ignored.

    The column `increase` holds the costs as values with their scatter over the text.
    """
    import numpy as np
    import pandas as pd

    from outliers.show.value import Value, value_of  # late, for it imports pandas

    rows_by_place: dict[tuple, dict] = {}
    for record in records:
        if record["metric"] not in VALUES or not ("subject" in record or record.get("variant", BASELINE) == BASELINE):
            continue
        labels = {"subject": record.get("subject", "none"), "place": "", "feature": None, "draw": record.get("draw")}
        if "where" in record:
            labels |= {"place": record["where"][0], "feature": record["features"][0]}
        row = rows_by_place.setdefault(tuple(labels.values()), labels)
        row |= {column: record[field] for field, column in VALUES[record["metric"]].items()}
        if record["metric"] == "perplexity":
            row["increase"] = value_of(record)
        if record["metric"] == "sinks.head":
            row.setdefault("heads", {})[record["layer"], record["head"]] = record["value"], record["margin"]
    rows, unknown = [], Value(math.nan)
    for row in rows_by_place.values():
        heads = row.pop("heads", {})
        by_head = np.full((*(1 + np.array([*heads]).max(0)), 2), np.nan) if heads else None  # layers may lack some
        for place, values in heads.items():
            by_head[place] = values
        rows.append(row | ({} if by_head is None else {"shares": by_head[..., 0], "margins": by_head[..., 1]}))
    table = pd.DataFrame(rows).astype({"feature": "Int64", "draw": "Int64"})
    for column in {"perplexity", "top1_softmax", "share", "margin", "sinks", "shares", "margins"} - {*table}:
        table[column] = np.nan  # missing if perplexity overflows or no layer has attention
    unchanged = next(row.get("increase", unknown) for row in rows if row["subject"] == "none")
    increases = [row.get("increase", unknown).increase_over(unchanged)._replace(deviation=0.0) for row in rows]
    table.insert(5, "cost", [increase.mean for increase in increases])
    table.insert(6, "cost_error", np.array([increase.error for increase in increases], float))
    return table.assign(increase=increases)
