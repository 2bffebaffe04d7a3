"""The writers of features: what writes each feature along the layers, its state, and the norms before its readers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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

from outliers.metrics.records import PART_OF, SINGLE, WRITERS_OF
from outliers.models.names import short_name
from outliers.quantization.schemes import BASELINE
from outliers.runs.stages.readers import readings
from outliers.show.axes import log_axis
from outliers.show.claims import Claim, say_each
from outliers.show.explorer import Explorer
from outliers.show.legends import legend
from outliers.show.section import (
    FINDINGS,
    Context,
    Drawing,
    Finding,
    Section,
    of_subjects,
    subject_of,
    together,
)
from outliers.show.style import COLORS, SEQUENTIAL, Panels, chosen, color_of, figure_function, panels_of
from outliers.show.tables import MISSING, Form, Table
from outliers.show.value import Value, averaged, comparable_rows, grouped
from outliers.show.words import amount, signed
from outliers.variants.edges import ROLES, Place

if TYPE_CHECKING:
    from outliers.metrics.origins import WriterAccount
    from outliers.show.value import RowsOrFrame

Singles = Mapping[tuple[float, float, str], pd.DataFrame]  # writers, by feature, layer and part
AT = {"mean": ("value", "mean after the first position"), "first": ("first", "first position")}
# Part: colour, hatch (which distinguishes them in grey), offset from its layer.
BARS = {"embedding": ("grey", "", 0.3), "attention": ("orange", "//", -0.2), "feed-forward": ("blue", "", 0.2)}
BEFORE = -1  # the layer number of what comes before all layers
GATES = {"attn_in": "attention", "ffn_in": "feed-forward"}  # roles whose input a norm makes, each a row of the band
FAINTEST_GAIN, BRIGHTEST_GAIN = 1 / 16, 4  # ends of the band's scale, in multiples of the median gain
NAMED = 2  # of a panel's largest parts, those with a single writer of share SHARE are labelled with it
WORTH_A_NAME = 0.25  # of the largest state, what a part must write to be labelled
PAD, FAR, STEP = 2, 14, 1.5  # points: padding of a label, largest gap to its bar, step between places tried
NEARER = 0.1  # weight of the distance to a label's centre, beside that to its edge, in the search for the nearest place
PIECES = 40  # of a straight segment of the line, each treated as a point
READ = 0.01  # relative increase of perplexity without a feature at a place, from which on the place reads it
BAND = (0, -0.2, 1, 0.13)  # place of the band in axes coordinates
TICKS = 8  # most layers with a tick


@figure_function
def life_line(
    account: "WriterAccount | RowsOrFrame", *, feature: int | None = None, at: str | None = None, ax: Axes | None = None
) -> Panels:
    """Draw the contributions of attention and feed-forward block to a feature by layer as bars, its state as a line.

    The line shows the state before each layer and, at its end, after all layers. The band below shows the gain of each
    norm at the feature relative to the median gain of that norm: where it is dark, the feature is hidden from the
    projections that read the norm. If rows tell the model's loss without the feature at single places, those where it
    exceeds that without random features are named beside the band.

    Example:
        >>> panels = outliers.plot.life_line(outliers.origins(model, blocks, features=[3]))

    Args:
        account: as `outliers.origins` returns it, or rows of the command.
        feature: the one to draw; by default a row of panels for each.
        at: "mean", over positions after the first, or "first", the first position; by default both, side by side.
    """
    every = comparable_rows(account) if isinstance(account, list | pd.DataFrame) else account.records()
    rows, readers = pd.DataFrame(every), readers_of(every)
    rows = rows[rows["metric"].str.startswith("origins.")]  # without rows of the trace that found the features
    by_feature = {f"{name:.0f}": rows_of_feature for name, rows_of_feature in rows.groupby("feature", sort=False)}
    features = chosen("feature", None if feature is None else str(feature), by_feature, ax)
    places = chosen("at", at, AT, ax)
    panels = panels_of(ax, len(features), len(places), (0.4 + 3.5 * len(places), 0.5 + 2.9 * len(features)))
    norm = LogNorm(FAINTEST_GAIN, BRIGHTEST_GAIN, clip=True)
    bands = []
    for line, name in zip(panels, features, strict=True):
        for axes, place in zip(line, places, strict=True):
            column, title = AT[place]
            _bars_and_line(axes, by_feature[name], column)
            axes.set_title(f"feature {name}, {title}", loc="left")
            bands += _band(axes, by_feature[name], norm, readers.get(name, []) if place == places[-1] else [])
        line[0].set_ylabel("contribution; state")
    _draw_legends(ax, panels, bands, norm)
    panels[0, 0].figure.draw_without_rendering()  # computes the layout, which the labels need
    for line, name in zip(panels, features, strict=True):
        for axes, place in zip(line, places, strict=True):
            _name_writers(axes, by_feature[name], AT[place][0])
    return panels


def parts_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the contributions of parts of layers.

    Columns are `feature`, `layer` (−1: before all), `part`, `value` (mean after the first position) and `first` (at the
    first position).
    """
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
    """Label the largest bars that a single writer dominates, each at the free place nearest to the bar's end."""
    parts = parts_of(rows).sort_values(column, key=abs, ascending=False, kind="stable")
    most = rows.loc[rows["metric"] == "origins.state", column].abs().max()
    taken, singles = _drawn(axes), single_writers(rows)
    for part in parts.head(NAMED).to_dict("records"):
        largest = largest_of(singles, part, column)
        worth = abs(part[column]) >= WORTH_A_NAME * most
        if worth and largest is not None and largest[column] / part[column] >= SHARE:
            end = part["layer"] + BARS[part["part"]][2], part[column]
            style = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": "small"}
            label = axes.annotate(writer_name(largest), end, (0, 0), **style)
            place = _free_place(axes, label, taken)
            if place is None:
                label.remove()
            else:
                label.set_position(place)
                taken = np.vstack([taken, label.get_window_extent().extents])


