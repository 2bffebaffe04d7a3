"""Table 5 of the paper from rows: how many times faster than 16 bits a linear layer is, in many ways."""

import pandas as pd

from outliers.report.paper import Key
from outliers.report.section import Section, Table
from outliers.specification.kinds import layer_shape


def speed_section(rows: list[dict]) -> Section:
    """What the timings of linear layers show."""
    table = published_table(rows)
    return Section("Speed of the first feed-forward layer", table.printed, [table], [], [], {}, rows)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Times faster than 16 bits by the keys of the published ones."""
    speeds = (row for row in rows if row["metric"] == "linear_layer.times_16_bits")
    return {(row["way"], str(row["dimension"])): row["value"] for row in speeds}


def speed_table(rows: list[dict]) -> pd.DataFrame:
    """Times faster than 16 bits by way (index, in the order of the rows) and model dimension (columns, ascending)."""
    speeds = [row for row in rows if row["metric"] == "linear_layer.times_16_bits"]
    frame = pd.DataFrame(speeds, columns=["way", "dimension", "value"])
    dimensions = sorted(set(frame["dimension"].tolist()), key=layer_shape)
    return frame.pivot(index="way", columns="dimension", values="value").loc[frame["way"].unique(), dimensions]


def published_table(rows: list[dict]) -> Table:
    """The table with its caption, dimensions across as in the paper."""
    table, one = speed_table(rows), rows[0]
    cells = [[way, *("-" if pd.isna(value) else f"{value:.2f}" for value in row)] for way, row in table.iterrows()]
    caption = (
        f"Times faster than {one['dtype']}: the first feed-forward layer (d features, 4 d outputs), or a layer of "
        f"features x outputs, at {one['tokens']} tokens with three outlier features, by model dimension d. "
        f"{one['device_name']}, {one['threads']} threads."
    )
    return Table("table5", caption, ["way", *map(str, table.columns)], cells, table.reset_index())
