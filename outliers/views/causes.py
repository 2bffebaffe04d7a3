"""Causes of outlier features: training runs that differ in one setting each; an experiment beyond the paper."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from outliers.quantization.schemes import BASELINE
from outliers.show.axes import count_label, log_axis
from outliers.show.claims import Claim, say
from outliers.show.legends import entry, legend
from outliers.show.section import Context, Drawing, Finding, Section
from outliers.show.style import GREY, Panels, brief, chosen, color_of, figure_function, panels_of
from outliers.show.tables import Table, cell, seeds_note, with_interval
from outliers.show.value import UNDER, RowsOrFrame, Value, comparable_rows, mean, ratio, value_of
from outliers.show.words import NAMED, listed

ABOUT = ("run", "seed", "steps", "model", "parameters", "int8", "decomposition")  # fields of rows
ABREAST = 4  # panels in a row
ALONG, LARGEST = "training step", "largest |x|"
# Lines of a run by their name in the legend: metrics whose maximum is drawn, colour, line.
LINES = {
    "residual stream": (("max.residual",), "blue", "-"),
    "inputs of projections": (("max.attn_in", "max.attn_out", "max.ffn_in", "max.ffn_out"), "vermilion", "--"),
}


def checkpoints(rows: RowsOrFrame, about: Iterable[str] = ABOUT) -> pd.DataFrame:
    """Return one row per run, seed and step at which rows were measured, in the order of the rows.

    Columns: the fields `about` of the rows; `step`; every metric; `METRIC_deviation` of metrics measured in draws,
    and `METRIC_error` of those with a standard error over the text.
    """
    wide: dict[tuple, dict] = {}
    for row in comparable_rows(rows):
        step = int(row["checkpoint"].rpartition("-")[2])
        key = row.get("run"), row.get("seed"), step
        checkpoint = wide.setdefault(key, {**dict.fromkeys(about), "step": step})
        checkpoint |= {name: row[name] for name in about if name in row} | {row["metric"]: row["value"]}
        bars = {"deviation": row.get("standard_deviation"), "error": row.get("standard_error")}
        checkpoint |= {f"{row['metric']}_{name}": bar for name, bar in bars.items() if bar is not None}
    return pd.DataFrame(wide.values())


def trained(rows: RowsOrFrame) -> pd.DataFrame:
    """Return the last checkpoint of each run and seed, as `checkpoints` has it."""
    return checkpoints(rows).query("step == steps").reset_index(drop=True)


def of_runs(trained: pd.DataFrame, column: str) -> dict[str, dict[int, float]]:
    """Return the known values of a column of `trained`, by run and seed."""
    known = trained[trained[column].notna()]
    return {
        run: dict(zip(group["seed"], group[column], strict=True)) for run, group in known.groupby("run", sort=False)
    }


@figure_function
def causes(rows: RowsOrFrame, *, run: str | None = None, ax: Axes | None = None) -> Panels:
    """Draw the largest |x| along training runs that differ in one setting each, one panel per run.

    Titles give the final perplexity. Each seed is a line. The first run, from which the others differ, is repeated in
    grey behind each of them.

    Example:
        >>> panels = outliers.plot.causes(outliers.frame("results/kept/training-runs/causes"))

    Args:
        rows: of training runs.
        run: the one to draw, by its name; by default all.
    """
    points = checkpoints(rows)
    names = list(dict.fromkeys(points["run"]))
    chosen_runs, first = chosen("run", run, names, ax), points[points["run"] == names[0]]
    panels = _panels(ax, len(chosen_runs))
    for axes, name in zip(panels, chosen_runs, strict=True):
        points_of_run = points[points["run"] == name]
        _plot_lines(axes, first, {"color": GREY, "linewidth": 0.8, "zorder": 1})
        _plot_lines(axes, points_of_run, {})
        axes.set_title(_title(name, points_of_run), fontsize="small")
    _set_scales(panels, points)
    handles = [entry(label, color=color_of(color), linestyle=line) for label, (_, color, line) in LINES.items()]
    if set(chosen_runs) - {names[0]}:
        handles.append(entry(f"grey: {brief(names[:1])[0]}", color=GREY, linestyle="-"))
    if len(panels) == 1:
        panels[0].set(xlabel=ALONG, ylabel=LARGEST)
        legend(ax, panels[0], handles, "right upper")
    else:
        panels[0].figure.supxlabel(ALONG, fontsize="medium")
        panels[0].figure.supylabel(LARGEST, fontsize="medium")
        legend(ax, panels[0], handles, "upper center", min(len(panels), len(handles)))
    return panels


def _panels(ax: Axes | None, count: int) -> np.ndarray:
    columns = min(ABREAST, count)
    lines = -(-count // columns)
    size = (5.2, 2.6) if count == 1 else (0.6 + 1.6 * columns, 0.9 + 1.45 * lines)
    panels = panels_of(ax, lines, columns, size, sharex=True, sharey=True)
    for axes in panels.flat[count:]:
        axes.remove()
    return panels.ravel()[:count]


def _plot_lines(axes: Axes, points_of_run: pd.DataFrame, style: dict) -> None:
    for metrics, color, line in LINES.values():
        metrics = points_of_run.columns.intersection(metrics)
        for _, points_of_seed in points_of_run.groupby("seed", sort=False):
            ordered = points_of_seed.sort_values("step")
            look = {"color": color_of(color), "linestyle": line} | style
            axes.plot(ordered["step"], ordered[metrics].max(axis=1), **look)


def _title(name: str, points_of_run: pd.DataFrame) -> str:
    perplexity = points_of_run.loc[points_of_run["step"] == points_of_run["steps"], "perplexity"].mean()
    return f"{textwrap.fill(brief([name])[0], 24)}\nperplexity {perplexity:.1f}"


def _set_scales(panels: np.ndarray, points: pd.DataFrame) -> None:
    """Set logarithmic scales, with numbers along x below the last panel of each column."""
    metrics = points.columns.intersection([metric for metrics, *_ in LINES.values() for metric in metrics])
    low, high = points[metrics].min(axis=None), points[metrics].max(axis=None)
    for axes in panels:
        axes.set(xscale="log", yscale="log")
        axes.grid(axis="y")
        log_axis(axes.xaxis, points["step"].min(), points["step"].max())
        axes.xaxis.set_major_formatter(count_label)
        log_axis(axes.yaxis, low, high)
    for axes in panels[-ABREAST:]:
        axes.xaxis.set_tick_params(labelbottom=True)


COST = "cost."  # prefix of columns with a scheme's increase of perplexity, in per cent
INPUTS = ["max.attn_in", "max.attn_out", "max.ffn_in", "max.ffn_out"]
KURTOSES = ["kurtosis_feature.attn_in", "kurtosis_feature.ffn_in"]


class MetricColumn(NamedTuple):
    """A column of the table: the metric of `final_values` that it shows, its format, and the factor to its unit."""

    header: str
    metric: str
    form: str = ".1f"
    unit: float = 1.0


COLUMNS = (
    MetricColumn("perplexity", "perplexity"),
    MetricColumn("outlier features", "count", ".3g"),
    MetricColumn("residual", "max.residual"),
    *(MetricColumn(metric.removeprefix("max."), metric) for metric in INPUTS),
    MetricColumn("kurtosis", "kurtosis"),
    MetricColumn("sink (%)", "attention_sink", ".0f", 100.0),
)
CAPTION = (
    "Models at the end of training: perplexity; number of outlier features by the criterion; largest |x| of the "
    "residual stream and of the inputs of projections, by role; kurtosis_feature, the larger of attn_in and ffn_in; "
    "share of (layer, head) pairs with an attention sink at position 0; increase of perplexity under each scheme over "
    "the same weights in float32, in per cent. {}"
)
BY_SCATTER = "± after a scheme: one standard deviation by {}{}."
OF_PERPLEXITY = "; after the perplexity: its standard error over the text"
BY_SEEDS = "±: half of a 95 % interval over seeds; runs without it have one seed."
FIGURE = (
    "Largest |x| of the residual stream and of the inputs of all projections during the training of each model, with "
    "its final perplexity; one line per seed. Grey: the reference run, from which each other differs in one setting."
)


def causes_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show training runs that differ in one setting each: their final values, and their growth during training."""
    models = final_values(rows)
    notes = [seeds_note(models)]
    tables = [causes_table(models)]
    drawings = [Drawing.of("causes", FIGURE, causes(rows))]
    findings = causes_findings(models, tables[0].name)
    further = {"trained": models}
    title = "Causes of outlier features"
    return Section(title, rows, tables, drawings, notes, further, findings)


