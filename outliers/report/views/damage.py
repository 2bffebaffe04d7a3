"""The view of the damage of schemes: its places in a model, and the values that cause it."""

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from outliers.metrics.damages import Damages, damages_of
from outliers.models.names import short_name
from outliers.plot.damage import ByScheme, damage_bars, damage_heads, damage_map
from outliers.report.explorer.damage import damage_explorer
from outliers.show.section import FINDINGS, Drawing, Finding, Section, printed
from outliers.show.tables import Table, scatter_note, scattered
from outliers.show.value import exact, scattered_by, value_of
from outliers.show.words import Names, amount, listed, percent
from outliers.specification.kinds import Damage
from outliers.variants.peer import is_against

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
    ("alone: perplexity", scattered("perplexity_only", ".2f")),
    ("increase (%)", scattered("damage_only", "+.2f", 100)),
    ("all others: perplexity", scattered("perplexity_without", ".2f")),
    ("increase (%)", scattered("damage_without", "+.2f", 100)),
)
KL = ("KL (nats)", scattered("kl_only", ".5f"))
WEIGHTS = (
    SCHEME,
    ("projection", "{projection}"),
    ("per token (dB)", lambda row: decibels(row["by_token_db"])),
    ("weights (dB)", lambda row: decibels(row["weight_db"])),
    ("largest weight", lambda row: _signed(row["largest_weight"])),
    ("at", "{largest_at}"),
    ("largest change", lambda row: _signed(row["largest_change"])),
    ("changed at", "{changed_at}"),
)
ERRORS = (
    SCHEME,
    ("projection", "{projection}"),
    ("per token (dB)", lambda row: decibels(row["by_token_db"])),
    ("all tokens (dB)", lambda row: decibels(row["db"])),
    ("max |input|", "{largest:,.1f}"),
    *((name, f"{{{name}}}") for name in ("feature", "position")),
    ("token", "{token_text}"),
)


def kept_damage_section(spec: Damage, _folder: Path, rows: list[dict]) -> Section:
    """The section of the rows of a specification, with the names of its model's tokens."""
    from outliers.text.tokens import namer_of  # which imports torch

    return damage_section(rows, namer_of(spec.model, spec.revision))


def damage_section(rows: list[dict], names: Names) -> Section:
    """Findings that say where schemes break the model, the tables behind them, the heat map of errors, and the bars of
    roles and layers.

    names: what a token id is called, see `outliers.text.tokens`.
    """
    damages = damages_of(rows)
    errors = pd.concat([damage.errors.assign(scheme=scheme) for scheme, damage in damages.items()], ignore_index=True)
    errors["token_text"] = [None if pd.isna(token) else names(int(token)) for token in errors["token"]]
    notes = _scatter_note(rows)
    tables = [*_models(damages), *_places("role", damages), *_places("layer", damages)]
    tables += [*_places("stack", damages), *_places("head", damages), *_worst(errors)]
    drawings = []
    if len(errors):
        drawings.append(Drawing.of("damage_errors", HEAT_CAPTION, damage_map(damages)))
    if any(len(damage.roles) or len(damage.layers) or len(damage.stacks) for damage in damages.values()):
        drawings.append(Drawing.of("damage_places", BARS_CAPTION, damage_bars(damages)))
    if any(len(damage.heads) for damage in damages.values()):
        drawings.append(Drawing.of("damage_heads", HEADS_CAPTION, damage_heads(damages)))
    text = "\n\n".join(filter(None, [printed([], notes), printed(tables)]))
    title = f"Damage to {short_name(rows[0]['model'])}"
    further = {"errors": errors[["scheme", *errors.columns.drop("scheme")]]} if len(errors) else {}
    findings = damage_findings(damages, names, scattered_by(rows))
    return Section(title, rows, text, tables, drawings, notes, further, findings, damage_explorer(damages))


HEAT_CAPTION = (
    "Output error of projections under each scheme, ‖Y_q − Y‖² / ‖Y‖² in dB, on the inputs of the unquantized model; "
    "for each role and layer the projection with the largest. Left: over all tokens. Right: mean over single tokens, "
    "which a token with massive values does not dominate."
)
BARS_CAPTION = (
    "Log-perplexity added by quantizing one role or layer alone, and removed by keeping it alone exact, under each "
    "scheme."
)

HEADS_CAPTION = "Log-perplexity added by quantizing the keys and values of one head alone, by cache."


def _scatter_note(rows: list[dict]) -> list[str]:
    """Whether differences can be told from scatter; nothing where there are errors alone, which hardly scatter."""
    measured = [row for row in rows if row["metric"] == "perplexity"]
    return [scatter_note(measured)] if measured else []


# Tables


