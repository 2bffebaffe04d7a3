"""The life of a feature along the layers: what writes it, its state, and the norms that read it, drawn."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation

from outliers.metrics.origins import PART_OF, SINGLE
from outliers.presets.readers import readings
from outliers.show.axes import log_axis
from outliers.show.legends import legend
from outliers.show.style import SEQUENTIAL, chosen, color_of, figure_function, panels_of
from outliers.show.value import Value, exact, records
from outliers.variants.edges import ROLES, Place

if TYPE_CHECKING:
    from outliers.metrics.origins.account import Account
    from outliers.show.value import Rows

AT = {"mean": ("value", "mean after the first position"), "first": ("first", "first position")}
# Part: colour, hatch (which tells them apart in grey), place beside its layer.
BARS = {"embedding": ("grey", "", 0.3), "attention": ("orange", "//", -0.2), "feed-forward": ("blue", "", 0.2)}
BEFORE = -1  # where a layer would be, what is before all of them
GATES = {"attn_in": "attention", "ffn_in": "feed-forward"}  # roles of the inputs that a norm makes: rows of the band
FAINTEST, BRIGHTEST = 1 / 16, 4  # of gains beside the median: the ends of the band's scale
NAMED, SHARE = 2, 0.5  # of the largest parts of a panel, those with a single writer of this share are named by it
WORTH = 0.25  # of the largest state, what a part has to write for that
PAD, FAR, STEP = 2, 14, 1.5  # points: around a name, from its bar to its edge at most, between places that are tried
NEARER = 0.1  # what the middle of a name counts for beside its edge, when the nearest place is sought
PIECES = 40  # of a straight part of the line, each taken for a point
READ = 0.01  # of the perplexity: what a feature has to cost at a place that is said to read it
BAND = (0, -0.2, 1, 0.13)  # of the axes
TICKS = 8  # at most


@figure_function
def life_line(
    account: "Account | Rows", *, feature: int | None = None, at: str | None = None, ax: Axes | None = None
) -> Axes | np.ndarray:
    """Layer by layer, what attention and feed-forward part write into a feature as bars, and its state as a line.

    The line has the state before each layer, and at its end that after all. The band below has the gain of each norm at
    the feature, beside the median gain of that norm: what is dark is hidden from the projections that read the norm.
    Where rows say what a model loses without the feature at single places, those are named behind the band at which
    that is more than without random features.

    Example:
        >>> panels = outliers.plot.life_line(outliers.origins(model, blocks, features=[3]))

    Args:
        account: as `outliers.origins` returns it, or rows of the command.
        feature: the one to draw; by default a row of panels for each.
        at: "mean", over positions after the first, or "first", the first position; by default both, side by side.
    """
    every = records(account) if isinstance(account, list | pd.DataFrame) else account.records()
    rows, readers = pd.DataFrame(every), readers_of(every)
    rows = rows[rows["metric"].str.startswith("origins.")]  # without those of the trace that has found the features
    by_feature = {f"{name:.0f}": rows_of_feature for name, rows_of_feature in rows.groupby("feature", sort=False)}
    features = chosen("feature", None if feature is None else str(feature), by_feature, ax)
    places = chosen("at", at, AT, ax)
    panels = panels_of(ax, len(features), len(places), (0.4 + 3.5 * len(places), 0.5 + 2.9 * len(features)))
    norm = LogNorm(FAINTEST, BRIGHTEST, clip=True)
    bands = []
    for line, name in zip(panels, features, strict=True):
        for axes, place in zip(line, places, strict=True):
            column, title = AT[place]
            _bars_and_line(axes, by_feature[name], column)
            axes.set_title(f"feature {name}, {title}", loc="left")
            bands += _band(axes, by_feature[name], norm, readers.get(name, []) if place == places[-1] else [])
        line[0].set_ylabel("contribution; state")
    _explain(ax, panels, bands, norm)
    panels[0, 0].figure.draw_without_rendering()  # from here on the layout is known
    for line, name in zip(panels, features, strict=True):
        for axes, place in zip(line, places, strict=True):
            _name_writers(axes, by_feature[name], AT[place][0])
    return panels


def parts_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Contributions of parts of layers, from rows: `feature`, `layer` (−1: before all), `part`, `value`, `first`."""
    writers = rows[rows["metric"] == "origins.writer"]
    layer, part = writers["layer"].astype(float).fillna(BEFORE).astype(int), writers["writer"].map(PART_OF)
    groups = writers.assign(layer=layer, part=part).groupby(["feature", "layer", "part"], sort=False)
    return groups[["value", "first"]].sum().reset_index()


