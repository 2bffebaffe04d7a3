"""The largest numbers in each model under each variant, as a table and sentences."""

from collections.abc import Mapping

import pandas as pd

from outliers.errors import joined_names
from outliers.metrics.records import LIMITS
from outliers.show.section import Context, Finding, Section, of_subjects, subject_of, together
from outliers.show.tables import MISSING, Table
from outliers.show.words import amount

LOGIT = "range.attention_logit"
WHAT = {
    "range.input": "input",
    "range.block_sum": "sum of 32 inputs",
    "range.output": "output",
    LOGIT: "attention logit",
}
CAPTION = (
    "The largest magnitudes of each kind over all layers, and the formats that do not hold them, e4m3 without a scale. "
    "Block formats such as Q8_1 keep the sum of 32 consecutive inputs of a token in float16. Attention logits "
)


def beyond(value: float) -> list[str]:
    """Return the formats that cannot represent a value, the narrowest first."""
    return [name for name, limit in LIMITS.items() if value > limit]


COLUMNS = (
    ("", lambda row: WHAT[row["metric"]]),
    ("role", lambda row: row["role"] or MISSING),
    ("layer", "{layer:.0f}"),
    ("largest", lambda row: amount(row["value"])),
    ("beyond", lambda row: ", ".join(beyond(row["value"])) or MISSING),
)


def range_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show the largest numbers of each model under each variant; rows of other metrics are left out."""
    return together("Ranges", of_subjects([row for row in rows if row["metric"].startswith("range.")], _section))


def _section(rows: list[dict], ending: str) -> Section:
    data = pd.DataFrame(rows).reindex(columns=["metric", "role", "layer", "projection", "value"])
    data = data.fillna({"role": "", "projection": ""})
    largest = data.loc[data.groupby(["metric", "role"], sort=False)["value"].idxmax()]
    known = LOGIT in set(largest["metric"])
    caption = CAPTION + ("are before the softmax." if known else "are unknown, as this attention shows none.")
    table = Table.of(f"range{ending}", caption, COLUMNS, data, largest, texts=("", "role", "beyond"))
    subject = subject_of(rows[0])
    findings = [Finding(f"{subject}: {sentence}", table.name) for sentence in _sentences(largest)]
    return Section(f"Range of {subject}", rows, tables=[table], findings=findings)


def _sentences(largest: pd.DataFrame) -> list[str]:
    """State the largest number beyond float16, inputs first; or that float16 holds all numbers."""
    ordered = largest.sort_values("value", ascending=False, kind="stable").to_dict("records")
    out = [row for row in ordered if row["value"] > LIMITS["float16"]]
    if not out:
        most = ordered[0]
        other = "" if LOGIT in set(largest["metric"]) else " but attention logits, which are unknown"
        most = f"{amount(most['value'])}, {place_of(most)}"
        return [f"float16 holds every number of the pass{other}; the largest is {most}."]
    out.sort(key=lambda row: row["metric"] != "range.input")
    further = f"; beyond it, too: {joined_names([place_of(row) for row in out[1:]])}" if out[1:] else ""
    return [f"{beyond_float16(out[0]['value'], place_of(out[0]))}{further}."]


def beyond_float16(value: float, place: str) -> str:
    """Write a sentence without its full stop: layer 3, ffn_out: 70,003 is beyond float16; bfloat16 holds it."""
    holds = "bfloat16 holds it" if value <= LIMITS["bfloat16"] else "bfloat16 does not hold it either"
    return f"{place}: {amount(value)} is beyond float16; {holds}"


def place_of(row: Mapping) -> str:
    role = f", {row['role']}" if row["role"] else ""
    what = {"range.input": "", "range.output": " output", "range.block_sum": " sum of 32 inputs"}.get(
        row.get("metric", "range.input")
    )
    return f"layer {row['layer']:.0f}{role}{', attention logit' if what is None else what}"
