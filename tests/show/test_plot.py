"""Figures of real models and of many of anything: what can be read, on whose axes, in whose style."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import outliers
from outliers import UserError, plot
from outliers.commands.training import Training
from outliers.config.files import make_experiment, read_experiment
from outliers.metrics.damages import damages_of
from outliers.show import style
from outliers.show.axes import cost_axis, parameters_axis, perplexity_axis
from outliers.show.legends import SCATTER
from outliers.show.section import figure_bytes
from outliers.views.ablation import ablation_summary
from outliers.views.growth import PANELS
from tests.conftest import needs_smollm2
from tests.kept import KEPT, kept
from tests.small_models import sample_blocks
from tests.training_rows import rows_of_runs

POCKET = pd.read_csv(Path(outliers.__file__).parent / "models" / "pocket" / "emergence.csv")
LONG = "a-folder/of-somebody/a-model-of-a-very-long-name-indeed-{}-instruct"


def ticks_of(axis) -> list[Text]:
    """The labels of ticks that are in view."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    ticks = [tick for tick in ticks if low - 1e-9 <= tick.get_loc() <= high + 1e-9]
    return [label for tick in ticks for label in (tick.label1, tick.label2) if label.get_visible() and label.get_text()]


@pytest.mark.parametrize(
    ("scale", "limits", "labels"),
    [
        (parameters_axis, (1.5e8, 7e8), "200M 500M"),
        (parameters_axis, (1.5e8, 4e9), "300M 1B 3B"),
        (parameters_axis, (1e5, 2e9), "100k 1M 10M 100M 1B"),
        (perplexity_axis, (9.5, 32), "10 15 20 30"),
        (perplexity_axis, (9, 55), "10 20 50"),
    ],
)
def test_an_axis_has_round_numbers_that_fit(scale, limits, labels):
    axes = Figure().subplots()
    axes.set_xlim(*limits)
    scale(axes)
    axes.figure.draw_without_rendering()
    assert [label.get_text() for label in ticks_of(axes.xaxis)] == labels.split()


def test_an_axis_of_costs_is_linear_near_nothing():
    axes = Figure().subplots()
    cost_axis(axes, [-0.05, 0.5, 300.0])
    axes.figure.draw_without_rendering()
    assert [label.get_text() for label in ticks_of(axes.yaxis)] == ["−0.1", "0", "+0.1", "+1", "+10", "+100"]


def texts_of(figure: Figure) -> list[Text]:
    """Every text that is seen."""
    figure.draw_without_rendering()
    axes = figure.findobj(lambda artist: hasattr(artist, "xaxis"))
    ticks = [label for one in axes for axis in (one.xaxis, one.yaxis) for label in ticks_of(axis)]
    every = {tick for one in axes for axis in (one.xaxis, one.yaxis) for tick in _labels(axis)}
    others = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in every]
    return [*others, *ticks]


def _labels(axis) -> list[Text]:
    return [label for tick in (*axis.majorTicks, *axis.minorTicks) for label in (tick.label1, tick.label2)]


def slanted(text: Text) -> bool:
    return text.get_rotation() % 90 != 0


def check_words(figure: Figure) -> None:
    """No text overlaps another or leaves the figure, and no axis says two things alike."""
    texts = texts_of(figure)
    boxes = {text: text.get_window_extent() for text in texts}
    for one, other in itertools.combinations(texts, 2):
        if not (slanted(one) and slanted(other)):
            overlap = boxes[one].padded(-0.5).overlaps(boxes[other].padded(-0.5))
            assert not overlap, (one.get_text(), other.get_text())
    for text, box in boxes.items():
        assert box.x0 >= -1 and box.y0 >= -1, text.get_text()
        assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, text.get_text()
    for axes in figure.axes:
        check_slanted(axes)
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label.get_text() for label in ticks_of(axis)]
            assert len(labels) == len(set(labels)), labels


def check_slanted(axes) -> None:
    """Slanted lines of text lie apart by more than their height."""
    labels = [label for label in ticks_of(axes.xaxis) if slanted(label)]
    anchors = [axes.transData.transform((label.get_position()[0], 0))[0] for label in labels]
    for left, right in itertools.pairwise(anchors):
        apart = (right - left) * math.sin(math.radians(labels[0].get_rotation()))
        assert apart > labels[0].get_fontsize() * axes.figure.dpi / 72 * 0.9, [label.get_text() for label in labels]


