"""Table 6 of the paper: milliseconds per generated token, one row per model and variant."""

import pandas as pd

from outliers.criterion import PICTURES
from outliers.models.names import names_by_row
from outliers.quantization.schemes import BASELINE
from outliers.show.section import Context, Finding, Section
from outliers.show.tables import MISSING, Table, with_interval
from outliers.show.words import amount, threads

FASTER = {"decode": "times_faster", "prefill": "prefill_times_faster", "encode": "encode_times_faster"}
QUARTILES = ("decode", "encode")
# Values of models that generate, and of those that only encode; then the header and format of each in a table.
GENERATION = ["decode", "decode_q1", "decode_q3", "prefill", "end_to_end", "times_faster", "prefill_times_faster"]
ENCODING = ["encode", "encode_q1", "encode_q3", "encode_times_faster"]
SHOWN = {
    "decode": ("batch", ".3g"),
    "times_faster": ("speedup", ".2f"),
    "prefill": ("prefill", ".4g"),
    "prefill_times_faster": ("prefill speedup", ".2f"),
    "encode": ("encode", ".4g"),
    "encode_times_faster": ("encode speedup", ".2f"),
}


def latency_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show the timings of generation, or of encoding."""
    times = latencies(rows)
    findings = latency_findings(times)
    return Section("Decoding latency", rows, tables=[latency_table(times, rows[0])], findings=findings)


def latencies(rows: list[dict]) -> pd.DataFrame:
    """Return one row per model and variant (index), in the order of the rows, with columns (value, batch).

    decode and its quartiles: milliseconds per token of a decode step, divided by its batch, as the paper prints.
    prefill: milliseconds of the pass over the prompts. end_to_end: milliseconds per token, including the prefill.
    encode, with quartiles: milliseconds of a pass of a model that generates nothing. times_faster, prefill_times_faster
    and encode_times_faster: speedup over the same model without quantization; NaN if that was not measured.
    """
    frame = pd.DataFrame(rows).assign(model=names_by_row(rows))
    frame["name"] = frame["metric"].str.removeprefix("latency.")
    with_quartiles = frame[frame["name"].isin(QUARTILES)]
    ends = [
        with_quartiles.assign(name=with_quartiles["name"] + f"_{end}", value=with_quartiles[end])
        for end in ("q1", "q3")
        if end in frame
    ]
    place, columns = ["model", "variant"], ["name", "batch"]
    table = pd.concat([frame, *ends]).pivot_table(index=place, columns=columns, values="value")
    table = table.reindex(pd.MultiIndex.from_frame(frame[place].drop_duplicates()))
    unquantized = table[table.index.get_level_values("variant") == BASELINE].droplevel("variant")
    faster = unquantized.reindex(table.index.get_level_values("model")).set_axis(table.index) / table
    table = table.join(faster[[name for name in FASTER if name in faster]].rename(columns=FASTER, level="name"))
    timed = {row["metric"] == "latency.encode" for row in rows}
    shown = GENERATION * (False in timed) + ENCODING * (True in timed), sorted(frame["batch"].unique())
    return table.reindex(columns=pd.MultiIndex.from_product(shown, names=["value", "batch"]))


def latency_table(table: pd.DataFrame, run: dict) -> Table:
    """Make the table of the values of `latencies`, with its caption; run: a row of them."""
    timed = table.columns.unique("value")
    generation = (
        f"Milliseconds per generated token with a KV cache, after prompts of {run['prompt']} tokens, by batch: median "
        f"of {run['repeats']} × {run['tokens']} decode steps [quartiles]; milliseconds of a prefill"
    )
    read = "pictures" if run.get("protocol") == PICTURES else f"sequences of {run['prompt']} tokens"
    encoding = (
        f"Milliseconds in which an encoder reads a batch of {read}, by batch: median of {run['repeats']} passes "
        "[quartiles]"
    )
    caption = (
        "; ".join([generation] * ("decode" in timed) + [encoding] * ("encode" in timed))
        + f"; and the speedup over {run['dtype']}. {run['device_name']}, {threads(run['threads'])}."
    )
    data = table.set_axis([f"{value}_batch_{batch}" for value, batch in table.columns], axis="columns").reset_index()
    cells = [
        [model, run["dtype"] if variant == BASELINE else variant, *_cells(row)]
        for (model, variant), row in table.iterrows()
    ]
    batches = table.columns.unique("batch")
    headers = [f"{SHOWN[value][0]} {batch}" for value in SHOWN if value in timed for batch in batches]
    return Table("table6", caption, ["model", "weights", *headers], cells, data, texts=2, baseline=run["dtype"])


def _cells(row: pd.Series) -> list[str]:
    cells = []
    for value in (value for value in SHOWN if value in row.index.unique("value")):
        form = f"{{:{SHOWN[value][1]}}}".format
        ends = [row[f"{value}_{quartile}"] for quartile in ("q1", "q3")] if value in QUARTILES else []
        for times in zip(row[value], *ends, strict=True):
            cells.append(MISSING if pd.isna(times[0]) else with_interval(form, *times))
    return cells


def latency_findings(table: pd.DataFrame) -> list[Finding]:
    """State the time of a decode step under each variant for the slowest model, at the smallest batch that was timed.

    table: the result of `latencies`. Times whose quartiles overlap are not called different.
    """
    if "decode" not in table.columns.unique("value"):
        return []
    batch = table.columns.unique("batch")[0]
    exact = table[(table.index.get_level_values("variant") == BASELINE) & table["decode", batch].notna()].droplevel(1)
    if exact.empty:
        return []
    model = exact["decode", batch].idxmax()
    rows = table.loc[model].drop(BASELINE)
    times = [
        _times(variant, exact.loc[model][:, batch], row[:, batch])
        for variant, row in rows[rows["decode", batch].notna()].iterrows()
    ]
    return [Finding(f"At batch {batch} a decode step of {model} takes {time}.", "table6") for time in times]


def _times(variant: str, before: pd.Series, after: pd.Series) -> str:
    time = f"{amount(after['decode'])} ms per token under {variant}"
    if before["decode_q1"] > after["decode_q3"] or before["decode_q3"] < after["decode_q1"]:
        return f"{time}, {1 / after['times_faster']:.2f} times as long as without quantization"
    return f"{time} and {amount(before['decode'])} ms without quantization; their quartiles overlap"
