"""The tensors of a model's files, compared with the model before any is read; each is read when it is wanted."""

import copy
import glob
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer, HfQuantizer
from transformers.safetensors_conversion import auto_conversion
from transformers.utils.import_utils import is_env_variable_true
from transformers.utils.quantization_config import QuantizationConfigMixin

from outliers.errors import BadWeights, UserError, first_of, reason_of
from outliers.models.anatomy import OTHER_PARTS, renamed_keys
from outliers.models.skeleton import refusals
from outliers.models.source import Source
from outliers.models.stored import ALWAYS_PACKED, PACKED_ENDS, Packed, unpacked
from outliers.models.weight_files import INDEX, WEIGHTS, is_there, listed_shards, weight_files

if TYPE_CHECKING:
    from outliers.models.gguf.reader import Made

# What a checkpoint may hold: types as safetensors calls them. All are cast to the dtype of the model.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PACKED = {"U8": torch.uint8}  # of tensors in a format of few bits that transformers undoes
OTHERS = {"BOOL": torch.bool, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}

# Buffers that older checkpoints carry and current models compute: causal masks, rotary frequencies and positions; and
# a version number of OPT's. Beside these, transformers has patterns of its own for some architectures.
HARMLESS = (
    r"(^|\.)(attn|attention)(\.attention)?\.(bias|masked_bias)$",
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",
    r"(^|\.)position_ids$",
    r"(^|\.)embed_positions\.(weights|_float_tensor)$",
    r"(^|\.)decoder\.version$",
)
EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Stored(NamedTuple):
    """A tensor in a safetensors file of model `name`: its key there, type and shape, and from which byte to which."""

    name: str
    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def spans(self) -> list[tuple[Path, int, int]]:
        """The bytes of which it is made: file, from where, to where."""
        return [(self.file, self.start, self.end)]

    def read(self) -> torch.Tensor:
        """The tensor, which shares the memory of the file."""
        with opened(self.file, self.name) as file:
            return file.get_tensor(self.key)

    def without_values(self) -> torch.Tensor:
        """A tensor on the meta device like this one."""
        return torch.empty(self.shape, dtype=(FLOATS | PACKED)[self.dtype], device="meta")


class Joined(NamedTuple):
    """A tensor of a model that its files hold in parts, such as one for each expert, or in a format of few bits.

    parts: each with the pattern that says which part it is. converter: transformers' rule to make it of them. skeleton:
    says the dtype to dequantize to. place: which one it is of several tensors that the parts make together.
    """

    tensor_name: str
    parts: list[tuple[str, Stored | Packed]]
    converter: WeightConverter
    skeleton: PreTrainedModel | None
    place: int = 0

    @property
    def spans(self) -> list[tuple[Path, int, int]]:
        """The bytes of which it is made: file, from where, to where."""
        return [span for _, stored in self.parts for span in stored.spans]

    def read(self) -> torch.Tensor:
        """The tensor."""
        return self._made_of(lambda part: part.read())

    def is_complete(self) -> bool:
        """Whether no kind of part and no expert is missing, but for the last ones of all kinds."""
        by_pattern, experts = defaultdict(list), set()
        for pattern, stored in self.parts:
            by_pattern[pattern].append(stored)
            experts |= {int(number) for number in EXPERT.findall(stored.key)}
        alike = len({len(parts) for parts in by_pattern.values()}) == 1
        return alike and len(by_pattern) == len(self.converter.source_patterns) and experts == set(range(len(experts)))

    def shape(self) -> tuple[int, ...] | set[tuple[int, ...]]:
        """The shape that it will have; those of its parts if they do not fit together."""
        try:
            return tuple(self._made_of(lambda part: part.without_values()).shape)
        except (RuntimeError, ValueError, IndexError):  # torch refuses to join them
            return {stored.shape for _, stored in self.parts}

    def _made_of(self, read: Callable[[Stored | Packed], torch.Tensor]) -> torch.Tensor:
        by_pattern = defaultdict(list)
        for pattern, stored in sorted(self.parts, key=lambda part: dot_natural_key(part[1].key)):
            by_pattern[pattern].append(read(stored))
        rule = {"source_patterns": self.converter.source_patterns, "target_patterns": self.converter.target_patterns}
        for operation in self.converter.operations:
            by_pattern = operation.convert(by_pattern, **rule, full_layer_name=self.tensor_name, model=self.skeleton)
        return [*by_pattern.values()][self.place]


class Checkpoint(NamedTuple):
    """The contents of a model's files.

    files: those that are the model. tensors: every tensor of the model that is stored, by the model's own name.
    ignored: names in the files for which the model has no place, but for those that are known to be of no use. stored:
    all tensors by their names in the files, weights that are several tensors there each as one.
    """

    files: list[Path]
    tensors: "dict[str, Stored | Packed | Joined] | dict[str, Made]"
    ignored: list[str]
    stored: dict[str, Stored | Packed]

    @property
    def zero_points(self) -> str | None:
        """A note on zero points of packed weights whose values and label disagree, or do not tell how to read them."""
        notes = {packed.note: None for packed in self.stored.values() if isinstance(packed, Packed) and packed.note}
        return "; ".join(notes) or None

    def absent(self, model: PreTrainedModel) -> set[str]:
        """The model's own names of tensors that are not stored, which are tied to others that are."""
        return set(model.state_dict()) - set(self.tensors)


