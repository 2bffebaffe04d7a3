"""What the damage of schemes shows: where in a model it is, and which values cause it."""

import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pandas as pd

from outliers.metrics.damages import damages_of
from outliers.models.names import short_name
from outliers.plot.damage import BARS, Found, damage_bars, damage_map
from outliers.report.explorer.damage import damage_explorer
from outliers.report.findings.damage import damage_findings, decibels
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, Table, scatter_note
from outliers.specification.kinds import Damage

Names = Callable[[int], str]  # of a token, by its id

WORST = 10  # projections of a scheme that are listed
MODEL = ["scheme", "perplexity", "increase (%)", "KL (nats)", "top-1 agreement (%)"]
PLACES = ["only it: perplexity", "increase (%)", "all but it: perplexity", "increase (%)"]
ERRORS = ["scheme", "projection", "by token (dB)", "of all (dB)", "max |input|", "feature", "position", "token"]


def kept_damage_section(spec: Damage, _folder: Path, rows: list[dict]) -> Section:
    """What the rows of a specification show, with the names of its model's tokens."""
    from outliers.models.load import load_tokenizer  # which imports torch
    from outliers.text.tokens import visible_token

    return damage_section(rows, partial(visible_token, load_tokenizer(spec.model, spec.revision)))


def damage_section(rows: list[dict], names: Names) -> Section:
    """Findings that say where schemes break the model, the tables behind them, the heat map of errors, and the bars of
    roles and layers.

    names: what a token id is called, see `outliers.text.tokens`.
    """
    found = damages_of(rows)
    errors = pd.concat([one.errors.assign(scheme=scheme) for scheme, one in found.items()], ignore_index=True)
    errors["token_text"] = [None if pd.isna(token) else names(int(token)) for token in errors["token"]]
    notes = _scatter_note(rows)
    tables = [*_models(found), *_places("role", found), *_places("layer", found), *_worst(errors)]
    drawings = []
    if len(errors):
        drawings.append(Drawing.of("damage_errors", HEAT_CAPTION, damage_map(found)))
    if any(len(one.roles) or len(one.layers) for one in found.values()):
        drawings.append(Drawing.of("damage_places", BARS_CAPTION, damage_bars(found)))
    shown = [*(textwrap.fill(note, 100) for note in notes), *(table.printed for table in tables if not table.folded)]
    title = f"Damage to {short_name(rows[0]['model'])}"
    further = {"errors": errors[["scheme", *errors.columns.drop("scheme")]]} if len(errors) else {}
    findings = damage_findings(found, names)
    return Section(title, rows, "\n\n".join(shown), tables, drawings, notes, further, findings, damage_explorer(found))


HEAT_CAPTION = (
    "Error of the output of projections under each scheme, ‖Y_q − Y‖² / ‖Y‖² in dB, from the inputs of the unquantized "
    "model; of each role and layer the projection with the largest. Left: over all tokens. Right: the mean of the same "
    "of single tokens, which a token of massive values does not hide."
)
BARS_CAPTION = (
    "Log-perplexity that a role or a layer costs where only it is quantized, and that is saved where only it stays "
    "exact, under each scheme."
)


def _scatter_note(rows: list[dict]) -> list[str]:
    """Whether differences can be told from scatter; nothing where there are errors alone, which hardly scatter."""
    draws = [row.get("draws", 1) for row in rows if row["metric"] == "perplexity"]
    return [scatter_note(max(draws))] if draws else []


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
            decibels(row["by_token_db"]),
            decibels(row["db"]),
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


ARTEFACTS = {"damage": Artefact("Damage", Damage, kept_damage_section, of_folder=True)}
