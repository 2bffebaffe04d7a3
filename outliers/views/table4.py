"""Table 4 of the paper, one row per model, and the sections of Figures 3 and 4, which are drawn from its rows."""

import pandas as pd

from outliers.models.names import short_name
from outliers.published.facts import published_elsewhere
from outliers.show.section import Context, Drawing, Section
from outliers.views.emergence import (
    Fit,
    by_model,
    distinct_models,
    emergence_findings,
    emergence_table,
    figure3,
    figure4,
    fit_line,
    fits_of,
)
from outliers.views.growth import growth, rows_of_watched

FIGURES = {  # caption of each pair of panels
    figure3: "Layers and positions affected by the most common outlier feature, (a) by size and (b) by perplexity.",
    figure4: "(a) Median magnitude of the most common outlier feature and (b) number of outlier features.",
}
AFFECTED = "Layers and sequence positions affected by the most common outlier feature,"
PANELS = {  # panel alone: figure function, panel, title, caption
    "figure3a": (figure3, "a", "Emergence by model size", f"{AFFECTED} by model size."),
    "figure3b": (figure3, "b", "Emergence by perplexity", f"{AFFECTED} by perplexity."),
    "figure4a": (
        figure4,
        "a",
        "Magnitude of outlier features",
        "Median magnitude of the most common outlier feature, by perplexity.",
    ),
    "figure4b": (figure4, "b", "Number of outlier features", "Number of outlier features, by perplexity."),
}
GROWTH = (
    "largest |x| of each hidden state, number of outlier features, layers and positions affected by the most common "
    "one, and perplexity, during training."
)
BAND = " Shaded: the standard error of the perplexity over the text."
GREY_POINTS = "Grey: the models of the paper, as published (Table 4)."


def emergence_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show Table 4, the exponential fits, Figures 3 and 4, and the growth of outlier features in training runs."""
    drawings = [_growth_drawing(*watched, number) for number, watched in enumerate(rows_of_watched(rows).items(), 1)]
    drawings += [Drawing.of(draw.__name__, caption, draw(rows, paper=False)) for draw, caption in FIGURES.items()]
    return table4_section(rows)._replace(drawings=drawings)


def _growth_drawing(model: str, rows: list[dict], number: int) -> Drawing:
    name = "growth" if number == 1 else f"growth-{number}"
    band = BAND * any("standard_error" in row for row in rows)
    return Drawing.of(name, f"{short_name(model)}: {GROWTH}{band}", growth(rows))


def table4_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show Table 4 with the fits, and values that others published for its models."""
    models = distinct_models(rows)
    table, fits = emergence_table(rows), fits_of(models)
    notes = [fit_line(name, fit) for name, fit in fits.items()]
    twins = by_model(rows)["same_weights_as"].dropna()
    notes += [f"{model} holds the same weights as {twin}" for model, twin in twins.items()]
    fit_rows = [{"fraction": name, **fit._asdict()} for name, fit in fits.items() if fit]
    further = {"fits": pd.DataFrame(fit_rows, columns=["fraction", *Fit._fields])}
    others = published_elsewhere([row["model"] for row in rows])
    printed = "\n".join([table.printed, "", *notes, *(["", others.printed] if others else [])])
    tables = [table, others] if others else [table]
    findings = emergence_findings(models, fits, table.name)
    title = "Emergence of outlier features"
    return Section(title, rows, tables, notes=notes, further=further, findings=findings, printed=printed)


def families_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show Table 4 of models whose perplexities are not comparable, and therefore without fits or figures."""
    table = emergence_table(rows)
    findings = emergence_findings(distinct_models(rows), {}, table.name)
    return Section("Outlier features of other families", rows, tables=[table], findings=findings)


def panel_section(name: str, rows: list[dict], _context: Context | None = None) -> Section:
    """Show one panel of Figure 3 or 4, beside the paper's own models."""
    draw, panel, title, caption = PANELS[name]
    drawing = Drawing.of(name, f"{caption} {GREY_POINTS}", draw(rows, panel=panel))
    models = distinct_models(rows)
    findings = emergence_findings(models, fits_of(models), name)
    return Section(title, rows, drawings=[drawing], findings=findings, printed=f"{name}.png, {name}.svg")
