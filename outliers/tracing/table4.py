"""One row a model, as in Table 4 of the paper."""

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
        trace: of the model, with the roles "attn_in" and "ffn_in".
        perplexity: of the model on the same text.
        top1_softmax: mean top-1 softmax probability with and, if there are outliers, without them.
        layers, positions: the criterion, fractions.

    Returns:
        `perplexity`; `count`, outlier features, and `one_sided`, how many of them; `outliers_per_sequence`, entries of
        at least alpha in what the paper looks at, the inputs of the q/k/v, attention output and first feed-forward
        projections, as far as they were traced, and not in ffn_out; of the most common outlier feature (without one,
        of the feature that hits the most positions), whose number is `most_common`: `layers`, `positions`,
        `positions_mean` (fractions), `max`, and, if there are hits, the quartiles of the hit values `q1`, `median`,
        `q3`; `top1_softmax` and `top1_softmax_without` if given.

    Example:
        >>> outliers.table4_row(outliers.trace(model, blocks), perplexity=90.0)["perplexity"]
        90.0
    """
    row = {"perplexity": perplexity} | trace_row(trace, layers, positions)
    return row | dict(zip(("top1_softmax", "top1_softmax_without"), top1_softmax, strict=False))


def trace_row(trace: Trace, layers: float = LAYERS, positions: float = POSITIONS) -> dict[str, float]:
    """The part of `table4_row` that follows from a trace alone."""
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
