"""Cost of schemes: perplexity by scheme and model beside Table 1 of the paper; for pictures also classification."""

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from outliers.criterion import LOG_PERPLEXITY
from outliers.models.names import distinct_names
from outliers.published.numbers import FAIRSEQ, table1_rows
from outliers.quantization.schemes import BASELINE
from outliers.show.axes import cost_axis, log_axis, name_places, parameters_axis, plot_costs
from outliers.show.claims import NEXT, Claim, say, say_each
from outliers.show.legends import (
    SCATTER,
    explained,
    in_order,
    labelled_artists,
    legend_columns,
    variant_legend,
    variant_styles,
    without_thresholds,
)
from outliers.show.section import FINDINGS, NO_CONTEXT, Context, Drawing, Finding, Section, printed, together
from outliers.show.style import GREY, figure_function, panels_of
from outliers.show.tables import FAILED, MISSING, Table, cell, measured_cell, scatter_note
from outliers.show.value import (
    BITS,
    RowsOrFrame,
    Value,
    comparable_rows,
    exact,
    grouped,
    has_no_number,
    scattered_by,
    value_of,
)
from outliers.show.words import count
from outliers.variants.written import variant_of


def costs(rows: list[dict]) -> list[dict]:
    """Add to rows of perplexities the field `cost`, the relative increase over the unquantized model.

    Rows of models whose unquantized perplexity was not measured are left out.
    """
    baseline = {row["model"]: value_of(row) for row in rows if variant_of(row).is_exact}
    measured = [row for row in rows if row["model"] in baseline]
    return [row | {"cost": value_of(row).increase_over(baseline[row["model"]])} for row in measured]


def point_row(point: NamedTuple) -> dict:
    """Flatten a point with perplexity and cost; `ratio` is its perplexity over that of the unquantized model."""
    fields = point._asdict()
    perplexity, cost = fields.pop("perplexity"), fields.pop("cost")
    scatter = {"deviation": perplexity.deviation, "error": perplexity.error}
    return {**fields, "perplexity": perplexity.mean, **scatter, "ratio": 1 + cost.mean}


def costs_of_variants(rows: list[dict]) -> list[dict]:
    """Return the rows of `costs` without the unquantized baseline."""
    return [row for row in costs(rows) if row["variant"] != BASELINE]


def model_names(models: Iterable[str]) -> list[str]:
    """Return the short names of models, or full names where two models share the short one."""
    return list(distinct_names((model, None) for model in models).values())


@figure_function
def sweep_costs(rows: RowsOrFrame, *, paper: bool = True, ax: Axes | None = None) -> Axes:
    """Draw the increase of each model's perplexity under each scheme, in per cent.

    Without an unquantized baseline, draw perplexity against parameters. Error bars are one standard deviation by the
    text and rounding, as far as rows know both.

    Example:
        >>> rows = outliers.sweep(models=["pocket/gpt2-0.1m"], schemes=["fp32", "absmax"], block=64, blocks=2)
        >>> axes = outliers.plot.sweep_costs(rows)

    Args:
        rows: of a sweep.
        paper: whether to draw the models of the paper, in grey.
    """
    rows = comparable_rows(rows)
    measured = costs_of_variants(rows)
    rows_shown = measured or rows
    styles = variant_styles(rows_shown)
    models = len({row["model"] for row in measured}) + (len(FAIRSEQ) if paper else 0)
    size = (0.6 + 0.46 * models + 2.6 * legend_columns(styles), 4.4) if measured else (6.4, 3.4)
    axes = panels_of(ax, 1, 1, size).item()
    if measured:
        _plot_costs(axes, measured, styles, paper)
    else:
        _plot_against_size(axes, rows, styles)
    drawn = labelled_artists([axes])
    bars = SCATTER if any("standard_deviation" in row for row in rows_shown) else ""
    grey = "grey: the paper, Table 1" if measured and paper else ""
    explanations = explained((row.get("alpha") for row in rows_shown), bars, grey)
    variant_legend(ax, axes, {variant: drawn[variant] for variant in styles}, explanations)
    return axes


def _plot_against_size(axes: Axes, rows: list[dict], styles: dict[str, dict]) -> None:
    order = list(styles)
    for place, architecture in sorted({(order.index(row["variant"]), row["architecture"]) for row in rows}):
        group = [row for row in rows if (row["variant"], row["architecture"]) == (order[place], architecture)]
        points = sorted((row["parameters"], row["value"], value_of(row).bar or 0) for row in group)
        axes.errorbar(*zip(*points, strict=True), **styles[order[place]])
    parameters_axis(axes)
    axes.set(yscale="log", ylabel="perplexity")
    log_axis(axes.yaxis, *axes.get_ylim())