def final_values(rows: list[dict]) -> pd.DataFrame:
    """Return the final values of runs: `trained` with derived columns.

    They are `max.inputs` over all roles, `kurtosis`, and `COST` of each scheme with its scatter by rounding and over
    the text.
    """
    table, values = trained(rows), _under_schemes(rows)
    table["max.inputs"] = table[table.columns.intersection(INPUTS)].max(axis=1)
    table["kurtosis"] = table[KURTOSES].max(axis=1)
    under = [values[of_run] for of_run in zip(table["run"], table["seed"], strict=True)]
    for scheme in _schemes(table):
        costs = [perplexity[scheme].increase_over(perplexity[BASELINE])[:3] for perplexity in under]
        for ending, numbers in zip(("", "_deviation", "_error"), zip(*costs, strict=True), strict=True):
            if any(number is not None for number in numbers):
                table[f"{COST}{scheme}{ending}"] = 100 * np.array(numbers, float)
    return table


def _under_schemes(rows: list[dict]) -> dict[tuple, dict[str, Value]]:
    """Return the perplexity of each run and seed under each scheme; NaN where it is no number."""
    values: dict[tuple, dict[str, Value]] = defaultdict(lambda: defaultdict(lambda: Value(math.nan)))
    for row in comparable_rows(rows):
        if row["metric"].startswith(UNDER):
            values[row["run"], row["seed"]][row["metric"].removeprefix(UNDER)] = value_of(row)
    return values


