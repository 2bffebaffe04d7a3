"""Tables and figures from rows."""

import html
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from outliers.criterion import OF_EVERY_STACK
from outliers.errors import UserError
from outliers.metrics.ablations import plan
from outliers.quantization.schemes import SCHEMES
from outliers.show.legends import OTHERS, STYLES, scheme_styles
from outliers.show.maps import pooled
from outliers.show.page import page
from outliers.show.style import COLORS, GREY, look
from outliers.show.tables import Table
from outliers.show.write import write
from outliers.tracing.trace import trace
from outliers.variants.plant import plant
from outliers.views.ablation import ablation_bars, ablation_summary
from outliers.views.attention import points as attention_points
from outliers.views.emergence import (
    by_model,
    distinct_models,
    exponential_fit,
    figure3,
    figure4,
    fits_of,
)
from outliers.views.latency import latencies, latency_table
from outliers.views.perplexity import cost_table, perplexity_section, perplexity_table, sweep_costs, table1
from outliers.views.remedies import frontier, frontier_of, remedies_section, remedy_costs
from outliers.views.remedies import points as remedy_points
from outliers.views.table4 import emergence_section
from outliers.views.trace import heat_map, magnitude_by_position, sorted_profile, traced_section
from outliers.views.zeroshot import accuracy_by_size, accuracy_table
from tests.conftest import PAPER_TABLES, needs_paper
from tests.show.test_plot import check_words, ticks_of
from tests.small_models import make_model, make_tokenizer


@pytest.fixture
def rows():
    """Two models under three schemes, in the order in which a sweep measures them."""
    values = {"llm.int8": (100.125, 10.5), "absmax": (110, 11.25), "fp32": (100, 10)}
    return [
        {
            "model": model,
            "scheme": scheme,
            "metric": "perplexity",
            "value": float(value),
            "parameters": 10**6 * (n + 1),
            "architecture": model.partition("/")[2].partition("-")[0],
            "dtype": "float32",
        }
        for scheme, pair in values.items()
        for n, (model, value) in enumerate(zip(("pocket/gpt2-1m", "pocket/opt-2m"), pair, strict=True))
    ]


def test_a_baseline_in_16_bits_is_not_called_32_bit(rows):
    half = [{**row, "dtype": "float16"} for row in rows]
    assert "float16, not quantized" in perplexity_table(half).form("github")
    ((increase,), (of_half,)) = cost_table(rows), cost_table(half)
    assert "over fp32 under each scheme" in increase.caption
    assert "over float16 without quantization under" in of_half.caption


def test_terminal_table_is_narrow(rows):
    lines = perplexity_table(rows).printed.splitlines()
    assert lines[:2] == ["Perplexity by scheme and model.", ""], "its caption stands above it"
    assert lines[2].split() == ["Perplexity", "gpt2-1m", "opt-2m"]
    assert lines[4].split() == ["fp32", "100.00", "10.00"]


