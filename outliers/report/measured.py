"""Any metrics of any models under any variants: their values as a table, then what each metric shows of them."""

from collections import defaultdict
from pathlib import Path

import pandas as pd

from outliers.models.names import short_name
from outliers.presets.cells import Cells
from outliers.report.analysis import value_of
from outliers.report.section import Section, together
from outliers.report.tables import Table, cell
from outliers.runs.rows import read
from outliers.runs.run import rows_of
from outliers.specification.kinds import resolved

PLACES = ("model", "variant", "metric")


def measured_section(spec: Cells, folder: str | Path, rows: list[dict]) -> Section:
    """A row each value, with its standard deviation where there were draws; then the views of metrics that have one.

    A view takes the rows of its metric, as if the variant were a scheme.
    """
    by_metric: dict[str, list[dict]] = defaultdict(list)
    for row in rows_of(spec, read(Path(folder))):
        by_metric[row.asked["metric"]["name"]] += [record | {"scheme": record["variant"]} for record in row.records()]
    views = {one.name: resolved(type(one).view) for one in spec.asked_metrics if one.view}
    sections = [views[name](of_metric) for name, of_metric in by_metric.items() if name in views]
    return together("Measurements", [_values(rows), *sections])


def _values(rows: list[dict]) -> Section:
    counts = pd.DataFrame(rows).groupby(list(PLACES), sort=False).size()
    few = [row for row in rows if counts[tuple(row[place] for place in PLACES)] == 1]
    cells = [
        [short_name(row["model"]), row["variant"], row["metric"], cell(".6g", *value_of(row), behind=".2g")]
        for row in few
    ]
    data = pd.DataFrame(few).reindex(columns=[*PLACES, "value", "standard_deviation", "unit"])
    table = Table("measured", "Values by model, variant and metric.", [*PLACES, "value"], cells, data, names=3)
    return Section("Measurements", rows, table.printed, [table], further={"values": pd.DataFrame(rows)})
