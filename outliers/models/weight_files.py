"""The weight files of a model, selected for all loaders before any weight is read, and watched for changes."""

import json
import os
from collections.abc import Iterable
from os.path import lexists  # true also for a broken link
from pathlib import Path

from outliers.errors import ChangedWeights, UserError, joined_names, shown
from outliers.files import start_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
INT8 = "int8.safetensors"  # of a model that `outliers.save_quantized` wrote
ADAPTER = "adapter_config.json"  # of PEFT, beside the weights of a model or alone
ADAPTER_WEIGHTS = "adapter_model.safetensors"
LARGEST_ADAPTER = 1 << 20  # bytes of its configuration
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
PICKLED = (
    "it has no safetensors weights, and pickled ones are not read because they can run code; convert them where you "
    "trust them: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)"
)
LARGEST_INDEX = 32_000_000  # bytes; the largest published ones take a third
_read: dict[tuple[str, str | None], dict[Path, tuple | None]] = {}  # model to the state of its files


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in a folder: `model.safetensors`, or those that its index lists.

    Other files are never the model: shards of an earlier download, optimizer states, averaged weights, adapters,
    pickles.
    """
    if lexists(folder / WEIGHTS):
        return [regular_file(folder / WEIGHTS)]
    return [regular_file(folder / shard) for shard in listed_shards(folder)]


def listed_shards(folder: Path) -> list[str]:
    """Return the names of the files that the index of a folder lists, whether or not they exist yet."""
    index = folder / INDEX
    if not lexists(index):
        raise _no_weights(folder)
    try:
        if regular_file(index).stat().st_size > LARGEST_INDEX:
            raise UserError(f"'{index}' has more than {LARGEST_INDEX // 10**6} MB; expected an index of weight files")
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = dict.fromkeys(listed.values())
    except OSError as error:
        raise UserError(f"cannot read '{index}' ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shards = {}
    if not shards:
        raise UserError(
            f"'{index}' is not an index of weight files; expected JSON with a 'weight_map' from tensors to files"
        )
    for shard in shards:
        if not _is_plain_name(shard):
            raise UserError(
                f"'{index}' lists {str(shard)[:100]!a} as weights; expected names of .safetensors files in its folder"
            )
    return sorted(shards)


def regular_file(path: Path) -> Path:
    """Return a path; raise UserError unless it is a regular file inside its folder, or a link into the hub's cache."""
    if not lexists(path):
        raise UserError(f"'{path.parent}' lacks '{path.name}', a part of its weights; download or copy it again")
    folder, target = path.parent.resolve(), Path(os.path.realpath(path))
    in_cache = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    if not (target.is_relative_to(folder) or in_cache):
        raise UserError(f"'{path}' is a link that leads out of its folder; expected a file, copy it there")
    if not target.is_file():
        raise UserError(f"'{path}' is not a regular file; expected the weights of a model")
    return path


def _is_plain_name(shard: object) -> bool:
    plain = isinstance(shard, str) and shard.isprintable() and len(os.fsencode(shard)) <= 255
    return plain and shard.endswith(".safetensors") and not {"/", "\\"} & set(shard)


def adapter_fields(folder: Path) -> dict | None:
    """Return the configuration of the PEFT adapter in a folder, or None."""
    content = start_of(folder / ADAPTER, LARGEST_ADAPTER)
    if content is None:
        return None
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("peft_type"), str):
        raise UserError(f"'{folder / ADAPTER}' is no configuration of an adapter; expected JSON with a 'peft_type'")
    return fields


def adapter_in_words(fields: dict) -> str:
    """Describe an adapter by its kind and base model."""
    base = fields.get("base_model_name_or_path")
    return f"{fields['peft_type']} adapter" + (f" of {shown(base)}" if isinstance(base, str) and base else "")


def adapter_alone(folder: Path) -> UserError | None:
    """Return the error for a folder with an adapter and no model; None for other folders."""
    if lexists(folder / WEIGHTS) or lexists(folder / INDEX) or (fields := adapter_fields(folder)) is None:
        return None
    return UserError(
        f"'{folder}' holds no model but a {adapter_in_words(fields)}; copy it beside the weights of that model and "
        "name that with --adapter, or merge it by PEFT"
    )


def _no_weights(folder: Path) -> UserError:
    """Return the error for a folder without weights, which names similar files."""
    if alone := adapter_alone(folder):
        return alone
    if lexists(folder / INT8):
        return UserError(
            f"'{folder}' holds an int8 model of outliers.save_quantized; expected weights: use the model that it was "
            "made of, compare it by `outliers damage --against`, or read it with outliers.load_quantized"
        )
    names = sorted(path.name for path in folder.glob("*.safetensors") if path.name.isprintable())
    if not names:
        pickled = any(path.suffix in PICKLES for path in folder.glob("*"))
        return UserError(
            f"cannot load '{folder}': {PICKLED if pickled else f'it has no safetensors weights; expected {WEIGHTS}'}"
        )
    return UserError(
        f"'{folder}' has neither {WEIGHTS} nor {INDEX}, so it is unclear which of its files ({joined_names(names)}) is "
        f"the model; rename that one to {WEIGHTS}"
    )


def record_weight_files(name: str, revision: str | None, files: Iterable[Path]) -> None:
    """Record the state of a model's weight files, just before they are read."""
    _read[name, revision] = {file: state_of(file) for file in files}


def check_unchanged(name: str, revision: str | None) -> None:
    """Raise ChangedWeights if a model's files changed since they were read."""
    for file, state in _read.get((name, revision), {}).items():
        if state_of(file) != state:
            raise ChangedWeights(
                f"the weights of '{name}' changed while they were measured ('{file}'); what was measured before is "
                "kept: run again once the file is whole"
            )


def state_of(file: Path) -> tuple | None:
    """Return marks of a file that change with it: inode, size, and time of the last write in nanoseconds; None if
    missing."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
