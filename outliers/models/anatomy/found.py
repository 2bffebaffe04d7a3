"""The anatomy of a configuration's models, found by `outliers.models.anatomy.discover` and cached."""

import copy
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from weakref import ref

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from outliers.criterion import ROLES
from outliers.errors import UserError, reason_of, reason_of_transformers
from outliers.models.anatomy.discover import (
    Branch,
    Kind,
    Outputs,
    Stack,
    ancestors,
    find_stacks,
    is_projection,
    lengths_of,
)
from outliers.models.anatomy.experts import holds_experts, number_of
from outliers.models.anatomy.family import Family
from outliers.models.anatomy.row import Anatomy
from outliers.models.names import CACHE

ROLES_OF = {  # by whether a branch mixes positions, and reads another stack's output
    (True, False): {"reads": "attn_in", "between": "attn_mid", "writes": "attn_out"},
    (False, False): {"reads": "ffn_in", "between": "ffn_mid", "writes": "ffn_out"},
    (True, True): {"reads": "cross_in", "memory": "cross_kv", "between": "attn_mid", "writes": "cross_out"},
}


# Fields of a configuration on which no anatomy depends.
UNIMPORTANT = ("_name_or_path", "transformers_version", "dtype", "architectures", "quantization_config")
# Fields of anatomies that a pass does not find, by the type of model.
EXCEPTIONS: dict[str, dict[str, object]] = {
    "codegen": {"by_head": None},  # queries, values, keys: a pass sees three parts, and not which is which
    "deepseek_v4": {"recurrent": True},  # a softmax of a shape of its own compresses keys and values of positions
    "falcon": {"alibi": "alibi"},  # its attention adds biases of positions to the mask, which hides keys too
    "gpt_neo": {"window": "bias"},  # a buffer of the attention, and not the mask, hides keys
}
KEY_HEADS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads")  # fields of configurations
RESIDUAL_SCALE = "residual_multiplier"  # the field of a configuration with which Granite's outputs are multiplied
# By the identity of a configuration that is there: with its fields, which may change. And by its key.
_known: dict[int, tuple[ref, dict, Anatomy]] = {}
_by_key: dict[str, Anatomy] = {}
_FILES = [Path(__file__).with_name(name) for name in ("discover.py", "experts.py", "found.py", "row.py")]


def anatomy_found(config: PretrainedConfig, family: Family) -> Anatomy:
    """Return the anatomy of a configuration's models from this process's memory, the user's cache, or a new pass.

    Raises:
        UserError: as `find`.
    """
    here, fields, known = _known.get(id(config), (None, None, None))
    if here is not None and here() is config and fields == vars(config):
        return known
    key = _key(config, family)
    if key not in _by_key:
        file = CACHE / "anatomy" / f"{key}.json"
        known = type(config).__module__.startswith("transformers.")  # the key says nothing of the code of others
        anatomy = _read(file) if known else None
        if anatomy is None:
            anatomy = find(config, family)
            if known:
                _write(file, anatomy)
        fields = EXCEPTIONS.get(config.model_type, {})
        _by_key[key] = replace(anatomy, **fields, others=tuple(replace(one, **fields) for one in anatomy.others))
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
        return _of_fields(json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):  # which was never written, or not to its end
        return None


def _of_fields(fields: dict) -> Anatomy:
    """Return a record of what JSON makes of one."""
    others, second = fields.pop("others"), fields.pop("decoder")
    return Anatomy(
        **_tuples(fields),
        others=tuple(map(_of_fields, others)),
        decoder=second and _of_fields(second),
    )


def _tuples(value: object) -> object:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {name: _tuples(one) for name, one in value.items()} if isinstance(value, dict) else value


def _write(file: Path, anatomy: Anatomy) -> None:
    with suppress(OSError):  # a cache that cannot be written costs time alone
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(anatomy)))
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
    """Return the anatomy of stacks, of which the second one reads the output of the first."""
    if len(stacks) == 1 and model.config.is_encoder_decoder:
        raise UserError(
            f"unknown architecture '{model.config.model_type}': no layers read what others put out; expected an "
            "encoder and a decoder in two lists"
        )
    if len(stacks) == 1:
        return _anatomy(model, stacks[0], bidirectional=family.name in ("masked", "vision"))
    encoder, decoder = stacks
    second = _anatomy(model, decoder, stack="decoder")
    return replace(_anatomy(model, encoder, stack="encoder", bidirectional=True), decoder=second)


def _check_whole(model: PreTrainedModel, found: Stack) -> None:
    """Raise UserError if parts of the layers are in another list, as the feed-forward parts of XLM are."""
    parent = found.layers.rpartition(".")[0]
    for name, other in model.get_submodule(parent)._modules.items():
        path = f"{parent}.{name}".lstrip(".")
        beside = isinstance(other, nn.ModuleList) and len(other) == len(found.kinds) and path != found.layers
        if beside and any(map(is_projection, other.modules())):
            raise UserError(
                f"unknown architecture '{model.config.model_type}': parts of its layers are in two lists, "
                f"'{found.layers}' and '{path}'; expected all parts of a layer in one module"
            )