def _drawn(axes: Axes) -> np.ndarray:
    """Return the boxes in pixels, (boxes, 4), of bars, of the line at zero, and of pieces of the line of states."""
    bars = [bar.get_window_extent().extents for bar in axes.patches]
    points = axes.transData.transform(axes.lines[0].get_xydata())
    pieces = np.linspace(points[:-1], points[1:], PIECES).reshape(-1, 2)
    zero = axes.transData.transform([0, 0])[1]
    return np.array([*bars, *np.hstack([pieces, pieces]), [axes.bbox.x0, zero, axes.bbox.x1, zero]])


def _free_place(axes: Axes, label: Annotation, taken: np.ndarray) -> np.ndarray | None:
    """Find a place for a label that is within the axes and overlaps no taken box; None if there is none near.

    The place is the offset, in points, from the labelled point to the label's centre.
    """
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
    """Return the places that read each feature, if rows tell the model's loss without it at each place."""
    if not any(row.get("subject") == "control" for row in rows):
        return {}
    table = readings(rows)
    usual = random_costs(table)
    reading: dict[str, list[Place]] = {}
    for row in table[table["subject"] == "feature"].to_dict("records"):
        if is_read(row["increase"], usual[row["place"]]):
            reading.setdefault(str(row["feature"]), []).append(Place.read(row["place"]))
    return reading


def random_costs(readings: pd.DataFrame) -> dict[str, Value]:
    """Return the mean increase of perplexity without a random feature at each place.

    Its deviation is that of single features, its error that over the text.
    """
    controls = readings[readings["subject"] == "control"].groupby("place")
    return {place: averaged(group["increase"].tolist(), group["cost"].std()) for place, group in controls}


def is_read(cost: Value, usual: Value) -> bool:
    """Return whether the cost of removing a feature at a place is at least `READ` and exceeds that of random ones."""
    return cost.mean >= READ and cost.is_above(usual)


def single_writers(rows: pd.DataFrame) -> Singles:
    """Return the rows of single writers (heads, neurons, experts) by feature, layer and part of the layer."""
    singles = rows[rows["metric"].isin(WRITERS_AND_EXPERTS) & rows["writer"].isin(SINGLE)]
    layer, part = singles["layer"].astype(float).fillna(BEFORE), singles["writer"].map(PART_OF)
    return dict(iter(singles.groupby([singles["feature"], layer, part], sort=False)))


