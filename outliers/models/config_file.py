"""The plain JSON of `config.json`: impossible sizes are refused before anything is imported or built.

A file that passes may still describe no model; transformers then reports that.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from outliers.errors import UserError, reason_of, shown
from outliers.files import start_of
from outliers.models.names import known_configs
from outliers.models.weight_files import adapter_alone, state_of

FILE = "config.json"
LARGEST_FILE = 4 << 20  # bytes; names of 20,000 classes take one million
# Methods whose quantized weights can be dequantized, with the supported values of the relevant fields of
# `quantization_config` (`*` for each entry of an object or a list). A missing field has the first value.
_SWITCH = (False, True)
_VERSIONS = ("gptq", "gptq_v2")
_COMPRESSED = ("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
DEQUANTIZED: dict[str, dict[str, tuple]] = {
    "mxfp4": {},
    "bitsandbytes": {
        "load_in_8bit": _SWITCH,
        "load_in_4bit": _SWITCH,
        "bnb_4bit_quant_type": ("fp4", "nf4"),
        "bnb_4bit_quant_storage": ("uint8",),
    },
    "gptq": {
        "bits": (4, 2, 3, 8),
        "checkpoint_format": _VERSIONS,
        "format": _VERSIONS,
        "method": ("gptq",),
        "is_marlin_format": (False,),
        "pack_dtype": ("int32",),
        "dynamic.*.bits": (4, 2, 3, 8),
        "dynamic.*.sym": _SWITCH,
        "dynamic.*.desc_act": _SWITCH,
        "dynamic.*.static_groups": _SWITCH,
        "dynamic.*.format": _VERSIONS,
        "dynamic.*.checkpoint_format": _VERSIONS,
        "dynamic.*.pack_dtype": ("int32",),
        "sym": _SWITCH,
        "desc_act": _SWITCH,
        "static_groups": _SWITCH,
    },
    "awq": {
        "bits": (4,),
        "version": ("gemm",),
        "format": ("gemm",),
        "checkpoint_format": ("gemm",),
        "method": ("awq",),
        "pack_dtype": ("int32",),
        "zero_point": _SWITCH,
    },
    "auto-round": {
        "bits": (4, 2, 3, 8),
        "extra_config.*.bits": (4, 2, 3, 8, 16, 32),
        "packing_format": ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq"),
        "data_type": ("int",),
        "sym": _SWITCH,
    },
    "fp8": {
        "activation_scheme": ("dynamic", "static"),
        "fmt": ("e4m3", "float8_e4m3fn"),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
    },
    "hqq": {
        "quant_config.weight_quant_params.nbits": (8, 4, 3, 2, 1, 5, 6, 1.58),
        "quant_config.weight_quant_params.channel_wise": (True,),
    },
    "compressed-tensors": {
        "format": _COMPRESSED,
        "config_groups.*.format": _COMPRESSED,
        "config_groups.*.weights.type": ("int", "float"),
        "config_groups.*.weights.num_bits": (2, 4, 8),  # codes of other widths straddle words in some versions
        "config_groups.*.weights.strategy": ("tensor", "channel", "group", "block"),
        "config_groups.*.weights.symmetric": _SWITCH,
        "quantization_status": ("compressed", "frozen"),
        "sparsity_config.format": ("dense",),
        "transform_config.config_groups.*.apply.*.location": ("weight_input", "weight_output"),  # others act on inputs
    },
}
# Fields of `quantization_config` that are objects.
OBJECTS = (
    *("dynamic", "dynamic.*", "extra_config", "extra_config.*", "quant_config", "quant_config.weight_quant_params"),
    *("config_groups", "config_groups.*", "config_groups.*.weights"),
)
LEAST_BYTES = 0.125  # least size of a weight in any supported format
LIGHT = 1 << 26  # bytes of weights that may be read anyway, for a precise error

LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    "num_decoder_layers",
)
WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HEAD_WIDTH = ("head_dim", "d_kv")
INNER = (
    *("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "moe_intermediate_size"),
    *("encoder_ffn_dim", "decoder_ffn_dim"),
)
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "original_max_position_embeddings")
EXPERTS = ("num_local_experts", "num_experts")
NORM_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
USED_EXPERTS = ("num_experts_per_tok",)
WEIGHED = ("vision_config", "decoder")  # parts whose weights every checkpoint holds

# Ranges of fields: larger values would take all memory before a weight is read. They are generous enough for every
# existing model: trained ones have at most 128 layers and 20,480 features, and models merged from several
# 315 layers.
LIMITS = {
    (*LAYERS, "attention_types"): (1, 1 << 9),
    (*HEADS, *KEY_HEADS): (1, 1 << 10),
    (*WIDTH, "word_embed_proj_dim", "embedding_size"): (1, 1 << 17),
    (*HEAD_WIDTH, "rotary_dim"): (1, 1 << 14),
    INNER: (1, 1 << 20),
    ("vocab_size",): (1, 1 << 22),
    POSITIONS: (1, 1 << 24),
    (*EXPERTS, *USED_EXPERTS): (0, 1 << 12),
    ("sliding_window", "window_size"): (0, 1 << 30),
    ("num_labels",): (0, 1 << 15),
    NORM_EPSILONS: (0, 1),
}
# Largest numbers of positions of model types that store an entry for each; other types compute positions.
MOST_POSITIONS = {"gpt_neo": 1 << 13, "gptj": 1 << 15, "xglm": 1 << 15, "gpt2": 1 << 16, "opt": 1 << 16, "mpt": 1 << 16}


class Relation(NamedTuple):
    """Two fields that must be compatible if both exist: a test, and the expected value in words."""

    field: tuple[str, ...]
    other: tuple[str, ...]
    fits: Callable[[int, int], bool]
    expected: str


# Relations that transformers does not check before it computes.
RELATIONS = (
    Relation(KEY_HEADS, HEADS, lambda count, heads: heads % count == 0, "a number that divides the {} heads"),
    Relation(HEADS, WIDTH, lambda count, width: width % count == 0, "a number that divides the {} features"),
    Relation(USED_EXPERTS, EXPERTS, lambda count, experts: not experts or 1 <= count <= experts, "from 1 to {}"),
    Relation(("pad_token_id",), ("vocab_size",), lambda token, size: token < size, "an id in the vocabulary of {}"),
)


def _first(fields: dict, names: Iterable[str], default=None):
    """Return the first of some fields that is an integer."""
    return next((fields[name] for name in names if type(fields.get(name)) is int), default)


def read_config_file(file: Path) -> dict:
    """Return the fields of a `config.json`; raise UserError if it is invalid.

    The fields are cached while the file is unchanged, and shared by all callers.
    """
    return _read_config_file(file, state_of(file))


@functools.lru_cache(maxsize=8)
def _read_config_file(file: Path, _state: tuple | None) -> dict:
    try:
        content = start_of(file, LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"'{file}' cannot be read ({error.strerror or error})") from None
    if content is None:
        raise adapter_alone(file.parent) or UserError(
            f"cannot load '{file.parent}': it has no {FILE} that can be read; expected one beside its weights"
        )
    if len(content) > LARGEST_FILE:
        raise UserError(f"'{file}' is larger than {LARGEST_FILE >> 20} MB; expected a model's configuration")
    try:
        fields = json.loads(content.decode(), object_pairs_hook=_consistent_fields)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or a number of 5,000 digits
        raise UserError(f"'{file}' is not valid JSON ({reason_of(error, 150)}); download the model again") from None
    if not isinstance(fields, dict):
        raise UserError(f"'{file}' holds no JSON object; expected a model's configuration")
    if not isinstance(fields.get("model_type"), str):  # transformers would guess it from the folder's name
        raise UserError(f"'{file}' has no 'model_type'; expected the name of an architecture, such as gpt2")
    with architecture_first(fields["model_type"]):
        check_fields(fields, file)
        if fields.get("sliding_window") == 0 and fields.get("use_sliding_window") is not False:
            _refuse(fields, "sliding_window", file, "a whole number from 1 on, or null")
    return fields


@contextmanager
def architecture_first(kind: str) -> Iterator[None]:
    """Report an unknown architecture before other errors of a configuration, whose fields may then mean other
    things."""
    try:
        yield
    except UserError:
        if kind and all(known["model_type"] != kind for known in known_configs().values()):
            from outliers.models.anatomy import check_known  # imports torch, so only for unknown types

            check_known(kind)
        raise


def _consistent_fields(pairs: list[tuple[str, Any]]) -> dict:
    """Return the fields of an object of JSON; raise ValueError if one has two different values."""
    fields = dict(pairs)
    for name, value in pairs if len(fields) < len(pairs) else ():
        if fields[name] != value:
            raise ValueError(f"it has two values of {name!r}")
    return fields


def check_fields(fields: dict, where: str | Path) -> None:
    """Raise UserError for impossible sizes in a configuration and in nested ones.

    Values of other types are left to transformers, whose configurations are strict.
    """
    for names, (least, most) in LIMITS.items():
        most = MOST_POSITIONS.get(fields.get("model_type"), most) if names is POSITIONS else most
        for name in names:
            if not all(least <= number <= most for number in _all_numbers(fields.get(name))):
                kind = "number" if names is NORM_EPSILONS else "whole number"
                _refuse(fields, name, where, f"a {kind} from {least} to {most:,}")
    for relation in RELATIONS:
        one, other = _first(fields, relation.field), _first(fields, relation.other)
        own_width = relation.field is HEADS and _first(fields, HEAD_WIDTH)
        if one is not None and other is not None and not own_width and not relation.fits(one, other):
            name = next(name for name in relation.field if fields.get(name) == one)
            _refuse(fields, name, where, relation.expected.format(other))
    for name, part in fields.items():
        if name.endswith("_config") and isinstance(part, dict):
            check_fields(part, f"{where}, {name}")


def _refuse(fields: dict, name: str, where: str | Path, expected: str) -> NoReturn:
    raise UserError(f"'{where}' asks for {name} {shown(fields[name], json.dumps)}; expected {expected}")


def _all_numbers(value) -> Iterator[float]:
    """Yield the numbers, True and False among them, in a value of JSON and its nested lists."""
    if isinstance(value, list):
        for entry in value:
            yield from _all_numbers(entry)
    elif isinstance(value, int | float):
        yield value


def check_weights(fields: dict, name: str, files: Iterable[Path]) -> None:
    """Raise UserError if weights are stored in an unsupported format, or cannot fit into their files.

    fields: checked by `check_fields`. files: of the weights; none if they are not on this machine yet.
    """
    for part in (fields, fields.get("text_config") or {}):
        stored = part.get("quantization_config")
        method = stored.get("quant_method") if isinstance(stored, dict) else None
        if stored is not None and not (isinstance(method, str) and method in DEQUANTIZED):
            raise UserError(
                f"the weights of '{name}' are stored quantized by '{method}'; expected 16 or 32 bits or "
                f"{', '.join(DEQUANTIZED)}: use the model that they were made of"
            )
        for field in OBJECTS if stored is not None else ():
            for value in _values(stored, field.split(".")):
                if not isinstance(value, dict):
                    raise UserError(
                        f"the weights of '{name}' are stored quantized by '{method}' with {field} "
                        f"{shown(value, json.dumps)}; expected a JSON object: download the model again"
                    )
        for field, known in DEQUANTIZED[method].items() if stored is not None else ():
            for value in _values(stored, field.split(".")):
                if (value.lower() if isinstance(value, str) else value) not in known:
                    raise UserError(
                        f"the weights of '{name}' are stored quantized by '{method}' with {field} "
                        f"{shown(value, json.dumps)}; expected one of {', '.join(map(str, known))}: use the model "
                        "that they were made of"
                    )
    size = sum(file.stat().st_size for file in files)
    needed = LEAST_BYTES * least_weights(fields)
    if size and needed > max(size, LIGHT):
        raise UserError(
            f"the configuration of '{name}' asks for at least {needed / 1e9:,.1f} GB of weights, and its files have "
            f"{size / 1e9:,.3f}; download the model again: they are of another model, or incomplete"
        )


def _values(fields, path: list[str]) -> Iterator:
    """Yield the values, except null, along a path of names; `*` stands for every name."""
    if not path:
        yield from () if fields is None else (fields,)
    elif isinstance(fields, dict | list):
        entries = dict(enumerate(fields)) if isinstance(fields, list) else fields
        for name in entries if path[0] == "*" else {path[0]} & entries.keys():
            yield from _values(entries[name], path[1:])


def least_weights(fields: dict) -> int:
    """Return a lower bound of a model's number of weights: embeddings, two products of attention and two of the
    feed-forward part.

    Missing fields count nothing, nor do parts that only some architectures have. Of an encoder-decoder only one part
    counts.
    """
    if parts := [part for name in WEIGHED if isinstance(part := fields.get(name), dict)]:
        return sum(map(least_weights, parts))
    width, heads, layers = (_first(fields, names, 0) for names in (WIDTH, HEADS, LAYERS))
    head_width = _first(fields, HEAD_WIDTH) or (width // heads if heads else 0)
    experts = _first(fields, EXPERTS, 0)
    if experts:
        inner = _first(fields, ("moe_intermediate_size", "intermediate_size"), 0)
        dense = fields.get("mlp_only_layers")
        sparse = layers // (_first(fields, ["decoder_sparse_step"]) or 1)
        sparse -= len(dense) if isinstance(dense, list) else 0
        feed_forward = 3 * max(0, sparse) * experts * width * inner
    else:
        inner = _first(fields, INNER) or (_first(fields, ["expansion_ratio"]) or 4) * width
        feed_forward = 2 * layers * width * inner
    embedded = _first(fields, ("word_embed_proj_dim", "embedding_size")) or width
    embeddings = _first(fields, ["vocab_size"], 0) * embedded
    return embeddings + 2 * layers * width * heads * head_width + feed_forward
