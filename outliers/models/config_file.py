"""`config.json` as plain JSON: what no model can be is refused before anything is imported, or built, because of it.

What passes here may still be no model; then transformers says so, of an object that holds no weights.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from outliers.errors import UserError, reason_of, shown
from outliers.files import start_of

FILE = "config.json"
LARGEST_FILE = 4 << 20  # bytes; names of 20,000 classes take one million
# Methods that store weights in few bits and whose weights are brought back: of the fields of `quantization_config` that
# say how (`*` for each of an object or a list), the values that are known. A field that is not there has the first one.
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
    "compressed-tensors": {
        "format": _COMPRESSED,
        "config_groups.*.format": _COMPRESSED,
        "config_groups.*.weights.type": ("int", "float"),
        "config_groups.*.weights.num_bits": (
            2,
            4,
            8,
        ),  # others straddle words, as some versions of the library pack them
        "config_groups.*.weights.strategy": ("tensor", "channel", "group", "block"),
        "config_groups.*.weights.symmetric": _SWITCH,
        "quantization_status": ("compressed", "frozen"),
        "sparsity_config.format": ("dense",),
        "transform_config.config_groups.*.apply.*.location": ("weight_input", "weight_output"),  # others act on inputs
    },
}
LEAST_BYTES = 0.25  # of a weight in any of the formats that are read
LEAST = 5e-324  # above zero
MOST_LAYERS = 1 << 9
MOST_LABELS = 1 << 15
LIGHT = 1 << 26  # bytes of weights that are read to see what is wrong with them

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
DROPOUTS = (
    *("attn_pdrop", "activation_dropout", "dropout", "dropout_rate", "emb_pdrop", "embd_pdrop", "embed_dropout"),
    *("embedding_dropout", "hidden_dropout", "layerdrop", "resid_dropout", "resid_pdrop", "residual_dropout"),
)
UNUSED_DROPOUTS = ("attention_dropout", "classifier_dropout", "summary_first_dropout")  # which may say nothing
SCALES = ("rope_theta", "rotary_emb_base", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping")
ROTARY = ("rope_parameters", "rope_scaling")
PARTS = ("text_config", "vision_config", "attn_config")  # configurations inside of a configuration
WEIGHED = ("vision_config", "decoder")  # of parts that have their own: those whose weights every checkpoint holds

ACTIVATIONS = {  # that transformers knows
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
}
DTYPES = {"float64", "double", "float32", "float", "float16", "half", "bfloat16"}
# What transformers has of its own. Any other name is that of code on the hub.
ATTENTIONS = {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"}
EXPERT_PRODUCTS = {"eager", "batched_mm", "grouped_mm"}
ROTARY_KINDS = {"default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "proportional", "mrope"}
# Kinds that make or hold something for each position; the others compute it of the position.
MOST_POSITIONS = {"gpt_neo": 1 << 13, "gptj": 1 << 15, "xglm": 1 << 15, "gpt2": 1 << 16, "opt": 1 << 16, "mpt": 1 << 16}


class Rule(NamedTuple):
    """A condition on the values of some fields, in words and as a test; null: whether they may be missing as null."""

    expected: str
    holds: Callable[[Any], bool]
    fields: Iterable[str]
    null: bool = False


def _count(most: int, *fields: str, least: int = 1, null: bool = False) -> Rule:
    return Rule(f"a whole number from {least} to {most:,}", lambda value: _is_count(value, least, most), fields, null)


def _number(least: float, most: float, expected: str, *fields: str, null: bool = False) -> Rule:
    return Rule(expected, lambda value: _is_number(value) and least <= value <= most, fields, null)


def _one_of(names: set[str], *fields: str) -> Rule:
    return Rule(
        f"one of {', '.join(sorted(names))}", lambda value: isinstance(value, str) and value in names, fields, True
    )


def _is_count(value, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_token(value) -> bool:
    return _is_count(value, -1, 1 << 40)


# Generous enough for every model that there is: trained ones have 128 layers and 20,480 features at most, and ones that
# were put together of several 315 layers.
RULES = (
    Rule("the name of an architecture", lambda value: isinstance(value, str), ("model_type",)),
    _count(MOST_LAYERS, *LAYERS[:-1]),
    _count(MOST_LAYERS, LAYERS[-1], null=True),
    _count(1 << 10, *HEADS),
    _count(1 << 10, *KEY_HEADS, null=True),
    _count(1 << 17, *WIDTH),
    _count(1 << 17, "word_embed_proj_dim", null=True),
    _count(1 << 14, *HEAD_WIDTH, null=True),
    _count(1 << 20, *INNER, null=True),
    _count(1 << 14, "rotary_dim", null=True),
    _count(1 << 22, "vocab_size"),
    _count(1 << 24, *POSITIONS),
    _count(1 << 12, *EXPERTS, "num_experts_per_tok", least=0),
    _count(1 << 30, "sliding_window", least=0, null=True),
    _count(1 << 30, "window_size", "sliding_window_pattern", null=True),
    _count(1 << 10, "no_rope_layer_interval", "decoder_sparse_step", "expansion_ratio", null=True),
    _count(MOST_LABELS, "num_labels", least=0),
    Rule("the id of a token", _is_token, ("pad_token_id", "bos_token_id"), null=True),
    Rule(
        "the id of a token, or a list of some",
        lambda value: all(map(_is_token, value if isinstance(value, list) else [value])),
        ("eos_token_id",),
        null=True,
    ),
    _number(0, 1, "a number from 0 to 1", *NORM_EPSILONS, *DROPOUTS),
    _number(0, 1, "a number from 0 to 1", *UNUSED_DROPOUTS, null=True),
    _number(0, math.inf, "a finite number from 0 on", "initializer_range", "init_std", null=True),
    _number(LEAST, math.inf, "a finite number above 0", *SCALES, null=True),
    _number(LEAST, math.inf, "a finite number above 0", "logits_scaling"),
    _number(
        -math.inf,
        math.inf,
        "a finite number",
        *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "swiglu_alpha", "swiglu_limit"),
        null=True,
    ),
    _number(LEAST, 1, "a number above 0, at most 1", "partial_rotary_factor", "rotary_pct", null=True),
    _one_of(ACTIVATIONS, "hidden_act", "activation_function", "hidden_activation", "activation"),
    _one_of(DTYPES, "dtype", "torch_dtype"),
    _one_of(ATTENTIONS, "attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    _one_of(EXPERT_PRODUCTS, "experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    Rule("true or false", lambda value: isinstance(value, bool), ("tie_word_embeddings",), null=True),
    Rule("an object", lambda value: isinstance(value, dict), PARTS, null=True),
    Rule("rotary embeddings as transformers has them", lambda value: _is_rotary(value), ROTARY, null=True),
)
# The same of each kind of layers, or of all.
OF_ROTARY = (
    _one_of(ROTARY_KINDS, "rope_type", "type"),
    _number(LEAST, math.inf, "", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", null=True),
    _number(LEAST, math.inf, "", "attention_factor", "beta_fast", "beta_slow", null=True),
    _number(LEAST, 1, "", "partial_rotary_factor", null=True),
    _count(1 << 24, "original_max_position_embeddings", null=True),
    Rule(
        "",
        lambda value: isinstance(value, list) and all(_is_number(entry) and entry > 0 for entry in value),
        ("long_factor", "short_factor"),
        null=True,
    ),
)


def _is_rotary(value) -> bool:
    if not isinstance(value, dict):
        return False
    if value and all(name.endswith("_attention") for name in value):  # of each kind of layers
        return all(map(_is_rotary, value.values()))
    return not any(_broken(value, OF_ROTARY))


def _broken(fields: dict, rules: Iterable[Rule]) -> Iterator[tuple[str, str]]:
    """The fields whose values break a rule, and what was expected of each."""
    for rule in rules:
        for field in rule.fields:
            if field in fields and not (rule.null and fields[field] is None) and not rule.holds(fields[field]):
                yield field, rule.expected


def _first(fields: dict, names: Iterable[str], default=None):
    """The value of the first of some fields that is there and not null."""
    return next((fields[name] for name in names if fields.get(name) is not None), default)


# Of fields that are right each by itself: what does not fit together, with what was expected of it.


def _heads(fields: dict) -> Iterator[tuple[str, str]]:
    width, heads, key_heads = (_first(fields, names) for names in (WIDTH, HEADS, KEY_HEADS))
    if heads and key_heads and heads % key_heads:
        yield _name(fields, KEY_HEADS), f"a number that divides the {heads} heads"
    head_width = _first(fields, HEAD_WIDTH)
    if width and heads and head_width is None and width % heads:
        yield _name(fields, HEADS), f"a number that divides the {width} features"
    if width and heads and fields.get("head_dim") and not fields.get("hidden_size") and head_width * heads != width:
        yield "head_dim", f"none, for who says '{_name(fields, WIDTH)}' has heads of all {width} features"
    rotary = fields.get("rotary_dim")
    if rotary and (rotary % 2 or rotary > (head_width or (width // heads if width and heads else math.inf))):
        yield "rotary_dim", "an even number, at most the features of a head"


def _positions(fields: dict) -> Iterator[tuple[str, str]]:
    most = MOST_POSITIONS.get(fields.get("model_type"), math.inf)
    for name in POSITIONS:
        if (_first(fields, [name]) or 0) > most:
            yield name, f"at most {most:,} for {fields['model_type']}, which keeps a table of them"


def _window(fields: dict) -> Iterator[tuple[str, str]]:
    """Qwen's configurations have a window of 0 where they use none."""
    if fields.get("sliding_window") == 0 and fields.get("use_sliding_window") is not False:
        yield "sliding_window", "a whole number from 1 on, or null"


