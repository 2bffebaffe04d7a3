"""Where schemes damage a model, drawn."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outliers.plot.style import BLUE, HEAT, ORANGE, bare

if TYPE_CHECKING:
    from outliers.measurements.damage.measurement import Damages

Found = Mapping[str, "Damages"]  # by scheme


# What is drawn of a role or layer: what the legend says, colour, hatch (which tells them apart in grey).
BARS = {
    "only": ("what it costs alone", BLUE, ""),
    "without": ("what is saved where it stays exact", ORANGE, "//"),
}
WIDTH = 0.4  # of a bar
FAINTEST = 0.01  # share of the errors that have the darkest colour
ACROSS = {"db": "over all tokens", "by_token_db": "mean over tokens"}  # of a heat map: column of the errors, its title


def damage_map(found: Found) -> Figure:
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


def damage_bars(found: Found) -> Figure:
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
