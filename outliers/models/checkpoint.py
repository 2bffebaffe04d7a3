"""The tensors of a model's files, compared with the model before any is read; each is read on demand."""

import copy
import glob
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from os.path import lexists
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from transformers import Conv1D, Mxfp4Config, PreTrainedModel, WeightConverter

from outliers.errors import BadWeights, UserError, joined_names, reason_of
from outliers.models.anatomy import other_parts, renamed_keys
from outliers.models.internals import (
    AutoHfQuantizer,
    WeightRenaming,
    auto_conversion,
    dot_natural_key,
    get_model_conversion_mapping,
    is_env_variable_true,
    rename_source_key,
)
from outliers.models.skeleton import refusals
from outliers.models.source import Source
from outliers.models.stored import unpacked
from outliers.models.stored.adapter import merge_adapter
from outliers.models.stored.tensors import BYTES, FLOATS, OTHERS, Lazy, duplicate_error, printable, read_safetensors
from outliers.models.weight_files import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    INDEX,
    WEIGHTS,
    adapter_fields,
    adapter_in_words,
    listed_shards,
    record_weight_files,
    weight_files,
)

DEQUANTIZED = {"mxfp4": Mxfp4Config(dequantize=True)}  # stored formats that transformers dequantizes

# Buffers that older checkpoints carry and current models compute: causal masks, rotary frequencies and positions; and
# a version number of OPT's. Beside these, transformers has patterns of its own for some architectures.
HARMLESS = (
    r"(^|\.)(attn|attention)(\.attention)?\.(bias|masked_bias)$",
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",
    r"(^|\.)position_ids$",
    r"(^|\.)embed_positions\.(weights|_float_tensor)$",
    r"(^|\.)decoder\.version$",
)
WRAPPED = {  # parts of names, by what wrapped the model, or modules of it, that was saved
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "base_model.model.": "PEFT",
    "base_layer.": "PEFT",
    "module.": "data parallelism",
}
EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Checkpoint(NamedTuple):
    """The contents of a model's files.

    tensors: every stored tensor of the model, by the model's own name. ignored: names of tensors in the files, or of
    fields of a GGUF header, that the model does not use, except known useless ones. adapter: the adapter beside the
    weights, in words.
    """

    tensors: dict[str, Lazy]
    ignored: list[str]
    adapter: str | None = None

    @property
    def note_on_zero_points(self) -> str | None:
        """A remark for rows if the stored zero points of packed weights contradict the format version that the
        configuration gives, or leave it open."""
        return "; ".join(dict.fromkeys(lazy.note for lazy in self.tensors.values() if lazy.note)) or None

    def absent(self, model: PreTrainedModel) -> set[str]:
        """Return the model's names of tensors that are not stored, because they are tied to others or computed."""
        return set(model.state_dict()) - set(self.tensors)


def read_checkpoint(source: Source, name: str, revision: str | None, model: PreTrainedModel) -> Checkpoint:
    """Find the tensors of a model in its files, reading only headers; a hub id is downloaded.

    model: made from its configuration, without values.
    """
    files = source.files or weight_files(_downloaded(source, name))
    folder = files[0].parent
    record_weight_files(name, revision, [*files, folder / ADAPTER_WEIGHTS] if source.adapter else files)
    if source.format:
        return Checkpoint(source.format.read_tensors(*files, model), source.format.unread_fields(*files))
    stored: dict[str, Lazy] = {}
    for file in files:
        with safetensors_refusals(name):
            _, tensors = read_safetensors(file, partial(safetensors_refusals, name))
        for lazy in tensors:
            if lazy.name in stored:
                raise duplicate_error(name, lazy, stored[lazy.name])
            stored[lazy.name] = lazy
    fields = model.config.to_dict().get("quantization_config") or {}
    transposed = [path for path, module in model.named_modules() if isinstance(module, Conv1D)]
    stored = unpacked(stored, fields, name, transposed)
    tensors, ignored = _by_own_names(stored, name, model, DEQUANTIZED.get(fields.get("quant_method")))
    expected = model.state_dict()
    for tensor_name, lazy in tensors.items():
        check_type(lazy, FLOATS if expected[tensor_name].is_floating_point() else OTHERS, name)
        check_shape(lazy, expected[tensor_name].shape, name)
    if source.adapter:
        tensors = merge_adapter(tensors, model.config, folder)
    fields = adapter_fields(folder)
    return Checkpoint(tensors, _harmful_keys(ignored, model), fields and adapter_in_words(fields))