def test_a_wide_table_is_broken_at_the_width_of_a_terminal(monkeypatch):
    """Its headers first, then text, and then the last columns follow below."""
    headers = ["model", "a header of many words", *(f"column {number}" for number in range(12)), "note"]
    cells = [["gpt2-1.7m", "1.5", *(f"{number:.6f}" for number in range(12)), "a note of a few words " * 3]] * 2
    table = Table("wide", "Wide.", headers, cells, pd.DataFrame(), names=("model", "note"))
    for columns, width in (("80", 80), ("40", 80), ("120", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        lines = table.printed.splitlines()
        assert width - 20 < max(map(len, lines)) <= width
    words = " ".join(table.printed.split())
    assert all(word in words for cell in cells[0] for word in cell.split())
    assert sum(line.startswith("gpt2-1.7m") for line in table.printed.splitlines()) == 4, "twice two rows"


def test_a_broken_model_makes_no_wide_table(rows):
    broken = [{**row, "value": row["value"] * 1e250, "standard_deviation": 1e248} for row in rows]
    lines = perplexity_table(broken).printed.splitlines()
    assert lines[4].split() == ["fp32", "1.00e+252±1.00e+248", "1.00e+251±1.00e+248"]


def test_a_missing_cell_is_a_dash(rows):
    baseline = perplexity_table(rows[:-1]).form("github").splitlines()[2]
    assert baseline.split()[-2] == "–"


def test_every_scheme_has_a_style_of_its_own():
    own = [f"mine-{number}" for number in range(len(OTHERS) - len(SCHEMES.keys() - STYLES.keys()))]
    assert len(own) > 20
    with look():
        styles = scheme_styles([{"scheme": scheme} for scheme in (*own, *SCHEMES, *own)])
    assert list(styles) == [*SCHEMES, *own]
    looks = {scheme: (style["color"], style["marker"], style["linestyle"]) for scheme, style in styles.items()}
    assert len(set(looks.values())) == len(styles)
    assert GREY not in {style["color"] for style in styles.values()}, "which is the paper's"
    for scheme, (color, *others) in STYLES.items():
        assert list(looks[scheme]) == [COLORS[color], *others]


def test_hollow_markers_are_of_rows_with_decomposition(rows):
    marked = [{**row, "alpha": 6.0} if row["scheme"] == "absmax" else row for row in rows]
    marked += [{**row, "scheme": "mine", "alpha": 4.5} for row in rows[:2]]
    fills = {scheme: style["fillstyle"] for scheme, style in scheme_styles(marked).items()}
    assert fills == {"fp32": "full", "absmax": "none", "llm.int8": "full", "mine": "none"}
    axes = sweep_costs(marked)
    drawn = {container.get_label(): container.lines[0] for container in axes.containers if container.get_label()}
    assert drawn["mine"].get_fillstyle() == "none"
    assert drawn["llm.int8"].get_fillstyle() == "full"


@pytest.fixture
def own(rows):
    """The rows with two schemes that are in no table: a user's own, and another's."""
    of_one = [row for row in rows if row["scheme"] == "absmax"]
    return [{**row, "scheme": scheme, "value": 120.0} for scheme in ("mine", "another") for row in of_one] + rows


def test_a_scheme_of_ones_own_is_in_tables_and_figures(own):
    table = table1(own)
    assert table.index.tolist() == ["fp32", "absmax", "llm.int8", "mine", "another"]
    assert table.loc["mine"].tolist() == [120, 120]
    assert perplexity_table(own).cells[3] == ["mine", "120.00", "120.00"]
    (increase,) = cost_table(own)
    assert increase.cells[3] == ["another", "+20.00", "+1100.00"]
    assert "another" in perplexity_section(own).printed
    for shown in (own, [row for row in own if row["scheme"] != "fp32"]):
        figure = sweep_costs(shown).figure
        names = [text.get_text() for text in figure.legends[0].get_texts()]
        assert names[:4] == ["absmax", "llm.int8", "mine", "another"]
    axes = sweep_costs(own)
    assert [y for _, y in points(axes)["mine"]] == pytest.approx([20, 1100])


def test_zero_shot_tasks_and_latency_take_a_scheme_of_ones_own(own):
    tasks = [
        {**row, "metric": "zeroshot.acc", "task": "piqa", "value": 0.5, "standard_error": 0.1, "examples": 9}
        for row in own
    ]
    tasks = [{**row, "alpha": 6.0} if row["scheme"] == "mine" else row for row in tasks]
    axes = accuracy_by_size(tasks)
    names = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert names[:5] == ["float32, not quantized", "absmax", "llm.int8", "mine", "another"]
    assert names[5:] == ["hollow: outlier features\n(α = 6) in 16 bits", "± 1 standard error"]
    lines = {container.get_label(): container.lines[0] for container in axes.containers}
    hollow = {scheme for scheme, line in lines.items() if line.get_fillstyle() == "none"}
    assert hollow == {"mine"}
    assert [cells[1] for cells in accuracy_table([{**row, "lm_eval": "0"} for row in tasks]).cells[:2]] == ["mine"] * 2
    one = {"metric": "latency.decode", "batch": 1, "q1": 1, "q3": 2, "prompt": 8, "tokens": 4, "repeats": 2}
    timed = [{**row, **one, "device_name": "one", "threads": 2} for row in own]
    assert [cells[:3] for cells in latency_table(timed).cells[:2]] == [
        ["gpt2-1m", "mine", "120 [1, 2]"],
        ["opt-2m", "mine", "120 [1, 2]"],
    ]


def test_scatter_stands_beside_its_mean(rows):
    drawn = [{**row, "draws": 4, "standard_deviation": row["value"] / 1000} for row in rows]
    lines = perplexity_table(drawn).printed.splitlines()
    assert lines[4].split() == ["fp32", "100.00±0.10", "10.000±0.010"]
    assert perplexity_table(drawn).cells[1] == ["absmax", "110.00±0.11", "11.250±0.011"]
    (increase,) = cost_table(drawn)
    assert increase.cells[0] == ["absmax", "+10.00±0.11", "+12.50±0.11"]
    assert "over 4 draws" in perplexity_section(drawn).printed
    assert "measured once" in perplexity_section(rows).printed
    assert "pocket" not in perplexity_section(rows).notes[0], "what is true of other models"
    assert cost_table(rows[:-2]) == []


def points(axes) -> dict[str, list[tuple[float, float]]]:
    """What a figure of costs shows: (x, y) of the points of each scheme; those of the paper under "paper"."""
    found = {}
    for container in axes.containers:
        line = container.lines[0]
        label = container.get_label() if line.get_color() != GREY else "paper"
        found.setdefault(label, []).extend(zip(*line.get_data(), strict=True))
    return found


def test_figure_shows_what_schemes_cost_beside_the_paper(rows):
    axes = sweep_costs(rows)
    shown = points(axes)
    assert [y for _, y in shown["absmax"]] == pytest.approx([10, 12.5])
    assert "fp32" not in shown
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["gpt2-1m", "opt-2m", "paper, 125m", "paper, 1.3b", "paper, 2.7b", "paper, 6.7b", "paper, 13b"]
    collapse = 100 * (19.08 / 12.45 - 1)  # absmax at 13 B, published
    assert any(x > 5.5 and y == pytest.approx(collapse) for x, y in shown["paper"])
    assert all(x > 1.5 for x, _ in shown["paper"])


def test_figure_shows_scatter_as_bars(rows):
    drawn = [{**row, "standard_deviation": 1.0} for row in rows]
    axes = sweep_costs(drawn)
    container = next(c for c in axes.containers if c.get_label() == "absmax")
    spans = [tuple(segment[:, 1]) for segment in container.lines[2][0].get_segments()]
    assert spans == [pytest.approx((9, 11)), pytest.approx((2.5, 22.5))]


def test_without_a_baseline_lines_join_models_of_one_architecture(rows):
    quantized = [row for row in rows if row["scheme"] != "fp32"]
    axes = sweep_costs(quantized)
    assert {len(container.lines[0].get_xdata()) for container in axes.containers} == {1}
    axes = sweep_costs([{**row, "architecture": "gpt2"} for row in quantized])
    assert points(axes)["absmax"] == [(1e6, 110), (2e6, 11.25)]


def test_lines_are_drawn_in_one_order_whatever_the_hashes(rows):
    """Of strings, which differ from one process to the next."""
    quantized = [row for row in rows if row["scheme"] != "fp32"][::2]
    many = [{**row, "architecture": letter, "value": ord(letter)} for row in quantized for letter in "hbdfaceg"]
    containers = sweep_costs(many).containers
    drawn = [(one.get_label(), chr(int(one.lines[0].get_ydata()[0]))) for one in containers]
    assert drawn == [(scheme, letter) for scheme in ("absmax", "llm.int8") for letter in "abcdefgh"]


def test_models_of_one_name_are_not_taken_for_each_other(rows, family):
    for model, number in (("/a/hf", 0), ("/b/hf", 1)):
        rows[number::2] = [{**row, "model": model} for row in rows[number::2]]
    assert perplexity_table(rows).headers == ["Perplexity", "/a/hf", "/b/hf"]
    axes = sweep_costs(rows)
    assert [label.get_text() for label in axes.get_xticklabels()][:2] == ["/a/hf", "/b/hf"]
    twins = [{**row, "model": model} for model in ("/a/hf", "/b/hf") for row in family[:3]]
    assert by_model(twins).index.tolist() == ["/a/hf", "/b/hf"]
    timed = [
        {**row, "scheme": "fp32", "metric": "latency.decode", "batch": 1, "q1": 1.0, "q3": 2.0, "value": value}
        for row, value in ((rows[0], 1.0), (rows[1], 2.0))
    ]
    assert latencies(timed)["decode", 1].tolist() == [1, 2]
    assert latencies(timed[:1]).index.tolist() == [("hf", "fp32")]


def test_an_encoder_decoder_counts_once(family):
    """By the stack where the most common feature affects most positions; what cross-attention reads is no stack."""
    shares = {"encoder": 0.5, "decoder": 0.9, "cross": 1.0}
    with_stacks = [
        {**row, "stack": stack, "value": share if row["metric"] == "positions" else row["value"]}
        for stack, share in shares.items()
        for row in family
        if row["metric"] != "perplexity"
    ]
    models = distinct_models([*(row for row in family if row["metric"] == "perplexity"), *with_stacks])
    assert len(models) == len(by_model(family)) == len(by_model(with_stacks)) / 3
    assert all(name.endswith(" (decoder)") for name in models.index)


def test_models_of_another_vocabulary_are_not_fitted(family):
    alike = by_model([{**row, "tokens_hash": "a"} for row in family])
    other = by_model(
        [{**row, "tokens_hash": "a"} for row in family]
        + [{**row, "model": "other", "tokens_hash": "b", "value": 3 * row["value"]} for row in family[-10:]]
    )
    assert len(other) == len(alike) + 1
    assert fits_of(other) == fits_of(alike)


def check_files(folder, tables: str, figures: str, further: str = "") -> None:
    """These files, by their names without endings, are in a folder, and no others."""
    endings = {("md", "tex", "csv"): tables, ("png", "svg"): figures, ("csv",): further}
    names = {f"{name}.{one}" for kinds, of_kind in endings.items() for name in of_kind.split() for one in kinds}
    assert {path.name for path in folder.iterdir()} == names | {"report.html", "rows.parquet"}


def test_files(rows, tmp_path):
    printed = write(perplexity_section(rows), tmp_path, "python -m outliers.sweep")
    check_files(tmp_path, "table1 table1_increase", "perplexity")
    assert str(tmp_path) in printed
    assert (tmp_path / "table1.csv").read_text().splitlines()[1] == "fp32,100,10"
    assert r"\toprule" in (tmp_path / "table1.tex").read_text()
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def saved(rows):
    """One model in formats with remedies: of each scheme its perplexity, and what else its row says."""
    measured = {
        "fp32": (10, {}),
        "absmax": (20, {}),
        "absmax+hadamard": (12, {"standard_deviation": 0.5}),
        "w4a4": (110, {"weight_bits": 4.05, "activation_bits": 4.06}),
        "w8a8": (10.2, {"weight_bits": 8.06, "activation_bits": 8.06}),
        "llm.int8": (10.1, {"alpha": 6.0}),
        "nvfp4+reorder": (1e6, {"weight_bits": 4.5, "activation_bits": 4.5}),
    }
    row = rows[0] | {"draws": 3}
    return [row | {"scheme": scheme, "value": value} | others for scheme, (value, others) in measured.items()]


def test_remedies_are_columns_of_their_formats(saved):
    table, _ = remedies_section(saved).tables
    assert table.headers == ["format", "bits", "none", "hadamard", "features=6", "reorder"]
    assert table.cells == [
        ["absmax", "8.00, 8.00", "20.00", "12.0±0.5*", "–", "–"],
        ["w4a4", "4.05, 4.06", "110.00*", "–", "–", "–"],
        ["w8a8", "8.06, 8.06", "10.20", "–", "10.10*", "–"],
        ["nvfp4", "4.50, 4.50", "–", "–", "–", "1.0e+06*"],
    ]
    assert [round(100 * point.cost.mean) for point in remedy_points(saved)] == [100, 20, 1000, 2, 1, 9999900]
    assert remedy_points(saved[1:]) == [], "nothing without what it is compared with"


def test_remedies_figure_goes_from_few_bits_to_many(saved):
    figure = remedy_costs(saved)[0].figure
    panels = {axes.get_title("center"): [label.get_text() for label in axes.get_xticklabels()] for axes in figure.axes}
    assert list(panels.values())[:3] == [["absmax, 8.0"], ["w4a4, 4.1", "w8a8, 8.1"], ["nvfp4, 4.5"]]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["none", "hadamard", "features=6", "reorder", "± 1 standard deviation"]
    shown = points(figure.axes[1])
    assert [round(y) for _, y in shown["none"]] == [1000, 2]


def test_remedies_of_several_models_have_files_of_their_own(saved):
    section = remedies_section([*saved, *(row | {"model": "pocket/opt-2m"} for row in saved)])
    names = [f"{what}_{model}" for model in ("gpt2-1m", "opt-2m") for what in ("remedies", "frontier")]
    assert [table.name for table in section.tables] == names
    assert {drawing.name for drawing in section.drawings} == {*names}


@pytest.fixture
def variants(rows):
    """One model under variants, of each its perplexity and what else its row says; all of three draws."""
    cache = {"keys": "int4", "values": "int4", "cache_bits": 4.5}
    by_channel = cache | {"keys": "int4/channels=32", "cache_bits": 4.75}
    measured = {
        "fp32": (10.0, {}),
        "prefix(3)": (8.0, {"prefix": [3]}),
        "w8a8": (11.0, {"weight_bits": 8.1, "activation_bits": 8.1}),
        "prefix(3)+w8a8": (8.44, {"weight_bits": 8.1, "activation_bits": 8.1, "prefix": [3]}),
        "w8a8+skip=ffn_out": (10.8, {"weight_bits": 8.1, "activation_bits": 8.1}),
        "llm.int8": (10.6, {"alpha": 6.0}),
        "llm.int8+alpha=4": (10.5, {"alpha": 4.0}),
        "llm.int8+kv=int4": (11.5, {"alpha": 6.0, **cache}),
        "kv=int4": (11.2, cache),
        "kv=int4/hadamard": (10.9, cache | dict.fromkeys(("keys", "values"), "int4/hadamard")),
        "keys=int4/channels=32+values=int4": (10.4, by_channel),
        "w4": (12.0, {"weight_bits": 4.1}),
        "w4+hadamard": (13.0, {"weight_bits": 4.1}),
    }
    row = rows[0] | {"draws": 3, "standard_deviation": 0.01}
    schemes = {name: next((term for term in name.split("+") if term[0] in "wl"), "fp32") for name in measured}
    schemes |= {"w4+hadamard": "w4+hadamard"}
    return [
        row | {"scheme": schemes[name], "variant": name, "value": value} | others
        for name, (value, others) in measured.items()
    ]


def test_variants_of_one_scheme_are_points_of_their_own(variants):
    assert {(point.format, point.remedy): point.perplexity.mean for point in remedy_points(variants)} == {
        ("w8a8", "none"): 11.0,
        ("w8a8", "prefix(3)"): 8.44,
        ("w8a8", "skip=ffn_out"): 10.8,
        ("w8a8", "features=6"): 10.6,
        ("w8a8", "features=4"): 10.5,
        ("int4", "beside llm.int8"): 11.5,
        ("int4", "none"): 11.2,
        ("int4", "hadamard"): 10.9,
        ("int4", "channels=32@keys"): 10.4,
        ("w4", "none"): 12.0,
        ("w4", "hadamard"): 13.0,
    }


def test_attention_beside_variants_of_one_scheme_has_points_of_its_own(rows):
    names = {"fp32": "fp32", "prefix(3)": "fp32", "prefix(3)+fp32+attention": "fp32+attention"}
    names |= {"absmax+attention": "absmax+attention", "absmax+attention+skip=ffn_out": "absmax+attention"}
    measured = [
        rows[0] | {"scheme": scheme, "variant": name, "value": 10.0 + number}
        for number, (name, scheme) in enumerate(names.items())
    ]
    assert {(point.scheme, point.attention): point.perplexity.mean for point in attention_points(measured)} == {
        ("fp32", "16-bit"): 10.0,
        ("prefix(3)", "16-bit"): 11.0,
        ("prefix(3)", "int8"): 12.0,
        ("absmax", "int8"): 13.0,
        ("absmax+skip=ffn_out", "int8"): 14.0,
    }


def test_variants_that_nobody_here_can_read_are_listed(variants):
    names = {"mine": 9.0, "bitsandbytes": 10.5}
    rows = [*variants, *(variants[0] | {"scheme": name, "variant": name, "value": names[name]} for name in names)]
    assert len(remedy_points(rows)) == len(remedy_points(variants))
    assert [cells[1:] for cells in remedies_section(rows).tables[-1].cells] == [
        ["mine", "perplexity", "9.000±0.010"],
        ["bitsandbytes", "perplexity", "10.500±0.010"],
    ]
    assert {point.scheme: point.perplexity.mean for point in attention_points(rows)}.items() >= names.items()


def test_what_is_behind_a_prefix_costs_what_it_adds_behind_it(variants):
    costs = {(point.format, point.remedy): point.cost.mean for point in remedy_points(variants)}
    assert costs["w8a8", "prefix(3)"] == pytest.approx(0.055)
    assert costs["w8a8", "none"] == pytest.approx(0.1)
    alone = [row for row in variants if row["variant"] != "prefix(3)"]
    costs = {(point.format, point.remedy): point.cost.mean for point in remedy_points(alone)}
    assert costs["w8a8", "prefix(3)"] == pytest.approx(-0.156), "where that was not measured"


def test_the_frontier_by_what_has_few_bits(variants):
    _, table = remedies_section(variants).tables
    assert table.cells == [
        ["weights alone", "4.10", "w4", "none", "+20.00 % ± 0.10"],
        ["weights and activations", "8.10", "w8a8", "features=4", "+5.00 % ± 0.10"],
        ["keys and values", "4.50", "int4", "hadamard", "+9.00 % ± 0.10"],
        ["keys and values", "4.75", "int4", "channels=32@keys", "+4.00 % ± 0.10"],
    ]
    assert len(table.data) == 11
    assert list(table.data["remedy"][table.data["frontier"]]) == ["features=4", "hadamard", "channels=32@keys", "none"]


def test_weights_on_the_grid_of_their_file_are_not_on_the_frontier(variants):
    stored = [row | {"quantized_from": "Q4_1"} for row in variants]
    section = remedies_section(stored)
    assert section.tables[1].cells[0] == ["weights alone", "4.10", "w4", "hadamard", "+30.00 % ± 0.10"]
    hollow = {(point.format, point.remedy) for point in remedy_points(stored) if point.on_grid}
    assert hollow == {("w4", "none")}, "eight bits are finer than the grid"
    assert "dequantized from Q4_1" in section.drawings[0].caption
    assert "dequantized" not in remedies_section(variants).drawings[0].caption
    name = "w4+hadamard@ffn_out"
    partly = [row | {"scheme": name, "variant": name} for row in stored if row["variant"] == "w4+hadamard"]
    assert [point.on_grid for point in remedy_points([*stored[:1], *partly])] == [True]


def test_more_bits_are_on_the_frontier_where_they_cost_less_beyond_scatter(variants):
    def reached(deviation: float | None) -> list[str]:
        rows = [row | {"standard_deviation": deviation} for row in variants if "keys" in row or row == variants[0]]
        return [point.remedy for point in frontier_of(remedy_points(rows))]

    assert reached(0.1) == ["hadamard", "channels=32@keys"]
    assert reached(0.3) == ["hadamard"]
    assert reached(None) == ["hadamard", "channels=32@keys"], "of a single draw"


def test_no_point_no_frontier(variants):
    with pytest.raises(UserError, match="no rows of a format and of its model without quantization"):
        frontier(variants[:2])


@pytest.fixture
def family():
    """Rows of `table4_row` of three models; the first has no outlier feature."""
    rows = []
    for n, (count, layers) in enumerate([(0, 0.02), (1, 0.4), (2, 1.0)]):
        values = {"perplexity": 30.0 - 8 * n, "count": count, "one_sided": min(count, 1), "layers": layers}
        values |= {"positions": layers / 2, "q1": -8.04, "median": -7.0, "q3": -6.5, "top1_softmax": 0.4}
        values |= {"top1_softmax_without": 0.2} if count else {}
        about = {"model": f"made/gpt2-{n}", "architecture": "gpt2", "parameters": 10 ** (6 + n)}
        rows += [{**about, "metric": metric, "value": value} for metric, value in values.items()]
    return rows


def test_fit_recovers_an_exponential():
    perplexity = np.linspace(12, 35, 12)
    exact = np.exp((11 - perplexity) / 9)
    found = exponential_fit(perplexity, exact)
    assert (found.full, found.scale) == pytest.approx((11, 9))
    noise = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        found = exponential_fit(perplexity, exact + noise.normal(0, 0.02, 12))
        inside += found.scale_interval[0] < 9 < found.scale_interval[1]
    assert 0.88 <= inside / 200 <= 0.99, "95 % of the intervals hold the truth"
    assert found.at(5) == 1
    assert found.at(40) < 0.1


def test_nothing_to_fit():
    assert exponential_fit([10, 20], [1, 0.5]) is None
    assert exponential_fit([10, 10, 10], [0.1, 0.5, 0.9]) is None
    for fraction in ([0, 0, 0], [0.5, 0, 0], [0.1, 0.5, 0.9]):
        assert exponential_fit([10, 20, 30], fraction) is None


@needs_paper
def test_fit_of_the_papers_own_table():
    """The paper's claim, on its published rows: both fractions grow e-fold over about ten units of perplexity."""
    table = pd.read_csv(PAPER_TABLES / "table4_outlier_features.csv")
    layers, positions = (exponential_fit(table["ppl"], table[name] / 100) for name in ("layers_pct", "sdims_pct"))
    assert layers.points == 10
    assert layers.scale == pytest.approx(positions.scale, rel=0.1)
    assert layers.scale_interval[0] > 0
    assert layers.full > positions.full


def test_a_fit_leaves_out_what_is_not_known(family):
    models = by_model(family)
    known = exponential_fit(models["perplexity"], models["layers"])
    more = exponential_fit([*models["perplexity"], 20, np.nan], [*models["layers"], np.nan, 0.5])
    assert more == known


def test_figure3_shows_the_rows_and_the_fit(family):
    by_size, by_perplexity = figure3(family, paper=False)
    points = [line.get_xydata().tolist() for line in by_size.lines if len(line.get_xdata())]
    assert points[0] == [[1e6, 2], [1e7, 40], [1e8, 100]]
    assert points[1] == [[1e6, 1], [1e7, 20], [1e8, 50]]
    assert not [line for line in by_perplexity.lines if len(line.get_xdata()) > 3], "three points show no growth"
    words = [text.get_text() for text in by_perplexity.get_legend().get_texts()]
    no_fit = "no fit drawn,\nits interval includes 0"
    assert words == [f"layers: {no_fit}", f"sequence positions: {no_fit}"]
    assert by_perplexity.get_xlim()[0] > by_perplexity.get_xlim()[1], "better models are to the right"
    steps = {"made/gpt2-0": "step100", "made/gpt2-1": "step300", "made/gpt2-2": "step200"}
    checkpoints = [row | {"parameters": 1, "checkpoint": steps[row["model"]], "model": "made/one"} for row in family]
    by_step = figure3(checkpoints)[0]
    assert by_step.get_xlabel() == "training step"
    assert by_step.lines[0].get_xdata().tolist() == [100, 200, 300]


def test_a_fit_is_drawn_where_the_data_show_growth():
    rows = [
        {"model": f"made/{number}", "architecture": "gpt2", "parameters": 10**6 + number, "metric": metric, "value": y}
        for number, x in enumerate(np.linspace(14, 40, 9))
        for metric, y in [
            *{"perplexity": x, "count": 1, "layers": np.exp((11 - x) / 9)}.items(),
            ("positions", 0.3 + 0.2 * (-1) ** number),  # which do not grow
        ]
    ]
    axes = figure3(rows, panel="b", paper=False)
    (curve,) = [line for line in axes.lines if len(line.get_xdata()) > 9]
    assert curve.get_ydata().max() == pytest.approx(100 * np.exp(-3 / 9))
    words = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert words[0] == "layers: exp((11 − ppl) / 9)"
    assert words[1].startswith("sequence positions: no ")


def test_families_of_more_architectures_than_markers(family):
    kinds = [
        {**row, "model": f"made/{number}", "architecture": f"kind-{number}", "value": row["value"] * (1 + number / 50)}
        for number in range(12)
        for row in family[-10:]
    ]
    panel, _ = figure3(kinds, paper=False)
    assert sum(len(line.get_xdata()) for line in panel.lines) == 24


def test_figure4_shows_the_rows(family):
    magnitude, number = figure4(family, paper=False)
    outliers, none = magnitude.lines[0], magnitude.lines[1]
    assert sorted(outliers.get_xydata().tolist()) == [[14, 7], [22, 7]]
    assert none.get_xydata().tolist() == [[30, 7]]
    assert none.get_fillstyle() == "none"
    assert number.lines[0].get_ydata().tolist() == [2, 1, 0]


def test_figure4_has_a_line_at_the_alpha_that_was_asked(family):
    magnitude, _ = figure4([{**row, "alpha": 4.5} for row in family], paper=False)
    assert [line.get_ydata() for line in magnitude.lines if line.get_linestyle() == ":"] == [[4.5, 4.5]]


def test_emergence_files(family, tmp_path):
    twin = [{**row, "model": "made/gpt2-copy", "same_weights_as": "gpt2-2"} for row in family[-10:]]
    printed = write(emergence_section(family + twin), tmp_path, "")
    check_files(tmp_path, "table4", "figure3 figure4", "fits")
    assert "gpt2-copy holds the same weights as gpt2-2" in printed
    assert "3 models)" in printed, "a copy is no further point of the fit"
    assert pd.read_csv(tmp_path / "fits.csv")["fraction"].tolist() == ["layers", "positions"]


@pytest.fixture
def ablation():
    """Rows of an ablation of two features, two methods."""
    rows = []
    for cell in plan([3, 7], 32, ["zero", "mean"]):
        worse = {"none": 0, "outliers": 5, "control": 1 + (cell.draw or 0) / 10, "single": cell.features[-1:] == (7,)}
        values = {"perplexity": 10.0 + worse[cell.subject], "top1_softmax": 0.5 - worse[cell.subject] / 50}
        about = {**vars(cell), "features": list(cell.features), "seed": 0, "model": "made/gpt2"}
        rows += [{**about, "metric": metric, "value": value} for metric, value in values.items()]
    return rows


def test_ablation_bars_show_the_summary(ablation):
    found = ablation_summary(ablation)
    top1, damage = ablation_bars(found)
    heights = [[bar.get_height() for bar in bars] for bars in damage.containers if hasattr(bars, "patches")]
    assert heights == [pytest.approx([50, 50]), pytest.approx([14.5, 14.5])]
    assert [label.get_text() for label in damage.get_xticklabels()] == ["zero", "mean"]
    (as_it_is,) = (line for line in top1.lines if line.get_label() == "unmodified model")
    assert list(as_it_is.get_ydata()) == [0.5, 0.5]
    segment = damage.collections[0].get_segments()[0][:, 1]
    control = found[found["subject"] == "control"].iloc[0]
    assert segment.tolist() == pytest.approx([100 * control["damage_low"], 100 * control["damage_high"]])


@pytest.fixture(scope="module")
def found():
    """The trace of a small model with planted outliers."""
    blocks = torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1))
    return trace(plant(make_model("llama"), [5, 20], 30), blocks)


