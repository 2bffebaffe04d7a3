"""The view of the account of features: sentences, a table of the largest writers, and the life lines."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import pandas as pd

from outliers.models.names import short_name
from outliers.plot.origins import BEFORE, GATES, largest_of, life_line, name_of, parts_of, readers_of
from outliers.quantization.schemes import BASELINE
from outliers.report.explorer.origins import origins_explorer
from outliers.show.section import FINDINGS, Drawing, Finding, Section, printed, together
from outliers.show.tables import MISSING, Form, Table
from outliers.show.words import amount, listed, ranges

SHOWN = 6  # writers of a feature with the largest mean, and as many with the largest term at the first position
ORDINARY = 6  # times the median of random features is what stands out
WORTH = 0.05  # of the feature's largest state, what a sentence names
SHARE = 0.5  # of a part, what one writer writes to be named in its place
WRITERS, TAKERS = 3, 2  # named in a sentence
LEAST = 0.005  # a term below it is 0 in a table
HIDDEN, OPEN = 0.25, 0.5  # gain beside the median: below it a norm hides a feature, from it on it does not
BLOCKS = {"attention": "attention", "feed-forward": "the feed-forward block"}
PLACES = {"value": "averages {} over positions after the first, {}", "first": "is {} at the first position {}"}
METRICS = ("writer", "gate", "state", "rest")
OWN = (
    *("feature", "layer", "role", "norm", "writer", "index", "count", "value", "first", "magnitude", "at"),
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
GATES_CAPTION = (
    "Norms before projections: gain at the feature, median |gain| and rank of the gain over all features, and the "
    "feature's mean before and after the norm."
)
LIFE_LINE_CAPTION = (
    "Life line of each feature: contributions of attention and feed-forward block in each layer (bars; a large one "
    "names the writer that makes half of it), the state before each layer (line), and the gain of the norms at the "
    "feature relative to their median (band). Right of the band, where measured: the projections that read the "
    "feature, so that the perplexity rises more without it there than without random features."
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
    *(*PLACE, ("writer", lambda row: name_of(row)), *TERM, ("mean magnitude", _number("magnitude"))),
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


def origins_section(rows: list[dict]) -> Section:
    """The account of features of each model under each variant; rows of other metrics, such as the trace that has found
    the features, are left out."""
    accounts = list(_accounts(rows))
    endings = ["", *(f"_{number}" for number in range(2, len(accounts) + 1))]
    sections = [_section(account, ending, rows) for account, ending in zip(accounts, endings, strict=True)]
    if len(sections) == 1:
        return sections[0]
    table = beside_each_other(rows)
    several = Section("", rows, table.printed, [table])
    return together("Origins of features", [several, *(other._replace(printed="", findings=()) for other in sections)])


def _accounts(rows: list[dict]) -> Iterable[list[dict]]:
    """The rows of each model under each variant."""
    accounts: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        if row["metric"].startswith("origins."):
            accounts[row["model"], row.get("variant", BASELINE)].append(row)
    return accounts.values()


def beside_each_other(rows: list[dict]) -> Table:
    """The features of several accounts."""
    features = pd.DataFrame(record for account in _accounts(rows) for record in _summed_up(account))
    return Table.of("accounts", ACCOUNTS_CAPTION, ACCOUNT_COLUMNS, features, names=WORDS)


def _summed_up(rows: list[dict]) -> Iterator[dict]:
    """Of each feature of an account where its mean is largest, beside random features, and the part that wrote most."""
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
    """That of one model under one variant; ending: of the names of its files. every: rows, of others too."""
    frame = pd.DataFrame(rows)
    writers, gates, states, rest = (frame[frame["metric"] == f"origins.{metric}"] for metric in METRICS)
    parts = _with_most(parts_of(frame), writers)
    writers_caption = WRITERS_CAPTION.format(rest=rest["value"].max())
    single = writers[writers["largest"].notna()]
    tables = [
        Table.of(f"parts{ending}", PARTS_CAPTION, PART_COLUMNS, parts, _largest(parts), names=WORDS),
        Table.of(f"writers{ending}", writers_caption, WRITER_COLUMNS, _columns(writers), _largest(single), names=WORDS),
    ]
    if len(gates):
        gates_table = Table.of(f"gates{ending}", GATES_CAPTION, GATE_COLUMNS, _columns(gates), names=WORDS, folded=True)
        tables.append(gates_table)
    ablations = [row for row in every if row["metric"] == "perplexity" and row.get("model") == rows[0]["model"]]
    readers = ablations if rows[0].get("variant", BASELINE) == BASELINE else []
    drawings = [Drawing.of(f"life_line{ending}", LIFE_LINE_CAPTION, life_line([*rows, *readers]))]
    findings = [Finding(text, f"{at}{ending}") for text, at in account_of(frame)][:FINDINGS]
    variant = rows[0].get("variant", BASELINE)
    subject = f"{short_name(rows[0]['model'])}{'' if variant == BASELINE else f' under {variant}'}"
    further = {f"states{ending}": _columns(states)}
    explorers = [origins_explorer(frame, subject, readers_of([*rows, *readers]))]
    title, text = f"Origins of features of {subject}", printed(tables)
    return Section(title, rows, text, tables, drawings, [], further, findings, explorers)


def _listed_terms(row: Mapping) -> str:
    """The tokens on which a writer writes most, with what it writes: '␣the' −35.2."""
    tokens, terms = row["largest_tokens"], row["largest"]
    return ", ".join(f"{token} {amount(term)}" for token, term in zip(tokens, terms, strict=True))


def account_of(frame: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Of each feature who writes it and who takes it back, where that stands out from random features, and which norms
    hide it; each with the table that it is from."""
    ordinary = frame[frame["metric"] == "origins.ordinary"]
    ordinary = ordinary.assign(layer=ordinary["layer"].fillna(BEFORE).astype(int))
    for feature, rows in frame[frame["feature"].notna()].groupby("feature", sort=False):
        parts = parts_of(rows)
        for column, place in PLACES.items():
            if text := _written(rows, parts, ordinary, column, place):
                yield f"Feature {feature:.0f} {text}", "parts"
        for text in _hidden(f"feature {feature:.0f}", rows):
            yield text, "gates"


