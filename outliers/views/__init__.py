"""The views, one file per topic: they turn rows into frames, figures, tables, findings and explorers."""

# The view of a metric's rows; a user's own metric names its view in its attribute `view`.
OF_METRICS = {
    "perplexity": "outliers.views.perplexity:sweep_section",
    "token_losses": "outliers.views.token_losses:token_losses_section",
    "zeroshot": "outliers.views.zeroshot:zeroshot_section",
    "latency": "outliers.views.latency:latency_section",
    "memory": "outliers.views.memory:memory_section",
    "linear_layer": "outliers.views.linear_layer:speed_section",
    "continuation": "outliers.views.continuation:continuation_section",
    "keys": "outliers.views.keys:keys_section",
    "origins": "outliers.views.origins:origins_section",
    "range": "outliers.views.range:range_section",
}
