"""Damage of schemes: where in a model it arises, and the values that cause it."""

import math
from collections.abc import Mapping

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from outliers.metrics.damages import Damages, damages_of
from outliers.models.names import short_name
from outliers.show.axes import places_with_room
from outliers.show.claims import NEXT, Claim, say
from outliers.show.explorer import Explorer, map_of, of_maps
from outliers.show.legends import SCATTER, explained, legend
from outliers.show.maps import FAINTEST, HIGHEST, Scale, map_on, maps_by_layer
from outliers.show.section import FINDINGS, Context, Drawing, Finding, Section, printed
from outliers.show.style import HEAT, Panels, brief, chosen, color_of, figure_function, panels_of
from outliers.show.tables import Table, scatter_note, scattered
from outliers.show.value import Value, exact, scattered_by, value_of
from outliers.show.words import TokenNamer, decibels, percent
from outliers.variants.peer import is_against
from outliers.views.experts import expert_map

ByVariant = Mapping[str, "Damages"]

ACROSS = {"db": "over all tokens", "by_token_db": "mean over tokens"}  # column of errors: its title
# Bars of a role or layer: label in the legend, colour, hatch (which distinguishes them in grey).
BARS = {
    "only": ("added by quantizing it alone", "blue", ""),
    "without": ("removed by keeping it exact", "orange", "//"),
}
WIDTH = 0.4  # width of a bar
WIDTHS = {"role": 1, "layer": 2.6, "stack": 0.6}  # relative width of a panel of bars
PLACE_LABELS = {"role": 8, "layer": 16, "stack": 8}  # labels that fit below a panel


@figure_function
def damage_map(
    damages: "Damages | ByVariant", *, variant: str | None = None, error: str | None = None, ax: Axes | None = None
) -> Panels:
    """Draw a map of roles by layers: the largest output error ‖Y_q − Y‖² / ‖Y‖² of a role's projections in dB.

    Each variant has a row of panels.
    All maps share one scale: the smallest hundredth of the errors has the darkest colour, and errors far beyond all
    others have the lightest. Grey marks places where nothing is quantized, or where the error is 0.

    Example:
        >>> panels = outliers.plot.damage_map(outliers.damage(model, blocks, "absmax", by=["error"]))

    Args:
        damages: as `outliers.damage` returns it, or several by their variant.
        variant: the one to draw; by default all that quantize projections, because only those have output errors.
        error: the panels to draw, "db" (over all tokens) or "by_token_db" (mean over tokens, which a token with massive
            values does not hide); by default both. One variant and one error give a single panel.
    """
    damages = {variant: damage for variant, damage in _by_variant(damages).items() if len(damage.errors)}
    variants, errors = chosen("variant", variant, damages, ax), chosen("error", error, ACROSS, ax)
    maps = [[_merged(damages[variant].errors, column) for column in errors] for variant in variants]
    norm, extend = _scale([table.to_numpy(dtype=float) for row in maps for table in row])
    scale = Scale(norm, colormaps[matplotlib.rcParams["image.cmap"]].with_extremes(bad="0.8"))
    size = 0.6 + 3.3 * len(errors), min(HIGHEST, 1.1 + 0.95 * len(maps))
    panels = panels_of(ax, len(maps), len(errors), size, sharex=True, sharey=True)
    for row, variant, tables in zip(panels, brief(variants), maps, strict=True):
        for axes, error, table in zip(row, errors, tables, strict=True):
            image = map_on(axes, table.to_numpy(dtype=float), scale)
            axes.set_title(f"{variant}, {ACROSS[error]}", loc="left", fontsize="small")
            axes.set_xticks(*places_with_room(table.columns, 8))
            axes.set_yticks(range(len(table)), table.index)
    for axes in panels[-1]:
        axes.set_xlabel("layer")
    style = {"aspect": 12 * len(maps), "extend": extend, "extendfrac": 0.1 / len(maps)}
    bar = axes.figure.colorbar(image, ax=list(panels.flat), **style)
    bar.set_label(f"error of the output (dB);\nbelow {norm.vmin:.0f} darkest".replace("-", "−"))
    return panels


def _by_variant(damages: "Damages | ByVariant") -> ByVariant:
    return damages if isinstance(damages, Mapping) else {damages.variant: damages}


