"""Write what was measured into its folder: rows, tables, figures; and say what to print."""

import io
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from tabulate import tabulate

from outliers.ablation.ablate import damages, summary
from outliers.files import write_whole
from outliers.report.ablation_figures import ablation_bars
from outliers.report.emergence import Fit, exponential_fit
from outliers.report.emergence_figures import figure3, figure4
from outliers.report.sweep_figures import perplexity_by_size
from outliers.report.table1 import published_form, table1, terminal
from outliers.report.table4 import by_model, table4
from outliers.report.table4 import published_form as table4_form
from outliers.report.trace_figures import heat_map, magnitude_by_position, sorted_profile
from outliers.tracing.result import Trace

FORMATS = {"md": "github", "tex": "latex_booktabs"}


def write_sweep(rows: list[dict], folder: str | Path) -> str:
    """Write the rows as Parquet, Table 1 as Markdown, CSV and LaTeX, and the figure; return what to print."""
    table, dtype = table1(rows), rows[0]["dtype"]
    contents = {f"table1.{ending}": published_form(table, dtype, form) for ending, form in FORMATS.items()}
    contents["table1.csv"] = table.to_csv(float_format="%.6g")
    _write(Path(folder), rows, contents, {"perplexity": perplexity_by_size(rows)})
    return f"\n{terminal(table)}\n\nRows, tables and figure: {folder}/"


def write_trace(trace: Trace, rows: list[dict], folder: str | Path) -> str:
    """Write the rows as Parquet, the tables of the trace as CSV, Table 4 and the figures; return what to print."""
    features, found = trace.features(), trace.outlier_features()
    table = table4([row for row in rows if "." not in row["metric"]])
    contents = {f"table4.{ending}": table4_form(table, form) for ending, form in FORMATS.items()}
    tables = {
        "features": features,
        "features_by_layer": trace.features(by="layer"),
        "hidden_states": trace.hidden_states(),
        "massive_activations": trace.massive_activations(),
        "attention_sinks": trace.attention_sinks(),
    }
    contents |= {f"{name}.csv": of_trace.to_csv(index=False, float_format="%.6g") for name, of_trace in tables.items()}
    figures = {draw.__name__: draw(trace) for draw in (heat_map, magnitude_by_position, sorted_profile)}
    _write(Path(folder), rows, contents, figures)
    heading = f"Outlier features: {len(found)}" if len(found) else "No outlier feature; the nearest ones"
    shown = _features_form(found if len(found) else features.head(3))
    return (
        f"\n{heading} (|x| ≥ {trace.alpha:g} in ≥ 25 % of layers and ≥ 6 % of positions)\n\n{shown}\n\n"
        f"{table4_form(table, 'simple')}\nTrace, rows, tables and figures: {folder}/"
    )


def _features_form(features: pd.DataFrame) -> str:
    cells = [
        [
            int(row["feature"]),
            f"{row['layers']:.0%}",
            f"{row['positions']:.1%}",
            f"{row['positions_mean']:.2%}",
            int(row["hits"]),
            "yes" if row["one_sided"] else "no",
            *(f"{row[name]:.1f}" for name in ("q1", "median", "q3", "max")),
        ]
        for row in features.to_dict("records")
    ]
    headers = ["feature", "layers", "positions", "pos. mean", "hits", "one-sided", "q1", "median", "q3", "max |x|"]
    return tabulate(cells, headers, tablefmt="simple", disable_numparse=True, colalign=["right"] * 10)


def write_ablation(rows: list[dict], folder: str | Path) -> str:
    """Write the rows as Parquet, the summary as Markdown, CSV and LaTeX, and the figure; return what to print."""
    found = ablation_summary(rows)
    contents = {f"ablation.{ending}": ablation_form(found, form) for ending, form in FORMATS.items()}
    contents["ablation.csv"] = found.to_csv(index=False, float_format="%.6g")
    _write(Path(folder), rows, contents, {"ablation": ablation_bars(found)})
    return f"\n{ablation_form(found, 'simple')}\nRows, tables and figure: {folder}/"


