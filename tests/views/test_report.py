"""Tables and figures from rows: whole as tests/views/kept has them, and against what other code computes."""

import html
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from outliers.criterion import OF_EVERY_STACK
from outliers.errors import UserError
from outliers.metrics.ablations import treatments
from outliers.quantization.schemes import SCHEMES
from outliers.show.legends import OTHERS, STYLES, variant_styles
from outliers.show.maps import pooled
from outliers.show.page import page
from outliers.show.section import Drawing, Section
from outliers.show.style import COLORS, GREY, house_style
from outliers.show.tables import Table
from outliers.show.write import write
from outliers.tracing.trace import trace
from outliers.variants.plant import plant
from outliers.views.ablation import ablation_section
from outliers.views.attention import attention_points as attention_points
from outliers.views.emergence import by_model, distinct_models, exponential_fit, figure3, figure4, fits_of
from outliers.views.latency import latencies, latency_section
from outliers.views.perplexity import perplexity_section, sweep_costs
from outliers.views.remedies import frontier, frontier_of, remedies_section
from outliers.views.remedies import remedy_points as remedy_points
from outliers.views.table4 import emergence_section
from outliers.views.trace import heat_map, magnitude_by_position, sorted_profile, traced_section
from outliers.views.zeroshot import zeroshot_section
from tests.conftest import PAPER_TABLES, needs_paper
from tests.small_models import make_model, make_tokenizer
from tests.views.shown import shown

# Rows


def sweep(**more: float) -> list[dict]:
    """Two models under three schemes, in the order in which a sweep measures them, and under others of one value."""
    values = {"llm.int8": (100.125, 10.5), "absmax": (110, 11.25), "fp32": (100, 10)}
    values = {name: (value, value) for name, value in more.items()} | values
    models = [("pocket/gpt2-1m", "gpt2"), ("pocket/opt-2m", "opt")]
    return [
        {"model": model, "architecture": kind, "parameters": 10**6 * (n + 1), "dtype": "float32"}
        | {"variant": variant, "metric": "perplexity", "value": float(pair[n])}
        for variant, pair in values.items()
        for n, (model, kind) in enumerate(models)
    ]


def each(rows: list[dict], **fields) -> list[dict]:
    """Rows with further fields; a function is of the row."""
    return [row | {name: of(row) if callable(of) else of for name, of in fields.items()} for row in rows]


def of(rows: list[dict], *variants: str) -> list[dict]:
    return [row for row in rows if row["variant"] in variants]


def without(rows: list[dict], variant: str) -> list[dict]:
    return [row for row in rows if row["variant"] != variant]