def _schemes(table: pd.DataFrame) -> list[str]:
    bars = ("_deviation", "_error")
    under = [name.removeprefix(UNDER) for name in table if name.startswith(UNDER) and not name.endswith(bars)]
    return [scheme for scheme in under if scheme != BASELINE]


def causes_table(models: pd.DataFrame) -> Table:
    """Make a table with one row per run: means over seeds with intervals, or values with scatter for a single seed."""
    several = models["seed"].nunique() > 1
    columns = [*COLUMNS, *(MetricColumn(f"{scheme} (%)", COST + scheme, "+z.2f") for scheme in _schemes(models))]
    cells, data = [], []
    for run, group in models.groupby("run", sort=False):
        means = {column.metric: mean(group[column.metric].tolist()) for column in columns}
        reaches = {f"{metric}_reach": level.reach for metric, level in means.items() if level.reach is not None}
        data.append(
            {"run": run, "seeds": len(group), **{name: level.value for name, level in means.items()}, **reaches}
        )
        alone = {} if several else group.iloc[0]
        behind = [reaches.get(f"{metric}_reach", value_of(alone, metric).bar) for metric in means]
        pairs = zip(columns, means.values(), behind, strict=True)
        cells.append([run, *(cell(column.form, level.value, scatter, column.unit) for column, level, scatter in pairs)])
    over_text = any(name.startswith(COST) and name.endswith("_error") for name in models)
    of_perplexity = OF_PERPLEXITY * ("perplexity_error" in models)
    scatter = BY_SCATTER.format("text and rounding" if over_text else "rounding", of_perplexity)
    caption = CAPTION.format(BY_SEEDS if several else scatter)
    return Table("causes", caption, ["run", *(column.header for column in columns)], cells, pd.DataFrame(data))