def largest_of(singles: Singles, part: Mapping, column: str) -> pd.Series | None:
    """Return the single writer with the largest contribution of the part's sign; None if none is known.

    Of an expert, its neuron is returned if it makes `SHARE` of the expert's contribution.
    """
    of_part = singles.get((part["feature"], part["layer"], part["part"]))
    if of_part is None:
        return None
    inside = of_part["writer"] == "expert neuron"
    most = _most_of_sign(of_part[~inside], part, column)
    neurons = of_part[inside & (of_part["expert"] == most["index"])] if most["writer"] == "expert" else ()
    neuron = _most_of_sign(neurons, part, column) if len(neurons) else most
    return neuron if neuron[column] / most[column] >= SHARE else most


def _most_of_sign(singles: pd.DataFrame, part: Mapping, column: str) -> pd.Series:
    return singles.loc[(singles[column] * np.sign(part[column])).idxmax()]


def writer_name(writer: Mapping | None) -> str | None:
    """Name a writer: neuron 1229, head 6, positions; expert 7, neuron 12."""
    if writer is None:
        return None
    name = writer["writer"] + ("" if pd.isna(writer.get("index")) else f" {writer['index']:.0f}")
    return name if pd.isna(writer.get("expert")) else name.replace("expert", f"expert {writer['expert']:.0f},")


def _band(axes: Axes, rows: pd.DataFrame, norm: LogNorm, readers: list[Place]) -> list[Axes]:
    """Draw the gains of norms below the axes, a row for each kind of projection behind them; mark those that read.

    Return the new axes; [] if the rows have no gains.
    """
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
    band.imshow(gains.clip(FAINTEST_GAIN), extent=(-0.5, gains.shape[1] - 0.5, len(reads) - 0.5, -0.5), **style)
    band.set_xlim(limits)
    for row, role in enumerate(reads):
        of_role = [place.written for place in readers if set(place.parts) <= set(ROLES[role])]
        single = [name for name in of_role if name != role] or of_role  # the whole role only if no part is known
        place = {"xycoords": ("axes fraction", "data"), "fontsize": "small", "va": "center"}
        if single:
            band.annotate(f"read by {', '.join(single)}", (1.01, row), **place)
    band.set_yticks(range(len(reads)), [GATES[role] for role in reads], fontsize="small")
    band.tick_params(axis="y", length=0)
    band.spines[:].set_visible(False)
    band.grid(False)
    band.set_xlabel("layer")
    axes.tick_params(axis="x", labelbottom=False)
    return [band]


def _draw_legends(ax: Axes | None, panels: np.ndarray, bands: list[Axes], norm: LogNorm) -> None:
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


SHOWN = 6  # writers of a feature in a table: by mean, and as many by value at the first position
ORDINARY = 6  # what exceeds so many times the median of random features stands out
WORTH = 0.05  # share of the feature's largest state from which on a sentence names a part
SHARE = 0.5  # share of a part from which on its single writer is named
WRITERS, TAKERS = 3, 2  # at most, in a sentence
LEAST = 0.005  # smaller terms are 0 in a table
HIDDEN, OPEN = 0.25, 0.5  # gain relative to the median: a norm hides a feature below HIDDEN, and passes it from OPEN on
BLOCKS = {"attention": "attention", "feed-forward": "the feed-forward block"}
STREAM_PLACES = {  # states of the residual stream, which no norm has scaled
    "value": "averages {} in the residual stream over positions after the first, {}",
    "first": "is {} in the residual stream at the first position {}",
}
METRICS = ("gate", "state", "rest")
WRITERS_AND_EXPERTS = ("origins.writer", "origins.expert")
OWN = (
    *("feature", "layer", "role", "norm", "writer", "expert", "index", "count", "value", "first", "magnitude", "at"),
    *("largest", "largest_positions", "largest_tokens"),
    *("median", "rank", "before", "behind", "first_before", "first_behind"),
)

