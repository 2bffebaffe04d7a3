"""A trace in two files, and the one schema that is declared for them: types, dtypes, shapes and ranges."""

import io
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import pyarrow
import torch
from pyarrow import ArrowException, parquet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from outliers.criterion import CROSS, PAPER, RESIDUAL, ROLES
from outliers.errors import UserError, reason_of
from outliers.files import check_file, write_whole
from outliers.terminal.printing import is_line
from outliers.text.tokens import LONGEST_NAME
from outliers.tracing.sketch import BUCKETS, pack_keys, unpack_keys
from outliers.tracing.statistics import tables_of
from outliers.tracing.tokens import EXTREMES, TYPES

# Roles with quartiles of each feature; so many feed-forward units have hits that theirs grow for long.
SKETCHED = (*PAPER, *CROSS)
SKETCH = ("layer", "role", "feature", "bucket", "count")  # columns
MAY_BE_INFINITE = "residual.sum_of_ratios"  # where the median is 0


def _name(text: str) -> str:
    if not is_line(text) or len(text) > LONGEST_NAME:
        raise ValueError("expected the name of a token in one line")
    return text


Module = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class Header(BaseModel):
    """The description of a trace beside its statistics and its sketch, see `outliers.tracing.result.Trace`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    roles: Annotated[tuple[Literal[*ROLES], ...], Field(min_length=1)]
    block: Annotated[int, Field(ge=2)]
    sequences: PositiveInt
    heads: NonNegativeInt
    stack: str = ""
    first_layer: NonNegativeInt = 0
    about: dict
    names: dict[NonNegativeInt, tuple[Annotated[str, AfterValidator(_name)], Literal[TYPES[1:]]]] = {}
    architecture: str = ""
    experts: NonNegativeInt = 0
    modules: dict[Literal[*ROLES, RESIDUAL], list[Annotated[list[Module], Field(min_length=1)]]] = {}


def write(stem: Path, header: str, statistics: dict[str, torch.Tensor], sketch: pd.DataFrame) -> None:
    """Write `stem`.safetensors and `stem`.parquet, each with the header."""
    buffer, metadata = io.BytesIO(), {"trace": header}
    counts = pyarrow.Table.from_pandas(sketch, preserve_index=False)
    parquet.write_table(counts.replace_schema_metadata(metadata), buffer)
    write_whole(stem.with_name(f"{stem.name}.parquet"), buffer.getvalue())
    write_whole(stem.with_name(f"{stem.name}.safetensors"), save(statistics, metadata))


def read(stem: str) -> tuple[Header, dict[str, torch.Tensor], Counter]:
    """The content that `write` wrote; raise UserError where it is missing or damaged, or of another kind than is
    declared here.
    """
    try:
        text, statistics = _read_statistics(Path(f"{stem}.safetensors"))
        beside, table = _read_table(Path(f"{stem}.parquet"), statistics)
        if text != beside:
            raise UserError(f"'{stem}.safetensors' and '{stem}.parquet' are of different traces; trace again")
        header = Header.model_validate_json(text)
        if "text.sequences" not in statistics:  # of an earlier version, whose sequences were of one length
            every = statistics["residual.massive_positions"]
            statistics["text.sequences"] = torch.full_like(every, header.sequences)
        check_statistics(header, statistics)
        return header, statistics, _sketch_of(table, header.roles, statistics)
    except (OSError, KeyError, TypeError, ValueError, RecursionError, ArrowException, SafetensorError) as error:
        raise UserError(
            f"cannot read a trace from '{stem}.safetensors' and .parquet: {reason_of(error, 200)}; trace again"
        ) from None


def _read_statistics(path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    check_file(path)
    with safe_open(path, "pt") as file:
        header = (file.metadata() or {})["trace"]
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping


def _read_table(path: Path, statistics: dict[str, torch.Tensor]) -> tuple[str, pd.DataFrame]:
    """The header beside a sketch, and the sketch; a file that claims more rows than there are hits is not read."""
    check_file(path)
    with parquet.ParquetFile(path) as file:
        header = (file.schema_arrow.metadata or {})[b"trace"].decode()
        kinds = {field.name: str(field.type) for field in file.schema_arrow}
        hits = sum(int(value.sum()) for name, value in statistics.items() if name.endswith(".hits"))
        if kinds != dict.fromkeys(SKETCH, "int64") or file.metadata.num_rows > hits:
            raise ValueError(f"its sketch has {file.metadata.num_rows:,} rows of {str(kinds)[:120]} for {hits:,} hits")
        table = file.read()
        if any(column.null_count for column in table.columns):
            raise ValueError("its sketch has empty places")
        return header, table.to_pandas(ignore_metadata=True)


def check_statistics(header: Header, statistics: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if a statistic is missing, unknown, of another dtype or shape, or out of its range."""
    tables = tables_of(header.roles, bool(header.heads), bool(header.names), bool(header.experts))
    expected = {f"{state}.{name}" for state, table in tables.items() for name in table}
    if missing := sorted(expected - set(statistics)):
        raise ValueError(f"it is of an earlier version, without {missing[0]}")
    if unknown := sorted(set(statistics) - expected):
        raise ValueError(f"it has an unknown statistic {unknown[0][:60]}")
    sizes = {"T": header.block, "L": len(statistics["residual.largest"]), "E": header.experts}
    if any(len(of_layers) != sizes["L"] for of_layers in header.modules.values()):
        raise ValueError("its modules are not those of its layers")
    sizes |= {"V": len(statistics["residual.massive_tokens"]), "n": len(statistics.get("tokens.ids", ()))}
    for state, table in tables.items():
        role = state.partition("+")[0]
        sizes["h"] = (0, *statistics[f"{role}.min" if role in header.roles else "residual.massive"].shape)[-1]
        for name, (dtype, shape) in table.items():
            size = [sizes.get(letter, letter) for letter in shape]
            _check(f"{state}.{name}", statistics[f"{state}.{name}"], dtype, size)
        _check_places(state, statistics, table, [sizes[letter] for letter in "hTV"])
    if not statistics["text.sequences"].all() or (statistics["text.sequences"] > header.sequences).any():
        raise ValueError("its sequences are not as many as it says")
    if header.names and (statistics["tokens.ids"].diff() <= 0).any():
        raise ValueError("its tokens are not in order")


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != shape or not tensor.numel():
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {tuple(shape)}")
    if not dtype.is_floating_point and tensor.min() < 0:
        raise ValueError(f"{name} counts less than nothing")
    if dtype.is_floating_point and name != MAY_BE_INFINITE and not tensor.isfinite().all():
        raise ValueError(f"{name} holds NaN or inf")