COMPARED = {  # metrics compared by their scatter over seeds, the most telling first
    "max.residual": "largest |x| of the residual stream",
    "max.inputs": "largest input of a projection",
    "perplexity": "perplexity",
}


HAVING = Claim(
    "{at}", "Outlier features by the criterion emerged in {number:count} of {every:count} run{every:|s}[[: {names}]]."
)
RANGE = Claim(
    "{at}",
    "The final {what} ranges from {least[0]:amount} in {least[1]} to {most[0]:amount} in {most[1]}.",
    of_every=True,
)
ALIKE = Claim("{at}", "No run differs measurably from {first} in the {what}.", of_every=True)
APART = Claim("{at}", "Relative to {first}, the {what} is {factors:listed}[[, and differs in {more:count} more]].")
COSTS = Claim(
    "{at}",
    by="cost",
    against=[0],
    yes="absmax raises the perplexity by at most {cost:rise}[[, in {told}]].",
    no="absmax has no measurable cost for any of these models.",
    of_every=True,
)


def causes_findings(final_values: pd.DataFrame, at: str) -> list[Finding]:
    """State in which runs outlier features emerge, how runs differ from the first, and the largest cost of absmax.

    Differences exceed the scatter over seeds; with one seed per run, the range of the largest |x| is stated instead.

    final_values: as the function returns them, one row per run and seed. at: name of the table that shows it.
    """
    first, *others = final_values["run"].unique()
    most = final_values.groupby("run", sort=False)["count"].max()
    ever = most.index[most > 0].tolist()
    names = _quoted(*ever) if 0 < len(ever) <= NAMED else None
    findings = say(HAVING, [{"number": len(ever), "every": len(most), "names": names}], at=at)
    if others and final_values["seed"].nunique() > 1:
        for column, what in COMPARED.items():
            findings += _difference_findings(of_runs(final_values, column), first, others, what, at)
    elif others:
        column, what = next(iter(COMPARED.items()))
        ordered = final_values.sort_values(column, kind="stable")
        least, *_, most = ((row[column], _quoted(row["run"])) for row in ordered.to_dict("records"))
        findings += say(RANGE, [{"what": what, "least": least, "most": most}], at=at)
    return [*findings, *_cost(final_values, at)]


def _quoted(*runs: str) -> str:
    return listed(f"'{run}'" for run in runs)


def _difference_findings(values: dict[str, dict], first: str, others: list[str], what: str, at: str) -> list[Finding]:
    """State the largest differences from the first run: ratios whose intervals over seeds exclude 1."""
    ratios = {run: ratio(values[run], values[first]) for run in others}
    apart = {run: factor for run, factor in ratios.items() if factor and factor.differs_from_one}
    largest = sorted(apart, key=lambda run: -abs(math.log(apart[run].value)))[:NAMED]
    factors = [
        f"×\N{NO-BREAK SPACE}{with_interval('{:.3g}'.format, apart[run].value, *apart[run].interval)} in {_quoted(run)}"
        for run in sorted(largest, key=lambda run: apart[run].value)
    ]
    about = {"first": _quoted(first), "what": what, "factors": factors, "more": len(apart) - len(largest) or None}
    return say(APART if apart else ALIKE, [about], at=at)


def _cost(final_values: pd.DataFrame, at: str) -> list[Finding]:
    """State the largest cost of absmax beyond its scatter, and name its run if it exceeds the next one."""
    column = f"{COST}absmax"
    if f"{column}_deviation" not in final_values:
        return []
    costs = [(value_of(row, column), row["run"]) for row in final_values.to_dict("records")]
    (worst, run), *others = sorted(costs, key=lambda pair: -pair[0].mean)
    is_told = all(worst.is_above(other) for other, _ in others[:1])
    share = Value(*(part and part / 100 for part in worst[:3]))
    return say(COSTS, [{"cost": share, "told": _quoted(run) if is_told else None}], at=at)