OWN = sweep(mine=120, another=120)
TIMES = {"metric": "latency.decode", "batch": 1, "q1": 1, "q3": 2, "prompt": 8, "tokens": 4, "repeats": 2}
TIMES |= {"device_name": "one", "threads": 2}
OF_BATCHES = {  # of a model under a scheme: by what is timed and the batch; the rest was not timed
    ("a/b", "fp32"): {("decode", 8): 6.0, ("decode", 1): 4.0, ("prefill", 8): 155.4},
    ("a/b", "llm.int8"): {("decode", 8): 2.0, ("prefill", 8): 77.7},
    ("c", "llm.int8"): {("decode", 1): 5.0},
}
TIMED = [
    TIMES
    | {"model": model, "variant": variant, "dtype": "bfloat16", "q1": 1.0, "q3": 9.0}
    | {"metric": f"latency.{name}", "batch": batch, "value": value}
    for (model, variant), times in OF_BATCHES.items()
    for (name, batch), value in times.items()
]
ACCURACIES = [("fp32", "piqa", 0.7), ("fp32", "lambada_openai", 0.6), ("llm.int8", "piqa", 0.6)]
OF_TWO_KINDS = [
    {"model": "facebook/opt-1b", "architecture": "opt", "parameters": 10**8, "dtype": "float16", "lm_eval": "0"}
    | {"variant": variant, "task": task, "metric": f"zeroshot.{metric}", "value": value}
    | {"standard_error": 0.02, "examples": 100}
    for variant, task, value in ACCURACIES
    for metric in ("acc", "acc_norm")
]
ONE_MODEL = sweep()[0] | {"draws": 3}
REMEDIES = {  # one model in formats with remedies: of each scheme its perplexity, and what else its row says
    "fp32": (10, {}),
    "absmax": (20, {}),
    "absmax+hadamard": (12, {"standard_deviation": 0.5}),
    "w4a4": (110, {"weight_bits": 4.05, "activation_bits": 4.06}),
    "w8a8": (10.2, {"weight_bits": 8.06, "activation_bits": 8.06}),
    "llm.int8": (10.1, {"alpha": 6.0}),
    "nvfp4+reorder": (1e6, {"weight_bits": 4.5, "activation_bits": 4.5}),
}
SAVED = [ONE_MODEL | {"variant": name, "value": value} | fields for name, (value, fields) in REMEDIES.items()]
CACHE = {"keys": "int4", "values": "int4", "cache_bits": 4.5}
VARIANTS = {  # of each its perplexity, and what else its row says
    "fp32": (10.0, {}),
    "prefix(3)": (8.0, {"prefix": [3]}),
    "w8a8": (11.0, {"weight_bits": 8.1, "activation_bits": 8.1}),
    "prefix(3)+w8a8": (8.44, {"weight_bits": 8.1, "activation_bits": 8.1, "prefix": [3]}),
    "w8a8+skip=ffn_out": (10.8, {"weight_bits": 8.1, "activation_bits": 8.1}),
    "llm.int8": (10.6, {"alpha": 6.0}),
    "llm.int8+alpha=4": (10.5, {"alpha": 4.0}),
    "llm.int8+kv=int4": (11.5, {"alpha": 6.0, **CACHE}),
    "kv=int4": (11.2, CACHE),
    "kv=int4/hadamard": (10.9, CACHE | dict.fromkeys(("keys", "values"), "int4/hadamard")),
    "keys=int4/channels=32+values=int4": (10.4, CACHE | {"keys": "int4/channels=32", "cache_bits": 4.75}),
    "w4": (12.0, {"weight_bits": 4.1}),
    "w4+hadamard": (13.0, {"weight_bits": 4.1}),
}
VARIED = [
    ONE_MODEL | {"standard_deviation": 0.01, "variant": name, "value": value} | fields
    for name, (value, fields) in VARIANTS.items()
]


def family(**fields) -> list[dict]:
    """Rows of `table4_row` of three models; the first has no outlier feature."""
    rows = []
    for n, (count, layers) in enumerate([(0, 0.02), (1, 0.4), (2, 1.0)]):
        values = {"perplexity": 30.0 - 8 * n, "count": count, "one_sided": min(count, 1), "layers": layers}
        values |= {"positions": layers / 2, "q1": -8.04, "median": -7.0, "q3": -6.5, "top1_softmax": 0.4}
        values |= {"top1_softmax_without": 0.2} if count else {}
        about = {"model": f"made/gpt2-{n}", "architecture": "gpt2", "parameters": 10 ** (6 + n)}
        rows += [{**about, "metric": metric, "value": value} for metric, value in values.items()]
    return each(rows, **fields)


def ablation() -> list[dict]:
    """Rows of an ablation of two features, two methods."""
    rows = []
    for cell in treatments([3, 7], 32, ["zero", "mean"]):
        worse = {"none": 0, "outliers": 5, "control": 1 + (cell.draw or 0) / 10, "single": cell.features[-1:] == (7,)}
        values = {"perplexity": 10.0 + worse[cell.subject], "top1_softmax": 0.5 - worse[cell.subject] / 50}
        about = {**vars(cell), "features": list(cell.features), "seed": 0, "model": "made/gpt2"}
        rows += [{**about, "metric": metric, "value": value} for metric, value in values.items()]
    return rows