PARTS_CAPTION = (
    "The largest contributions of attention, feed-forward blocks and embedding to each feature, in the order of "
    "layers: mean over positions after the first, value at the first position, and the main writer of each."
)
WRITERS_CAPTION = (
    "The heads, neurons and experts with the largest contributions to each feature, in the order of layers: mean over "
    "positions after the first, value at the first position, mean magnitude, and the later tokens on which the "
    "contribution is largest. The contribution of a neuron is its activation times its weight to the feature. All "
    "contributions add up to the state, up to {rest:.0e} of it."
)
OF_WHOLE_EXPERTS = " An expert is the sum of its neurons and its bias, and not counted beside them."
GATES_CAPTION = (
    "Norms before projections: gain at the feature, median |gain| and rank of the gain over all features, and the "
    "feature's mean before and after the norm."
)
LIFE_LINE_CAPTION = (
    "Life line of each feature: contributions of attention and feed-forward block in each layer (bars; a large one "
    "names the writer that makes half of it) and the state before each layer (line)"
)
OF_BAND = ", with the gain of the norms at the feature relative to their median (band)"
OF_READERS = (
    ". Right of the band: the projections that read the feature, so that the perplexity rises more without it there "
    "than without random features"
)

ACCOUNTS_CAPTION = (
    "Each feature before the layer where its mean over positions after the first is largest, beside the median "
    "magnitude of random features there; and the block that contributes most, with its contribution."
)


def _number(field: str) -> Form:
    return lambda row: "0" if abs(row[field]) < LEAST else amount(row[field])


PLACE = (("feature", "{feature:.0f}"), ("layer", lambda row: f"{row['layer']:.0f}" if row["layer"] >= 0 else MISSING))
TERM = (("mean", _number("value")), ("first position", _number("first")))
PART_COLUMNS = (
    *PLACE,
    ("part", "{part}"),
    *TERM,
    ("main writer (mean)", "{most}"),
    ("main writer (first)", "{first_most}"),
)
WRITER_COLUMNS = (
    *(*PLACE, ("writer", lambda row: writer_name(row)), *TERM, ("mean magnitude", _number("magnitude"))),
    ("largest on", lambda row: _listed_terms(row)),
)
GATE_COLUMNS = (
    *PLACE,
    ("norm", "{norm}"),
    ("gain", "{value:.4g}"),
    ("median", "{median:.3g}"),
    ("rank", "{rank:.0f}"),
    ("before", "{before:,.2f}"),
    ("after", "{behind:,.3g}"),
    ("before, first position", "{first_before:,.2f}"),
    ("after, first position", "{first_behind:,.3g}"),
)
ACCOUNT_COLUMNS = (
    ("model", "{model}"),
    ("variant", "{variant}"),
    ("feature", "{feature:.0f}"),
    ("before layer", "{layer:.0f}"),
    ("mean", _number("value")),
    ("random features", _number("ordinary")),
    ("main writer", lambda row: _place(row)),
    ("contribution", _number("written")),
)
WORDS = (  # columns of text
    *("model", "variant", "main writer"),
    *("part", "main writer (mean)", "main writer (first)", "writer", "largest on", "norm"),
)


