"""What timings of generation say."""

import pandas as pd

from outliers.report.findings.words import amount
from outliers.report.section import Finding

TABLE = "table6"


def latency_findings(table: pd.DataFrame, baseline: str) -> list[Finding]:
    """What a decode step takes under each scheme, of the model that takes longest, one sequence at a time if timed.

    table: that of `latencies` of Table 6. baseline: the scheme that quantizes nothing. Times whose quartiles overlap
    are not told apart.
    """
    batch = table.columns.unique("batch")[0]
    exact = table.xs(baseline, level="scheme") if baseline in table.index.unique("scheme") else table.head(0)
    exact = exact[exact["decode", batch].notna()]
    if exact.empty:
        return []
    model = exact["decode", batch].idxmax()
    rows = table.loc[model].drop(baseline)
    times = [
        _times(scheme, exact.loc[model][:, batch], row[:, batch])
        for scheme, row in rows[rows["decode", batch].notna()].iterrows()
    ]
    return [Finding(f"At batch {batch} a decode step of {model} takes {time}.", TABLE) for time in times]


def _times(scheme: str, before: pd.Series, after: pd.Series) -> str:
    time = f"{amount(after['decode'])} ms a token under {scheme}"
    if before["decode_q1"] > after["decode_q3"] or before["decode_q3"] < after["decode_q1"]:
        return f"{time}, {1 / after['times_faster']:.2f} times as long as without quantization"
    return f"{time}, {amount(before['decode'])} without: a difference could not be shown"
