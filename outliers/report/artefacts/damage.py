"""What the damage of schemes shows: where in a model it is, and which values cause it."""

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pandas as pd

from outliers.models.names import short_name
from outliers.plot.damage import BARS, Found, damage_bars, damage_map
from outliers.report.section import Drawing, Section, Table, scatter_note

if TYPE_CHECKING:
    from outliers.measurements.damage.measurement import Damages

Names = Callable[[int], str]  # of a token, by its id

WORST = 10  # projections of a scheme that are listed
SHARE, MOST = 0.1, 3  # a layer that alone causes this share of a scheme's damage is named, up to so many
MODEL = ["scheme", "perplexity", "increase (%)", "KL (nats)", "top-1 agreement (%)"]
PLACES = ["only it: perplexity", "increase (%)", "all but it: perplexity", "increase (%)"]
ERRORS = ["scheme", "projection", "by token (dB)", "of all (dB)", "max |input|", "feature", "position", "token"]


def damage_section(rows: list[dict], names: Names) -> Section:
    """Sentences that say where schemes break the model, the tables behind them, the heat map of errors, and the bars of
    roles and layers.

    names: what a token id is called, see `outliers.text.tokens`.
    """
    from outliers.measurements.damage.measurement import damages_of  # which imports torch

    found = damages_of(rows)
    errors = pd.concat([one.errors.assign(scheme=scheme) for scheme, one in found.items()], ignore_index=True)
    errors["token_text"] = [None if pd.isna(token) else names(int(token)) for token in errors["token"]]
    notes = [*(sentence(one) for one in found.values()), *_scatter_note(rows)]
    tables = [*_models(found), *_places("role", found), *_places("layer", found), *_worst(errors)]
    drawings = []
    if len(errors):
        drawings.append(Drawing.of("damage_errors", HEAT_CAPTION, damage_map(found)))
    if any(len(one.roles) or len(one.layers) for one in found.values()):
        drawings.append(Drawing.of("damage_places", BARS_CAPTION, damage_bars(found)))
    shown = [*(textwrap.fill(note, 100) for note in notes), *(table.printed for table in tables if not table.folded)]
    title = f"Damage to {short_name(rows[0]['model'])}"
    further = {"errors": errors[["scheme", *errors.columns.drop("scheme")]]} if len(errors) else {}
    return Section(title, rows, "\n\n".join(shown), tables, drawings, notes, further)


HEAT_CAPTION = (
    "Error of the output of projections under each scheme, ‖Y_q − Y‖² / ‖Y‖² in dB, from the inputs of the unquantized "
    "model; of each role and layer the projection with the largest. Left: over all tokens. Right: the mean of the same "
    "of single tokens, which a token of massive values does not hide."
)
BARS_CAPTION = (
    "Log-perplexity that a role or a layer costs where only it is quantized, and that is saved where only it stays "
    "exact, under each scheme."
)


# Words


def _scatter_note(rows: list[dict]) -> list[str]:
    """Whether differences can be told from scatter; nothing where there are errors alone, which hardly scatter."""
    draws = {row["draws"] for row in rows if "draws" in row}
    return [scatter_note(max(draws))] if draws else []


def sentence(one: "Damages") -> str:
    """Where a scheme breaks the model, made of the numbers."""
    said = [_of_model(one)]
    if "damage" in one.model and not _is_scatter(one, one.model):
        said += [_of_roles(one), _of_layers(one)]
    said.append(_of_errors(one))
    return " ".join(filter(None, said))


def _of_model(one: "Damages") -> str:
    if "damage" not in one.model:
        return ""
    before, after = one.model["unquantized"], one.model["perplexity"]
    said = f"Under {one.scheme} the perplexity goes from {before:.2f} to {after:.2f} ({_percent(one.model['damage'])})"
    return f"{said}, which is within the scatter of rounding." if _is_scatter(one, one.model) else f"{said}."


def _is_scatter(one: "Damages", values: Mapping, name: str = "perplexity") -> bool:
    """Whether a perplexity is within two standard deviations of the unquantized model's, as far as that is known."""
    return abs(values[name] - one.model["unquantized"]) < 2 * values.get(f"{name}_deviation", 0)


def _of_roles(one: "Damages") -> str:
    if one.roles.empty:
        return ""
    most = one.roles.loc[one.roles["perplexity_only"].idxmax()]
    said = f"Most of it is in {most['role']}, which alone costs {_percent(most['damage_only'])}{_share(one, most)}"
    if pd.notna(most.get("damage_without")):
        said += f"; with {most['role']} exact, {_percent(most['damage_without'])} is left"
    return f"{said}."


def _of_layers(one: "Damages") -> str:
    if one.layers.empty:
        return ""
    layers = one.layers.sort_values("perplexity_only", ascending=False).head(MOST).to_dict("records")
    gain = max(0.0, -one.layers["damage_only"].min())  # which is scatter, and so is as large a cost
    broken = [
        layer for layer in layers if _part(one, layer["damage_only"]) >= SHARE and layer["damage_only"] > 2 * gain
    ]
    broken = [layer for layer in broken if not _is_scatter(one, layer, "perplexity_only")]
    if not broken:
        first = layers[0]
        return f"No layer stands out: the worst, {first['layer']:.0f}, costs {_percent(first['damage_only'])} alone."
    costs = ", ".join(f"{layer['layer']} ({_percent(layer['damage_only'])})" for layer in broken)
    return f"The layers that cost most alone: {costs}."


