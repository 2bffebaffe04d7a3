"""The explorer of origins."""

from collections.abc import Mapping, Sequence

import pandas as pd

from outliers.metrics.origins import PARTS, SINGLE
from outliers.plot.origins import AT, BARS, BEFORE, GATES, name_of, parts_of
from outliers.show.explorer import Explorer
from outliers.show.style import COLORS
from outliers.variants.edges import Place

FEATURES = 8  # at most
WRITERS = 6  # of a part, those with the largest means, and as many with the largest terms at the first position
DIGITS = ".5g"  # of a number


def origins_explorer(rows: pd.DataFrame, of: str, readers: Mapping[str, Sequence[Place]]) -> Explorer:
    """The contributions of each part of a layer to a feature, its writers one by one, states and gates.

    rows: of the metric `origins`, of one model under one variant; of: what it is called. readers: of a feature the
    places that read it, where that was measured.
    """
    rows = rows.reindex(columns=rows.columns.union(["count"], sort=False))  # which none has where all are named
    by_feature = [group for _, group in rows[rows["feature"].notna()].groupby("feature", sort=False)]
    content = {
        "places": [words for _, words in AT.values()],
        "bars": {
            part: {"color": COLORS[color], "pattern": pattern, "beside": beside}
            for part, (color, pattern, beside) in BARS.items()
        },
        "features": [_feature(group, readers) for group in by_feature[:FEATURES]],
        "left": len(by_feature[FEATURES:]),
    }
    return Explorer(f"Explore the writers of features of {of}", content)


def _feature(rows: pd.DataFrame, readers: Mapping[str, Sequence[Place]]) -> dict:
    states, writers, gates = (rows[rows["metric"] == f"origins.{kind}"] for kind in ("state", "writer", "gate"))
    parts = parts_of(rows).to_dict("records")
    by_layer = dict(iter(writers.groupby(writers["layer"].fillna(BEFORE))))
    feature = int(rows["feature"].iloc[0])
    return {
        "feature": feature,
        "readers": [place.written for place in readers.get(str(feature), [])],
        "states": [_at_places(state) for state in states.to_dict("records")],
        "parts": [
            {
                "layer": part["layer"],
                "part": part["part"],
                "values": _at_places(part),
                "writers": _writers(by_layer[part["layer"]], part["part"]),
            }
            for part in parts
        ],
        "gates": [_gate(gate, part) for gate in gates.to_dict("records") for part in _read_by(gate)],
    }


def _writers(rows: pd.DataFrame, part: str) -> list[dict]:
    """The writers of a part of a layer that write most, each with the tokens on which it does; last, all others."""
    rows = rows[rows["writer"].isin(PARTS[part])]
    known = rows[rows["count"].isna()]
    largest = {index for column, _ in AT.values() for index in known[column].abs().nlargest(WRITERS).index}
    writers = [
        {
            "name": name_of(writer),
            "values": _at_places(writer),
            "magnitude": _short(writer["magnitude"]),
            "most": _most(writer) if writer["writer"] in SINGLE else [],
        }
        for writer in rows.loc[sorted(largest)].to_dict("records")
    ]
    others = rows.drop(index=largest)
    if len(others):
        count = int(others["count"].fillna(1).sum())
        writers.append(
            {"name": f"{count:,} others", "values": _at_places(others[["value", "first"]].sum()), "most": []}
        )
    return writers


def _most(writer: Mapping) -> list[list]:
    """The tokens on which a writer writes most, with their positions and its terms."""
    terms = zip(writer["largest_tokens"], writer["largest_positions"], writer["largest"], strict=True)
    return [[token, position, _short(term)] for token, position, term in terms]


def _read_by(gate: Mapping) -> list[str]:
    """The readers of the output of a norm."""
    return [part for role, part in GATES.items() if role in gate["role"].split("+")]


def _gate(gate: Mapping, part: str) -> dict:
    return {
        "layer": int(gate["layer"]),
        "part": part,
        "norm": gate["norm"],
        "gain": _short(gate["value"]),
        "median": _short(gate["median"]),
        "rank": int(gate["rank"]),
        "before": [_short(gate["before"]), _short(gate["first_before"])],
        "behind": [_short(gate["behind"]), _short(gate["first_behind"])],
    }


def _at_places(values: Mapping) -> list[float]:
    return [_short(values[column]) for column, _ in AT.values()]


def _short(value: float) -> float:
    return float(f"{value:{DIGITS}}")
