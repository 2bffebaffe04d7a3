"""Vision models: pictures of a folder or of a data set on the hub, prepared by the model's own image processor."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from outliers.criterion import PICTURES
from outliers.errors import UserError, joined_names, reason_of, shown
from outliers.files import start_of
from outliers.models.anatomy.examples import IGNORED, Examples

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PretrainedConfig

    from outliers.subjects.causal import ModelWithText

# Options that do not apply to this family, and why.
REFUSED = {
    "bos": "reads pictures, before which no token stands",
    "mask_seed": "predicts classes and has no masks",
    "mask_seeds": "predicts classes and has no masks",
    "objective": "predicts classes alone",
    "stride": "reads pictures, which do not overlap",
    "scored": "predicts classes alone",
}
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP"}  # formats that are decoded
LARGEST_FILE = 1 << 26  # bytes
MOST_PIXELS = 1 << 26  # of a picture, before it is resized
MOST_FILES = 1 << 21  # of a folder
MOST_VALUES = 1 << 31  # of all prepared pictures together
SPLITS = ("validation", "test", "train")  # of a data set: the first of these that it has
READS_TEXT = False
SEED = 0  # of the order of pictures
# Handwritten digits, 1,797 pictures of 8 × 8 pixels that come with scikit-learn; a fifth of them is held out.
SIDE, CLASSES = 8, 10
BRIGHTEST = 16  # of a digit of scikit-learn
HELD_OUT = 360


class Picture(NamedTuple):
    """A picture that is not read yet.

    name: for messages. read: function that opens it. label: its class; None if unknown.
    """

    name: str
    read: Callable[[], Image.Image]
    label: str | None


def read(subject: "ModelWithText", text: str, blocks: int, _seed: int) -> Examples:
    """Return the first of the pictures that `--text` names."""
    for_others = len(subject.experiment.models) > 1 or subject.has_one_variant  # to which the block applies
    if "block" in subject.experiment.model_fields_set and not for_others:
        raise UserError(f"'{subject.model}' reads pictures of a size of its own; leave --block out")
    return pictures(text, subject.preprocessor, subject.config, blocks)


def pictures(
    source: str | Path, processor: "BaseImageProcessor", config: "PretrainedConfig", count: int | None = None
) -> Examples:
    """Return pictures for a vision model.

    Pictures of a folder are shuffled by a fixed seed, so that the first ones are of all classes; those of a data set
    keep its order.

    Args:
        source: a folder of pictures, or of one folder of them for each class, named as the model names the class, by
            one of several names between commas, or by its number; "sample", those handwritten digits of scikit-learn
            that models of this project were not trained on; or a data set of the hub, of which the first split of
            validation, test and train is read, with columns of pictures and, if it has them, classes.
        processor: the model's own, see `outliers.models.load.load_processor`.
        config: of the model, with its classes.
        count: number of pictures; None for all.

    Returns:
        Pixels float32 (pictures, channels, height, width) and classes int64 (pictures, 1), `IGNORED` without classes.

    Raises:
        UserError: there is no such folder or data set, it holds no pictures or fewer than `count`, pictures with and
            without a class, or a class that the model does not know; a file is no picture, is damaged, or too large.
    """
    listed = _listed(str(source), count)
    if len(listed) < (count or 1):
        what = (
            f"{len(listed)} pictures, not {count}; ask for fewer (--blocks), or give more" if count else "no pictures"
        )
        raise UserError(f"'{source}' has {what}")
    labels = [IGNORED if picture.label is None else _number(picture.label, config) for picture in listed]
    pixels = []
    for picture in listed:
        pixels.append(_prepared(picture, processor))
        if pixels[-1].shape != pixels[0].shape:
            sizes = " and ".join(" x ".join(map(str, values.shape[1:])) for values in (pixels[0], pixels[-1]))
            raise UserError(f"the model's image processor makes pictures of {sizes} pixels; expected one size for all")
        if pixels[0].numel() * len(listed) > MOST_VALUES:
            raise UserError(f"{len(listed):,} pictures have more than {MOST_VALUES:,} values; ask for fewer (--blocks)")
    return Examples(torch.stack(pixels), torch.tensor(labels)[:, None], PICTURES)


def _listed(source: str, count: int | None) -> list[Picture]:
    if source == "sample":
        held_out = digits(held_out=True)
        pairs = enumerate(zip(held_out.pictures, held_out.digits, strict=True))
        drawn = [Picture(f"digit {n}", partial(Image.fromarray, pixels), str(label)) for n, (pixels, label) in pairs]
        return _shuffled(drawn)[:count]
    if Path(source).is_dir():
        return _shuffled(_of_folder(Path(source)))[:count]
    if Path(source).exists() or source.count("/") != 1 or source.startswith(("/", ".")):
        raise UserError(
            f"'{source}' is not a folder; a vision model reads a folder of pictures, by class or not, or a data set of "
            "the hub (OWNER/NAME): give one with --text"
        )
    return list(itertools.islice(_of_hub(source), count))


def _of_folder(folder: Path) -> list[Picture]:
    files = sorted(
        itertools.islice((file for file in folder.rglob("*") if file.suffix.lower() in FORMATS), MOST_FILES + 1)
    )
    if not files:
        raise UserError(f"folder '{folder}' holds no pictures; expected files that end in {', '.join(FORMATS)}")
    if len(files) > MOST_FILES:
        raise UserError(f"folder '{folder}' holds more than {MOST_FILES:,} pictures; expected fewer")
    by_class = {file.parent != folder for file in files}
    if len(by_class) > 1:
        raise UserError(f"folder '{folder}' holds pictures beside folders of pictures; expected all by class, or none")
    classes = [file.relative_to(folder).parts[0] if by_class == {True} else None for file in files]
    return [
        Picture(str(file), lambda file=file: _open(start_of(file, LARGEST_FILE + 1)), label)
        for file, label in zip(files, classes, strict=True)
    ]


def _open(content: bytes | None) -> Image.Image:
    """Return a picture as RGB; raise ValueError, or an error of PIL, for anything else."""
    if content is None:
        raise ValueError("it is not a regular file")
    if len(content) > LARGEST_FILE:
        raise ValueError(f"it is larger than {LARGEST_FILE >> 20} MB")
    formats = sorted(set(FORMATS.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large pictures, whose size is checked below
        try:
            image = Image.open(BytesIO(content), formats=formats)
        except UnidentifiedImageError:  # whose message names an object in memory
            raise ValueError(f"it is none of {', '.join(formats)}") from None
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"it has {image.width:,} x {image.height:,} pixels, more than {MOST_PIXELS:,}")
    return image.convert("RGB")


def _prepared(picture: Picture, processor: "BaseImageProcessor") -> torch.Tensor:
    try:
        image = picture.read()
    except Exception as error:  # of any type, for unchecked bytes
        raise UserError(f"'{picture.name}' is not a readable picture: {reason_of(error, 150)}") from None
    try:
        return torch.as_tensor(processor(images=image, return_tensors="pt")["pixel_values"][0]).float()
    except Exception as error:
        raise UserError(f"the model's image processor refuses '{picture.name}': {reason_of(error, 150)}") from None


def _shuffled(pictures: list[Picture]) -> list[Picture]:
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(SEED))
    return [pictures[number] for number in order.tolist()]


def _number(name: str, config: "PretrainedConfig") -> int:
    """Return the number of a class from this number or a name that the model has for it; `IGNORED` without classes."""
    if not config.num_labels:
        return IGNORED
    plain = _class_key(name)
    for number, label in config.id2label.items():
        if plain in (_class_key(label), *map(_class_key, label.split(","))):
            return int(number)
    if plain.isdecimal() and int(plain) < config.num_labels:
        return int(plain)
    raise UserError(
        f"class {shown(name)} is none of the {config.num_labels} that the model knows "
        f"({joined_names([*config.id2label.values()])}); call its folder as the model does, or by its number"
    )


def _class_key(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def _of_hub(name: str) -> Iterator[Picture]:
    """Yield the pictures of a data set of the hub, whose bytes are decoded here, not by `datasets`."""
    from datasets import ClassLabel
    from datasets import Image as Column

    from outliers.text.documents import data_set

    rows = data_set(name, SPLITS)
    columns = {
        kind: [column for column, feature in (rows.features or {}).items() if isinstance(feature, kind)]
        for kind in (Column, ClassLabel)
    }
    if not columns[Column]:
        raise UserError(f"data set '{name}' has no column of pictures; expected one of the kind Image")
    column, classes = columns[Column][0], columns[ClassLabel][0] if columns[ClassLabel] else None
    names = rows.features[classes].names if classes else []
    rows = rows.cast_column(column, Column(decode=False))
    for number, row in enumerate(itertools.islice(rows, MOST_FILES)):
        content, label = (row[column] or {}).get("bytes"), row[classes] if classes else None
        known = label is not None and 0 <= label < len(names)
        read = partial(_open, content or b"")
        yield Picture(f"row {number} of {name}", read, names[label] if known else None)


class Digits(NamedTuple):
    """Pictures, uint8 (pictures, 8, 8, 3), whose three channels are equal, and their digits, int64 (pictures,)."""

    pictures: np.ndarray
    digits: np.ndarray


def digits(held_out: bool) -> Digits:
    """Return the held-out pictures, chosen with seed 0, or all others.

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the digits come with scikit-learn; install it (pip install scikit-learn)") from None
    data = load_digits()
    grey = np.rint(data.images * (255 / BRIGHTEST)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(grey))
    part = order[:HELD_OUT] if held_out else order[HELD_OUT:]
    return Digits(grey[part, :, :, None].repeat(3, 3), data.target[part].astype(np.int64))
