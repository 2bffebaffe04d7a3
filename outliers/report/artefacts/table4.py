"""Table 4 of the paper, one row a model, and the sections of Figures 3 and 4, which are drawn from its rows."""

import functools

import pandas as pd

from outliers.models.names import distinct_names
from outliers.plot.emergence import (
    Fit,
    figure3,
    figure3a,
    figure3b,
    figure4,
    figure4a,
    figure4b,
    fits_of,
)
from outliers.plot.style import count_label
from outliers.report.elsewhere import elsewhere
from outliers.report.paper import Artefact, Key, Published, grid, key_of
from outliers.report.section import Drawing, Section, Table
from outliers.specification.kinds import Emergence

OF_THE_MOST_COMMON = ["layers", "positions", "q1", "median", "q3"]
COLUMNS = [
    "perplexity",
    "parameters",
    "count",
    "one_sided",
    *OF_THE_MOST_COMMON,
    "top1_softmax",
    "top1_softmax_without",
]
HEADERS = [
    "Model",
    "PPL",
    "Params",
    "Count",
    "1-sided",
    "Layers",
    "SDims",
    "Quartiles",
    "Top-1 p",
    "w/o outliers",
]
PUBLISHED = Published(
    "LLM.int8(), Table 4",
    ("model", "metric"),
    grid(
        {
            "gpt2": (33.5, 117e6, 1, 1, 0.25, 0.06, -8, -7, -6, 0.45, 0.19),
            "gpt2-medium": (26.0, 345e6, 2, 1, 0.29, 0.18, 6, 7, 8, 0.45, 0.19),
            "fairseq-dense-125m": (25.7, 125e6, 2, 2, 0.25, 0.22, -40, -23, -11, 0.32, 0.24),
            "gpt2-large": (22.6, 762e6, 2, 0, 0.31, 0.16, -9, -6, 9, 0.41, 0.18),
            "gpt2-xl": (21.0, 1.5e9, 2, 1, 0.41, 0.35, -11, -9, -7, 0.41, 0.25),
            "fairseq-dense-1.3b": (15.9, 1.3e9, 4, 3, 0.64, 0.47, -33, -21, -11, 0.39, 0.15),
            "fairseq-dense-2.7b": (14.4, 2.7e9, 5, 5, 0.52, 0.18, -25, -16, -9, 0.45, 0.13),
            "gpt-j-6b": (13.8, 6.0e9, 6, 6, 0.62, 0.28, -21, -17, -14, 0.55, 0.10),
            "fairseq-dense-6.7b": (13.3, 6.7e9, 6, 6, 1.00, 0.75, -44, -40, -35, 0.35, 0.13),
            "fairseq-dense-13b": (12.5, 13e9, 7, 6, 1.00, 0.73, -63, -58, -45, 0.37, 0.16),
        },
        COLUMNS,
    ),
)
FIGURES = {  # caption of each pair of panels
    "figure3": "Layers and positions that the most common outlier feature affects, (a) by size and (b) by perplexity.",
    "figure4": "(a) Median magnitude of the most common outlier feature and (b) number of outlier features.",
}
PANELS = {  # what draws each alone, title, caption
    "figure3a": (
        figure3a,
        "Emergence by model size",
        "Layers and sequence positions affected by the most common outlier feature, by model size.",
    ),
    "figure3b": (
        figure3b,
        "Emergence by perplexity",
        "Layers and sequence positions affected by the most common outlier feature, by perplexity.",
    ),
    "figure4a": (
        figure4a,
        "Magnitude of outlier features",
        "Median magnitude of the most common outlier feature, by perplexity.",
    ),
    "figure4b": (figure4b, "Number of outlier features", "Number of outlier features, by perplexity."),
}
GREY_POINTS = "Grey: the models of the paper, as published (Table 4)."


def emergence_section(rows: list[dict]) -> Section:
    """Table 4, the exponential fits, and Figures 3 and 4."""
    models = distinct_models(rows)
    drawn = {"figure3": figure3(models, fits_of(models)), "figure4": figure4(models)}
    drawings = [Drawing(name, FIGURES[name], figure) for name, figure in drawn.items()]
    return table4_section(rows)._replace(drawings=drawings)


def table4_section(rows: list[dict]) -> Section:
    """Table 4 with the fits, and what others published for its models."""
    table, fits = emergence_table(rows), fits_of(distinct_models(rows))
    notes = [_fit_line(name, fit) for name, fit in fits.items()]
    twins = by_model(rows)["same_weights_as"].dropna()
    notes += [f"{model} holds the same weights as {twin}" for model, twin in twins.items()]
    of_fits = [{"fraction": name, **fit._asdict()} for name, fit in fits.items() if fit]
    further = {"fits": pd.DataFrame(of_fits, columns=["fraction", *Fit._fields])}
    others = elsewhere([row["model"] for row in rows])
    printed = "\n".join([table.form("simple"), "", *notes, *(["", others.form("simple")] if others else [])])
    tables = [table, others] if others else [table]
    return Section("Emergence of outlier features", rows, printed, tables, notes=notes, further=further)


