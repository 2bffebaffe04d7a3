"""Table 4 of the paper, one row a model, and the sections of Figures 3 and 4, which are drawn from its rows."""

import functools
from collections.abc import Mapping

import pandas as pd

from outliers.models.names import short_name
from outliers.paper.facts import elsewhere
from outliers.paper.published import Artefact, Key, Published, grid, key_of
from outliers.plot.emergence import BITS, WHOLE, Fit, by_model, distinct_models, figure3, figure4, fits_of
from outliers.plot.published import TABLE4, TABLE4_COLUMNS
from outliers.plot.training import growth, rows_of_watched
from outliers.show.axes import count_label
from outliers.show.section import Drawing, Failures, Finding, Section, failures
from outliers.show.tables import Table, with_interval
from outliers.show.words import amount, count, part
from outliers.specification.kinds import Emergence

OF_THE_MOST_COMMON = ["layers", "positions", "q1", "median", "q3"]
COLUMNS = (
    ("Model", "{model}"),
    ("PPL", "{perplexity:.1f}"),
    ("Params", lambda row: count_label(row["parameters"])),
    ("Count", "{count:.0f}"),
    ("1-sided", "{one_sided:.0f}"),
    ("Layers", "{layers:.0%}"),
    ("SDims", "{positions:.1%}"),
    ("Quartiles", "({q1:.1f}, {median:.1f}, {q3:.1f})"),
    ("Top-1 p", "{top1_softmax:.1%}"),
    ("w/o outliers", "{top1_softmax_without:.1%}"),
)
OF_BITS = ("Bits/byte", f"{{{BITS}:.3f}}")  # behind perplexity, which does not compare across vocabularies
PUBLISHED = Published(
    "LLM.int8(), Table 4",
    ("model", "metric"),
    grid(TABLE4, TABLE4_COLUMNS),
)
FIGURES = {  # caption of each pair of panels
    figure3: "Layers and positions affected by the most common outlier feature, (a) by size and (b) by perplexity.",
    figure4: "(a) Median magnitude of the most common outlier feature and (b) number of outlier features.",
}
AFFECTED = "Layers and sequence positions affected by the most common outlier feature,"
PANELS = {  # what draws each alone, which panel it is, title, caption
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
GREY_POINTS = "Grey: the models of the paper, as published (Table 4)."


@failures(Failures.APART)
def emergence_section(rows: list[dict]) -> Section:
    """Table 4, the exponential fits, Figures 3 and 4, and how outlier features grew in what was watched in training."""
    drawings = [_growth_drawing(*watched, number) for number, watched in enumerate(rows_of_watched(rows).items(), 1)]
    drawings += [Drawing.of(draw.__name__, caption, draw(rows, paper=False)) for draw, caption in FIGURES.items()]
    return table4_section(rows)._replace(drawings=drawings)


def _growth_drawing(model: str, rows: list[dict], number: int) -> Drawing:
    """Of one of the models that were watched; the file of the first one has no number."""
    name = "growth" if number == 1 else f"growth-{number}"
    return Drawing.of(name, f"{short_name(model)}: {GROWTH}", growth(rows))


@failures(Failures.APART)
def table4_section(rows: list[dict]) -> Section:
    """Table 4 with the fits, and what others published for its models."""
    models = distinct_models(rows)
    table, fits = emergence_table(rows), fits_of(models)
    notes = [_fit_line(name, fit) for name, fit in fits.items()]
    twins = by_model(rows)["same_weights_as"].dropna()
    notes += [f"{model} holds the same weights as {twin}" for model, twin in twins.items()]
    fit_rows = [{"fraction": name, **fit._asdict()} for name, fit in fits.items() if fit]
    further = {"fits": pd.DataFrame(fit_rows, columns=["fraction", *Fit._fields])}
    others = elsewhere([row["model"] for row in rows])
    printed = "\n".join([table.form("simple"), "", *notes, *(["", others.form("simple")] if others else [])])
    tables = [table, others] if others else [table]
    findings = emergence_findings(models, fits, table.name)
    title = "Emergence of outlier features"
    return Section(title, rows, printed, tables, notes=notes, further=further, findings=findings)


@failures(Failures.APART)
def families_section(rows: list[dict]) -> Section:
    """Table 4 of models whose perplexities are of different things, so that nothing is fitted or drawn by them."""
    table = emergence_table(rows)
    findings = emergence_findings(distinct_models(rows), {}, table.name)
    return Section("Outlier features of other families", rows, table.form("simple"), [table], findings=findings)


def panel_section(name: str, rows: list[dict]) -> Section:
    """One panel of Figures 3 and 4, beside the paper's own models."""
    draw, panel, title, caption = PANELS[name]
    drawing = Drawing.of(name, f"{caption} {GREY_POINTS}", draw(rows, panel=panel))
    models = distinct_models(rows)
    findings = emergence_findings(models, fits_of(models), name)
    return Section(title, rows, f"{name}.png, {name}.svg", drawings=[drawing], findings=findings)


def measured(rows: list[dict]) -> dict[Key, float]:
    """The numbers of Table 4 by the keys of the published ones."""
    table = table4(rows).stack().dropna()
    return {(key_of(model), metric): value for (model, metric), value in table.items()}


def table4(rows: list[dict]) -> pd.DataFrame:
    """One row a model with the columns of the paper's Table 4; fractions and probabilities as such.

    Without an outlier feature there is no most common one: its columns are empty.
    """
    table = by_model(rows)[TABLE4_COLUMNS]
    table.loc[table["count"] == 0, OF_THE_MOST_COMMON] = float("nan")
    return table


def emergence_table(rows: list[dict]) -> Table:
    """The table with the paper's headers and roundings."""
    caption = (
        "Number of outlier features (all; of one sign), layers and sequence positions (SDims) affected by the most "
        "common one, quartiles of its values, and mean top-1 softmax probability of the attention with and without "
        "outlier features."
    )
    data = by_model(rows).drop(columns=["alpha", WHOLE])
    bits = [BITS] if BITS in data else []
    columns = [*COLUMNS[:2], *((OF_BITS,) if bits else ()), *COLUMNS[2:]]
    return Table.of("table4", caption, columns, data.reset_index(), table4(rows).join(data[bits]).reset_index())


def _fit_line(name: str, fit: Fit | None) -> str:
    if fit is None:
        return (
            f"{name}: no exponential fit (it requires three models, two with hits at different perplexities, and "
            "growth)"
        )
    pairs = ((fit.full, *fit.full_interval), (fit.scale, *fit.scale_interval))
    full, scale = (with_interval(amount, *pair) for pair in pairs)
    return f"{name} = exp((a − perplexity) / b): a = {full}, b = {scale} (95 % intervals, {fit.points} models)"


APART = 1.5  # sizes of models are told apart from this factor on


def emergence_findings(models: pd.DataFrame, fits: Mapping[str, Fit | None], at: str) -> list[Finding]:
    """Number of models with outlier features, the most common one of all, and their growth as perplexity falls.

    models: one row a model, as `distinct_models` of Table 4 makes it. at: the table or figure that shows it.
    """
    having = models[models["count"] > 0]
    sentences = [_having(len(having), len(models))]
    if not having.empty:
        sentences += [_most_common(having), *_onset(models, having)]
    sentences += [
        f"The fraction of affected {name} grows e-fold as the perplexity falls by "
        f"{with_interval(amount, fit.scale, *fit.scale_interval)} (95 % interval, {fit.points} models)."
        for name, fit in fits.items()
        if fit and fit.is_significant
    ]
    return [Finding(sentence, at) for sentence in sentences]


def _having(number: int, every: int) -> str:
    if every == 1:
        return f"The model has {'an outlier feature' if number else 'no outlier feature'} by the criterion."
    verb = "has an outlier feature" if number < 2 else "have outlier features"
    return f"{count(number).capitalize()} of {count(every)} models {verb} by the criterion."


def _most_common(having: pd.DataFrame) -> str:
    most = having.loc[having["positions"].idxmax()]
    of = f"one of {count(int(most['count']))} in" if most["count"] > 1 else "that of"
    return (
        f"The most common outlier feature, {of} {most.name}, affects {part(most['layers'])} of layers and "
        f"{part(most['positions'])} of positions, with a median of {amount(most['median'])}."
    )


def _onset(models: pd.DataFrame, having: pd.DataFrame) -> list[str]:
    """The size from which on all models have outlier features and below which none has, if there is such a size."""
    without = models[models["count"] == 0]
    if without.empty or having["parameters"].min() < APART * without["parameters"].max():
        return []
    smallest, largest = having["parameters"].min(), without["parameters"].max()
    sizes = f"All models of at least {count_label(smallest)} parameters have outlier features"
    return [f"{sizes}, and none of at most {count_label(largest)}."]


ARTEFACTS = {
    "table4": Artefact("Table 4", Emergence, PUBLISHED, measured, table4_section),
    **{
        panel: Artefact(panel.replace("figure", "Figure "), Emergence, section=functools.partial(panel_section, panel))
        for panel in PANELS
    },
}
