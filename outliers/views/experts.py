"""The experts of a mixture: the cost of each if it alone is left out, or quantized."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from outliers.quantization.schemes import BASELINE
from outliers.show.claims import NEXT, Claim, say
from outliers.show.maps import HIGHEST, Scale, maps_by_layer
from outliers.show.section import Drawing, Finding, Section, subject_of
from outliers.show.style import Panels, brief, figure_function, panels_of
from outliers.show.tables import MISSING, Table, cell
from outliers.show.value import exact, value_of

SHOWN = 20  # experts in a table: those that cost most, and as many of those that cost least


@figure_function
def expert_map(costs: Mapping[str, pd.DataFrame], *, ax: Axes | None = None) -> Panels:
    """Draw maps of experts by layers: the log-perplexity that each expert adds, on one scale; grey without a value.

    Example:
        >>> import pandas as pd
        >>> costs = pd.DataFrame({"layer": [0, 0], "expert": [0, 1], "cost": [0.02, -0.01]})
        >>> axes = outliers.plot.expert_map({"left out": costs})

    Args:
        costs: by the title of a panel a table with the columns `layer`, `expert` and `cost`, in nats a token.
    """
    maps = [table.pivot_table(index="expert", columns="layer", values="cost") for table in costs.values()]
    maps = [table.reindex(columns=range(int(table.columns.max()) + 1)) for table in maps]
    most = max(float(np.nanmax(table.abs().to_numpy())) for table in maps)
    size = 5.2, min(HIGHEST, 0.8 + len(maps) * min(6.0, 0.6 + 0.2 * len(maps[0])))
    panels = panels_of(ax, len(maps), 1, size, sharex=True)
    scale = Scale(Normalize(-most, most), colormaps["RdBu_r"].with_extremes(bad="0.8"))
    maps_by_layer(panels, dict(zip(brief(list(costs)), maps, strict=True)), scale, "expert", 16)
    return panels


COLUMNS = (
    ("left out", "{place}"),
    ("perplexity", "{perplexity:.2f}"),
    ("increase (%)", lambda row: MISSING if row["place"] == NOTHING else cell(".2f", row["damage"], row["error"], 100)),
)
NOTHING = "nothing"
CAPTION = (
    "Perplexity without each expert, the most costly first, and its increase. ±: standard error over the text of the "
    "difference from the model with all of its experts, paired."
)
SOME = f" Shown are the {SHOWN} that cost most and the {SHOWN} that cost least."
FIGURE = "Log-perplexity that each expert costs where it alone is left out."
MOST = Claim(
    "experts",
    by="cost",
    against=[NEXT, 0],
    yes="Expert {expert} of layer {layer} matters most: without it the perplexity changes by {cost:percent}, without "
    "the next, expert {next[expert]} of layer {next[layer]}, by {next[cost]:percent}.",
    no="No single expert stands out: without expert {expert} of layer {layer} the perplexity changes by "
    "{cost:percent}[[, without expert {next[expert]} of layer {next[layer]} by {next[cost]:percent}]].",
)
FREE = Claim(
    "experts",
    "Without any one of {free} of the {every} experts the perplexity changes by no more than twice its standard "
    "error[[; without any one of {better} it falls]].",
)


def drops_section(rows: list[dict]) -> Section:
    """Show the loss without each expert of a mixture: a table, a map and findings."""
    drops = expert_drops(rows)
    (whole,) = (row["value"] for row in rows if row["subject"] == "none")
    ordered = drops.sort_values("damage", ascending=False, kind="stable")
    is_short = len(ordered) <= 2 * SHOWN
    shown = ordered if is_short else pd.concat([ordered.head(SHOWN), ordered.tail(SHOWN)])
    nothing = pd.DataFrame([{"place": NOTHING, "perplexity": whole}])
    data = ordered.drop(columns="value")
    table = Table.of(
        "experts", CAPTION + ("" if is_short else SOME), COLUMNS, data, pd.concat([nothing, shown], ignore_index=True)
    )
    drawings = [Drawing.of("experts", FIGURE, expert_map({"": drops}))]
    title = f"Experts of {subject_of(rows[0] | {'variant': rows[0].get('scheme', BASELINE)})}"
    return Section(title, rows, [table], drawings, findings=drops_findings(drops))


def expert_drops(rows: list[dict]) -> pd.DataFrame:
    """Return one row per expert that was left out.

    Columns are `layer`, `expert`, `place` (as in variants), `perplexity`, `damage` (its relative increase), `error`
    (the standard error of this over the text), `cost` (the increase of log-perplexity in nats a token), and `value`,
    the increase with its scatter.
    """
    (whole,) = (value_of(row)._replace(deviation=0.0) for row in rows if row["subject"] == "none")
    drops = []
    for row in (row for row in rows if row["subject"] == "expert"):
        change = value_of(row)._replace(deviation=0.0).increase_over(whole)
        place = {"layer": row["layer"], "expert": row["expert"]}
        place["place"] = f"layers.{row['layer']}.experts.{row['expert']}"
        values = {"damage": change.mean, "error": change.error, "cost": change.log_of_ratio().mean}
        drops.append({**place, "perplexity": row["value"], **values, "value": change})
    return pd.DataFrame(drops)


def drops_findings(drops: pd.DataFrame) -> list[Finding]:
    """State which expert matters most, and how many do not matter beyond the error of the text."""
    every = [row | {"cost": row["value"]} for row in drops.to_dict("records")]
    apart = [row for row in every if row["cost"].is_apart(exact(0.0))]
    better = sum(row["cost"].mean < 0 for row in apart) or None
    free = len(every) - len(apart)
    return [*say(MOST, every), *say(FREE, every if free or better else [], free=free, every=len(every), better=better)]
