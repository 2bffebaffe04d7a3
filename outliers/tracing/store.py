"""Trace files, and their schema: types, dtypes, shapes and ranges."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import torch
from pyarrow import ArrowException, parquet
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from outliers.criterion import RESIDUAL, ROLES
from outliers.errors import UserError, reason_of
from outliers.files import check_file, write_whole
from outliers.terminal.printing import is_line
from outliers.text.tokens import LONGEST_NAME
from outliers.tracing.sketch import KEYED, pack_keys, unpack_keys
from outliers.tracing.statistics import SKETCHED, tables_of
from outliers.tracing.tokens import EXTREMES, TYPES

KEYS, COUNTS = "sketch.keys", "sketch.counts"  # see `outliers.tracing.sketch.pack_keys`
MAY_BE_INFINITE = "residual.sum_of_ratios"  # if the median is 0


def _checked_name(text: str) -> str:
    if not is_line(text) or len(text) > LONGEST_NAME:
        raise ValueError("expected the name of a token in one line")
    return text


StateName = Annotated[str, Field(pattern=rf"^({'|'.join(ROLES)})( [1-9][0-9]{{0,2}})?$")]
Module = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class TraceHeader(BaseModel):
    """The fields of a trace beside its statistics and its sketch, see `outliers.tracing.result.Trace`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    roles: Annotated[tuple[StateName, ...], Field(min_length=1)]
    block: Annotated[int, Field(ge=2)]
    sequences: PositiveInt
    heads: NonNegativeInt
    stack: str = ""
    first_layer: NonNegativeInt = 0
    labels: Annotated[dict, Field(validation_alias=AliasChoices("labels", "about"))]  # "about" up to version 0.2.0
    names: dict[NonNegativeInt, tuple[Annotated[str, AfterValidator(_checked_name)], Literal[TYPES[1:]]]] = {}
    architecture: str = ""
    experts: NonNegativeInt = 0
    modules: dict[StateName | Literal[RESIDUAL], list[list[Module]]] = {}
    widths: dict[StateName, list[NonNegativeInt]] = {}


def write_trace(path: Path, header: str, statistics: dict[str, torch.Tensor], sketch: Counter) -> None:
    """Write the header, the statistics, and the sketch: its keys in ascending order and their counts, int64 (keys,)."""
    keys = torch.tensor(sorted(sketch), dtype=torch.int64)
    counts = torch.tensor([sketch[key] for key in keys.tolist()], dtype=torch.int64)
    write_whole(path, save(statistics | {KEYS: keys, COUNTS: counts}, {"trace": header}))


