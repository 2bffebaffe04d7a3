"""Any metrics of any models under any variants: a table of their values, then the view of each metric."""

from collections import defaultdict
from pathlib import Path

import pandas as pd

from outliers.runs.rows import read
from outliers.runs.run import records, rows_of
from outliers.show.section import Failures, Section, failures, part_of, together
from outliers.show.tables import values_table
from outliers.show.words import listed
from outliers.specification.fields import resolved
from outliers.specification.kinds import Named
from outliers.views import OF_METRICS

SEVERAL = "Of {} each cell has several, which values.csv lists."


@failures(Failures.SHOWN)
def measured_section(spec: Named, folder: str | Path, rows: list[dict]) -> Section:
    """Show one row per value, with its standard deviation if there were draws, then the views of metrics that have one.

    spec: an `outliers.presets.cells.Cells`. Each view takes the rows of its metric, with the variant in the field
    `scheme` too.
    """
    by_metric: dict[str, list[dict]] = defaultdict(list)
    measured = rows_of(spec, read(Path(folder)))
    names = [row.request["metric"]["name"] for row in measured for _ in row.values or [None]]
    for name, record in zip(names, records(measured), strict=True):
        by_metric[name].append(record | {"scheme": record["variant"]})
    views = OF_METRICS | {metric.name: metric.view for metric in map(type, spec.parametrized_metrics) if metric.view}
    sections = [part_of(resolved(views[name]), found) for name, found in by_metric.items() if name in views]
    table = values_table(rows, parts=["stack"])
    shown = set(table.data["metric"])
    several = [name for name, found in by_metric.items() if not any(one["metric"] in shown for one in found)]
    if several:
        table = table._replace(caption=f"{table.caption} {SEVERAL.format(listed(several))}")
    values = Section("Measurements", rows, table.printed, [table], further={"values": pd.DataFrame(rows)})
    return together("Measurements", [values, *sections])
