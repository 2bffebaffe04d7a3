"""What a trace that is read from files must be: all of its statistics, each as large and within the bounds it has."""

import math

import numpy as np
import pandas as pd
import torch

from outliers.models.anatomy import ROLES
from outliers.terminal.printing import is_line
from outliers.text.tokens import LONGEST_NAME
from outliers.tracing.sketch import BUCKETS
from outliers.tracing.tokens import BEFORE, EXTREMES, NONE, PLACES, TYPES, WINDOW

FIELDS = {"alpha": (int, float), "roles": list, "block": int, "sequences": int, "heads": int}
FIELDS |= dict.fromkeys(("about", "names"), dict)

# Statistic: dtype, shape (L layers, T positions, h features of the role or the residual stream, V token ids, n of
# them that occurred, K places with W ids around each), and of counts what they can be at most, a product of those, of N
# sequences and A attention heads.
OF_ROLE = {
    "min": ("float32", "Lh"),
    "max": ("float32", "Lh"),
    "largest": ("float64", "L5"),
    "rest.max": ("float32", "L"),
    "hits": ("int64", "Lh", "TN"),
    "sequences_hit": ("int64", "Lh", "N"),
    "sum": ("float64", "Lh"),
    "squares": ("float64", "Lh"),
    "squares_rest": ("float64", "Lh"),
    "kurtosis_tensor": ("float64", "L2"),
    "kurtosis_token": ("float64", "L2"),
}
OF_STREAM = {"magnitude": ("float64", "Th")}
OF_VIEW = {"layers_hit": ("int64", "h", "LN"), "positions_hit": ("int64", "h", "TN")}
OF_RESIDUAL = {
    "largest": ("float64", "L5"),
    "sum_of_max": ("float64", "L"),
    "sum_of_ratios": ("float64", "L"),
    "massive": ("int64", "Lh", "TN"),
    "massive_positions": ("int64", "T", "LhN"),
    "massive_tokens": ("int64", "V", "LhTN"),
}
OF_ATTENTION = {"sinks": ("int64", "LT", "NA"), "sinks_tokens": ("int64", "V", "LTNA")}
OF_TEXT = {"sequences": ("int64", "T", "N")}
OF_TOKENS = {"ids": ("int64", "n", "V"), "positions": ("int64", "n", "TN")}
OF_CARRIERS = {
    "token_sum": ("float64", "nh"),
    "token_max": ("float32", "nh"),
    **dict.fromkeys(EXTREMES, ("float32", "hK")),
    **{f"{extreme}_at": ("int64", "hKW") for extreme in EXTREMES},
}
MAY_BE_INFINITE = "residual.sum_of_ratios"  # where the median is 0


def check_header(header: dict) -> None:
    """Raise ValueError if a field of a trace but its statistics is missing or not what it is."""
    for name, kind in FIELDS.items():
        if not isinstance(header.get(name), kind) or isinstance(header[name], bool):
            raise ValueError(f"'{name}' is {str(header.get(name))[:40]}")
    if set(header) != set(FIELDS):
        raise ValueError(f"an unknown field '{min(set(header) - set(FIELDS))[:40]}'")
    if header["roles"] != [role for role in ROLES if role in header["roles"]] or not header["roles"]:
        raise ValueError(f"'roles' are {str(header['roles'])[:60]}")
    if not 0 < header["alpha"] < math.inf or header["block"] < 2 or header["sequences"] < 1 or header["heads"] < 0:
        raise ValueError("its alpha or one of its numbers is out of range")
    for token, said in header["names"].items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and _is_name(said)):
            raise ValueError(f"the name of token {token[:20]} is {str(said)[:60]}")


def _is_name(said) -> bool:
    """Whether it is what a token is called, which can be printed, and a type."""
    if not isinstance(said, list) or len(said) != 2 or not all(isinstance(one, str) for one in said):
        return False
    return is_line(said[0]) and len(said[0]) <= LONGEST_NAME and said[1] in TYPES[1:]


def check_statistics(
    header: dict, statistics: dict[str, torch.Tensor], views: list[tuple], stream: tuple, of_tokens: list[str]
) -> None:
    """Raise ValueError if a statistic is missing, of another dtype or shape than it has, or out of its range.

    views: the sets of roles over which hits are united. stream: the roles of the residual stream. of_tokens: the states
    of which it has what tokens carry them, if it has tokens.
    """
    tables = {role: OF_ROLE | (OF_STREAM if role in stream else {}) for role in header["roles"]}
    tables |= {"residual": OF_RESIDUAL, "text": OF_TEXT} | ({"attention": OF_ATTENTION} if header["heads"] else {})
    for view in views:
        tables["+".join(view)] = tables.get("+".join(view), {}) | OF_VIEW
    if header["names"]:
        tables |= {"tokens": OF_TOKENS} | {state: tables[state] | OF_CARRIERS for state in of_tokens}
    expected = {f"{state}.{name}" for state, table in tables.items() for name in table}
    if missing := sorted(expected - set(statistics)):
        raise ValueError(f"it is of an earlier version, without {missing[0]}")
    if unknown := sorted(set(statistics) - expected):
        raise ValueError(f"it has an unknown statistic {unknown[0][:60]}")
    sizes = {"T": header["block"], "N": header["sequences"], "A": header["heads"], "2": 2, "5": 5}
    sizes |= {"L": len(statistics["residual.largest"]), "V": len(statistics["residual.massive_tokens"])}
    sizes |= {"n": len(statistics.get("tokens.ids", ())), "K": PLACES, "W": 1 + WINDOW}
    if not sizes["L"] or not sizes["V"] or (header["names"] and not sizes["n"]):
        raise ValueError("it has no layer or no token")
    for state, table in tables.items():
        sizes["h"] = _width(statistics, state)
        for name, (dtype, shape, *most) in table.items():
            _check(f"{state}.{name}", statistics[f"{state}.{name}"], dtype, [sizes[size] for size in shape])
            if most and int(statistics[f"{state}.{name}"].max()) > math.prod(sizes[size] for size in most[0]):
                raise ValueError(f"{state}.{name} counts more than there is")
        if "largest" in table:
            _check_places(f"{state}.largest", statistics[f"{state}.largest"], [sizes[size] for size in "hTV"])
    _check_text(header, statistics["text.sequences"])
    if header["names"]:
        _check_tokens(header, statistics, sizes["V"], of_tokens)


