"""Places of the damage by schemes in a model, drawn."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from outliers.show.legends import SCATTER, explained, legend, scheme_styles
from outliers.show.style import brief, chosen, color_of, figure_function, panels_of
from outliers.show.value import Rows, records

if TYPE_CHECKING:
    from outliers.metrics.damages import Damages

ByScheme = Mapping[str, "Damages"]

ACROSS = {"db": "over all tokens", "by_token_db": "mean over tokens"}  # of a map: column of the errors, its title
FAINTEST = 0.01  # share of the errors that have the darkest colour
# What is drawn of a role or layer: what the legend says, colour, hatch (which tells them apart in grey).
BARS = {
    "only": ("added by quantizing it alone", "blue", ""),
    "without": ("removed by keeping it exact", "orange", "//"),
}
WIDTH = 0.4  # of a bar
PLACES = {"role": 1, "layer": 2.6, "stack": 0.6}  # of bars: width of their panels
PLACE_LABELS = {"role": 8, "layer": 16, "stack": 8}  # how many of their names have room
HIGHEST = 40  # inches of a figure of many schemes


@figure_function
def damage_map(
    damages: "Damages | ByScheme", *, scheme: str | None = None, error: str | None = None, ax: Axes | None = None
) -> Axes | np.ndarray:
    """Layer × role: the largest error ‖Y_q − Y‖² / ‖Y‖² of the role's projections in dB, a row of panels a scheme.

    All are on one scale: the hundredth part of the errors that is smallest has the darkest colour, and errors that are
    far beyond all others have the lightest. Grey: nothing is quantized there, or without any error.

    Example:
        >>> panels = outliers.plot.damage_map(outliers.damage(model, blocks, "absmax", by=["error"]))

    Args:
        damages: as `outliers.damage` returns it, or several by their scheme.
        scheme: the one to draw; by default all that quantize projections, for nothing else has errors.
        error: the panels to draw, "db" (over all tokens) or "by_token_db" (mean over tokens, which one of massive
            values does not hide); by default both. Of one scheme and error there is one panel.
    """
    damages = {scheme: damage for scheme, damage in _by_scheme(damages).items() if len(damage.errors)}
    schemes, errors = chosen("scheme", scheme, damages, ax), chosen("error", error, ACROSS, ax)
    maps = [[_merged(damages[scheme].errors, column) for column in errors] for scheme in schemes]
    norm, extend = _scale([table.to_numpy(dtype=float) for row in maps for table in row])
    size = 0.6 + 3.3 * len(errors), min(HIGHEST, 1.1 + 0.95 * len(maps))
    panels = panels_of(ax, len(maps), len(errors), size, sharex=True, sharey=True)
    colors = colormaps[matplotlib.rcParams["image.cmap"]].with_extremes(bad="0.8")
    for row, scheme, tables in zip(panels, brief(schemes), maps, strict=True):
        for axes, error, table in zip(row, errors, tables, strict=True):
            errors_shown = np.ma.masked_invalid(table.to_numpy(dtype=float))
            image = axes.imshow(errors_shown, aspect="auto", interpolation="nearest", cmap=colors, norm=norm)
            axes.spines[:].set_visible(True)
            axes.grid(False)
            axes.set_title(f"{scheme}, {ACROSS[error]}", loc="left", fontsize="small")
            axes.set_xticks(*_places_with_room(table.columns, 8))
            axes.set_yticks(range(len(table)), table.index)
    for axes in panels[-1]:
        axes.set_xlabel("layer")
    style = {"aspect": 12 * len(maps), "extend": extend, "extendfrac": 0.1 / len(maps)}
    bar = axes.figure.colorbar(image, ax=list(panels.flat), **style)
    bar.set_label(f"error of the output (dB);\nbelow {norm.vmin:.0f} darkest".replace("-", "−"))
    return panels


def _by_scheme(damages: "Damages | ByScheme") -> ByScheme:
    return damages if isinstance(damages, Mapping) else {damages.scheme: damages}


def _scale(errors: list[np.ndarray]) -> tuple[Normalize, str]:
    """From the faintest errors to the largest; one that is farther beyond the rest than they span is cut off."""
    finite = np.concatenate([values[np.isfinite(values)] for values in errors])
    if not len(finite):
        return Normalize(0, 1), "neither"
    low, high, most = *np.quantile(finite, [FAINTEST, 1 - FAINTEST]), finite.max()
    highest = min(most, high + (high - low)) if high > low else most
    return Normalize(low, highest), "both" if most > highest else "min"


def _merged(errors: pd.DataFrame, column: str) -> pd.DataFrame:
    """Roles down, layers across: the largest error in dB; NaN where nothing is quantized."""
    table = errors.pivot_table(index="role", columns="layer", values=column, aggfunc="max")
    return table.reindex(index=list(dict.fromkeys(errors["role"])), columns=range(int(errors["layer"].max()) + 1))


def _places_with_room(layers: pd.Index, most: int) -> tuple[list[int], list]:
    """Places and names of as many layers as have room, or of roles, which are few."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 1000) if len(layers) <= most * step)
    numbers = list(range(0, len(layers), step))
    return numbers, [layers[place] for place in numbers]