def _check_places(state: str, statistics: dict[str, torch.Tensor], table: dict, sizes: list[int]) -> None:
    """See that features, positions and token ids are below their sizes; the id of no token is the vocabulary's size."""
    _, block, vocabulary = sizes
    if "largest" in table:
        places = statistics[f"{state}.largest"][:, 2:]
        if not ((places >= 0) & (places < torch.tensor(sizes)) & (places == places.floor())).all():
            raise ValueError(f"{state}.largest is at a place that is not there")
    for extreme in EXTREMES if EXTREMES[0] in table else ():
        at = statistics[f"{state}.{extreme}_at"]
        if (at[..., 0] >= block).any() or (at[..., 1:] > vocabulary).any():
            raise ValueError(f"{state}.{extreme}_at has a position or a token that is not there")


def _sketch_of(table: pd.DataFrame, roles: tuple[str, ...], statistics: dict[str, torch.Tensor]) -> Counter:
    """The counts of a table by key; raise ValueError unless they are as many as the hits of each place."""
    columns = [torch.from_numpy(table[name].to_numpy().copy()) for name in SKETCH]
    keys, counts, buckets = pack_keys(*columns[:-1]), columns[-1], columns[-2]
    if ((buckets.abs() >= BUCKETS) | (buckets == 0) | (counts < 1)).any() or len(keys.unique()) < len(keys):
        raise ValueError("its sketch has a bucket or a count that is none, or a bucket twice")
    counted = pd.DataFrame({**unpack_keys(keys.numpy()), "count": counts}).groupby(list(SKETCH[:3]))["count"].sum()
    hits = {
        (layer, ROLES.index(role), feature): int(statistics[f"{role}.hits"][layer, feature])
        for role in roles
        if role in SKETCHED
        for layer, feature in statistics[f"{role}.hits"].nonzero().tolist()
    }
    if counted.to_dict() != hits:
        raise ValueError("its sketch counts other hits than its statistics")
    return Counter(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