def origins_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show the account of features of each model under each variant; rows of other metrics are left out."""
    sections = of_subjects(filter(is_of_writers, rows), partial(_section, every=rows))
    if len(sections) == 1:
        return sections[0]
    table = accounts_table(rows)
    several = Section("", rows, tables=[table])
    return together("Origins of features", [several, *(other._replace(printed="", findings=()) for other in sections)])


def is_of_writers(row: dict) -> bool:
    return row["metric"].startswith("origins.")


def accounts_table(rows: list[dict]) -> Table:
    """Make a table with a line for each account, of one model and variant, and feature."""
    accounts = grouped(filter(is_of_writers, rows), lambda row: (row["model"], row.get("variant", BASELINE))).values()
    features = pd.DataFrame(record for account in accounts for record in _summed_up(account))
    return Table.of("accounts", ACCOUNTS_CAPTION, ACCOUNT_COLUMNS, features, texts=WORDS)


def _summed_up(rows: list[dict]) -> Iterator[dict]:
    """Yield for each feature the layer of its largest mean, the state of random features there, and the main part.

    The main part is the one that contributes most before that layer.
    """
    frame = pd.DataFrame(rows)
    ordinary = frame[(frame["metric"] == "origins.ordinary") & (frame["part"] == "state")].set_index("layer")["value"]
    for feature, terms in frame[frame["feature"].notna()].groupby("feature", sort=False):
        states = terms[terms["metric"] == "origins.state"]
        peak = states.loc[states["value"].abs().idxmax()]
        parts = parts_of(terms).query("layer < @peak.layer")
        most = parts.loc[(parts["value"] * peak["value"]).idxmax()] if len(parts) else None
        yield {
            "model": short_name(rows[0]["model"]),
            "variant": rows[0].get("variant", BASELINE),
            "feature": feature,
            **{name: peak[name] for name in ("layer", "value")},
            "ordinary": ordinary.get(peak["layer"]),
            "part": most["part"],
            "part_layer": most["layer"],
            "written": most["value"],
        }


def _section(rows: list[dict], ending: str, every: list[dict]) -> Section:
    """Make the section of one model under one variant. every: rows, including those of other metrics."""
    frame = pd.DataFrame(rows)
    gates, states, rest = (frame[frame["metric"] == f"origins.{metric}"] for metric in METRICS)
    writers = frame[frame["metric"].isin(WRITERS_AND_EXPERTS)]
    parts = _with_largest_writers(parts_of(frame), writers)
    writers_caption = WRITERS_CAPTION.format(rest=rest["value"].max())
    if (writers["writer"] == "expert").any():
        writers_caption += OF_WHOLE_EXPERTS
    single = writers[writers["largest"].notna()]
    tables = [
        Table.of(f"parts{ending}", PARTS_CAPTION, PART_COLUMNS, parts, _largest(parts), texts=WORDS),
        Table.of(f"writers{ending}", writers_caption, WRITER_COLUMNS, _columns(writers), _largest(single), texts=WORDS),
    ]
    if len(gates):
        gates_table = Table.of(f"gates{ending}", GATES_CAPTION, GATE_COLUMNS, _columns(gates), texts=WORDS, folded=True)
        tables.append(gates_table)
    ablations = [row for row in every if row["metric"] == "perplexity" and row.get("model") == rows[0]["model"]]
    readers = ablations if rows[0].get("variant", BASELINE) == BASELINE else []
    read = readers_of([*rows, *readers])
    caption = LIFE_LINE_CAPTION + (OF_BAND + OF_READERS * any(read.values()) if len(gates) else "") + "."
    drawings = [Drawing.of(f"life_line{ending}", caption, life_line([*rows, *readers]))]
    findings = [finding._replace(at=f"{finding.at}{ending}") for finding in origins_findings(rows)][:FINDINGS]
    subject = subject_of(rows[0])
    further = {f"states{ending}": _columns(states)}
    explorer = origins_explorer(frame, subject, read)._replace(instead=drawings[0].name)
    title = f"Origins of features of {subject}"
    return Section(title, rows, tables, drawings, [], further, findings, [explorer])


def _listed_terms(row: Mapping) -> str:
    tokens, terms = row["largest_tokens"], row["largest"]
    return ", ".join(f"{token} {amount(term)}" for token, term in zip(tokens, terms, strict=True))


WRITTEN = Claim(
    "parts", "Feature {feature} {peak}: written mainly by {writers:listed}[[; removed by {takers:listed}]]."
)
SUPPRESSED = Claim(
    "gates",
    "The norms before {part} suppress feature {feature} in layers {layers:ranges} (gain at most {most:.2g}, median "
    "over features at least {least:.2g})[[; layer {opened[layer]} passes it ({opened[gain]:.2g}, median "
    "{opened[median]:.2g})]].",
)


def origins_findings(rows: list[dict]) -> Iterator[Finding]:
    """State for each feature which parts write and remove it, beyond random features, and which norms hide it."""
    frame = pd.DataFrame(filter(is_of_writers, rows))
    ordinary = frame[frame["metric"] == "origins.ordinary"]
    ordinary = ordinary.assign(layer=ordinary["layer"].fillna(BEFORE).astype(int))
    for feature, rows in frame[frame["feature"].notna()].groupby("feature", sort=False):
        parts = parts_of(rows)
        written = (_written(rows, parts, ordinary, *place) for place in STREAM_PLACES.items())
        for claim, records in ((WRITTEN, written), (SUPPRESSED, _hidden(rows))):
            yield from say_each(claim, filter(None, records), feature=int(feature))


def _place(row: Mapping) -> str:
    return row["part"] if row["part_layer"] == BEFORE else f"{row['part']} of layer {row['part_layer']}"


def _columns(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[[name for name in OWN if name in frame and frame[name].notna().any()]]


def _with_largest_writers(parts: pd.DataFrame, writers: pd.DataFrame) -> pd.DataFrame:
    """Return parts with the names of their writers with the largest means, after the first position and at it."""
    singles = single_writers(writers)
    most = {
        name: [writer_name(largest_of(singles, part, column)) for part in parts.to_dict("records")]
        for name, column in (("most", "value"), ("first_most", "first"))
    }
    return parts.assign(**most)


def _largest(frame: pd.DataFrame) -> pd.DataFrame:
    groups = [rows_of_feature for _, rows_of_feature in frame.groupby("feature", sort=False)]
    most = [group[column].abs().nlargest(SHOWN).index for group in groups for column in STREAM_PLACES]
    return frame.loc[sorted({index for indices in most for index in indices})]


def _standing_out(rows: pd.DataFrame, ordinary: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the states or parts that exceed `ORDINARY` times the same quantity of random features."""
    usual = ordinary[["layer", "part", column]].rename(columns={column: "usual"})
    both = rows.merge(usual, on=["layer", "part"])
    return both[both[column].abs() > ORDINARY * both["usual"]]


