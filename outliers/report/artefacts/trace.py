"""What a trace shows."""

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from outliers.criterion import FEW, LAYERS, MASSIVE, MASSIVE_RATIO, POSITIONS, SINK
from outliers.models.names import short_name
from outliers.plot.emergence import metric_of
from outliers.plot.trace import READERS, heat_map, magnitude_by_position, outliers_of, sorted_profile, stream_roles
from outliers.report.artefacts.table4 import emergence_table
from outliers.report.explorer.trace import trace_explorer
from outliers.report.findings.trace import trace_findings
from outliers.report.findings.words import ranges
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, Table
from outliers.specification.kinds import OneModel

if TYPE_CHECKING:
    from outliers.tracing.excerpt import Excerpt
    from outliers.tracing.result import Trace

FEATURES = ["feature", "layers", "positions", "pos. mean", "hits", "one-sided", "q1", "median", "q3", "max |x|"]
LARGEST = ["role", "goes into", "max |x|", "layer", "feature", "position", "token"]
MASSIVE_ONES = ["layers", "in a sequence", "max / median", "max |x|", "feature", "position", "token"]
SINKS = ["position", "(layer, head) pairs"]
CARRIERS = ["feature", "in"]  # of tables of tokens, before
TYPES = ["type of token", "positions", "mean |x|", "max |x|"]
TOKENS = ["token", "type", "positions", "mean |x|", "max |x|"]
CONTEXTS = ["context", "|x|", "position"]
SHOWN = 5  # rows of tables that would be long
FEATURES_SHOWN = 20
CARRIED, MASSIVE_CARRIED = 3, 2  # features whose tokens are shown: of outlier features, and of massive activations
STRONGEST, WEAKEST = 5, 3  # tokens or contexts of a feature

Names = Callable[[int], str]  # of a token, by its id


def kept_trace_section(spec: OneModel, folder: Path, rows: list[dict]) -> Section:
    """What the trace that a run of a specification keeps in a folder shows."""
    from outliers.metrics.trace.kept import EXCERPT, saved_excerpt  # these import torch
    from outliers.models.load import load_tokenizer
    from outliers.text.tokens import visible_token
    from outliers.tracing.result import Trace

    trace = Trace.load(folder / "trace")
    names = functools.partial(visible_token, load_tokenizer(spec.model, spec.revision))
    return trace_section(trace, rows, names, saved_excerpt(folder / EXCERPT, trace))


def trace_section(trace: "Trace", rows: list[dict], names: Names, excerpt: "Excerpt | None" = None) -> Section:
    """The outlier features, the model's row of Table 4, the largest inputs, massive activations, sinks, the figures.

    names: what a token id is called, see `outliers.text.tokens`. excerpt: of the text, where it was kept.
    """
    of_model = [row for row in rows if "." not in row["metric"]]
    table4 = emergence_table(of_model)
    massive, sinks, sink_tokens = trace.massive_activations(), trace.attention_sinks(), trace.sink_tokens()
    further = {
        "features_by_layer": trace.features(by="layer"),
        "hidden_states": trace.hidden_states(),
        "largest_by_layer": _named(trace.largest_values(by="layer"), names),
        "massive_activations": _named(massive, names),
        "attention_sinks": sinks,
        "sink_tokens": _named(sink_tokens, names),
    }
    found = [_massive(further["massive_activations"]), _sinks(sinks, further["sink_tokens"])]
    largest = _largest(_named(trace.largest_values(), names))
    shown = [_features(trace), table4, largest, *(one for one in found if isinstance(one, Table)), *_tokens(trace)]
    notes = [*_not_traced(trace), *(one for one in found if isinstance(one, str))]
    printed = "\n\n".join([*map(_printed, shown), *(textwrap.fill(note, 100) for note in notes)])
    drawings = [Drawing.of(draw.__name__, said, draw(trace)) for draw, said in CAPTIONS.items()]
    title = f"Outlier features of {short_name(rows[0]['model'])}"
    findings = trace_findings(trace, {metric_of(row): row["value"] for row in of_model}, names)
    explorers = [trace_explorer(trace, excerpt, READERS, names)]
    return Section(title, rows, printed, shown, drawings, notes, further, findings, explorers)


def _printed(table: Table) -> str:
    return f"{textwrap.fill(table.caption, 100)}\n\n{table.form('simple')}"


