"""The safetensors files of a model, and how their tensors become its own."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.quantizers import AutoHfQuantizer

from outliers.errors import UserError
from outliers.models.anatomy import TEXT_KEYS
from outliers.models.load import check_complete, dequantized, find_model
from outliers.models.watch import watch


def safetensors_files(name: str, revision: str | None) -> list[Path]:
    """The safetensors files of a hub id, which are downloaded, a local folder or a pocket model.

    Raises:
        UserError: there are none.
    """
    source = find_model(name, revision)
    watch(name, revision, source.path)
    folder = Path(source.path)
    if not folder.is_dir():
        patterns = ["*.safetensors", "*.safetensors.index.json"]
        folder = Path(snapshot_download(source.path, revision=source.revision, allow_patterns=patterns))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"'{name}' has no safetensors weights, and pickled ones are not read because they can run code")
    return files


@contextmanager
def opened(file: Path, name: str, device: str = "cpu") -> Iterator[safe_open]:
    """An open safetensors file of model `name`; what is wrong with it, in one line."""
    try:
        with safe_open(file, "pt", device) as open_file:
            yield open_file
    except (SafetensorError, OSError) as error:
        raise UserError(f"the weights of '{name}' are corrupt ({error}); download or copy them again") from None


class Conversion:
    """How the tensors of a checkpoint become a model's own: by other names, and experts joined to one tensor.

    Both are transformers' rules for the architecture, and for the format in which its weights are stored.

    Args:
        name: of the model.
        model: without its weights, in their dtype.
        names: of its tensors, with anything that has their shapes.
    """

    def __init__(self, name: str, model: PreTrainedModel, names: dict):
        stored = dequantized(model.config, name)
        quantizer = None if stored is None else AutoHfQuantizer.from_config(stored, pre_quantized=True)
        steps = get_model_conversion_mapping(model, TEXT_KEYS, quantizer)
        self.name, self.names, self.prefix = name, names, model.base_model_prefix
        self.dtype, self.other_dtypes = model.dtype, model._get_dtype_plan(model.dtype)
        self.skeleton = None if quantizer is None else copy.deepcopy(model)  # says the dtype to dequantize to
        self.renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self.converters = [step for step in steps if isinstance(step, WeightConverter)]

    def own_name(self, key: str) -> tuple[str | None, str | None]:
        """The model's own name, one of `names`, of the tensor that a key of a checkpoint is, or is a part of; and the
        pattern that says which part.

        Keys that are none of the model's have None; they are buffers that older checkpoints carry, such as causal
        masks, or what a model that takes pictures too needs for that.
        """
        own, pattern = rename_source_key(key, self.renamings, self.converters, self.prefix, self.names)
        return (own, pattern) if own in self.names else (None, None)

    def dtype_of(self, own: str) -> torch.dtype:
        """What a tensor is cast to: the model's dtype, but float32 for GPT-OSS's norms in a float16 model."""
        return next((dtype for part, dtype in self.other_dtypes.items() if part in own), self.dtype)

    def join(self, own: str, parts: list[tuple[str, str | None, torch.Tensor]]) -> torch.Tensor:
        """A tensor of the model from all its parts: key, pattern and values of each.

        Raises:
            UserError: some are missing.
        """
        if parts[0][1] is None:
            return parts[0][2]
        found = defaultdict(list)
        for _, pattern, values in sorted(parts, key=lambda part: dot_natural_key(part[0])):
            found[pattern].append(values)
        converter = next(step for step in self.converters if parts[0][1] in step.source_patterns)
        patterns = {"source_patterns": converter.source_patterns, "target_patterns": converter.target_patterns}
        try:
            for operation in converter.operations:
                found = operation.convert(found, **patterns, full_layer_name=own, model=self.skeleton)
            (tensor,) = found.values()
            complete = tensor.shape == self.names[own].shape
        except RuntimeError:  # torch refuses to join tensors that do not fit together
            complete = False
        check_complete([] if complete else [f"a part of {own}"], self.name)
        return tensor


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules register their parameters without memory, but buffers, such as rotary frequencies, as they are."""
    register = nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
