"""The anatomy of a model: its stacks, layers and projections by role, and the family it belongs to."""

import difflib
import inspect
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
    WeightConverter,
)
from transformers import __version__ as transformers_version
from transformers.pytorch_utils import Conv1D

from outliers.criterion import QUANTIZED, ROLES, ROUTER
from outliers.errors import UserError, no_such_feature
from outliers.models.anatomy.causal import CAUSAL
from outliers.models.anatomy.examples import Block
from outliers.models.anatomy.experts import ExpertProjection, is_batched, unfold
from outliers.models.anatomy.family import Family
from outliers.models.anatomy.found import anatomy_found
from outliers.models.anatomy.masked import MASKED
from outliers.models.anatomy.row import Anatomy
from outliers.models.anatomy.seq2seq import SEQ2SEQ
from outliers.models.anatomy.turns import Turns
from outliers.models.anatomy.vision import KINDS, VISION, vision_config
from outliers.models.internals import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    WeightRenaming,
    get_checkpoint_conversion_mapping,
)
from outliers.models.plugins import plugins

FAMILIES = {family.name: family for family in (CAUSAL, MASKED, SEQ2SEQ, VISION)}
CAUSAL_CLASS = "ForCausalLM"  # ends the names of classes of transformers
COMPOSITE = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES  # types of models that have a text part
# Patterns of the names of a text part's tensors in checkpoints of models that take pictures too, each with its
# replacement; and patterns of the tensors of parts that are not measured.
TEXT_KEYS = {r"^(language_model|text_model)\.": "", r"^model\.(language_model|text_model)\.": "model."}
OTHER_PARTS = r"^(model\.)?\w*(vision|visual|image|audio|video|projector|connector|aligner|qformer)\w*\."
OTHER_TOWERS = r"^(text_model\.|text_projection\.|visual_projection\.|logit_scale$|logit_bias$)"
# Fields of a text part's configuration that change its logits, with the values that have no effect: the head of a whole
# model, such as Aya Vision, may ignore them.
OF_HEADS = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}
# Patterns of the names in checkpoints of a tower alone.
TOWER_KEYS = {r"^(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.": r"vision_model.\1."}
CONTEXTS = ("max_position_embeddings", "max_seq_len")  # fields of a configuration that bound the length of a block
STRETCHED = ("linear", "dynamic", "yarn")  # types of rotary scaling by whose factor a model takes longer blocks
# Classes of layers that only multiply by their weight and add their bias.
PLAIN = (
    "outliers.models.anatomy.experts.ExpertProjection",
    "torch.nn.modules.linear.Linear",
    "transformers.pytorch_utils.Conv1D",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
)
NORMS = ("norms", "norms_behind")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")  # attributes of attentions
WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes of weights, not of codes


def add_family(family: Family) -> None:
    """Register a family; an installed package declares it in the group `outliers.families` of entry points.

    Raises:
        UserError: its name, or an architecture of it, is that of another family.
    """
    kinds = {kind for other in FAMILIES.values() for kind in other.kinds}
    taken = [name for name in (family.name, *family.kinds) if name in FAMILIES or name in kinds]
    if taken:
        raise UserError(f"family '{family.name}': '{taken[0]}' is taken; expected new names")
    FAMILIES[family.name] = family


def _take_plugins(kind: str) -> None:
    """Register the families of installed packages if a type of model has no family yet."""
    for _, origin, family in () if _families(kind) else plugins("outliers.families"):
        if not isinstance(family, Family):
            raise UserError(f"{origin} is {type(family).__name__}; expected a Family: remove it")
        if FAMILIES.get(family.name) is not family:
            add_family(family)


# By the class of a configuration: the class of a model that was passed from Python and that no auto class makes.
_own_models: dict[type[PretrainedConfig], type[PreTrainedModel]] = {}


class _OwnModels:
    """A substitute for an auto class of transformers, which makes models whose type has no family."""

    @staticmethod
    def from_config(config: PretrainedConfig, **options) -> PreTrainedModel:
        return _class_of(config)._from_config(config, **options)


