"""Vision transformers: encoders of pictures, and the vision towers of models that also read texts."""

import functools
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForImageClassification, CLIPConfig, PretrainedConfig, PreTrainedModel, SiglipConfig

from outliers.errors import UserError
from outliers.models.anatomy.examples import Example
from outliers.models.anatomy.family import Family

CLASS, REGISTER, PATCH = "class token", "register", "patch"  # kinds of positions


class VisionKind(NamedTuple):
    """A type of vision model.

    special: the names and kinds of the positions before the patches. any_size: whether pictures may be smaller than the
    configuration says.
    """

    special: tuple[tuple[str, str], ...] = (("[CLS]", CLASS),)
    any_size: bool = False


KINDS = {
    "vit": VisionKind(),
    "deit": VisionKind((("[CLS]", CLASS), ("[DIST]", CLASS))),
    "dinov2": VisionKind(any_size=True),
    "dinov2_with_registers": VisionKind(any_size=True),
    "clip": VisionKind(),
    "siglip": VisionKind(()),
}
TOWERS = {"clip_vision_model": CLIPConfig, "siglip_vision_model": SiglipConfig}  # by type: the whole model's class
WITH_CLASSES = "ForImageClassification"  # ends the names of classes of transformers


def vision_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a vision model with its classifier, or without one if the checkpoint holds a tower
    alone; return other configurations unchanged."""
    made_by, commit = config.architectures or (), getattr(config, "_commit_hash", None)
    if config.model_type in TOWERS:
        config = TOWERS[config.model_type](vision_config=config.to_dict())
    if config.model_type in KINDS:
        if made_by and not any(name.endswith(WITH_CLASSES) for name in made_by):
            config.num_labels = 0
        config.architectures, config._commit_hash = [type(config).__name__.replace("Config", WITH_CLASSES)], commit
    return config


class _Making:
    """An auto class that makes models with their classifier, or towers without one."""

    @staticmethod
    def from_config(config: PretrainedConfig, **options) -> PreTrainedModel:
        if config.num_labels or config.model_type != "siglip":
            return AutoModelForImageClassification.from_config(config, **options)
        return _siglip_tower()._from_config(config, **options)


@functools.cache
def _siglip_tower() -> type:
    from transformers import SiglipForImageClassification

    class Tower(SiglipForImageClassification):
        """A tower that draws no initial weights of a classifier."""

        def _init_weights(self, module: nn.Module) -> None:
            if module is not self:
                super()._init_weights(module)

    return Tower


def _before_patches(config: PretrainedConfig) -> list[tuple[str, str]]:
    """Return the names and kinds of the positions before the patches."""
    registers = range(getattr(config, "num_register_tokens", 0))
    return [*KINDS[config.model_type].special, *((f"register {number}", REGISTER) for number in registers)]


def _tower_config(config: PretrainedConfig) -> PretrainedConfig:
    return getattr(config, "vision_config", config)


def _side(config: PretrainedConfig) -> int:
    """Return the number of patches in a row of the largest picture."""
    tower = _tower_config(config)
    return tower.image_size // tower.patch_size


def _ids(config: PretrainedConfig, pixels: torch.Tensor) -> torch.Tensor:
    """Return the ids of a picture's positions, int64 (T,): first those before the patches, then the patches.

    Patches are numbered row by row in the largest picture; a smaller picture has the first ones of the first rows.
    """
    before, side = len(_before_patches(config)), _side(config)
    rows, columns = (
        torch.arange(size // _tower_config(config).patch_size, device=pixels.device) for size in pixels.shape[1:]
    )
    patches = before + (rows[:, None] * side + columns).flatten()
    return torch.cat([torch.arange(before, device=pixels.device), patches])


def _position_name(config: PretrainedConfig, position: int) -> tuple[str, str]:
    """Return the name and the type of a position, such as "patch 0,3" and `PATCH`."""
    before = _before_patches(config)
    if position < len(before):
        return before[position]
    row, column = divmod(position - len(before), _side(config))
    return f"patch {row},{column}", PATCH


def _check(config: PretrainedConfig, block: Example) -> None:
    """Raise UserError unless an example is a picture that the model takes."""
    pixels, tower = block.ids, _tower_config(config)
    side, patch = tower.image_size, tower.patch_size
    is_picture = isinstance(pixels, torch.Tensor) and pixels.ndim == 3 and pixels.is_floating_point()
    if not is_picture or len(pixels) != tower.num_channels:
        shape = f"{pixels.dtype} of shape {tuple(pixels.shape)}" if isinstance(pixels, torch.Tensor) else type(pixels)
        raise UserError(
            f"a picture is {shape}; expected float32 pixel values ({tower.num_channels}, height, width), as "
            "outliers.subjects.vision.pictures makes them"
        )
    sizes = tuple(pixels.shape[1:])
    if KINDS[config.model_type].any_size:
        if any(size % patch or not patch <= size <= side for size in sizes):
            raise UserError(
                f"a picture of {sizes[0]} x {sizes[1]} pixels; expected multiples of {patch}, at most {side}"
            )
    elif sizes != (side, side):
        raise UserError(f"a picture of {sizes[0]} x {sizes[1]} pixels; the model takes pictures of {side} x {side}")


def _smallest(config: PretrainedConfig) -> Example:
    """Return a picture of zeros."""
    tower = _tower_config(config)
    pixels = torch.zeros(tower.num_channels, tower.image_size, tower.image_size)
    return Example(pixels, torch.zeros(1, dtype=torch.int64))


VISION = Family(
    "vision",
    KINDS,
    _Making,
    # states (1, T, features), which the head pools, and the one label (1,) that they predict together
    lambda block, states: (states[None], block.labels),
    smallest=_smallest,
    check=_check,
    ids=_ids,
    vocabulary=lambda config: len(_before_patches(config)) + _side(config) ** 2,
    name_of=_position_name,
)
