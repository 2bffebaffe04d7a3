"""Rows, however they come."""

import pandas as pd

Rows = list[dict] | pd.DataFrame  # as `outliers.sweep` and the others return them, or read from rows.parquet


def records(rows: Rows) -> list[dict]:
    """Rows as they are kept; of a data frame without its empty cells, which are fields that a row does not have."""
    if not isinstance(rows, pd.DataFrame):
        return rows
    return [
        {name: value for name, value in row.items() if not (pd.api.types.is_scalar(value) and pd.isna(value))}
        for row in rows.to_dict("records")
    ]