def test_heat_map_shows_the_maxima(found):
    panels = heat_map(found)
    images = [axes.get_images()[0] for axes in panels]
    for image, role in zip(images, OF_EVERY_STACK, strict=True):
        assert np.array_equal(image.get_array(), found.largest(role))
    labels = ["feature", "feature of the concatenated heads", "feature", "feed-forward unit"]
    assert [axes.get_xlabel() for axes in panels] == labels
    names = [[label.get_text() for label in child.get_xticklabels()] for child in panels[0].child_axes]
    assert [sorted(labels) for labels in names] == [["20", "5"]]
    wide = replace(found, roles=("attn_in",), statistics={**found.statistics})
    for end in ("min", "max"):
        wide.statistics[f"attn_in.{end}"] = torch.nn.functional.pad(found.statistics[f"attn_in.{end}"], (2500, 3))
    image = heat_map(replace(wide, roles=("attn_out",))).get_images()[0].get_array()
    assert image.shape == (2, 32)
    columns = pooled(wide.largest("attn_in").numpy(), 3)
    assert columns.shape == (2, 845)
    assert columns.max() == found.largest("attn_in").max()


def with_largest(found, role: str, layer: int, value: float):
    """The trace with one larger value."""
    high = found.statistics[f"{role}.max"].clone()
    high[layer, 7] = value
    return replace(found, statistics={**found.statistics, f"{role}.max": high})


