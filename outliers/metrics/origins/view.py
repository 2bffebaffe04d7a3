"""What the account of features says: sentences, a table of the largest writers, and the life lines."""

from collections.abc import Iterator, Mapping

import pandas as pd

from outliers.models.names import short_name
from outliers.plot.life_line import BEFORE, GATES, largest_of, life_line, name_of, parts_of
from outliers.report.section import FINDINGS, Drawing, Finding, Section, printed
from outliers.report.tables import MISSING, Table
from outliers.report.words import amount, listed, ranges

SHOWN = 6  # writers of a feature with the largest mean, and as many with the largest term at the first position
ORDINARY = 6  # times the median of random features is what stands out
WORTH = 0.05  # of the feature's largest state, what a sentence names
SHARE = 0.75  # of a part, what one writer writes to be named in its place
WRITERS, TAKERS = 3, 2  # named in a sentence
HIDDEN, OPEN = 0.25, 0.5  # gain beside the median: below it a norm hides a feature, from it on it does not
SAID = {"attention": "attention", "feed-forward": "the feed-forward part"}
PLACES = {"value": "after the first position, on average", "first": "at the first position"}

CAPTION = (
    "What writes most into each feature, in the order of layers: the mean term over positions after the first, its "
    "mean magnitude, the term at the first position, and the tokens after it on which the term is largest. A neuron's "
    "term is its activation times its weight to the feature. All terms add up to the state, up to {rest:.0e} of it."
)
COLUMNS = (
    ("feature", "{feature:.0f}"),
    ("layer", lambda row: MISSING if pd.isna(row["layer"]) else f"{row['layer']:.0f}"),
    ("writer", lambda row: name_of(row)),
    ("mean", "{value:,.2f}"),
    ("mean magnitude", "{magnitude:,.2f}"),
    ("first position", "{first:,.2f}"),
    ("most on", lambda row: listed_terms(row)),
)
GATES_CAPTION = (
    "The norms in front of projections: their gain at the feature, the median |gain| of all features and the gain's "
    "rank among all, and the feature's mean before and behind the norm."
)
GATE_COLUMNS = (
    ("feature", "{feature:.0f}"),
    ("layer", "{layer:.0f}"),
    ("norm", "{norm}"),
    ("gain", "{value:.4g}"),
    ("median", "{median:.3g}"),
    ("rank", "{rank:.0f}"),
    ("before", "{before:,.2f}"),
    ("behind", "{behind:,.3g}"),
    ("before, first position", "{first_before:,.2f}"),
    ("behind, first position", "{first_behind:,.3g}"),
)


def origins_section(rows: list[dict]) -> Section:
    """The account of a model's features; rows of other metrics, such as the trace that has found them, are left out."""
    rows = [row for row in rows if row["metric"].startswith("origins.")]
    frame = pd.DataFrame(rows)
    writers = frame[frame["metric"] == "origins.writer"]
    rest = frame.loc[frame["metric"] == "origins.rest", "value"].max()
    shown = pd.concat([_largest(of_feature) for _, of_feature in writers.groupby("feature", sort=False)])
    tables = [Table.of("writers", CAPTION.format(rest=rest), COLUMNS, _columns(writers), shown, names=0)]
    gates = frame[frame["metric"] == "origins.gate"]
    if len(gates):
        style = {"names": 0, "folded": True}
        tables.append(Table.of("gates", GATES_CAPTION, GATE_COLUMNS, _columns(gates), **style))
    caption = (
        "The life of each feature: what attention and feed-forward part of each layer write (bars), the state before "
        "each layer (line), and the gain of the norms at the feature beside their median (band)."
    )
    drawings = [Drawing.of("life_line", caption, life_line(rows))]
    further = {"states": _columns(frame[frame["metric"] == "origins.state"]), "parts": parts_of(frame)}
    findings = [Finding(text, at) for text, at in account_of(frame)][:FINDINGS]
    title = f"Origins of features of {short_name(rows[0]['model'])}"
    return Section(title, rows, printed(tables), tables, drawings, further=further, findings=findings)


def listed_terms(row: Mapping) -> str:
    """The tokens on which a writer writes most, with what it writes: '␣the' −35.2."""
    tokens, terms = row["largest_tokens"], row["largest"]
    return ", ".join(f"{token} {amount(term)}" for token, term in zip(tokens, terms, strict=True))


