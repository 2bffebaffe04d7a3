"""Results as a pandas data frame."""

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pandas as pd

from outliers.errors import UserError
from outliers.runs.rows import read_rows
from outliers.runs.run import records
from outliers.subjects.row import MACHINE

# Fields that tell the values of a cell apart.
WHICH = (
    *("metric", "stack", "subject", "method", "features", "draw", "feature", "layer", "role", "projection", "expert"),
    *("position", "token"),
    *("variant", "side", "way", "norm", "part", "writer", "index", "head", "channel", "path", "output", "input"),
    *("stage", "alone", "without"),
    *("bits", "hardware", "owner", "gpus", "gigabytes", "headroom"),
)
# Versions, hashes and machine of a computation, and its time and memory.
PROVENANCE = (
    *("weights_hash", "tokens_hash", "calibration_hash", "documents_hash", "ignored_tensors"),
    *("code", "version", "commit", "transformers", "lm_eval", "task_version", *MACHINE),
    *("wall_seconds", "peak_memory_bytes"),
)
RESULT = (
    *("value", "standard_deviation", "standard_error", "paired_error", "q1", "q3", "unit", "failed"),
    *("bits_per_byte", "bits_per_byte_deviation", "bits_per_byte_error", "bytes"),  # beside a perplexity
)
FIRST = ("experiment", "model", "run", "seed", "checkpoint", "scheme", "task", "batch", "dimension", *WHICH, *RESULT)


def frame(results: str | os.PathLike | Iterable[dict], provenance: bool = False) -> pd.DataFrame:
    """Return results as a data frame: one row per value, one column per field (docs/rows.md).

    Columns that identify a value come first, then the value with its scatter and unit, then the settings. Columns of
    whole numbers of which some are missing have pandas' type Int64.

    Args:
        results: rows, as `outliers.sweep` returns them; or a folder, whose finished rows are read with those of all
            folders in it, also while a run is adding to them.
        provenance: whether to keep what else is known of each value, as the last columns: hashes, versions, the
            machine, time and memory.

    Raises:
        UserError: there are no results in the folder, or a file of them is damaged.

    Example:
        >>> rows = outliers.sweep(models=["pocket/gpt2-0.1m"], schemes=["fp32", "absmax"], block=64, blocks=2)
        >>> outliers.frame(rows)["value"].size
        2
    """
    rows = _read(Path(results)) if isinstance(results, (str, os.PathLike)) else list(results)
    fields = dict.fromkeys(chain.from_iterable(rows))
    first = [field for field in FIRST if field in fields]
    last = [field for field in PROVENANCE if field in fields]
    settings = [field for field in fields if field not in {*first, *last}]
    table = pd.DataFrame(rows, columns=[*first, *settings, *(last if provenance else ())])
    # pandas turns whole numbers into fractions if one is missing: layer 11.0
    return table.astype({name: "Int64" for name in table.select_dtypes("float") if _is_whole(name, rows)})


def _is_whole(field: str, rows: list[dict]) -> bool:
    return all(isinstance(row[field], int) for row in rows if row.get(field) is not None)


def _read(folder: Path) -> list[dict]:
    files = sorted(folder.rglob("rows.jsonl"))
    if not files:
        raise UserError(f"no results in '{folder}'; expected a folder that a run has written, or one of such folders")
    return [row for file in files for row in records_in(file.parent)]


def records_in(folder: Path) -> list[dict]:
    """Return a flat dictionary for each value in the rows of a folder."""
    return records(read_rows(folder))