def ablation_summary(rows: list[dict]) -> pd.DataFrame:
    """`outliers.ablation.ablate.summary` of rows."""
    cells: dict[tuple, dict] = {}
    for row in rows:
        cell = {name: row.get(name) for name in ("subject", "method", "draw")} | {"features": tuple(row["features"])}
        cells.setdefault(tuple(cell.values()), cell)[row["metric"]] = row["value"]
    return summary(damages(list(cells.values())), rows[0]["seed"])


def ablation_form(found: pd.DataFrame, tablefmt: str) -> str:
    cells = [
        [
            _what(row),
            row["method"] or "-",
            _with_interval(row, "top1_softmax", 100),
            f"{row['perplexity']:.2f}",
            "-" if row["subject"] == "none" else _with_interval(row, "damage", 100),
        ]
        for row in found.to_dict("records")
    ]
    headers = ["without", "method", "top-1 softmax (%)", "perplexity", "damage (%)"]
    align = ["left", "left", "right", "right", "right"]
    return tabulate(cells, headers, tablefmt=tablefmt, disable_numparse=True, colalign=align) + "\n"


def _what(row: dict) -> str:
    numbers = ", ".join(map(str, row["features"]))
    names = {
        "none": "nothing",
        "outliers": f"outliers {numbers}",
        "control": f"random features, {row['draws']:.0f} draws",
        "single": f"feature {numbers}",
    }
    return names[row["subject"]]


def _with_interval(row: dict, metric: str, unit: float) -> str:
    value = f"{row[metric] * unit:.2f}"
    if row["subject"] != "control":
        return value
    return f"{value} [{row[f'{metric}_low'] * unit:.2f}, {row[f'{metric}_high'] * unit:.2f}]"


def write_emergence(rows: list[dict], folder: str | Path) -> str:
    """Write the rows as Parquet, Table 4, the fits and Figures 3 and 4; return what to print."""
    models, table = by_model(rows), table4(rows)
    distinct = models[models["same_weights_as"].isna()]
    fits = {name: exponential_fit(distinct["perplexity"], distinct[name]) for name in ("layers", "positions")}
    contents = {f"table4.{ending}": table4_form(table, form) for ending, form in FORMATS.items()}
    contents["table4.csv"] = models.to_csv(float_format="%.6g")
    contents["fits.csv"] = pd.DataFrame(
        [{"fraction": name, **fit._asdict()} for name, fit in fits.items() if fit], columns=["fraction", *Fit._fields]
    ).to_csv(index=False)
    _write(Path(folder), rows, contents, {"figure3": figure3(distinct, fits), "figure4": figure4(distinct)})
    said = [_fit_line(name, fit) for name, fit in fits.items()]
    said += [f"{model} holds the same weights as {twin}" for model, twin in models["same_weights_as"].dropna().items()]
    lines = "\n".join(said)
    return f"\n{table4_form(table, 'simple')}\n{lines}\n\nRows, tables and figures: {folder}/"


def _fit_line(name: str, fit: Fit | None) -> str:
    if fit is None:
        return (
            f"{name}: no exponential fits (it takes three models, two with hits at different perplexities, and growth)"
        )
    pairs = ((fit.full, *fit.full_interval), (fit.scale, *fit.scale_interval))
    full, scale = ("{:.3g} [{:.3g}, {:.3g}]".format(*pair) for pair in pairs)
    return f"{name} = exp((a − perplexity) / b): a = {full}, b = {scale} (95 % intervals, {fit.points} models)"


def _write(folder: Path, rows: list[dict], contents: dict[str, str], figures: dict[str, Figure]) -> None:
    write_whole(folder / "rows.parquet", pd.DataFrame(rows).to_parquet(index=False))
    for name, content in contents.items():
        write_whole(folder / name, content)
    for name, figure in figures.items():
        write_figure(figure, folder / name)


def write_figure(figure: Figure, stem: Path) -> None:
    """Write a figure as `stem`.png and `stem`.svg."""
    for kind in ("png", "svg"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=200)
        write_whole(stem.with_name(f"{stem.name}.{kind}"), buffer.getvalue())
