"""The anatomy of a model that no row of a table has, as `outliers.models.anatomy.discover` finds it."""

import copy
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from outliers.errors import UserError, reason_of
from outliers.models.anatomy.discover import Branch, Kind, Stack, find_stacks, lengths_of
from outliers.models.anatomy.experts import holds_experts
from outliers.models.anatomy.family import Family
from outliers.models.anatomy.row import Anatomy
from outliers.models.names import CACHE

if TYPE_CHECKING:
    from pydantic import TypeAdapter

ROLES_OF = {  # of a branch: mixes positions, and reads another stack's output
    (True, False): {"reads": "attn_in", "between": "attn_mid", "writes": "attn_out"},
    (False, False): {"reads": "ffn_in", "between": "ffn_mid", "writes": "ffn_out"},
    (True, True): {"reads": "cross_in", "memory": "cross_kv", "between": "attn_mid", "writes": "cross_out"},
}


# Fields of a configuration on which no anatomy depends.
UNIMPORTANT = ("_name_or_path", "transformers_version", "dtype", "architectures", "quantization_config")
_known: dict[int, tuple[ref, Anatomy]] = {}  # by the identity of a configuration that is there
_FILES = [Path(__file__).with_name(name) for name in ("discover.py", "experts.py", "found.py", "row.py")]


def anatomy_found(config: PretrainedConfig, family: Family) -> Anatomy:
    """Return the anatomy of a configuration's models from this process's memory, the user's cache, or a new pass.

    Raises:
        UserError: as `find`.
    """
    here, known = _known.get(id(config), (None, None))
    if here is not None and here() is config:
        return known
    file = CACHE / "anatomy" / f"{_key(config, family)}.json"
    anatomy = _read(file)
    if anatomy is None:
        anatomy = find(config, family)
        _write(file, anatomy)
    place = id(config)
    _known[place] = ref(config, lambda _gone: _known.pop(place, None)), anatomy
    return anatomy


def _key(config: PretrainedConfig, family: Family) -> str:
    """Return a hash of the configuration, the family, the versions and the code on which an anatomy depends."""
    fields = {name: value for name, value in config.to_dict().items() if name not in UNIMPORTANT}
    facts = [
        family.name,
        transformers_version,
        torch.__version__,
        _code(),
        json.dumps(fields, sort_keys=True, default=str),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in _FILES)).hexdigest()


@functools.cache
def _record() -> "TypeAdapter[Anatomy]":
    from pydantic import TypeAdapter  # late, as a model of a known architecture needs none

    return TypeAdapter(Anatomy)


def _read(file: Path) -> Anatomy | None:
    try:
        return _record().validate_json(file.read_bytes())
    except (OSError, ValueError):  # which was never written, or not to its end
        return None


def _write(file: Path, anatomy: Anatomy) -> None:
    with suppress(OSError):  # a cache that cannot be written costs time alone
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(_record().dump_json(anatomy))
        part.replace(file)


@torch.inference_mode(False)  # in which other operations are seen
def find(config: PretrainedConfig, family: Family) -> Anatomy:
    """Return the anatomy of a configuration's models by a pass on the meta device, which needs no weights.

    Raises:
        UserError: transformers cannot build the model, or run it without values; or it is no stack of layers.
    """
    kind = config.model_type
    try:
        with torch.device("meta"):
            model = family.made_by.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    except Exception as error:  # of any kind, for the model's code is not ours
        raise UserError(f"transformers cannot build a model of type '{kind}': {reason_of(error, 200)}") from None
    try:
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
    """Return the arguments of the pass: a picture, or as many tokens as no weight has features."""
    if family.name_of:
        return {model.main_input_name: family.smallest(model.config).ids[None].to("meta")}
    first, second = lengths_of(model)
    keywords = dict(family.keywords)
    ids = torch.zeros(1, first, dtype=torch.int64, device="meta")
    if model.config.is_encoder_decoder:
        keywords["decoder_input_ids"] = torch.zeros(1, second, dtype=torch.int64, device="meta")
    return {"input_ids": ids, **keywords}


def anatomy_of_stacks(model: PreTrainedModel, stacks: list[Stack], family: Family) -> Anatomy:
    """The record of stacks, of which the second one reads the first."""
    if len(stacks) == 1:
        return _anatomy(model, stacks[0], bidirectional=family.name in ("masked", "vision"))
    encoder, decoder = stacks
    second = _anatomy(model, decoder, stack="decoder")
    return replace(_anatomy(model, encoder, stack="encoder", bidirectional=True), decoder=second)


