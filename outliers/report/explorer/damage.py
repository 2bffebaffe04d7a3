"""The explorer of the damage by schemes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_hex

from outliers.plot.style import HEAT
from outliers.report.section import Explorer

if TYPE_CHECKING:
    from outliers.metrics.damages import Damages

ACROSS = {"by_token_db": "mean over tokens", "db": "over all tokens"}  # column of the errors: what it is


def damage_explorer(damages: Mapping[str, "Damages"]) -> list[Explorer]:
    """Maps of the error of the output by layer and projection, one a scheme and way to average; none without errors."""
    schemes = {scheme: one.errors for scheme, one in damages.items() if len(one.errors)}
    if not schemes:
        return []
    maps = [_map(scheme, errors, column) for scheme, errors in schemes.items() for column in ACROSS]
    content = {
        "row": "layer",
        "value": "error of outputs",
        "unit": " dB",
        "scales": ["linear"],
        "threshold": None,
        "colors": [[], [to_hex(color) for color in colormaps[HEAT](np.linspace(0, 1, 32))]],
        "choice": "scheme",
        "maps": maps,
        "tokens": None,
    }
    return [Explorer("Explore the damage by schemes", content)]


def _map(scheme: str, errors: pd.DataFrame, column: str) -> dict:
    """Layers down, projections across; NaN where nothing is quantized."""
    short = [path.split(f".{layer}.", 1)[-1] for path, layer in zip(errors["projection"], errors["layer"], strict=True)]
    table = errors.assign(short=short).pivot_table(index="layer", columns="short", values=column, sort=False)
    table = table.reindex(index=range(int(errors["layer"].max()) + 1), columns=list(dict.fromkeys(short)))
    return {
        "name": f"{scheme}, {ACROSS[column]}",
        "said": "",
        "group": column,
        "column": "projection",
        "values": table.to_numpy(dtype=float),
        "share": 1,
        "features": len(table.columns),
        "columns": list(table.columns),
        "marked": [],
        "positions": None,
        "text": None,
    }
