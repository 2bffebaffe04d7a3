"""What attention in int8 costs at evaluation, beside the scheme of the projections; an experiment beyond the paper."""

import pandas as pd

from outliers.plot.attention import Point, attention_costs, points
from outliers.plot.style import in_order
from outliers.report.findings.attention import attention_findings
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, Table, scatter_note
from outliers.specification.kinds import Experiment

CAPTION = (
    "What schemes of the projections add to perplexity, with attention in 16 bits, in int8, and in int8 but for a "
    "share of the inner dimension of its products; or one of the two products alone in int8. Right: a model of 209 "
    "million parameters that was trained so, with projections in int8 (LLM.int8(), Table 7). Bars: one standard "
    "deviation by rounding."
)


def attention_section(rows: list[dict]) -> Section:
    """What a sweep of schemes with attention in 16 bits and in int8 shows."""
    note, found = scatter_note(rows[0].get("draws", 1)), points(rows)
    tables = [attention_table(model, found) for model in dict.fromkeys(point.model for point in found)]
    drawings = [Drawing.of("attention", CAPTION, attention_costs(rows))]
    printed = "\n\n".join([*(table.printed for table in tables), note])
    findings = attention_findings(found)
    return Section("Attention in int8", rows, printed, tables, drawings, [note], findings=findings)


def attention_table(model: str, found: list[Point]) -> Table:
    """Schemes of the projections down, attention across; in the cells perplexity with its scatter."""
    own = [point for point in found if point.model == model]
    columns = list(dict.fromkeys(point.attention for point in own))
    by_place = {(point.scheme, point.attention): point for point in own}
    cells = [
        [scheme, *(_cell(by_place.get((scheme, column))) for column in columns)]
        for scheme in in_order(point.scheme for point in own)
    ]
    caption = f"Perplexity of {model} by scheme of the projections and by attention."
    data = pd.DataFrame([{**point._asdict(), "increase": point.increase} for point in own])
    return Table(f"attention_{model}", caption, ["scheme", *columns], cells, data)


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    return f"{point.perplexity:.2f}" + ("" if point.deviation is None else f"±{point.deviation:.2f}")


ARTEFACTS = {"attention": Artefact("Attention in int8", Experiment, attention_section)}
