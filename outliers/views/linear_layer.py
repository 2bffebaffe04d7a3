"""Table 5 of the paper: the speedup of a linear layer over 16 bits, in several ways to multiply."""

from collections.abc import Sequence
from operator import itemgetter

import pandas as pd

from outliers.show.section import Context, Finding, Section
from outliers.show.tables import Table, cell
from outliers.show.value import grouped
from outliers.show.words import threads
from outliers.subjects.layer import layer_shape


def linear_layer_section(rows: list[dict], _context: Context | None = None) -> Section:
    table, findings = speed_table(rows), speed_findings(speed_rows(rows))
    return Section("Speed of the first feed-forward layer", rows, tables=[table], findings=findings)


def speeds(rows: list[dict]) -> pd.DataFrame:
    """Return the speedup over 16 bits by way (index, in the order of the rows) and model dimension (ascending)."""
    frame = pd.DataFrame(speed_rows(rows), columns=["way", "dimension", "value"])
    dimensions = sorted(set(frame["dimension"].tolist()), key=layer_shape)
    return frame.pivot(index="way", columns="dimension", values="value").loc[frame["way"].unique(), dimensions]


def speed_rows(rows: list[dict]) -> list[dict]:
    """Return the rows of times relative to 16 bits."""
    return [row for row in rows if row["metric"] == "linear_layer.times_16_bits"]


def speed_table(rows: list[dict]) -> Table:
    """Make the table with its caption, with model dimensions as columns like the paper's."""
    table, run = speeds(rows), rows[0]
    cells = [[way, *(cell(".2f", value) for value in row)] for way, row in table.iterrows()]
    caption = (
        f"Speedup over {run['dtype']} of the first feed-forward layer (d features, 4 d outputs), or of a layer of "
        f"features x outputs, at {run['tokens']} tokens with three outlier features, by model dimension d. "
        f"{run['device_name']}, {threads(run['threads'])}."
    )
    return Table("table5", caption, ["way", *map(str, table.columns)], cells, table.reset_index())


def speed_findings(rows: Sequence[dict]) -> list[Finding]:
    """State the fastest way, and the ways that are faster or slower than 16 bits wherever they were timed.

    rows: of `linear_layer.times_16_bits`. A way counts as faster or slower if its quartiles exclude 1.
    """
    by_way = grouped(rows, itemgetter("way"))
    faster = {way: [row for row in timed if row["q1"] > 1] for way, timed in by_way.items()}
    slower = [way for way, timed in by_way.items() if all(row["q3"] < 1 for row in timed)]
    best = sorted((row for timed in faster.values() for row in timed), key=lambda row: -row["value"])[:1]
    sentences = [
        f"{row['way']} is {row['value']:.2f} times as fast as 16 bits at d = {row['dimension']}." for row in best
    ]
    always = {"Faster": [way for way, timed in faster.items() if len(timed) == len(by_way[way])], "Slower": slower}
    sentences += [
        f"{how} than 16 bits at every measured d: {'; '.join(names)}." for how, names in always.items() if names
    ]
    return [Finding(sentence, "table5") for sentence in sentences]
