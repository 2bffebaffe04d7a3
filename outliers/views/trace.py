"""A trace as figures, tables and sentences: outlier features, massive activations, attention sinks, largest values."""

import functools
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from outliers.criterion import (
    FEW,
    LAYERS,
    MASSIVE,
    MASSIVE_RATIO,
    OF_EVERY_STACK,
    POSITIONS,
    RESIDUAL,
    ROUTER,
    SINK,
    role_of,
)
from outliers.errors import joined_names
from outliers.metrics.records import LIMITS
from outliers.models.names import short_name
from outliers.show.axes import log_axis, threshold
from outliers.show.claims import Claim, say
from outliers.show.explorer import CELLS, Explorer, map_of, of_maps
from outliers.show.legends import legend
from outliers.show.maps import FAINTEST, Scale, map_on, number_above
from outliers.show.section import Context, Drawing, Finding, Section, by_stack
from outliers.show.style import GREY, HEAT, SEQUENTIAL, Panels, chosen, color_of, figure_function, panels_of
from outliers.show.tables import MISSING, Table
from outliers.show.words import TokenNamer, amount, ranges
from outliers.views.emergence import column_of, emergence_table
from outliers.views.range import beyond_float16, place_of

if TYPE_CHECKING:
    import torch

    from outliers.tracing.excerpt import Excerpt
    from outliers.tracing.result import Trace

READERS = {
    "attn_in": "q, k, v",
    "attn_mid": "within the attention",
    "attn_out": "the attention output",
    "ffn_in": "the feed-forward layer",
    "ffn_mid": "within the feed-forward layer",
    "ffn_out": "the feed-forward output",
    "cross_in": "the queries of cross-attention",
    "cross_kv": "keys and values of cross-attention",
    "cross_out": "the output of cross-attention",
    ROUTER: "the router",
}
HEADS = "feature of the concatenated heads"
FEATURE_AXIS = {"attn_out": HEADS, "cross_out": HEADS, "ffn_out": "feed-forward unit"}  # others: "feature"
MAPPED = 0.998  # share of the values that a clipped scale distinguishes
COLORS = 1024
STEP = (0.5, 0.75)  # shade just below the threshold, and at it
LINES = 4
BESIDE = 2  # positions before the patches per line of a title