@contextmanager
def safetensors_refusals(name: str) -> Iterator[None]:
    """Convert the errors of a damaged safetensors file of model `name` to one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        reason = reason_of(error, 300)
        raise BadWeights(f"the weights of '{name}' are corrupt ({reason}); download or copy them again") from None


def _downloaded(source: Source, name: str) -> Path:
    """Download the files of a model that `weight_files` selects, and return its folder in the hub's cache.

    As in transformers, the hub is asked for its own conversion of pickled weights.
    """

    def snapshot(*names: str) -> Path:
        patterns = [glob.escape(name) for name in names]
        keywords = {"allow_patterns": patterns, "local_files_only": source.local_files_only}
        with refusals(name, source):
            return Path(snapshot_download(source.path, revision=revision, **keywords))

    def has(name: str) -> bool:
        return lexists(folder / name)

    revision = source.revision
    folder = snapshot(WEIGHTS, ADAPTER)
    if not has(WEIGHTS):
        folder = snapshot(INDEX)
    convertible = revision in (None, "main") and not source.local_files_only
    if not (has(WEIGHTS) or has(INDEX)) and convertible and not is_env_variable_true("DISABLE_SAFETENSORS_CONVERSION"):
        with refusals(name, source):
            _, revision, _ = auto_conversion(source.path)
        folder = snapshot(WEIGHTS, INDEX)
    return folder if has(WEIGHTS) or not has(INDEX) else snapshot(*listed_shards(folder))


def _by_own_names(
    stored: dict[str, Lazy], name: str, model: PreTrainedModel, config: Mxfp4Config | None
) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Rename tensors by transformers' rules for the architecture and its storage format; also return the unused keys,
    with their new names."""
    with refusals(name):
        quantizer = config and AutoHfQuantizer.from_config(config, pre_quantized=True)
    steps = [*renamed_keys(model.config), *get_model_conversion_mapping(model, hf_quantizer=quantizer)]
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = dict.fromkeys(model.state_dict(), 0)
    tensors, parts, ignored = {}, defaultdict(list), {}
    for key, lazy in sorted(stored.items(), key=lambda item: dot_natural_key(item[0])):
        tensor_name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if tensor_name not in names and key in names:
            tensor_name, pattern = key, None
        first = tensors.get(tensor_name) or (pattern is None and tensor_name in parts and parts[tensor_name][0][1])
        if tensor_name not in names:
            ignored[key] = tensor_name
        elif first:
            raise duplicate_error(name, lazy, first)
        elif pattern is None:
            tensors[tensor_name] = lazy
        else:
            parts[tensor_name].append((pattern, lazy))
    skeleton, lacking_parts = quantizer and copy.deepcopy(model), []
    for tensor_name, pieces in parts.items():
        converter = converter_of[pieces[0][0]]
        if lacking := _lacking(tensor_name, pieces, converter, len(model.get_parameter_or_buffer(tensor_name))):
            tensors[tensor_name] = pieces[0][1]
            lacking_parts += lacking
        else:
            tensors |= _joined(tensor_name, pieces, converter, model, skeleton, name)
    try:
        check_complete(tensors, model, name, lacking_parts)
    except UserError as error:
        raise _with_cause(error, ignored, model) from None
    return tensors, ignored


def _with_cause(error: UserError, ignored: Iterable[str], model: PreTrainedModel) -> UserError:
    """Add to an error about missing tensors why their names may differ."""
    own = model.state_dict().keys()
    for part, wrapped in WRAPPED.items():
        if any(part in key and _remove_wrappers(key) in own for key in ignored):
            return UserError(
                f"{error}: names of those that it has contain '{part}', which {wrapped} puts there; save the model "
                "that is inside"
            )
    return error


def _remove_wrappers(key: str) -> str:
    for part in WRAPPED:
        key = key.replace(part, "")
    return key


def _lacking(
    tensor_name: str, parts: list[tuple[str, Lazy]], converter: WeightConverter, experts: int
) -> Collection[str]:
    """Return the names of missing parts of a tensor, of which some formats store one for each expert."""
    names = {lazy.name: None for _, lazy in parts}
    expected = (EXPERT.sub(f".experts.{number}.", one) for one in names for number in range(experts))
    if lacking := {one: None for one in expected if one not in names}:
        return lacking
    balanced = len(set(Counter(pattern for pattern, _ in parts).values())) == 1
    return () if balanced and len({*dict(parts)}) == len(converter.source_patterns) else [f"a part of {tensor_name}"]