def legend_of(axes) -> list[str]:
    """What the legend of a figure, or of axes, says."""
    legends = [*axes.figure.legends, *filter(None, [axes.get_legend()])]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def first(axes):
    """The first of the axes that a figure function returned."""
    return np.ravel(axes)[0]


@cache
def trace_of(model: str) -> outliers.Trace:
    return outliers.trace(outliers.load_model(model), sample_blocks(model, 128, 2))


SMALL = "pocket/gpt2-1.7m"


@pytest.mark.parametrize("model", [pytest.param("smollm2-135m", marks=needs_smollm2), SMALL])
@pytest.mark.parametrize("name", ["heat_map", "sorted_profile", "magnitude_by_position"])
def test_figures_of_a_trace_can_be_read(model, name):
    trace = trace_of(model)
    axes = getattr(plot, name)(trace)
    check_words(first(axes).figure)
    if isinstance(axes, np.ndarray):
        check_words(getattr(plot, name)(trace, role="attn_in").figure)
    alone = Figure(layout="constrained").subplots()
    panel = {} if name == "magnitude_by_position" else {"role": "ffn_in"}
    assert getattr(plot, name)(trace, **panel, ax=alone) is alone
    check_words(alone.figure)


def test_alpha_is_the_one_that_was_asked():
    asked = replace(trace_of(SMALL), alpha=2.5)
    for name in ("heat_map", "sorted_profile", "magnitude_by_position"):
        words = {text.get_text() for text in texts_of(first(getattr(plot, name)(asked)).figure)}
        assert {word for word in words if word.startswith("α")} == {"α = 2.5"}
    checkpoints = plot.along_training(POCKET, panel="step", alpha=2.5)
    assert "α = 2.5" in {text.get_text() for text in texts_of(checkpoints.figure)}


def many_schemes(rows: list[dict], count: int) -> list[dict]:
    """The rows of a sweep with further schemes of one's own, of several draws."""
    one = [row for row in rows if row["variant"] == "absmax"]
    more = [row | {"variant": f"w4a8-g64+smoothing+hadamard-{n}", "alpha": 2.5} for n in range(count) for row in one]
    return [row | {"standard_deviation": row["value"] / 50} for row in (*rows, *more)]


def long_names(rows: list[dict]) -> list[dict]:
    numbers = {model: number for number, model in enumerate(dict.fromkeys(row["model"] for row in rows))}
    return [row | {"model": LONG.format(numbers[row["model"]])} for row in rows]


def many_models(rows: list[dict], times: int) -> list[dict]:
    return [
        row | {"model": f"{row['model']}-{n}", "parameters": row["parameters"] + n}
        for n in range(times)
        for row in rows
    ]


def many_steps(rows: list[dict], times: int) -> list[dict]:
    steps = [int(row["checkpoint"].removeprefix("step-")) for row in rows]
    places = [(row, step + n * (max(steps) + 20)) for n in range(times) for row, step in zip(rows, steps, strict=True)]
    return [row | {"checkpoint": f"step-{step}"} for row, step in places]


