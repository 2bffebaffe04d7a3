"""Rows, the only form of results, and the types of their fields."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pydantic_core import from_json, to_json

from outliers.errors import UserError, shown

CANNOT_KEEP = "a row cannot be kept: "
ROW_PARTS = ("request", "provenance", "values", "run")
EARLIER = {"asked": "request", "facts": "provenance", "values": "values", "made": "run"}  # by names of version 0.2.0
LISTS = (list, tuple)
MACHINE = ("device_name", "threads", "python", "torch", "triton", "bitsandbytes")  # where a row was measured
LARGEST_INTEGER = 2**63  # whole numbers are smaller, as in Parquet
POSITIVE = ("perplexity", "damage.perplexity")  # metrics whose values are drawn on logarithmic axes, or divided by


class FieldType(NamedTuple):
    """The values that a field may have.

    expected: a phrase for messages. fits: whether a value is allowed.
    """

    expected: str
    fits: Callable[[object], bool]


def _is_number(value: object) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or (type(value) is int and abs(value) < LARGEST_INTEGER)


def _is_flat(value: object) -> bool:
    values = value if isinstance(value, LISTS) else (value,)
    return all(entry is None or isinstance(entry, str | bool) or _is_number(entry) for entry in values)


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST_INTEGER


TEXT = FieldType("text", lambda value: type(value) is str)
NUMBER = FieldType("a finite number", _is_number)
WHOLE = FieldType("a whole number from 0 on", _is_whole)
COUNT = FieldType("a whole number from 1 on", lambda value: _is_whole(value) and value > 0)
# The type of all other fields, which also become columns of tables.
FLAT = FieldType("text, a finite number, true, false, null, or a list of such", _is_flat)

UNITS = "unit_sums unit_counts unit_bytes"  # the units of a mean over a text: blocks, documents or questions
# Columns of tables whose kind is fixed, whichever part of a row has them, in the order of a line; other columns follow
# in the order in which they came.
COLUMNS = (
    (TEXT, "metric"),
    (NUMBER, "value"),
    (TEXT, "unit"),
    (NUMBER, "standard_deviation"),
    (FieldType("a finite number or null", lambda value: value is None or _is_number(value)), "standard_error"),
    (NUMBER, "paired_error q1 q3 bits_per_byte bits_per_byte_deviation bits_per_byte_error"),
    (WHOLE, "layer feature position token bytes"),
    (COUNT, "bits examples parameters context_used"),
    (TEXT, "role projection way checkpoint architecture"),
    (
        FieldType("a list of whole numbers", lambda value: isinstance(value, LISTS) and all(map(_is_whole, value))),
        "features",
    ),
    (FieldType("a list of finite numbers", lambda part: isinstance(part, LISTS) and all(map(_is_number, part))), UNITS),
    (TEXT, "experiment device_name failed"),
    (NUMBER, "wall_seconds headroom"),
    (WHOLE, "peak_memory_bytes"),
    (TEXT, "model text dtype scheme task hardware owner weights_hash tokens_hash code lm_eval"),
    (COUNT, "block blocks mask_seeds gpus context batch prompt tokens repeats"),
    (
        FieldType("a positive number", lambda value: _is_number(value) and value > 0),
        "alpha gigabytes weight_bits activation_bits cache_bits",
    ),
    (FieldType("true or false", lambda value: type(value) is bool), "candidate"),
)
FIELD_TYPES = {name: kind for kind, names in COLUMNS for name in names.split()}
NO_TEXT = {name for name, kind in FIELD_TYPES.items() if kind is not TEXT}
COLUMN_ORDER = {name: place for place, name in enumerate(FIELD_TYPES)}
FIELD_TYPES |= dict.fromkeys(("name", "variant"), TEXT)  # of a metric and of a request


def _check(request: object, provenance: object, values: object, run: object) -> None:
    _check_object("request", request, ("metric", "subject", "variant"), 3)
    _check_fields("request.metric", request["metric"], ("name",))
    _check_fields("request.subject", request["subject"])
    _check_fields("request", {"variant": request["variant"]})
    _check_fields("provenance", provenance)
    _check_fields("run", run)
    if type(values) is not list:
        raise ValueError(f"values: expected a list, got {shown(values)}")
    for number, value in enumerate(values):
        place = f"values.{number}"
        _check_fields(place, value, ("metric", "value"))
        if value["metric"].startswith(POSITIVE) and value["value"] <= 0:
            raise ValueError(f"{place}: 'value' of {value['metric'][:40]} is not a positive number")
    if bool(values) == ("failed" in run):
        raise ValueError("expected values, or in 'run' why it 'failed'")


def _check_object(place: str, part: object, needed: tuple[str, ...] = (), most: float = math.inf) -> None:
    """Raise ValueError unless a part is an object that has the needed fields, and at most `most` fields."""
    if type(part) is not dict or len(part) > most or not all(map(part.__contains__, needed)):
        raise ValueError(f"{place}: expected an object of {', '.join(needed) or 'fields'}, got {shown(part)}")


def _check_fields(place: str, part: object, needed: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless a part is an object that has the needed fields, with all values of their kinds."""
    _check_object(place, part, needed)
    for name, value in part.items():
        if type(value) is str and name not in NO_TEXT:  # first, as most are text: a million rows have thirty million
            continue
        kind = FIELD_TYPES.get(name, FLAT)
        if not kind.fits(value):
            raise ValueError(f"{place}.{name}: expected {kind.expected}, got {shown(value)}")