def read_checkpoint(
    source: Source, name: str, model: PreTrainedModel, stored_as: QuantizationConfigMixin | None
) -> Checkpoint:
    """Find the tensors of a model in its files, of which nothing but the headers is read; a hub id is downloaded.

    model: of its configuration, without values. stored_as: how to bring back weights that are stored in few bits.
    """
    if source.gguf_file:
        from outliers.models.gguf.reader import read_gguf

        return Checkpoint(source.files, read_gguf(*source.files).tensors, [], {})
    files = source.files or weight_files(_downloaded(source, name))
    stored = _by_key(name, (stored for file in files for stored in _in_file(name, file)))
    fields = model.config.to_dict().get("quantization_config") or {}
    method = fields.get("quant_method")
    for key, packed in stored.items():
        path, _, end = key.rpartition(".")
        if end in PACKED_ENDS and (plain := stored.get(f"{path}.weight")):
            raise _twice(name, packed, plain)
    turned = [path for path, module in model.named_modules() if isinstance(module, Conv1D)]
    stored = unpacked(stored, method, fields, name, turned)
    if method in ALWAYS_PACKED and not any(isinstance(tensor, Packed) for tensor in stored.values()):
        raise UserError(
            f"the configuration of '{name}' says that its weights are stored quantized by '{method}', and its files "
            "hold none so; download the model again, or take 'quantization_config' out of its configuration"
        )
    with refusals(name):
        quantizer = stored_as and AutoHfQuantizer.from_config(stored_as, pre_quantized=True)
    tensors, ignored = _by_own_names(stored, name, model, quantizer)
    _check(tensors, name, model)
    return Checkpoint(files, tensors, _without_harmless(ignored, model), stored)


def _downloaded(source: Source, name: str) -> Path:
    """The folder of the hub's cache in which a model's weights are: what `weight_files` chooses, and no other files.

    As transformers does it, for pickled weights the hub is asked for its own conversion of them.
    """

    def snapshot(*names: str) -> Path:
        wanted = [glob.escape(name) for name in names]
        keywords = {"allow_patterns": wanted, "local_files_only": source.local_files_only}
        with refusals(name, source):
            return Path(snapshot_download(source.path, revision=revision, **keywords))

    def has(name: str) -> bool:
        return is_there(folder / name)

    revision = source.revision
    folder = snapshot(WEIGHTS)
    if not has(WEIGHTS):
        folder = snapshot(INDEX)
    convertible = revision in (None, "main") and not source.local_files_only
    if not (has(WEIGHTS) or has(INDEX)) and convertible and not is_env_variable_true("DISABLE_SAFETENSORS_CONVERSION"):
        with refusals(name, source):
            _, revision, _ = auto_conversion(source.path)
        folder = snapshot(WEIGHTS, INDEX)
    return folder if has(WEIGHTS) or not has(INDEX) else snapshot(*listed_shards(folder))


def _by_key(name: str, all_stored: Iterable[Stored]) -> dict[str, Stored]:
    by_key = {}
    for stored in all_stored:
        if stored.key in by_key:
            raise _twice(name, stored, by_key[stored.key])
        by_key[stored.key] = stored
    return by_key


def _twice(name: str, first: Stored, second: Stored | Joined) -> UserError:
    second = second.parts[0][1] if isinstance(second, Joined) else second
    places = " and ".join(f"'{printable(stored.key)}' in '{stored.file.name}'" for stored in (second, first))
    return UserError(f"the checkpoint of '{name}' holds a tensor twice: {places}; expected each once")


def printable(key: str) -> str:
    """The name of a tensor as a message shows it, whatever is in it."""
    return (key if key.isprintable() else ascii(key)[1:-1])[:200]


def _by_own_names(
    all_stored: dict[str, Stored | Packed], name: str, model: PreTrainedModel, quantizer: HfQuantizer | None
) -> tuple[dict[str, Stored | Packed | Joined], list[str]]:
    """By transformers' rules for the architecture, and for the format in which its weights are stored; and the keys of
    tensors that are none of the model's."""
    skeleton = quantizer and copy.deepcopy(model)
    steps = get_model_conversion_mapping(model, renamed_keys(model.config), quantizer)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = dict.fromkeys(model.state_dict(), 0)
    tensors, parts, ignored = {}, defaultdict(list), []
    for key, stored in sorted(all_stored.items(), key=lambda item: dot_natural_key(item[0])):
        tensor_name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if tensor_name not in names and key in names:
            tensor_name, pattern = key, None
        if tensor_name not in names:
            ignored.append(key)
        elif tensor_name in tensors and (pattern is None or isinstance(tensors[tensor_name], Stored | Packed)):
            raise _twice(name, stored, tensors[tensor_name])
        elif pattern is not None:
            parts[tensor_name].append((pattern, stored))
            first, *_ = targets = converter_of[pattern].target_patterns
            for place, target in enumerate(targets):
                target_name = tensor_name.replace(first, target) if place else tensor_name
                tensors[target_name] = Joined(target_name, parts[tensor_name], converter_of[pattern], skeleton, place)
        else:
            tensors[tensor_name] = stored
    return tensors, ignored