def _plot_costs(axes: Axes, rows: list[dict], styles: dict[str, dict], paper: bool) -> None:
    published, theirs = (costs_of_variants(table1_rows()), FAIRSEQ) if paper else ([], [])
    ours = [model for _, model in sorted({(row["parameters"], row["model"]) for row in rows})]
    for models, first, points, grey in (
        (ours, 0, rows, {}),
        (theirs, len(ours), published, {"color": GREY, "label": None}),
    ):
        placed = ((row["variant"], first + models.index(row["model"]), row["cost"]) for row in points)
        look = {variant: style | {"linestyle": "none"} | grey for variant, style in styles.items()}
        plot_costs(axes, placed, look, 0.7)
    name_places(axes, [*model_names(ours), *(name.replace("fairseq-dense-", "paper, ") for name in theirs)])
    for boundary in range(1, len(ours) + len(theirs)):
        edge = {"color": "0.4", "linewidth": 1} if boundary == len(ours) else {"color": "0.85", "linewidth": 0.6}
        axes.axvline(boundary - 0.5, **edge)
    axes.grid(axis="y")
    cost_axis(axes, [100 * row["cost"].mean for row in (*rows, *published)])


WORTH = 0.01  # smallest increase of perplexity that is an effect
PERPLEXITIES = ("perplexity", LOG_PERPLEXITY)
# Metrics of pictures: header of the column, format.
OF_PICTURES = {
    "accuracy": ("top-1", ".2%"),
    "accuracy.loss": ("cross-entropy (nats)", ".4f"),
    "damage.top1_agreement": ("same top-1", ".2%"),
    "damage.kl": ("KL (nats)", ".2e"),
}


def perplexity_section(rows: list[dict], context: Context = NO_CONTEXT) -> Section:
    """Show a sweep; for pictures also their classification.

    context: has the rows without a comparable number, which tables show.
    """
    rows = [*(context.rows or rows)]
    picture_rows = [row for row in rows if row["metric"] in OF_PICTURES]
    loss_rows = [row for row in rows if row["metric"] in PERPLEXITIES]
    parts = ((_perplexities, loss_rows), (_classes, picture_rows))
    sections = [section(part) for section, part in parts if part]
    return together(sections[0].title, sections)._replace(rows=rows)


def _classes(rows: list[dict]) -> Section:
    frame = pd.DataFrame([row | {"cell": measured_cell(OF_PICTURES[row["metric"]][1], row)} for row in rows])
    columns = [metric for metric in OF_PICTURES if (frame["metric"] == metric).any()]
    cells = frame.pivot(index=["model", "variant"], columns="metric", values="cell").fillna(MISSING)
    places = list(dict.fromkeys(zip(frame["model"], frame["variant"], strict=True)))
    lines = [[*place, *cells.loc[place, columns]] for place in places]
    caption = (
        "Classification of pictures: top-1 accuracy and mean cross-entropy; without known classes, top-1 agreement "
        "with the unquantized model and mean KL divergence from it."
    )
    headers = ["model", "variant", *(OF_PICTURES[metric][0] for metric in columns)]
    table = Table("classes", caption, headers, lines, frame.drop(columns="cell"), texts=2)
    return Section("Classification of pictures by scheme", rows, tables=[table])


def _perplexities(rows: list[dict]) -> Section:
    bits, drawn = bits_table(rows), comparable_rows(rows)
    whole = len(drawn) == len(rows)
    across = " Bits per byte compare across models on one text." if bits else ""
    note = f"Perplexities compare within a column.{across} {scatter_note(rows)}"
    costly = costs_of_variants(drawn)
    spared = _spared(costly) if whole else {}
    tables = [_fold_models(table, spared) for table in (perplexity_table(rows), *bits, *cost_table(rows))]
    caption = (
        "Increase of perplexity under each scheme; grey: the models of the paper (Table 1)."
        if costly
        else "Perplexity by model size."
    )
    shown = costly or drawn
    if any(row.get("alpha") is not None for row in shown):
        caption += " Hollow markers: outlier features in 16 bits."
    if any("standard_deviation" in row for row in shown):
        caption += f" Bars: one standard deviation by {scattered_by(rows)}."
    drawings = [Drawing.of("perplexity", caption, sweep_costs(drawn))] if drawn else []
    models = dict.fromkeys(row["model"] for row in rows)
    names = dict(zip(models, model_names(models), strict=True))
    beyond = (row | {"name": names[row["model"]]} for row in rows if row["metric"] == LOG_PERPLEXITY)
    findings = [*say_each(BEYOND, beyond), *sweep_findings(costly, names)][:FINDINGS]
    others = [_spared_table(spared, drawn)] if spared else []
    text = printed([*tables[: 1 + len(bits)], *others], [note])
    return Section("Perplexity by scheme", rows, tables, drawings, [note], findings=findings, printed=text)