def test_a_heat_map_can_be_read_whatever_its_largest_value_is(found):
    """On a scale of four decades: hits stand out, and what is close differs."""
    for value in (8, 3000, 60_000):
        axes = heat_map(with_largest(found, "ffn_out", 1, value))[0].figure.axes
        image = axes[0].get_images()[0]
        colors = image.cmap(image.norm(np.array([0.4, 1.5, 5.9, 6.1, value])))[:, :3]
        luminance = colors @ (0.2126, 0.7152, 0.0722)
        assert (np.diff(luminance) > 0).all()
        assert luminance[3] - luminance[2] > 0.15
        bar = axes[-1]
        assert "log" in bar.get_ylabel()
        assert bar.get_yscale() == "log"


@pytest.mark.slow
@pytest.mark.parametrize("draw", [heat_map, sorted_profile, magnitude_by_position])
@pytest.mark.parametrize("value", [None, 3000])
def test_labels_of_a_trace_do_not_overlap_or_repeat(found, draw, value):
    statistics = {**found.statistics, "attn_in.max": found.statistics["attn_in.max"].clone()}
    statistics["attn_in.min"] = statistics["attn_in.min"].clone()
    for end in ("min", "max"):
        statistics[f"attn_in.{end}"][:, 9] *= 1e-6  # a feature that is as good as dead
    shown = replace(found, statistics=statistics)
    figure = np.ravel(draw(with_largest(shown, "ffn_out", 1, value) if value else shown))[0].figure
    check_words(figure)
    if draw is not magnitude_by_position:
        assert sum(len(ticks_of(axes.yaxis)) > 1 for axes in figure.axes) >= 3


