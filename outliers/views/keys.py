"""The largest channels of queries, keys and values, as a map, a table, an explorer and sentences."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import itemgetter

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from outliers.metrics.records import AFTER, BEFORE, TINY
from outliers.show.axes import log_axis
from outliers.show.claims import Claim, say
from outliers.show.explorer import Explorer, map_of, of_maps
from outliers.show.maps import MOST_COLUMNS, Scale, map_on, number_above, pooled
from outliers.show.section import Context, Drawing, Finding, Section, of_subjects, subject_of, together
from outliers.show.style import HEAT, Panels, chosen, figure_function, panels_of
from outliers.show.tables import MISSING, Table, scattered
from outliers.show.value import RowsOrFrame, comparable_rows, grouped
from outliers.show.words import amount, count, signed

SIDES = {BEFORE: "as projections put them out", AFTER: "as attention multiplies them"}
KEYS = {  # panels of a map of channels
    "keys before": ("keys", BEFORE),
    "keys": ("keys", AFTER),
    "values before": ("values", BEFORE),
    "values": ("values", AFTER),
}
HEADS_NUMBERED = 16  # most heads with a label and a line between them
STANDS_OUT, OFTEN = 3, 0.1  # multiple of the median channel of a head; share of layers of a numbered channel
LEAST = 0.5  # of a map's scale, in multiples of the median; smaller values have the darkest colour


@figure_function
def key_map(rows: RowsOrFrame, *, role: str | None = None, ax: Axes | None = None) -> Panels:
    """Draw maps of the largest |key| and |value| by layer and channel, relative to the median channel of the head.

    Columns are the channels of the concatenated heads. Channels that exceed three times the median in a tenth of the
    layers are numbered above, within their head. All panels share one logarithmic scale, which begins at half the
    median; smaller values have the darkest colour. Lines separate up to 16 heads. If there are more than 1,024
    channels, neighbours share a column that shows their largest value.

    Example:
        >>> panels = outliers.plot.key_map(outliers.frame("results/kept/keys"))

    Args:
        rows: of the metric `keys`, of one model under one variant.
        role: the one panel to draw, "keys before", "keys", "values before" or "values"; by default one for each that
            was measured: the ones before exist where attention multiplies something else than projections output.
    """
    maps = {name: ratios for name, place in KEYS.items() if len(ratios := key_ratios(rows, *place))}
    roles = chosen("role", role, maps, ax)
    layers = len(next(iter(maps.values())))
    panels = panels_of(ax, len(roles), 1, (7.2, max(2, 0.6 + (0.9 + 0.025 * layers) * len(roles))), sharex=True)
    scale = _scale([maps[name].to_numpy() for name in roles], matplotlib.rcParams["image.cmap"])
    for axes, name in zip(panels.flat, roles, strict=True):
        values, heads = maps[name].to_numpy(), maps[name].columns.get_level_values("head")
        image = map_on(axes, values, scale)
        axes.set_title(f"{KEYS[name][0]}, {SIDES[KEYS[name][1]]}", loc="left")
        axes.set_ylabel("layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        _number_heads(axes, heads)
        often = ((values > STANDS_OUT).mean(0) >= OFTEN).nonzero()[0]
        ranked = often[np.argsort(-values.sum(0)[often], kind="stable")].tolist()
        number_above(axes, {place: maps[name].columns[place][1] for place in ranked}, values.shape[1])
    axes.set_xlabel("head, channel by channel", labelpad=1)
    bar = axes.figure.colorbar(image, ax=list(panels.flat), aspect=10 * len(roles), extend="min")
    bar.set_label("largest |x| over the median\nchannel's of the head, logarithmic")
    log_axis(bar.ax.yaxis, scale.norm.vmin, scale.norm.vmax)
    return panels[:, 0]


def _scale(ratios: Iterable[np.ndarray], colors: str) -> Scale:
    return Scale(LogNorm(LEAST, max(2, *map(np.nanmax, ratios)), clip=True), colormaps[colors], ", log scale")


def key_ratios(rows: RowsOrFrame, role: str, side: str) -> pd.DataFrame:
    """Return the largest |x| relative to the median channel of the head, by layer (index) and (head, channel)."""
    by_layer: dict[int, dict] = {}
    for row in comparable_rows(rows):
        if row["metric"] == "keys.head" and (row["role"], row["side"]) == (role, side):
            ratios = enumerate(np.array(row["magnitudes"]) / max(row["median"], TINY))
            by_layer.setdefault(row["layer"], {}).update({(row["head"], number): ratio for number, ratio in ratios})
    table = pd.DataFrame.from_dict(by_layer, orient="index").sort_index()
    return table.rename_axis(columns=["head", "channel"]) if len(table) else table


def _number_heads(axes: Axes, heads: pd.Index) -> None:
    starts = [place for place in range(len(heads)) if place == 0 or heads[place] != heads[place - 1]]
    for start in starts[1:] if len(starts) <= HEADS_NUMBERED else ():
        axes.axvline(start - 0.5, color="white", linewidth=0.4)
    step = -(-len(starts) // HEADS_NUMBERED)
    middles = [(start + end - 1) / 2 for start, end in pairwise([*starts, len(heads)])]
    axes.set_xticks(middles[::step], [heads[start] for start in starts[::step]])


TITLE = "Queries, keys and values of "
SHOWN = 4  # channels in the table, per role and side
CONSTANT = 0.9  # share of its mean square that the mean of a constant channel accounts for
MOST = 0.5  # share of a mean, or of a mean square, from which on a feature or bias is named
NAMED = 2  # features named for a channel in a table
WORDS = ("states", "main writers")

CAPTION = (
    "The largest channels of queries, keys and values: largest |x|, that of the median channel of the head, mean, and "
    "constancy, the share of the mean square that is due to the mean (100 % for a channel that is the same at all "
    "positions){bias}.{before} For keys, the main writers: the input features with the largest contributions (mean "
    "times weight) to the channel's mean."
)
OF_BIAS = "; and the share due to the bias of the projection"
OF_BEFORE = " Before: as the projection outputs them, where attention multiplies others, as after rotary embeddings."
BIAS_CAPTION = (
    "Biases of queries, keys and values by layer: norm, and squared norm as a share of the mean square of all "
    "channels; it exceeds 100 % where the contribution of the input cancels part of the bias."
)
MAP_CAPTION = (
    "Largest |x| of each channel of keys and values relative to the median channel of its head, by layer. Numbered: "
    f"channels above {count(STANDS_OUT)} times the median in a tenth of the layers."
)


def _states(row: Mapping) -> str:
    return f"{row['role']}, before" if row["side"] == BEFORE else row["role"]


def _written(row: Mapping) -> str:
    if not isinstance(row["terms"], list):  # NaN, except under variants that remove features
        return MISSING
    terms = zip(row["features"][:NAMED], row["terms"], strict=False)
    return ", ".join(f"{feature} {signed(term)}" for feature, term in terms)


PLACE = (("states", _states), ("layer", "{layer:.0f}"))
COLUMNS = (
    *PLACE,
    ("head", "{head:.0f}"),
    ("channel", "{channel:.0f}"),
    ("largest", "{value:.1f}"),
    ("median", "{median:.2f}"),
    ("mean", lambda row: signed(row["mean"])),
    ("constant (%)", scattered("constant", ".1f", 100)),
    ("bias (%)", scattered("bias_share", ".1f", 100)),
    ("main writers", _written),
)
BIASES = (*PLACE, ("norm", lambda row: amount(row["bias"])), ("share (%)", scattered("bias_share", ".1f", 100)))
OWN = (
    *("role", "side", "layer", "head", "channel", "position", "value", "median", "mean", "rms", "constant"),
    *("bias", "bias_share", "features", "terms"),
)


def keys_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show the channels of each model under each variant; rows of other metrics are left out."""
    sections = of_subjects(filter(is_of_keys, rows), _section)
    return sections[0] if len(sections) == 1 else together("Queries, keys and values", list(map(_titled, sections)))


