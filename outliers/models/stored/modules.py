"""Fields of `quantization_config` that apply to single modules."""

import re
from collections.abc import Iterator

import regex

from outliers.errors import UserError, shown

SECONDS = 1.0  # time limit for matching a file's pattern with a name, which may be an attack or a mistake
# By auto-round's name of a packing: the method that packs in the same way.
PACKED_LIKE = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
# Fields of GPTQModel for single modules: those by which codes are read, and those that their search alone needed.
OF_LAYOUT = {"bits", "group_size", "sym", "desc_act", "static_groups", "format", "checkpoint_format", "pack_dtype"}
OF_SEARCH = {"act_group_aware", "damp_auto_increment", "damp_percent", "mse", "true_sequential"}
WHOLE = 16  # bits, from which on auto-round does not quantize a module


def as_method(fields: dict) -> dict:
    """Rewrite auto-round's fields as those of the method that packs in the same way; return others unchanged."""
    if fields.get("quant_method") != "auto-round":
        return fields
    method = PACKED_LIKE[fields.get("packing_format", "auto_round:auto_gptq").lower()]
    return fields | {"quant_method": method, "checkpoint_format": "gptq" if method == "gptq" else None}


def module_fields(fields: dict, module: str, name: str) -> dict | None:
    """Return the fields for a module of model `name`; None if it is not quantized."""
    for own in (*_dynamic(fields, module, name), *_extra(fields, module, name)):
        return own and fields | own
    return fields


def _dynamic(fields: dict, module: str, name: str) -> Iterator[dict | None]:
    """Yield GPTQModel's fields of a module for each pattern that matches a prefix; None if `-:` before it excludes the
    module."""
    for pattern, own in (fields.get("dynamic") or {}).items():
        if _matches(regex.match, pattern.removeprefix("-:").removeprefix("+:"), module, name):
            if unknown := sorted((own or {}).keys() - OF_LAYOUT - OF_SEARCH):
                raise UserError(
                    f"the configuration of '{name}' gives modules {shown(pattern)} the field {shown(unknown[0])} in "
                    f"its 'quantization_config'; expected some of {', '.join(sorted(OF_LAYOUT))}: use the model that "
                    "they were made of"
                )
            yield None if pattern.startswith("-:") else own


def _extra(fields: dict, module: str, name: str) -> Iterator[dict | None]:
    """Yield auto-round's fields of a module, given by module name, or else by pattern."""
    extra = fields.get("extra_config") or {}
    keys = [module] if module in extra else [key for key in extra if re.search(r"[^\w.\-]", key)]
    for key in keys:
        if key == module or _matches(regex.search, key, module, name):
            own = {field: value for field, value in extra[key].items() if value is not None}
            yield None if own.get("bits", 0) >= WHOLE else own


def _matches(match, pattern: str, module: str, name: str) -> bool:
    try:
        return bool(match(pattern, module, timeout=SECONDS))
    except (regex.error, TimeoutError):
        raise UserError(
            f"the configuration of '{name}' names modules by {shown(pattern)} in its 'quantization_config', which is "
            "no pattern or one that takes too long; expected a regular expression"
        ) from None
