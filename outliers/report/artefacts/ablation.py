"""What an ablation shows: section 4.2 of the paper."""

import pandas as pd

from outliers.models.names import short_name
from outliers.plot.ablation import ablation_bars
from outliers.quantization.schemes import BASELINE
from outliers.report.findings.ablation import ablation_findings
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section
from outliers.report.tables import MISSING, Table, with_interval
from outliers.specification.kinds import Ablation

REMOVED = {  # subject of a row: what is taken out
    "none": "nothing",
    "outliers": "outliers {numbers}",
    "control": "random features, {draws:.0f} draws",
    "single": "feature {numbers}",
}


def ablation_section(rows: list[dict]) -> Section:
    """The summary of an ablation as a table and as bars, without the trace that has found its features."""
    rows = [row for row in rows if "subject" in row]
    summary = ablation_summary(rows)
    table = ablation_table(summary)
    drawings = [Drawing.of("ablation", "What the model loses without features.", ablation_bars(summary))]
    scheme = rows[0].get("scheme", BASELINE)
    title = f"Ablation of {short_name(rows[0]['model'])}{'' if scheme == BASELINE else f' under {scheme}'}"
    return Section(title, rows, table.form("simple"), [table], drawings, findings=ablation_findings(summary))


def ablation_summary(rows: list[dict]) -> pd.DataFrame:
    """`outliers.measurements.ablation.summary` of rows."""
    from outliers.measurements.ablation import damages, summary

    measurements: dict[tuple, dict] = {}
    for row in rows:
        about = {name: row.get(name) for name in ("subject", "method", "draw")} | {"features": tuple(row["features"])}
        measurements.setdefault(tuple(about.values()), about)[row["metric"]] = row["value"]
    return summary(damages(list(measurements.values())), rows[0]["seed"])


def ablation_table(summary: pd.DataFrame) -> Table:
    """The summary as people read it; random features with the 95 % interval of their mean."""
    caption = "Features taken out: mean top-1 softmax probability of the attention, perplexity, and its increase."
    return Table.of("ablation", caption, COLUMNS, summary, names=2)


def _removed(row: dict) -> str:
    return REMOVED[row["subject"]].format(numbers=", ".join(map(str, row["features"])), **row)


def _percent(row: dict, metric: str) -> str:
    ends = [row[f"{metric}_{end}"] for end in ("low", "high")] if row["subject"] == "control" else []
    return with_interval(lambda share: f"{100 * share:.2f}", row[metric], *ends)


COLUMNS = (
    ("without", _removed),
    ("method", lambda row: row["method"] or MISSING),
    ("top-1 softmax (%)", lambda row: _percent(row, "top1_softmax")),
    ("perplexity", "{perplexity:.2f}"),
    ("damage (%)", lambda row: MISSING if row["subject"] == "none" else _percent(row, "damage")),
)
ARTEFACTS = {"ablation": Artefact("Ablation", Ablation, ablation_section)}