def _titled(section: Section) -> Section:
    subject = section.title.removeprefix(TITLE)
    return section._replace(findings=[claim._replace(text=f"{subject}: {claim.text}") for claim in section.findings])


def is_of_keys(row: dict) -> bool:
    return row["metric"] == "keys" or row["metric"].startswith("keys.")


def _section(rows: list[dict], ending: str) -> Section:
    subject = subject_of(rows[0])
    channels, layers = _table_of(rows, "channel"), _table_of(rows, "layer")
    biased = layers[layers["bias"].notna()]
    columns = [column for column in COLUMNS if len(biased) or column[0] != "bias (%)"]
    largest = channels.sort_values("value", ascending=False, kind="stable").groupby(["role", "side"])
    chosen = largest.head(SHOWN).sort_values("side", ascending=False, kind="stable").sort_values("role", kind="stable")
    rotated = (channels["side"] == BEFORE).any()
    caption = CAPTION.format(bias=OF_BIAS if len(biased) else "", before=OF_BEFORE if rotated else "")
    tables = [Table.of(f"keys{ending}", caption, columns, channels.dropna(axis=1, how="all"), chosen, texts=WORDS)]
    if len(biased):
        data = biased.dropna(axis=1, how="all")
        tables.append(Table.of(f"biases{ending}", BIAS_CAPTION, BIASES, data, texts=WORDS, folded=True))
    drawings = [Drawing.of(f"key_map{ending}", MAP_CAPTION, key_map(rows))]
    findings = [finding._replace(at=f"{finding.at}{ending}") for finding in _findings(rows, channels, layers)]
    explorers = [keys_explorer(rows, subject)._replace(instead=drawings[0].name)]
    return Section(f"{TITLE}{subject}", rows, tables, drawings, findings=findings, explorers=explorers)


