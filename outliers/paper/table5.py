"""Table 5 of the paper: how many times faster than 16 bits a linear layer is, in many ways."""

from outliers.paper.published import Artefact, Key, Published, grid
from outliers.presets.linear_layers import LinearLayers
from outliers.views.linear_layer import times_of

PUBLISHED = Published(
    "LLM.int8(), Table 5",
    ("way", "dimension"),
    grid(
        {
            "int8 alone": (0.99, 1.08, 1.43, 1.61, 1.63, 1.67, 2.13, 2.29),
            "absmax, plain torch": (0.25, 0.24, 0.36, 0.45, 0.53, 0.70, 0.96, 1.50),
            "vector-wise, plain torch": (0.21, 0.22, 0.33, 0.41, 0.50, 0.65, 0.91, 1.50),
            "vector-wise": (0.43, 0.49, 0.74, 0.91, 0.94, 1.18, 1.59, 2.00),
            "LLM.int8()": (0.14, 0.20, 0.36, 0.51, 0.64, 0.86, 1.22, 1.81),
        },
        [768, 1024, 1536, 2048, 2560, 4096, 5140, 12288],
    ),
    "{:.2f}",
)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Times faster than 16 bits by the keys of the published ones."""
    return {(row["way"], str(row["dimension"])): row["value"] for row in times_of(rows)}


ARTEFACTS = {"table5": Artefact("Table 5", LinearLayers, PUBLISHED, measured)}
