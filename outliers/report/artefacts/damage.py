"""What the damage of schemes shows: where in a model it is, and which values cause it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from outliers.metrics.damages import damages_of
from outliers.models.names import short_name
from outliers.plot.damage import ByScheme, damage_bars, damage_map
from outliers.report.explorer.damage import damage_explorer
from outliers.report.findings.damage import damage_findings, decibels
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, printed
from outliers.report.tables import Table, scatter_note, scattered
from outliers.specification.kinds import Damage

Names = Callable[[int], str]  # of a token, by its id

WORST = 10  # projections of a scheme that are listed
SCHEME = ("scheme", "{scheme}")
MODEL = (
    SCHEME,
    ("perplexity", scattered("perplexity", ".2f")),
    ("increase (%)", scattered("damage", "+.2f", 100)),
    ("KL (nats)", scattered("kl", ".4f")),
    ("top-1 agreement (%)", scattered("top1_agreement", ".2f", 100)),
)
PLACES = (
    ("only it: perplexity", scattered("perplexity_only", ".2f")),
    ("increase (%)", scattered("damage_only", "+.2f", 100)),
    ("all but it: perplexity", scattered("perplexity_without", ".2f")),
    ("increase (%)", scattered("damage_without", "+.2f", 100)),
)
ERRORS = (
    SCHEME,
    ("projection", "{projection}"),
    ("by token (dB)", lambda row: decibels(row["by_token_db"])),
    ("of all (dB)", lambda row: decibels(row["db"])),
    ("max |input|", "{largest:,.1f}"),
    *((name, f"{{{name}}}") for name in ("feature", "position")),
    ("token", "{token_text}"),
)


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
    damages = damages_of(rows)
    errors = pd.concat([one.errors.assign(scheme=scheme) for scheme, one in damages.items()], ignore_index=True)
    errors["token_text"] = [None if pd.isna(token) else names(int(token)) for token in errors["token"]]
    notes = _scatter_note(rows)
    tables = [*_models(damages), *_places("role", damages), *_places("layer", damages), *_worst(errors)]
    drawings = []
    if len(errors):
        drawings.append(Drawing.of("damage_errors", HEAT_CAPTION, damage_map(damages)))
    if any(len(one.roles) or len(one.layers) for one in damages.values()):
        drawings.append(Drawing.of("damage_places", BARS_CAPTION, damage_bars(damages)))
    shown = "\n\n".join(filter(None, [printed([], notes), printed(tables)]))
    title = f"Damage to {short_name(rows[0]['model'])}"
    further = {"errors": errors[["scheme", *errors.columns.drop("scheme")]]} if len(errors) else {}
    findings = damage_findings(damages, names)
    return Section(title, rows, shown, tables, drawings, notes, further, findings, damage_explorer(damages))


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


def _models(damages: ByScheme) -> list[Table]:
    """What is over the model, for each scheme."""
    models = [{"scheme": one.scheme, **one.model} for one in damages.values() if "damage" in one.model]
    if not models:
        return []
    caption = (
        f"Perplexity, its increase over the {models[0]['unquantized']:.2f} of the unquantized model, mean KL "
        "divergence from its predictions, and how often the most probable token is the same."
    )
    return [Table.of("damage_model", caption, MODEL, pd.DataFrame(models))]


def _places(field: str, damages: ByScheme) -> list[Table]:
    """Perplexities by role or by layer, for each scheme; those of layers are many, and folded."""
    tables = {scheme: getattr(one, f"{field}s") for scheme, one in damages.items()}
    data = pd.concat([table.assign(scheme=scheme) for scheme, table in tables.items()], ignore_index=True)
    if data.empty:
        return []
    data = data[["scheme", *data.columns.drop("scheme")]]
    caption = f"Perplexity with only one {field} quantized, and with all but it."
    columns = [SCHEME, (field, f"{{{field}}}"), *PLACES]
    return [Table.of(f"damage_{field}s", caption, columns, data, names=2, folded=field == "layer")]


def _worst(errors: pd.DataFrame) -> list[Table]:
    """The projections with the largest errors under each scheme, and the largest value that each reads."""
    if errors.empty:
        return []
    worst = errors.sort_values("by_token", ascending=False, kind="stable").groupby("scheme", sort=False).head(WORST)
    worst = pd.concat([worst[worst["scheme"] == scheme] for scheme in errors["scheme"].unique()])
    caption = (
        f"The {WORST} projections of each scheme whose outputs have the largest errors for the mean token, from the "
        "inputs of the unquantized model; the error over all tokens, which those of massive values may hide; and the "
        "largest value of that input, which sets the scale where a whole tensor has one, with its place in the text."
    )
    return [Table.of("damage_worst", caption, ERRORS, worst, names=2)]


ARTEFACTS = {"damage": Artefact("Damage", Damage, kept_damage_section, of_folder=True)}