def _models(damages: ByScheme) -> list[Table]:
    """The values of the whole model, for each scheme."""
    models = [{"scheme": damage.scheme, **damage.model} for damage in damages.values() if "damage" in damage.model]
    if not models:
        return []
    caption = (
        f"Perplexity, its increase over the {models[0]['unquantized']:.2f} of the unquantized model, mean KL "
        "divergence from the predictions of that model, and agreement with its most probable token."
    )
    return [Table.of("damage_model", caption, MODEL, pd.DataFrame(models))]


def _places(field: str, damages: ByScheme) -> list[Table]:
    """Perplexities by role or by layer, for each scheme; those of layers and heads are many, and folded."""
    tables = {scheme: getattr(damage, f"{field}s") for scheme, damage in damages.items()}
    data = pd.concat([table.assign(scheme=scheme) for scheme, table in tables.items()], ignore_index=True)
    if data.empty:
        return []
    data = data[["scheme", *data.columns.drop("scheme")]]
    caption = f"Perplexity with one {field} alone {_taken(damages)}" + (
        ", and with all others." if "perplexity_without" in data else "."
    )
    columns = [SCHEME, (field, f"{{{field}}}"), *(PLACES if "perplexity_without" in data else PLACES[:2])]
    if "kl_only" in data:
        columns.insert(4, KL)
        caption += f" KL: mean divergence from the predictions of the unquantized model with this {field} alone."
    return [Table.of(f"damage_{field}s", caption, columns, data, names=2, folded=field in ("layer", "head"))]


def _taken(damages: ByScheme) -> str:
    """The change of a place under some schemes, or by other models."""
    done = {"from the other model" if is_against(scheme) else "quantized" for scheme in damages}
    return " or ".join(sorted(done, reverse=True))


def _worst(errors: pd.DataFrame) -> list[Table]:
    """The projections with the largest errors under each scheme, the largest value that each reads, and the weights of
    another model."""
    if errors.empty:
        return []
    worst = errors.sort_values("by_token", ascending=False, kind="stable").groupby("scheme", sort=False).head(WORST)
    worst = pd.concat([worst[worst["scheme"] == scheme] for scheme in errors["scheme"].unique()])
    caption = (
        f"The {WORST} projections of each scheme with the largest mean output error per token, on the inputs of the "
        "unquantized model; the error over all tokens, which tokens with massive values can hide; and the largest "
        "input value, which sets the scale of per-tensor quantization, with its place in the text."
    )
    tables = [Table.of("damage_worst", caption, ERRORS, worst, names=2)]
    if "weight_db" in worst:
        known, caption = worst[worst["weight_db"].notna()], WEIGHTS_CAPTION
        tables.append(Table.of("damage_weights", caption, WEIGHTS, known, names=2))
    return tables


WEIGHTS_CAPTION = (
    "Weights of these projections: error ‖W_other − W‖² / ‖W‖², largest weight of the original, which sets the scale "
    "of its row, group or tensor, and largest change of a weight, each with its [output, input]."
)


SHARE, MOST = 0.1, 3  # a layer that alone causes this share of a scheme's damage is named, up to so many


def damage_findings(damages: Mapping[str, Damages], names: Names, scatter: str = "rounding") -> list[Finding]:
    """Of the scheme that costs most: in which role and by which value, how much, and in which layers; of the others in
    which role and how much; the worst output of each. One draw does not tell a role or a layer from others.

    scatter: what scatters the values.
    """
    schemes = sorted(damages.values(), key=lambda damage: -damage.model.get("damage", 0))
    costly = [damage for damage in schemes if "damage" in damage.model and not _is_scatter(damage, damage.model)]
    findings = []
    for damage in schemes:
        findings += _of_roles(damage, names) if damage in costly else []
        findings += [_of_model(damage, scatter)] if "damage" in damage.model else []
        findings += [*_of_places(damage, "layer"), *_of_places(damage, "head")] if damage in costly[:1] else []
    return [*findings, *(finding for damage in schemes for finding in _of_errors(damage))][:FINDINGS]


def _of_model(damage: Damages, scatter: str) -> Finding:
    before, after = damage.model["unquantized"], damage.model["perplexity"]
    moved = "falls" if after < before else "rises"
    change = f"Under {damage.scheme} the perplexity {moved} from {before:.2f} to {after:.2f}"
    change += f" ({_cost(damage, damage.model)})"
    if value_of(damage.model, "perplexity").deviation is None:
        ending = " in a single draw; --draws 4 measures the scatter of rounding."
    else:
        ending = f", within the scatter of {scatter}." if _is_scatter(damage, damage.model) else "."
    return Finding(f"{change}{ending}", "damage_model")


