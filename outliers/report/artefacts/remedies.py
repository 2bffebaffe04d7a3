"""What saves a model: perplexity by number format and remedy, against bits; an experiment beyond the paper."""

import pandas as pd

from outliers.plot.remedies import NONE, Point, points, remedy_costs
from outliers.report.analysis import Value, unrounded
from outliers.report.findings.remedies import remedies_findings
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, printed
from outliers.report.tables import MISSING, Table, cell, scatter_note
from outliers.specification.kinds import Experiment

CAPTION = (
    "What number formats add to the perplexity of {}, with remedies and without; behind a format stand the bits of a "
    "value, scales included, on average of inputs and weights. Bars: one standard deviation by rounding. Published, of "
    "other texts: LLaMA-2-7B (QuaRot), 13 billion parameters (absmax), OPT-175B (SmoothQuant, LLM.int8())."
)


def remedies_section(rows: list[dict]) -> Section:
    """What a sweep of formats with remedies shows."""
    note, measured = scatter_note(rows[0].get("draws", 1)), points(rows)
    models = list(dict.fromkeys(point.model for point in measured))
    tables = [remedies_table(model, [point for point in measured if point.model == model]) for model in models]
    files = ["remedies"] if len(models) == 1 else [table.name for table in tables]
    drawings = [
        Drawing.of(file, CAPTION.format(model), remedy_costs(rows, model=model))
        for file, model in zip(files, models, strict=True)
    ]
    findings = remedies_findings(measured, NONE)
    return Section("What saves a model", rows, printed(tables, [note]), tables, drawings, [note], findings=findings)


def remedies_table(model: str, points: list[Point]) -> Table:
    """Formats down, remedies across; in the cells perplexity with its scatter."""
    remedies = list(dict.fromkeys(point.remedy for point in points))
    cells = []
    for format in dict.fromkeys(point.format for point in points):
        of_format = {point.remedy: point for point in points if point.format == format}
        bits = next(iter(of_format.values()))
        least = min(point.perplexity.mean for point in of_format.values())
        columns = {remedy: _cell(point.perplexity, least) for remedy, point in of_format.items()}
        cells.append(
            [
                format,
                f"{bits.weight_bits:.2f}, {bits.activation_bits:.2f}",
                *(columns.get(remedy, MISSING) for remedy in remedies),
            ]
        )
    caption = (
        f"Perplexity of {model} by number format, with the bits of its weights and inputs, and by remedy; the least of "
        "each format is marked."
    )
    data = pd.DataFrame(map(unrounded, points))
    return Table(f"remedies_{model}", caption, ["format", "bits", *remedies], cells, data)


def _cell(perplexity: Value, least: float) -> str:
    form = ".2f" if perplexity.mean < 1e3 else ".0f" if perplexity.mean < 1e5 else ".1e"
    return cell(form, *perplexity) + ("*" if perplexity.mean == least else "")


ARTEFACTS = {"remedies": Artefact("Remedies", Experiment, remedies_section)}