SPARED = "Models whose perplexity rises by at most 1 % under every scheme"


def _spared(costly: list[dict]) -> dict[str, Value]:
    """Return the models that lose at most one per cent under every scheme, with their largest increase.

    If all models are such, return {}.
    """
    most = {
        model: max((row["cost"] for row in of_model), key=lambda cost: cost.mean)
        for model, of_model in grouped(costly, itemgetter("model")).items()
    }
    spared = {model: cost for model, cost in most.items() if not cost.mean > WORTH}
    return spared if len(spared) < len(most) else {}


def _fold_models(table: Table, models: Iterable[str]) -> Table:
    """Set the columns of some models apart."""
    names = dict(zip(table.data.columns[1:], table.headers[1:], strict=True))
    apart = [names[model] for model in models if model in names]
    return table._replace(apart=apart, apart_caption=f"{SPARED}: {table.caption[0].lower()}{table.caption[1:]}")


def _spared_table(spared: Mapping[str, Value], rows: list[dict]) -> Table:
    """Make a table with a line for each model that no scheme costs more than one per cent."""
    unquantized = {row["model"]: row["value"] for row in rows if row["variant"] == BASELINE}
    cells = [
        [model, f"{unquantized[model]:.2f}", cell("+.2f", *cost.shown, unit=100)] for model, cost in spared.items()
    ]
    headers = ["model", "fp32", "largest increase (%)"]
    return Table("table1_spared", f"{SPARED}. The page has all their values.", headers, cells, pd.DataFrame())


def table1(rows: list[dict], column: str = "value") -> pd.DataFrame:
    """Return perplexity, or another column of the rows, by variant (index) and model (columns).

    Schemes of `SCHEMES` come first, in its order; models are in the order of the rows. NaN stands for a perplexity that
    is no number.
    """
    beyond = {"value": math.nan}
    kept = [row for row in rows if row["metric"] in PERPLEXITIES]
    frame = pd.DataFrame([row | beyond if column in beyond and has_no_number(row) else row for row in kept])
    table = frame.pivot(index="variant", columns="model", values=column)
    return table.loc[in_order(frame["variant"]), frame["model"].unique()]


def perplexity_table(rows: list[dict]) -> Table:
    cells = [row | {"cell": measured_cell(".2f", row)} for row in rows]
    return _with_labels("table1", "Perplexity by scheme and model.", "Perplexity", cells)


def bits_table(rows: list[dict]) -> list[Table]:
    """Make a table of bits per byte of the text, comparable across vocabularies; none if no row records them."""
    if not any(BITS in row for row in rows):
        return []
    cells = []
    for row in rows:
        if "failed" in row:
            cells.append(row | {"cell": FAILED})
        elif BITS in row:
            bits = cell(".4f", *value_of(row, BITS).shown)
            cells.append(row | {"metric": "perplexity", "value": row[BITS], "cell": bits})
    caption = "Loss in bits per byte of the text (UTF-8) by scheme and model; it compares across vocabularies."
    return [_with_labels("table1_bits", caption, "Bits per byte", cells)]


def cost_table(rows: list[dict]) -> list[Table]:
    """Make a table of the increase of perplexity under each scheme, in per cent; none without the unquantized model."""
    measured = costs_of_variants(comparable_rows(rows))
    if not measured:
        return []
    dtype = rows[0]["dtype"]
    baseline = BASELINE if dtype == "float32" else f"{dtype} without quantization"
    caption = f"Increase of perplexity over {baseline} under each scheme, in per cent."
    of_cells = {(row["model"], row["variant"]): row for row in measured}
    lost = {row["model"] for row in rows if row["variant"] == BASELINE and "failed" in row}
    models = {row["model"] for row in measured} | lost
    cells = []
    for row in [row for row in rows if row["model"] in models and row["variant"] != BASELINE]:
        known = of_cells.get((row["model"], row["variant"]))
        if known:
            cost = cell("+.2f", *known["cost"].shown, unit=100)
        else:
            cost = FAILED if row["model"] in lost else measured_cell("", row).partition(" (")[0]
        cells.append(row | {"value": 100 * known["cost"].mean if known else math.nan, "cell": cost})
    return [_with_labels("table1_increase", caption, "Increase (%)", cells)]