def _table_of(rows: list[dict], kind: str) -> pd.DataFrame:
    """Return the rows of channels, heads or layers as a table."""
    return pd.DataFrame(row for row in rows if row["metric"] == f"keys.{kind}").reindex(columns=list(OWN))


LARGEST = Claim(
    "keys",
    "Channel {channel} of head {head} in layer {layer} has the largest key entry, {value:amount}; the median channel "
    "of this head reaches {median:amount}.",
)
OF_LAYERS = Claim(
    "keys",
    "In {constant} of {layers} layers the largest channel of the projected keys is constant over positions (its mean "
    "accounts for at least {least:part} of its mean square)[[; of the keys that attention multiplies, in {after}]].",
)
BY_BIAS = Claim(
    "biases",
    "The key bias of layer {layer} has a norm of {bias:amount} (median over layers {median_bias:amount}) and accounts "
    "for {bias_share:part} of the mean square of these keys.",
)
WRITTEN = Claim(
    "keys",
    by="value",
    yes="Feature {feature} contributes most of the largest key channel of layer{layers:|s} {layers:ranges}: "
    "{term:signed} of a mean of {mean:signed} in channel {channel} of head {head} of layer {layer}.",
)
STANDING_OUT = Claim(
    "key_map",
    "{keys:Count} of {every_key:,} key channels and {values:count} of {every_value:,} value channels exceed "
    "{times:count} times the median channel of their head.",
)