def test_lines_of_a_trace(found):
    axes = magnitude_by_position(found)
    labels = [line.get_label() for line in axes.lines]
    assert {*labels[:2]} == {"feature 5", "feature 20"}
    assert labels[2] == "median feature"
    for panel, role in zip(sorted_profile(found), OF_EVERY_STACK, strict=True):
        profile = panel.lines[0].get_ydata()
        assert np.array_equal(profile, found.largest(role)[0].sort(descending=True).values)
    assert len(sorted_profile(replace(found, roles=("attn_in", "attn_out", "ffn_in")))) == 3
    magnitude_by_position(replace(found, roles=("ffn_in",)))


@pytest.mark.slow
def test_trace_files(found, tmp_path, family):
    section = traced_section(found, family[:8], "<token {}>".format)
    printed = write(section, tmp_path, "")
    further = "features_by_layer hidden_states massive_activations attention_sinks sink_tokens largest_by_layer"
    check_files(tmp_path, "table4 features largest", "heat_map magnitude_by_position sorted_profile", further)
    assert "Outlier features: 2 (|x| ≥ 6" in printed
    assert len(pd.read_csv(tmp_path / "features.csv")) == 32
    none = trace(make_model("gpt2"), torch.randint(100, (1, 24)), alpha=1000)
    assert "No outlier feature; the nearest ones" in traced_section(none, family[:8], str).printed

    shown = html.unescape((tmp_path / "report.html").read_text())
    largest = pd.read_csv(tmp_path / "largest.csv")
    assert largest["role"].tolist() == list(OF_EVERY_STACK)
    for row in largest.to_dict("records"):
        name = f"<token {row['token']}>"
        assert row["token_text"] == name
        cells = [f"{row['max']:,.1f}", *(str(row[column]) for column in ("layer", "feature", "position")), name]
        line = next(line for line in printed.splitlines() if line.startswith(f"{row['role']}  "))
        assert re.sub(r"  +", "  ", line).split("  ")[2:] == cells
        assert all(f"{cell}</td>" in shown for cell in cells)
    assert len(pd.read_csv(tmp_path / "largest_by_layer.csv")) == 8
    assert r"\<token " in (tmp_path / "largest.md").read_text(), "Markdown does not take it as HTML"
    assert r"max \|x\|" in (tmp_path / "largest.md").read_text(), "nor this as the end of a cell"