def _anatomy(model: PreTrainedModel, found: Stack, **of_all: object) -> Anatomy:
    _check_whole(model, found)
    kinds = [kind for kind in dict.fromkeys(found.kinds) if kind is not None]
    places = tuple(None if kind is None else kinds.index(kind) for kind in found.kinds)
    module = None if model.get_submodule(found.module) in (model, model.base_model) else found.module
    around = (path for path in ancestors(found.layers) if isinstance(model.get_submodule(path), PreTrainedModel))
    part = _config(model, module or next(around, ""))
    reader = next(iter(found.readers), None)
    others = [path for path in found.added if path not in (*found.norms, *found.readers)]
    of_all |= {
        "layers": found.layers,
        "module": module,
        "config": part,
        "width": found.width,
        "streams": found.streams,
        "last_norm": found.last_norm,
        "embedding": reader if reader and not isinstance(model.get_submodule(reader), nn.Embedding) else None,
        "embedding_norm": next(iter(found.norms), None),
        "positions": others[0] if len(others) == 1 else None,
        "residual_scale": RESIDUAL_SCALE if hasattr(model.config, RESIDUAL_SCALE) else None,
        "padded_positions": _has_padded_positions(model, found.readers),
    }
    first, *others = (
        replace(_of_kind(model, kind, f"{found.layers}.{found.kinds.index(kind)}", found.layers), **of_all)
        for kind in kinds
    )
    return replace(first, others=tuple(others), kinds=places, turns=found.turns)


def _has_padded_positions(model: PreTrainedModel, readers: tuple[str, ...]) -> bool:
    """Return whether the embedding of positions has a row for padding."""
    context = getattr(model.config, "max_position_embeddings", None)
    return any(
        isinstance(module, nn.Embedding) and module.num_embeddings == context and module.padding_idx is not None
        for path, module in model.named_modules()
        if path not in readers
    )


def _config(model: PreTrainedModel, path: str) -> str | None:
    """Return the field of the configuration that holds a module's own; None if it has none."""
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
    experts = next((name for name, one in layer.named_modules() if holds_experts(one)), None)
    attn_in, split = roles.get("attn_in", ()), dict(kind.split)
    ffn_in = [name for name in roles.get("ffn_in", ()) if not name.startswith(f"{experts}.")]
    # what only one expert reads is no state of the layer
    of_layer = {one: of[one] for one in of if of[one] == "ffn_in" or not one.startswith(f"{experts}.")}
    anatomy = Anatomy(
        layers=layers,
        by_head=_is_by_head(split.get(attn_in[0], ()), model.config) if len(attn_in) == 1 else False,
        fused_gate=_is_gate(split.get(ffn_in[0], ())) if len(ffn_in) == 1 else False,
        attention=next(iter(kind.attention), None),
        cross_attention=next(iter(kind.cross_attention), None),
        norms={norm: read for norm, read in norms.items() if read},
        norm_offset=_offset(model, [f"{path}.{norm}" for norm in norms]),
        read_by=dict((*kind.norms_between, *kind.norms)),
        recurrent=kind.recurrent,
        norms_of_sums=kind.norms_of_sums,
        norms_behind=behind,
        experts=experts,
        **{"attn_in": (), "attn_out": ()} | {role: tuple(names) for role, names in roles.items()},
        router=kind.routers,
        states=_states(dict(kind.inputs), of_layer, kind.routers),
        apart=apart,
        shares=kind.layers,
    )
    return _for_all(anatomy, number_of(layer.get_submodule(experts))) if experts else anatomy


def _for_all(anatomy: Anatomy, count: int) -> Anatomy:
    """Repeat for all experts of a layer what a pass, which follows the first one alone, has found of it."""
    first = f"{anatomy.experts}.0."

    def named(name: str) -> list[str]:
        if not name.startswith(first):
            return [name]
        return [f"{anatomy.experts}.{number}.{name.removeprefix(first)}" for number in range(count)]

    def listed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(chain.from_iterable(map(named, names)))

    return replace(
        anatomy,
        **{role: listed(getattr(anatomy, role)) for role in ROLES},
        read_by={norm: listed(names) for norm, names in anatomy.read_by.items()},
        states={name: state for one, state in anatomy.states.items() for name in named(one)},
    )


def _is_by_head(parts: tuple[Outputs | None, ...], config: PretrainedConfig) -> bool | None:
    """Return whether a fused projection groups its outputs by heads of keys; None if unknown."""
    groups = {part and part[0] for part in parts}
    if len(groups) != 1 or None in groups or parts[0][1]:
        return None
    return groups != {1} if groups <= {1, *(getattr(config, name, 1) for name in KEY_HEADS)} else None


def _is_gate(parts: tuple[Outputs | None, ...]) -> bool | None:
    """Return whether a projection computes the gate too, in its first outputs; None if unknown."""
    if not parts:
        return False
    halves = len(parts) == 2 and None not in parts and all(part[0] == 1 for part in parts)
    return True if halves and parts[1][1] == parts[0][2] == parts[1][2] and not parts[0][1] else None


def _offset(model: PreTrainedModel, norms: list[str]) -> float:
    """Measure the number that norms add to their weight before multiplying with it."""
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
    """Number the hidden states of each role. Projections that read the first one are left out, and so are routers that
    read no state of ffn_in."""
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
