"""What a trace shows."""

import pandas as pd

from outliers.experiment.spec import short_name
from outliers.report.section import Drawing, Section, Table
from outliers.report.table4 import published_table
from outliers.report.trace_figures import heat_map, magnitude_by_position, sorted_profile
from outliers.tracing.result import Trace

CAPTIONS = {
    heat_map: "Largest absolute value of each feature in each layer.",
    magnitude_by_position: "Magnitude by position in the sequence.",
    sorted_profile: "Largest absolute value of each feature, sorted; one line a layer.",
}
HEADERS = ["feature", "layers", "positions", "pos. mean", "hits", "one-sided", "q1", "median", "q3", "max |x|"]


def trace_section(trace: Trace, rows: list[dict]) -> Section:
    """The outlier features, the model's row of Table 4, and the figures."""
    features, found = trace.features(), trace.outlier_features()
    table = published_table([row for row in rows if "." not in row["metric"]])
    heading = f"Outlier features: {len(found)}" if len(found) else "No outlier feature; the nearest ones"
    caption = f"{heading} (|x| ≥ {trace.alpha:g} in ≥ 25 % of layers and ≥ 6 % of positions)"
    shown = Table("features", caption, HEADERS, _cells(found if len(found) else features.head(3)), features, names=0)
    further = {
        "features_by_layer": trace.features(by="layer"),
        "hidden_states": trace.hidden_states(),
        "massive_activations": trace.massive_activations(),
        "attention_sinks": trace.attention_sinks(),
    }
    printed = f"{caption}\n\n{shown.form('simple')}\n\n{table.form('simple')}"
    drawings = [Drawing(draw.__name__, said, draw(trace)) for draw, said in CAPTIONS.items()]
    title = f"Outlier features of {short_name(rows[0]['model'])}"
    return Section(title, printed, [shown, table], drawings, [], further, rows)


def _cells(features: pd.DataFrame) -> list[list[str]]:
    return [
        [
            str(int(row["feature"])),
            f"{row['layers']:.0%}",
            f"{row['positions']:.1%}",
            f"{row['positions_mean']:.2%}",
            str(int(row["hits"])),
            "yes" if row["one_sided"] else "no",
            *(f"{row[name]:.1f}" for name in ("q1", "median", "q3", "max")),
        ]
        for row in features.to_dict("records")
    ]
