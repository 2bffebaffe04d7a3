"""The explorer of a trace."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex

from outliers.plot.trace import magnitudes, pooled, stream_roles
from outliers.show.explorer import Explorer
from outliers.show.style import HEAT
from outliers.show.words import Names

if TYPE_CHECKING:
    from outliers.tracing.excerpt import Excerpt
    from outliers.tracing.result import Trace

CELLS = 150_000  # of a map at most: features of wider models share columns
SHADES = 16
OF_STACK = {
    "": "",
    "encoder": " of the encoder",
    "decoder": " of the decoder",
    "cross": " of the encoder as cross-attention reads them",
}
STEP = (0.4, 0.65)  # shades of the largest value below the threshold and of the threshold


def trace_explorer(trace: "Trace", excerpt: "Excerpt | None", readers: dict[str, str], names: Names) -> Explorer:
    """Maps of the largest |x| by layer and feature, a role each; the text at telling features, where it was kept.

    readers: where each role goes. names: what a token id is called.
    """
    from outliers.tracing.excerpt import telling_features  # which imports torch

    telling = (
        {role: places.tolist() for role, places in excerpt.features.items()} if excerpt else telling_features(trace)
    )
    stream = stream_roles(trace)
    positions = _positions(trace, stream, telling)
    maps = [
        {
            "name": role,
            "said": f"into {readers[role]}",
            "group": "stream" if role in stream else role,
            "column": "feature" if role in stream else f"feature of {role}",
            **_map(trace.largest(role).numpy()),
            "columns": None,
            "marked": telling[role],
            "positions": positions if role in stream else None,
            "text": _text(excerpt, role),
        }
        for role in trace.roles
    ]
    content = {
        "row": "layer",
        "first": trace.first_layer,
        "value": "largest |x|",
        "unit": "",
        "scales": ["log", "linear", "clipped"],
        "threshold": trace.alpha,
        "colors": [_shades(0, STEP[0]), _shades(STEP[1], 1)],
        "choice": "role",
        "maps": maps,
        "tokens": [_bare(names(token)) for token in excerpt.tokens.tolist()] if excerpt else None,
    }
    return Explorer(f"Explore the hidden states{OF_STACK[trace.stack]}", content)


def _shades(start: float, end: float) -> list[str]:
    return [to_hex(color) for color in colormaps[HEAT](np.linspace(start, end, SHADES))]


def _map(values: np.ndarray) -> dict:
    """Values (layers, features) as at most `CELLS` cells, each the largest of neighbours."""
    share = -(-values.size // CELLS)
    return {"values": pooled(values, share), "share": share, "features": values.shape[1]}


def _positions(trace: "Trace", stream: list[str], telling: dict[str, list[int]]) -> dict | None:
    """The largest |x| over the layers at each position, averaged over sequences; of wide models at telling features."""
    if not stream:
        return None
    means = magnitudes(trace).numpy()
    features = None if means.size <= CELLS else telling[stream[0]]
    return {"features": features, "values": means if features is None else means[:, features]}


def _text(excerpt: "Excerpt | None", role: str) -> dict | None:
    if excerpt is None:
        return None
    return {"features": excerpt.features[role].tolist(), "values": excerpt.values[role].float().numpy()}


def _bare(name: str) -> str:
    """A token's name without its quotes."""
    return name[1:-1] if len(name) > 2 and name[0] == name[-1] and name[0] in "'\"" else name
