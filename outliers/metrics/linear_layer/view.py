"""Table 5 of the paper: how many times faster than 16 bits a linear layer is, in many ways."""

from collections.abc import Sequence

import pandas as pd

from outliers.report.section import Finding, Section
from outliers.report.tables import Table, cell
from outliers.specification.kinds import layer_shape


def speed_section(rows: list[dict]) -> Section:
    """What the timings of linear layers show."""
    table, findings = speed_table(rows), speed_findings(times_of(rows))
    return Section("Speed of the first feed-forward layer", rows, table.printed, [table], findings=findings)


def speeds(rows: list[dict]) -> pd.DataFrame:
    """Times faster than 16 bits by way (index, in the order of the rows) and model dimension (columns, ascending)."""
    frame = pd.DataFrame(times_of(rows), columns=["way", "dimension", "value"])
    dimensions = sorted(set(frame["dimension"].tolist()), key=layer_shape)
    return frame.pivot(index="way", columns="dimension", values="value").loc[frame["way"].unique(), dimensions]


def times_of(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["metric"] == "linear_layer.times_16_bits"]


def speed_table(rows: list[dict]) -> Table:
    """The table with its caption, dimensions across as in the paper."""
    table, one = speeds(rows), rows[0]
    cells = [[way, *(cell(".2f", value) for value in row)] for way, row in table.iterrows()]
    caption = (
        f"Times faster than {one['dtype']}: the first feed-forward layer (d features, 4 d outputs), or a layer of "
        f"features x outputs, at {one['tokens']} tokens with three outlier features, by model dimension d. "
        f"{one['device_name']}, {one['threads']} threads."
    )
    return Table("table5", caption, ["way", *map(str, table.columns)], cells, table.reset_index())


# Findings


def speed_findings(rows: Sequence[dict]) -> list[Finding]:
    """Which way is fastest, and which ways are faster or slower than 16 bits wherever they were timed.

    rows: `linear_layer.times_16_bits`. A way is faster, or slower, where its quartiles leave out 1.
    """
    ways = dict.fromkeys(row["way"] for row in rows)
    of_ways = {way: [row for row in rows if row["way"] == way] for way in ways}
    faster = {way: [row for row in own if row["q1"] > 1] for way, own in of_ways.items()}
    slower = [way for way, own in of_ways.items() if all(row["q3"] < 1 for row in own)]
    best = sorted((row for own in faster.values() for row in own), key=lambda row: -row["value"])[:1]
    sentences = [
        f"{row['way']} is {row['value']:.2f} times as fast as 16 bits at d = {row['dimension']}." for row in best
    ]
    always = {"Faster": [way for way, own in faster.items() if len(own) == len(of_ways[way])], "Slower": slower}
    sentences += [
        f"{how} than 16 bits at every d that was timed: {'; '.join(some)}." for how, some in always.items() if some
    ]
    return [Finding(sentence, "table5") for sentence in sentences]
