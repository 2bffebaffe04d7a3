"""Tables 7, 9 and 10 of the paper: training and fine-tuning in int8, ours by perplexity beside 16 bits."""

import pandas as pd

from outliers.paper.published import Artefact, Key, Published, grid
from outliers.presets.training import Training
from outliers.show.axes import count_label
from outliers.show.section import Section, printed
from outliers.show.tables import MISSING, Table, seeds_note
from outliers.views.causes import trained
from outliers.views.published import TABLE7
from outliers.views.training import HEADERS, int8_findings, int8_table, perplexities, settings, signed, unrounded

# RoBERTa-large, fine-tuned on each task of GLUE.
TASKS = ["MNLI", "QNLI", "QQP", "RTE", "SST-2", "MRPC", "CoLA", "STS-B", "mean"]
TABLE10 = {
    ("16 bits", "0 %"): (90.4, 94.9, 92.2, 84.5, 96.4, 90.1, 67.4, 93.0, 88.6),
    ("FFN", "0 %"): (90.2, 94.7, 92.3, 85.4, 96.4, 91.0, 68.6, 91.9, 88.8),
    ("FFN, linear", "0 %"): (90.2, 94.4, 92.2, 84.1, 96.2, 89.7, 63.6, 91.6, 87.7),
    ("FFN, linear", "1 %"): (90.0, 94.6, 92.2, 83.0, 96.2, 89.7, 65.8, 91.8, 87.9),
    ("FFN, linear", "2 %"): (90.0, 94.5, 92.2, 85.9, 96.7, 90.4, 68.0, 91.9, 88.7),
    ("FFN, linear", "3 %"): (90.0, 94.6, 92.2, 86.3, 96.4, 90.2, 68.3, 91.8, 88.7),
}
TABLE9 = {
    "32-bit Baseline": (90.4, 94.9, 92.2, 84.5, 96.4, 90.1, 67.4, 93.0, 88.61),
    "32-bit Replication": (90.3, 94.8, 92.3, 85.4, 96.6, 90.4, 68.8, 92.0, 88.83),
    "Q-BERT": (87.8, 93.0, 90.6, 84.7, 94.8, 88.2, 65.1, 91.1, 86.91),
    "Q8BERT": (85.6, 93.0, 90.1, 84.8, 94.7, 89.7, 65.0, 91.1, 86.75),
    "PSQ": (89.9, 94.5, 92.0, 86.8, 96.2, 90.4, 67.5, 91.9, 88.65),
    "Vector-wise": (90.2, 94.7, 92.3, 85.4, 96.4, 91.0, 68.6, 91.9, 88.81),
}
# Of Table 9 what our runs are; the paper prints for vector-wise what Table 10 has for FFN.
METHODS = {"32-bit Baseline": "16 bits", "Vector-wise": "FFN"}
PUBLISHED = Published("LLM.int8(), Table 7", ("model", "int8", "decomposition"), TABLE7, "{:.2f}")
OF_TABLE10 = Published(
    "LLM.int8(), Table 10, scores of GLUE tasks",
    ("model", "int8", "decomposition", "task"),
    grid({("roberta-large", *setting): values for setting, values in TABLE10.items()}, TASKS),
)
OF_TABLE9 = Published("LLM.int8(), Table 9, scores of GLUE tasks", ("method", "task"), grid(TABLE9, TASKS))
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


def table7_section(rows: list[dict]) -> Section:
    """Training in int8 from the first step."""
    plain = {size: ppl for (size, int8, _), ppl in TABLE7.items() if int8 == "16 bits"}
    columns: dict[str, dict[Key, str]] = {f"{size} (%)": {} for size in plain}
    for (size, *setting), ppl in TABLE7.items():
        if setting[0] != "16 bits":
            columns[f"{size} (%)"][tuple(setting)] = signed(ppl / plain[size])
    return _section(rows, "Training in int8", "table7", columns, f"{CAPTION} Right: {PAPERS_INCREASE}")


def table10_section(rows: list[dict]) -> Section:
    """Fine-tuning in int8."""
    return _section(rows, "Fine-tuning in int8", "table10", {}, CAPTION)


def _section(rows: list[dict], title: str, name: str, published: dict[str, dict[Key, str]], caption: str) -> Section:
    ends, notes = settings(rows), [seeds_note(trained(rows))]
    tables = [int8_table(name, caption, ends, published)]
    return Section(title, rows, printed(tables, notes), tables, notes=notes, findings=int8_findings(ends, name))


def table9_section(rows: list[dict]) -> Section:
    """Fine-tuning in int8 beside other methods, which were not run."""
    plain = {setting.int8: setting for setting in settings(rows) if setting.decomposition == "0 %"}
    ours = {method: plain[int8] for method, int8 in METHODS.items() if int8 in plain}
    cells, data = [], []
    for method in TABLE9:
        setting = ours.get(method)
        cells.append([method, *(perplexities(setting)[:2] if setting else ("not run", MISSING))])
        data.append({"method": method, **(unrounded(setting) if setting else {})})
    caption = METHODS_CAPTION.format(", ".join(dict.fromkeys(setting.model for setting in ours.values())))
    tables = [Table("table9", caption, ["Method", *HEADERS[:2]], cells, pd.DataFrame(data))]
    notes = [seeds_note(trained(rows))]
    return Section("Fine-tuning in int8, and other methods", rows, printed(tables, notes), tables, notes=notes)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Perplexities by the keys of Table 7."""
    return {(count_label(setting.parameters), *setting.key): setting.perplexity.value for setting in settings(rows)}


ARTEFACTS = {  # of Tables 9 and 10 nothing was measured: ours are perplexities, and the paper's are scores of tasks
    "table7": Artefact("Table 7", Training, PUBLISHED, measured, table7_section),
    "table10": Artefact("Table 10", Training, OF_TABLE10, section=table10_section),
    "table9": Artefact("Table 9", Training, OF_TABLE9, section=table9_section),
}