GROWTH = kept("growth")
SWEEP, TABLE4 = kept("pocket/table1"), kept("pocket/table4")
REMEDIES, ZEROSHOT = kept("remedies"), kept("pocket/figure1")
CACHES = [
    REMEDIES[0]
    | {"variant": f"kv=int{bits}", "keys": f"int{bits}", "values": f"int{bits}", "cache_bits": bits + 0.5}
    | {"value": 60.0 + number}
    for number, bits in enumerate((8, 4, 3))
]
ATTENTION = kept("attention/smollm2-135m")
DAMAGES = damages_of(kept("damage/smollm2-135m"))
OF_CAUSES = make_experiment(read_experiment("training/causes"), Training).model_copy(update={"seeds": [0]})
TRAINED, ELEVEN = (
    rows_of_runs(OF_CAUSES, {run: [100.0] for run in list(OF_CAUSES.runs)[:count]}, {"Muon": 90.0}) for count in (3, 11)
)
WITHOUT = [row for row in SWEEP if row["variant"] != "fp32"]
FROM_ROWS = {
    "sweep, twenty schemes": lambda: plot.sweep_costs(many_schemes(SWEEP, 20)),
    "sweep, thirty models": lambda: plot.sweep_costs(many_models(SWEEP, 4)),
    "sweep, long names": lambda: plot.sweep_costs(long_names(SWEEP)),
    "sweep without a baseline": lambda: plot.sweep_costs(WITHOUT),
    "remedies": lambda: plot.remedy_costs(REMEDIES),
    "frontier": lambda: plot.frontier(REMEDIES + CACHES),
    "attention, several models": lambda: plot.attention_costs(ATTENTION + many_models(ATTENTION, 2), paper=False),
    "figure 3": lambda: plot.figure3(TABLE4),
    "figure 4": lambda: plot.figure4(TABLE4),
    "training, long names": lambda: plot.along_training(POCKET.assign(model=POCKET["model"].map(LONG.format))),
    "growth, many steps": lambda: plot.growth(many_steps(GROWTH, 10)),
    "damage, twenty schemes": lambda: plot.damage_map(
        {f"{name}-{n}": DAMAGES[name] for name in DAMAGES for n in range(10)}
    ),
    "damage by place, six schemes": lambda: plot.damage_bars(
        {f"{name}-{n}": DAMAGES[name] for name in DAMAGES for n in range(3)}
    ),
    "causes, eleven runs": lambda: plot.causes(ELEVEN),
    "ablation": lambda: plot.ablation_bars(ablation_summary(kept("smollm2-135m/ablation"))),
}


@pytest.mark.parametrize("name", FROM_ROWS)
def test_figures_of_rows_can_be_read(name):
    check_words(first(FROM_ROWS[name]()).figure)


@pytest.mark.parametrize(
    ("draw", "panel"),
    [
        (lambda **to: plot.sweep_costs(SWEEP, **to), {}),
        (lambda **to: plot.remedy_costs(REMEDIES, **to), {"panel": "column"}),
        (lambda **to: plot.remedy_costs(REMEDIES, **to), {"panel": "published"}),
        (lambda **to: plot.frontier(REMEDIES + CACHES, **to), {"panel": "cache"}),
        (lambda **to: plot.accuracy_by_size(ZEROSHOT, **to), {}),
        (lambda **to: plot.figure3(TABLE4, **to), {"panel": "a"}),
        (lambda **to: plot.figure4(TABLE4, **to), {"panel": "a"}),
        (lambda **to: plot.along_training(POCKET, **to), {"panel": "perplexity"}),
        (lambda **to: plot.causes(TRAINED, **to), {"run": "Muon"}),
        *((lambda **to: plot.growth(GROWTH, **to), {"panel": panel}) for panel in PANELS),
        (lambda **to: plot.damage_map(DAMAGES, **to), {"variant": "absmax", "error": "db"}),
        (lambda **to: plot.damage_bars(DAMAGES, **to), {"variant": "absmax", "place": "role"}),
        (lambda **to: plot.ablation_bars(ablation_summary(kept("ablation/gpt2-1.7m")), **to), {"metric": "damage"}),
    ],
)
def test_one_panel_goes_on_axes_of_ones_own(draw, panel):
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes, other = figure.subplots(1, 2)
    assert draw(**panel, ax=axes) is axes
    assert axes.has_data()
    assert not other.has_data()
    check_words(figure)
    alone = draw(**panel)
    assert alone.has_data()
    check_words(alone.figure)
    if panel:
        with pytest.raises(UserError, match=r"ax= has room for one panel of \d; choose one by \w+="):
            draw(ax=axes)
        with pytest.raises(UserError, match="unknown"):
            draw(**dict.fromkeys(panel, "none"))


def test_rows_may_be_a_data_frame():
    of_frame, of_list = plot.sweep_costs(pd.DataFrame(SWEEP)), plot.sweep_costs(SWEEP)
    assert figure_bytes(of_frame.figure, "svg") == figure_bytes(of_list.figure, "svg")
    assert legend_of(plot.figure4(pd.DataFrame(TABLE4), panel="a")) == legend_of(plot.figure4(TABLE4, panel="a"))


