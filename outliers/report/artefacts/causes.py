"""What grows outlier features: training runs that differ in one thing each; an experiment beyond the paper."""

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from outliers.plot.training import causes, trained
from outliers.quantization.schemes import BASELINE
from outliers.report.findings.causes import causes_findings
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, Table
from outliers.report.seeds import Mean, mean, seeds_note
from outliers.specification.recipe import Training

UNDER = "perplexity."  # before the scheme under which a trained model was measured
COST = "cost."  # before a scheme: what it adds to the perplexity, in per cent
INPUTS = ["max.attn_in", "max.attn_out", "max.ffn_in", "max.ffn_out"]
KURTOSES = ["kurtosis_feature.attn_in", "kurtosis_feature.ffn_in"]


class Column(NamedTuple):
    """Of the table: the metric of `ends` that it shows, in which unit and form."""

    header: str
    metric: str
    form: str = ".1f"
    unit: float = 1.0


COLUMNS = (
    Column("perplexity", "perplexity"),
    Column("outlier features", "count", ".3g"),
    Column("residual", "max.residual"),
    *(Column(metric.removeprefix("max."), metric) for metric in INPUTS),
    Column("kurtosis", "kurtosis"),
    Column("sink (%)", "attention_sink", ".0f", 100.0),
)
CAPTION = (
    "Models at the end of their training: perplexity; outlier features by the criterion; the largest |x| in the "
    "residual stream and in the inputs of projections, by role; kurtosis_feature, the larger of attn_in and ffn_in; "
    "the share of (layer, head) pairs for which position 0 is an attention sink; what schemes add to the perplexity of "
    "the same weights in float32, in per cent. {}"
)
BY_ROUNDING = "± behind a scheme is one standard deviation by rounding."
BY_SEEDS = "± is half of a 95 % interval over seeds; a run without it has one seed."
FIGURE = (
    "The largest |x| in the residual stream, and in the inputs of all projections, along the training of each model, "
    "with its perplexity at the end; a line a seed. Grey: the run from which the others differ in one thing."
)


def causes_section(rows: list[dict]) -> Section:
    """What training runs that differ in one thing each end with, and what grew along them."""
    found, note = ends(rows), seeds_note(trained(rows))
    table = causes_table(found)
    drawings = [Drawing.of("causes", FIGURE, causes(rows))]
    findings = causes_findings(found, table.name)
    further = {"trained": found}
    printed = f"{table.printed}\n\n{textwrap.fill(note, 100)}"
    return Section("What grows outlier features", rows, printed, [table], drawings, [note], further, findings)


def ends(rows: list[dict]) -> pd.DataFrame:
    """`outliers.plot.training.trained` with what its columns say together.

    Those are `max.inputs`, over all roles, `kurtosis`, and `COST` with each scheme, its scatter by rounding beside it.
    """
    found = trained(rows)
    found["max.inputs"] = found[found.columns.intersection(INPUTS)].max(axis=1)
    found["kurtosis"] = found[KURTOSES].max(axis=1)
    for scheme in _schemes(found):
        exact, under = found[UNDER + BASELINE], UNDER + scheme
        found[COST + scheme] = 100 * (found[under] / exact - 1)
        if f"{under}_deviation" in found:
            found[f"{COST}{scheme}_deviation"] = 100 * found[f"{under}_deviation"] / exact
    return found


def _schemes(found: pd.DataFrame) -> list[str]:
    """Under which models were measured, beside that which quantizes nothing."""
    under = [name.removeprefix(UNDER) for name in found if name.startswith(UNDER) and not name.endswith("_deviation")]
    return [scheme for scheme in under if scheme != BASELINE]


def causes_table(found: pd.DataFrame) -> Table:
    """A row a run; of several seeds the mean with its interval, and where all runs have one the scatter by rounding."""
    several = found["seed"].nunique() > 1
    columns = [*COLUMNS, *(Column(f"{scheme} (%)", COST + scheme, "+z.2f") for scheme in _schemes(found))]
    cells, data = [], []
    for run, of_run in found.groupby("run", sort=False):
        means = {column.metric: mean(of_run[column.metric].tolist()) for column in columns}
        scatter = {} if several else of_run.iloc[0]
        cells.append([run, *(_cell(means[column.metric], column, scatter) for column in columns)])
        reaches = {f"{metric}_reach": one.reach for metric, one in means.items() if one.reach is not None}
        data.append({"run": run, "seeds": len(of_run), **{name: one.value for name, one in means.items()}, **reaches})
    said = BY_SEEDS if several else BY_ROUNDING
    headers = ["run", *(column.header for column in columns)]
    return Table("causes", CAPTION.format(said), headers, cells, pd.DataFrame(data))


def _cell(of_run: Mean, column: Column, scatter: Mapping[str, float]) -> str:
    """A mean; behind it the reach of its interval, or what scatters it by rounding, where that is known."""
    reach = of_run.reach if of_run.reach is not None else scatter.get(f"{column.metric}_deviation")
    if pd.isna(of_run.value):
        return "-"
    beside = "" if reach is None else f"±{column.unit * reach:{column.form.removeprefix('+')}}"
    return f"{column.unit * of_run.value:{column.form}}{beside}"


ARTEFACTS = {"causes": Artefact("Causes", Training, causes_section)}
