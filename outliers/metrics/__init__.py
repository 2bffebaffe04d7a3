"""What is asked of a subject: a folder each, with its record, how it is measured, and how it is shown."""

from outliers.metrics.registry import Registry

METRICS = Registry(
    "metric",
    "outliers.metrics",
    {
        "perplexity": "outliers.metrics.perplexity:Perplexity",
        "agreement": "outliers.metrics.agreement:Agreement",
        "errors": "outliers.metrics.errors:Errors",
        "inputs": "outliers.metrics.inputs:Inputs",
        "places": "outliers.metrics.places:Places",
        "trace": "outliers.metrics.trace:Trace",
        "origins": "outliers.metrics.origins:Origins",
        "candidates": "outliers.metrics.candidates:Candidates",
        "top1": "outliers.metrics.top1:Top1",
        "sinks": "outliers.metrics.sinks:Sinks",
        "zeroshot": "outliers.metrics.zeroshot:ZeroShot",
        "latency": "outliers.metrics.latency:Latency",
        "memory": "outliers.metrics.memory:Memory",
    },
)