def _joined(
    tensor_name: str,
    parts: list[tuple[str, Lazy]],
    converter: WeightConverter,
    model: PreTrainedModel,
    skeleton: PreTrainedModel | None,
    name: str,
) -> dict[str, Lazy]:
    """Return the tensors of model `name` that its files hold in parts, such as one for each expert, or codes and
    scales.

    tensor_name: the first of them; the rule may make others of the same parts. parts: each with the pattern of the rule
    that its name matches. converter: transformers' rule that joins them. skeleton: the model that defines the dtype of
    dequantized weights; None if nothing is dequantized.
    """
    parts = sorted(parts, key=lambda part: dot_natural_key(part[1].name))
    patterns = {"source_patterns": converter.source_patterns, "target_patterns": converter.target_patterns}
    expected, (first, *_) = model.state_dict(), converter.target_patterns
    for _, lazy in parts:
        check_type(lazy, FLOATS | (BYTES if skeleton else {}), name)

    def join(index: int, own_name: str, parts: list[tuple[str, Lazy]], get: Callable) -> torch.Tensor:
        """Return the tensor number `index` of those that the rule makes of the parts, each read by `get`."""
        by_pattern = defaultdict(list)
        for pattern, lazy in parts:
            by_pattern[pattern].append(get(lazy))
        for operation in converter.operations:
            by_pattern = operation.convert(
                by_pattern, **patterns, full_layer_name=own_name, model=skeleton or model, config=model.config
            )
        return [*by_pattern.values()][index]

    def lazy_of(index: int, own_name: str, parts: list[tuple[str, Lazy]], **more) -> Lazy:
        shape = tuple(join(index, own_name, parts, Lazy.without_values).shape)
        spans = [span for _, lazy in parts for span in lazy.spans]
        notes = "; ".join(dict.fromkeys(lazy.note for _, lazy in parts if lazy.note))
        read = partial(join, index, own_name, parts, methodcaller("read"))
        return Lazy(own_name, shape, "F32", spans, read, notes, **more)

    def cut_expert(index: int, own_name: str, number: int) -> Lazy:
        return lazy_of(index, own_name, list(_parts_of_expert(parts, number)))

    in_pieces = all(lazy.piece or EXPERT.search(lazy.name) for _, lazy in parts)
    tensors = {}
    for index, target in enumerate(converter.target_patterns):
        own_name = tensor_name.replace(first, target) if index else tensor_name
        try:
            more = {"piece": partial(cut_expert, index, own_name)} if in_pieces and expected[own_name].ndim > 2 else {}
            tensors[own_name] = lazy_of(index, own_name, parts, **more)
        except (RuntimeError, ValueError, IndexError):  # torch refuses to join them
            raise _part_shape_error(parts, expected[own_name].shape, name) from None
    return tensors


def _parts_of_expert(parts: list[tuple[str, Lazy]], number: int) -> Iterator[tuple[str, Lazy]]:
    """Yield the parts, or pieces of parts, that belong to one expert."""
    for pattern, lazy in parts:
        named = EXPERT.search(lazy.name)
        if not named:
            yield pattern, lazy.piece(number)
        elif int(named[1]) == number:
            yield pattern, lazy


def check_type(lazy: Lazy, types: Collection[str], name: str) -> None:
    """Raise UserError unless a tensor has one of these types."""
    if lazy.dtype not in types:
        raise UserError(
            f"the checkpoint of '{name}' holds '{printable(lazy.name)}' as {lazy.dtype}; expected {', '.join(types)}"
        )


def check_shape(lazy: Lazy, expected: torch.Size, name: str) -> None:
    """Raise UserError if a tensor is not stored in the shape that the model's configuration requires."""
    if lazy.shape != tuple(expected):
        raise _shape_error(f"with the shape {lazy.shape}", lazy.name, expected, name)


def _shape_error(found: str, key: str, expected: torch.Size, name: str) -> UserError:
    return UserError(
        f"the checkpoint of '{name}' holds '{printable(key)}' {found[:200]}; its configuration asks for "
        f"{tuple(expected)}"
    )


def _part_shape_error(parts: list[tuple[str, Lazy]], expected: torch.Size, name: str) -> UserError:
    """Return the error for parts that cannot be joined, naming one whose shape differs from most of its kind."""
    usual = {
        pattern: Counter(one.shape for kind, one in parts if kind == pattern).most_common(1) for pattern, _ in parts
    }
    odd = next((one for pattern, one in parts if one.shape != usual[pattern][0][0]), parts[0][1])
    shapes = ", ".join(map(str, sorted({one.shape for _, one in parts})))
    found = f"with the shape {odd.shape}, to be joined with others to one tensor; the shapes of all are {shapes}"
    return _shape_error(found, odd.name, expected, name)


def check_complete(stored: Iterable[str], model: PreTrainedModel, name: str, lacking_parts: Iterable[str] = ()) -> None:
    """Raise UserError if tensors of a model are missing, or parts of tensors that are joined of several,
    `lacking_parts`.

    Of tied tensors one is enough, and tensors that the architecture computes, such as Marian's positions, may be
    absent.
    """
    tied, computed = model.all_tied_weights_keys, model._keys_to_ignore_on_load_missing or ()
    present = {tied.get(tensor_name, tensor_name) for tensor_name in stored}
    missing = [tensor_name for tensor_name in model.state_dict() if tied.get(tensor_name, tensor_name) not in present]
    missing = [tensor_name for tensor_name in missing if not any(re.search(one, tensor_name) for one in computed)]
    if missing := [*missing, *lacking_parts]:
        raise UserError(
            f"the checkpoint of '{name}' lacks {len(missing)} tensors ({joined_names(missing)}), for which its "
            "configuration asks; download it again"
        )


def _harmful_keys(ignored: dict[str, str], model: PreTrainedModel) -> list[str]:
    """Return the keys of ignored tensors, given with their names in the model, that transformers would not ignore
    silently."""
    patterns = [*HARMLESS, *(model._keys_to_ignore_on_load_unexpected or []), other_parts(model.config)]
    harmless = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return [key for key, name in ignored.items() if not (harmless.search(key) or harmless.search(name))]
