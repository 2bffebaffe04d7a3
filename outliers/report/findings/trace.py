"""What a trace says."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pandas as pd

from outliers.criterion import FEW, LAYERS, POSITIONS
from outliers.report.findings.words import amount, count, part, ranges
from outliers.report.section import Finding

if TYPE_CHECKING:
    from outliers.tracing.result import Trace

Names = Callable[[int], str]  # of a token, by its id


def trace_findings(trace: "Trace", metrics: Mapping[str, float], names: Names) -> list[Finding]:
    """Which features are outliers, where the largest inputs are, massive activations, the attention and its sink.

    metrics: those of the model's row of Table 4. names: what a token id is called.
    """
    outliers = Finding(_outliers(trace), "features")
    return [outliers, _largest(trace, names), *_massive(trace, names), *_sink(trace), *_attention(metrics)]


def _outliers(trace: "Trace") -> str:
    every, outliers, hit = trace.features(), trace.outlier_features(), f"|x| ≥ {trace.alpha:g}"
    if len(outliers) > FEW * len(every):
        which = f"{len(outliers):,} of {len(every):,} features"
        return f"{which} reach {hit} often enough, so that the criterion tells nothing."
    if outliers.empty:
        return f"None of {len(every):,} features is an outlier feature: {_nearest(every, hit)}."
    most = outliers.iloc[0].to_dict()
    are = "is an outlier feature:" if len(outliers) == 1 else "are outlier features, most often"
    which = f"{count(len(outliers)).capitalize()} of {len(every):,} features {are} feature {most['feature']}"
    quartile = "" if pd.isna(most["median"]) else f", with a median of {amount(most['median'])}"
    return f"{which}, which reaches {hit} in {_share(most)}{quartile}."


def _nearest(every: pd.DataFrame, hit: str) -> str:
    most = every.iloc[0].to_dict()
    if not most["hits"]:
        return f"no value reaches {hit}, the largest being {amount(most['max'])} in feature {most['feature']}"
    required = f"{LAYERS:.0%} and {POSITIONS:.0%}".replace("%", " %")
    return f"the nearest, feature {most['feature']}, reaches {hit} in {_share(most)}, where {required} are asked for"


def _share(feature: dict) -> str:
    return f"{part(feature['layers'])} of layers and {part(feature['positions'])} of positions"


def _largest(trace: "Trace", names: Names) -> Finding:
    """The largest input of all projections, beside that of the roles in which outlier features are looked for."""
    from outliers.tracing.result import STREAM  # which imports torch

    of_roles = trace.largest_values().sort_values("max", ascending=False).to_dict("records")
    most = of_roles[0]
    axis = f"feature {most['feature']} of layer {most['layer']}'s {most['role']}"
    value = f"The largest value that a projection reads is {amount(most['max'])}: {axis}, {_token(most, names)}"
    looked_at = next((row for row in of_roles if row["role"] in STREAM), most)
    beside = "" if looked_at is most else f"; that of {looked_at['role']} is {amount(looked_at['max'])}"
    return Finding(f"{value}{beside}.", "largest")


def _token(row: dict, names: Names) -> str:
    return f"at position {row['position']}, token {names(int(row['token']))}"


def _massive(trace: "Trace", names: Names) -> list[Finding]:
    massive = trace.massive_activations().query("massive > 0")
    if massive.empty:
        return []
    most = massive.loc[massive["value"].abs().idxmax()].to_dict()
    layers = f"layer{'s' if len(massive) > 1 else ''} {ranges(massive['layer'].tolist())}"
    place = f"{amount(abs(most['value']))}, in feature {most['feature']} {_token(most, names)}"
    return [
        Finding(
            f"Massive activations stand in the residual stream after {layers}: up to {place}.", "massive_activations"
        )
    ]


def _sink(trace: "Trace") -> list[Finding]:
    """The position that is a sink for most heads; not one of the second half, to which few queries attend."""
    shares = trace.attention_sinks()
    most = shares.loc[shares["share"].idxmax()].to_dict()
    if not most["share"] or most["position"] > len(shares) / 2:
        return []
    share = f"{part(most['share'])} of (layer, head) pairs"
    return [Finding(f"Position {most['position']:.0f} is an attention sink for {share}.", "attention_sinks")]


def _attention(metrics: Mapping[str, float]) -> list[Finding]:
    """How much of its attention a head puts on one position, with outlier features and without."""
    if "top1_softmax" not in metrics:
        return []
    share = (
        f"The attention puts {100 * metrics['top1_softmax']:.1f} % on one position, as a mean over heads and queries"
    )
    if "top1_softmax_without" in metrics:
        share += f"; where outlier features are set to zero, {100 * metrics['top1_softmax_without']:.1f} %"
    return [Finding(f"{share}.", "table4")]