@figure_function
def heat_map(trace: "Trace", *, role: str | None = None, ax: Axes | None = None) -> Panels:
    """Draw maps of the largest |x| by layer and feature, on one logarithmic scale whose step at α marks outliers.

    Outlier features are numbered above the roles of the residual stream. The smallest hundredth of the values, such as
    zeros, has the darkest colour. If there are more than 1,024 features, neighbours share a column that shows their
    largest value.

    Example:
        >>> panels = outliers.plot.heat_map(outliers.trace(model, blocks, alpha=3))

    Args:
        trace: as `outliers.trace` returns it.
        role: the one panel to draw, "attn_in", "attn_out", "ffn_in" or "ffn_out"; by default one for each that was
            traced.
    """
    roles = chosen("role", role, trace.roles, ax)
    panels = panels_of(ax, len(roles), 1, (7.2, max(2, 0.6 + (1.15 + 0.01 * trace.layers) * len(roles))))
    largest = {role: trace.largest(role).numpy() for role in roles}
    scale = _scales(trace, largest.values(), matplotlib.rcParams["image.cmap"])["log"]
    outliers, stream = common_outlier_features(trace), stream_roles(trace)
    places = {place["role"]: place for place in trace.largest_values().to_dict("records")}
    for axes, (role, values) in zip(panels.flat, largest.items(), strict=True):
        image = map_on(axes, values, scale, trace.first_layer)
        title = f"{role}: into {_readers(trace, role)}"
        most = "at most {max:,.1f}: layer {layer}, feature {feature}".format(**places[role])
        if ax is None:
            axes.set_title(title, loc="left")
            axes.set_title(most, loc="right", fontsize="small")
        else:  # the caller's axes may be narrow
            axes.set_title(f"{title}\n{most}", loc="left", fontsize="medium")
        axes.set_xlabel(FEATURE_AXIS.get(role_of(role), "feature"), labelpad=1)
        axes.set_ylabel("layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        if role in stream and outliers:
            number_above(axes, dict(zip(outliers, outliers, strict=True)), values.shape[1])
    style = {"aspect": 10 * len(roles), "extend": "min", "extendfrac": 0.1 / len(roles)}
    bar = axes.figure.colorbar(image, ax=list(panels.flat), **style)
    bar.set_label(f"largest |x|, logarithmic;\nbelow {scale.norm.vmin:.2g} darkest")
    log_axis(bar.ax.yaxis, scale.norm.vmin, scale.norm.vmax)
    style = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", "fontsize": "small"}
    bar.ax.annotate(f"α = {trace.alpha:g}", (-0.2, trace.alpha), **style)
    return panels[:, 0]


def _bounds(trace: "Trace", largest: Iterable[np.ndarray]) -> tuple[float, float]:
    """Return the ends of a logarithmic scale that includes the threshold but not the faintest values, such as zeros."""
    values = np.concatenate([values.ravel() for values in largest])
    high = max(trace.alpha, values.max())
    low = np.quantile(values[values > 0], FAINTEST) if values.any() else high
    return min(low, trace.alpha / 2), high


def _scales(trace: "Trace", largest: Iterable[np.ndarray], colors: str) -> dict[str, Scale]:
    """Return the colour scales of maps of the largest values, each with a step at the threshold."""
    low, high = _bounds(trace, largest)
    clipped = max(trace.alpha, np.quantile(np.concatenate([values.ravel() for values in largest]), MAPPED))
    norms = {
        "log": (LogNorm(low, high, clip=True), ", log scale"),
        "linear": (Normalize(0, high), ""),
        "clipped": (Normalize(0, clipped), f", clipped at {clipped:.3g}"),
    }
    step = f", with a step at α = {trace.alpha:g}"
    return {
        name: Scale(norm, _lighter_from(norm(trace.alpha), colormaps[colors]), note + step)
        for name, (norm, note) in norms.items()
    }


def _lighter_from(share: float, colors: Colormap) -> ListedColormap:
    """Return a colour map with a step at this share of its scale."""
    count = round(share * COLORS)
    shades = np.concatenate([np.linspace(0, STEP[0], count), np.linspace(STEP[1], 1, COLORS - count)])
    return ListedColormap(colors(shades))


def _readers(trace: "Trace", role: str) -> str:
    """Describe the readers of a role in words if all layers attend in one way, otherwise by their modules' names."""
    if role in READERS and trace.heads:
        return READERS[role]
    paths = chain.from_iterable(trace.modules.get(role, ()))
    return ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths)) or READERS[role_of(role)]


def stream_roles(trace: "Trace") -> list[str]:
    """Return the traced roles whose features are those of the residual stream."""
    from outliers.tracing.statistics import ON_STREAM

    return [role for role in ON_STREAM if role in trace.roles]


def common_outlier_features(trace: "Trace") -> list[int]:
    """Return the outlier features, the most common first."""
    return trace.outlier_features()["feature"].tolist() if stream_roles(trace) else []


def most_common(trace: "Trace", count: int) -> list[int]:
    """Return at most `count` outlier features, the most common first; if there is none, the nearest feature."""
    return common_outlier_features(trace)[:count] or trace.features()["feature"].tolist()[:1]


def magnitudes(trace: "Trace") -> "torch.Tensor":
    """Return the largest |x| over layers, (positions, features), averaged over sequences."""
    by_role = [trace.statistics[f"{role}.magnitude"] for role in stream_roles(trace)]
    sequences = trace.statistics["text.sequences"][:, None]  # number of sequences that reach each position
    return functools.reduce(lambda first, second: first.maximum(second), by_role) / sequences


@figure_function
def magnitude_by_position(trace: "Trace", *, ax: Axes | None = None) -> Axes:
    """Draw the largest |x| over layers at each position, averaged over sequences.

    Lines are the most common outlier features (without any, the feature closest to the criterion) and the median
    feature.

    Example:
        >>> axes = outliers.plot.magnitude_by_position(outliers.trace(model, blocks, alpha=3))

    Args:
        trace: as `outliers.trace` returns it, with roles of the residual stream.
    """
    means, features = magnitudes(trace), most_common(trace, LINES)
    axes = panels_of(ax, 1, 1, (5.2, 3.0)).item()
    styles = zip(features, ("black", "blue", "orange", "green"), ("-", "--", "-.", ":"), strict=False)
    for feature, color, line in styles:
        axes.plot(means[:, feature], color=color_of(color), linestyle=line, label=f"feature {feature}")
    axes.plot(means.median(1).values, color=GREY, label="median feature")
    threshold(axes, trace.alpha)
    axes.set(xlabel="position in the sequence (tokens)", ylabel="largest |x| over the layers", ylim=(0, None))
    legend(ax, axes, axes.get_legend_handles_labels()[0], "upper center", 3)
    return axes


