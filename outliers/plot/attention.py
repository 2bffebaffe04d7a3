"""Cost of attention in int8, beside the scheme of the projections, drawn."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from outliers.models.names import distinct_names
from outliers.plot.published import TABLE7
from outliers.quantization.schemes import BASELINE, Scheme, get_scheme
from outliers.show.axes import cost_axis, name_places, plot_costs
from outliers.show.legends import SCATTER, explained, scheme_legend, scheme_styles
from outliers.show.style import GREY, chosen, figure_function, panels_of
from outliers.show.value import Rows, Value, records, value_of
from outliers.views.perplexity import costs

NOT_QUANTIZED = "16-bit"
PAPER = "the paper, 209M, in training"
TRAINED = {  # with the projections in int8 too, and of their features the same share in 16 bits
    "16-bit": ("FFN, linear", "2 %"),
    **{f"int8+{share}%": ("FFN, linear, attention", f"{share} %") for share in (2, 5, 10)},
}


class Point(NamedTuple):
    """A row of the table and a column: what a scheme of the projections with an attention was measured at.

    scheme: what the variant does beside its attention. attention: as `attention_of` has it. cost: beside no
    quantization. alpha: of the scheme.
    """

    model: str
    scheme: str
    attention: str
    perplexity: Value
    cost: Value
    alpha: float | None


def points(rows: list[dict]) -> list[Point]:
    """The measurements of each scheme with each attention, of models whose perplexity without quantization is there;
    attentions in the order of their shares in 16 bits."""
    short = distinct_names((row["model"], None) for row in rows)
    measured = []
    for row in sorted(costs(rows), key=lambda row: _order(get_scheme(row["scheme"]))):
        terms = row.get("variant", row["scheme"]).split("+")
        others = [term for term in terms if term != BASELINE and not term.startswith("attention")]
        about = short[row["model"], None], "+".join(others) or BASELINE, attention_of(get_scheme(row["scheme"]))
        measured.append(Point(*about, value_of(row), row["cost"], row.get("alpha")))
    return measured


def _order(scheme: Scheme) -> tuple:
    """16 bits, then both products, then single ones; from small shares in 16 bits to large ones."""
    remedy = scheme.attention
    return (False,) if remedy is None else (True, remedy.roles, remedy.number)


def attention_of(scheme: Scheme) -> str:
    """The writing of a scheme's attention: 16-bit; int8+2%; int8, scores alone."""
    if scheme.attention is None:
        return NOT_QUANTIZED
    number, roles = scheme.attention.number, scheme.attention.roles
    share = f"+{100 * number:g}%" if number else ""
    alone = f", {roles[0]} alone" if len(roles) == 1 else ""
    return f"int8{share}{alone}"


@figure_function
def attention_costs(
    rows: Rows, *, model: str | None = None, paper: bool = True, ax: Axes | None = None
) -> Axes | np.ndarray:
    """Increase of a model's perplexity by scheme, in per cent, with attention in 16 bits and in int8.

    A panel a model; then the paper's Table 7, of a model that was trained so. Bars are one standard deviation by
    rounding.

    Example:
        >>> panels = outliers.plot.attention_costs(outliers.frame("results/kept/attention/smollm2-135m"))

    Args:
        rows: of a sweep of schemes with attention in 16 bits and in int8.
        model: the one to draw, by its short name; by default all, and the paper's.
        paper: whether the published values stand beside.
    """
    measured = points(records(rows))
    models = list(dict.fromkeys(point.model for point in measured))
    panels_shown = chosen("model", model, [*models, *([PAPER] if paper else [])], ax)
    columns = list(dict.fromkeys(point.attention for point in measured))
    styles = scheme_styles([{"scheme": point.scheme, "alpha": point.alpha} for point in measured])
    panels = panels_of(ax, 1, len(panels_shown), (1.6 + 2.3 * len(panels_shown), 4.2), sharey=True)[0]
    for axes, panel in zip(panels, panels_shown, strict=True):
        lines: dict[str, list] = {}
        for point in measured:
            if point.model == panel:
                lines.setdefault(point.scheme, []).append((columns.index(point.attention), point.cost))
        if lines:
            plot_costs(axes, lines, {scheme: style | {"linestyle": "none"} for scheme, style in styles.items()})
        else:
            axes.plot(range(len(TRAINED)), _published(), "o", color=GREY)
        name_places(axes, columns if lines else list(TRAINED))
        axes.set_title(panel)
        axes.grid(axis="y")
    has_paper = PAPER in panels_shown
    cost_axis(panels[0], [*(100 * point.cost.mean for point in measured), *(_published() if has_paper else ())])
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    entries = {scheme: handles[scheme] for scheme in styles if scheme in handles}
    bars = SCATTER if any(point.perplexity.deviation is not None for point in measured) else ""
    grey = "grey: the paper, Table 7" if has_paper else ""
    scheme_legend(ax, panels[-1], entries, explained((point.alpha for point in measured), bars, grey))
    return panels


def _published() -> list[float]:
    """The paper's increases, in per cent."""
    unquantized = TABLE7["209M", "16 bits", "0 %"]
    return [100 * (TABLE7["209M", *key] / unquantized - 1) for key in TRAINED.values()]