def read_trace(path: Path) -> tuple[TraceHeader, dict[str, torch.Tensor], Counter]:
    """Read a file of `write_trace`; raise UserError if it is missing, damaged, or does not fit the schema."""
    try:
        check_file(path)
        with safe_open(path, "pt") as file:
            header = TraceHeader.model_validate_json((file.metadata() or {})["trace"])
            statistics = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        if KEYS not in statistics:
            hits = sum(int(value.sum()) for name, value in statistics.items() if name.endswith(".hits"))
            statistics |= _read_earlier_sketch(path.with_suffix(".parquet"), hits)
        keys, counts = statistics.pop(KEYS), statistics.pop(COUNTS)
        if "text.sequences" not in statistics:  # an earlier version, in which all sequences had one length
            every = statistics["residual.massive_positions"]
            statistics["text.sequences"] = torch.full_like(every, header.sequences)
        check_statistics(header, statistics)
        _check_sketch(keys, counts, {role: statistics[f"{role}.hits"] for role in header.roles if role in SKETCHED})
        return header, statistics, Counter(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
    except (OSError, LookupError, TypeError, ValueError, RecursionError, ArrowException, SafetensorError) as error:
        raise UserError(f"cannot read a trace from '{path}': {reason_of(error, 200)}; trace again") from None


def _read_earlier_sketch(path: Path, most: int) -> dict[str, torch.Tensor]:
    """Return the keys and counts of a sketch that earlier versions stored in its own file; most: the largest number of
    rows."""
    check_file(path)
    with parquet.ParquetFile(path) as file:
        if file.metadata.num_rows > most:
            raise ValueError(f"its sketch has {file.metadata.num_rows:,} rows for {most:,} hits")
        table = file.read(columns=["layer", "role", "feature", "bucket", "count"])
    *columns, counts = (torch.from_numpy(column.to_numpy().copy()) for column in table.columns)
    return {KEYS: pack_keys(*columns), COUNTS: counts}


def check_statistics(header: TraceHeader, statistics: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if a statistic is missing, unknown, of another dtype or shape, or out of range."""
    tables = tables_of(header.roles, bool(header.heads), bool(header.names), bool(header.experts))
    expected = {f"{state}.{name}" for state, table in tables.items() for name in table}
    if missing := sorted(expected - set(statistics)):
        raise ValueError(f"it is of an earlier version, without {missing[0]}")
    if unknown := sorted(set(statistics) - expected):
        raise ValueError(f"it has an unknown statistic {unknown[0][:60]}")
    sizes = {"T": header.block, "L": len(statistics["residual.largest"]), "E": header.experts}
    if header.experts:
        units, features = (statistics[f"experts.{name}"].shape[-1] for name in ("max", "state_squares"))
        sizes |= {"u": units, "s": features, "X": sizes["L"] * sizes["E"]}
    if any(len(by_layer) != sizes["L"] for by_layer in header.modules.values()):
        raise ValueError("its modules are not those of its layers")
    for role, widths in header.widths.items():
        if len(widths) != sizes["L"] or max(widths) != statistics[f"{role}.min"].shape[1]:
            raise ValueError(f"the features of its {role} are not those of its layers")
    sizes |= {"V": len(statistics["residual.massive_tokens"]), "n": len(statistics.get("tokens.ids", ()))}
    for state, table in tables.items():
        role = state.partition("+")[0]
        sizes["h"] = (0, *statistics[f"{role}.min" if role in header.roles else "residual.massive"].shape)[-1]
        for name, (dtype, shape) in table.items():
            size = [sizes.get(letter, letter) for letter in shape]
            _check_statistic(f"{state}.{name}", statistics[f"{state}.{name}"], dtype, size)
        _check_places(state, statistics, table, [sizes[letter] for letter in "hTV"])
    if not statistics["text.sequences"].all() or (statistics["text.sequences"] > header.sequences).any():
        raise ValueError("its sequences are not as many as it says")
    if header.names and (statistics["tokens.ids"].diff() <= 0).any():
        raise ValueError("its tokens are not in order")


def _check_statistic(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != shape or not tensor.numel():
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {tuple(shape)}")
    if not dtype.is_floating_point and tensor.min() < 0:
        raise ValueError(f"{name} counts less than nothing")
    if dtype.is_floating_point and name != MAY_BE_INFINITE and not tensor.isfinite().all():
        raise ValueError(f"{name} holds NaN or inf")


def _check_places(state: str, statistics: dict[str, torch.Tensor], table: dict, sizes: list[int]) -> None:
    """Raise ValueError unless features, positions and token ids are in range; the vocabulary's size stands for no
    token."""
    _, block, vocabulary = sizes
    if "largest" in table:
        places = statistics[f"{state}.largest"][:, 2:]
        if not ((places >= 0) & (places < torch.tensor(sizes)) & (places == places.floor())).all():
            raise ValueError(f"{state}.largest is at a place that is not there")
    for extreme in EXTREMES if EXTREMES[0] in table else ():
        at = statistics[f"{state}.{extreme}_at"]
        if (at[..., 0] >= block).any() or (at[..., 1:] > vocabulary).any():
            raise ValueError(f"{state}.{extreme}_at has a position or a token that is not there")


def _check_sketch(keys: torch.Tensor, counts: torch.Tensor, hits: dict[str, torch.Tensor]) -> None:
    """Raise ValueError unless a sketch has the same counts as the hits, int64 (L, h) by role."""
    if (keys.dtype, counts.dtype, keys.shape) != (torch.int64, torch.int64, (len(counts),)):
        raise ValueError("its sketch is no keys and counts")
    if (keys.diff() <= 0).any() or (keys < 0).any() or (counts < 1).any():
        raise ValueError("its sketch has keys that are not in order, or a count that is none")
    layers, roles, features, buckets = (torch.from_numpy(part) for part in unpack_keys(keys.numpy()).values())
    if (buckets == 0).any() or not set(roles.tolist()) <= {KEYED.index(role) for role in hits}:
        raise ValueError("its sketch has a bucket or a role that is none")
    for role, of_role in hits.items():
        own = roles == KEYED.index(role)
        counted = torch.zeros_like(of_role).index_put_((layers[own], features[own]), counts[own], accumulate=True)
        if not counted.equal(of_role):
            raise ValueError("its sketch counts other hits than its statistics")