@figure_function
def patch_map(trace: "Trace", *, ax: Axes | None = None) -> Panels:
    """Draw the largest |x| over layers at each patch, averaged over pictures, as a map of the picture.

    Panels are the most common outlier features (without any, the feature closest to the criterion). Titles list the
    positions before the patches.

    Args:
        trace: as `outliers.trace` returns it for a vision model with `tokens`, with roles of the residual stream.
    """
    from outliers.tracing.tokens import before_patches, patch_grid

    means, (rows, columns) = magnitudes(trace), patch_grid(trace.names)
    features, names = most_common(trace, LINES if ax is None else 1), before_patches(trace.names)
    panels = panels_of(ax, 1, len(features), (2.6 * len(features), 2.9)).ravel()
    high = means[:, features].max().item()
    for axes, feature in zip(panels, features, strict=True):
        means_of_patches = means[len(means) - rows * columns :, feature].reshape(rows, columns)
        image = axes.imshow(means_of_patches, cmap=SEQUENTIAL, vmin=0, vmax=high)
        axes.set(xlabel="column of patches", ylabel="row of patches" if axes is panels[0] else "")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        before = [f"{name} {value:.1f}" for name, value in zip(names, means[:, feature], strict=False)]
        lines = [", ".join(before[start : start + BESIDE]) for start in range(0, len(before), BESIDE)]
        axes.set_title("\n".join([f"feature {feature}", *lines]), loc="left", fontsize="small")
    panels[0].figure.colorbar(image, ax=list(panels), label="largest |x| over the layers", shrink=0.7)
    return panels if ax is None else panels.item()


