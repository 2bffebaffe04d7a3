"""Any metrics of any models under any variants: a table of their values, then the view of each metric."""

import importlib.util
from collections import defaultdict

import pandas as pd

from outliers.config.fields import resolved
from outliers.metrics.records import Metric
from outliers.runs.rows import index
from outliers.runs.run import records, rows_of
from outliers.show.section import Context, Section, View, left_to_compare, together
from outliers.show.tables import values_table
from outliers.show.words import listed

SEVERAL = "Of {} each cell has several, which values.csv lists."


def view_of(metric: type[Metric]) -> View | None:
    """Return the view of a metric: its own, or the function `NAME_section` of the file of its name in this room."""
    file = f"{__package__}.{metric.name}"
    has_file = metric.view is None and importlib.util.find_spec(file)
    return getattr(importlib.import_module(file), f"{metric.name}_section", None) if has_file else resolved(metric.view)


def measured_section(rows: list[dict], context: Context) -> Section:
    """Show one row per value, with its standard deviation if there were draws, then the views of metrics that have one.

    The view of a single metric shows its values already, so the table is folded then.

    context: of an `outliers.Cells`. Each view takes the rows of its metric.
    """
    by_metric: dict[str, list[dict]] = defaultdict(list)
    measured = rows_of(context.experiment, index(context.folder))
    names = [row.request["metric"]["name"] for row in measured for _ in row.values or [None]]
    for name, record in zip(names, records(measured), strict=True):
        by_metric[name].append(record)
    views = {metric.name: view_of(type(metric)) for metric in context.experiment.parametrized_metrics}
    sections = [
        views[name](left, context._replace(rows=group))
        for name, group in by_metric.items()
        if views[name] and (left := left_to_compare(group))
    ]
    table = values_table(context.rows or rows, parts=["stack"])
    shown = set(table.data["metric"])
    several = [name for name, group in by_metric.items() if not any(row["metric"] in shown for row in group)]
    if several:
        table = table._replace(caption=f"{table.caption} {SEVERAL.format(listed(several))}")
    alone = len(sections) == len(views) == 1
    table = table._replace(folded=alone)
    values = Section("Measurements", rows, tables=[table], further={"values": pd.DataFrame(rows)})
    return together(sections[0].title if alone else "Measurements", [values, *sections])