OWN = replace(CAUSAL, kinds=(), made_by=_OwnModels)


def know_class(model: PreTrainedModel) -> None:
    """Remember the class of a model whose type has no family, so that its anatomy is found like that of a causal
    language model."""
    kind = type(model)
    own = not kind.__module__.startswith("transformers.")
    if not _families(model.config.model_type) and (own or kind.__name__.endswith(CAUSAL_CLASS)):
        _own_models[type(model.config)] = kind


def _class_of(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the model class of a configuration whose type has no family: one that was passed from Python, the causal
    class that the checkpoint names, or an image-text class whose text part transformers cannot make alone."""
    kind = type(config)
    if kind in _own_models or config.is_encoder_decoder or _families(config.model_type):
        return _own_models.get(kind)
    known = _class_named(config)
    if known and known.__name__.endswith(CAUSAL_CLASS):
        return known
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, None)


def _class_named(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that a checkpoint names, if transformers has it and it uses this configuration."""
    named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    return named if getattr(named, "config_class", None) is type(config) else None


class Projection(NamedTuple):
    """A linear projection of a layer, a `Linear` or `Conv1D`, or another module that reads a hidden state.

    Routers and the modules that hold a layer's experts are such readers too.

    layer: the number of its layer. role: that of the hidden state that it reads. path: its path in the model.
    position_stack: the number of the stack whose positions its input has. state: the number of the hidden state among
    those of the role in this layer. expert: the number of the expert that it belongs to, whose input has only the
    tokens that chose it.
    """

    layer: int
    role: str
    path: str
    module: nn.Module
    position_stack: int = 0
    state: int = 0
    expert: int | None = None

    @property
    def layer_state(self) -> tuple[int, str]:
        """The layer and the hidden state that the projection reads, such as (3, "ffn_in"), and (3, "ffn_in 2") for the
        second state of the role; a state that only one expert reads is (3, "ffn_out of expert 5")."""
        if self.expert is not None and self.role != "ffn_in":
            return self.expert_state
        return self.layer, f"{self.role} {self.state + 1}" if self.state else self.role

    @property
    def expert_state(self) -> tuple[int, str]:
        """The same, restricted to the tokens of the projection's expert: (3, "ffn_in of expert 5") for an expert that
        reads (3, "ffn_in")."""
        return self.layer_state if self.expert is None else (self.layer, f"{self.role} of expert {self.expert}")


def _families(kind: str) -> list[Family]:
    return [family for family in FAMILIES.values() if kind in family.kinds]


def anatomy_of(config: PretrainedConfig) -> Anatomy:
    """Return the anatomy of a configuration's models.

    Raises:
        UserError: transformers has no such type of model, or cannot build or run it; or no layers are found in it.
    """
    if _class_of(config) is None:
        check_known(config.model_type)
    return anatomy_found(config, family_of(config))


def check_known(kind: str) -> None:
    """Raise UserError unless a type of model belongs to a family."""
    _take_plugins(kind)
    if _families(kind) or kind in COMPOSITE:
        return
    if kind in CONFIG_MAPPING:
        raise UserError(
            f"unknown architecture '{kind}': transformers makes no language model of it, neither causal nor masked nor "
            f"of an encoder and a decoder; expected one that predicts tokens, or of pictures {', '.join(KINDS)}"
        )
    near = difflib.get_close_matches(kind, CONFIG_MAPPING, n=3, cutoff=0.5)
    similar = f" (known and similar: {', '.join(near)})" if near else ""
    raise UserError(
        f"unknown architecture '{kind}'{similar}; transformers {transformers_version} has no such type: expected one "
        "that it has, or a newer transformers"
    )


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a configuration's models; `is_decoder` decides between several families of one type."""
    if _class_of(config):
        return OWN
    kind = config.model_type
    _take_plugins(kind)
    if config.is_encoder_decoder:
        return SEQ2SEQ
    families = [family for family in _families(kind) if family is not SEQ2SEQ]
    if len(families) > 1 and hasattr(config, "is_decoder"):
        families = [CAUSAL if config.is_decoder else MASKED]
    return next(iter(families), CAUSAL)


def part_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the measured part of a model: the text part if it also takes pictures or sounds, the
    tower of a vision model, otherwise the configuration itself."""
    part = config.get_text_config(decoder=True)
    if part is config or config.is_encoder_decoder or part.model_type not in CAUSAL.kinds:
        return vision_config(config)
    part._commit_hash = getattr(config, "_commit_hash", None)
    whole = _class_named(config) or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    part.architectures = whole and [whole.__name__]
    if whole and whole._tied_weights_keys:  # the head is the whole model's
        part.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
        used = inspect.unwrap(whole.forward).__code__.co_names
        for field, neutral in OF_HEADS.items():
            if hasattr(part, field) and field not in used:
                setattr(part, field, neutral)
    return part


def renamed_keys(config: PretrainedConfig) -> list[WeightRenaming | WeightConverter]:
    """Return the rules by which names of tensors in checkpoints of whole models become those of the measured part."""
    family, rules = family_of(config), TEXT_KEYS
    if family is VISION:
        rules = TOWER_KEYS if hasattr(config, "vision_config") else {}
    elif family is OWN:
        rules = {}
    whole, conversions = next(iter(config.architectures or ()), ""), None
    kind = getattr(getattr(transformers, whole, None), "config_class", None)
    if kind is not type(config) and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        conversions = get_checkpoint_conversion_mapping(whole) or get_checkpoint_conversion_mapping(kind.model_type)
    return [*(conversions or ()), *(WeightRenaming(pattern, name) for pattern, name in rules.items())]


def other_parts(config: PretrainedConfig) -> str:
    """Return a pattern of the names of tensors in checkpoints that belong to parts that are not measured."""
    return OTHER_TOWERS if family_of(config) is VISION else OTHER_PARTS


def stacks_of(config: PretrainedConfig) -> list[Anatomy]:
    """Return the `Anatomy` of each stack of layers, in the order in which they run; it also describes the first kind of
    layer of the stack."""
    first = anatomy_of(config)
    return [first, first.decoder] if first.decoder else [first]


def has_attention(config: PretrainedConfig) -> bool:
    """Return whether any layer of a model has attention; purely recurrent models have none."""
    return any(kind.attention for stack in stacks_of(config) for kind in stack.layer_kinds)


def check_one_stack(config: PretrainedConfig) -> None:
    """Raise UserError if a model has several stacks of layers, and so several residual streams."""
    if len(stacks_of(config)) > 1:
        raise UserError(
            f"'{config.model_type}' has an encoder and a decoder, each with its own residual stream; this accounts for "
            "models with one: use outliers.trace, ablate or damage, which tell stacks apart"
        )


def inputs_of(model: PreTrainedModel, block: Block) -> tuple[torch.Tensor, ...]:
    """Return the input of each stack for a block, on the block's device: token ids, int64 (T,), or pixels."""
    return family_of(model.config).inputs(model, block)


def ids_of(model: PreTrainedModel, block: Block) -> tuple[torch.Tensor, ...]:
    """Return the ids at the positions that each stack reads of a block, int64 (T,): token ids, or for a picture the
    numbers of its positions."""
    family = family_of(model.config)
    return tuple(family.ids(model.config, read) for read in family.inputs(model, block))


def stack_module(model: PreTrainedModel, stack: Anatomy) -> PreTrainedModel:
    return model.base_model if stack.module is None else model.get_submodule(stack.module)


def input_embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that start the residual streams, each once: embeddings of tokens, or a convolution of
    pixels."""
    embeddings = (
        model.get_submodule(stack.embedding) if stack.embedding else stack_module(model, stack).get_input_embeddings()
        for stack in stacks_of(model.config)
    )
    return list(dict.fromkeys(embeddings))


def run_stack(
    model: PreTrainedModel, stack: Anatomy, inputs: torch.Tensor, memory: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the last hidden states (T, features) of a stack, after its final norm.

    inputs: the stack's input for a block. memory: the output of the previous stack, (1, T, features), if there is one.
    """
    family, keywords = family_of(model.config), {}
    if not stack.decoder:
        recurrent = any(kind.recurrent for kind in stack.layer_kinds)
        keywords = family.keywords | ({"past_key_values": family.cache} if family.cache and not recurrent else {})
    if memory is not None:
        keywords = keywords | {"encoder_hidden_states": memory}
    return stack_module(model, stack)(inputs[None], **keywords).last_hidden_state[0]


def width_of(config: PretrainedConfig) -> int:
    """Return the number of features of the residual stream, the same in all stacks of a model."""
    return anatomy_of(config).width


def count_layers(config: PretrainedConfig) -> int:
    """Return the number of layers of all stacks together, by the configuration."""
    return sum(len(stack.turns) for stack in stacks_of(config))


def count_experts(config: PretrainedConfig) -> int:
    """Return the number of experts of all layers together, by the configuration."""
    count = 0
    for stack in stacks_of(config):
        kinds = stack.layer_kinds
        for kind in (kinds[stack.kind_numbers[place]] for place in stack.turns):
            count += sum(name.startswith(f"{kind.experts}.") for name in kind.ffn_out)
    return count


class Layer(NamedTuple):
    """A layer of a stack.

    number: its place among the layers of all stacks. path: its path in the model. anatomy: that of its kind. stack: the
    number of its stack.
    """

    number: int
    path: str
    module: nn.Module
    anatomy: Anatomy
    stack: int


def layers_of(model: PreTrainedModel) -> list[Layer]:
    """Return the layers of all stacks, in the order in which they run.

    Raises:
        UserError: the architecture is unknown, or something is wrapped around the model.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{_kind(model)} is not a transformers model; expected a PreTrainedModel: give the one that it wraps "
            "(compile or parallelize afterwards, and merge adapters before), or outliers.adopt(model) for one's own"
        )
    know_class(model)
    stacks = stacks_of(model.config)
    layers = [
        Layer(0, path, module, _anatomy_of_layer(stack, place, path, module), number)
        for number, stack in enumerate(stacks)
        for place, path, module in _children(model, stack)
    ]
    return [layer._replace(number=number) for number, layer in enumerate(layers)]


def _children(model: PreTrainedModel, stack: Anatomy) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield the layers of a stack in the order in which they run, each with its place in the list and its path; raise
    UserError if the list is longer than configured."""
    children = list(model.get_submodule(stack.layers)._modules.items())
    count = len(stack.kind_numbers)
    if len(children) > count:  # some architectures run as many as the configuration says, the others all
        raise UserError(
            f"'{stack.layers}' has {len(children)} layers, and the configuration says {count}; expected no more than "
            "that: take out those that shall not run, or correct the configuration"
        )
    before: Counter = Counter()
    for place in (place for place in stack.turns if place < len(children)):
        name, module = children[place]
        path = f"{stack.layers}.{name}"
        if isinstance(module, Turns):
            path, module = f"{path}.{before[place]}", module._modules[str(before[place])]
            before[place] += 1
        yield place, path, module


def _anatomy_of_layer(stack: Anatomy, place: int, path: str, layer: nn.Module) -> Anatomy:
    """Return the anatomy of the layer at a place: that of its kind, or of another kind whose parts it all has.

    Parts that were replaced by a module without weights, such as an identity, are left out.

    Raises:
        UserError: parts are missing, and a module with weights is in their place.
    """
    kinds = stack.layer_kinds
    kinds = (kinds[stack.kind_numbers[place]], *kinds)
    for experts in filter(None, (kind.experts for kind in kinds)):
        with suppress(AttributeError):  # something else is in the layer's place
            unfold(layer.get_submodule(experts))
    modules = {name for name, _ in layer.named_modules(remove_duplicate=False)}
    if whole := next((kind for kind in kinds if kind.parts <= modules), None):
        return whole
    kind = kinds[0]
    absent = kind.parts - modules
    for name in sorted(absent):
        owner = next(parent for parent in _parents(name) if parent in modules)
        if next(layer.get_submodule(owner).parameters(), None) is not None:
            inside = f"{path}.{owner}" if owner else path
            raise UserError(
                f"'{inside}' is of {_kind(layer.get_submodule(owner))} and has no '{name.removeprefix(owner + '.')}'; "
                "expected the parts of a layer of this architecture, or something without weights in their place"
            )
    remaining = {role: tuple(name for name in getattr(kind, role) if name in modules) for role in ROLES}
    remaining |= {norms: {name: of for name, of in getattr(kind, norms).items() if name in modules} for norms in NORMS}
    remaining["read_by"] = {norm: tuple(modules.intersection(readers)) for norm, readers in kind.read_by.items()}
    experts = kind.experts if kind.experts in modules else None
    return replace(kind, experts=experts, attention=kind.attention if remaining["attn_in"] else None, **remaining)


def _parents(path: str) -> Iterator[str]:
    """Yield the paths of the modules that contain a path, innermost first, down to the layer's own, ""."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of the layers of all stacks; raise as `layers_of`."""
    return [layer.module for layer in layers_of(model)]


def shared_parts(layers: Iterable[Layer]) -> dict[str, str]:
    """Map the path of each layer, or part of a layer, that is the same module as an earlier one to the earlier path."""
    first: dict[nn.Module, str] = {}
    shared = {}
    for layer in layers:
        anatomy = layer.anatomy
        names = ("", *filter(None, (anatomy.attention, anatomy.cross_attention)), *sorted(anatomy.parts))
        for path, module in ((f"{layer.path}.{name}".rstrip("."), layer.module.get_submodule(name)) for name in names):
            if (place := first.setdefault(module, path)) != path:
                shared[path] = place
    return shared


def repeated(layers: Iterable[Layer]) -> dict[str, int]:
    """Return how often each layer runs in a pass, by path, for layers that run more than once."""
    return {path: count for path, count in Counter(layer.path for layer in layers).items() if count > 1}


def compiled_parts(model: PreTrainedModel) -> list[str]:
    """Return the paths of the modules of a model that are compiled in place, by `module.compile()`.

    Raises:
        UserError: one is wrapped by `torch.compile`.
    """
    compiled = []
    for path, module in model.named_modules():
        if _kind(module) == "torch._dynamo.eval_frame.OptimizedModule":
            raise UserError(
                f"'{path}' is an OptimizedModule of torch.compile, which hides its parts; expected the module itself: "
                "compile it in place, module.compile()"
            )
        if module._compiled_call_impl is not None:
            compiled.append(path)
    return compiled


def check_used_once(model: PreTrainedModel) -> None:
    """Raise UserError if one module is used as several layers of a model, or as several parts of layers."""
    layers = layers_of(model)
    for path, count in repeated(layers).items():
        raise UserError(
            f"layer '{path}' runs {count} times in a pass; expected a module for each layer (functions that pass "
            "blocks through the model tell the uses apart)"
        )
    for path, first in shared_parts(layers).items():
        raise UserError(
            f"'{path}' is the same module as '{first}'; expected a module for each layer, as copy.deepcopy makes it "
            "(functions that pass blocks through the model tell the uses apart)"
        )


def check_not_compiled(model: PreTrainedModel) -> None:
    """Raise UserError if a module of a model is compiled, because compiled code may skip hooks."""
    for path in compiled_parts(model):
        raise UserError(
            f"'{path or type(model).__name__}' is compiled; expected a model that is not: compile it afterwards "
            "(functions that pass blocks through the model run it as it is written)"
        )


def features_of(model: PreTrainedModel) -> int:
    """Return the number of features of the residual stream by the first projection that writes to it."""
    writers = (part for part in projections(model) if part.role in ("attn_out", "ffn_out"))
    return next((shape_of(part.module)[0] for part in writers), width_of(model.config))


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a projection, also of a quantized one."""
    weight = module.weight if isinstance(module, ExpertProjection) else module._parameters.get("weight")
    if weight is not None and weight.ndim == 2 and weight.dtype in WEIGHTS:
        return tuple(weight.shape[::-1] if isinstance(module, Conv1D) else weight.shape)
    if hasattr(module, "out_features"):
        return module.out_features, module.in_features
    if not hasattr(module, "shape"):  # codes have it
        raise UserError(f"a projection is of {_kind(module)}, which has no in_features and out_features; add them")
    return module.shape


def head_size(layer: Layer, config: PretrainedConfig) -> int:
    """Return the number of features of a head in a layer, by its attention module or else by the configuration."""
    attention = layer.module.get_submodule(layer.anatomy.attention)
    for name in HEAD_SIZES:
        if isinstance(size := getattr(attention, name, None), int):
            return size
    heads, (queries, *others) = _configured_heads(config, layer.anatomy), layer.anatomy.attn_in
    if others:
        return shape_of(layer.module.get_submodule(queries))[0] // heads
    return getattr(config, "head_dim", None) or config.hidden_size // heads


def heads_of(layer: Layer, config: PretrainedConfig) -> int:
    """Return the number of query heads of a layer: by the width of its output projection, or by the configuration if
    the layer has several output projections; 0 if the layer has no attention.

    config: of the layer's stack.
    """
    if layer.anatomy.attention is None:
        return 0
    if len(layer.anatomy.attn_out) != 1:
        return _configured_heads(config, layer.anatomy)
    return shape_of(layer.module.get_submodule(layer.anatomy.attn_out[0]))[1] // head_size(layer, config)


def _configured_heads(config: PretrainedConfig, stack: Anatomy) -> int:
    """Return the number of query heads in the configuration of a stack."""
    return getattr(config, f"{stack.stack}_attention_heads", None) or config.num_attention_heads


def projections(model: PreTrainedModel, only: int | None = None) -> Iterator[Projection]:
    """Yield the linear projections of all layers, or of only one, by layer and role; raise as `layers_of`."""
    for layer in layers_of(model):
        for role in QUANTIZED if only in (None, layer.number) else ():
            for name in getattr(layer.anatomy, role):
                yield reader_at(layer, role, name)


def reader_at(layer: Layer, role: str, name: str) -> "Projection":
    """Return the reader of a hidden state of a role, by its path in the layer."""
    anatomy, path, module = layer.anatomy, f"{layer.path}.{name}", layer.module.get_submodule(name)
    inside = name.removeprefix(f"{anatomy.experts}.") if anatomy.experts else name
    expert = int(inside.partition(".")[0]) if inside != name else None
    position_stack, state = layer.stack - (role == "cross_kv"), anatomy.states.get(name, 0)
    return Projection(layer.number, role, path, module, position_stack, state, expert)


def check_plain(projection: Projection) -> None:
    """Raise UserError unless a projection only multiplies with its weight and adds its bias.

    In other modules, the `weight` does not determine the output: adapters and layers of codes have one too, and a
    parametrized weight is computed at every call.
    """
    module, parameters = projection.module, projection.module._parameters
    if isinstance(module, ExpertProjection):
        parameters = {"weight": module.weight, "bias": module.bias}
    weight = parameters.get("weight")
    if _kind(module) not in PLAIN:
        fault = f"is of {_kind(module)}"
    elif weight is None or set(parameters) != {"weight", "bias"}:
        fault = f"makes its weight of {', '.join(sorted({*parameters} - {'bias'}))}"
    elif is_traceable_wrapper_subclass(weight):
        fault = f"has a weight of {_kind(weight)}"
    elif weight.dtype not in WEIGHTS:
        fault = f"has a weight of {weight.dtype}"
    else:
        return
    raise UserError(
        f"'{projection.path}' {fault}; expected a plain torch.nn.Linear or transformers Conv1D with floating-point "
        "weights: merge adapters, remove parametrizations, or load the model that is not quantized"
    )


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def state_readers(model: PreTrainedModel, only: int | None = None) -> Iterator[Projection]:
    """Yield the reader of each hidden state that can be traced: projections, routers, and for the input of a layer's
    experts the module that holds them, once, instead of each expert's first projections. Their last ones are
    yielded."""
    yield from (part for part in projections(model, only) if part.expert is None or part.role != "ffn_in")
    for layer in layers_of(model) if only is None else layers_of(model)[only : only + 1]:
        anatomy = layer.anatomy
        shared = [name for name in anatomy.router if name in anatomy.states]
        yield from (reader_at(layer, "ffn_in", name) for name in shared)
        own = (name for name in anatomy.router if name not in shared)
        yield from (reader_at(layer, ROUTER, name)._replace(state=number) for number, name in enumerate(own))
        if anatomy.experts and not is_batched(experts := layer.module.get_submodule(anatomy.experts)):
            names = [name for name in anatomy.ffn_in if name.startswith(anatomy.experts)]
            path = f"{layer.path}.{anatomy.experts}"
            yield from (
                reader_at(layer, "ffn_in", name)._replace(path=path, module=experts, expert=None) for name in names[:1]
            )


def experts_of(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the modules that hold the weights of experts, by the number of their layer."""
    mixtures = [layer for layer in layers_of(model) if layer.anatomy.experts]
    return {layer.number: layer.module.get_submodule(layer.anatomy.experts) for layer in mixtures}


def context_length(config: PretrainedConfig) -> int | None:
    """Return the length of the longest block that a model takes, in tokens; None if it is unbounded (ALiBi)."""
    text = getattr(config, "text_config", config)
    limit = next((getattr(text, field) for field in CONTEXTS if getattr(text, field, None)), None)
    rotary = getattr(text, "rope_parameters", None) or {}
    rotary = rotary.get("full_attention", rotary)  # layers with a window have their own parameters
    if limit and rotary.get("rope_type") in STRETCHED and rotary.get("factor"):
        # a configuration may have the length before scaling or the one after it as its limit
        limit = max(limit, int(rotary["factor"] * (rotary.get("original_max_position_embeddings") or limit)))
    return limit - config.pad_token_id - 1 if limit and anatomy_of(config).padded_positions else limit


def check_positions(layer: int, positions: int, tokens: int) -> None:
    """Raise UserError unless a layer's states have a position for each token of a block."""
    if positions != tokens:
        raise UserError(
            f"layer {layer} has states of {positions} positions for {tokens} tokens; expected one for each: this model "
            "adds positions of its own, or joins some, so that only its loss can be measured, without --stream"
        )


def check_block(config, block: int, largest_id: int = 0) -> None:
    """Raise UserError if a block of this many tokens exceeds a model's context, or its ids the vocabulary."""
    limit = context_length(config)
    if limit is not None and block > limit:
        raise UserError(f"blocks of {block} tokens are longer than the model's context of {limit}; use --block {limit}")
    vocabulary = config.get_text_config().vocab_size
    if largest_id >= vocabulary:
        raise UserError(
            f"token id {largest_id} is outside the model's vocabulary of {vocabulary}; the text was "
            "tokenised by another model's tokenizer"
        )


def check_features(features: Iterable[int], width: int) -> list[int]:
    """Return features in ascending order; raise UserError if there is none, or one is outside 0 to width - 1."""
    try:
        features = sorted(set(map(operator.index, features)))
    except TypeError:
        raise UserError(f"features are whole numbers; expected some of 0 to {width - 1}") from None
    if not features:
        raise UserError(f"the list of features is empty; expected some of 0 to {width - 1}")
    if features[0] < 0 or features[-1] >= width:
        raise no_such_feature(features[0] if features[0] < 0 else features[-1], width)
    return features


def norms_are_in_the_residual_stream(config: PretrainedConfig) -> bool:
    """Return whether norms put out the residual stream itself (BERT, OPT-350m, a variant of BLOOM)."""
    post_norm = getattr(config, "apply_residual_connection_post_layernorm", False)
    return bool(anatomy_of(config).norms_of_sums) or post_norm