def _padding(fields: dict) -> Iterator[tuple[str, str]]:
    """Ids of other tokens are not looked up; many published configurations have some that are too large."""
    vocabulary = fields.get("vocab_size")
    if vocabulary and (fields.get("pad_token_id") or 0) >= vocabulary:
        yield "pad_token_id", f"an id in the vocabulary of {vocabulary}"


def _experts(fields: dict) -> Iterator[tuple[str, str]]:
    experts, used = _first(fields, EXPERTS), fields.get("num_experts_per_tok")
    if experts and used is not None and not 1 <= used <= experts:
        yield "num_experts_per_tok", f"a number from 1 to that of the experts, {experts}"


def _layers(fields: dict) -> Iterator[tuple[str, str]]:
    """Lists with an entry a layer."""
    layers = _first(fields, LAYERS)
    for name, holds in (("layer_types", str), ("no_rope_layers", int)):
        entries = fields.get(name)
        if entries and not _is_list_of(entries, holds, layers):
            yield name, f"a list with {f'{layers} entries' if layers else 'an entry a layer'}"
        if entries and "sliding_attention" in entries and fields.get("sliding_window", 1) is None:
            yield "sliding_window", "a whole number, for layers of 'sliding_attention'"
    chosen = fields.get("mlp_only_layers")
    if chosen is not None and not _is_list_of(chosen, int):
        yield "mlp_only_layers", "a list of numbers of layers"
    kinds = fields.get("attention_types")  # [[kinds], how many times] of GPT-Neo
    if kinds is not None and _repeated(kinds) not in (layers or 0, 0):
        yield "attention_types", f"[[kinds], times] for {layers} layers"