SINKS = {(0, 0): 12, (1, 0): 6, (1, 5): 3}  # (layer, head) pairs of 2 × 4 for which a position is one, in 3 sequences


def changed(found, **statistics):
    """A trace with other statistics; `_` in a name stands for a dot."""
    return replace(found, statistics={**found.statistics, **{k.replace("_", ".", 1): v for k, v in statistics.items()}})


@pytest.mark.slow
def test_massive_activations_and_sinks_are_said(found, family):
    sinks = torch.zeros(2, 24, dtype=torch.int64)
    for (layer, position), count in SINKS.items():
        sinks[layer, position] = count
    massive = torch.zeros(2, 32, dtype=torch.int64)
    massive[1, 3] = 6
    largest = torch.tensor([[90.0, -90, 4, 1, 17], [2500, 2500, 3, 0, 40]], dtype=torch.float64)
    tokens = torch.zeros(100, dtype=torch.int64)
    tokens[[40, 17]] = torch.tensor([18, 3])
    shown = changed(
        found,
        attention_sinks=sinks,
        attention_sinks_tokens=tokens,
        residual_massive=massive,
        residual_largest=largest,
        residual_sum_of_ratios=torch.tensor([30.0, 6000]).double(),
    )
    section = traced_section(shown, family[:8], "'{}'".format)
    tables = {table.name: table for table in section.tables}
    assert tables["massive_activations"].cells == [["1", "2", "2,000", "2,500", "3", "0", "'40'"]]
    assert tables["attention_sinks"].cells == [["0", "75.0%"], ["5", "12.5%"]]
    assert "at sinks: '40' (86%), '17' (14%)." in tables["attention_sinks"].caption
    assert not section.notes
    for table in tables.values():
        assert table.fitted in section.printed
        assert " ".join(table.caption.split()) in " ".join(section.printed.split())

    none = {"attention_sinks": 0 * sinks, "attention_sinks_tokens": 0 * tokens, "residual_massive": 0 * massive}
    nothing = traced_section(changed(shown, **none), family[:8], "'{}'".format)
    assert {table.name for table in nothing.tables} == {"features", "table4", "largest"}
    massive, sinks = nothing.notes
    assert massive.startswith("No massive activation in the residual stream (|x| > 100 and at least 1,000 times")
    assert massive.endswith("is 2,500, after layer 1 in feature 3, at position 0, token '40'.")
    assert sinks.startswith("No attention sink (")
    assert all(note in " ".join(nothing.printed.split()) for note in nothing.notes)
    assert massive in html.unescape(page("", [nothing], ""))