def _written(rows: pd.DataFrame, parts: pd.DataFrame, ordinary: pd.DataFrame, column: str, place: str) -> dict | None:
    """Return the fields of the claim `WRITTEN`; None if the feature does not stand out.

    They are the layer where it is largest, the parts that write it before, and the parts that remove it after.
    """
    states = rows[rows["metric"] == "origins.state"].assign(part="state")
    peak = states.loc[states[column].abs().idxmax()]
    if _standing_out(states.loc[[peak.name]], ordinary, column).empty:
        return None
    parts = _standing_out(parts, ordinary, column)
    parts, singles = parts[parts[column].abs() >= WORTH * abs(peak[column])], single_writers(rows)
    same, before = parts[column] * peak[column] > 0, parts["layer"] < peak["layer"]
    writers, takers = (
        [_contribution(singles, part, column) for part in _most(chosen_parts, column, count).to_dict("records")]
        for chosen_parts, count in ((parts[same & before], WRITERS), (parts[~same & ~before], TAKERS))
    )
    when = f"before layer {peak['layer']:.0f}" if peak["layer"] < len(states) - 1 else "after the last layer"
    about = {"peak": place.format(amount(peak[column]), when), "writers": writers, "takers": takers or None}
    return about if writers else None


def _most(parts: pd.DataFrame, column: str, count: int) -> pd.DataFrame:
    return parts.loc[parts[column].abs().nlargest(count).index].sort_values("layer", kind="stable")


def _contribution(singles: Singles, part: Mapping, column: str) -> str:
    value, largest = signed(part[column]), largest_of(singles, part, column)
    if part["layer"] == BEFORE:
        return f"the embedding ({value})"
    most = ""
    if largest is not None and largest[column] / part[column] >= SHARE:
        most = f", of which {writer_name(largest)} {signed(largest[column])}"
    return f"{BLOCKS[part['part']]} of layer {part['layer']} ({value}{most})"


def _hidden(rows: pd.DataFrame) -> Iterator[dict]:
    """Yield, for attention and feed-forward block, the layers whose norms hide the feature, and the next open one."""
    gates = rows[rows["metric"] == "origins.gate"]
    for role, part in GATES.items():
        of_role = [gate for gate in gates.to_dict("records") if role in gate["role"].split("+")]
        hidden = [gate for gate in of_role if abs(gate["value"]) < HIDDEN * gate["median"]]
        if hidden:
            passing = (gate for gate in of_role if abs(gate["value"]) >= OPEN * gate["median"])
            opened = next((gate for gate in passing if gate["layer"] > hidden[0]["layer"]), None)
            yield {
                "part": part,
                "layers": [int(gate["layer"]) for gate in hidden],
                "most": max(abs(gate["value"]) for gate in hidden),
                "least": min(gate["median"] for gate in hidden),
                "opened": opened and opened | {"gain": abs(opened["value"])},
            }


