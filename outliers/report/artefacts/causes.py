"""What grows outlier features: training runs that differ in one thing each; an experiment beyond the paper."""

from typing import NamedTuple

import pandas as pd

from outliers.plot.training import causes, trained
from outliers.quantization.schemes import BASELINE
from outliers.report.analysis import Value, mean
from outliers.report.findings.causes import causes_findings
from outliers.report.paper import Artefact
from outliers.report.section import Drawing, Section, printed
from outliers.report.tables import Table, cell, seeds_note
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
    models, notes = ends(rows), [seeds_note(trained(rows))]
    tables = [causes_table(models)]
    drawings = [Drawing.of("causes", FIGURE, causes(rows))]
    findings = causes_findings(models, tables[0].name)
    further = {"trained": models}
    title = "What grows outlier features"
    return Section(title, rows, printed(tables, notes), tables, drawings, notes, further, findings)


def ends(rows: list[dict]) -> pd.DataFrame:
    """`outliers.plot.training.trained` with what its columns say together.

    Those are `max.inputs`, over all roles, `kurtosis`, and `COST` with each scheme, its scatter by rounding beside it.
    """
    table = trained(rows)
    table["max.inputs"] = table[table.columns.intersection(INPUTS)].max(axis=1)
    table["kurtosis"] = table[KURTOSES].max(axis=1)
    for scheme in _schemes(table):
        exact, under = table[UNDER + BASELINE], UNDER + scheme
        cost = Value(table[under], table.get(f"{under}_deviation")).beside(exact)
        table[COST + scheme] = 100 * cost.mean
        if cost.deviation is not None:
            table[f"{COST}{scheme}_deviation"] = 100 * cost.deviation
    return table


def _schemes(table: pd.DataFrame) -> list[str]:
    """Under which models were measured, beside that which quantizes nothing."""
    under = [name.removeprefix(UNDER) for name in table if name.startswith(UNDER) and not name.endswith("_deviation")]
    return [scheme for scheme in under if scheme != BASELINE]


def causes_table(models: pd.DataFrame) -> Table:
    """A row a run; of several seeds the mean with its interval, and where all runs have one the scatter by rounding."""
    several = models["seed"].nunique() > 1
    columns = [*COLUMNS, *(Column(f"{scheme} (%)", COST + scheme, "+z.2f") for scheme in _schemes(models))]
    cells, data = [], []
    for run, of_run in models.groupby("run", sort=False):
        means = {column.metric: mean(of_run[column.metric].tolist()) for column in columns}
        reaches = {f"{metric}_reach": one.reach for metric, one in means.items() if one.reach is not None}
        data.append({"run": run, "seeds": len(of_run), **{name: one.value for name, one in means.items()}, **reaches})
        rounding = {} if several else of_run.iloc[0]
        behind = [reaches.get(f"{metric}_reach", rounding.get(f"{metric}_deviation")) for metric in means]
        pairs = zip(columns, means.values(), behind, strict=True)
        cells.append([run, *(cell(column.form, one.value, scatter, column.unit) for column, one, scatter in pairs)])
    caption = CAPTION.format(BY_SEEDS if several else BY_ROUNDING)
    return Table("causes", caption, ["run", *(column.header for column in columns)], cells, pd.DataFrame(data))


ARTEFACTS = {"causes": Artefact("Causes", Training, causes_section)}
