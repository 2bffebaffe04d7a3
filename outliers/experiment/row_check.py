"""What a row may hold and must hold: rows come from files that a person, a kill or a disk may have changed."""

import json
import math
import re
from collections.abc import Callable

from outliers.errors import shown

MOST = 2**63  # of a whole number, as Parquet has them

# What is not here, such as what another version says, is a text, a number, true, false or null, or a list of them.
TEXTS = (
    *("experiment", "metric", "unit", "model", "checkpoint", "revision", "weights_hash", "quantized_from"),
    *("architecture", "dtype", "device", "device_name", "text", "tokens_hash", "protocol", "scheme", "kernels"),
    *("outlier_weights", "subject", "method", "role", "way", "task", "documents_hash", "hardware", "owner"),
    *("same_weights_as", "version", "code", "commit", "python", "torch", "transformers", "triton", "bitsandbytes"),
    *("lm_eval", "arithmetic", "calibration_hash", "projection"),
)
COUNTS = (
    *("parameters", "block", "blocks", "draws", "batch", "prompt", "tokens", "repeats", "bits", "gpus"),
    *("context", "context_used", "examples", "limit", "outputs", "weights_bytes", "peak_memory_bytes"),
)
FROM_ZERO = ("feature", "layer", "position", "token", "draw", "seed")
NUMBERS = (
    "value",
    "standard_deviation",
    "standard_error",
    "q1",
    "q3",
    "headroom",
    "unquantized_experts",
    "wall_seconds",
)
POSITIVE = ("alpha", "gigabytes", "weight_bits", "activation_bits")
# The commit of no clone, a limit that is none, the error of one example, the version of a task that has none.
MAY_BE_NULL = ("commit", "limit", "standard_error", "task_version")

Check = Callable[[object], bool]


def _is_text(value) -> bool:
    return isinstance(value, str)


def _is_whole(value) -> bool:
    return type(value) is int and abs(value) < MOST


def _is_count(value) -> bool:
    return _is_whole(value) and value > 0


def _is_number(value) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_dimension(value) -> bool:
    """As `outliers.specification.kinds.Shape` has it."""
    return re.fullmatch(r"[1-9]\d{0,9}x[1-9]\d{0,9}", value) is not None if _is_text(value) else _is_count(value)


# Field: what it is expected to be, and whether a value is that.
FIELDS: dict[str, tuple[str, Check]] = {
    **dict.fromkeys(TEXTS, ("a text", _is_text)),
    **dict.fromkeys(COUNTS, ("a whole number from 1 on", _is_count)),
    **dict.fromkeys(FROM_ZERO, ("a whole number from 0 on", lambda value: _is_whole(value) and value >= 0)),
    **dict.fromkeys(NUMBERS, ("a finite number", _is_number)),
    **dict.fromkeys(POSITIVE, ("a positive number", lambda value: _is_number(value) and value > 0)),
    "threads": ("a whole number from 1 on, or several as text", lambda value: _is_count(value) or _is_text(value)),
    "task_version": ("a text or a number", lambda value: _is_text(value) or _is_number(value)),
    **dict.fromkeys(("candidate", "streamed"), ("true or false", lambda value: isinstance(value, bool))),
    "features": ("a list of whole numbers", _list_of(lambda value: _is_whole(value) and value >= 0)),
    **dict.fromkeys(("roles", "where"), ("a list of texts", _list_of(_is_text))),
    "dimension": ("a whole number, or two as in 576x1536", _is_dimension),
}


def _is_other(value) -> bool:
    """What a field that is not known may hold."""
    return value is None or isinstance(value, str | bool) or _is_number(value) or _texts(value) or _numbers(value)


_texts, _numbers = _list_of(_is_text), _list_of(_is_number)
OTHER = ("a text, a number, true, false or null, or a list of texts or of numbers", _is_other)

# Values of these metrics are drawn on logarithmic axes, or divided by.
POSITIVE_METRICS = ("perplexity", "latency.", "linear_layer.")

# What tables and figures need of a row, by the beginning of its metric.
OF_MODELS = ("model", "parameters", "architecture", "dtype")
MEMORY = ("model", "parameters", "candidate", "context", "context_used", "batch")
MEASURED_ON = ("dtype", "device_name", "threads")
NEEDED: dict[str, tuple[str, ...]] = {
    "latency.": ("model", "scheme", "batch", "prompt", "tokens", "repeats", "q1", "q3", *MEASURED_ON),
    "linear_layer.": ("way", "dimension", "tokens", *MEASURED_ON),
    "zeroshot.": (*OF_MODELS, "scheme", "task", "examples", "standard_error", "lm_eval"),
    "fits": (*MEMORY, "bits", "hardware", "gpus", "gigabytes", "headroom"),
    "weights": (*MEMORY, "bits"),
    **dict.fromkeys(("parameters", "cache", "activations"), MEMORY),
    "": OF_MODELS,
}
IF_THERE = {"subject": ("features", "seed"), "weights_hash": ("parameters", "dtype")}  # if the first, then the others


def parse_row(line: bytes) -> dict:
    """A row of one line; null in a field that never is null stands for no field.

    Raises:
        ValueError: it is none, and why.
    """
    try:
        row = json.loads(line.decode(), parse_constant=_refuse_constant, object_pairs_hook=_without_twins)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    row = {field: value for field, value in row.items() if value is not None or _may_be_null(field)}
    check_row(row)
    return row


def check_row(row: dict) -> None:
    """Raise ValueError, which says why, if a field of a row holds what it never does."""
    for field, value in row.items():
        expected, fits = FIELDS.get(field, OTHER)
        if not fits(value) and not (value is None and _may_be_null(field)):
            raise ValueError(f"'{field[:40]}' is {_shown(value)}, expected {expected}")
        if isinstance(value, str):
            _check_text(field, value)
    if str(row.get("metric")).startswith(POSITIVE_METRICS) and row.get("value", 1) <= 0:
        raise ValueError(f"'value' of {row['metric'][:40]} is {_shown(row['value'])}, expected a positive number")


def lacking(row: dict) -> list[str]:
    """What a row lacks to be finished."""
    metric = row.get("metric", "")
    needed = next(fields for beginning, fields in NEEDED.items() if metric.startswith(beginning))
    others = [other for field, needed in IF_THERE.items() if field in row for other in needed]
    return [field for field in ("metric", "value", *needed, *others) if field not in row]


def _may_be_null(field: str) -> bool:
    return field not in FIELDS or field in MAY_BE_NULL


def _check_text(field: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"'{field[:40]}' holds half a character, which no UTF-8 has") from None


def _shown(value) -> str:
    return shown(value, json.dumps) if type(value) is not int or _is_whole(value) else "a number too large"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _without_twins(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")
    return found
