"""Cost of int8 attention at evaluation, by scheme of the projections; an experiment beyond the paper."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from outliers.models.names import distinct_names, short_name
from outliers.published.numbers import TABLE7
from outliers.quantization.remedies import Remedy
from outliers.quantization.schemes import BASELINE
from outliers.show.axes import cost_axis, name_places, plot_costs
from outliers.show.claims import NEXT, Claim, say
from outliers.show.legends import SCATTER, explained, in_order, labelled_artists, variant_legend, variant_styles
from outliers.show.section import NO_CONTEXT, Context, Drawing, Finding, Section
from outliers.show.style import GREY, Panels, chosen, figure_function, panels_of
from outliers.show.tables import FAILED, MISSING, Table, cell, scatter_note
from outliers.show.value import RowsOrFrame, Value, comparable_rows, grouped, scattered_by, value_of
from outliers.variants.term import PLUS
from outliers.variants.written import variant_of
from outliers.views.perplexity import costs, point_row

NOT_QUANTIZED = "16-bit"
PAPER = "the paper, 209M, in training"
TRAINED = {  # Table 7, where the projections are in int8 too, with the same share of features in 16 bits
    "16-bit": ("FFN, linear", "2 %"),
    **{f"int8+{share}%": ("FFN, linear, attention", f"{share} %") for share in (2, 5, 10)},
}


class AttentionPoint(NamedTuple):
    """A measurement of one scheme of the projections with one kind of attention.

    scheme: the variant without its attention. attention: as `attention_of` writes it. cost: relative increase over the
    unquantized model. alpha: threshold of the scheme.
    """

    model: str
    scheme: str
    attention: str
    perplexity: Value
    cost: Value
    alpha: float | None


def attention_points(rows: list[dict]) -> list[AttentionPoint]:
    """Return the measurements of each scheme with each attention, for models whose unquantized perplexity is known.

    Attentions are ordered by their share in 16 bits.
    """
    short = distinct_names((row["model"], None) for row in rows)
    measured = [(row, *_split_attention(row)) for row in costs(rows)]
    return [
        AttentionPoint(
            short[row["model"], None], scheme, attention_of(remedy), value_of(row), row["cost"], row.get("alpha")
        )
        for row, scheme, remedy in sorted(measured, key=lambda measurement: _order(measurement[-1]))
    ]


def _split_attention(row: dict) -> tuple[str, Remedy | None]:
    """Split a row's variant into the variant without its attention, and the remedy that quantizes its attention."""
    remedy = next((scheme.scheme.attention for scheme in variant_of(row).schemes), None)
    terms = PLUS.split(row["variant"])
    others = [term for term in terms if term != BASELINE and not (remedy and term.startswith(remedy.name))]
    return "+".join(others) or BASELINE, remedy


def _order(remedy: Remedy | None) -> tuple:
    """Return a sort key: attention in 16 bits, both products in int8, single ones; small shares in 16 bits first."""
    return (False,) if remedy is None else (True, remedy.roles, remedy.number)


def attention_of(remedy: Remedy | None) -> str:
    """Write the kind of attention: 16-bit; int8+2%; int8, scores alone."""
    if remedy is None:
        return NOT_QUANTIZED
    number, roles = remedy.number, remedy.roles
    share = f"+{100 * number:g}%" if number else ""
    alone = f", {roles[0]} alone" if len(roles) == 1 else ""
    return f"int8{share}{alone}"


@figure_function
def attention_costs(
    rows: RowsOrFrame, *, model: str | None = None, paper: bool = True, ax: Axes | None = None
) -> Panels:
    """Draw the increase of perplexity by scheme, in per cent, with attention in 16 bits and in int8.

    One panel per model, then the paper's Table 7, whose model was trained that way. Error bars are one standard
    deviation by rounding.

    Example:
        >>> panels = outliers.plot.attention_costs(outliers.frame("results/kept/attention/smollm2-135m"))

    Args:
        rows: of a sweep over schemes with attention in 16 bits and in int8.
        model: the one to draw, by its short name; by default all, and the paper's.
        paper: whether to draw the published values.
    """
    measured = attention_points(comparable_rows(rows))
    by_model = grouped(measured, attrgetter("model"))
    panels_shown = chosen("model", model, [*by_model, *([PAPER] if paper else [])], ax)
    columns = list(dict.fromkeys(point.attention for point in measured))
    styles = variant_styles([{"variant": point.scheme, "alpha": point.alpha} for point in measured])
    panels = panels_of(ax, 1, len(panels_shown), (1.6 + 2.3 * len(panels_shown), 4.2), sharey=True)[0]
    for axes, panel in zip(panels, panels_shown, strict=True):
        if panel == PAPER:
            axes.plot(range(len(TRAINED)), _published(), "o", color=GREY)
        else:
            ours = ((point.scheme, columns.index(point.attention), point.cost) for point in by_model[panel])
            plot_costs(axes, ours, {scheme: style | {"linestyle": "none"} for scheme, style in styles.items()})
        name_places(axes, list(TRAINED) if panel == PAPER else columns)
        axes.set_title(panel)
        axes.grid(axis="y")
    has_paper = PAPER in panels_shown
    cost_axis(panels[0], [*(100 * point.cost.mean for point in measured), *(_published() if has_paper else ())])
    handles = labelled_artists(panels)
    entries = {scheme: handles[scheme] for scheme in styles if scheme in handles}
    bars = SCATTER if any(point.perplexity.deviation is not None for point in measured) else ""
    grey = "grey: the paper, Table 7" if has_paper else ""
    variant_legend(ax, panels[-1], entries, explained((point.alpha for point in measured), bars, grey))
    return panels


