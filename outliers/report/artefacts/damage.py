"""What the damage of schemes shows: where in a model it is, and which values cause it."""

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outliers.models.names import short_name
from outliers.report.section import Drawing, Section, Table, scatter_note
from outliers.report.style import BLUE, HEAT, ORANGE, bare

if TYPE_CHECKING:
    from outliers.measurements.damage.measurement import Damages

Names = Callable[[int], str]  # of a token, by its id
Found = Mapping[str, "Damages"]  # by scheme

WORST = 10  # projections of a scheme that are listed
SHARE, MOST = 0.1, 3  # a layer that alone causes this share of a scheme's damage is named, up to so many
MODEL = ["scheme", "perplexity", "increase (%)", "KL (nats)", "top-1 agreement (%)"]
PLACES = ["only it: perplexity", "increase (%)", "all but it: perplexity", "increase (%)"]
ERRORS = ["scheme", "projection", "by token (dB)", "of all (dB)", "max |input|", "feature", "position", "token"]
# What is drawn of a role or layer: what the legend says, colour, hatch (which tells them apart in grey).
BARS = {
    "only": ("what it costs alone", BLUE, ""),
    "without": ("what is saved where it stays exact", ORANGE, "//"),
}
WIDTH = 0.4  # of a bar
FAINTEST = 0.01  # share of the errors that have the darkest colour


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
        drawings.append(Drawing("damage_errors", HEAT_CAPTION, heat_map(found)))
    if any(len(one.roles) or len(one.layers) for one in found.values()):
        drawings.append(Drawing("damage_places", BARS_CAPTION, place_bars(found)))
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


ACROSS = {"db": "over all tokens", "by_token_db": "mean over tokens"}  # of a heat map: column of the errors, its title


def heat_map(found: Found) -> Figure:
    """Layer × role: the largest error of the role's projections, in dB; a row a scheme, all on one scale."""
    maps = {scheme: [_merged(one.errors, column) for column in ACROSS] for scheme, one in found.items()}
    values = np.concatenate([one.to_numpy(dtype=float).ravel() for of_scheme in maps.values() for one in of_scheme])
    finite = values[np.isfinite(values)]
    norm = Normalize(*(np.quantile(finite, FAINTEST), finite.max()) if len(finite) else (0, 1))
    figure = Figure(figsize=(7.2, 0.7 + 0.85 * len(maps)), layout="constrained")
    panels = figure.subplots(len(maps), len(ACROSS), squeeze=False, sharex=True, sharey=True)
    colors = colormaps[HEAT].with_extremes(bad="0.8")
    for row, (scheme, of_scheme) in zip(panels, maps.items(), strict=True):
        for axes, errors, across in zip(row, of_scheme, ACROSS.values(), strict=True):
            shown = np.ma.masked_invalid(errors.to_numpy(dtype=float))
            image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=colors, norm=norm)
            axes.tick_params(labelsize=7)
            axes.set_title(f"{scheme}, {across}", loc="left", fontsize=8)
            axes.set_xticks(*_some(errors.columns, 8))
            axes.set_yticks(range(len(errors)), errors.index)
    for axes in panels[-1]:
        axes.set_xlabel("layer", fontsize=8)
    bar = figure.colorbar(image, ax=panels, aspect=12 * len(panels), extend="min", extendfrac=0.1 / len(panels))
    bar.ax.tick_params(labelsize=7)
    bar.set_label("error of the output (dB)", fontsize=8)
    return figure


def _merged(errors: pd.DataFrame, column: str) -> pd.DataFrame:
    """Roles down, layers across: the largest error in dB; NaN where nothing is quantized."""
    table = errors.pivot_table(index="role", columns="layer", values=column, aggfunc="max")
    return table.reindex(index=list(dict.fromkeys(errors["role"])), columns=range(int(errors["layer"].max()) + 1))


def _some(layers: pd.Index, most: int) -> tuple[list[int], list[int]]:
    """Places and numbers of as many layers as have room."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 1000) if len(layers) <= most * step)
    numbers = [place for place in range(len(layers)) if layers[place] % step == 0]
    return numbers, [int(layers[place]) for place in numbers]


def place_bars(found: Found) -> Figure:
    """What each role and layer costs alone, and what leaving it exact saves, in log-perplexity; a row a scheme."""
    fields = [field for field in ("role", "layer") if any(len(getattr(one, f"{field}s")) for one in found.values())]
    figure = Figure(figsize=(7.2, 0.6 + 1.7 * len(found)), layout="constrained")
    ratios = {"width_ratios": [{"role": 1, "layer": 2.6}[field] for field in fields]}
    panels = figure.subplots(len(found), len(fields), squeeze=False, sharey="row", sharex="col", gridspec_kw=ratios)
    for row, (scheme, one) in zip(panels, found.items(), strict=True):
        for axes, field in zip(row, fields, strict=True):
            _bars(axes, one, getattr(one, f"{field}s"), field)
        row[0].set_title(scheme, loc="left", fontsize=9)
    for axes, field in zip(panels[-1], fields, strict=True):
        axes.set_xlabel(field, fontsize=8)
    figure.supylabel("log-perplexity (nats a token)", fontsize=8)
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    return figure


def _bars(axes: Axes, one: "Damages", table: pd.DataFrame, field: str) -> None:
    number = field == "layer"
    references = {"only": (-1, one.model["unquantized"]), "without": (1, one.model["perplexity"])}
    for side, (kind, (label, color, hatch)) in enumerate(BARS.items()):
        name, (sign, reference) = f"perplexity_{kind}", references[kind]
        if name not in table:
            continue
        values = sign * np.log(reference / table[name].to_numpy(dtype=float))
        relative = table.get(f"{name}_deviation", pd.Series(np.nan, table.index)) / table[name]
        places = np.arange(len(table)) + (side - 0.5) * WIDTH
        style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3, "label": label}
        axes.bar(places, values, WIDTH, yerr=relative if relative.notna().any() else None, ecolor="black", **style)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(*(_some(pd.Index(table[field]), 16) if number else (range(len(table)), table[field])))
    axes.tick_params(labelsize=7)
    if not number:
        axes.tick_params(axis="x", rotation=30)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.7, len(table) - 0.3)
    bare(axes)
