"""Any metrics of any models under any variants, as a table."""

import pandas as pd

from outliers.models.names import short_name
from outliers.report.analysis import value_of
from outliers.report.section import Section
from outliers.report.tables import Table, cell

PLACES = ("model", "variant", "metric")


def measured_section(rows: list[dict]) -> Section:
    """A row each value, with its standard deviation where there were draws."""
    counts = pd.DataFrame(rows).groupby(list(PLACES), sort=False).size()
    few = [row for row in rows if counts[tuple(row[place] for place in PLACES)] == 1]
    cells = [
        [short_name(row["model"]), row["variant"], row["metric"], cell(".6g", *value_of(row), behind=".2g")]
        for row in few
    ]
    data = pd.DataFrame(few).reindex(columns=[*PLACES, "value", "standard_deviation", "unit"])
    table = Table("measured", "Values by model, variant and metric.", [*PLACES, "value"], cells, data, names=3)
    return Section("Measurements", rows, table.printed, [table], further={"values": pd.DataFrame(rows)})
