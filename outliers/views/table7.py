"""Tables 7, 9 and 10 of the paper: perplexity after training and fine-tuning in int8, compared with 16 bits."""

import pandas as pd

from outliers.published.numbers import TABLE7, CellKey, numbers_of
from outliers.show.section import Context, Section
from outliers.show.tables import MISSING, Table, seeds_note
from outliers.views.causes import trained
from outliers.views.training import (
    HEADERS,
    int8_findings,
    int8_table,
    perplexity_cells,
    setting_row,
    settings,
    signed_increase,
)

# Rows of Table 9 that our runs measure; the paper prints for vector-wise what Table 10 prints for FFN.
METHODS = {"32-bit Baseline": "16 bits", "Vector-wise": "FFN"}
CAPTION = (
    "Parts in int8 during training and share of features in 16 bits; perplexity of the model with its int8 products, "
    "as trained, and of the same weights in float32, each with its increase over the run in 16 bits, in per cent. ±: "
    "half of a 95 % interval; brackets: the interval."
)
PAPERS_INCREASE = "increase of perplexity of the paper's models, in per cent."
METHODS_CAPTION = (
    "Measured perplexity of {}. The first row trains in 16 bits; vector-wise is FFN in int8, whose scores the paper "
    "prints here. The other methods were not run."
)


def table7_section(rows: list[dict], _context: Context | None = None) -> Section:
    plain = {size: ppl for (size, int8, _), ppl in TABLE7.items() if int8 == "16 bits"}
    columns: dict[str, dict[CellKey, str]] = {f"{size} (%)": {} for size in plain}
    for (size, *setting), ppl in TABLE7.items():
        if setting[0] != "16 bits":
            columns[f"{size} (%)"][tuple(setting)] = signed_increase(ppl / plain[size])
    return _section(rows, "Training in int8", "table7", columns, f"{CAPTION} Right: {PAPERS_INCREASE}")


def table10_section(rows: list[dict], _context: Context | None = None) -> Section:
    return _section(rows, "Fine-tuning in int8", "table10", {}, CAPTION)


def _section(
    rows: list[dict], title: str, name: str, published: dict[str, dict[CellKey, str]], caption: str
) -> Section:
    ends, notes = settings(rows), [seeds_note(trained(rows))]
    tables = [int8_table(name, caption, ends, published)]
    return Section(title, rows, tables=tables, notes=notes, findings=int8_findings(ends, name))


def table9_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show fine-tuning in int8 beside the other methods of Table 9, which were not run."""
    plain = {setting.int8: setting for setting in settings(rows) if setting.decomposition == "0 %"}
    ours = {method: plain[int8] for method, int8 in METHODS.items() if int8 in plain}
    cells, data = [], []
    for method in dict.fromkeys(method for method, _ in numbers_of("table9", ("method", "task"))):
        setting = ours.get(method)
        cells.append([method, *(perplexity_cells(setting)[:2] if setting else ("not run", MISSING))])
        data.append({"method": method, **(setting_row(setting) if setting else {})})
    caption = METHODS_CAPTION.format(", ".join(dict.fromkeys(setting.model for setting in ours.values())))
    tables = [Table("table9", caption, ["Method", *HEADERS[:2]], cells, pd.DataFrame(data))]
    notes = [seeds_note(trained(rows))]
    return Section("Fine-tuning in int8, and other methods", rows, tables=tables, notes=notes)
