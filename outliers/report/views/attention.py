"""Cost of attention in int8 at evaluation, beside the scheme of the projections; an experiment beyond the paper."""

from collections.abc import Sequence

import pandas as pd

from outliers.plot.attention import NOT_QUANTIZED, Point, attention_costs, points
from outliers.quantization.schemes import BASELINE
from outliers.show.legends import in_order
from outliers.show.section import Drawing, Finding, Section, printed
from outliers.show.tables import MISSING, Table, cell, scatter_note
from outliers.show.value import scattered_by
from outliers.show.words import percent, rise
from outliers.views.perplexity import unrounded

CAPTION = (
    "Increase of perplexity by scheme of the projections, with attention in 16 bits, in int8, in int8 with a share of "
    "the inner dimension of its products in 16 bits, or with one of its two products in int8. Right: a model of 209 "
    "million parameters trained with projections and attention in int8 (LLM.int8(), Table 7). Bars: one standard "
    "deviation by {}."
)

DATA = ["model", "scheme", "attention", "perplexity", "deviation", "ratio", "alpha", "increase"]  # of the CSV file


def attention_section(rows: list[dict]) -> Section:
    """The section of a sweep of schemes with attention in 16 bits and in int8."""
    note, measured = scatter_note(rows), points(rows)
    tables = [attention_table(model, measured) for model in dict.fromkeys(point.model for point in measured)]
    drawings = [Drawing.of("attention", CAPTION.format(scattered_by(rows)), attention_costs(rows))]
    findings = attention_findings(measured)
    return Section("Attention in int8", rows, printed(tables, [note]), tables, drawings, [note], findings=findings)


def attention_table(model: str, points: list[Point]) -> Table:
    """Schemes of the projections down, attention across; in the cells perplexity with its scatter."""
    measured = [point for point in points if point.model == model]
    columns = list(dict.fromkeys(point.attention for point in measured))
    cells = {(point.scheme, point.attention): cell(".2f", *point.perplexity) for point in measured}
    lines = [
        [scheme, *(cells.get((scheme, column), MISSING) for column in columns)]
        for scheme in in_order(point.scheme for point in measured)
    ]
    caption = f"Perplexity of {model} by scheme of the projections and by attention."
    data = pd.DataFrame([{**unrounded(point), "increase": 100 * point.cost.mean} for point in measured], columns=DATA)
    return Table(f"attention_{model}", caption, ["scheme", *columns], lines, data)


PRODUCTS = {"scores": "queries and keys", "values": "probabilities and values"}


def attention_findings(points: Sequence[Point]) -> list[Finding]:
    """Of each model, with projections that are not quantized: what attention in int8 costs, which of its products costs
    it, and what is left with the smallest share of it in 16 bits. Nothing of a single draw."""
    points = [point for point in points if point.scheme == BASELINE and point.perplexity.deviation is not None]
    models = dict.fromkeys(point.model for point in points)
    attentions = {model: {point.attention: point for point in points if point.model == model} for model in models}
    return [
        Finding(sentence, f"attention_{model}")
        for model, by_attention in attentions.items()
        for sentence in _of_model(by_attention, model)
    ]


def _of_model(by_attention: dict[str, Point], model: str) -> list[str]:
    if "int8" not in by_attention:
        return []
    if not _is_cost(by_attention["int8"], by_attention):
        return [f"Attention in int8 has no measurable cost for {model}."]
    cost = f"Attention in int8, with projections in 16 bits, raises the perplexity of {model} by "
    cost += f"{rise(*by_attention['int8'].cost)}."
    return [cost, *_products(by_attention), *_decomposed(by_attention)]


def _is_cost(point: Point, by_attention: dict[str, Point]) -> bool:
    """Whether it costs perplexity beyond the scatter of rounding."""
    return point.perplexity.is_above(by_attention[NOT_QUANTIZED].perplexity)


def _products(by_attention: dict[str, Point]) -> list[str]:
    """The one of the two products that costs more alone."""
    alone = {name: by_attention[f"int8, {name} alone"] for name in PRODUCTS if f"int8, {name} alone" in by_attention}
    if len(alone) < len(PRODUCTS):
        return []
    (less, cheaper), (more, costlier) = sorted(alone.items(), key=lambda pair: pair[1].perplexity.mean)
    if not costlier.perplexity.is_above(cheaper.perplexity):
        return []
    most = f"Alone in int8, the product of {PRODUCTS[more]} raises it by {rise(*costlier.cost)}"
    return [f"{most}; the product of {PRODUCTS[less]} adds {percent(*cheaper.cost)}."]


def _decomposed(by_attention: dict[str, Point]) -> list[str]:
    """Remaining cost with the smallest share in 16 bits, where there is a cost to save."""
    shares = [name for name in by_attention if name.startswith("int8+") and "alone" not in name]
    if not shares:
        return []
    left, share = by_attention[shares[0]], shares[0].removeprefix("int8+").replace("%", " %")
    if not _is_cost(left, by_attention):
        return [f"With {share} of its products in 16 bits, attention in int8 has no measurable cost."]
    return [f"With {share} of its products in 16 bits, {percent(*left.cost)} remains."]
