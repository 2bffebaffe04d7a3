"""The explorer of queries, keys and values."""

import pandas as pd

from outliers.plot.trace import COLUMNS, KEYS, SIDES, TINY, key_ratios, pooled
from outliers.show.explorer import Explorer, map_of, of_tables


def keys_explorer(rows: list[dict], of: str) -> Explorer:
    """Maps of the largest |x| beside the median channel of the head: of keys and values by channel, and of queries,
    keys and values by head.

    rows: of the metric `keys`, of one model under one variant; of: what it is called.
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
    title, value = f"Explore queries, keys and values of {of}", "largest |x| / median"
    return of_tables(title, maps, row="layer", value=value, choice="states")


def _with_names(table: pd.DataFrame) -> pd.DataFrame:
    """A table whose columns (head, channel) have names; of many neighbours share one, which shows their largest."""
    share = -(-table.shape[1] // COLUMNS)
    names = [f"{head}:{channel}" for head, channel in table.columns[::share]]
    return pd.DataFrame(pooled(table.to_numpy(), share), table.index, names)