def _anatomy(model: PreTrainedModel, found: Stack, **of_all: object) -> Anatomy:
    kinds = [kind for kind in dict.fromkeys(found.kinds) if kind is not None]
    places = tuple(None if kind is None else kinds.index(kind) for kind in found.kinds)
    module = None if model.get_submodule(found.module) in (model, model.base_model) else found.module
    part = None if module is None else _config(model, module)
    of_all |= {"layers": found.layers, "module": module, "config": part, "width": found.width}
    first, *others = (
        replace(_of_kind(model, kind, f"{found.layers}.{found.kinds.index(kind)}", found.layers), **of_all)
        for kind in kinds
    )
    return replace(first, others=tuple(others), kinds=places)


def _config(model: PreTrainedModel, path: str) -> str | None:
    """The field of the configuration that holds that of a module, if it has one of its own."""
    own = model.get_submodule(path).config
    parts = {name: part for name, part in vars(model.config).items() if isinstance(part, PretrainedConfig)}
    return next((name for name, part in parts.items() if part is own or part == own), None) if parts else None


def _of_kind(model: PreTrainedModel, kind: Kind, path: str, layers: str) -> Anatomy:
    layer = model.get_submodule(path)
    roles: dict[str, list[str]] = {}
    apart = dict(kind.apart) | dict.fromkeys(kind.experts, "it holds experts in a way of its own")
    of: dict[str, str] = {}  # projection: its role
    for branch in kind.branches:
        for part, role in _roles(branch).items():
            there = [one for one in getattr(branch, part) if one not in (*kind.experts, *apart)]
            roles.setdefault(role, []).extend(there)
            of |= dict.fromkeys(there, role)
    of |= dict.fromkeys(kind.experts, "ffn_in")
    norms = {norm: tuple(dict.fromkeys(of[one] for one in readers if one in of)) for norm, readers in kind.norms}
    behind = {norm: "ffn_out" if one in kind.experts else of[one] for norm, one in kind.norms_behind}
    return Anatomy(
        layers=layers,
        attention=next(iter(kind.attention), None),
        cross_attention=next(iter(kind.cross_attention), None),
        norms={norm: read for norm, read in norms.items() if read},
        norm_offset=_offset(model, [f"{path}.{norm}" for norm in norms]),
        read_by=dict((*kind.norms_between, *kind.norms)),
        recurrent=sum(branch.mixes for branch in kind.branches) > len({*kind.attention, *kind.cross_attention}),
        norms_of_sums=kind.norms_of_sums,
        norms_behind=behind,
        experts=next((name for name, one in layer.named_modules() if holds_experts(one)), None),
        **{"attn_in": (), "attn_out": ()} | {role: tuple(names) for role, names in roles.items()},
        router=kind.routers,
        found=True,
        states=_states(dict(kind.inputs), of, kind.routers),
        apart=apart,
        shares=kind.layers,
        uses=kind.uses,
    )


def _offset(model: PreTrainedModel, norms: list[str]) -> float:
    """Measure on a probe the number that norms add to their weight before they multiply with it."""
    for path in norms:
        norm = model.get_submodule(path)
        weight = norm._parameters.get("weight")
        if weight is None:
            continue
        outputs = []
        for value in (0.0, 1.0):
            probe = copy.deepcopy(norm).to_empty(device="cpu")
            for name, parameter in probe.named_parameters():
                nn.init.constant_(parameter, value if name == "weight" else 0.0)
            with torch.no_grad():
                outputs.append(probe(torch.linspace(-1, 1, len(weight))[None].to(weight.dtype)).float())
        of_zero, of_one = (float(output.norm()) for output in outputs)
        return 0.0 if of_zero == 0 else round(of_zero / (of_one - of_zero), 6)
    return 0.0


def _states(inputs: Mapping[str, int], of: Mapping[str, str], routers: Iterable[str]) -> dict[str, int]:
    """Number the hidden states of each role; projections that read the first one are left out, and routers that read
    none of ffn_in."""
    read: dict[str, list[int]] = {}
    for one, role in of.items():
        states = read.setdefault(role, [])
        if inputs[one] not in states:
            states.append(inputs[one])
    numbers = {one: read[role].index(inputs[one]) for one, role in of.items()}
    there = read.get("ffn_in", [])
    shared = {one: there.index(inputs[one]) for one in routers if inputs[one] in there}
    return {one: number for one, number in numbers.items() if number} | shared


def _roles(branch: Branch) -> dict[str, str]:
    return ROLES_OF[(branch.mixes or bool(branch.memory), bool(branch.memory))]
