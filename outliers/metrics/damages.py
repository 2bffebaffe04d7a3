"""Tables of the damage by schemes and caches: errors, places, perplexity and agreement together."""

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pandas as pd

from outliers.models.names import distinct_names
from outliers.quantization.schemes import BASELINE
from outliers.show.value import Value, grouped, value_of
from outliers.variants.peer import Against, is_against
from outliers.variants.term import AGAINST

OF_MODEL = ("perplexity", "damage.kl", "damage.top1_agreement")
OF_PROJECTION = ("damage.error", "damage.error_by_token")
OF_WEIGHT = {  # for other models: columns of the table of errors, and the fields of rows in them
    "damage.weight_error": {"weight_error": "value"},
    "damage.largest_weight": {"largest_weight": "value", "largest_at": "place"},
    "damage.largest_change": {"largest_change": "value", "changed_at": "place"},
}
ERRORS = [
    *("layer", "role", "projection", "error", "db", "by_token", "by_token_db"),
    *("largest", "feature", "position", "token"),
]


@dataclass(frozen=True, eq=False)
class Damages:
    """The damage of a variant, such as a scheme or a cache, to a model; tables are empty for what was not measured.

    errors: a row per projection: `layer`, `role`, `projection` (its path), `error` (‖Y_q − Y‖² / ‖Y‖²) and `by_token`
    (the mean of the same ratio of single tokens), both in dB too, `db` and `by_token_db`; and of its input `largest`
    (|x|), `feature`, `position`, `token` (id). For another model also `weight_error` (‖W_other − W‖² / ‖W‖²),
    `weight_db` in dB, the largest weight and the largest change of one, `largest_weight` and `largest_change`, with
    their places [output, input], `largest_at` and `changed_at`.

    roles, layers, stacks, heads, experts: a row each: `perplexity_only` with only it quantized, `perplexity_without`
    with everything else quantized, and each relative to the unquantized model, `damage_only` and `damage_without`. For
    the layers of another model also `kl_only` and `top1_agreement_only`. Each of these has a column `…_error`, its
    standard error over the text, paired with the unquantized model; and, with several draws, a column `…_deviation`.

    model: `perplexity`, `unquantized` (the perplexity without the variant), `damage`, `kl` (nats) and `top1_agreement`,
    each with its `…_error` and `…_deviation`.

    costs: each `damage` as a value whose differences pair, by its column, the field and the place.
    """

    variant: str
    errors: pd.DataFrame
    roles: pd.DataFrame
    layers: pd.DataFrame
    stacks: pd.DataFrame
    heads: pd.DataFrame
    experts: pd.DataFrame
    model: dict[str, float]
    costs: dict[tuple[str, str | None, str | int | None], Value]


def damages_of(rows: list[dict]) -> dict[str, Damages]:
    """Return the damage by variant, in the order of the rows of one model; other models have short names."""
    by_variant = grouped(rows, itemgetter("variant"))
    others = distinct_names((Against.read(name).called, None) for name in by_variant if is_against(name))
    short = {Against(other).name: f"{AGAINST}({name})" for (other, _), name in others.items()}
    inputs = [row for row in rows if row["metric"] == "damage.largest_input"]
    exact = (row for row in by_variant.pop(BASELINE, []) if row["metric"] == "perplexity")
    baseline = next((value_of(row) for row in exact), None)
    named = {short.get(name, name): of_variant for name, of_variant in by_variant.items()}
    return {name: _damages(name, of_variant, inputs, baseline) for name, of_variant in named.items()}


def _damages(variant: str, rows: list[dict], inputs: list[dict], baseline: Value | None) -> Damages:
    model, costs = {} if baseline is None else {"unquantized": baseline.mean}, {}
    for row in rows:
        if row["metric"] in OF_MODEL:
            model |= _scatter_columns(row["metric"].removeprefix("damage."), value_of(row))
        if row["metric"] == "perplexity" and baseline is not None:
            costs["damage", None, None] = value_of(row).increase_over(baseline)
            model |= _scatter_columns("damage", costs["damage", None, None])
    places = [_place_table(rows, field, baseline, costs) for field in ("role", "layer", "stack", "head", "expert")]
    return Damages(variant, _error_table(rows, inputs), *places, model, costs)


def _scatter_columns(name: str, value: Value) -> dict[str, float]:
    bars = {f"{name}_deviation": value.deviation, f"{name}_error": value.error}
    return {name: value.mean} | {column: bar for column, bar in bars.items() if bar is not None}


def _error_table(rows: list[dict], inputs: list[dict]) -> pd.DataFrame:
    """Return the error of each projection's output, with the largest |x| of its input, one line per projection."""
    largest = {(row["layer"], row["role"]): row for row in inputs}
    by_projection: dict[str, dict] = {}
    for row in rows:
        if row["metric"] in OF_PROJECTION:
            place = {name: row[name] for name in ("layer", "role", "projection")}
            name = row["metric"].removeprefix("damage.").removeprefix("error_")
            decibels = _decibels(row["value"])
            errors = by_projection.setdefault(row["projection"], place)
            errors |= {name: row["value"], "db" if name == "error" else f"{name}_db": decibels}
    for row in by_projection.values():
        input_row = largest.get((row["layer"], row["role"]), {})
        row |= {"largest": input_row.get("value")}
        row |= {name: input_row.get(name) for name in ("feature", "position", "token")}
    weights = _weight_table(rows)
    for path, row in by_projection.items():
        row |= weights.get(path, {})
    further = list(dict.fromkeys(name for row in weights.values() for name in row))
    return pd.DataFrame(list(by_projection.values()), columns=[*ERRORS, *further])


def _weight_table(rows: list[dict]) -> dict[str, dict]:
    by_projection: dict[str, dict] = {}
    for row in rows:
        columns = OF_WEIGHT.get(row["metric"], {})
        place = {"place": f"[{row.get('output')}, {row.get('feature')}]", **row}
        known = by_projection.setdefault(row["projection"], {}) if columns else {}
        known |= {column: place[field] for column, field in columns.items()}
        if "weight_error" in columns:
            known["weight_db"] = _decibels(row["value"])
    return by_projection


def _decibels(ratio: float) -> float:
    return 10 * math.log10(ratio) if ratio else -math.inf


def _place_table(rows: list[dict], field: str, baseline: Value | None, costs: dict[tuple, Value]) -> pd.DataFrame:
    """Return the table of the places of a field, such as "layer", and add their costs by (metric, field, place)."""
    by_place: dict[Any, dict] = {}
    for row in rows:
        name = row["metric"].removeprefix("damage.")
        if name.endswith(("_only", "_without")) and field in row:
            damage = by_place.setdefault(row[field], {field: row[field]})
            damage |= _scatter_columns(name, value_of(row))
            if name.startswith("perplexity_"):
                key = name.replace("perplexity", "damage"), field, row[field]
                costs[key] = Value(math.nan) if baseline is None else value_of(row).increase_over(baseline)
                damage |= _scatter_columns(key[0], costs[key])
    return pd.DataFrame(list(by_place.values()), columns=None if by_place else [field])
