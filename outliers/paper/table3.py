"""Table 3 of the paper: the largest model that some hardware holds, and what models need."""

from outliers.paper.published import Artefact, Key, Published, grid
from outliers.presets.memory import Memory
from outliers.views.memory import BITS, largest

PUBLISHED = Published(
    "LLM.int8(), Table 3",
    ("hardware", "bits"),
    grid(
        {
            "8x A100 80 GB": ("OPT-175B / BLOOM", "OPT-175B / BLOOM"),
            "8x A100 40 GB": ("OPT-175B / BLOOM", "OPT-66B"),
            "8x RTX 3090 24 GB": ("OPT-175B / BLOOM", "OPT-66B"),
            "4x RTX 3090 24 GB": ("OPT-66B", "OPT-30B"),
            "Colab Pro 15 GB": ("OPT-13B", "GPT-J-6B"),
            "Colab 12 GB": ("T0/T5-11B", "GPT-2 1.3B"),
        },
        [8, 16],
    ),
    "{}",
)


def measured(rows: list[dict]) -> dict[Key, str]:
    """The largest candidates by the keys of the published ones."""
    return {
        (f"{row['hardware']} {row['gigabytes']:g} GB", str(bits)): row[f"{bits}-bit"]
        for row in largest(rows).to_dict("records")
        for bits in BITS
    }


ARTEFACTS = {"table3": Artefact("Table 3", Memory, PUBLISHED, measured)}