def _scale(errors: list[np.ndarray]) -> tuple[Normalize, str]:
    """Return a colour scale from the faintest to the largest errors, clipped at an error far beyond all others."""
    finite = np.concatenate([values[np.isfinite(values)] for values in errors])
    if not len(finite):
        return Normalize(0, 1), "neither"
    low, high, most = *np.quantile(finite, [FAINTEST, 1 - FAINTEST]), finite.max()
    highest = min(most, high + (high - low)) if high > low else most
    return Normalize(low, highest), "both" if most > highest else "min"


def _merged(errors: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a table of roles by layers with the largest error in dB; NaN where nothing is quantized."""
    table = errors.pivot_table(index="role", columns="layer", values=column, aggfunc="max")
    return table.reindex(index=list(dict.fromkeys(errors["role"])), columns=range(int(errors["layer"].max()) + 1))


@figure_function
def damage_bars(
    damages: "Damages | ByVariant", *, variant: str | None = None, place: str | None = None, ax: Axes | None = None
) -> Panels:
    """Draw the log-perplexity added by quantizing each role or layer alone, and that removed by keeping it alone exact.

    One row of panels per variant. Error bars are one standard deviation by rounding, if there are several draws.

    Example:
        >>> panels = outliers.plot.damage_bars(outliers.damage(model, blocks, "absmax", by=["role", "layer"]))

    Args:
        damages: as `outliers.damage` returns it, or several by their variant.
        variant: the one to draw; by default all.
        place: the panels to draw, "role", "layer" or "stack"; by default those that were measured. One variant and one
            place give a single panel.
    """
    damages = _by_variant(damages)
    variants, places = chosen("variant", variant, damages, ax), chosen("place", place, _measured_places(damages), ax)
    tables = {
        place: _aligned([getattr(damages[variant], f"{place}s") for variant in variants], place) for place in places
    }
    widths = [WIDTHS[place] for place in places]
    size = max(4.6, 2 * sum(widths)), min(HIGHEST, 0.6 + 1.7 * len(variants))
    panels = panels_of(ax, len(variants), len(places), size, sharey="row", sharex="col", width_ratios=widths)
    for row, variant, name, *row_tables in zip(panels, variants, brief(variants), *tables.values(), strict=True):
        for axes, place, table in zip(row, places, row_tables, strict=True):
            _bars(axes, damages[variant], table, place)
        row[0].set_title(name, loc="left")
    for axes, place in zip(panels[-1], places, strict=True):
        axes.set_xlabel(place)
    for axes in panels[:, 0]:
        axes.set_ylabel("log-perplexity\n(nats a token)")
    bars = ("_deviation", "_error")
    scattered = any(column.endswith(bars) for row in tables.values() for table in row for column in table)
    handles = panels[0, 0].get_legend_handles_labels()[0]
    legend(ax, axes, [*handles, *explained(bars=SCATTER if scattered else "")], "upper center", 1 + len(places))
    return panels


def _measured_places(damages: ByVariant) -> list[str]:
    return [place for place in WIDTHS if any(len(getattr(damage, f"{place}s")) for damage in damages.values())]


def _aligned(tables: list[pd.DataFrame], place: str) -> list[pd.DataFrame]:
    """Give the tables of several schemes the same rows, one for each place in any of them: panels share an axis."""
    every = dict.fromkeys(name for table in tables for name in table[place])
    return [table.set_index(place).reindex(list(every)).reset_index() for table in tables]


def _bars(axes: Axes, damage: "Damages", table: pd.DataFrame, place: str) -> None:
    unquantized, whole = (damage.model.get(name, math.nan) for name in ("unquantized", "perplexity"))  # NaN: failed
    references = {"only": (-1, unquantized), "without": (1, whole)}
    kinds = [kind for kind in BARS if f"perplexity_{kind}" in table]
    for side, kind in enumerate(kinds):
        (label, color, hatch), name, (sign, reference) = BARS[kind], f"perplexity_{kind}", references[kind]
        values = sign * np.log(reference / table[name].to_numpy(dtype=float))
        bars = pd.Series([value_of(row, name).bar for row in table.to_dict("records")], table.index, dtype=float)
        relative = bars / table[name]
        places = np.arange(len(table)) + (side - (len(kinds) - 1) / 2) * WIDTH
        style = {"color": color_of(color), "hatch": hatch, "edgecolor": "white", "linewidth": 0.3, "label": label}
        axes.bar(places, values, WIDTH, yerr=relative if relative.notna().any() else None, ecolor="black", **style)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(*places_with_room(pd.Index(table[place]), PLACE_LABELS[place]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.7, len(table) - 0.3)
    axes.tick_params(axis="x", rotation=0 if place == "layer" else 30)


@figure_function
def damage_heads(damages: "Damages | ByVariant", *, variant: str | None = None, ax: Axes | None = None) -> Panels:
    """Draw a map of heads by layers: the log-perplexity added by quantizing the keys and values of one head alone.

    One panel per cache, all on one scale.

    Example:
        >>> axes = outliers.plot.damage_heads(outliers.damage(model, blocks, outliers.variant("kv=int4"), by=["head"]))

    Args:
        damages: as `outliers.damage` returns it, or several by their names.
        variant: the cache to draw; by default all that were measured by head.
    """
    damages = {name: damage for name, damage in _by_variant(damages).items() if len(damage.heads)}
    caches = chosen("variant", variant, damages, ax)
    maps = [_of_heads(damages[name]) for name in caches]
    most = max(float(table.abs().to_numpy().max()) for table in maps)
    size = 5.2, min(HIGHEST, 0.8 + len(maps) * (0.5 + 0.28 * len(maps[0])))
    panels = panels_of(ax, len(maps), 1, size, sharex=True)
    scale = Scale(Normalize(-most, most), colormaps["RdBu_r"])
    maps_by_layer(panels, dict(zip(caches, maps, strict=True)), scale, "head of keys", 8)
    return panels


def _of_experts(damage: "Damages") -> pd.DataFrame:
    """Return the log-perplexity that each expert adds, as `expert_map` takes it."""
    places = damage.experts["expert"].str.extract(r"layers\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)").astype(int)
    return places.assign(cost=np.log(damage.experts["perplexity_only"].astype(float) / damage.model["unquantized"]))


def _of_heads(damage: "Damages") -> pd.DataFrame:
    """Return a table of heads by layers with the log-perplexity that each head adds, in nats per token."""
    places = damage.heads["head"].str.extract(r"layers\.(?P<layer>\d+)\.heads\.(?P<head>\d+)").astype(int)
    costs = np.log(damage.heads["perplexity_only"].astype(float) / damage.model["unquantized"])
    return places.assign(cost=costs).pivot_table(index="head", columns="layer", values="cost")


WORST = 10  # projections listed for a variant
VARIANT = ("variant", "{variant}")
MODEL = (
    VARIANT,
    ("perplexity", scattered("perplexity", ".2f")),
    ("increase (%)", scattered("damage", "+.2f", 100)),
    ("KL (nats)", scattered("kl", ".4f")),
    ("top-1 agreement (%)", scattered("top1_agreement", ".2f", 100)),
)
DAMAGE_PLACES = (
    ("alone: perplexity", scattered("perplexity_only", ".2f")),
    ("increase (%)", scattered("damage_only", "+.2f", 100)),
    ("all others: perplexity", scattered("perplexity_without", ".2f")),
    ("increase (%)", scattered("damage_without", "+.2f", 100)),
)
KL = ("KL (nats)", scattered("kl_only", ".5f"))
WEIGHTS = (
    VARIANT,
    ("projection", "{projection}"),
    ("per token (dB)", lambda row: decibels(row["by_token_db"])),
    ("weights (dB)", lambda row: decibels(row["weight_db"])),
    ("largest weight", "{largest_weight:.2g}"),
    ("at", "{largest_at}"),
    ("largest change", "{largest_change:.2g}"),
    ("changed at", "{changed_at}"),
)
ERRORS = (
    VARIANT,
    ("projection", "{projection}"),
    ("per token (dB)", lambda row: decibels(row["by_token_db"])),
    ("all tokens (dB)", lambda row: decibels(row["db"])),
    ("max |input|", "{largest:,.1f}"),
    *((name, f"{{{name}}}") for name in ("feature", "position")),
    ("token", "{token_text}"),
)


def damage_rows_section(rows: list[dict], context: Context) -> Section:
    """Show the rows of an experiment, with the names of its model's tokens."""
    from outliers.text.tokens import namer_of  # imports torch

    return damage_section(rows, namer_of(context.experiment.model, context.experiment.revision))


def damage_section(rows: list[dict], names: TokenNamer) -> Section:
    """Show where schemes break the model: findings, their tables, the map of errors, and bars of roles and layers.

    names: a function from token id to name, see `outliers.text.tokens`.
    """
    damages = damages_of(rows)
    errors = pd.concat(
        [damage.errors.assign(variant=variant) for variant, damage in damages.items()], ignore_index=True
    )
    errors["token_text"] = [None if pd.isna(token) else names(int(token)) for token in errors["token"]]
    measured = [row for row in rows if row["metric"] == "perplexity"]
    notes = [scatter_note(measured)] if measured else []  # output errors hardly scatter
    tables = [*_model_tables(damages), *_places("role", damages), *_places("layer", damages)]
    tables += [table for field in ("stack", "head", "expert") for table in _places(field, damages)] + _worst(errors)
    drawings = []
    if len(errors):
        drawings.append(Drawing.of("damage_errors", HEAT_CAPTION, damage_map(damages)))
    if places := _measured_places(damages):
        by_place = [getattr(damage, f"{place}s") for damage in damages.values() for place in places]
        exact = ", and removed by keeping it alone exact," * any("perplexity_without" in table for table in by_place)
        caption = f"Log-perplexity added by quantizing one {' or '.join(places)} alone{exact} under each scheme."
        drawings.append(Drawing.of("damage_places", caption, damage_bars(damages)))
    if any(len(damage.heads) for damage in damages.values()):
        drawings.append(Drawing.of("damage_heads", HEADS_CAPTION, damage_heads(damages)))
    if experts := {variant: _of_experts(damage) for variant, damage in damages.items() if len(damage.experts)}:
        drawings.append(Drawing.of("damage_experts", EXPERTS_CAPTION, expert_map(experts)))
    text = "\n\n".join(filter(None, [printed([], notes), printed(tables)]))
    title = f"Damage to {short_name(rows[0]['model'])}"
    further = {"errors": errors[["variant", *errors.columns.drop("variant")]]} if len(errors) else {}
    findings = damage_findings(damages, names, scattered_by(rows))
    return Section(title, rows, tables, drawings, notes, further, findings, damage_explorer(damages), printed=text)


HEAT_CAPTION = (
    "Output error of projections under each scheme, ‖Y_q − Y‖² / ‖Y‖² in dB, on the inputs of the unquantized model; "
    "for each role and layer the projection with the largest. Left: over all tokens. Right: mean over single tokens, "
    "which a token with massive values does not dominate."
)
EXPERTS_CAPTION = "Log-perplexity added by quantizing one expert alone, by scheme."
HEADS_CAPTION = "Log-perplexity added by quantizing the keys and values of one head alone, by cache."


# Tables


def _model_tables(damages: ByVariant) -> list[Table]:
    models = [{"variant": damage.variant, **damage.model} for damage in damages.values() if "damage" in damage.model]
    if not models:
        return []
    caption = (
        f"Perplexity, its increase over the {models[0]['unquantized']:.2f} of the unquantized model, mean KL "
        "divergence from the predictions of that model, and agreement with its most probable token."
    )
    return [Table.of("damage_model", caption, MODEL, pd.DataFrame(models))]


def _places(field: str, damages: ByVariant) -> list[Table]:
    """Make the table of perplexities by role, layer, stack, head or expert under each variant.

    Tables of layers and heads are folded; of experts only the most costly are shown.
    """
    tables = {variant: getattr(damage, f"{field}s") for variant, damage in damages.items()}
    data = pd.concat([table.assign(variant=variant) for variant, table in tables.items()], ignore_index=True)
    if data.empty:
        return []
    data = data[["variant", *data.columns.drop("variant")]]
    caption = f"Perplexity with one {field} alone {_how_changed(damages)}" + (
        ", and with all others." if "perplexity_without" in data else "."
    )
    columns = [
        VARIANT,
        (field, f"{{{field}}}"),
        *(DAMAGE_PLACES if "perplexity_without" in data else DAMAGE_PLACES[:2]),
    ]
    if "kl_only" in data:
        columns.insert(4, KL)
        caption += f" KL: mean divergence from the predictions of the unquantized model with this {field} alone."
    shown = data
    if field == "expert":  # too many to read
        data = data.sort_values("perplexity_only", ascending=False, kind="stable")
        data = pd.concat([data[data["variant"] == variant] for variant in damages])
        shown = data.groupby("variant", sort=False).head(WORST)
        caption += f" Of each scheme the {WORST} that cost most are shown."
    return [Table.of(f"damage_{field}s", caption, columns, data, shown, texts=2, folded=field in ("layer", "head"))]


def _how_changed(damages: ByVariant) -> str:
    """Say what happens to a place: it is quantized, or taken from the other model."""
    words = {"from the other model" if is_against(variant) else "quantized" for variant in damages}
    return " or ".join(sorted(words, reverse=True))


def _worst(errors: pd.DataFrame) -> list[Table]:
    """Make the tables of the projections with the largest errors."""
    if errors.empty:
        return []
    worst = errors.sort_values("by_token", ascending=False, kind="stable").groupby("variant", sort=False).head(WORST)
    worst = pd.concat([worst[worst["variant"] == variant] for variant in errors["variant"].unique()])
    caption = (
        f"The {WORST} projections of each scheme with the largest mean output error per token, on the inputs of the "
        "unquantized model; the error over all tokens, which tokens with massive values can hide; and the largest "
        "input value, which sets the scale of per-tensor quantization, with its place in the text."
    )
    tables = [Table.of("damage_worst", caption, ERRORS, worst, texts=2)]
    if "weight_db" in worst:
        known, caption = worst[worst["weight_db"].notna()], WEIGHTS_CAPTION
        tables.append(Table.of("damage_weights", caption, WEIGHTS, known, texts=2))
    return tables


WEIGHTS_CAPTION = (
    "Weights of these projections: error ‖W_other − W‖² / ‖W‖², largest weight of the original, which sets the scale "
    "of its row, group or tensor, and largest change of a weight, each with its [output, input]."
)


OF_ALL = "damage", None, None  # key of a variant's cost in the whole model
SHARE, MOST = 0.1, 3  # layers that alone cause this share of a variant's damage are named, at most MOST of them
OF_MODEL = Claim(
    "damage_model",
    "Under {variant} the perplexity {moved} from {unquantized:.2f} to {perplexity:.2f} ({cost:percent}){ending}.",
)
OF_ROLES = Claim(
    "damage_roles",
    by="alone",
    against=[0, NEXT],
    yes="{which} of the cost of {variant} is in {place} ({alone:percent} alone[[, {share:part} of the increase of "
    "log-perplexity]])[[, whose inputs reach {largest:amount} (layer {layer}, feature {feature}, position {position}, "
    "token {called})]][[; with {place} exact, {left:percent} remains]].",
    no="No role stands out under {variant}.",
)
OF_PLACES = Claim(
    "damage_{field}s",
    yes="Under {variant} the {field}{costs:|s} that cost{costs:s|} most alone {costs:is|are} {costs:listed}.",
    no="No {field} stands out under {variant}.",
)
OF_ERRORS = Claim(
    "damage_worst",
    by="by_token",
    against=[0],
    no="No projection has an output error under {variant}.",
    yes="The projection with the largest mean error per token under {variant} is {projection} ({by_token_db:decibels} "
    "dB); its largest input is {largest:amount}, in feature {feature}[[; its weights have an error of "
    "{weight_db:decibels} dB, and weight {changed_at} changes most, by {largest_change:.2g}]].",
)


def damage_findings(damages: Mapping[str, Damages], names: TokenNamer, scatter: str = "rounding") -> list[Finding]:
    """State the findings of each variant, the most costly first.

    They are its cost, the role and value that cause it, and the projection with the largest error; for the most costly
    variant also layers, heads and experts.
    With a single draw, roles and layers cannot be told apart, so errors of projections come first. scatter: name of
    what scatters the values.
    """
    variants = sorted(damages.values(), key=lambda damage: -damage.model.get("damage", 0))
    measured = [damage for damage in variants if "damage" in damage.model]
    costly = [damage for damage in measured if damage.costs[OF_ALL].is_apart(exact(0))]
    findings = []
    for damage in measured:
        findings += [*(_of_roles(damage, names) if damage in costly else []), *_of_model(damage, scatter)]
        for field in ("layer", "head", "expert") if damage in costly[:1] else ():
            findings += _of_places(damage, field)
    by_variant = ((damage.errors.to_dict("records"), damage.variant) for damage in variants)
    errors = [finding for rows, variant in by_variant for finding in say(OF_ERRORS, rows, variant=variant)]
    single = any(damage.costs[OF_ALL].deviation is None for damage in measured)
    return (errors + findings if single else findings + errors)[:FINDINGS]


def _of_model(damage: Damages, scatter: str) -> list[Finding]:
    cost = damage.costs[OF_ALL]
    ending = "" if cost.is_apart(exact(0)) else f", within the scatter of {scatter}"
    if cost.deviation is None:
        ending = " in a single draw; --draws 4 measures the scatter of rounding"
    moved = "falls" if cost.mean < 0 else "rises"
    return say(OF_MODEL, [damage.model], variant=damage.variant, cost=cost, moved=moved, ending=ending)


def _alone(damage: Damages, field: str) -> list[dict]:
    """Return roles, layers or heads, the one with the largest cost `alone` first.

    Each has the `share` of this cost in the increase of log-perplexity, and the cost that is `left` if it alone is
    exact. Places that were measured once get the rounding scatter of the whole model; if that is unknown, too, return
    [].
    """
    table, rise, whole = getattr(damage, f"{field}s"), damage.model["damage"], damage.costs[OF_ALL]
    if whole.deviation is None and any(cost.deviation is None for cost in damage.costs.values()):
        return []
    return [
        {
            "place": row[field],
            "alone": _scattered(damage.costs["damage_only", field, row[field]], whole),
            "left": _scattered(damage.costs.get(("damage_without", field, row[field])), whole),
            "share": math.log1p(row["damage_only"]) / math.log1p(rise) if rise > 0 else 0.0,
        }
        for row in sorted(table.to_dict("records"), key=lambda row: -row["perplexity_only"])
    ]


def _scattered(cost: Value | None, whole: Value) -> Value | None:
    """Return the cost of a place, with the relative rounding scatter of the whole model if its own is unknown."""
    if cost is None or cost.deviation is not None:
        return cost
    return cost._replace(deviation=whole.deviation * (1 + cost.mean) / (1 + whole.mean))


def _of_roles(damage: Damages, names: TokenNamer) -> list[Finding]:
    """State which role causes most of the damage, if it costs more than the next, and its largest input, if known."""
    roles = _alone(damage, "role")
    for role in roles[:1]:
        role["which"] = "Most" if role["share"] > 0.5 else "The largest part"
        role["share"] = role["share"] if 0 < role["share"] < 1 else None
        inputs = damage.errors[damage.errors["role"] == role["place"]].dropna(subset=["largest"])
        for value in inputs.sort_values("largest", ascending=False).head(1).to_dict("records"):
            role |= value | {"called": names(int(value["token"]))}
    return say(OF_ROLES, roles, variant=damage.variant)


def _of_places(damage: Damages, field: str) -> list[Finding]:
    """State which layers or heads cost most alone, if each of them costs more than any that is not named."""
    places = _alone(damage, field)
    broken = [place for place in places[:MOST] if place["share"] >= SHARE]
    while broken and len(broken) < len(places) and not broken[-1]["alone"].is_above(places[len(broken)]["alone"]):
        broken.pop()
    costs = [f"{place['place']} ({percent(*place['alone'].shown)})" for place in broken]
    return say(OF_PLACES, places[:1], bool(broken), variant=damage.variant, field=field, costs=costs)


def damage_explorer(damages: Mapping[str, "Damages"]) -> list[Explorer]:
    """Make an explorer of output errors by layer and projection, a map per variant and average; none without errors."""
    maps = [
        map_of(f"{variant}, {words}", "projection", _table(damage.errors, column), column)
        for variant, damage in damages.items()
        if len(damage.errors)
        for column, words in reversed(ACROSS.items())
    ]
    if not maps:
        return []
    norm, extend = _scale([table["values"] for table in maps])
    clipped = f", clipped at {decibels(norm.vmax)} dB" if extend == "both" else ""
    scales = {"linear": Scale(norm, colormaps[HEAT], clipped)}
    words = {"row": "layer", "value": "error of outputs", "choice": "variant", "unit": " dB"}
    return [of_maps("Explore the damage by schemes", maps, **words, scales=scales, instead="damage_errors")]


def _table(errors: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a table of layers by projections with the error; NaN where nothing is quantized."""
    short = [path.split(f".{layer}.", 1)[-1] for path, layer in zip(errors["projection"], errors["layer"], strict=True)]
    table = errors.assign(short=short).pivot_table(index="layer", columns="short", values=column, sort=False)
    return table.reindex(index=range(int(errors["layer"].max()) + 1), columns=list(dict.fromkeys(short)))
