"""Table 1 of the paper: schemes down, models across, perplexity in the cells; and the figure of what schemes cost."""

import pandas as pd
from tabulate import tabulate

from outliers.plot.published import FAIRSEQ, TABLE1
from outliers.plot.style import in_order
from outliers.plot.sweep import costs, names_of, sweep_costs
from outliers.quantization.schemes import BASELINE, label_of
from outliers.report.findings.sweep import sweep_findings
from outliers.report.paper import Artefact, Key, Published, grid, key_of
from outliers.report.section import Drawing, Section, Table, scatter_note
from outliers.specification.kinds import Experiment

PUBLISHED = Published(
    "LLM.int8(), Table 1",
    ("model", "scheme"),
    grid(dict(zip(FAIRSEQ, zip(*TABLE1.values(), strict=True), strict=True)), TABLE1),
    "{:.2f}",
)
LARGE = 1e7  # from here on powers of ten are written


def sweep_section(rows: list[dict]) -> Section:
    """What a sweep shows."""
    draws = rows[0].get("draws", 1)
    note = f"Compare within a column. {scatter_note(draws)}"
    tables = [perplexity_table(rows), *cost_table(rows)]
    caption = (
        "What each 8-bit scheme costs of perplexity, and what it cost the models of the paper (Table 1, grey). Hollow "
        "markers: outlier features in 16 bits. Bars: one standard deviation by rounding."
        if len(tables) > 1
        else "Perplexity by model size. Hollow markers: outlier features in 16 bits."
    )
    drawings = [Drawing.of("perplexity", caption, sweep_costs(rows))]
    printed = f"{terminal(table1(rows), scatter(rows))}\n\n{note}"
    models = dict.fromkeys(row["model"] for row in rows)
    names = dict(zip(models, names_of(models), strict=True))
    findings = sweep_findings(costs(rows), names)
    return Section("Perplexity under 8-bit schemes", rows, printed, tables, drawings, [note], findings=findings)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Perplexities by the keys of the published ones."""
    return {(key_of(row["model"]), row["scheme"]): row["value"] for row in rows}


def table1(rows: list[dict], column: str = "value") -> pd.DataFrame:
    """Perplexity, or another column of the rows, by scheme (index; those that come along in the order of `SCHEMES`,
    then others) and model (columns, in the order of the rows)."""
    frame = pd.DataFrame([row for row in rows if row["metric"] == "perplexity"])
    table = frame.reindex(columns=["scheme", "model", column]).pivot(index="scheme", columns="model", values=column)
    return table.loc[in_order(frame["scheme"]), frame["model"].unique()]


def scatter(rows: list[dict]) -> pd.DataFrame:
    """The standard deviation of each perplexity over draws, in the shape of `table1`; empty where there was one."""
    return table1(rows, "standard_deviation").astype(float)


def terminal(table: pd.DataFrame, scatter: pd.DataFrame) -> str:
    """The table for a terminal: scheme names as a user types them, model names broken at their hyphens."""
    headers = ["perplexity", *(name.replace("-", "\n") for name in names_of(table.columns))]
    cells = [[scheme, *_cells(table.loc[scheme], scatter.loc[scheme])] for scheme in table.index]
    align = ["left"] + ["right"] * len(table.columns)
    return tabulate(cells, headers, tablefmt="simple", disable_numparse=True, colalign=align)


def perplexity_table(rows: list[dict]) -> Table:
    """The table with the paper's own row labels."""
    return _with_labels("table1", "Perplexity by scheme and model.", "Perplexity", rows, ".2f")


def cost_table(rows: list[dict]) -> list[Table]:
    """What each scheme adds to the perplexity of a model, in per cent; none where fp32 was not measured."""
    found = costs(rows)
    if not found:
        return []
    dtype = rows[0]["dtype"]
    baseline = BASELINE if dtype == "float32" else f"{dtype} without quantization"
    caption = f"What each scheme adds to the perplexity under {baseline}, in per cent."
    return [_with_labels("table1_increase", caption, "Increase (%)", found, "+.2f")]


def _with_labels(name: str, caption: str, heading: str, rows: list[dict], form: str) -> Table:
    table, deviations = table1(rows), scatter(rows)
    cells = [
        [_label(scheme, rows[0]["dtype"]), *_cells(table.loc[scheme], deviations.loc[scheme], form)]
        for scheme in table.index
    ]
    return Table(name, caption, [heading, *names_of(table.columns)], cells, table.reset_index())


def _label(scheme: str, dtype: str) -> str:
    """The paper's, or ours; of a scheme of somebody else its name."""
    if scheme == BASELINE and dtype != "float32":
        return f"{dtype}, not quantized"
    return label_of(scheme)


def _cells(values: pd.Series, deviations: pd.Series, form: str = ".2f") -> list[str]:
    """What is missing is a dash, never a number; those of broken models are short."""
    return [
        "-" if pd.isna(value) else _cell(value, form) + ("" if pd.isna(deviation) else f"±{_cell(deviation, '.2f')}")
        for value, deviation in zip(values, deviations, strict=True)
    ]


def _cell(value: float, form: str) -> str:
    return f"{value:{form}}" if abs(value) < LARGE else f"{value:{form.replace('f', 'e')}}"


ARTEFACTS = {
    "table1": Artefact("Table 1", Experiment, sweep_section, PUBLISHED, measured),
    "sweep": Artefact("Sweep", Experiment, sweep_section),
}
