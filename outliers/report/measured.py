"""Any metrics of any models under any variants: their values as a table, then what each metric shows of them."""

from collections import Counter, defaultdict
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

PLACES = ("model", "variant", "metric", "stack")


def measured_section(spec: Cells, folder: str | Path, rows: list[dict]) -> Section:
    """A row each value, with its standard deviation where there were draws; then the views of metrics that have one.

    A view takes the rows of its metric, as if the variant were a scheme.
    """
    by_metric: dict[str, list[dict]] = defaultdict(list)
    for row in rows_of(spec, read(Path(folder))):
        by_metric[row.asked["metric"]["name"]] += [record | {"scheme": record["variant"]} for record in row.records()]
    views = {metric.name: resolved(type(metric).view) for metric in spec.parametrized_metrics if metric.view}
    sections = [views[name](records) for name, records in by_metric.items() if name in views]
    return together("Measurements", [_values(rows), *sections])


def _values(rows: list[dict]) -> Section:
    counts = Counter(map(_place, rows))
    few = [row for row in rows if counts[_place(row)] == 1]
    cells = [
        [short_name(row["model"]), row["variant"], _metric(row), cell(".6g", *value_of(row), behind=".2g")]
        for row in few
    ]
    places = PLACES if any("stack" in row for row in few) else PLACES[:-1]
    data = pd.DataFrame(few).reindex(columns=[*places, "value", "standard_deviation", "unit"])
    headers = ["model", "variant", "metric", "value"]
    table = Table("measured", "Values by model, variant and metric.", headers, cells, data, names=3)
    return Section("Measurements", rows, table.printed, [table], further={"values": pd.DataFrame(rows)})


def _place(row: dict) -> tuple:
    return tuple(row.get(place) for place in PLACES)


def _metric(row: dict) -> str:
    """The metric of a row, with the stack where there are several."""
    return f"{row['metric']} ({row['stack']})" if "stack" in row else row["metric"]
