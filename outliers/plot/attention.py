"""What attention in int8 costs of perplexity, beside the scheme of the projections, drawn."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from outliers.models.names import distinct_names
from outliers.plot.published import TABLE7
from outliers.plot.records import Rows, records
from outliers.plot.style import (
    GREY,
    LINEAR,
    SCATTER,
    SLANTED,
    chosen,
    cost_axis,
    figure_function,
    panels_of,
    returned,
    said,
    scheme_legend,
    scheme_styles,
)
from outliers.quantization.schemes import BASELINE, Scheme, get_scheme

NOT_QUANTIZED = "16-bit"
PAPER = "the paper, 209M, in training"
TRAINED = {  # with the projections in int8 too, and of their features the same share in 16 bits
    "16-bit": ("FFN, linear", "2 %"),
    **{f"int8+{share}%": ("FFN, linear, attention", f"{share} %") for share in (2, 5, 10)},
}


class Point(NamedTuple):
    """A row of the table and a column: what a scheme of the projections with an attention was measured at.

    attention: as `attention_of` has it. ratio: to the perplexity without quantization. alpha: of the scheme.
    """

    model: str
    scheme: str
    attention: str
    perplexity: float
    deviation: float | None
    ratio: float
    alpha: float | None

    @property
    def increase(self) -> float:
        """Of perplexity, in per cent."""
        return 100 * (self.ratio - 1)

    @property
    def scatter(self) -> float | None:
        """The standard deviation of the increase, as a share."""
        return None if self.deviation is None else self.deviation / self.perplexity * self.ratio


def points(rows: list[dict]) -> list[Point]:
    """What each scheme with each attention was measured at, of models whose perplexity without quantization is there;
    attentions in the order of their shares in 16 bits."""
    baseline = {row["model"]: row["value"] for row in rows if row["scheme"] == BASELINE}
    short = distinct_names((row["model"], None) for row in rows)
    found = []
    for row in rows:
        if row["model"] in baseline:
            scheme, parts = get_scheme(row["scheme"]), row["scheme"].split("+")
            base = "+".join(part for part in parts if not part.startswith("attention"))
            values = row["value"], row.get("standard_deviation"), row["value"] / baseline[row["model"]]
            point = Point(short[row["model"], None], base, attention_of(scheme), *values, row.get("alpha"))
            found.append((_order(scheme), point))
    return [point for _, point in sorted(found, key=lambda pair: pair[0])]


def _order(scheme: Scheme) -> tuple:
    """16 bits, then both products, then single ones; from small shares in 16 bits to large ones."""
    return scheme.attention is not None, scheme.attention_products, scheme.attention or 0


def attention_of(scheme: Scheme) -> str:
    """How the attention of a scheme is written: 16-bit; int8+2%; int8, scores alone."""
    if scheme.attention is None:
        return NOT_QUANTIZED
    share = f"+{100 * scheme.attention:g}%" if scheme.attention else ""
    alone = f", {scheme.attention_products[0]} alone" if len(scheme.attention_products) == 1 else ""
    return f"int8{share}{alone}"


@figure_function
def attention_costs(
    rows: Rows, *, model: str | None = None, paper: bool = True, ax: Axes | None = None
) -> Axes | np.ndarray:
    """What schemes add to the perplexity of a model, in per cent, with attention in 16 bits and in int8.

    A panel a model; then the paper's Table 7, of a model that was trained so. Bars are one standard deviation by
    rounding.

    Args:
        rows: of a sweep of schemes with attention in 16 bits and in int8.
        model: the one to draw, by its short name; by default all, and the paper's.
        paper: whether the published values stand beside.
        ax: where to draw that model, in the caller's style; by default a new figure.

    Returns:
        The axes, or an array of them; `.figure` of one is their figure.

    Raises:
        UserError: no such model was measured, or there are several panels for `ax`.
    """
    found = points(records(rows))
    models = list(dict.fromkeys(point.model for point in found))
    shown = chosen("model", model, [*models, *[PAPER] * paper], ax)
    columns = list(dict.fromkeys(point.attention for point in found))
    styles = scheme_styles([{"scheme": point.scheme, "alpha": point.alpha} for point in found])
    panels = panels_of(ax, 1, len(shown), (1.6 + 2.3 * len(shown), 4.2), sharey=True)[0]
    for axes, panel in zip(panels, shown, strict=True):
        own = [point for point in found if point.model == panel]
        _plot_panel(axes, own, columns, styles) if own else _plot_published(axes)
        axes.set_title(panel)
    cost_axis(panels[0], [*(point.increase for point in found), *(_published() if PAPER in shown else ())])
    for axes in panels:
        axes.grid(visible=True, axis="y")
    panels[0].set_ylabel(f"increase of perplexity (%), linear within ±{LINEAR:g}")
    handles = {label: one for axes in panels for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    bars = SCATTER if any(point.deviation is not None for point in found) else None
    grey = [said("grey: the paper, Table 7", marker="o", color=GREY)] if PAPER in shown else []
    entries = {scheme: handles[scheme] for scheme in styles if scheme in handles}
    scheme_legend(ax, panels[-1], entries, [{"alpha": point.alpha} for point in found], bars, *grey)
    return returned(panels)


def _plot_panel(axes: Axes, found: list[Point], columns: list[str], styles: dict[str, dict]) -> None:
    for number, (scheme, style) in enumerate(styles.items()):
        line = [point for point in found if point.scheme == scheme]
        offset = 0.5 * ((number + 0.5) / len(styles) - 0.5)
        if line:
            axes.errorbar(
                [columns.index(point.attention) + offset for point in line],
                [point.increase for point in line],
                [100 * (point.scatter or 0) for point in line],
                **{**style, "linestyle": "none"},
            )
    _name_places(axes, columns)


def _published() -> list[float]:
    """The paper's increases, in per cent."""
    unquantized = TABLE7["209M", "16 bits", "0 %"]
    return [100 * (TABLE7["209M", *key] / unquantized - 1) for key in TRAINED.values()]


def _plot_published(axes: Axes) -> None:
    axes.plot(range(len(TRAINED)), _published(), "o", color=GREY)
    _name_places(axes, list(TRAINED))


def _name_places(axes: Axes, names: list[str]) -> None:
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(names)), names, **SLANTED)
    axes.set_xlim(-0.5, len(names) - 0.5)