@figure_function
def damage_bars(
    damages: "Damages | ByScheme", *, scheme: str | None = None, place: str | None = None, ax: Axes | None = None
) -> Axes | np.ndarray:
    """Log-perplexity added by quantizing each role and layer alone, and removed by keeping it alone exact.

    A row of panels a scheme. Bars are one standard deviation by rounding, where there are several draws.

    Example:
        >>> panels = outliers.plot.damage_bars(outliers.damage(model, blocks, "absmax", by=["role", "layer"]))

    Args:
        damages: as `outliers.damage` returns it, or several by their scheme.
        scheme: the one to draw; by default all.
        place: the panels to draw, "role", "layer" or "stack"; by default those that were measured. Of one scheme there
            is one.
    """
    damages = _by_scheme(damages)
    measured = [place for place in PLACES if any(len(getattr(damage, f"{place}s")) for damage in damages.values())]
    schemes, places = chosen("scheme", scheme, damages, ax), chosen("place", place, measured, ax)
    tables = {place: _aligned([getattr(damages[scheme], f"{place}s") for scheme in schemes], place) for place in places}
    widths = [PLACES[place] for place in places]
    size = max(4.6, 2 * sum(widths)), min(HIGHEST, 0.6 + 1.7 * len(schemes))
    panels = panels_of(ax, len(schemes), len(places), size, sharey="row", sharex="col", width_ratios=widths)
    for row, scheme, name, *row_tables in zip(panels, schemes, brief(schemes), *tables.values(), strict=True):
        for axes, place, table in zip(row, places, row_tables, strict=True):
            _bars(axes, damages[scheme], table, place)
        row[0].set_title(name, loc="left")
    for axes, place in zip(panels[-1], places, strict=True):
        axes.set_xlabel(place)
    for axes in panels[:, 0]:
        axes.set_ylabel("log-perplexity\n(nats a token)")
    scattered = any(column.endswith("_deviation") for row in tables.values() for table in row for column in table)
    handles = panels[0, 0].get_legend_handles_labels()[0]
    legend(ax, axes, [*handles, *explained(bars=SCATTER if scattered else "")], "upper center", 1 + len(places))
    return panels


def _aligned(tables: list[pd.DataFrame], place: str) -> list[pd.DataFrame]:
    """Tables of several schemes with a row for each place that one of them has, for their panels share an axis."""
    every = dict.fromkeys(name for table in tables for name in table[place])
    return [table.set_index(place).reindex(list(every)).reset_index() for table in tables]