def _sorted(part: dict) -> dict:
    """Return a part that identifies a row, such as its provenance, with sorted keys."""
    names = sorted(part)
    return part.copy() if names == list(part) else {name: part[name] for name in names}


def _in_columns(part: dict) -> dict:
    """Return a part that does not identify a row with its keys in the order of the table columns."""
    return {name: part[name] for name in sorted(part, key=lambda name: COLUMN_ORDER.get(name, len(COLUMN_ORDER)))}


@dataclass(init=False, slots=True)
class Row:
    """The values of one metric of one subject under one variant.

    request: what identifies the row: subject, variant and metric, each with its parameters if they are not the default.
    provenance: what follows from the request and from the weights, tokens and code of the run. values: the numbers;
    further fields say what each is of: layer, role, feature, position, token, projection, … run: machine, versions,
    time and memory of the measurement. A row of a failed measurement has no values, and the reason as `failed` in
    `run`.

    Raises:
        UserError: a part holds a value that rows must not have, such as an infinite one.
    """

    request: dict
    provenance: dict
    values: list[dict]
    run: dict

    def __init__(self, request: dict, provenance: dict, values: list[dict], run: dict):
        try:
            _check(request, provenance, values, run)
        except ValueError as error:
            raise UserError(f"{CANNOT_KEEP}{error}") from None
        self._take(request, provenance, list(map(_in_columns, values)), _in_columns(run))

    @classmethod
    def read(cls, line: bytes) -> "Row":
        """Return the row of a line; raise ValueError if the line holds none."""
        parts = from_json(line)
        if isinstance(parts, dict) and parts.keys() == EARLIER.keys():
            parts = {EARLIER[name]: part for name, part in parts.items()}
        _check_object("the line", parts, ROW_PARTS, len(ROW_PARTS))
        _check(**parts)
        row = cls.__new__(cls)
        row._take(**parts)
        return row

    def _take(self, request: dict, provenance: dict, values: list[dict], run: dict) -> None:
        metric, subject = _sorted(request["metric"]), _sorted(request["subject"])
        self.request = {"metric": metric, "subject": subject, "variant": request["variant"]}
        self.provenance, self.values, self.run = _sorted(provenance), values, run

    @property
    def line(self) -> bytes:
        """The row as a line of a file; raises UserError if no file can hold it."""
        try:
            parts = {part: getattr(self, part) for part in ROW_PARTS}
            return json.dumps(parts, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError) as error:
            raise UserError(f"{CANNOT_KEEP}{error}") from None

    def records(self) -> list[dict]:
        """Return a flat dictionary for each value, as tables, figures and data frames take them.

        A failed row gives one, with NaN as the value of its metric.
        """
        request = self.request
        parameters = {name: value for name, value in request["metric"].items() if name != "name"}
        common = {**request["subject"], "variant": request["variant"], **self.provenance, **parameters}
        values = self.values or [{"metric": request["metric"]["name"], "value": math.nan}]
        return [{**common, **value, **self.run} for value in values]


def part_key(part: dict) -> bytes:
    """Return a part that identifies a row as bytes that do not depend on the order of its keys."""
    parts = {name: _sorted(value) if isinstance(value, dict) else value for name, value in part.items()}
    return to_json(_sorted(parts))
