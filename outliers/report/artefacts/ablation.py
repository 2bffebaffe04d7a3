"""What an ablation shows: section 4.2 of the paper."""

import pandas as pd

from outliers.models.names import short_name
from outliers.plot.ablation import ablation_bars
from outliers.quantization.schemes import BASELINE
from outliers.report.findings.ablation import ablation_findings
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, Table
from outliers.specification.kinds import Ablation

HEADERS = ["without", "method", "top-1 softmax (%)", "perplexity", "damage (%)"]


def ablation_section(rows: list[dict]) -> Section:
    """The summary of an ablation as a table and as bars, without the trace that has found its features."""
    rows = [row for row in rows if "subject" in row]
    found = ablation_summary(rows)
    table = ablation_table(found)
    drawings = [Drawing.of("ablation", "What the model loses without features.", ablation_bars(found))]
    scheme = rows[0].get("scheme", BASELINE)
    title = f"Ablation of {short_name(rows[0]['model'])}{'' if scheme == BASELINE else f' under {scheme}'}"
    return Section(title, rows, table.form("simple"), [table], drawings, findings=ablation_findings(found))


def ablation_summary(rows: list[dict]) -> pd.DataFrame:
    """`outliers.metrics.ablations.summary` of rows."""
    from outliers.metrics.ablations import damages, summary

    cells: dict[tuple, dict] = {}
    for row in rows:
        cell = {name: row.get(name) for name in ("subject", "method", "draw")} | {"features": tuple(row["features"])}
        cells.setdefault(tuple(cell.values()), cell)[row["metric"]] = row["value"]
    return summary(damages(list(cells.values())), rows[0]["seed"])


def ablation_table(found: pd.DataFrame) -> Table:
    """The summary as people read it; random features with the 95 % interval of their mean."""
    cells = [
        [
            _what(row),
            row["method"] or "-",
            _with_interval(row, "top1_softmax", 100),
            f"{row['perplexity']:.2f}",
            "-" if row["subject"] == "none" else _with_interval(row, "damage", 100),
        ]
        for row in found.to_dict("records")
    ]
    caption = "Features taken out: mean top-1 softmax probability of the attention, perplexity, and its increase."
    return Table("ablation", caption, HEADERS, cells, found, names=2)


def _what(row: dict) -> str:
    numbers = ", ".join(map(str, row["features"]))
    names = {
        "none": "nothing",
        "outliers": f"outliers {numbers}",
        "control": f"random features, {row['draws']:.0f} draws",
        "single": f"feature {numbers}",
    }
    return names[row["subject"]]


def _with_interval(row: dict, metric: str, unit: float) -> str:
    value = f"{row[metric] * unit:.2f}"
    if row["subject"] != "control":
        return value
    return f"{value} [{row[f'{metric}_low'] * unit:.2f}, {row[f'{metric}_high'] * unit:.2f}]"


ARTEFACTS = {"ablation": Artefact("Ablation", Ablation, ablation_section)}
