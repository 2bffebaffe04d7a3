"""Table 6 of the paper: milliseconds a generated token, one row a model and scheme."""

import itertools

import pandas as pd

from outliers.models.names import distinct_names
from outliers.quantization.schemes import BASELINE
from outliers.report.section import Finding, Section
from outliers.report.tables import MISSING, Table, cell, with_interval
from outliers.report.words import amount

FASTER = {"decode": "times_faster", "prefill": "prefill_times_faster"}
VALUES = ["decode", "decode_q1", "decode_q3", "prefill", "end_to_end", *FASTER.values()]


def latency_section(rows: list[dict]) -> Section:
    """What the timings of generation show."""
    table = latency_table(rows)
    findings = latency_findings(latencies(rows))
    return Section("Milliseconds a generated token", rows, table.printed, [table], findings=findings)


def latencies(rows: list[dict]) -> pd.DataFrame:
    """One row a model and scheme (index), in the order of the rows, with columns (value, batch).

    decode and its quartiles: milliseconds a token of a decode step over its batch, which are the numbers of the paper.
    prefill: milliseconds of the pass over the prompts. end_to_end: milliseconds a token, the prefill included.
    times_faster and prefill_times_faster: than the same model without quantization, by decode and by prefill; empty
    where that was not measured.
    """
    wide: dict[tuple, dict] = {}
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows)
    for row in rows:
        values = wide.setdefault((names[row["model"], row.get("checkpoint")], row["scheme"]), {})
        name = row["metric"].removeprefix("latency.")
        values[name, row["batch"]] = row["value"]
        if name == "decode":
            values |= {(f"decode_{quartile}", row["batch"]): row[quartile] for quartile in ("q1", "q3")}
    for (model, _), values in wide.items():
        for (name, faster), batch in itertools.product(FASTER.items(), {row["batch"] for row in rows}):
            baseline, own = (times.get((name, batch)) for times in (wide.get((model, BASELINE), {}), values))
            values[faster, batch] = baseline / own if baseline and own else float("nan")
    table = pd.DataFrame.from_dict(wide, orient="index")
    table.index = pd.MultiIndex.from_tuples(wide, names=["model", "scheme"])
    batches = sorted({row["batch"] for row in rows})
    return table.reindex(columns=pd.MultiIndex.from_product([VALUES, batches], names=["value", "batch"]))


def latency_table(rows: list[dict]) -> Table:
    """The table with its caption; its data are the values of `latencies` with flat names."""
    table, one = latencies(rows), rows[0]
    caption = (
        f"Milliseconds a generated token with a KV cache, after prompts of {one['prompt']} tokens, by batch: median of "
        f"{one['repeats']} × {one['tokens']} decode steps [quartiles]; milliseconds of a prefill; and how many times "
        f"faster than in {one['dtype']} each is. {one['device_name']}, {one['threads']} threads."
    )
    data = table.set_axis([f"{value}_batch_{batch}" for value, batch in table.columns], axis="columns").reset_index()
    cells = [
        [model, one["dtype"] if scheme == BASELINE else scheme, *_cells(row)]
        for (model, scheme), row in table.iterrows()
    ]
    batches = table.columns.unique("batch")
    headers = [f"{value} {batch}" for value in ("batch", "faster", "prefill", "prefill faster") for batch in batches]
    return Table("table6", caption, ["model", "weights", *headers], cells, data, names=2)


def _cells(row: pd.Series) -> list[str]:
    """Medians with quartiles, times faster, and prefills with theirs, each batch by batch."""
    quartiles = zip(row["decode"], row["decode_q1"], row["decode_q3"], strict=True)
    return [
        *(MISSING if pd.isna(times[0]) else with_interval("{:.3g}".format, *times) for times in quartiles),
        *(cell(".2f", value) for value in row["times_faster"]),
        *(cell(".4g", value) for value in row["prefill"]),
        *(cell(".2f", value) for value in row["prefill_times_faster"]),
    ]


# Findings


def latency_findings(table: pd.DataFrame) -> list[Finding]:
    """What a decode step takes under each scheme, of the model that takes longest, one sequence at a time if timed.

    table: that of `latencies`. Times whose quartiles overlap are not told apart.
    """
    batch = table.columns.unique("batch")[0]
    exact = table[(table.index.get_level_values("scheme") == BASELINE) & table["decode", batch].notna()].droplevel(1)
    if exact.empty:
        return []
    model = exact["decode", batch].idxmax()
    rows = table.loc[model].drop(BASELINE)
    times = [
        _times(scheme, exact.loc[model][:, batch], row[:, batch])
        for scheme, row in rows[rows["decode", batch].notna()].iterrows()
    ]
    return [Finding(f"At batch {batch} a decode step of {model} takes {time}.", "table6") for time in times]


def _times(scheme: str, before: pd.Series, after: pd.Series) -> str:
    time = f"{amount(after['decode'])} ms a token under {scheme}"
    if before["decode_q1"] > after["decode_q3"] or before["decode_q3"] < after["decode_q1"]:
        return f"{time}, {1 / after['times_faster']:.2f} times as long as without quantization"
    return f"{time}, {amount(before['decode'])} without: a difference could not be shown"