def test_tokens_of_a_trace_are_shown(family):
    """Of the outlier features, or the nearest one, and of the largest feature of the residual stream."""
    ids = torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1))
    of_planted = trace(plant(make_model("llama"), [5, 20], 30), ids, tokens=make_tokenizer())
    of_none = trace(make_model("gpt2"), ids, alpha=1000, tokens=make_tokenizer())
    for found, count in ((of_planted, 2), (of_none, 1)):
        tables = {table.name: table for table in traced_section(found, family[:8], str).tables}
        features = list(dict.fromkeys((row[0], row[1]) for row in tables["token_types"].cells))
        of_stream = found.features()["feature"].head(count).astype(str)
        largest = found.massive_activations().set_index("layer")
        largest = str(largest.loc[largest["value"].abs().idxmax(), "feature"])
        assert features == [*((feature, "attn_in+ffn_in") for feature in of_stream), (largest, "residual")]
        for name in ("token_types", "tokens", "contexts"):
            assert {row[0] for row in tables[name].cells} == {feature for feature, _ in features}
        best = found.tokens(int(features[0][0]))
        first = best[best["token"] >= 0].iloc[0]
        assert tables["tokens"].cells[0][2:4] == [first["token_text"], first["type"]]
        assert len(tables["tokens"].cells) == 8 * len(features)
        assert tables["contexts"].cells[0][2] == found.tokens(int(features[0][0]), "position")["context"][0].strip()
        data = tables["tokens"].data
        of_first = data[(data["feature"] == int(features[0][0])) & (data["role"] == "attn_in+ffn_in")]
        assert of_first["mean"].tolist() == best["mean"].tolist()


def test_a_role_that_was_not_traced_is_named(found, family):
    section = traced_section(replace(found, roles=("attn_in", "attn_out", "ffn_in")), family[:8], str)
    assert "No projection reads ffn_out." in section.printed


@pytest.mark.parametrize(("gain", "telling"), [(1, True), pytest.param(20, False, marks=pytest.mark.slow)])
def test_large_gains_of_the_norms_are_said(family, gain, telling):
    """Nearly every feature passes the criterion then, which stays what it is."""
    model = plant(make_model("llama"), [5, 20], 30)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight *= gain
    found = trace(model, torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1)))
    section = traced_section(found, family[:8], str)
    (table,) = (table for table in section.tables if table.name == "features")
    said = "More than half of the 32 features meet the criterion, as in models whose norms have large gains: at this α"
    assert (said in table.caption) != telling
    assert (said in " ".join(section.printed.split())) != telling
    assert (said in html.unescape(page("", [section], ""))) != telling
    count = len(found.outlier_features())
    assert (count == 2) if telling else (count > 28)
    assert f"Outlier features: {count}" in section.printed
    assert len(table.cells) == min(count, 20)
    assert ("the 20 most common" in table.caption) != telling
