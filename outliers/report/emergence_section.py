"""What the measurement of Table 4 shows: the table, Figures 3 and 4, or one panel of them."""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from outliers.report.emergence import Fit, fits_of
from outliers.report.emergence_figures import figure3, figure4
from outliers.report.paper import published_models
from outliers.report.section import Drawing, Section
from outliers.report.table4 import by_model, published_table

CAPTIONS = {
    "figure3": "Layers and positions that the most common outlier feature affects, (a) by size and (b) by perplexity.",
    "figure4": "(a) Median magnitude of the most common outlier feature and (b) number of outlier features.",
    "figure3a": "Layers and sequence positions affected by the most common outlier feature, by model size.",
    "figure3b": "Layers and sequence positions affected by the most common outlier feature, by perplexity.",
    "figure4a": "Median magnitude of the most common outlier feature, by perplexity.",
    "figure4b": "Number of outlier features, by perplexity.",
}
TITLES = {
    "figure3a": "Emergence by model size",
    "figure3b": "Emergence by perplexity",
    "figure4a": "Magnitude of outlier features",
    "figure4b": "Number of outlier features",
}
GREY_POINTS = "Grey: the models of the paper, as published (Table 4)."


def emergence_section(rows: list[dict]) -> Section:
    """Table 4, the exponential fits, and Figures 3 and 4."""
    models = distinct_models(rows)
    drawings = [
        Drawing("figure3", CAPTIONS["figure3"], figure3(models, fits_of(models))),
        Drawing("figure4", CAPTIONS["figure4"], figure4(models)),
    ]
    return table4_section(rows)._replace(drawings=drawings)


def table4_section(rows: list[dict]) -> Section:
    """Table 4 with the fits."""
    table, fits = published_table(rows), fits_of(distinct_models(rows))
    notes = [_fit_line(name, fit) for name, fit in fits.items()]
    twins = by_model(rows)["same_weights_as"].dropna()
    notes += [f"{model} holds the same weights as {twin}" for model, twin in twins.items()]
    of_fits = [{"fraction": name, **fit._asdict()} for name, fit in fits.items() if fit]
    further = {"fits": pd.DataFrame(of_fits, columns=["fraction", *Fit._fields])}
    printed = "\n".join([table.form("simple"), "", *notes])
    return Section("Emergence of outlier features", printed, [table], [], notes, further, rows)


def panel_section(draw: Callable[[pd.DataFrame, pd.DataFrame], Figure], rows: list[dict]) -> Section:
    """One panel of Figures 3 and 4, beside the paper's own models."""
    name = draw.__name__
    drawing = Drawing(name, f"{CAPTIONS[name]} {GREY_POINTS}", draw(distinct_models(rows), published_models()))
    return Section(TITLES[name], f"{name}.png, {name}.svg", [], [drawing], [], {}, rows)


def distinct_models(rows: list[dict]) -> pd.DataFrame:
    """One row a model; of revisions that hold the same weights the first."""
    models = by_model(rows)
    return models[models["same_weights_as"].isna()]


def _fit_line(name: str, fit: Fit | None) -> str:
    if fit is None:
        return (
            f"{name}: no exponential fits (it takes three models, two with hits at different perplexities, and growth)"
        )
    pairs = ((fit.full, *fit.full_interval), (fit.scale, *fit.scale_interval))
    full, scale = ("{:.3g} [{:.3g}, {:.3g}]".format(*pair) for pair in pairs)
    return f"{name} = exp((a − perplexity) / b): a = {full}, b = {scale} (95 % intervals, {fit.points} models)"