def _check_text(header: dict, sequences: torch.Tensor) -> None:
    """How many sequences reach each position: all the first two, and fewer and fewer the others."""
    if (sequences[:2] != header["sequences"]).any() or (sequences.diff() > 0).any() or not sequences[-1]:
        raise ValueError("its sequences are not as long as it says")


def _check_tokens(header: dict, statistics: dict[str, torch.Tensor], vocabulary: int, states: list[str]) -> None:
    """Token ids in ascending order, all named, that are at all positions, and places that are there."""
    ids, positions, named = statistics["tokens.ids"], statistics["tokens.positions"], set(map(int, header["names"]))
    if (ids.diff() <= 0).any() or not set(ids.tolist()) <= named | {vocabulary} or max(named) >= vocabulary:
        raise ValueError("its tokens are not in order, or have no names")
    if positions.sum() != statistics["text.sequences"].sum() or not positions.all():
        raise ValueError("its tokens are not at as many positions as there are")
    known = torch.tensor([*named, vocabulary])
    for name in (f"{state}.{extreme}" for state in states for extreme in EXTREMES):
        there, at = statistics[name] != NONE, statistics[f"{name}_at"]
        if (statistics[name][there] < 0).any() or (at[there][:, 0] < 1).any():
            raise ValueError(f"{name} is at a place that is not there")
        if (at[..., 0] >= header["block"]).any() or not torch.isin(at[..., 1:], known).all():
            raise ValueError(f"{name}_at has a position or a token that is not there")
        if (at[there][:, 1 + BEFORE] == vocabulary).any():
            raise ValueError(f"{name}_at is at no token")


def _width(statistics: dict[str, torch.Tensor], state: str) -> int:
    """How many features a state has; those that are looked at together have as many as the first of them."""
    of_state = dict.fromkeys(("residual", "attention", "text", "tokens"), "residual.massive")
    features = statistics[of_state.get(state, f"{state.partition('+')[0]}.min")]
    if features.ndim != 2 or not features.shape[1]:
        raise ValueError(f"the features of {state} are of shape {tuple(features.shape)}")
    if any(statistics[f"{role}.min"].shape != features.shape for role in state.split("+")[1:]):
        raise ValueError(f"the features of {state} are not as many")
    return features.shape[1]


def _check(name: str, tensor: torch.Tensor, dtype: str, shape: list[int]) -> None:
    if str(tensor.dtype) != f"torch.{dtype}" or list(tensor.shape) != shape:
        found = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        raise ValueError(f"{name} is {found}, expected {dtype} {tuple(shape)}")
    if dtype == "int64" and int(tensor.min()) < 0:
        raise ValueError(f"{name} counts less than nothing")
    if dtype != "int64" and name != MAY_BE_INFINITE and not torch.isfinite(tensor).all():
        raise ValueError(f"{name} holds NaN or inf")


def _check_places(name: str, largest: torch.Tensor, sizes: list[int]) -> None:
    """Feature, position and token id of the largest entries, as numbers below those sizes."""
    places = largest[:, 2:]
    if not ((places >= 0) & (places < torch.tensor(sizes)) & (places == places.floor())).all():
        raise ValueError(f"{name} is at a place that is not there")


def check_sketch(table: pd.DataFrame, roles: list[str], statistics: dict[str, torch.Tensor]) -> None:
    """Raise ValueError unless a sketch counts as many hit values of each feature, layer and role as there are hits.

    table: columns layer, role, feature, bucket and count, int64. roles: those whose hits it has.
    """
    if (table["bucket"].abs() >= BUCKETS).any() or (table["bucket"] == 0).any() or (table["count"] < 1).any():
        raise ValueError("its sketch has a bucket or a count that is none")
    if table.duplicated(["layer", "role", "feature", "bucket"]).any():
        raise ValueError("its sketch has a bucket twice")
    if not table["role"].isin([ROLES.index(role) for role in roles]).all():
        raise ValueError("its sketch has a role that is not traced")
    for role in roles:
        hits = statistics[f"{role}.hits"].numpy()
        of_role = table[table["role"] == ROLES.index(role)]
        places = of_role[["layer", "feature"]].to_numpy()
        counted = np.zeros_like(hits)
        if not ((places >= 0) & (places < hits.shape)).all():
            raise ValueError("its sketch has a layer or a feature that is not there")
        np.add.at(counted, tuple(places.T), of_role["count"].to_numpy())
        if not np.array_equal(counted, hits):
            raise ValueError(f"its sketch counts other hits of {role} than its statistics")