def _named(table: pd.DataFrame, names: Names) -> pd.DataFrame:
    """A table with the names of its tokens beside their ids."""
    return table.assign(token_text=[names(token) for token in table["token"]])


def _features(trace: "Trace") -> Table:
    features, found = trace.features(), trace.outlier_features()
    heading = f"Outlier features: {len(found)}" if len(found) else "No outlier feature; the nearest ones"
    caption = f"{heading} (|x| ≥ {trace.alpha:g} in ≥ {100 * LAYERS:g} % of layers "
    caption += f"and ≥ {100 * POSITIONS:g} % of positions)"
    if len(found) > FEATURES_SHOWN:
        caption += f"; the {FEATURES_SHOWN} most common"
    if len(found) > FEW * len(features):
        caption += (
            f". More than half of all {len(features):,} features pass, as happens where norms have large gains: with "
            "this α the criterion tells nothing, a larger --alpha may"
        )
    shown = found.head(FEATURES_SHOWN) if len(found) else features.head(3)
    return Table("features", f"{caption}.", FEATURES, _feature_cells(shown), features, names=0)


def _feature_cells(features: pd.DataFrame) -> list[list[str]]:
    return [
        [
            str(int(row["feature"])),
            f"{row['layers']:.0%}",
            f"{row['positions']:.1%}",
            f"{row['positions_mean']:.2%}",
            str(int(row["hits"])),
            "yes" if row["one_sided"] else "no",
            *(f"{row[name]:.1f}" for name in ("q1", "median", "q3", "max")),
        ]
        for row in features.to_dict("records")
    ]


def _largest(table: pd.DataFrame) -> Table:
    cells = [
        [row["role"], READERS[row["role"]], f"{row['max']:,.1f}", str(row["layer"]), *_place(row)]
        for row in table.to_dict("records")
    ]
    caption = (
        "The largest input of each kind of projection, which sets the scale where a whole tensor has one; the "
        "criterion looks at attn_in and ffn_in alone. The features of attn_out are those of the concatenated heads, of "
        "ffn_out the feed-forward units."
    )
    return Table("largest", caption, LARGEST, cells, table, names=2)


def _place(row: dict) -> list[str]:
    return [str(row["feature"]), str(row["position"]), row["token_text"]]


def _not_traced(trace: "Trace") -> list[str]:
    missing = ", ".join(role for role in READERS if role not in trace.roles)
    return [f"Not traced, because some layers have no such projection: {missing}."] if missing else []


def _massive(every: pd.DataFrame) -> Table | str:
    """The massive activations of all layers: a row for each place that is the largest of some."""
    rule = f"|x| > {MASSIVE:g} and at least {MASSIVE_RATIO:,.0f} times the median |x| of a layer's output"
    table = every[every["massive"] > 0]
    if table.empty:
        most = every.loc[every["value"].abs().idxmax()].to_dict()
        return (
            f"No massive activation in the residual stream ({rule}): its largest entry is {most['value']:,.1f}, after "
            f"layer {most['layer']} in feature {most['feature']}, at position {most['position']}, token "
            f"{most['token_text']}."
        )
    cells = []
    of_places = table.assign(largest=table["value"].abs()).groupby(["feature", "position", "token_text"], sort=False)
    for place, group in sorted(of_places, key=lambda found: -found[1]["largest"].max())[:SHOWN]:
        means = f"{group['massive'].mean():.2g}", f"{group['ratio'].mean():,.0f}"
        largest = f"{group['largest'].max():,.0f}"
        cells.append([ranges(group["layer"].tolist()), *means, largest, *map(str, place)])
    caption = (
        f"Massive activations in the residual stream ({rule}): the layers after which there are some; how many a "
        "sequence has, and its largest |x| over its median |x|, both on average; the largest of all and its place."
    )
    return Table("massive_activations", caption, MASSIVE_ONES, cells, every)


