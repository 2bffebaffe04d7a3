"""Table 6 of the paper: milliseconds a generated token, of models under schemes."""

from outliers.paper.published import BLOG, Artefact, Key, Published, grid, key_of
from outliers.presets.latency import Latency

PUBLISHED = Published(
    f"LLM.int8(), Table 6; {BLOG}",
    ("model", "scheme", "hardware", "batch"),
    grid(
        {
            ("bloom", "fp32", "8x A100 80 GB"): (239, 32, 9.94),
            ("bloom", "llm.int8", "8x A100 80 GB"): (253, 34, 10.44),
            ("bloom", "llm.int8", "4x A100 80 GB"): (246, 33, 9.40),
            ("bloom", "llm.int8", "3x A100 80 GB"): (247, 33, 9.11),
            ("bloom", "fp32", f"8x A100 80 GB ({BLOG})"): (239, 32, 9.9),
            ("bloom", "llm.int8", f"4x A100 80 GB ({BLOG})"): (282, 37.5, 10.2),
            ("bloom", "fp32", f"14x A100 40 GB ({BLOG})"): (285, 36.5, 10.4),
            ("bloom", "llm.int8", f"5x A100 40 GB ({BLOG})"): (367, 46.4, "out of memory"),
            ("t5-11b", "fp32", f"2x T4 15 GB ({BLOG})"): (11.7, 1.7, 0.5),
            ("t5-11b", "llm.int8", f"1x T4 15 GB ({BLOG})"): (43.5, 5.3, 1.3),
            ("t5-3b", "fp32", f"2x T4 15 GB, float32 ({BLOG})"): (45, 7.2, 3.1),
            ("t5-3b", "llm.int8", f"1x T4 15 GB ({BLOG})"): (312, 39.1, 10.2),
        },
        [1, 8, 32],
    ),
)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Milliseconds a token of a decode step by the keys of the published ones."""
    return {
        (key_of(row["model"]), row["scheme"], row["device_name"], str(row["batch"])): row["value"]
        for row in rows
        if row["metric"] == "latency.decode"
    }


ARTEFACTS = {
    "table6": Artefact("Table 6", Latency, PUBLISHED, measured),
}