FEATURES = 8  # most features of an explorer
WRITERS_SHOWN = 6  # writers of a part: by mean, and as many by value at the first position
DIGITS = ".5g"  # format of a number


def origins_explorer(rows: pd.DataFrame, subject: str, readers: Mapping[str, Sequence[Place]]) -> Explorer:
    """Make an explorer of the contributions of parts of layers to features, with single writers, states and gates.

    rows: of the metric `origins`, of one model under one variant. subject: the name of both. readers: the places that
    read each feature, if measured.
    """
    # Only the columns that are shown, because each selection copies them; `count` is absent if every writer is named.
    rows = rows.reindex(columns=["metric", "part", *OWN])
    by_feature = [group for _, group in rows[rows["feature"].notna()].groupby("feature", sort=False)]
    content = {
        "places": [words for _, words in AT.values()],
        "bars": {
            part: {"color": COLORS[color], "pattern": pattern, "beside": beside}
            for part, (color, pattern, beside) in BARS.items()
        },
        "features": [_feature(group, readers) for group in by_feature[:FEATURES]],
        "left": len(by_feature[FEATURES:]),
    }
    return Explorer(f"Explore the writers of features of {subject}", content)


def _feature(rows: pd.DataFrame, readers: Mapping[str, Sequence[Place]]) -> dict:
    states, writers, gates = (rows[rows["metric"] == f"origins.{kind}"] for kind in ("state", "writer", "gate"))
    parts = parts_of(rows).to_dict("records")
    by_layer = dict(iter(writers.groupby(writers["layer"].fillna(BEFORE))))
    feature = int(rows["feature"].iloc[0])
    return {
        "feature": feature,
        "readers": [place.written for place in readers.get(str(feature), [])],
        "states": [_at_places(state) for state in states.to_dict("records")],
        "parts": [
            {
                "layer": part["layer"],
                "part": part["part"],
                "values": _at_places(part),
                "writers": _writers(by_layer[part["layer"]], part["part"]),
            }
            for part in parts
        ],
        "gates": [_gate(gate, part) for gate in gates.to_dict("records") for part in _read_by(gate)],
    }


def _writers(rows: pd.DataFrame, part: str) -> list[dict]:
    """Return the largest writers of a part of a layer, each with its main tokens; last, all others together."""
    rows = rows[rows["writer"].isin(WRITERS_OF[part])]
    known = rows[rows["count"].isna()]
    largest = {index for column, _ in AT.values() for index in known[column].abs().nlargest(WRITERS_SHOWN).index}
    writers = [
        {
            "name": writer_name(writer),
            "values": _at_places(writer),
            "magnitude": _short(writer["magnitude"]),
            "most": _largest_terms(writer) if writer["writer"] in SINGLE else [],
        }
        for writer in rows.loc[sorted(largest)].to_dict("records")
    ]
    others = rows.drop(index=largest)
    if len(others):
        count = int(others["count"].fillna(1).sum())
        writers.append(
            {"name": f"{count:,} others", "values": _at_places(others[["value", "first"]].sum()), "most": []}
        )
    return writers


def _largest_terms(writer: Mapping) -> list[list]:
    terms = zip(writer["largest_tokens"], writer["largest_positions"], writer["largest"], strict=True)
    return [[token, position, _short(term)] for token, position, term in terms]


def _read_by(gate: Mapping) -> list[str]:
    return [part for role, part in GATES.items() if role in gate["role"].split("+")]


def _gate(gate: Mapping, part: str) -> dict:
    return {
        "layer": int(gate["layer"]),
        "part": part,
        "norm": gate["norm"],
        "gain": _short(gate["value"]),
        "median": _short(gate["median"]),
        "rank": int(gate["rank"]),
        "before": [_short(gate["before"]), _short(gate["first_before"])],
        "behind": [_short(gate["behind"]), _short(gate["first_behind"])],
    }


def _at_places(values: Mapping) -> list[float]:
    return [_short(values[column]) for column, _ in AT.values()]


def _short(value: float) -> float:
    return float(f"{value:{DIGITS}}")
