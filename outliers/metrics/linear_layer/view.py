"""Table 5 of the paper: how many times faster than 16 bits a linear layer is, in many ways; and decoder layers."""

from collections.abc import Sequence

import pandas as pd

from outliers.models.names import known_configs, short_name
from outliers.report.section import Finding, Section
from outliers.report.tables import MISSING, Table, cell, with_interval
from outliers.report.words import amount, listed, threads
from outliers.specification.kinds import layer_shape


def speed_section(rows: list[dict]) -> Section:
    """The section of the timings of linear layers."""
    table, findings = speed_table(rows), speed_findings(times_of(rows))
    return Section("Speed of the first feed-forward layer", rows, table.printed, [table], findings=findings)


def speeds(rows: list[dict]) -> pd.DataFrame:
    """Times faster than 16 bits by way (index, in the order of the rows) and model dimension (columns, ascending)."""
    frame = pd.DataFrame(times_of(rows), columns=["way", "dimension", "value"])
    dimensions = sorted(set(frame["dimension"].tolist()), key=layer_shape)
    return frame.pivot(index="way", columns="dimension", values="value").loc[frame["way"].unique(), dimensions]


def times_of(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["metric"] == "linear_layer.times_16_bits"]


def speed_table(rows: list[dict]) -> Table:
    """The table with its caption, dimensions across as in the paper."""
    table, run = speeds(rows), rows[0]
    cells = [[way, *(cell(".2f", value) for value in row)] for way, row in table.iterrows()]
    caption = (
        f"Speedup over {run['dtype']} of the first feed-forward layer (d features, 4 d outputs), or of a layer of "
        f"features x outputs, at {run['tokens']} tokens with three outlier features, by model dimension d. "
        f"{run['device_name']}, {threads(run['threads'])}."
    )
    return Table("table5", caption, ["way", *map(str, table.columns)], cells, table.reset_index())


def speed_findings(rows: Sequence[dict]) -> list[Finding]:
    """The fastest way, and the ways that are faster or slower than 16 bits wherever they were timed.

    rows: `linear_layer.times_16_bits`. A way is faster, or slower, where its quartiles leave out 1.
    """
    ways = dict.fromkeys(row["way"] for row in rows)
    by_way = {way: [row for row in rows if row["way"] == way] for way in ways}
    faster = {way: [row for row in timed if row["q1"] > 1] for way, timed in by_way.items()}
    slower = [way for way, timed in by_way.items() if all(row["q3"] < 1 for row in timed)]
    best = sorted((row for timed in faster.values() for row in timed), key=lambda row: -row["value"])[:1]
    sentences = [
        f"{row['way']} is {row['value']:.2f} times as fast as 16 bits at d = {row['dimension']}." for row in best
    ]
    always = {"Faster": [way for way, timed in faster.items() if len(timed) == len(by_way[way])], "Slower": slower}
    sentences += [
        f"{how} than 16 bits at every measured d: {'; '.join(names)}." for how, names in always.items() if names
    ]
    return [Finding(sentence, "table5") for sentence in sentences]


def decoder_section(rows: list[dict]) -> Section:
    """The section of the timings of decoder layers."""
    table, findings = decoder_table(rows), decoder_findings(tokens_of(rows))
    return Section("Decoding latency of linear layers", rows, table.printed, [table], findings=findings)


def tokens_of(rows: list[dict]) -> pd.DataFrame:
    """One row a model, way and batch (index), in the order of the rows.

    Columns: token, q1, q3: milliseconds a token of the projections of all decoder layers, which is that of one layer
    times their number over the batch; long, long_q1, long_q3: how many times as long as 16 bits that is.
    """
    by_key: dict[tuple, dict] = {}
    for row in rows:
        in_time = row["metric"] == "decoder_layer.milliseconds"
        times = row["layers"] / row["batch"] if in_time else 1
        names = ("token", "q1", "q3") if in_time else ("faster", "faster_q1", "faster_q3")
        values = (times * row[name] for name in ("value", "q1", "q3"))
        by_key.setdefault((row["model"], row["way"], row["batch"]), {}).update(zip(names, values, strict=True))
    table = pd.DataFrame.from_dict(by_key, orient="index").rename_axis(["model", "way", "batch"])
    long = {"long": 1 / table["faster"], "long_q1": 1 / table["faster_q3"], "long_q3": 1 / table["faster_q1"]}
    return table[["token", "q1", "q3"]].assign(**long)


def decoder_table(rows: list[dict]) -> Table:
    """The table with its caption, batches across."""
    tokens, run = tokens_of(rows), rows[0]
    batches = sorted({row["batch"] for row in rows})
    caption = (
        "Milliseconds per generated token in the projections of all decoder layers, by batch: a layer with random "
        f"weights, times the number of layers [quartiles]; and the time relative to {run['dtype']} (16 bits). Without "
        f"norms, attention, embedding and head. {run['device_name']}, {threads(run['threads'])}."
    )
    cells = []
    for model, way in dict.fromkeys(key[:2] for key in tokens.index):
        timed = tokens.xs((model, way), level=("model", "way")).reindex(batches)
        times = zip(timed["token"], timed["q1"], timed["q3"], strict=True)
        texts = [MISSING if pd.isna(interval[0]) else with_interval(amount, *interval) for interval in times]
        cells.append([_paper_name(model), way, *texts, *(cell(".2f", ratio) for ratio in timed["long"])])
    headers = [f"{value} {batch}" for value in ("batch", "relative time") for batch in batches]
    return Table("decoder_layers", caption, ["model", "way", *headers], cells, tokens.reset_index(), names=2)


def _paper_name(model: str) -> str:
    return known_configs().get(model, {}).get("shown", short_name(model))


def decoder_findings(tokens: pd.DataFrame) -> list[Finding]:
    """Time of LLM.int8() relative to 16 bits, of models where the quartiles of every batch leave out 1."""
    int8 = tokens[tokens.index.get_level_values("way") == "LLM.int8()"].droplevel("way")
    apart = (int8["long_q1"] > 1) | (int8["long_q3"] < 1)
    return [
        Finding(_long(_paper_name(model), int8["long"][model]), "decoder_layers")
        for model in int8.index.unique("model")
        if apart[model].all()
    ]


def _long(model: str, ratios: pd.Series) -> str:
    times, batches = listed(f"{ratio:.1f}" for ratio in ratios), listed(ratios.index)
    return f"LLM.int8() takes {times} times as long as 16 bits per token of {model} at batch {batches}."