def account_of(frame: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Of each feature who writes it and who takes it back, where that stands out from random features, and which norms
    hide it; each with the table that it is from."""
    for feature, rows in frame[frame["feature"].notna()].groupby("feature", sort=False):
        parts = parts_of(rows)
        for column, where in PLACES.items():
            if text := _written(f"Feature {feature:.0f}", rows, _standing_out(parts, frame, column), column, where):
                yield text, "writers"
        for text in _hidden(f"feature {feature:.0f}", rows):
            yield text, "gates"


def _columns(frame: pd.DataFrame) -> pd.DataFrame:
    """What some rows of the same metric have that is theirs."""
    from outliers.runs.frame import RESULT, WHICH

    own = [*WHICH, *RESULT, *_OWN]
    return frame[[name for name in own if name in frame and frame[name].notna().any()]].drop(columns=["metric", "unit"])


_OWN = (
    *("writer", "index", "count", "first", "magnitude", "at", "largest", "largest_positions", "largest_tokens"),
    *("norm", "median", "rank", "before", "behind", "first_before", "first_behind"),
)


def _largest(writers: pd.DataFrame) -> pd.DataFrame:
    """Of a feature's single writers those that write most, by mean or at the first position."""
    singles = writers[writers["largest"].notna()]
    most = [singles[column].abs().nlargest(SHOWN).index for column in PLACES]
    return singles.loc[sorted(most[0].union(most[1]))]


def _standing_out(parts: pd.DataFrame, frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Of the parts of layers those that write more than the same part writes into random features."""
    ordinary = frame[frame["metric"] == "origins.ordinary"]
    if ordinary.empty:
        return parts[:0]
    ordinary = ordinary.assign(layer=ordinary["layer"].fillna(BEFORE).astype(int) if "layer" in ordinary else BEFORE)
    both = parts.merge(ordinary[["layer", "part", column]], on=["layer", "part"], suffixes=("", "_ordinary"))
    return both[both[column].abs() > ORDINARY * both[f"{column}_ordinary"]]


def _written(feature: str, rows: pd.DataFrame, parts: pd.DataFrame, column: str, where: str) -> str | None:
    """Who makes the feature what it is where it is largest, and who takes it back behind that."""
    states = rows[rows["metric"] == "origins.state"]
    peak = states.loc[states[column].abs().idxmax()]
    parts = parts[parts[column].abs() >= WORTH * abs(peak[column])]
    same, before = parts[column] * peak[column] > 0, parts["layer"] < peak["layer"]
    writers, takers = _most(parts[same & before], column, WRITERS), _most(parts[~same & ~before], column, TAKERS)
    if writers.empty:
        return None
    text = f"{feature} is {amount(peak[column])} {where} {_before(peak['layer'], len(states) - 1)}: written by "
    text += listed(_said(rows, part, column) for part in writers.to_dict("records"))
    if len(takers):
        text += f"; taken back by {listed(_said(rows, part, column) for part in takers.to_dict('records'))}"
    return f"{text}."


def _most(parts: pd.DataFrame, column: str, count: int) -> pd.DataFrame:
    return parts.loc[parts[column].abs().nlargest(count).index].sort_values("layer", kind="stable")


def _before(layer: float, layers: int) -> str:
    return f"before layer {layer:.0f}" if layer < layers else "after the last layer"


def _said(rows: pd.DataFrame, part: Mapping, column: str) -> str:
    """A part of a layer with what it writes, and the single writer that writes most of it."""
    value, largest = _signed(part[column]), largest_of(rows, part, column)
    if part["layer"] == BEFORE:
        return f"the embedding ({value})"
    text = f"{SAID[part['part']]} of layer {part['layer']} ({value}"
    if largest is not None and largest[column] / part[column] >= SHARE:
        text += f", of which {name_of(largest)} {_signed(largest[column])}"
    return f"{text})"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{amount(value)}"


def _hidden(feature: str, rows: pd.DataFrame) -> Iterator[str]:
    """The layers whose norms hide the feature from attention, or the feed-forward part, and the first that does not."""
    gates = rows[rows["metric"] == "origins.gate"]
    for role, part in GATES.items():
        of_role = [gate for gate in gates.to_dict("records") if role in gate["role"].split("+")]
        hidden = [gate for gate in of_role if abs(gate["value"]) < HIDDEN * gate["median"]]
        if not hidden:
            continue
        layers, most = ranges([int(gate["layer"]) for gate in hidden]), max(abs(gate["value"]) for gate in hidden)
        least = min(gate["median"] for gate in hidden)
        text = f"The norms before {part} hide {feature} in layers {layers}: gains of at most {most:.2g}, where "
        text += f"the medians are at least {least:.2g}"
        behind = (gate for gate in of_role if gate["layer"] > hidden[0]["layer"])
        opened = next((gate for gate in behind if abs(gate["value"]) >= OPEN * gate["median"]), None)
        if opened:
            gain = f"{abs(opened['value']):.2g}, median {opened['median']:.2g}"
            text += f"; layer {opened['layer']:.0f} lets it through ({gain})"
        yield f"{text}."
