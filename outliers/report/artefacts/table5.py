"""Table 5 of the paper: how many times faster than 16 bits a linear layer is, in many ways."""

from collections.abc import Sequence

import pandas as pd

from outliers.report.paper import Artefact, Key, Published, grid
from outliers.report.section import Finding, Section
from outliers.report.tables import Table, cell
from outliers.specification.kinds import LinearLayers, layer_shape

PUBLISHED = Published(
    "LLM.int8(), Table 5",
    ("way", "dimension"),
    grid(
        {
            "int8 alone": (0.99, 1.08, 1.43, 1.61, 1.63, 1.67, 2.13, 2.29),
            "absmax, plain torch": (0.25, 0.24, 0.36, 0.45, 0.53, 0.70, 0.96, 1.50),
            "vector-wise, plain torch": (0.21, 0.22, 0.33, 0.41, 0.50, 0.65, 0.91, 1.50),
            "vector-wise": (0.43, 0.49, 0.74, 0.91, 0.94, 1.18, 1.59, 2.00),
            "LLM.int8()": (0.14, 0.20, 0.36, 0.51, 0.64, 0.86, 1.22, 1.81),
        },
        [768, 1024, 1536, 2048, 2560, 4096, 5140, 12288],
    ),
    "{:.2f}",
)


def speed_section(rows: list[dict]) -> Section:
    """What the timings of linear layers show."""
    table, findings = speed_table(rows), speed_findings(_times(rows))
    return Section("Speed of the first feed-forward layer", rows, table.printed, [table], findings=findings)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Times faster than 16 bits by the keys of the published ones."""
    return {(row["way"], str(row["dimension"])): row["value"] for row in _times(rows)}


def speeds(rows: list[dict]) -> pd.DataFrame:
    """Times faster than 16 bits by way (index, in the order of the rows) and model dimension (columns, ascending)."""
    frame = pd.DataFrame(_times(rows), columns=["way", "dimension", "value"])
    dimensions = sorted(set(frame["dimension"].tolist()), key=layer_shape)
    return frame.pivot(index="way", columns="dimension", values="value").loc[frame["way"].unique(), dimensions]


def _times(rows: list[dict]) -> list[dict]:
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


ARTEFACTS = {"table5": Artefact("Table 5", LinearLayers, speed_section, PUBLISHED, measured)}