def _findings(rows: list[dict], channels: pd.DataFrame, layers: pd.DataFrame) -> list[Finding]:
    """State the findings on channels, as far as they hold.

    They are the largest key entry; in how many layers the largest key channel is constant, if in most; the largest bias
    that accounts for most of its keys; the feature that writes most of the largest key channels; and how many channels
    stand out of their heads.
    """
    keys = channels[channels["role"] == "keys"]
    behind = keys[keys["side"] == AFTER].sort_values("value", ascending=False, kind="stable")
    first = [_first(table)["constant"] >= CONSTANT for table in (_of_projections(keys), behind)]
    constant, after = (int(constant_layers.sum()) for constant_layers in first)
    about = {"constant": constant, "layers": len(first[0]), "after": after if (keys["side"] == BEFORE).any() else None}
    about["least"] = CONSTANT
    biased = layers[(layers["role"] == "keys") & layers["bias"].notna()]
    by_bias = biased[biased["bias_share"] >= MOST].sort_values("bias", ascending=False, kind="stable")
    maps = [key_ratios(rows, *KEYS[name]).to_numpy() for name in ("keys", "values")]
    out, every = [int(np.sum(ratios > STANDS_OUT)) for ratios in maps], [ratios.size for ratios in maps]
    numbers = {"keys": out[0], "values": out[1], "every_key": every[0], "every_value": every[1], "times": STANDS_OUT}
    return [
        *say(LARGEST, behind.to_dict("records")),
        *say(OF_LAYERS, [about] * (2 * constant > len(first[0]))),
        *say(BY_BIAS, by_bias.to_dict("records"), median_bias=biased["bias"].median()),
        *writing_findings(rows)[:1],
        *say(STANDING_OUT, [numbers]),
    ]


def _first(keys: pd.DataFrame) -> pd.DataFrame:
    """Return the largest channel of each layer."""
    return keys.sort_values("value", ascending=False, kind="stable").groupby("layer").head(1)


def _of_projections(keys: pd.DataFrame) -> pd.DataFrame:
    """Return the channels of the projections' outputs: before the rotary embedding, or after it if there is none."""
    rotated = keys.loc[keys["side"] == BEFORE, "layer"]
    return keys[(keys["side"] == BEFORE) | ~keys["layer"].isin(rotated)]


def writing_findings(rows: list[dict]) -> list[Finding]:
    """State which features write most of the mean of constant largest key channels, features of most layers first."""
    channels = _table_of(rows, "channel")
    first = _first(_of_projections(channels[channels["role"] == "keys"]).dropna(subset=["terms"])).to_dict("records")
    first = [row | {"feature": row["features"][0], "term": row["terms"][0]} for row in first]
    led = [row for row in first if row["constant"] >= CONSTANT and row["term"] / row["mean"] >= MOST]
    of_features = sorted(grouped(led, itemgetter("feature")).values(), key=lambda led: -len(led))
    return [
        finding
        for channels_led in of_features
        for finding in say(WRITTEN, channels_led, layers=sorted(int(row["layer"]) for row in channels_led))
    ]


def keys_explorer(rows: list[dict], subject: str) -> Explorer:
    """Make an explorer of the largest |x| relative to the median channel of the head.

    Keys and values are shown by channel; queries, keys and values by head. rows: of the metric `keys`, of one model
    under one variant. subject: the name of both.
    """
    maps = [
        map_of(f"{role} {SIDES[side]}, by channel", "head:channel", _with_names(ratios), f"{role} by channel")
        for role, side in KEYS.values()
        if len(ratios := key_ratios(rows, role, side))
    ]
    frame = pd.DataFrame(row for row in rows if row["metric"] == "keys.head")
    frame["times"] = frame["value"] / frame["median"].clip(TINY)
    for (role, side), states in frame.groupby(["role", "side"], sort=False):
        table = states.pivot_table(index="layer", columns="head", values="times").rename(columns="head {}".format)
        maps.append(map_of(f"{role} {SIDES[side]}, by head", "head", table, f"{role} by head"))
    title, value = f"Explore queries, keys and values of {subject}", "largest |x| / median"
    scales = {"log": _scale([table["values"] for table in maps], HEAT)}
    return of_maps(title, maps, row="layer", value=value, choice="states", scales=scales)


def _with_names(table: pd.DataFrame) -> pd.DataFrame:
    """Name the columns (head, channel) of a table; many columns are pooled to the largest value of neighbours."""
    share = -(-table.shape[1] // MOST_COLUMNS)
    names = [f"{head}:{channel}" for head, channel in table.columns[::share]]
    return pd.DataFrame(pooled(table.to_numpy(), share), table.index, names)