def panel_section(name: str, rows: list[dict]) -> Section:
    """One panel of Figures 3 and 4, beside the paper's own models."""
    draw, title, caption = PANELS[name]
    drawing = Drawing(name, f"{caption} {GREY_POINTS}", draw(distinct_models(rows), published_models()))
    return Section(title, rows, f"{name}.png, {name}.svg", drawings=[drawing])


def measured(rows: list[dict]) -> dict[Key, float]:
    """The numbers of Table 4 by the keys of the published ones."""
    table = table4(rows).stack().dropna()
    return {(key_of(model), metric): value for (model, metric), value in table.items()}


def published_models() -> pd.DataFrame:
    """The published Table 4: one row a model, columns as `by_model` has them."""
    table = pd.Series(PUBLISHED.values).unstack()
    return table.astype(float).sort_values("perplexity", ascending=False)


def by_model(rows: list[dict]) -> pd.DataFrame:
    """The metrics of `table4_row` as columns, one row a model and checkpoint in the order of the rows.

    The index is the model's short name, or its whole one where two models share that; `parameters`, `architecture`,
    `checkpoint` and `alpha` stand beside the metrics.
    """
    wide: dict[tuple, dict] = {}
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows)
    for row in rows:
        place = row["model"], row.get("checkpoint")
        about = {
            name: row.get(name)
            for name in ("parameters", "architecture", "checkpoint", "alpha", "same_weights_as", "tokens_hash")
        }
        wide.setdefault(place, {"model": names[place], **about})[row["metric"]] = row["value"]
    return pd.DataFrame(wide.values()).set_index("model").reindex(columns=_columns(wide))


def _columns(wide: dict) -> list[str]:
    """All columns that occur, and those of Table 4 in any case."""
    return list(dict.fromkeys([name for row in wide.values() for name in row if name != "model"] + COLUMNS))


def distinct_models(rows: list[dict]) -> pd.DataFrame:
    """One row a model; of revisions that hold the same weights the first."""
    models = by_model(rows)
    return models[models["same_weights_as"].isna()]


def table4(rows: list[dict]) -> pd.DataFrame:
    """One row a model with the columns of the paper's Table 4; fractions and probabilities as such.

    Without an outlier feature there is no most common one: its columns are empty.
    """
    table = by_model(rows)[COLUMNS]
    table.loc[table["count"] == 0, OF_THE_MOST_COMMON] = float("nan")
    return table


def emergence_table(rows: list[dict]) -> Table:
    """The table with the paper's headers and roundings."""
    cells = [[model, *_cells(row)] for model, row in table4(rows).iterrows()]
    caption = (
        "Outlier features (count; of one sign), layers and sequence positions (SDims) that the most common one affects "
        "and quartiles of its values, mean top-1 softmax probability with and without outlier features."
    )
    return Table("table4", caption, HEADERS, cells, by_model(rows).drop(columns="alpha").reset_index())


def _cells(row: pd.Series) -> list[str]:
    quartiles = row[["q1", "median", "q3"]]
    return [
        f"{row['perplexity']:.1f}",
        count_label(row["parameters"]),
        f"{row['count']:.0f}",
        f"{row['one_sided']:.0f}",
        _percent(row["layers"], 0),
        _percent(row["positions"], 1),
        "-" if quartiles.isna().any() else "({:.1f}, {:.1f}, {:.1f})".format(*quartiles),
        _percent(row["top1_softmax"], 1),
        _percent(row["top1_softmax_without"], 1),
    ]


def _percent(value: float, digits: int) -> str:
    return "-" if pd.isna(value) else f"{value:.{digits}%}"


def _fit_line(name: str, fit: Fit | None) -> str:
    if fit is None:
        return (
            f"{name}: no exponential fits (it takes three models, two with hits at different perplexities, and growth)"
        )
    pairs = ((fit.full, *fit.full_interval), (fit.scale, *fit.scale_interval))
    full, scale = ("{:.3g} [{:.3g}, {:.3g}]".format(*pair) for pair in pairs)
    return f"{name} = exp((a − perplexity) / b): a = {full}, b = {scale} (95 % intervals, {fit.points} models)"


ARTEFACTS = {
    "table4": Artefact("Table 4", Emergence, table4_section, PUBLISHED, measured),
    **{
        panel: Artefact(panel.replace("figure", "Figure "), Emergence, functools.partial(panel_section, panel))
        for panel in PANELS
    },
}
