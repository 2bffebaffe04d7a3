"""A model's row of the paper's Table 4."""

from collections.abc import Sequence

from outliers.criterion import LAYERS, PAPER, POSITIONS
from outliers.tracing.result import QUARTILES, Trace


def table4_row(
    trace: Trace,
    perplexity: float,
    top1_softmax: Sequence[float] = (),
    layers: float = LAYERS,
    positions: float = POSITIONS,
) -> dict[str, float]:
    """Return a model's row of Table 4 (LLM.int8(), appendix C).

    Args:
        trace: a trace of the model with the roles "attn_in" and "ffn_in".
        perplexity: the model's perplexity on the same text.
        top1_softmax: mean top-1 softmax probability with outliers and, if there are any, without them.
        layers, positions: the criterion, fractions.

    Returns:
        `perplexity`; `count`, the number of outlier features, and `one_sided`, how many of these have values of one
        sign; `outliers_per_sequence`, the entries of at least alpha in the inputs of the q/k/v, attention output and
        first feed-forward projections (the paper's choice, without ffn_out), as far as they were traced; `most_common`,
        the number of the most common outlier feature (without one, of the feature with hits at the most positions), and
        its `layers`, `positions`, `positions_mean` (fractions), `max`, and, if there are hits, the quartiles of the hit
        values `q1`, `median`, `q3`; `top1_softmax` and `top1_softmax_without` if given.

    Example:
        >>> outliers.table4_row(outliers.trace(model, blocks), perplexity=90.0)["perplexity"]
        90.0
    """
    row = {"perplexity": perplexity} | trace_row(trace, layers, positions)
    return row | dict(zip(("top1_softmax", "top1_softmax_without"), top1_softmax, strict=False))


def trace_row(trace: Trace, layers: float = LAYERS, positions: float = POSITIONS) -> dict[str, float]:
    """Return the fields of `table4_row` that follow from a trace alone."""
    features = trace.features()
    outliers = trace.outlier_features(layers, positions)
    common = (features if outliers.empty else outliers).iloc[0]
    hits = sum(trace.statistics[f"{role}.hits"].sum().item() for role in PAPER if role in trace.roles)
    row = {
        "count": len(outliers),
        "one_sided": int(outliers["one_sided"].sum()),
        "outliers_per_sequence": hits / trace.sequences,
        "most_common": int(common["feature"]),
        **{name: float(common[name]) for name in ("layers", "positions", "positions_mean", "max")},
    }
    return row | ({name: float(common[name]) for name in QUARTILES} if common["hits"] else {})