def _bars_and_line(axes: Axes, rows: pd.DataFrame, column: str) -> None:
    for part, rows_of_part in parts_of(rows).groupby("part", sort=False):
        color, hatch, beside = BARS[part]
        style = {"color": color_of(color), "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        axes.bar(rows_of_part["layer"] + beside, rows_of_part[column], 0.4, **style)
    states = rows[rows["metric"] == "origins.state"]
    axes.plot(states["layer"] - 0.5, states[column], color=color_of("black"), marker=".", markersize=3, linewidth=0.9)
    axes.axhline(0, color="black", linewidth=0.6)
    layers = len(states) - 1
    step = -(-layers // TICKS)
    axes.set_xticks(range(0, layers, step))
    axes.set_xlim(-1.1, layers)
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:,g}".replace("-", "−"))


def _name_writers(axes: Axes, rows: pd.DataFrame, column: str) -> None:
    """Name the single writers that make the largest bars, each at the free place that is nearest to its bar's end."""
    parts = parts_of(rows).sort_values(column, key=abs, ascending=False, kind="stable")
    most = rows.loc[rows["metric"] == "origins.state", column].abs().max()
    taken = _drawn(axes)
    for part in parts.head(NAMED).to_dict("records"):
        largest = largest_of(rows, part, column)
        worth = abs(part[column]) >= WORTH * most
        if worth and largest is not None and largest[column] / part[column] >= SHARE:
            end = part["layer"] + BARS[part["part"]][2], part[column]
            style = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": "x-small"}
            label = axes.annotate(name_of(largest), end, (0, 0), **style)
            place = _free_place(axes, label, taken)
            if place is None:
                label.remove()
            else:
                label.set_position(place)
                taken = np.vstack([taken, label.get_window_extent().extents])


def _drawn(axes: Axes) -> np.ndarray:
    """The boxes in pixels, (boxes, 4), of bars, of the line at zero, and of short pieces of the line of states."""
    bars = [bar.get_window_extent().extents for bar in axes.patches]
    points = axes.transData.transform(axes.lines[0].get_xydata())
    pieces = np.linspace(points[:-1], points[1:], PIECES).reshape(-1, 2)
    zero = axes.transData.transform([0, 0])[1]
    return np.array([*bars, *np.hstack([pieces, pieces]), [axes.bbox.x0, zero, axes.bbox.x1, zero]])


def _free_place(axes: Axes, label: Annotation, taken: np.ndarray) -> np.ndarray | None:
    """A place for a label in no taken box and within the axes: the points from what it names to its centre; None where
    that is not near."""
    point, extent = axes.figure.dpi / 72, label.get_window_extent()
    size = np.array([extent.width, extent.height]) / point
    grid = np.meshgrid(*(np.arange(-reach, reach, STEP) for reach in size / 2 + FAR))
    offsets = np.stack(grid, -1).reshape(-1, 2)
    centres = axes.transData.transform(label.xy) + offsets[:, None] * point
    low, high = (centres + side * (size / 2 + PAD) * point for side in (-1, 1))
    free = ((high <= taken[:, :2]) | (low >= taken[:, 2:])).any(-1).all(-1)
    free &= ((low >= axes.bbox.min) & (high <= axes.bbox.max)).all((1, 2))
    if not free.any():
        return None
    gaps = np.hypot(*(abs(offsets) - size / 2).clip(0).T) + NEARER * np.hypot(*offsets.T)
    return offsets[np.where(free, gaps, np.inf).argmin()]


def readers_of(rows: list[dict]) -> dict[str, list[Place]]:
    """By feature the places that read it, where rows say what the model loses without it at each."""
    if not any(row.get("subject") == "control" for row in rows):
        return {}
    table = readings(rows)
    controls = table[table["subject"] == "control"].groupby("place")["cost"]
    usual = {place: Value(costs.mean(), costs.std()) for place, costs in controls}
    reading: dict[str, list[Place]] = {}
    for row in table[table["subject"] == "feature"].to_dict("records"):
        if reads(row["cost"], usual[row["place"]]):
            reading.setdefault(str(row["feature"]), []).append(Place.read(row["place"]))
    return reading


def reads(cost: float, usual: Value) -> bool:
    """Whether a place reads a feature: it costs more without it than without random ones, and enough to be told."""
    return cost >= READ and exact(cost).is_above(usual)


def largest_of(rows: pd.DataFrame, part: Mapping, column: str) -> pd.Series | None:
    """The single writer that writes most of a part, as `parts_of` has it; None where none is known."""
    in_layer = rows["layer"].isna() if part["layer"] == BEFORE else rows["layer"] == part["layer"]
    singles = rows[in_layer & (rows["metric"] == "origins.writer") & rows["writer"].isin(SINGLE)]
    singles = singles[(singles["writer"].map(PART_OF) == part["part"]) & (singles["feature"] == part["feature"])]
    return None if singles.empty else singles.loc[(singles[column] * np.sign(part[column])).idxmax()]


def name_of(writer: Mapping | None) -> str | None:
    """The name of a writer: neuron 1229, head 6, positions."""
    if writer is None:
        return None
    return writer["writer"] + ("" if pd.isna(writer.get("index")) else f" {writer['index']:.0f}")


def _band(axes: Axes, rows: pd.DataFrame, norm: LogNorm, readers: list[Place]) -> list[Axes]:
    """The gains of the norms below the axes, a row for what reads each, with its readers; nothing where no norm is
    read."""
    gates = rows[rows["metric"] == "origins.gate"]
    reads = [role for role in GATES if gates["role"].str.contains(role).any()] if len(gates) else []
    if not reads:
        axes.set_xlabel("layer")
        return []
    gains = np.full((len(reads), int(gates["layer"].max()) + 1), np.nan)
    for gate in gates.to_dict("records"):
        for row, role in enumerate(reads):
            if role in gate["role"].split("+"):
                gains[row, int(gate["layer"])] = abs(gate["value"]) / gate["median"]
    band = axes.inset_axes(BAND, sharex=axes)
    style = {"aspect": "auto", "interpolation": "nearest", "cmap": colormaps[SEQUENTIAL], "norm": norm}
    limits = axes.get_xlim()
    band.imshow(gains.clip(FAINTEST), extent=(-0.5, gains.shape[1] - 0.5, len(reads) - 0.5, -0.5), **style)
    band.set_xlim(limits)
    for row, role in enumerate(reads):
        there = [place.written for place in readers if set(place.parts) <= set(ROLES[role])]
        single = [name for name in there if name != role] or there  # of what reads it together only where that is all
        place = {"xycoords": ("axes fraction", "data"), "fontsize": "x-small", "va": "center"}
        if single:
            band.annotate(f"read by {', '.join(single)}", (1.01, row), **place)
    band.set_yticks(range(len(reads)), [GATES[role] for role in reads], fontsize="x-small")
    band.tick_params(axis="y", length=0)
    band.spines[:].set_visible(False)
    band.grid(False)
    band.set_xlabel("layer")
    axes.tick_params(axis="x", labelbottom=False)
    return [band]


def _explain(ax: Axes | None, panels: np.ndarray, bands: list[Axes], norm: LogNorm) -> None:
    patches = [
        Patch(facecolor=color_of(color), hatch=hatch, edgecolor="white", label=part)
        for part, (color, hatch, _) in BARS.items()
    ]
    line = Line2D([], [], color=color_of("black"), marker=".", markersize=3, label="state")
    legend(ax, panels[0, 0], [*patches, line], "upper center", 4)
    if bands:
        shades = ScalarMappable(norm, colormaps[SEQUENTIAL])
        bar = panels[0, 0].figure.colorbar(shades, ax=list(panels.flat), aspect=30, shrink=0.7, extend="both")
        bar.set_label("band: |gain| of the norm / its median")
        log_axis(bar.ax.yaxis, norm.vmin, norm.vmax)