def _of_errors(one: "Damages") -> str:
    if one.errors.empty:
        return ""
    worst = one.errors.loc[one.errors["by_token"].idxmax()]
    return (
        f"The output that is worst for the mean token{'' if one.model else f' under {one.scheme}'} is that of "
        f"{worst['projection']}, with an error of {_decibels(worst['by_token_db'])} dB; its largest input is "
        f"{worst['largest']:,.1f}, in feature {worst['feature']}."
    )


def _share(one: "Damages", place: pd.Series) -> str:
    part = _part(one, place["damage_only"])
    return f" ({100 * part:.0f} % of the rise of log-perplexity)" if 0 < part < 1 else ""


def _part(one: "Damages", damage: float) -> float:
    """The share of the rise of log-perplexity that this one is; 0 where there is none."""
    return math.log1p(damage) / math.log1p(one.model["damage"]) if one.model["damage"] > 0 else 0.0


def _percent(damage: float) -> str:
    return f"{100 * damage:+.{1 if abs(damage) < 10 else 0}f} %".replace("-", "−")


def _decibels(db: float) -> str:
    return "−∞" if math.isinf(db) else f"{round(db, 1) + 0.0:.1f}".replace("-", "−")  # of −0 the sign goes


# Tables


def _models(found: Found) -> list[Table]:
    """What is over the model, for each scheme."""
    having = [one for one in found.values() if "damage" in one.model]
    if not having:
        return []
    unquantized = having[0].model["unquantized"]
    cells = [
        [
            one.scheme,
            _with_scatter(one.model, "perplexity", ".2f"),
            f"{100 * one.model['damage']:+.2f}",
            _with_scatter(one.model, "kl", ".4f"),
            _with_scatter(one.model, "top1_agreement", ".2f", 100),
        ]
        for one in having
    ]
    caption = (
        f"Perplexity, its increase over the {unquantized:.2f} of the unquantized model, mean KL divergence from its "
        "predictions, and how often the most probable token is the same."
    )
    data = pd.DataFrame([{"scheme": one.scheme, **one.model} for one in having])
    return [Table("damage_model", caption, MODEL, cells, data)]


def _with_scatter(values: Mapping, name: str, form: str, unit: float = 1) -> str:
    value, deviation = values.get(name), values.get(f"{name}_deviation")
    if value is None or pd.isna(value):
        return "-"
    return f"{unit * value:{form}}" + ("" if deviation is None else f"±{unit * deviation:{form}}")


def _places(field: str, found: Found) -> list[Table]:
    """Perplexities by role or by layer, for each scheme; those of layers are many, and folded."""
    tables = {scheme: getattr(one, f"{field}s") for scheme, one in found.items()}
    data = pd.concat([table.assign(scheme=scheme) for scheme, table in tables.items()], ignore_index=True)
    if data.empty:
        return []
    data = data[["scheme", *data.columns.drop("scheme")]]
    cells = [[row["scheme"], str(row[field]), *_costs(row)] for row in data.to_dict("records")]
    caption = f"Perplexity with only one {field} quantized, and with all but it."
    headers = ["scheme", field, *PLACES]
    return [Table(f"damage_{field}s", caption, headers, cells, data, names=2, folded=field == "layer")]


def _costs(row: dict) -> list[str]:
    cells = []
    for kind in BARS:
        damage = row.get(f"damage_{kind}")
        increase = "-" if damage is None or pd.isna(damage) else f"{100 * damage:+.2f}"
        cells += [_with_scatter(row, f"perplexity_{kind}", ".2f"), increase]
    return cells


def _worst(errors: pd.DataFrame) -> list[Table]:
    """The projections with the largest errors under each scheme, and the largest value that each reads."""
    if errors.empty:
        return []
    worst = errors.sort_values("by_token", ascending=False, kind="stable").groupby("scheme", sort=False).head(WORST)
    worst = pd.concat([worst[worst["scheme"] == scheme] for scheme in errors["scheme"].unique()])
    cells = [
        [
            row["scheme"],
            row["projection"],
            _decibels(row["by_token_db"]),
            _decibels(row["db"]),
            f"{row['largest']:,.1f}",
            str(row["feature"]),
            str(row["position"]),
            row["token_text"],
        ]
        for row in worst.to_dict("records")
    ]
    caption = (
        f"The {WORST} projections of each scheme whose outputs have the largest errors for the mean token, from the "
        "inputs of the unquantized model; the error over all tokens, which those of massive values may hide; and the "
        "largest value of that input, which sets the scale where a whole tensor has one, with its place in the text."
    )
    return [Table("damage_worst", caption, ERRORS, cells, worst, names=2)]


# Figures
