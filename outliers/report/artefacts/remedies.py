"""What saves a model: perplexity by number format and remedy, against bits; an experiment beyond the paper."""

from collections.abc import Iterable

import pandas as pd

from outliers.plot.remedies import NONE, Point, points, remedy_costs
from outliers.report.findings.remedies import remedies_findings
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, Table, scatter_note
from outliers.specification.kinds import Experiment

CAPTION = (
    "What number formats add to the perplexity of {}, with remedies and without; behind a format stand the bits of a "
    "value, scales included, on average of inputs and weights. Bars: one standard deviation by rounding. Published, of "
    "other texts: LLaMA-2-7B (QuaRot), 13 billion parameters (absmax), OPT-175B (SmoothQuant, LLM.int8())."
)


def remedies_section(rows: list[dict]) -> Section:
    """What a sweep of formats with remedies shows."""
    note, found = scatter_note(rows[0].get("draws", 1)), points(rows)
    tables = [remedies_table(model, of_model) for model, of_model in _by_model(found)]
    drawings = [
        Drawing.of(_named("remedies", model, found), CAPTION.format(model), remedy_costs(rows, model=model))
        for model, _ in _by_model(found)
    ]
    printed = "\n\n".join([*(table.printed for table in tables), note])
    findings = remedies_findings(found, NONE)
    return Section("What saves a model", rows, printed, tables, drawings, [note], findings=findings)


def _by_model(found: list[Point]) -> Iterable[tuple[str, list[Point]]]:
    models = dict.fromkeys(point.model for point in found)
    return [(model, [point for point in found if point.model == model]) for model in models]


def _named(stem: str, model: str, found: list[Point]) -> str:
    """Of files: with the model where there are several."""
    return stem if len({point.model for point in found}) == 1 else f"{stem}_{model}"


def remedies_table(model: str, found: list[Point]) -> Table:
    """Formats down, remedies across; in the cells perplexity with its scatter."""
    remedies = list(dict.fromkeys(point.remedy for point in found))
    cells = []
    for format in dict.fromkeys(point.format for point in found):
        of_format = {point.remedy: point for point in found if point.format == format}
        bits = next(iter(of_format.values()))
        best = min(point.perplexity for point in of_format.values())
        columns = [_cell(of_format.get(remedy), best) for remedy in remedies]
        cells.append([format, f"{bits.weight_bits:.2f}, {bits.activation_bits:.2f}", *columns])
    caption = (
        f"Perplexity of {model} by number format, with the bits of its weights and inputs, and by remedy; the least of "
        "each format is marked."
    )
    return Table(f"remedies_{model}", caption, ["format", "bits", *remedies], cells, pd.DataFrame(found))


def _cell(point: Point | None, best: float) -> str:
    if point is None:
        return "-"
    form = ".2f" if point.perplexity < 1e3 else ".0f" if point.perplexity < 1e5 else ".1e"
    scatter = "" if point.deviation is None else f"±{point.deviation:{form}}"
    return f"{point.perplexity:{form}}{scatter}{'*' if point.perplexity == best else ''}"


ARTEFACTS = {"remedies": Artefact("Remedies", Experiment, remedies_section)}