@figure_function
def sorted_profile(trace: "Trace", *, role: str | None = None, ax: Axes | None = None) -> Panels:
    """Draw the largest |x| of each feature, sorted, one line per layer: outliers stand above the rest at the left.

    The axes are logarithmic; the smallest hundredth of the values lies below them.

    Example:
        >>> panels = outliers.plot.sorted_profile(outliers.trace(model, blocks, alpha=3))

    Args:
        trace, role: as for `heat_map`.
    """
    roles = chosen("role", role, trace.roles, ax)
    largest = {role: trace.largest(role).sort(1, descending=True).values.numpy() for role in roles}
    low, high = _bounds(trace, largest.values())
    columns = min(2, len(roles))
    rows = -(-len(roles) // columns)
    panels = panels_of(ax, rows, columns, (3.6 * columns, 0.4 + 2.2 * rows)).ravel()
    for axes in panels[len(roles) :]:
        axes.remove()
    panels = panels[: len(roles)]
    first = trace.first_layer
    shades = ScalarMappable(Normalize(first, first + max(trace.layers - 1, 1)), SEQUENTIAL)
    for axes, (role, profiles) in zip(panels, largest.items(), strict=True):
        ranks = range(1, profiles.shape[1] + 1)
        for layer, profile in enumerate(profiles, first):
            axes.plot(ranks, profile, color=shades.to_rgba(layer))
        threshold(axes, trace.alpha)
        axes.set(xscale="log", yscale="log", ylim=(low, 1.5 * high))
        axes.set(xlabel="rank of the feature", ylabel="largest |x| of the feature")
        axes.set_title(f"{role}: into {_readers(trace, role)}", loc="left")
        log_axis(axes.xaxis, 1, profiles.shape[1])
        log_axis(axes.yaxis, low, high)
    style = {"ticks": MaxNLocator(integer=True), "aspect": 20 * rows}
    axes.figure.colorbar(shades, ax=list(panels), label="layer", **style)
    return panels


SHOWN = 5  # rows shown of long tables
FEATURES_SHOWN = 20
CARRIED, MASSIVE_CARRIED = 3, 2  # features whose tokens are shown: outlier features, and those of massive activations
STRONGEST, WEAKEST = 5, 3  # tokens or contexts of a feature


def trace_rows_section(rows: list[dict], context: Context) -> Section:
    """Show the trace that an experiment keeps in a folder."""
    from outliers.runs.traces import EXCERPT, file_of_stack, saved_excerpt  # these import torch
    from outliers.text.tokens import namer_of
    from outliers.tracing.requests import STEM
    from outliers.tracing.result import Trace

    experiment, folder, _ = context
    if not any(row["metric"] == "count" for row in rows):  # the trace failed
        return Section(f"Outlier features of {short_name(experiment.model)}", rows)
    names = namer_of(experiment.model, experiment.revision)

    def of_stack(stack: str, rows: list[dict]) -> Section:
        trace = Trace.load(folder / file_of_stack(STEM, stack))
        return traced_section(trace, rows, names, saved_excerpt(folder / file_of_stack(EXCERPT, stack), trace))

    return by_stack(rows, "stack", of_stack)


def traced_section(trace: "Trace", rows: list[dict], names: TokenNamer, excerpt: "Excerpt | None" = None) -> Section:
    """Show a trace: outlier features, row of Table 4, largest inputs, massive activations, attention sinks, figures.

    names: a function from token id to name, see `outliers.text.tokens`. excerpt: of the text, if one was kept.
    """
    whole = [row for row in rows if "." not in row["metric"]]
    further = {
        "features_by_layer": trace.features(by="layer"),
        "hidden_states": trace.hidden_states().merge(trace.hooks()),
        "largest_by_layer": _with_names(trace.largest_values(by="layer"), names).merge(trace.hooks()),
        "massive_activations": _with_names(trace.massive_activations(), names),
    }
    if trace.heads:
        further |= {
            "attention_sinks": trace.attention_sinks(),
            "sink_tokens": _with_names(trace.sink_tokens(), names),
        }
    largest = Table.of("largest", LARGEST_CAPTION, LARGEST, _largest_inputs(trace, names), texts=2)
    rare = [_massive(further["massive_activations"]), _sinks(trace, further)]
    tables = [table for table in (_features(trace), emergence_table(whole), largest, *rare) if isinstance(table, Table)]
    if trace.experts:
        tables.append(_experts(_with_names(trace.expert_shares(), names)))
    tables += _tokens(trace)
    notes = [note for note in rare if isinstance(note, str)]
    of_experts = ("ffn_out",) if trace.experts else ()  # of each expert by itself, in the table of experts
    absent = [role for role in OF_EVERY_STACK if role not in (*trace.roles, *of_experts)]
    if absent and not trace.cross:
        notes.insert(0, f"No projection reads {' or '.join(absent)}.")
    for role in trace.roles:
        if len(layers := trace.layers_with(role)) < trace.layers:
            only = f"layer {layers[0]}" if len(layers) == 1 else f"layers {ranges(layers)}"
            notes.append(f"Only {only} of {trace.layers} have the role {role}.")
    captions = CAPTIONS | (PATCHES if _is_of_pictures(trace) else {})
    drawings = [Drawing.of(draw.__name__, caption, draw(trace)) for draw, caption in captions.items()]
    findings = trace_findings(trace, {column_of(row): row["value"] for row in whole}, names)
    return Section(
        f"Outlier features of {short_name(rows[0]['model'])}",
        rows,
        tables,
        drawings,
        notes,
        further,
        findings,
        [trace_explorer(trace, excerpt, names)],
    )


def _is_of_pictures(trace: "Trace") -> bool:
    from outliers.tracing.tokens import PATCH  # imports torch

    return any(kind == PATCH for _, kind in trace.names.values())


def _with_names(table: pd.DataFrame, names: TokenNamer) -> pd.DataFrame:
    return table.assign(token_text=[names(token) for token in table["token"]])


def _largest_inputs(trace: "Trace", names: TokenNamer) -> pd.DataFrame:
    largest = _with_names(trace.largest_values(), names)
    return largest.assign(readers=[_readers(trace, role) for role in largest["role"]])


def _features(trace: "Trace") -> Table:
    features, outliers = trace.features(), trace.outlier_features()
    heading = f"Outlier features: {len(outliers)}" if len(outliers) else "No outlier feature; the nearest ones"
    caption = f"{heading} (|x| ≥ {trace.alpha:g} in ≥ {100 * LAYERS:g} % of layers "
    caption += f"and ≥ {100 * POSITIONS:g} % of positions)"
    if len(outliers) > FEATURES_SHOWN:
        caption += f"; the {FEATURES_SHOWN} most common"
    if len(outliers) > FEW * len(features):
        caption += (
            f". More than half of the {len(features):,} features meet the criterion, as in models whose norms have "
            "large gains: at this α it does not discriminate; try a larger --alpha"
        )
    rows_shown = outliers.head(FEATURES_SHOWN) if len(outliers) else features.head(3)
    return Table.of("features", f"{caption}. {OF_FEATURES}", FEATURES, features, rows_shown, texts=0)


def _massive(every: pd.DataFrame) -> Table | str:
    rule = f"|x| > {MASSIVE:g} and at least {MASSIVE_RATIO:,.0f} times the median |x| of a layer's output"
    table = every[every["massive"] > 0]
    if table.empty:
        most = every.loc[every["value"].abs().idxmax()].to_dict()
        return (
            f"No massive activation in the residual stream ({rule}): its largest entry is {amount(most['value'])}, "
            f"after layer {most['layer']} in feature {most['feature']}, at position {most['position']}, token "
            f"{most['token_text']}."
        )
    places = table.assign(largest=table["value"].abs()).groupby(["feature", "position", "token_text"], sort=False)
    rows_shown = places.agg(
        layers=("layer", lambda layers: ranges(layers.tolist())),
        massive=("massive", "mean"),
        ratio=("ratio", "mean"),
        largest=("largest", "max"),
    )
    rows_shown = rows_shown.sort_values("largest", ascending=False, kind="stable").head(SHOWN).reset_index()
    caption = (
        f"Massive activations in the residual stream ({rule}): the layers after which they occur; their number in a "
        "sequence and its ratio of the largest to the median |x|, both on average; the largest of all with its place."
    )
    return Table.of("massive_activations", caption, MASSIVE_PLACES, every, rows_shown)


def _sinks(trace: "Trace", further: Mapping[str, pd.DataFrame]) -> Table | str:
    if not trace.heads:
        return "No attention sinks: not every layer has attention, with as many heads as the others."
    every, tokens = further["attention_sinks"], further["sink_tokens"]
    received = f"more than {SINK:g} of a head's attention, on average over the queries that can see it"
    rule = f"a position that receives {received}"
    sinks = every[every["share"] > 0].sort_values("share", ascending=False, kind="stable").head(SHOWN)
    if sinks.empty:
        return f"No attention sink ({rule})."
    carriers = ", ".join(f"{row['token_text']} ({row['share']:.0%})" for row in tokens.head(SHOWN).to_dict("records"))
    caption = (
        f"Attention sinks ({rule}; the last positions have few queries): share of (layer, head) pairs, averaged over "
        f"sequences. Most common tokens at sinks: {carriers}."
    )
    return Table.of("attention_sinks", caption, SINKS, every, sinks, texts=0)


def _experts(every: pd.DataFrame) -> Table:
    rows = []
    for layer, of_layer in every.groupby("layer"):
        ordered = of_layer.sort_values("share", ascending=False, kind="stable")
        ends = zip(("most", "least"), ordered.iloc[[0, -1]].to_dict("records"), strict=True)
        row = {f"{end}_{name}": record[name] for end, record in ends for name in ("expert", "share")}
        row |= of_layer.loc[of_layer["max"].idxmax(), ["max", "unit"]].to_dict()
        row |= {"of_max": of_layer.loc[of_layer["max"].idxmax(), "expert"]}
        row |= of_layer.loc[of_layer["value"].abs().idxmax(), ["value", "feature"]].to_dict()
        row |= {"of_value": of_layer.loc[of_layer["value"].abs().idxmax(), "expert"]}
        rows.append({"layer": layer, "even": of_layer["share"].mean(), "unused": _unused(of_layer), **row})
    return Table.of("experts", EXPERTS_CAPTION, EXPERTS, every, pd.DataFrame(rows), texts=0)


def _unused(of_layer: pd.DataFrame) -> str:
    return ranges(of_layer[of_layer["share"] == 0]["expert"].tolist()) or MISSING


def _tokens(trace: "Trace") -> list[Table]:
    if not trace.names:
        return []
    carried = _features_with_tokens(trace)
    types, tokens, contexts = (_of_carried(trace, carried, by) for by in ("type", "token", "position"))
    extremes = [_extremes(group) for _, group in tokens[tokens["token"] >= 0].groupby(["feature", "role"], sort=False)]
    around = [
        part
        for _, group in contexts.groupby(["feature", "role"], sort=False)
        for part in (
            group[group["extreme"] == "strongest"].head(STRONGEST),
            group[group["extreme"] == "weakest"].head(WEAKEST)[::-1],
        )
    ]
    return [
        Table.of("token_types", TYPES_CAPTION, TYPES, types, texts=3),
        Table.of("tokens", TOKENS_CAPTION, TOKENS, tokens, pd.concat(extremes), texts=4),
        Table.of("contexts", CONTEXTS_CAPTION, CONTEXTS, contexts, pd.concat(around), texts=3),
    ]


def _features_with_tokens(trace: "Trace") -> list[tuple[int, str | None]]:
    """Choose the features whose tokens are shown, each with its `role` for `Trace.tokens`."""
    features = most_common(trace, CARRIED)
    largest = trace.massive_activations().sort_values("value", key=abs, ascending=False, kind="stable")
    massive = largest[largest["massive"] > 0]["feature"].unique().tolist()[:MASSIVE_CARRIED]
    massive = massive or largest["feature"].tolist()[:1]
    return [*((feature, None) for feature in features), *((feature, "residual") for feature in massive)]


def _of_carried(trace: "Trace", carried: list[tuple[int, str | None]], by: str) -> pd.DataFrame:
    tables = []
    for feature, role in carried:
        table = trace.tokens(feature, by, role)
        table.insert(0, "feature", feature)
        table.insert(1, "role", role or "+".join(stream_roles(trace)))
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _extremes(table: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([table.head(STRONGEST), table.iloc[STRONGEST:].tail(WEAKEST)])


# Tables: header and form of each column

PLACE = (("feature", "{feature}"), ("position", "{position}"), ("token", "{token_text}"))
CARRIER = (("feature", "{feature}"), ("in", "{role}"))
MAGNITUDES = (("positions", "{share:.2%}"), ("mean |x|", "{mean:,.1f}"), ("max |x|", "{max:,.1f}"))
FEATURES = (
    ("feature", "{feature:.0f}"),
    ("layers", "{layers:.0%}"),
    ("positions", "{positions:.1%}"),
    ("of all states", "{positions_mean:.2%}"),
    ("values", "{hits:.0f}"),
    ("one-sided", lambda row: "yes" if row["one_sided"] else "no"),
    *((name, f"{{{name}:.1f}}") for name in ("q1", "median", "q3")),
    ("max |x|", "{max:.1f}"),
)
OF_FEATURES = (
    "Columns: the share of layers, of positions, and of all (hidden state, position) pairs with such a value; the "
    "number of these values, whether all have one sign, and their quartiles."
)
LARGEST = (
    ("role", "{role}"),
    ("goes into", "{readers}"),
    ("max |x|", "{max:,.1f}"),
    ("layer", "{layer}"),
    *PLACE,
)
MASSIVE_PLACES = (
    ("layers", "{layers}"),
    ("in a sequence", "{massive:.2g}"),
    ("max / median", "{ratio:,.0f}"),
    ("max |x|", "{largest:,.0f}"),
    *PLACE,
)
EXPERTS = (
    ("layer", "{layer}"),
    ("even", "{even:.1%}"),
    ("most chosen", "{most_expert:.0f} ({most_share:.1%})"),
    ("least chosen", "{least_expert:.0f} ({least_share:.1%})"),
    ("chosen by none", "{unused}"),
    ("largest unit", "{max:,.1f} (expert {of_max:.0f}, unit {unit:.0f})"),
    ("largest addition", "{value:,.1f} (expert {of_value:.0f}, feature {feature:.0f})"),
)
SINKS = (("position", "{position}"), ("(layer, head) pairs", "{share:.1%}"))
TYPES = (*CARRIER, ("type of token", "{type}"), *MAGNITUDES)
TOKENS = (*CARRIER, ("token", "{token_text}"), ("type", "{type}"), *MAGNITUDES)
CONTEXTS = (
    *CARRIER,
    ("context", lambda row: row["context"].strip()),
    ("|x|", "{magnitude:,.1f}"),
    ("position", "{position}"),
)
EXPERTS_CAPTION = (
    "Experts: the share of all tokens that the router sent to the most and to the least chosen expert of each layer; "
    "even: the mean over experts. Largest unit: the largest input of a second projection; largest addition: "
    "the largest number that an expert adds to the residual stream."
)
LARGEST_CAPTION = (
    "The largest input of each kind of projection, which sets the scale of per-tensor quantization. The criterion "
    "considers attn_in and ffn_in only. The features of attn_out are those of the concatenated heads; the features of "
    "ffn_out are the feed-forward units."
)
TYPES_CAPTION = (
    "Types of tokens that carry a feature. |x| at a position is the maximum over layers: of the inputs of projections "
    "or, for the residual stream, of the outputs of layers."
)
TOKENS_CAPTION = (
    f"Up to {STRONGEST} tokens with the largest mean |x| of a feature and up to {WEAKEST} with the smallest, without "
    "position 0."
)
CONTEXTS_CAPTION = (
    f"Up to {STRONGEST} positions where a feature is strongest and up to {WEAKEST} where it is weakest, without "
    "position 0; the token stands between « and »."
)
CAPTIONS = {
    heat_map: "Largest |x| of each feature in each layer; the colour scale has a step at α.",
    magnitude_by_position: "Magnitude by position in the sequence, averaged over sequences.",
    sorted_profile: "Largest |x| of each feature, sorted; one line per layer. The smallest values are cut off.",
}
PATCHES = {
    patch_map: "Places of the most common outlier features in a picture: the largest |x| over layers at each patch, "
    "averaged over pictures. Above: the positions before the patches."
}


OUTLIERS = Claim(
    "features",
    yes="{number:Count} of {every:,} features {number:is an outlier feature:|are outlier features; the most common is} "
    "feature {feature}, which reaches |x| ≥ {alpha:g} in {layers:part} of layers and {positions:part} of positions[[, "
    "with a median of {median:amount} in what projections read]].",
    no="{number:,} of {every:,} features meet the criterion at |x| ≥ {alpha:g}: it does not discriminate.",
)
NEAREST = Claim(
    "features",
    yes="None of {every:,} features is an outlier feature: the nearest, feature {feature}, reaches |x| ≥ {alpha:g} in "
    "{layers:part} of layers ({required[0]:.0%} required) and {positions:part} of positions ({required[1]:.0%} "
    "required).",
    no="None of {every:,} features is an outlier feature: no value reaches |x| ≥ {alpha:g}; the largest is "
    "{max:amount}, in feature {feature}.",
)
LARGEST_INPUT = Claim(
    "largest",
    "The largest input of a projection is {max:amount}: feature {feature} of layer {layer}'s {role}, at position "
    "{position}, token {called}[[; the largest of {beside[role]} is {beside[max]:amount}]].",
)
MASSIVE_AFTER = Claim(
    "massive_activations",
    by="most",
    yes="The residual stream has massive activations after layer{layers:|s} {layers:ranges}, up to {most:amount} in "
    "feature {feature} at position {position}, token {called}.",
)
SINK_AT = Claim("attention_sinks", "Position {position} is an attention sink for {share:part} of (layer, head) pairs.")
SOFTMAX = Claim(
    "table4",
    "The mean top-1 softmax probability of the attention is {top1_softmax:.1%}[[; with outlier features set to zero it "
    "is {top1_softmax_without:.1%}]].",
)
EXPERT = Claim(
    "experts",
    by="share",
    yes="Expert {expert} of layer {layer} gets {share:part} of the tokens, where an even share is {even:part}; [[no "
    "token chose expert{number:|s} {unused}]][[{none}]].",
)

CARRIER_EXPERT = Claim(
    "experts",
    by="magnitude",
    yes="Expert {expert} of layer {layer} adds {magnitude:amount} to feature {feature} at position {position}, token "
    "{called}[[; no other expert adds more than {next[magnitude]:amount}]].",
)


def trace_findings(trace: "Trace", metrics: Mapping[str, float], names: TokenNamer) -> list[Finding]:
    """State the findings of a trace: outlier features, largest inputs, massive activations, attention sinks, experts.

    metrics: the model's row of Table 4. names: a function from token id to name.
    """
    magnitudes = [*_largest(trace, names), *_range(trace), *_massive_finding(trace, names)]
    softmax = say(SOFTMAX, [metrics] if "top1_softmax" in metrics else [])
    return [*_outliers(trace), *magnitudes, *_sink(trace), *softmax, *_expert(trace, names)]


def _outliers(trace: "Trace") -> list[Finding]:
    every, outliers = trace.features(), trace.outlier_features()
    about = {"number": len(outliers), "every": len(every), "alpha": trace.alpha, "required": (LAYERS, POSITIONS)}
    if len(outliers):
        return say(OUTLIERS, outliers.head(1).to_dict("records"), len(outliers) <= FEW * len(every), **about)
    return say(NEAREST, every.head(1).to_dict("records"), bool(every["hits"].iloc[0]), **about)


def _largest(trace: "Trace", names: TokenNamer) -> list[Finding]:
    """State the largest input of all projections, and the largest one among the roles of the criterion."""
    from outliers.tracing.result import STREAM  # imports torch

    most, *others = trace.largest_values().sort_values("max", ascending=False).to_dict("records")
    beside = None if most["role"] in STREAM else next((row for row in others if row["role"] in STREAM), None)
    return say(LARGEST_INPUT, [most], beside=beside, called=names(int(most["token"])))


def _range(trace: "Trace") -> list[Finding]:
    """State the largest value of all, if it is beyond float16."""
    inputs = trace.largest_values(by="layer")
    states = trace.massive_activations().assign(role=RESIDUAL)
    most = max([*inputs.to_dict("records"), *states.to_dict("records")], key=lambda row: abs(row["value"]))
    if abs(most["value"]) <= LIMITS["float16"]:
        return []
    at = "massive_activations" if most["role"] == RESIDUAL else "largest"
    return [Finding(f"{beyond_float16(abs(most['value']), place_of(most))}.", at)]


def _massive_finding(trace: "Trace", names: TokenNamer) -> list[Finding]:
    massive = trace.massive_activations().query("massive > 0")
    rows = massive.assign(most=massive["value"].abs(), called=massive["token"].map(names)).to_dict("records")
    return say(MASSIVE_AFTER, rows, layers=massive["layer"].tolist())


def _sink(trace: "Trace") -> list[Finding]:
    """State the position that is a sink for most heads, unless it is in the second half, which few queries see."""
    if not trace.heads:
        return []
    shares = trace.attention_sinks()
    most = shares.loc[shares["share"].idxmax()].to_dict()
    return say(SINK_AT, [most] if most["share"] and most["position"] <= len(shares) / 2 else [])


def _expert(trace: "Trace", names: TokenNamer) -> list[Finding]:
    """State which experts no token chose, the share of the most chosen one, and the one that adds a massive value."""
    if not trace.experts:
        return []
    shares = trace.expert_shares()
    unused = shares[shares["share"] == 0]
    of_layers = [f"{_unused(of_layer)} in layer {layer}" for layer, of_layer in unused.groupby("layer")]
    none = {"number": len(unused), "unused": joined_names(of_layers)} if of_layers else {"none": "none is idle"}
    rows = shares.assign(magnitude=shares["value"].abs(), called=shares["token"].map(names)).to_dict("records")
    massive = bool(shares["value"].abs().max() > MASSIVE)
    carried = say(CARRIER_EXPERT, rows, massive)
    return [*say(EXPERT, rows, even=shares["share"].mean(), **none), *carried]


OF_STACK = {
    "": "",
    "encoder": " of the encoder",
    "decoder": " of the decoder",
    "cross": " of the encoder as cross-attention reads them",
}


def trace_explorer(trace: "Trace", excerpt: "Excerpt | None", names: TokenNamer) -> Explorer:
    """Make an explorer with a map of the largest |x| by layer and feature for each role.

    If an excerpt was kept, the explorer also shows the text at its features.

    names: a function from token id to name.
    """
    from outliers.tracing.excerpt import features_to_show  # imports torch

    marked = (
        {role: places.tolist() for role, places in excerpt.features.items()} if excerpt else features_to_show(trace)
    )
    stream = stream_roles(trace)
    largest = {role: trace.largest(role).numpy() for role in trace.roles}
    maps = [
        map_of(role, "feature" if role in stream else f"feature of {role}", values)
        | {"said": f"into {_readers(trace, role)}", "group": "stream" if role in stream else role}
        | {"marked": marked[role], "text": _text(excerpt, role)}
        for role, values in largest.items()
    ]
    return of_maps(
        f"Explore the hidden states{OF_STACK[trace.stack]}",
        maps,
        row="layer",
        value="largest |x|",
        choice="role",
        scales=_scales(trace, largest.values(), HEAT),
        instead="heat_map",
        first=trace.first_layer,
        positions=_positions(trace, stream, marked),
        tokens=[_bare(names(token)) for token in excerpt.tokens.tolist()] if excerpt else None,
    )


def _positions(trace: "Trace", stream: list[str], marked: dict[str, list[int]]) -> dict[str, dict]:
    """Return the largest |x| over layers at each position, averaged over sequences.

    Wide models have only the features that the explorer marks.
    """
    if not stream:
        return {}
    means = magnitudes(trace).numpy()
    features = None if means.size <= CELLS else marked[stream[0]]
    return {"stream": {"features": features, "values": means if features is None else means[:, features]}}


def _text(excerpt: "Excerpt | None", role: str) -> dict | None:
    if excerpt is None:
        return None
    return {"features": excerpt.features[role].tolist(), "values": excerpt.values[role].float().numpy()}


def _bare(name: str) -> str:
    return name[1:-1] if len(name) > 2 and name[0] == name[-1] and name[0] in "'\"" else name