def _cost(damage: Damages, values: Mapping, name: str = "perplexity") -> str:
    """The increase of a perplexity over that of the unquantized model, with its deviation where there is one."""
    return percent(*value_of(values, name).beside(damage.model["unquantized"]))


def _is_scatter(damage: Damages, values: Mapping, name: str = "perplexity") -> bool:
    """Whether a perplexity is within the scatter of rounding of the unquantized model's."""
    return not value_of(values, name).is_apart(exact(damage.model["unquantized"]))


def _of_roles(damage: Damages, names: Names) -> list[Finding]:
    """The role with most of the damage, if that one costs more than the next, and the largest value that it has to
    hold.
    """
    if damage.roles.empty:
        return []
    first, *others = damage.roles.sort_values("perplexity_only", ascending=False).to_dict("records")
    if _is_scatter(damage, first, "perplexity_only") or (others and not _is_more(first, others[0])):
        return [Finding(f"No role stands out under {damage.scheme}.", "damage_roles")]
    part = _part(damage, first["damage_only"])
    share = f", {100 * part:.0f} % of the increase of log-perplexity" if 0 < part < 1 else ""
    which = "Most" if part > 0.5 else "The largest part"
    cost = f"{_cost(damage, first, 'perplexity_only')} alone{share}"
    sentence = f"{which} of the cost of {damage.scheme} is in {first['role']} ({cost})"
    sentence += _largest(damage, first["role"], names)
    if pd.notna(first.get("damage_without")):
        sentence += f"; with {first['role']} exact, {_cost(damage, first, 'perplexity_without')} remains"
    return [Finding(f"{sentence}.", "damage_roles")]


def _is_more(place: dict, other: dict) -> bool:
    return value_of(place, "perplexity_only").is_above(value_of(other, "perplexity_only"))


def _of_places(damage: Damages, field: str) -> list[Finding]:
    """The layers, or heads, that cost most alone, if each of them costs more than any that is not named."""
    table = getattr(damage, f"{field}s")
    if table.empty:
        return []
    places = table.sort_values("perplexity_only", ascending=False).to_dict("records")
    broken = [place for place in places[:MOST] if _part(damage, place["damage_only"]) >= SHARE]
    while broken and len(broken) < len(places) and not _is_more(broken[-1], places[len(broken)]):
        broken.pop()
    if not broken:
        return [Finding(f"No {field} stands out under {damage.scheme}.", f"damage_{field}s")]
    costs = listed(f"{place[field]} ({_cost(damage, place, 'perplexity_only')})" for place in broken)
    which = f"{field}s that cost most alone are" if len(broken) > 1 else f"{field} that costs most alone is"
    return [Finding(f"Under {damage.scheme} the {which} {costs}.", f"damage_{field}s")]


def _largest(damage: Damages, role: str, names: Names) -> str:
    """The largest value of a role, which a scale has to hold; nothing where no input was looked at."""
    inputs = damage.errors[damage.errors["role"] == role].dropna(subset=["largest"])
    if inputs.empty:
        return ""
    most = inputs.loc[inputs["largest"].astype(float).idxmax()].to_dict()
    place = f"layer {most['layer']}, feature {most['feature']:.0f}, position {most['position']:.0f}"
    return f", whose inputs reach {amount(most['largest'])} ({place}, token {names(int(most['token']))})"


def _of_errors(damage: Damages) -> list[Finding]:
    if damage.errors.empty:
        return []
    worst = damage.errors.loc[damage.errors["by_token"].idxmax()]
    if not worst["by_token"]:
        return [Finding(f"No projection has an output error under {damage.scheme}.", "damage_worst")]
    sentence = (
        f"The projection with the largest mean error per token under {damage.scheme} is {worst['projection']} "
        f"({decibels(worst['by_token_db'])} dB); its largest input is {amount(worst['largest'])}, in feature "
        f"{worst['feature']}"
    )
    if pd.notna(worst.get("weight_db")):
        sentence += (
            f"; its weights have an error of {decibels(worst['weight_db'])} dB, and weight {worst['changed_at']} "
            f"changes most, by {_signed(worst['largest_change'])}"
        )
    return [Finding(f"{sentence}.", "damage_worst")]


def _part(whole: Damages, damage: float) -> float:
    """The share of the rise of log-perplexity that this one is; 0 where there is none."""
    return math.log1p(damage) / math.log1p(whole.model["damage"]) if whole.model["damage"] > 0 else 0.0


def _signed(weight: float) -> str:
    return f"{weight:.2g}".replace("-", "−")


def decibels(db: float) -> str:
    """An error as a table and a sentence have it: −25.3; −∞ where there is none."""
    return "−∞" if math.isinf(db) else f"{round(db, 1) + 0.0:.1f}".replace("-", "−")  # of −0 the sign goes
