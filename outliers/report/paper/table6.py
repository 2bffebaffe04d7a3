"""Table 6 of the paper: milliseconds a generated token, of models under schemes, and of decoder layers alone."""

from outliers.metrics.linear_layer.view import tokens_of
from outliers.report.paper.published import BLOG, Artefact, Key, Published, grid, key_of
from outliers.specification.kinds import DecoderLayers, Latency

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


INT8 = "LLM.int8()"
BESIDE = {"t5-11b": "16 bits", "t5-3b": "32 bits"}  # what int8 was timed beside


def _as_published(times: dict[Key, float], ratios: dict[Key, float]) -> dict[Key, float]:
    """Milliseconds a token by (model, way, batch), and how many times as long int8 takes, by (model, batch)."""
    by_way = {(model, f"{way}, ms", batch): value for (model, way, batch), value in times.items()}
    return by_way | {(model, f"{INT8} : {BESIDE[model]}", batch): value for (model, batch), value in ratios.items()}


def _published() -> dict[Key, float]:
    ways = {"fp32": BESIDE.get, "llm.int8": lambda _model: INT8}
    times = {
        (model, ways[scheme](model), batch): value
        for (model, scheme, _, batch), value in PUBLISHED.values.items()
        if model in BESIDE
    }
    int8 = {(model, batch): value for (model, way, batch), value in times.items() if way == INT8}
    return _as_published(times, {key: value / times[key[0], BESIDE[key[0]], key[1]] for key, value in int8.items()})


LAYERS_PUBLISHED = Published(
    f"{BLOG}: whole models, int8 on one T4 and the others on two", ("model", "value", "batch"), _published(), "{:,.1f}"
)


def layers_measured(rows: list[dict]) -> dict[Key, float]:
    """Of the projections of all decoder layers, by the keys of the published values; ratios are of the same rounds."""
    by_key = {(key_of(model), way, str(batch)): row for (model, way, batch), row in tokens_of(rows).iterrows()}
    times = {
        key: row["token"] for key, row in by_key.items() if key[1] in (INT8, BESIDE.get(key[0])) and key[0] in BESIDE
    }
    ratios = {
        (model, batch): by_key[model, INT8, batch]["long"] / by_key[model, BESIDE[model], batch]["long"]
        for model, way, batch in times
        if way == INT8 and (model, BESIDE[model], batch) in times
    }
    return _as_published(times, ratios)


ARTEFACTS = {
    "table6": Artefact("Table 6", Latency, PUBLISHED, measured),
    "table6_layers": Artefact("Table 6, decoder layers", DecoderLayers, LAYERS_PUBLISHED, layers_measured),
}
