"""Fields of `quantization_config` that hold for single modules only."""

import re
from collections.abc import Iterator

import regex

from outliers.errors import UserError, shown

SECONDS = 1.0  # for one of a file's patterns and one name: more is an attack, or a mistake
# What auto-round calls the ways in which it packs words, and the method whose way that is.
PACKED_LIKE = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
WHOLE = 16  # bits, from which auto-round leaves a module as it is


def as_method(fields: dict) -> dict:
    """The fields as of the method that auto-round packs like, which has the same names; others as they are."""
    if fields.get("quant_method") != "auto-round":
        return fields
    method = PACKED_LIKE[fields.get("packing_format", "auto_round:auto_gptq").lower()]
    return fields | {"quant_method": method, "checkpoint_format": "gptq" if method == "gptq" else None}


def fields_of(fields: dict, module: str, name: str) -> dict | None:
    """The fields for a module of model `name`; None where it is not quantized."""
    for of_module in (*_dynamic(fields, module, name), *_extra(fields, module, name)):
        return of_module and fields | of_module
    return fields


def _dynamic(fields: dict, module: str, name: str) -> Iterator[dict | None]:
    """GPTQModel's: the first pattern that a name begins with counts; `-:` before it leaves the module out."""
    for pattern, of_module in (fields.get("dynamic") or {}).items():
        if _matches(regex.match, pattern.removeprefix("-:").removeprefix("+:"), module, name):
            yield None if pattern.startswith("-:") else of_module


def _extra(fields: dict, module: str, name: str) -> Iterator[dict | None]:
    """auto-round's: names of modules, or else patterns of them."""
    extra = fields.get("extra_config") or {}
    keys = [module] if module in extra else [key for key in extra if re.search(r"[^\w.\-]", key)]
    for key in keys:
        if key == module or _matches(regex.search, key, module, name):
            of_module = {field: value for field, value in extra[key].items() if value is not None}
            yield None if of_module.get("bits", 0) >= WHOLE else of_module


def _matches(match, pattern: str, module: str, name: str) -> bool:
    try:
        return bool(match(pattern, module, timeout=SECONDS))
    except (regex.error, TimeoutError):
        raise UserError(
            f"the configuration of '{name}' names modules by {shown(pattern)} in its 'quantization_config', which is "
            "no pattern or one that takes too long; expected a regular expression"
        ) from None
