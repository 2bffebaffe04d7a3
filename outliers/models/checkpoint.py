"""The safetensors files of a model, and where in them each of its tensors is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from outliers.errors import UserError
from outliers.models.load import find_model
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


def own_names(model: PreTrainedModel, names: dict) -> Callable[[str], str | None]:
    """A function from a key of a checkpoint to the model's own name of the tensor, one of `names`, or None.

    Keys that are none of the model's are buffers that older checkpoints carry, such as causal masks.
    """
    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]

    def own_name(key: str) -> str | None:
        own, _ = rename_source_key(key, renamings, [], model.base_model_prefix, names)
        return own if own in names else None

    return own_name


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