def _check(tensors: dict[str, Stored | Joined], name: str, model: PreTrainedModel) -> None:
    """Compare shape and type of each tensor with the model's; see that none is missing."""
    expected = model.state_dict()
    for tensor_name, stored in tensors.items():
        parts = [part for _, part in stored.parts] if isinstance(stored, Joined) else [stored]
        packed = PACKED if isinstance(stored, Joined) and stored.skeleton is not None else {}
        types = FLOATS | packed if expected[tensor_name].is_floating_point() else OTHERS
        for part in parts:
            if part.dtype not in types:
                raise UserError(
                    f"the checkpoint of '{name}' holds '{printable(part.key)}' as {part.dtype}; expected "
                    f"{', '.join(types)}"
                )
    torn = [
        tensor_name
        for tensor_name, stored in tensors.items()
        if isinstance(stored, Joined) and not stored.is_complete()
    ]
    check_complete([*_missing(tensors, model), *(f"a part of {tensor_name}" for tensor_name in torn)], name)
    for tensor_name, stored in tensors.items():
        shape = stored.shape() if isinstance(stored, Joined) else stored.shape
        check_shape(
            shape, expected[tensor_name].shape, stored.key if isinstance(stored, Stored | Packed) else tensor_name, name
        )


def check_shape(shape: tuple | set, expected: torch.Size, key: str, name: str) -> None:
    """Raise UserError if a tensor of a model is stored with another shape than its configuration asks for, or in parts
    of shapes that do not fit together."""
    if shape != tuple(expected):
        stored_shapes = (
            f"in parts of the shapes {sorted(shape)}" if isinstance(shape, set) else f"with the shape {shape}"
        )
        raise UserError(
            f"the checkpoint of '{name}' holds '{printable(key)}' {stored_shapes[:200]}; its configuration asks for "
            f"{tuple(expected)}"
        )


def _missing(tensors: dict, model: PreTrainedModel) -> list[str]:
    """The model's own names of tensors that are not stored; of those that are tied, one has to be.

    None that the architecture computes by itself, such as the positions of Marian.
    """
    tied, computed = model.all_tied_weights_keys, model._keys_to_ignore_on_load_missing or ()
    there = {tied.get(tensor_name, tensor_name) for tensor_name in tensors}
    missing = [tensor_name for tensor_name in model.state_dict() if tied.get(tensor_name, tensor_name) not in there]
    return [tensor_name for tensor_name in missing if not any(re.search(pattern, tensor_name) for pattern in computed)]


def check_complete(missing: list[str], name: str) -> None:
    """Raise UserError if tensors of a model are missing in its checkpoint."""
    if missing:
        raise UserError(f"the checkpoint of '{name}' lacks {len(missing)} tensors ({first_of(missing)})")


def _without_harmless(ignored: list[str], model: PreTrainedModel) -> list[str]:
    patterns = [*HARMLESS, *(model._keys_to_ignore_on_load_unexpected or [])]
    if model.config.model_type in OTHER_PARTS:
        patterns.append(OTHER_PARTS[model.config.model_type])
    harmless = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return [key for key in ignored if not harmless.search(key)]


def dtype_of(model: PreTrainedModel, tensor_name: str) -> torch.dtype:
    """The dtype that a tensor is cast to: the model's dtype, but float32 for GPT-OSS's norms in a float16 model."""
    others = model._get_dtype_plan(model.dtype)
    return next((dtype for part, dtype in others.items() if part in tensor_name), model.dtype)


def _in_file(name: str, path: Path) -> list[Stored]:
    with opened(path, name), path.open("rb") as file:  # the first says what is wrong with a damaged one
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    stored = []
    for key, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        stored.append(Stored(name, path, key, entry["dtype"], tuple(entry["shape"]), start, end))
    return stored


@contextmanager
def opened(file: Path, name: str) -> Iterator[safe_open]:
    """An open safetensors file of model `name`; what is wrong with it, in one line."""
    try:
        with safe_open(file, "pt") as open_file:
            yield open_file
    except (SafetensorError, OSError) as error:
        reason = reason_of(error, 300)
        raise BadWeights(f"the weights of '{name}' are corrupt ({reason}); download or copy them again") from None