def growing() -> list[dict]:
    """Nine models whose layers are affected the more the better they are, and whose positions are not."""
    points = list(enumerate(np.linspace(14, 40, 9)))
    of_each = {
        number: {"perplexity": x, "count": 1, "layers": np.exp((11 - x) / 9), "positions": 0.3 + 0.2 * (-1) ** number}
        for number, x in points
    }
    return [
        {"model": f"made/{n}", "architecture": "gpt2", "parameters": 10**6 + n, "metric": metric, "value": value}
        for n, values in of_each.items()
        for metric, value in values.items()
    ]


def lines_of(*kinds: str) -> list[dict]:
    """A sweep without a baseline of models of these architectures, of each its letter as a perplexity."""
    of_two = without(sweep(), "fp32")[::2]
    return [row | {"architecture": kind, "value": ord(kind[0])} for row in of_two for kind in kinds]


def drawn(axes) -> Section:
    """A section of a figure alone."""
    return Section("", [], drawings=[Drawing.of("figure", "", axes)])


HALF = each(sweep(), dtype="float16")
STEPS = {"made/gpt2-0": "step100", "made/gpt2-1": "step300", "made/gpt2-2": "step200"}
TWIN = each(family()[-10:], model="made/gpt2-copy", same_weights_as="gpt2-2")
UNKNOWN = [VARIED[0] | {"variant": name, "value": 9.0} for name in ("mine", "bitsandbytes")]
SECTIONS = {
    "sweep": lambda: perplexity_section(sweep()),
    "sweep in 16 bits": lambda: perplexity_section(HALF),
    "sweep that lacks a cell": lambda: perplexity_section(sweep()[:-1]),
    "sweep of broken models": lambda: perplexity_section(
        each(sweep(), value=lambda row: row["value"] * 1e250, standard_deviation=1e248)
    ),
    "sweep of own schemes": lambda: perplexity_section(OWN),
    "sweep of decompositions": lambda: perplexity_section(
        each(sweep(mine=120), alpha=lambda row: {"absmax": 6.0, "mine": 4.5}.get(row["variant"]))
    ),
    "sweep of draws": lambda: perplexity_section(
        each(sweep(), draws=4, standard_deviation=lambda row: row["value"] / 1000)
    ),
    "sweep without a baseline": lambda: perplexity_section(without(sweep(), "fp32")),
    "sweep of one architecture": lambda: drawn(sweep_costs(each(without(sweep(), "fp32"), architecture="gpt2"))),
    "sweep of many architectures": lambda: drawn(sweep_costs(lines_of(*"hbdfaceg"))),
    "sweep of models of one name": lambda: perplexity_section(
        each(sweep(), model=lambda row: "/a/hf" if "gpt2" in row["model"] else "/b/hf")
    ),
    "latency of two batches": lambda: latency_section(TIMED),
    "zero-shot tasks of two kinds": lambda: zeroshot_section(OF_TWO_KINDS),
    "remedies": lambda: remedies_section(SAVED),
    "remedies of two models": lambda: remedies_section([*SAVED[:3], *each(SAVED[:3], model="pocket/opt-2m")]),
    "variants": lambda: remedies_section(VARIED),
    "variants of a file of 4 bits": lambda: remedies_section(
        each([VARIED[0], VARIED[2], *VARIED[-2:]], quantized_from="Q4_1")
    ),
    "variants that nobody can read": lambda: remedies_section(VARIED[:3] + UNKNOWN),
    "emergence": lambda: emergence_section(family() + TWIN),
    "emergence at 4.5": lambda: drawn(figure4(family(alpha=4.5), paper=False)),
    "emergence in training": lambda: drawn(
        figure3(each(family(), parameters=1, checkpoint=lambda row: STEPS[row["model"]], model="one"), paper=False)
    ),
    "emergence that grows": lambda: drawn(figure3(growing(), panel="b", paper=False)),
    "ablation": lambda: ablation_section(ablation()),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_section(name, as_kept):
    as_kept(name, shown(SECTIONS[name]()))


def test_points_of_variants_of_one_scheme(as_kept):
    """On figures of remedies, and of remedies beside weights on the grid of their file; and of attention."""
    attended = {"fp32": "fp32", "prefix(3)": "fp32", "prefix(3)+fp32+attention": "fp32+attention"}
    attended |= {"absmax+attention": "absmax+attention", "absmax+attention+skip=ffn_out": "absmax+attention"}
    rows = [
        sweep()[0] | {"scheme": scheme, "variant": name, "value": 10.0 + number}
        for number, (name, scheme) in enumerate(attended.items())
    ]
    points = {
        "remedies": remedy_points(VARIED),
        "without what a prefix costs": remedy_points([row for row in VARIED if row["variant"] != "prefix(3)"]),
        "remedies on a grid": remedy_points(each(VARIED, quantized_from="Q4_1")),
        "attention": attention_points(rows),
        "attention of what nobody can read": attention_points(VARIED[:1] + UNKNOWN),
    }
    lines = [f"{kind}: {' '.join(map(_cell, point))}" for kind, found in points.items() for point in found]
    as_kept("points", "\n".join(lines))


def _cell(value) -> str:
    return f"{value.mean:.4g}" if hasattr(value, "mean") else f"{value}".replace("\n", " ")


# Facts that one picture does not show


def test_a_wide_table_is_broken_at_the_width_of_a_terminal(monkeypatch):
    """Its headers first, then text, and then the last columns follow below."""
    headers = ["model", "a header of many words", *(f"column {number}" for number in range(12)), "note"]
    cells = [["gpt2-1.7m", "1.5", *(f"{number:.6f}" for number in range(12)), "a note of a few words " * 3]] * 2
    table = Table("wide", "Wide.", headers, cells, pd.DataFrame(), texts=("model", "note"))
    for columns, width in (("80", 80), ("40", 80), ("120", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        lines = table.printed.splitlines()
        assert width - 20 < max(map(len, lines)) <= width
    words = " ".join(table.printed.split())
    assert all(word in words for cell in cells[0] for word in cell.split())
    assert sum(line.startswith("gpt2-1.7m") for line in table.printed.splitlines()) == 4, "twice two rows"


def test_every_scheme_has_a_style_of_its_own():
    own = [f"mine-{number}" for number in range(len(OTHERS) - len(SCHEMES.keys() - STYLES.keys()))]
    assert len(own) > 20
    with house_style():
        styles = variant_styles([{"variant": scheme} for scheme in (*own, *SCHEMES, *own)])
        (lower,) = variant_styles([{"variant": "llm.int8+alpha=4"}]).values()
    assert list(styles) == [*SCHEMES, *own]
    assert styles["llm.int8"] == lower | {"label": "llm.int8"}, "at whatever threshold"
    looks = {scheme: (style["color"], style["marker"], style["linestyle"]) for scheme, style in styles.items()}
    assert len(set(looks.values())) == len(styles)
    assert GREY not in {style["color"] for style in styles.values()}, "which is the paper's"
    for scheme, (color, *others) in STYLES.items():
        assert list(looks[scheme]) == [COLORS[color], *others]


def test_models_of_one_name_are_not_taken_for_each_other():
    twins = [{**row, "model": model} for model in ("/a/hf", "/b/hf") for row in family()[:3]]
    assert by_model(twins).index.tolist() == ["/a/hf", "/b/hf"]
    timed = [row | TIMES | {"model": f"/{letter}/hf"} for row, letter in zip(of(OWN, "fp32"), "ab", strict=True)]
    assert latencies(timed)["decode", 1].tolist() == [100, 10]
    assert latencies(timed[:1]).index.tolist() == [("hf", "fp32")]


@pytest.mark.parametrize(("upper", "differs"), [(1.9, True), (2.0, False), (3.0, False)])
def test_times_whose_quartiles_meet_are_not_called_different(upper, differs):
    """Whichever of the two is the shorter."""
    ends = {"fp32": (2.0, 4.0), "llm.int8": (1.0, upper), "absmax": (6.0 - upper, 5.0)}
    rows = [row | TIMES | dict(zip(("q1", "q3"), ends[row["variant"]], strict=True)) for row in of(OWN, *ends)]
    said = [finding.text for finding in latency_section(rows).findings]
    assert ["times as long" in one for one in said] == [differs, differs]


def test_an_encoder_decoder_counts_once():
    """By the stack where the most common feature affects most positions; what cross-attention reads is no stack."""
    shares = {"encoder": 0.5, "decoder": 0.9, "cross": 1.0}
    perplexities = [row for row in family() if row["metric"] == "perplexity"]
    with_stacks = [
        {**row, "stack": stack, "value": share if row["metric"] == "positions" else row["value"]}
        for stack, share in shares.items()
        for row in family()
        if row["metric"] != "perplexity"
    ]
    models = distinct_models([*perplexities, *with_stacks])
    assert len(models) == len(by_model(family())) == len(by_model(with_stacks)) / 3
    assert all(name.endswith(" (decoder)") for name in models.index)


def test_models_of_another_vocabulary_are_not_fitted():
    alike = family(tokens_hash="a")
    other = each(family()[-10:], model="other", tokens_hash="b", value=lambda row: 3 * row["value"])
    assert len(by_model(alike + other)) == len(by_model(alike)) + 1
    assert fits_of(by_model(alike + other)) == fits_of(by_model(alike))


def test_more_bits_are_on_the_frontier_where_they_cost_less_beyond_scatter():
    def reached(deviation: float | None) -> list[str]:
        rows = [row for row in VARIED if "keys" in row or row == VARIED[0]]
        return [point.remedy for point in frontier_of(remedy_points(each(rows, standard_deviation=deviation)))]

    assert reached(0.1) == ["hadamard", "channels=32@keys"]
    assert reached(0.3) == ["hadamard"]
    assert reached(None) == ["hadamard", "channels=32@keys"], "of a single draw"


def test_nothing_without_what_it_is_compared_with():
    assert remedy_points(SAVED[1:]) == []
    with pytest.raises(UserError, match="no rows of a format and of its model without quantization"):
        frontier(VARIED[:2])


def test_fit_recovers_an_exponential():
    perplexity = np.linspace(12, 35, 12)
    exact = np.exp((11 - perplexity) / 9)
    found = exponential_fit(perplexity, exact)
    assert (found.full, found.scale) == pytest.approx((11, 9))
    assert exponential_fit([*perplexity, 20, np.nan], [*exact, np.nan, 0.5]) == found, "what is not known is left out"
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


def test_families_of_more_architectures_than_markers():
    kinds = [
        {**row, "model": f"made/{number}", "architecture": f"kind-{number}", "value": row["value"] * (1 + number / 50)}
        for number in range(12)
        for row in family()[-10:]
    ]
    panel, _ = figure3(kinds, paper=False)
    assert sum(len(line.get_xdata()) for line in panel.lines) == 24


# Traces


@pytest.fixture(scope="module")
def found():
    """The trace of a small model with planted outliers."""
    return trace(plant(make_model("llama"), [5, 20], 30), BLOCKS)


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
        image, bar = axes[0].get_images()[0], axes[-1]
        colors = image.cmap(image.norm(np.array([0.4, 1.5, 5.9, 6.1, value])))[:, :3]
        luminance = colors @ (0.2126, 0.7152, 0.0722)
        assert (np.diff(luminance) > 0).all()
        assert luminance[3] - luminance[2] > 0.15
        assert image.norm.vmax == pytest.approx(max(value, found.largest("attn_in").max()))
        assert bar.get_ylabel() == f"largest |x|, logarithmic;\nbelow {image.norm.vmin:.2g} darkest"
        assert bar.get_yscale() == "log"


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


SINKS = {(0, 0): 12, (1, 0): 6, (1, 5): 3}  # (layer, head) pairs of 2 × 4 for which a position is one, in 3 sequences


def with_massive(found, count: int = 1):
    """The trace with massive activations and attention sinks, or of the same values with none."""
    sinks, massive = torch.zeros(2, 24, dtype=torch.int64), torch.zeros(2, 32, dtype=torch.int64)
    for (layer, position), pairs in SINKS.items():
        sinks[layer, position] = pairs * count
    massive[1, 3] = 6 * count
    tokens = torch.zeros(100, dtype=torch.int64)
    tokens[[40, 17]] = torch.tensor([18, 3]) * count
    largest = torch.tensor([[90.0, -90, 4, 1, 17], [2500, 2500, 3, 0, 40]], dtype=torch.float64)
    statistics = {"attention.sinks": sinks, "attention.sinks_tokens": tokens, "residual.massive": massive}
    statistics |= {"residual.largest": largest, "residual.sum_of_ratios": torch.tensor([30.0, 6000]).double()}
    return replace(found, statistics=found.statistics | statistics)


def with_gains(gain: float):
    """A trace of the planted model whose norms have such gains: nearly every feature passes the criterion then."""
    model = plant(make_model("llama"), [5, 20], 30)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight *= gain
    return trace(model, BLOCKS)


BLOCKS = torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1))
THREE = ("attn_in", "attn_out", "ffn_in")
TRACES = {
    "trace": lambda found: found,
    "trace without outlier features": lambda _: trace(make_model("gpt2"), BLOCKS, alpha=1000),
    "trace that comes near": lambda _: trace(plant(make_model("llama"), [5, 20], 30), BLOCKS, alpha=80),
    "trace of massive activations": with_massive,
    "trace without massive activations": lambda found: with_massive(found, 0),
    "trace of three roles": lambda found: replace(found, roles=THREE),
    "trace of large gains": lambda _: with_gains(20),
    "trace by token of massive activations": lambda _: with_massive(
        trace(plant(make_model("llama"), [5, 20], 30), BLOCKS, tokens=make_tokenizer())
    ),
    "trace by token without outlier features": lambda _: trace(
        make_model("gpt2"), BLOCKS, alpha=1000, tokens=make_tokenizer()
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_trace(name, found, as_kept):
    """Without its figures, whose points are of a model."""
    section = traced_section(TRACES[name](found), family()[:8], "'{}'".format)._replace(drawings=[])
    as_kept(name, shown(section))
    text = html.unescape(page("", [section], ""))
    assert all(note in text for note in section.notes)


def test_trace_files(found, tmp_path):
    """These and no others; tokens are text to HTML and Markdown, and so is |x|."""
    section = traced_section(found, family()[:8], "<token {}>".format)
    assert str(tmp_path) in write(section, tmp_path, "")
    names = {
        ("md", "tex", "csv"): "table4 features largest",
        ("png", "svg"): "heat_map magnitude_by_position sorted_profile",
        ("csv",): "features_by_layer hidden_states massive_activations attention_sinks sink_tokens largest_by_layer",
        ("html",): "report",
        ("parquet",): "rows",
    }
    files = {f"{name}.{ending}" for endings, of_kind in names.items() for name in of_kind.split() for ending in endings}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert r"\toprule" in (tmp_path / "table4.tex").read_text()
    assert (tmp_path / "heat_map.png").read_bytes().startswith(b"\x89PNG")
    counts = {"features": 32, "largest_by_layer": 8, "largest": 4}
    assert {name: len(pd.read_csv(tmp_path / f"{name}.csv")) for name in counts} == counts
    assert "&lt;token " in (tmp_path / "report.html").read_text()
    assert r"\<token " in (tmp_path / "largest.md").read_text()
    assert r"max \|x\|" in (tmp_path / "largest.md").read_text()
