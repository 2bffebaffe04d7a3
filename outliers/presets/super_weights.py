"""Single weights that carry a model, beside controls; massive activations and sinks without what makes them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from outliers.metrics.agreement import Agreement
from outliers.metrics.candidates import Candidates, removals, scalings, treatments
from outliers.metrics.perplexity import Perplexity
from outliers.metrics.sinks import Sinks
from outliers.metrics.trace import Trace
from outliers.runs.rows import Row
from outliers.subjects.causal import Causal
from outliers.subjects.cell import Cell, Stages, Subject
from outliers.variants.quantized import EXACT

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CONTROLLED = 4  # candidates, those that change most, are compared with controls; the first is multiplied too
FOUND = "candidates.weight"  # the metric of their values
ABOUT = ("layer", "output", "input", "found_by", "value")  # what is said of a candidate


def check_weights(subject: Causal, _features: Sequence[int]) -> None:
    """Raise UserError where a model has no weights to search."""
    cell = _search(subject, subject.settings.controls, subject.settings.seed)
    cell.metric.measurement.check(cell)


def weights_stages(subject: Causal, _features: Sequence[int], _outliers: Sequence[int]) -> Stages:
    """The search of a model by its settings."""
    return search_stages(subject, subject.settings.controls, subject.settings.seed)


def massive_stages(subject: Causal, _features: Sequence[int], _outliers: Sequence[int]) -> Stages:
    """What becomes of massive activations and sinks without what makes them."""
    from outliers.tracing.result import STREAM  # late, for it brings torch, and views take this file

    spec = subject.settings
    trace = Trace(roles=STREAM, alpha=spec.alpha, details=True)
    traced, searched = yield [Cell(subject, EXACT, trace), _search(subject, spec.controls, spec.seed)]
    removed = removals([*traced.values, *searched.values])
    yield [Cell(subject, variant, metric) for variant in removed.values() for metric in (Perplexity(), Sinks(), trace)]


def search_stages(subject: Subject, controls: int, seed: int) -> Stages:
    """The candidates, what is lost without each of them, and, of those that change most, what controls cost."""
    searched, _ = yield [_search(subject, controls, seed), Cell(subject, EXACT, Perplexity())]
    found = [value for value in searched.values if value["metric"] == FOUND]
    first = [next(variant for _, variant in treatments(one)) for one in found]
    rows = yield [Cell(subject, variant, metric) for variant in first for metric in (Agreement(), Perplexity())]
    ranked = [one for _, one in sorted(zip(map(_divergence, rows[::2]), found, strict=True), key=lambda pair: -pair[0])]
    compared = [variant for one in ranked[:CONTROLLED] for _, variant in treatments(one)]
    compared += [variant for one in ranked[:1] for variant in scalings(one)]
    known = {variant.name for variant in first}
    others = {variant.name: variant for variant in compared if variant.name not in known}
    yield [Cell(subject, variant, Perplexity()) for variant in others.values()]


def _search(subject: Subject, controls: int, seed: int) -> Cell:
    return Cell(subject, EXACT, Candidates(controls=controls, seed=seed))


def _divergence(row: Row) -> float:
    """KL divergence from the model as it is, nats a token."""
    return next(value["value"] for value in row.values if value["metric"] == "damage.kl")


def super_weights(
    model: "PreTrainedModel",
    blocks: "Iterable[torch.Tensor]",
    controls: int = 5,
    seed: int = 0,
    attention_mask: "Iterable[torch.Tensor] | None" = None,
) -> pd.DataFrame:
    """Search a model for super weights: single weights without which it predicts much worse (Yu et al., 2024).

    Candidates are the weights of second feed-forward projections that are between spikes of their input and output, and
    those that stand out most of their row and column. Each is set to zero; those that change the predictions most are
    compared with random weights of equal magnitude, the largest of the layer, the whole neuron, the whole row, and the
    massive activation behind the layer at its mean. The model is left as it was.

    Args:
        model: a causal language model, resident or streamed.
        blocks: token ids, int64 (blocks, T), or a list of (T,), sequences of any lengths.
        controls: random weights of equal magnitude for each of those candidates.
        seed: of their draw.
        attention_mask: as for `outliers.perplexity`.

    Returns:
        One row a candidate and what was done, the most telling candidate first: `candidate`, its `layer`, `output` and
        `input`, `found_by` ("activations" or "weights"), its `value`, `treatment` ("weight", "random", "largest",
        "neuron", "row", "massive", "scaled"), `variant`, `factor`, `perplexity`, `cost`, the relative increase of
        perplexity, and `kl`, how far the predictions without the weight are from those of the model, nats a token.

    Raises:
        UserError: no layer has a second feed-forward projection; as `outliers.perplexity`.
    """
    from outliers.metrics.measurement import records_along
    from outliers.subjects.given import Given
    from outliers.text.blocks import sequences

    stages = search_stages(Given(model, list(sequences(blocks, attention_mask))), controls, seed)
    return compared(records_along(stages))


def compared(records: Iterable[Mapping]) -> pd.DataFrame:
    """What `super_weights` returns, of flat records of one model; nothing else of them is looked at."""
    records = list(records)
    values = {(one["metric"], one["variant"]): one["value"] for one in records}
    candidates = {(one["path"], one["output"], one["input"]): one for one in records if one["metric"] == FOUND}
    baseline = values["perplexity", EXACT.name]
    rows = []
    for candidate in candidates.values():
        treated = [*treatments(candidate), *(("scaled", variant) for variant in scalings(candidate))]
        name = treated[0][1].name.removeprefix("zero(").removesuffix(")")
        about = {"candidate": name, **{field: candidate[field] for field in ABOUT}}
        about["kl"] = values["damage.kl", treated[0][1].name]
        for treatment, variant in treated:
            perplexity = values.get(("perplexity", variant.name))
            if perplexity is not None:
                cost = perplexity / baseline - 1
                row = {"treatment": treatment, "variant": variant.name, "perplexity": perplexity, "cost": cost}
                rows.append(about | row | {"factor": variant.factor if treatment == "scaled" else None})
    return pd.DataFrame(rows).sort_values("kl", ascending=False, kind="stable", ignore_index=True)
