"""The changes of outlier features between two traces."""

import numpy as np
import pandas as pd

from outliers.criterion import LAYERS, POSITIONS, check_share
from outliers.errors import UserError
from outliers.tracing.frame import Frame
from outliers.tracing.result import Trace

FRACTIONS = ("layers", "positions")


def compare(trace_a: Trace, trace_b: Trace, layers: float = LAYERS, positions: float = POSITIONS) -> Frame:
    """Return the outlier features of two traces side by side, the most changed first.

    The traces may be of two models with residual streams of one width, such as checkpoints of a training run; of a
    model with and without a scheme or another variant, `trace(model, blocks, variant=…)`; or of two texts. Feature
    numbers correspond only if one model was made from the other.

    Args:
        trace_a, trace_b: traces of the same roles with the same alpha.
        layers, positions: the least fractions of layers and positions, as in `Trace.outlier_features`.

    Returns:
        One row per feature: whether it is an outlier feature of either trace, `outlier_a` and `outlier_b`; its
            fractions of `layers` and `positions` and its largest |x|, `max`, in either trace, see `Trace.features`; the
            differences b − a of the fractions, `layers_change` and `positions_change`; and the ratio b / a of the
            largest values, `max_ratio`. Rows are sorted by the larger of the two changes, then by the ratio, in
            absolute terms.

    Raises:
        UserError: the traces have different numbers of features, alphas or roles.

    Example:
        >>> quantized = outliers.trace(model, blocks, variant=outliers.variant("absmax"))
        >>> changed = outliers.compare(outliers.trace(model, blocks), quantized)
    """
    both, shares = (trace_a, trace_b), {"layers": layers, "positions": positions}
    layers, positions = (check_share(name, value, whole=True) for name, value in shares.items())
    for what, (a, b) in {
        "features": [trace.statistics["residual.massive"].shape[1] for trace in both],
        "alpha": [trace.alpha for trace in both],
        "roles": [", ".join(trace.roles) for trace in both],
    }.items():
        if a != b:
            raise UserError(f"cannot compare traces whose {what} are {a} and {b}; expected the same of both")
    a, b = (trace.features().set_index("feature").sort_index() for trace in both)
    outlier_a, outlier_b = ((of["layers"] >= layers) & (of["positions"] >= positions) for of in (a, b))
    columns = {"outlier_a": outlier_a, "outlier_b": outlier_b}
    columns |= {f"{name}_{which}": of[name] for name in (*FRACTIONS, "max") for which, of in (("a", a), ("b", b))}
    columns |= {f"{name}_change": b[name] - a[name] for name in FRACTIONS}
    compared = pd.DataFrame(columns | {"max_ratio": b["max"] / a["max"]})[outlier_a | outlier_b].reset_index()
    change = compared[[f"{name}_change" for name in FRACTIONS]].abs().max(axis=1)
    ratio = np.log(compared["max_ratio"]).abs()
    order = np.lexsort([compared["feature"], -ratio, -change])  # the last key counts first
    return Frame(compared.iloc[order].reset_index(drop=True))