def test_legends_say_what_marks_mean():
    """Where no picture of tests/views/kept has them."""
    assert {"the paper, layers", "the paper, positions", "gpt2", "llama"} <= set(
        legend_of(plot.figure3(TABLE4, panel="a"))
    )
    assert SCATTER in legend_of(first(plot.damage_bars(DAMAGES)))
    once = [{k: v for k, v in row.items() if k != "standard_deviation"} for row in kept("damage/smollm2-135m")]
    assert SCATTER not in legend_of(first(plot.damage_bars(damages_of(once))))


def test_damage_is_not_dark_because_of_one_error():
    one = DAMAGES["absmax"]
    broken = one.errors.copy()
    broken.loc[0, "db"] = 300.0
    image = plot.damage_map(replace(one, errors=broken), error="db").images[0]
    assert image.norm.vmax < 40
    assert image.colorbar.extend == "both"
    whole = plot.damage_map(one, error="db").images[0]
    assert whole.norm.vmax == one.errors["db"].max()
    assert whole.colorbar.extend == "min"
    assert f"below {whole.norm.vmin:.0f} darkest".replace("-", "−") in whole.colorbar.ax.get_ylabel()


MINE = {
    "font.family": "monospace",
    "font.size": 14,
    "axes.prop_cycle": matplotlib.cycler(color=["#ff0000", "#00ff00"]),
    "image.cmap": "viridis",
    "axes.grid": True,
}


def test_the_callers_style_where_it_is_asked_for():
    alone = figure_bytes(plot.sweep_costs(SWEEP).figure, "svg")
    with matplotlib.rc_context(MINE):
        assert figure_bytes(plot.sweep_costs(SWEEP).figure, "svg") == alone, "files are the same everywhere"
        with plot.your_style():
            axes, panel = plot.sweep_costs(SWEEP), plot.heat_map(trace_of(SMALL), role="attn_in")
        assert axes.yaxis.label.get_fontfamily() == ["monospace"]
        assert axes.yaxis.label.get_fontsize() == 14
        colors = {container.lines[0].get_color() for container in axes.containers}
        assert colors == {"#ff0000", "#00ff00", style.GREY}
        assert panel.images[0].cmap(1.0) == matplotlib.colormaps["viridis"](1.0)
        assert axes.xaxis.get_gridlines()[0].get_visible()
        own = plot.sweep_costs(SWEEP, ax=Figure().subplots())
        assert own.yaxis.label.get_fontsize() == 14, "on one's own axes too"
        assert figure_bytes(plot.sweep_costs(SWEEP).figure, "svg") == alone, "and no longer"
    assert matplotlib.rcParams["font.size"] != 14


def test_a_figure_is_pyplots_where_that_is_imported():
    program = (
        "import sys, outliers\n"
        "assert set(outliers.plot.__all__) <= set(dir(outliers.plot)) and 'plot' in dir(outliers)\n"
        "assert 'matplotlib' not in sys.modules, 'an import draws nothing'\n"
        "import pandas as pd\n"
        "from outliers.show.section import Drawing\n"
        f"rows = pd.read_csv({str(KEPT / 'training' / 'table4.csv')!r})\n"
        f"found = pd.read_csv({str(Path(outliers.__file__).parent / 'models/pocket/emergence.csv')!r})\n"
        "outliers.plot.along_training(found)\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'nothing is kept that nobody asked for'\n"
        "assert 'torch' not in sys.modules\n"
        "import matplotlib; matplotlib.use('agg')\n"
        "import matplotlib.pyplot as plt\n"
        "axes = outliers.plot.along_training(found)\n"
        "assert [plt.figure(n) for n in plt.get_fignums()] == [axes[0].figure]\n"
        "Drawing.of('', '', axes)\n"
        "assert not plt.get_fignums()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_long_names_stay_distinct():
    names = [LONG.format(number) for number in range(3)]
    assert style.brief(["short", names[0]])[0] == "short"
    assert max(map(len, style.brief(names[:1]))) <= style.LONGEST
    twins = ["x" * 30 + "-a-" + "y" * 30, "x" * 30 + "-b-" + "y" * 30]
    assert style.brief(twins) == twins
