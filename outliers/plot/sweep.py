"""What schemes cost of perplexity, drawn beside Table 1 of the paper."""

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.models.names import distinct_names
from outliers.plot.style import GREY, LINEAR, bare, cost_axis, parameters_axis, scheme_styles
from outliers.quantization.schemes import BASELINE

FAIRSEQ = [f"fairseq-dense-{size}" for size in ("125m", "1.3b", "2.7b", "6.7b", "13b")]
PRINTED = {  # of these models, as the paper prints it
    "fp32": (25.65, 15.91, 14.43, 13.30, 12.45),
    "absmax": (87.76, 16.55, 15.11, 14.59, 19.08),
    "zeropoint": (56.66, 16.24, 14.76, 13.49, 13.94),
    "absmax-row": (30.93, 17.08, 15.24, 14.13, 16.49),
    "absmax-vector": (35.84, 16.82, 14.98, 14.13, 16.48),
    "zeropoint-vector": (25.72, 15.94, 14.36, 13.38, 13.47),
    "absmax-row-decomp": (30.76, 16.19, 14.65, 13.25, 12.46),
    "llm.int8": (25.83, 15.93, 14.44, 13.24, 12.45),
    "llm.int8-zeropoint": (25.69, 15.92, 14.43, 13.24, 12.45),
}


def costs(rows: list[dict]) -> list[dict]:
    """What a scheme adds to the perplexity of its model, in per cent, in the place of each row's value; and its
    standard deviation. Of models whose perplexity without quantization is there."""
    baseline = {row["model"]: row["value"] for row in rows if row["scheme"] == BASELINE}
    found = []
    for row in rows:
        if row["model"] in baseline and row["scheme"] != BASELINE:
            cost = {"value": 100 * (row["value"] / baseline[row["model"]] - 1)}
            if "standard_deviation" in row:
                cost["standard_deviation"] = 100 * row["standard_deviation"] / baseline[row["model"]]
            found.append(row | cost)
    return found


def published_rows() -> list[dict]:
    """The perplexities of the paper's models, as rows."""
    return [
        {"model": model, "scheme": scheme, "value": value}
        for scheme, values in PRINTED.items()
        for model, value in zip(FAIRSEQ, values, strict=True)
    ]


def names_of(models: Iterable[str]) -> list[str]:
    """The short names of models, whole ones where two share theirs."""
    return list(distinct_names((model, None) for model in models).values())


def sweep_costs(rows: list[dict]) -> Figure:
    """What each scheme adds to the perplexity of each model, beside the models of the paper; where nothing was measured
    without quantization, perplexity against parameters."""
    found = costs(rows)
    figure = Figure(figsize=(9, 4.2) if found else (5, 3.4), layout="constrained")
    axes = figure.subplots()
    styles = scheme_styles(found or rows)
    if found:
        _plot_costs(axes, found, styles)
    else:
        _plot_against_size(axes, rows, styles)
    bare(axes)
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    shown = [handles[scheme] for scheme in styles]
    figure.legend(shown, list(styles), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _plot_against_size(axes: Axes, rows: list[dict], styles: dict[str, dict]) -> None:
    """Models of one architecture are joined by a line."""
    order = list(styles)
    for place, architecture in sorted({(order.index(row["scheme"]), row["architecture"]) for row in rows}):
        group = [row for row in rows if (row["scheme"], row["architecture"]) == (order[place], architecture)]
        points = sorted((row["parameters"], row["value"]) for row in group)
        axes.plot(*zip(*points, strict=True), **styles[order[place]])
    parameters_axis(axes)
    axes.set_ylabel("perplexity")


def _plot_costs(axes: Axes, rows: list[dict], styles: dict[str, dict]) -> None:
    """Points of one model side by side; models from small to large, then those of the paper in grey."""
    published = costs(published_rows())
    ours = [model for _, model in sorted({(row["parameters"], row["model"]) for row in rows})]
    for models, first, points in ((ours, 0, rows), (FAIRSEQ, len(ours), published)):
        for place, (scheme, style) in enumerate(styles.items()):
            offset = first + 0.7 * ((place + 0.5) / len(styles) - 0.5)
            of_scheme = [row for row in points if row["scheme"] == scheme]
            grey = {} if models is ours else {"color": GREY, "label": None}
            axes.errorbar(
                [models.index(row["model"]) + offset for row in of_scheme],
                [row["value"] for row in of_scheme],
                [row.get("standard_deviation", 0) for row in of_scheme],
                **{**style, "linestyle": "none", **grey},
            )
    axes.axhline(0, color="black", linewidth=0.6)
    for boundary in range(1, len(ours) + len(FAIRSEQ)):
        edge = {"color": "0.4", "linewidth": 1} if boundary == len(ours) else {"color": "0.85", "linewidth": 0.6}
        axes.axvline(boundary - 0.5, **edge)
    names = [*names_of(ours), *(name.replace("fairseq-dense-", "paper, ") for name in FAIRSEQ)]
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.set_xlim(-0.5, len(names) - 0.5)
    cost_axis(axes, [row["value"] for row in (*rows, *published)])
    axes.set_ylabel(f"increase of perplexity (%), linear within ±{LINEAR:g}")
