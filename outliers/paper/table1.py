"""Table 1 of the paper: schemes down, models across, perplexity in the cells."""

from outliers.paper.published import Artefact, Key, Published, grid, key_of
from outliers.presets.sweep import Experiment
from outliers.views.published import FAIRSEQ, TABLE1

PUBLISHED = Published(
    "LLM.int8(), Table 1",
    ("model", "scheme"),
    grid(dict(zip(FAIRSEQ, zip(*TABLE1.values(), strict=True), strict=True)), TABLE1),
    "{:.2f}",
)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Perplexities by the keys of the published ones."""
    return {(key_of(row["model"]), row["scheme"]): row["value"] for row in rows}


ARTEFACTS = {"table1": Artefact("Table 1", Experiment, PUBLISHED, measured)}