def _published() -> list[float]:
    """Return the increases that the paper prints, in per cent."""
    unquantized = TABLE7["209M", "16 bits", "0 %"]
    return [100 * (TABLE7["209M", *key] / unquantized - 1) for key in TRAINED.values()]


CAPTION = (
    "Increase of perplexity by scheme of the projections, with attention in 16 bits, in int8, in int8 with a share of "
    "the inner dimension of its products in 16 bits, or with one of its two products in int8. Right: a model of 209 "
    "million parameters trained with projections and attention in int8 (LLM.int8(), Table 7). Bars: one standard "
    "deviation by {}."
)

# Columns of the CSV file.
DATA = ["model", "scheme", "attention", "perplexity", "deviation", "error", "ratio", "alpha", "increase"]


def attention_section(rows: list[dict], context: Context = NO_CONTEXT) -> Section:
    note, measured = scatter_note(rows), attention_points(rows)
    failed = grouped((row for row in context.rows if "failed" in row), lambda row: short_name(row["model"]))
    by_model = grouped(measured, attrgetter("model"))
    tables = [attention_table(model, points, failed.get(model, [])) for model, points in by_model.items()]
    drawings = [Drawing.of("attention", CAPTION.format(scattered_by(rows)), attention_costs(rows))]
    findings = attention_findings(measured)
    return Section("Attention in int8", rows, tables, drawings, [note], findings=findings)


def attention_table(model: str, points: list[AttentionPoint], failed: Sequence[dict]) -> Table:
    """Make a table of perplexities, with schemes of the projections as rows and kinds of attention as columns.

    failed: rows of cells that failed.
    """
    cells = {(point.scheme, point.attention): cell(".2f", *point.perplexity.shown) for point in points}
    cells |= {(scheme, attention_of(remedy)): FAILED for scheme, remedy in map(_split_attention, failed)}
    schemes, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    lines = [[scheme, *(cells.get((scheme, column), MISSING) for column in columns)] for scheme in in_order(schemes)]
    caption = f"Perplexity of {model} by scheme of the projections and by attention."
    data = pd.DataFrame([{**point_row(point), "increase": 100 * point.cost.mean} for point in points], columns=DATA)
    return Table(f"attention_{model}", caption, ["scheme", *columns], lines, data)


PRODUCTS = {"scores": "queries and keys", "values": "probabilities and values"}
AT = "attention_{model}"
COST = Claim(
    AT,
    by="perplexity",
    against=["unquantized"],
    yes="Attention in int8, with projections in 16 bits, raises the perplexity of {model} by {cost:rise}.",
    no="Attention in int8 has no measurable cost for {model}.",
)
PRODUCT = Claim(
    AT,
    by="perplexity",
    against=[NEXT],
    yes="Alone in int8, the product of {product} raises it by {cost:rise}; the product of {next[product]} adds "
    "{next[cost]:percent}.",
)
LEFT = Claim(
    AT,
    by="perplexity",
    against=["unquantized"],
    yes="With {share} of its products in 16 bits, {cost:percent} remains.",
    no="With {share} of its products in 16 bits, attention in int8 has no measurable cost.",
)


def attention_findings(points: Sequence[AttentionPoint]) -> list[Finding]:
    """State, for each model with unquantized projections, the cost of int8 attention.

    Also state which of its two products causes the cost, and the cost that remains with the smallest share in 16 bits.
    A single draw gives no findings.
    """
    points = [point for point in points if point.scheme == BASELINE and point.perplexity.deviation is not None]
    return [
        finding
        for ours in grouped(points, attrgetter("model")).values()
        for finding in _of_model({point.attention: point._asdict() for point in ours})
    ]


def _of_model(measured: dict[str, dict]) -> list[Finding]:
    if "int8" not in measured:
        return []
    whole, unquantized = [measured["int8"]], measured[NOT_QUANTIZED]["perplexity"]
    if not whole[0]["perplexity"].is_above(unquantized):
        return say(COST, whole, unquantized=unquantized)
    alone = {f"int8, {name} alone": {"product": product} for name, product in PRODUCTS.items()}
    products = [measured[name] | product for name, product in alone.items() if alone.keys() <= measured.keys()]
    shares = [
        point | {"share": name.removeprefix("int8+").replace("%", " %")}
        for name, point in measured.items()
        if name.startswith("int8+") and "alone" not in name
    ]
    claims = ((COST, whole), (PRODUCT, products), (LEFT, shares[:1]))
    return [finding for claim, rows in claims for finding in say(claim, rows, unquantized=unquantized)]