def _sinks(every: pd.DataFrame, tokens: pd.DataFrame) -> Table | str:
    """The positions that are attention sinks for the most heads."""
    rule = f"a position that receives more than {SINK:g} of a head's attention, on average over the queries from it on"
    found = every[every["share"] > 0].sort_values("share", ascending=False, kind="stable").head(SHOWN)
    if found.empty:
        return f"No attention sink ({rule})."
    said = ", ".join(f"{row['token_text']} ({row['share']:.0%})" for row in tokens.head(SHOWN).to_dict("records"))
    caption = (
        f"Attention sinks ({rule}; the last positions have few queries): the share of (layer, head) pairs, averaged "
        f"over sequences. The tokens at sinks, most often: {said}."
    )
    cells = [[str(row["position"]), f"{row['share']:.1%}"] for row in found.to_dict("records")]
    return Table("attention_sinks", caption, SINKS, cells, every, names=0)


def _tokens(trace: "Trace") -> list[Table]:
    """Which tokens carry the outlier features, or the nearest one, and the features of massive activations."""
    if not trace.names:
        return []
    carried = _carried(trace)
    types, tokens, contexts = (_of_carried(trace, carried, by) for by in ("type", "token", "position"))
    shares = [[*_carrier(row), row["type"], *_magnitudes(row)] for row in types.to_dict("records")]
    strongest = [
        [*_carrier(row), row["token_text"], row["type"], *_magnitudes(row)]
        for _, group in tokens.groupby(["feature", "role"], sort=False)
        for row in _ends(group[group["token"] >= 0])
    ]
    around = [
        [*_carrier(row), row["context"].strip(), f"{row['magnitude']:,.1f}", str(row["position"])]
        for _, group in contexts.groupby(["feature", "role"], sort=False)
        for row in [
            *group[group["extreme"] == "strongest"].head(STRONGEST).to_dict("records"),
            *group[group["extreme"] == "weakest"].head(WEAKEST).to_dict("records")[::-1],
        ]
    ]
    return [
        Table(
            "token_types",
            "Types of tokens that carry a feature. At each position |x| is the largest over the layers, of what goes "
            "into their projections or, for the residual stream, of what comes out of them.",
            [*CARRIERS, *TYPES],
            shares,
            types,
            3,
        ),
        Table(
            "tokens",
            f"The tokens with the largest mean |x| of a feature, {STRONGEST} at most, and those with the smallest, "
            f"{WEAKEST} at most; without position 0.",
            [*CARRIERS, *TOKENS],
            strongest,
            tokens,
            4,
        ),
        Table(
            "contexts",
            f"Where a feature is strongest, {STRONGEST} positions at most, and weakest, {WEAKEST} at most, without "
            "position 0: the token between « and ».",
            [*CARRIERS, *CONTEXTS],
            around,
            contexts,
            3,
        ),
    ]


def _carried(trace: "Trace") -> list[tuple[int, str | None]]:
    """Features whose tokens are shown, each with the role of `Trace.tokens`."""
    features = outliers_of(trace)[:CARRIED] or trace.features()["feature"].tolist()[:1]
    massive = trace.massive_activations()
    massive = massive.reindex(massive["value"].abs().sort_values(ascending=False, kind="stable").index)
    found = massive[massive["massive"] > 0]["feature"].unique().tolist()[:MASSIVE_CARRIED]
    found = found or massive["feature"].tolist()[:1]
    return [*((feature, None) for feature in features), *((feature, "residual") for feature in found)]


def _of_carried(trace: "Trace", carried: list[tuple[int, str | None]], by: str) -> pd.DataFrame:
    tables = []
    for feature, role in carried:
        table = trace.tokens(feature, by, role)
        table.insert(0, "feature", feature)
        table.insert(1, "role", role or "+".join(stream_roles(trace)))
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _carrier(row: dict) -> list[str]:
    return [str(row["feature"]), row["role"]]


def _magnitudes(row: dict) -> list[str]:
    return [f"{row['share']:.2%}", f"{row['mean']:,.1f}", f"{row['max']:,.1f}"]


def _ends(table: pd.DataFrame) -> list[dict]:
    """The first and the last rows of a table, each once."""
    return [*table.head(STRONGEST).to_dict("records"), *table.iloc[STRONGEST:].tail(WEAKEST).to_dict("records")]


CAPTIONS = {
    heat_map: "Largest absolute value of each feature in each layer; colours have a step at α, so that hits stand out.",
    magnitude_by_position: "Magnitude by position in the sequence, averaged over sequences.",
    sorted_profile: "Largest absolute value of each feature, sorted; one line a layer. The lowest values are cut off.",
}

ARTEFACTS = {"trace": Artefact("Outlier features", OneModel, kept_trace_section, of_folder=True)}