def _bars(axes: Axes, damage: "Damages", table: pd.DataFrame, place: str) -> None:
    references = {"only": (-1, damage.model["unquantized"]), "without": (1, damage.model["perplexity"])}
    kinds = [kind for kind in BARS if f"perplexity_{kind}" in table]
    for side, kind in enumerate(kinds):
        (label, color, hatch), name, (sign, reference) = BARS[kind], f"perplexity_{kind}", references[kind]
        values = sign * np.log(reference / table[name].to_numpy(dtype=float))
        relative = table.get(f"{name}_deviation", pd.Series(np.nan, table.index)) / table[name]
        places = np.arange(len(table)) + (side - (len(kinds) - 1) / 2) * WIDTH
        style = {"color": color_of(color), "hatch": hatch, "edgecolor": "white", "linewidth": 0.3, "label": label}
        axes.bar(places, values, WIDTH, yerr=relative if relative.notna().any() else None, ecolor="black", **style)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(*_places_with_room(pd.Index(table[place]), PLACE_LABELS[place]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.7, len(table) - 0.3)
    axes.tick_params(axis="x", rotation=0 if place == "layer" else 30)


@figure_function
def damage_heads(
    damages: "Damages | ByScheme", *, scheme: str | None = None, ax: Axes | None = None
) -> Axes | np.ndarray:
    """Head × layer: the log-perplexity that keys and values of a head cost where nothing else is quantized.

    A panel a cache, all on one scale.

    Example:
        >>> axes = outliers.plot.damage_heads(outliers.damage(model, blocks, outliers.variant("kv=int4"), by=["head"]))

    Args:
        damages: as `outliers.damage` returns it, or several by their names.
        scheme: the cache to draw; by default all that were measured by head.
    """
    damages = {name: damage for name, damage in _by_scheme(damages).items() if len(damage.heads)}
    caches = chosen("scheme", scheme, damages, ax)
    maps = [_of_heads(damages[name]) for name in caches]
    most = max(float(table.abs().to_numpy().max()) for table in maps)
    size = 5.2, min(HIGHEST, 0.8 + len(maps) * (0.5 + 0.28 * len(maps[0])))
    panels = panels_of(ax, len(maps), 1, size, sharex=True)
    for axes, name, table in zip(panels[:, 0], caches, maps, strict=True):
        image = axes.imshow(table, aspect="auto", interpolation="nearest", norm=Normalize(-most, most), cmap="RdBu_r")
        axes.spines[:].set_visible(True)
        axes.grid(False)
        axes.set_title(name, loc="left", fontsize="small")
        axes.set_xticks(*_places_with_room(table.columns, 16))
        axes.set_yticks(*_places_with_room(table.index, 8))
        axes.set_ylabel("head of keys")
    axes.set_xlabel("layer")
    axes.figure.colorbar(image, ax=list(panels.flat)).set_label("log-perplexity\n(nats a token)")
    return panels


def _of_heads(damage: "Damages") -> pd.DataFrame:
    """Heads down, layers across."""
    places = damage.heads["head"].str.extract(r"layers\.(?P<layer>\d+)\.heads\.(?P<head>\d+)").astype(int)
    costs = np.log(damage.heads["perplexity_only"].astype(float) / damage.model["unquantized"])
    return places.assign(cost=costs).pivot_table(index="head", columns="layer", values="cost")


@figure_function
def loss_by_position(rows: Rows, *, ax: Axes | None = None) -> Axes:
    """Increase of the loss of a predicted token, in nats, by its position, a line a variant.

    Positions are in groups, each twice as many as the one before, and a point is their mean.

    Args:
        rows: of the metric token_losses, of one model.
    """
    rows = [row for row in records(rows) if row["metric"] == "token_losses.position"]
    axes = panels_of(ax, 1, 1, (5.6, 2.8)).item()
    for scheme, style in scheme_styles(rows).items():
        line = [row for row in rows if row["scheme"] == scheme]
        middles = [(row["first"] + row["last"]) / 2 for row in line]
        axes.plot(middles, [row["value"] / row["tokens"] for row in line], **style)
    axes.axhline(0, color="black", linewidth=0.6, zorder=0)
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set(xlabel="position", ylabel="increase of the loss (nats)")
    axes.xaxis.set_major_formatter("{x:g}")
    legend(ax, axes, axes.lines[:-1], "right upper")
    return axes