def _with_labels(name: str, caption: str, heading: str, rows: list[dict]) -> Table:
    table, cells = table1(rows), table1(rows, "cell").fillna(MISSING)
    labels = {} if rows[0]["dtype"] == "float32" else {BASELINE: f"{rows[0]['dtype']}, not quantized"}
    lines = [[labels.get(variant, variant), *cells.loc[variant]] for variant in table.index]
    return Table(name, caption, [heading, *model_names(table.columns)], lines, table.reset_index())


TABLE = "table1_increase"
# Scheme to the same scheme with outlier features in 16 bits.
DECOMPOSED = {
    "absmax-vector": "llm.int8",
    "zeropoint-vector": "llm.int8-zeropoint",
    "absmax-row": "absmax-row-decomp",
}
MOST = Claim(
    TABLE, "{variant} raises the perplexity of {name} by {cost:rise}[[; llm.int8 changes it by {preserved:percent}]]."
)
NO_COST = Claim(TABLE, "No scheme raises the perplexity of {models} beyond the scatter of {scatter}.", of_every=True)
SAVED = Claim(
    TABLE,
    by="cost",
    against=["split_cost"],
    yes="Keeping outlier features in 16 bits reduces the increase for {name} from {cost:percent} ({variant}) to "
    "{split_cost:percent} ({split}).",
    no="Keeping outlier features in 16 bits has no measurable benefit for {name}: {cost:percent} ({variant}) and "
    "{split_cost:percent} ({split}).",
)
FREE = Claim(TABLE, "{free:listed} {free:has|have} no measurable cost for {name}.")
LEAST = Claim(
    TABLE, "The smallest increase for {name} is that of {variant}: {cost:percent}.", by="cost", pick=min, against=[NEXT]
)
MODELS = Claim(TABLE, "The perplexity of {models} rises by more than 1 % under at least one scheme.", of_every=True)
NO_MODEL = Claim(TABLE, "No scheme raises the perplexity of any model by measurably more than 1 %.", of_every=True)
BEYOND = Claim(
    "table1",
    "The perplexity of {name} under {variant} is larger than any number: the loss is {value:,.0f} nats a token.",
)


def sweep_findings(rows: Sequence[dict], names: dict[str, str]) -> list[Finding]:
    """State the costs of the model with the largest cost, then how many models lose more than 1 %.

    They are its largest cost, the benefit of outlier features in 16 bits, and its smallest cost. A single draw or a few
    blocks give no findings.

    rows: of schemes, with their costs as `costs` adds them. names: names of models in sentences.
    """
    if not rows or any(math.isinf(row["cost"].spread) for row in rows):
        return []
    rows = [row | {"name": names[row["model"]]} for row in sorted(rows, key=lambda row: -row["cost"].mean)]
    if not _costs(rows[0]):
        models = f"any of {count(len(names))} models" if len(names) > 1 else rows[0]["name"]
        return say(NO_COST, [{"models": models, "scatter": scattered_by(rows)}])
    of_model = {row["variant"]: row for row in rows if row["model"] == rows[0]["model"]}
    schemes = {name: of_model[variant] for variant, name in without_thresholds(of_model).items()}
    pairs = [
        schemes[scheme] | {"split": split, "split_cost": schemes[split]["cost"]}
        for scheme, split in DECOMPOSED.items()
        if {scheme, split} <= schemes.keys()
    ]
    free = [variant for variant, row in of_model.items() if not _costs(row)]
    several = list(of_model.values()) if len(of_model) > 1 else []
    least = say(FREE, rows, free=free) if free else say(LEAST, several)
    preserved = schemes["llm.int8"]["cost"] if "llm.int8" in list(schemes)[1:] else None
    first = [*say(MOST, rows, preserved=preserved), *say(SAVED, pairs[:1])]
    return [*first, *least, *_of_models(rows, names)]


def _of_models(rows: list[dict], names: dict[str, str]) -> list[Finding]:
    """State how many of several models lose more than one per cent under some scheme."""
    broken = {row["model"] for row in rows if row["cost"].is_above(exact(WORTH))}
    if len(names) < 2:
        return []
    which = "every model" if len(broken) == len(names) else f"{count(len(broken))} of {count(len(names))} models"
    return say(MODELS if broken else NO_MODEL, [{"models": which}])


def _costs(row: dict) -> bool:
    return row["cost"].is_above(exact(0))