def _place(row: Mapping) -> str:
    return row["part"] if row["part_layer"] == BEFORE else f"{row['part']} of layer {row['part_layer']}"


def _columns(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of values of one kind: what they have that others of their row have not."""
    return frame[[name for name in OWN if name in frame and frame[name].notna().any()]]


def _with_most(parts: pd.DataFrame, writers: pd.DataFrame) -> pd.DataFrame:
    """Parts of layers with the single writer that writes most of each, by mean and at the first position."""
    most = {
        name: [name_of(largest_of(writers, part, column)) for part in parts.to_dict("records")]
        for name, column in (("most", "value"), ("first_most", "first"))
    }
    return parts.assign(**most)


def _largest(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each feature what writes most, by mean or at the first position."""
    groups = [rows_of_feature for _, rows_of_feature in frame.groupby("feature", sort=False)]
    most = [group[column].abs().nlargest(SHOWN).index for group in groups for column in PLACES]
    return frame.loc[sorted({index for indices in most for index in indices})]


def _standing_out(rows: pd.DataFrame, ordinary: pd.DataFrame, column: str) -> pd.DataFrame:
    """Of states or parts of layers those that are more than the same of random features."""
    usual = ordinary[["layer", "part", column]].rename(columns={column: "usual"})
    both = rows.merge(usual, on=["layer", "part"])
    return both[both[column].abs() > ORDINARY * both["usual"]]


def _written(rows: pd.DataFrame, parts: pd.DataFrame, ordinary: pd.DataFrame, column: str, place: str) -> str | None:
    """The writers of the feature where it is largest, and the parts that remove it after that."""
    states = rows[rows["metric"] == "origins.state"].assign(part="state")
    peak = states.loc[states[column].abs().idxmax()]
    if _standing_out(states.loc[[peak.name]], ordinary, column).empty:
        return None
    parts = _standing_out(parts, ordinary, column)
    parts = parts[parts[column].abs() >= WORTH * abs(peak[column])]
    same, before = parts[column] * peak[column] > 0, parts["layer"] < peak["layer"]
    writers, takers = _most(parts[same & before], column, WRITERS), _most(parts[~same & ~before], column, TAKERS)
    if writers.empty:
        return None
    text = f"{place.format(amount(peak[column]), _before(peak['layer'], len(states) - 1))}: written mainly by "
    text += listed(_contribution(rows, part, column) for part in writers.to_dict("records"))
    if len(takers):
        text += f"; removed by {listed(_contribution(rows, part, column) for part in takers.to_dict('records'))}"
    return f"{text}."


def _most(parts: pd.DataFrame, column: str, count: int) -> pd.DataFrame:
    return parts.loc[parts[column].abs().nlargest(count).index].sort_values("layer", kind="stable")


def _before(layer: float, layers: int) -> str:
    return f"before layer {layer:.0f}" if layer < layers else "after the last layer"


def _contribution(rows: pd.DataFrame, part: Mapping, column: str) -> str:
    """A block of a layer with its contribution, and the single writer that makes most of it."""
    value, largest = _signed(part[column]), largest_of(rows, part, column)
    if part["layer"] == BEFORE:
        return f"the embedding ({value})"
    text = f"{BLOCKS[part['part']]} of layer {part['layer']} ({value}"
    if largest is not None and largest[column] / part[column] >= SHARE:
        text += f", of which {name_of(largest)} {_signed(largest[column])}"
    return f"{text})"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{amount(value)}"


def _hidden(feature: str, rows: pd.DataFrame) -> Iterator[str]:
    """The layers whose norms hide the feature from attention, or the feed-forward part, and the first that does not."""
    gates = rows[rows["metric"] == "origins.gate"]
    for role, part in GATES.items():
        gates_of_role = [gate for gate in gates.to_dict("records") if role in gate["role"].split("+")]
        hidden = [gate for gate in gates_of_role if abs(gate["value"]) < HIDDEN * gate["median"]]
        if not hidden:
            continue
        layers, most = ranges([int(gate["layer"]) for gate in hidden]), max(abs(gate["value"]) for gate in hidden)
        least = min(gate["median"] for gate in hidden)
        text = f"The norms before {part} suppress {feature} in layers {layers} (gain at most {most:.2g}, median over "
        text += f"features at least {least:.2g})"
        behind = (gate for gate in gates_of_role if gate["layer"] > hidden[0]["layer"])
        opened = next((gate for gate in behind if abs(gate["value"]) >= OPEN * gate["median"]), None)
        if opened:
            gain = f"{abs(opened['value']):.2g}, median {opened['median']:.2g}"
            text += f"; layer {opened['layer']:.0f} passes it ({gain})"
        yield f"{text}."