def _is_list_of(entries, kind: type, count: int | None = None) -> bool:
    right = isinstance(entries, (list, tuple)) and len(entries) == (count or len(entries))
    return right and all(isinstance(entry, kind) for entry in entries)


def _repeated(kinds) -> int | None:
    """The number of layers that `attention_types` makes; None if that cannot be said. No names are repeated too."""
    try:
        return sum(max(1, len(names)) * times for names, times in kinds)
    except (TypeError, ValueError):
        return None


RELATIONS = (_heads, _positions, _window, _padding, _experts, _layers)


def _name(fields: dict, names: Iterable[str]) -> str:
    return next(name for name in names if fields.get(name) is not None)


def read_config_file(file: Path) -> dict:
    """The fields of a `config.json`."""
    try:
        content = start_of(file, LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"'{file}' cannot be read ({error.strerror or error})") from None
    if content is None:
        raise UserError(
            f"cannot load '{file.parent}': it has no {FILE} that can be read; expected one beside its weights"
        )
    if len(content) > LARGEST_FILE:
        raise UserError(f"'{file}' is larger than {LARGEST_FILE >> 20} MB; expected a model's configuration")
    try:
        fields = json.loads(content.decode(), object_pairs_hook=_without_contradiction)
    except (ValueError, RecursionError) as error:  # what is no JSON, or no UTF-8, or a number of 5,000 digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else reason_of(error, 150)
        raise UserError(f"'{file}' is not valid JSON ({reason}); download the model again") from None
    if not isinstance(fields, dict):
        raise UserError(f"'{file}' holds no JSON object; expected a model's configuration")
    if "model_type" not in fields:  # which transformers would guess of the folder's name
        raise UserError(f"'{file}' has no 'model_type'; expected the name of an architecture, such as gpt2")
    check_fields(fields, file)
    return fields


