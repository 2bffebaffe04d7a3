"""The anatomy of a configuration's models, found by `outliers.models.anatomy.discovery` and cached."""

import copy
import functools
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from weakref import ref

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from outliers.errors import UserError, reason_of, reason_of_transformers
from outliers.models.anatomy.discovery import find_stacks
from outliers.models.anatomy.discovery.flow import unmistakable_lengths
from outliers.models.anatomy.family import Family
from outliers.models.anatomy.row import Anatomy, of_all_kinds
from outliers.models.names import CACHE

# Fields of a configuration on which no anatomy depends.
UNIMPORTANT = ("_name_or_path", "transformers_version", "dtype", "architectures", "quantization_config")
# Fields of anatomies that a pass does not find, by the type of model.
EXCEPTIONS: dict[str, dict[str, object]] = {
    "codegen": {"by_head": None},  # a pass sees three parts, but not which are queries, values and keys
    "deepseek_v4": {"recurrent": True},  # an unusual softmax compresses the keys and values of positions
    "falcon": {"alibi": "alibi"},  # its attention adds biases of positions to the mask, which hides keys too
    "gpt_neo": {"window": "bias"},  # a buffer of the attention, and not the mask, hides keys
}
# By the identity of a configuration: a reference to it, its fields, which may change, and its anatomy. And by its key.
_known: dict[int, tuple[ref, dict, Anatomy]] = {}
_by_key: dict[str, Anatomy] = {}
_FILES = sorted(Path(__file__).parent.rglob("*.py"))


def anatomy_found(config: PretrainedConfig, family: Family) -> Anatomy:
    """Return the anatomy of a configuration's models from this process's memory, the user's cache, or a new pass.

    Raises:
        UserError: as `find_anatomy`.
    """
    reference, fields, known = _known.get(id(config), (None, None, None))
    if reference is not None and reference() is config and fields == vars(config):
        return known
    key = _key(config, family)
    if key not in _by_key:
        file = CACHE / "anatomy" / f"{key}.json"
        known = type(config).__module__.startswith("transformers.")  # the key does not cover the code of other packages
        anatomy = _read(file) if known else None
        if anatomy is None:
            anatomy = find_anatomy(config, family)
            if known:
                _write(file, anatomy)
        fields = EXCEPTIONS.get(config.model_type, {})
        _by_key[key] = of_all_kinds(anatomy, **fields)
    place = id(config)
    _known[place] = ref(config, lambda _gone: _known.pop(place, None)), dict(vars(config)), _by_key[key]
    return _by_key[key]


def _key(config: PretrainedConfig, family: Family) -> str:
    """Return a hash of the configuration, the family, the versions and the code on which an anatomy depends."""
    fields = {name: value for name, value in config.to_dict().items() if name not in UNIMPORTANT}
    facts = [
        family.name,
        f"{type(config).__module__}.{type(config).__qualname__}",
        transformers_version,
        torch.__version__,
        _code(),
        json.dumps(fields, sort_keys=True, default=str),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()


def _read(file: Path) -> Anatomy | None:
    try:
        return _anatomy_of_fields(json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):  # the file is missing or incomplete
        return None


def _anatomy_of_fields(fields: dict) -> Anatomy:
    """Return the anatomy of the fields that JSON holds."""
    others, second = fields.pop("others"), fields.pop("decoder")
    return Anatomy(
        **_tuples(fields),
        others=tuple(map(_anatomy_of_fields, others)),
        decoder=second and _anatomy_of_fields(second),
    )


def _tuples(value: object) -> object:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {name: _tuples(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def _write(file: Path, anatomy: Anatomy) -> None:
    with suppress(OSError):  # a cache that cannot be written only costs time
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(anatomy)))
        part.replace(file)


@torch.inference_mode(False)  # inference mode dispatches other operations
def find_anatomy(config: PretrainedConfig, family: Family) -> Anatomy:
    """Return the anatomy of a configuration's models by a pass on the meta device, which needs no weights.

    Raises:
        UserError: transformers cannot build the model, or run it without values; or it is no stack of layers.
    """
    kind = config.model_type
    try:
        with torch.device("meta"):
            model = family.made_by.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    except Exception as error:  # of any class, because the model's code is not ours
        raise UserError(f"cannot build a model of type '{kind}': {reason_of_transformers(error, 200)}") from None
    try:
        try:
            stacks = find_stacks(model, _inputs(model, family))
        except RuntimeError:  # some models make tensors on the CPU during a pass
            with torch.device("meta"):
                stacks = find_stacks(model, _inputs(model, family))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"unknown architecture '{kind}': where its layers are could not be found, because transformers does not "
            f"run it without values: {reason_of(error, 200)}"
        ) from None
    return anatomy_of_stacks(model, stacks, family)


def _inputs(model: PreTrainedModel, family: Family) -> dict[str, object]:
    """Return the arguments of the pass: a picture, or a number of tokens that no weight has as a dimension."""
    if family.name_of:
        return {model.main_input_name: family.smallest(model.config).ids[None].to("meta")}
    first, second = unmistakable_lengths(model)
    keywords = dict(family.keywords)
    ids = torch.zeros(1, first, dtype=torch.int64, device="meta")
    if model.config.is_encoder_decoder:
        keywords["decoder_input_ids"] = torch.zeros(1, second, dtype=torch.int64, device="meta")
    return {"input_ids": ids, **keywords}


def anatomy_of_stacks(model: PreTrainedModel, stacks: list[Anatomy], family: Family) -> Anatomy:
    """Return the anatomy of stacks, of which the second one reads the output of the first."""
    if len(stacks) == 1 and model.config.is_encoder_decoder:
        raise UserError(
            f"unknown architecture '{model.config.model_type}': no layers read what others put out; expected an "
            "encoder and a decoder in two lists"
        )
    if len(stacks) == 1:
        return of_all_kinds(stacks[0], bidirectional=family.name in ("masked", "vision"))
    encoder, decoder = stacks
    second = of_all_kinds(decoder, stack="decoder")
    return replace(of_all_kinds(encoder, stack="encoder", bidirectional=True), decoder=second)
