"""Single weights that carry a model, compared with controls; massive activations and sinks without their causes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from outliers.criterion import MASSIVE, STREAM
from outliers.metrics.records import Agreement, Candidates, Perplexity, Sinks, TraceMetric
from outliers.runs.rows import Row
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import Cell, Stages, Subject
from outliers.terminal.progress import with_bar
from outliers.variants.ablated import Ablated, Intervention
from outliers.variants.massive import Massive
from outliers.variants.quantized import EXACT
from outliers.variants.term import Term, WeightEntry
from outliers.variants.unattended import Unattended
from outliers.variants.weights import Scaled

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from transformers import PreTrainedModel

    from outliers.models.anatomy.examples import Block
    from outliers.models.variant import Variant

CONTROLLED = 4  # candidates that change most and get controls; the first one is multiplied, too
DRAWS = 3  # draws of each of them and of its most costly control, for the scatter by rounding
BESIDE = ("nearest", "largest", "random")  # treatments of other single weights; only earlier results have "random"
FACTORS = (0.5, 1.5, 2)  # factors of the first candidate, beside 0 (Yu et al., 2024, section 3.3)
FOUND = "candidates.weight"  # metric of candidates
ABOUT = ("layer", "output", "input", "found_by", "value")  # columns that describe a candidate


def weights_stages(subject: ModelWithText, _features: Sequence[int], _outliers: Sequence[int]) -> Stages:
    """Return the stages of `super_weight_stages` with the default number of controls."""
    return super_weight_stages(subject)


def massive_stages(subject: ModelWithText, _features: Sequence[int], _outliers: Sequence[int]) -> Stages:
    """Yield the cells for massive activations and sinks without the weights and entries that make them."""
    experiment = subject.experiment
    trace = TraceMetric(roles=STREAM, alpha=experiment.alpha, details=True)
    traced, searched = yield [Cell(subject, EXACT, trace), _search(subject)]
    removed = removals([*traced.values, *searched.values])
    yield [Cell(subject, variant, metric) for variant in removed.values() for metric in (Perplexity(), Sinks(), trace)]


def super_weight_stages(subject: Subject, **controls: int) -> Stages:
    """Yield the cells for candidates, and for the perplexity without each of them.

    For the candidates that change the predictions most, also yield controls, and draws that show the scatter of the
    deciding costs by rounding.
    """
    cells = [_search(subject, **controls), Cell(subject, EXACT, Perplexity())]
    rows = yield cells
    candidates = [value for value in rows[0].values if value["metric"] == FOUND]
    first = [next(variant for _, variant in treatments(candidate)) for candidate in candidates]
    cells += [Cell(subject, variant, metric) for variant in first for metric in (Agreement(), Perplexity())]
    rows += yield cells[2:]
    pairs = sorted(zip(map(_divergence, rows[2::2]), candidates, strict=True), key=lambda pair: -pair[0])
    ranked = [candidate for _, candidate in pairs]
    treated = [variant for candidate in ranked[:CONTROLLED] for _, variant in treatments(candidate)]
    treated += [variant for candidate in ranked[:1] for variant in scalings(candidate)]
    known = {variant.name for variant in first}
    others = {variant.name: variant for variant in treated if variant.name not in known}
    cells += [Cell(subject, variant, Perplexity()) for variant in others.values()]
    rows += yield cells[len(rows) :]
    if subject.experiment.dtype == "float32":  # 16-bit types have too few digits for draws
        yield [Cell(subject, variant, Perplexity(draws=DRAWS)) for variant in _variants_to_draw(cells, rows)]


def _search(subject: Subject, **controls: int) -> Cell:
    return Cell(subject, EXACT, Candidates(**controls))


def _variants_to_draw(cells: Sequence[Cell], rows: Iterable[Row]) -> Iterator["Variant"]:
    """Yield the variants to measure in draws: without each candidate that has controls, and its costliest control."""
    variants = {cell.variant.name: cell.variant for cell in cells}
    pairs = zip(cells, rows, strict=True)
    table = cost_table(value | {"variant": cell.variant.name} for cell, row in pairs for value in row.values)
    names = set()
    for _, costs in table.groupby("candidate"):
        controls = costs[costs["treatment"].isin(BESIDE)]
        if len(controls):
            names |= {costs["variant"].iloc[0], controls.loc[controls["cost"].idxmax(), "variant"]}
    yield from (variants[name] for name in sorted(names))


def _divergence(row: Row) -> float:
    """Return the KL divergence from the unchanged model, nats per token."""
    return next(value["value"] for value in row.values if value["metric"] == "damage.kl")


def treatments(candidate: Mapping) -> Iterator[tuple[str, "Variant"]]:
    """Yield kind and variant of each treatment that shows whether a candidate matters.

    The "weight" itself is set to zero. So are its controls: the weights "nearest" in magnitude, or in earlier results
    "random" ones of equal magnitude in its matrix; the "largest" of the matrix, its whole "neuron" and its whole "row";
    and its "massive" activation, if there is one, is set to its mean.
    """
    path, output, input = candidate["path"], candidate["output"], candidate["input"]
    yield "weight", Scaled(WeightEntry(path, output, input))
    others = {"nearest": candidate.get("nearest", []), "random": [f"{path}[{at}]" for at in candidate.get("equal", [])]}
    yield from ((kind, Scaled.read(Term.read(f"zero({name})"))) for kind, names in others.items() for name in names)
    if candidate["largest"] != [output, input]:
        yield "largest", Scaled(WeightEntry(path, *candidate["largest"]))
    yield "neuron", Scaled(WeightEntry(path, None, input))
    yield "row", Scaled(WeightEntry(path, output, None))
    if candidate["least"] > MASSIVE:
        yield "massive", Massive((output,), candidate["layer"], candidate["state"], candidate["least"] / 2)


def removals(records: Iterable[Mapping]) -> dict[str, "Variant"]:
    """Return variants that remove possible causes of the residual stream's largest entry and of the attention to it.

    The first changes nothing. If the entry is a massive activation, the next remove the weight and the neuron that
    write most of it; the entry itself, after the layer that writes it; and its feature, for all that read it. The last
    one hides the first position from all attention.

    Args:
        records: values of a trace and of candidates, of the unchanged model.
    """
    records = list(records)
    largest = max((row for row in records if row["metric"] == "residual.value"), key=lambda row: abs(row["value"]))
    layers = [row for row in records if row["metric"] == "candidates.layer" and row["output"] == largest["feature"]]
    removed: dict[str, Variant] = {"nothing": EXACT}
    if abs(largest["value"]) > MASSIVE and layers:
        layer = max(layers, key=lambda row: abs(row["value"]))
        feature, path = layer["output"], layer["path"]
        removed["weight"] = Scaled(WeightEntry(path, feature, layer["input"]))
        removed["neuron"] = Scaled(WeightEntry(path, None, layer["input"]))
        removed["activation"] = Massive((feature,), layer["layer"], 0.0, layer["least"] / 2)
        # as single parts: with whole roles, attention would be measured with one layer ablated at a time
        removed["feature"] = Ablated(Intervention((feature,)), ("q", "k", "v", "ffn_in"))
    return removed | {"position": Unattended((0,))}


def scalings(candidate: Mapping) -> Iterator["Variant"]:
    """Yield variants that multiply a candidate by each of `FACTORS`."""
    weight = WeightEntry(candidate["path"], candidate["output"], candidate["input"])
    yield from (Scaled(weight, factor) for factor in FACTORS)


@with_bar
def super_weights(
    model: "PreTrainedModel",
    blocks: "Iterable[Block]",
    controls: int = 10,
    attention_mask: "Iterable[torch.Tensor] | None" = None,
    *,
    progress: bool | None = None,
) -> "pd.DataFrame":
    """Return candidate super weights: single weights without which a model fails (Yu et al., 2024).

    Candidates are the weights of second feed-forward projections that link spikes of their input and output, and those
    that stand out most from their row or column. Each is set to zero; those that change the predictions most are
    compared with the weights of all these projections that are nearest in magnitude, the largest of the same matrix,
    the whole neuron, the whole row, and the massive activation after the layer at its mean. Of a float32 model, three
    draws show how far rounding scatters the costs of the weight and of the other weight that costs most. The model is
    left as it was.

    Args:
        model: a causal language model, resident or streamed.
        blocks: token ids, int64 (blocks, T), or a list of (T,), sequences of any lengths.
        controls: number of weights nearest in magnitude; candidates are not among them.
        attention_mask: as for `outliers.perplexity`.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Returns:
        One row for each candidate and treatment, the candidate with the largest divergence first. The columns are
        `candidate`, its `layer`, `output` and `input`, `found_by` ("activations" or "weights"), its `value`,
        `treatment` ("weight", "nearest", "largest", "neuron", "row", "massive", "scaled"), `variant`, `factor`,
        `perplexity`, `cost`, the relative increase of perplexity, `deviation`, the standard deviation of log-perplexity
        over draws, `error`, the paired standard error over the text of its increase, `other`, the value of a nearest
        weight, and `kl`, the divergence of the predictions without the weight from those of the model, nats per token.

    Raises:
        UserError: no layer has a second feed-forward projection; controls are out of range; as `outliers.perplexity`.

    Example:
        >>> found = outliers.super_weights(model, blocks, controls=2)
    """
    from outliers.runs.loaded import measure_loaded
    from outliers.subjects.given import Given
    from outliers.text.blocks import unpad

    given = Given(model, list(unpad(blocks, attention_mask)))
    return cost_table(measure_loaded(given, super_weight_stages(given, controls=controls))).drop(columns="increase")


def cost_table(records: Iterable[Mapping]) -> "pd.DataFrame":
    """Return the table of `super_weights` from flat records of one model; those of other cells are ignored.

    The column `increase` holds the increase of log-perplexity as a value with its scatter.
    """
    import pandas as pd

    from outliers.show.value import Value, value_of  # late, for it imports pandas

    records = list(records)
    drawn = {row["variant"]: row for row in records if row["metric"] == "perplexity" and "standard_deviation" in row}
    values = {(row["metric"], row["variant"]): value_of(row) for row in records if "standard_deviation" not in row}
    candidates = {(row["path"], row["output"], row["input"]): row for row in records if row["metric"] == FOUND}
    baseline = values.get(("perplexity", EXACT.name), Value(math.nan))
    rows = []
    for candidate in candidates.values():
        treated = [*treatments(candidate), *(("scaled", variant) for variant in scalings(candidate))]
        name = treated[0][1].name.removeprefix("zero(").removesuffix(")")
        about = {"candidate": name, **{field: candidate[field] for field in ABOUT}}
        about["kl"] = values["damage.kl", treated[0][1].name].mean
        others = dict(zip(candidate.get("nearest", ()), candidate.get("nearest_values", ()), strict=True))
        for treatment, variant in treated:
            perplexity = values.get(("perplexity", variant.name))
            if perplexity is not None:
                cost = perplexity.increase_over(baseline)
                increase = cost.log_of_ratio()._replace(deviation=0.0)  # results in 16 bits have no draws
                row = {"treatment": treatment, "variant": variant.name, "perplexity": perplexity.mean}
                row |= {"cost": cost.mean, "error": increase.error}
                row["factor"] = variant.factor if treatment == "scaled" else None
                row["other"] = others.get(variant.name[len("zero(") : -1]) if treatment == "nearest" else None
                if scatter := drawn.get(variant.name):
                    row["deviation"] = scatter["standard_deviation"] / scatter["value"]
                    increase = increase._replace(deviation=row["deviation"])
                rows.append(about | row | {"increase": increase})
    columns = ["candidate", *ABOUT, "kl", "treatment", "variant", "perplexity", "cost", "deviation", "error", "factor"]
    table = pd.DataFrame(rows, columns=[*columns, "other", "increase"])
    table = table.astype(dict.fromkeys(("deviation", "error", "other"), float))
    return table.sort_values("kl", ascending=False, kind="stable", ignore_index=True)