def _check_architecture(kind) -> None:
    """Raise UserError for an architecture that is in no table."""
    from outliers.models.names import known_configs

    if isinstance(kind, str) and all(known["model_type"] != kind for known in known_configs().values()):
        from outliers.models.anatomy import TEXT_PARTS, check_known  # torch is imported only for what is less known

        if kind not in TEXT_PARTS:
            check_known(kind)


def _without_contradiction(pairs: list[tuple[str, Any]]) -> dict:
    fields = dict(pairs)
    for name, value in pairs if len(fields) < len(pairs) else ():
        if fields[name] != value:
            raise ValueError(f"it has two values of {name!r}")
    return fields


def check_fields(fields: dict, where: str | Path, written: dict | None = None) -> None:
    """Refuse what no model can be, in a configuration and in those inside of it.

    written: the fields of the file of which transformers made these; None where these are the file's. A value that
    transformers computed is its own, and refused only where it does not fit the file's.

    Raises:
        UserError: also of an unknown architecture, before all else: its fields may mean something else.
    """
    try:
        _check_fields(fields, where, written)
    except UserError:
        _check_architecture(fields.get("model_type"))
        raise


def _check_fields(fields: dict, where: str | Path, written: dict | None) -> None:
    for find in (lambda all_fields: _broken(all_fields, RULES), *RELATIONS):
        for field, expected in find(fields):
            value = shown(fields[field], json.dumps)
            if written is None or _says(written, field, fields[field]):
                raise UserError(f"'{where}' asks for {field} {value}; expected {expected}")
            if find in RELATIONS:
                raise UserError(
                    f"'{where}' leaves {field} to transformers, which takes {value}; expected {expected}: say it there"
                )
    for name, part in fields.items():
        if name.endswith("_config") and isinstance(part, dict):
            part = {"model_type": "", **part} if part.get("model_type") is None else part
            _check_fields(part, f"{where}, {name}", written)


def _says(written: dict, field: str, value) -> bool:
    """Whether a configuration, or one inside of it, has a field with a value."""
    parts = (part for part in written.values() if isinstance(part, dict))
    return (field in written and written[field] == value) or any(_says(part, field, value) for part in parts)


def check_weights(fields: dict, name: str, files: Iterable[Path]) -> None:
    """Refuse a configuration whose weights are stored in a format that is not undone, or do not fit into their files.

    fields: as `check_fields` has passed them. files: of the weights; none where they are not on this machine yet.
    """
    for part in (fields, fields.get("text_config") or {}):
        stored = part.get("quantization_config")
        method = stored.get("quant_method") if isinstance(stored, dict) else None
        if stored is not None and not (isinstance(method, str) and method in DEQUANTIZED):
            raise UserError(
                f"the weights of '{name}' are stored quantized by '{method}'; expected 16 or 32 bits or "
                f"{', '.join(DEQUANTIZED)}: use the model that they were made of"
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
    """The values that are there, and not null, along a path of names; `*` stands for each name."""
    if not path:
        yield from () if fields is None else (fields,)
    elif isinstance(fields, dict | list):
        entries = dict(enumerate(fields)) if isinstance(fields, list) else fields
        for name in entries if path[0] == "*" else {path[0]} & entries.keys():
            yield from _values(entries[name], path[1:])


def least_weights(fields: dict) -> int:
    """The least number of weights that a model has: embeddings, two products of attention and two of the rest.

    What the fields do not say counts nothing; so does what only some architectures have. Of an encoder-decoder one of
    both counts.
    """
    if parts := [part for name in WEIGHED if isinstance(part := fields.get(name), dict)]:
        return sum(map(least_weights, parts))
    width, heads, layers = (_first(fields, names, 0) for names in (WIDTH, HEADS, LAYERS))
    head_width = _first(fields, HEAD_WIDTH) or (width // heads if heads else 0)
    experts = _first(fields, EXPERTS, 0)
    if experts:
        inner = _first(fields, ("moe_intermediate_size", "intermediate_size"), 0)
        sparse = layers // (fields.get("decoder_sparse_step") or 1) - len(fields.get("mlp_only_layers") or ())
        feed_forward = 3 * max(0, sparse) * experts * width * inner
    else:
        inner = _first(fields, INNER) or (fields.get("expansion_ratio") or 4) * width
        feed_forward = 2 * layers * width * inner
    embeddings = fields.get("vocab_size", 0) * (_first(fields, ("word_embed_proj_dim", "embedding_size")) or width)
    return embeddings + 2 * layers * width * heads * head_width + feed_forward
