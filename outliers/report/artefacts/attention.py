"""What attention in int8 costs at evaluation, beside the scheme of the projections; an experiment beyond the paper."""

import pandas as pd

from outliers.plot.attention import Point, attention_costs, points
from outliers.plot.legends import in_order
from outliers.report.analysis import unrounded
from outliers.report.findings.attention import attention_findings
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, printed
from outliers.report.tables import MISSING, Table, cell, scatter_note
from outliers.specification.kinds import Experiment

CAPTION = (
    "What schemes of the projections add to perplexity, with attention in 16 bits, in int8, and in int8 but for a "
    "share of the inner dimension of its products; or one of the two products alone in int8. Right: a model of 209 "
    "million parameters that was trained so, with projections in int8 (LLM.int8(), Table 7). Bars: one standard "
    "deviation by rounding."
)

DATA = ["model", "scheme", "attention", "perplexity", "deviation", "ratio", "alpha", "increase"]  # of the CSV file


def attention_section(rows: list[dict]) -> Section:
    """What a sweep of schemes with attention in 16 bits and in int8 shows."""
    note, measured = scatter_note(rows[0].get("draws", 1)), points(rows)
    tables = [attention_table(model, measured) for model in dict.fromkeys(point.model for point in measured)]
    drawings = [Drawing.of("attention", CAPTION, attention_costs(rows))]
    findings = attention_findings(measured)
    return Section("Attention in int8", rows, printed(tables, [note]), tables, drawings, [note], findings=findings)


def attention_table(model: str, points: list[Point]) -> Table:
    """Schemes of the projections down, attention across; in the cells perplexity with its scatter."""
    own = [point for point in points if point.model == model]
    columns = list(dict.fromkeys(point.attention for point in own))
    cells = {(point.scheme, point.attention): cell(".2f", *point.perplexity) for point in own}
    lines = [
        [scheme, *(cells.get((scheme, column), MISSING) for column in columns)]
        for scheme in in_order(point.scheme for point in own)
    ]
    caption = f"Perplexity of {model} by scheme of the projections and by attention."
    data = pd.DataFrame([{**unrounded(point), "increase": 100 * point.cost.mean} for point in own], columns=DATA)
    return Table(f"attention_{model}", caption, ["scheme", *columns], lines, data)


ARTEFACTS = {"attention": Artefact("Attention in int8", Experiment, attention_section)}
