"""The explorer of the damage by schemes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from outliers.show.explorer import Explorer, map_of, of_tables

if TYPE_CHECKING:
    from outliers.metrics.damages import Damages

ACROSS = {"by_token_db": "mean over tokens", "db": "over all tokens"}  # column of the errors: what it is


def damage_explorer(damages: Mapping[str, "Damages"]) -> list[Explorer]:
    """Maps of the error of the output by layer and projection, one a scheme and way to average; none without errors."""
    maps = [
        map_of(f"{scheme}, {words}", "projection", _table(damage.errors, column), column)
        for scheme, damage in damages.items()
        if len(damage.errors)
        for column, words in ACROSS.items()
    ]
    title, value = "Explore the damage by schemes", "error of outputs"
    return [of_tables(title, maps, row="layer", value=value, choice="scheme", unit=" dB")] if maps else []


def _table(errors: pd.DataFrame, column: str) -> pd.DataFrame:
    """Layers down, projections across; NaN where nothing is quantized."""
    short = [path.split(f".{layer}.", 1)[-1] for path, layer in zip(errors["projection"], errors["layer"], strict=True)]
    table = errors.assign(short=short).pivot_table(index="layer", columns="short", values=column, sort=False)
    return table.reindex(index=range(int(errors["layer"].max()) + 1), columns=list(dict.fromkeys(short)))
