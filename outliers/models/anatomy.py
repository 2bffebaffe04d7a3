"""What the parts of each architecture are called; the only place that knows architecture names."""

import difflib
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel

from outliers.criterion import ROLES
from outliers.errors import UserError

Norms = dict[str, tuple[str, ...]]  # each norm, and the roles whose projections read its output


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in the place of the feed-forward projections.

    block: the module that sends each token to some of the experts; its input is ffn_in. experts: the module that holds
    their weights, which are parameters of three dimensions. reads: the parameters that are multiplied with ffn_in, the
    router's and the experts', each with its axis of input features.
    """

    block: str
    experts: str
    reads: dict[str, int]


def _as_projected(logits: torch.Tensor, _config: PretrainedConfig) -> torch.Tensor:
    return logits


def _divided(logits: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    return logits / config.logits_scaling


def _capped(logits: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _read_by_the_head(path: str) -> Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]:
    return lambda model, states: model.get_submodule(path)(states)


def _read_as_they_are(_model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    return states


def _roberta(model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    return model.lm_head.layer_norm(functional.gelu(model.lm_head.dense(states)))


def _distilbert(model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    return model.vocab_layer_norm(model.activation(model.vocab_transform(states)))


@dataclass(frozen=True)
class Anatomy:
    """Where the layers are, and the parts of one layer; projections by the role of their input.

    family: what kind of model it is, a name in `FAMILIES`. bidirectional: whether positions attend to later ones too.

    attention: the module that returns the attention probabilities. norms: those that come before projections. attn_in:
    the q/k/v projection, fused or not. attn_out: the attention output projection. ffn_in: the first feed-forward
    projection, gate included. ffn_out: the second feed-forward projection.

    by_head: whether a fused q/k/v projection has the outputs of each head of keys together, and not all queries first.
    fused_gate: whether the first feed-forward projection is the gate too, whose outputs come first.

    other_norms: those of layers that lack one of `norms`, where an architecture has several kinds of layers; a layer is
    of the first kind of which it has all. mixture: what layers have that lack ffn_in and ffn_out. norm_offset: what
    norms add to their weight before they multiply with it. alibi: the argument of the attention in which its position
    biases are, if the attention mask may hold them too. head: what the output embedding reads, of the last hidden
    states. logits: what becomes of its outputs, each by itself. padded_positions: whether the first position has the
    number after that of padding. norms_of_sums: whether norms are of the residual stream with what a sub-layer adds,
    so that the projections read the residual stream itself.

    What is added to the residual stream: positions, embedding_norm: in the model, the module whose output is added to
    the embedding, and the norm of embeddings. norms_behind: each norm behind a projection, and the role of the
    projection's input. residual_scale: the field of the configuration with which outputs of sub-layers are multiplied.
    """

    layers: str
    attention: str
    norms: Norms
    attn_in: tuple[str, ...]
    attn_out: tuple[str, ...]
    ffn_in: tuple[str, ...] = ()
    ffn_out: tuple[str, ...] = ()
    by_head: bool = False
    fused_gate: bool = False
    other_norms: tuple[Norms, ...] = ()
    mixture: Mixture | None = None
    norm_offset: float = 0.0
    alibi: str | None = None
    family: str = "causal"
    bidirectional: bool = False
    head: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor] = _read_as_they_are
    padded_positions: bool = False
    norms_of_sums: bool = False
    logits: Callable[[torch.Tensor, PretrainedConfig], torch.Tensor] = _as_projected
    positions: str | None = None
    embedding_norm: str | None = None
    norms_behind: dict[str, str] = field(default_factory=dict)
    residual_scale: str | None = None


class Family(NamedTuple):
    """What models of a family have in common.

    made_by: the class of transformers that makes them, with a head. keywords: what they are called with beside token
    ids. protocol: what rows say of what they predict, behind how the text was cut.
    """

    made_by: type
    keywords: dict
    protocol: str


FAMILIES = {
    "causal": Family(AutoModelForCausalLM, {"use_cache": False}, ""),
    "masked": Family(AutoModelForMaskedLM, {}, "+masked"),
}


def _two_norms(attention: str, feed_forward: str) -> Norms:
    return {attention: ("attn_in",), feed_forward: ("ffn_in",)}


def _one_norm(of_both: str) -> Norms:
    return {of_both: ("attn_in", "ffn_in")}


_SELF_ATTN_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FAIRSEQ = Anatomy(
    layers="model.layers",
    attention="self_attn",
    norms=_two_norms("self_attn_layer_norm", "final_layer_norm"),
    attn_in=_SELF_ATTN_QKV,
    attn_out=("self_attn.out_proj",),
    ffn_in=("fc1",),
    ffn_out=("fc2",),
    positions="model.embed_positions",
)
_LLAMA = Anatomy(
    layers="model.layers",
    attention="self_attn",
    norms=_two_norms("input_layernorm", "post_attention_layernorm"),
    attn_in=_SELF_ATTN_QKV,
    attn_out=("self_attn.o_proj",),
    ffn_in=("mlp.gate_proj", "mlp.up_proj"),
    ffn_out=("mlp.down_proj",),
)
_BEHIND = {"post_attention_layernorm": "attn_out", "post_feedforward_layernorm": "ffn_out"}
_GEMMA = replace(
    _LLAMA,
    norms=_two_norms("input_layernorm", "pre_feedforward_layernorm"),
    norms_behind=_BEHIND,
    norm_offset=1.0,
    logits=_capped,
)
_MIXTRAL = replace(
    _LLAMA,
    ffn_in=(),
    ffn_out=(),
    mixture=Mixture("mlp", "mlp.experts", {"mlp.gate.weight": 1, "mlp.experts.gate_up_proj": 2}),
)
_BLOOM = Anatomy(
    layers="transformer.h",
    attention="self_attention",
    norms=_two_norms("input_layernorm", "post_attention_layernorm"),
    attn_in=("self_attention.query_key_value",),
    attn_out=("self_attention.dense",),
    ffn_in=("mlp.dense_h_to_4h",),
    ffn_out=("mlp.dense_4h_to_h",),
    by_head=True,
)

_BERT = Anatomy(
    family="masked",
    bidirectional=True,
    norms_of_sums=True,
    layers="bert.encoder.layer",
    attention="attention.self",
    norms={},
    attn_in=("attention.self.query", "attention.self.key", "attention.self.value"),
    attn_out=("attention.output.dense",),
    ffn_in=("intermediate.dense",),
    ffn_out=("output.dense",),
    head=_read_by_the_head("cls.predictions.transform"),
    positions="bert.embeddings.position_embeddings",
)

ANATOMIES = {
    "gpt2": Anatomy(
        layers="transformer.h",
        attention="attn",
        norms=_two_norms("ln_1", "ln_2"),
        attn_in=("attn.c_attn",),
        attn_out=("attn.c_proj",),
        ffn_in=("mlp.c_fc",),
        ffn_out=("mlp.c_proj",),
        positions="transformer.wpe",
    ),
    "gptj": Anatomy(
        layers="transformer.h",
        attention="attn",
        norms=_one_norm("ln_1"),
        attn_in=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        attn_out=("attn.out_proj",),
        ffn_in=("mlp.fc_in",),
        ffn_out=("mlp.fc_out",),
    ),
    "gpt_neo": Anatomy(
        layers="transformer.h",
        attention="attn.attention",
        norms=_two_norms("ln_1", "ln_2"),
        attn_in=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        attn_out=("attn.attention.out_proj",),
        ffn_in=("mlp.c_fc",),
        ffn_out=("mlp.c_proj",),
        positions="transformer.wpe",
    ),
    "gpt_neox": replace(
        _BLOOM,
        layers="gpt_neox.layers",
        attention="attention",
        attn_in=("attention.query_key_value",),
        attn_out=("attention.dense",),
    ),
    "bloom": replace(_BLOOM, embedding_norm="transformer.word_embeddings_layernorm"),
    "opt": replace(_FAIRSEQ, layers="model.decoder.layers", positions="model.decoder.embed_positions"),
    "xglm": _FAIRSEQ,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "granite": replace(_LLAMA, logits=_divided, residual_scale="residual_multiplier"),
    "olmo2": replace(_LLAMA, norms={}, norms_behind=_BEHIND),
    "phi3": replace(_LLAMA, attn_in=("self_attn.qkv_proj",), ffn_in=("mlp.gate_up_proj",), fused_gate=True),
    "stablelm": replace(_LLAMA, other_norms=(_one_norm("input_layernorm"),)),
    "starcoder2": replace(_LLAMA, ffn_in=("mlp.c_fc",), ffn_out=("mlp.c_proj",)),
    "gemma": replace(_LLAMA, norm_offset=1.0),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "falcon": replace(
        _BLOOM, other_norms=(_two_norms("ln_attn", "ln_mlp"), _one_norm("input_layernorm")), alibi="alibi"
    ),
    "mpt": Anatomy(
        layers="transformer.blocks",
        attention="attn",
        norms=_two_norms("norm_1", "norm_2"),
        attn_in=("attn.Wqkv",),
        attn_out=("attn.out_proj",),
        ffn_in=("ffn.up_proj",),
        ffn_out=("ffn.down_proj",),
    ),
    "mixtral": _MIXTRAL,
    "qwen3_moe": replace(_LLAMA, mixture=_MIXTRAL.mixture),  # some of its layers may have no experts
    "gpt_oss": replace(
        _MIXTRAL, mixture=Mixture("mlp", "mlp.experts", {"mlp.router.weight": 1, "mlp.experts.gate_up_proj": 1})
    ),
    "bert": _BERT,
    "roberta": replace(
        _BERT,
        layers="roberta.encoder.layer",
        head=_roberta,
        positions="roberta.embeddings.position_embeddings",
        padded_positions=True,
    ),
    "electra": replace(
        _BERT,
        layers="electra.encoder.layer",
        head=_read_by_the_head("generator_predictions"),
        positions="electra.embeddings.position_embeddings",
    ),
    "distilbert": replace(
        _BERT,
        layers="distilbert.transformer.layer",
        attention="attention",
        attn_in=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        attn_out=("attention.out_lin",),
        ffn_in=("ffn.lin1",),
        ffn_out=("ffn.lin2",),
        head=_distilbert,
        positions="distilbert.embeddings.position_embeddings",
    ),
    "modernbert": Anatomy(
        family="masked",
        bidirectional=True,
        layers="model.layers",
        attention="attn",
        norms=_two_norms("attn_norm", "mlp_norm"),
        attn_in=("attn.Wqkv",),
        attn_out=("attn.Wo",),
        ffn_in=("mlp.Wi",),
        ffn_out=("mlp.Wo",),
        fused_gate=True,
        head=_read_by_the_head("head"),
    ),
}

# Models that take pictures too, whose text part is an architecture of its own; and what its tensors are called in their
# checkpoints: patterns, and what stands for them in the text part.
TEXT_PARTS = ("gemma3",)
TEXT_KEYS = {r"^language_model\.": "", r"^model\.language_model\.": "model."}
# Of a text part: the tensors of such a checkpoint that it has no place for because they are for the pictures.
PICTURES = {"gemma3_text": r"^(model\.)?(vision_tower|multi_modal_projector)\."}
CONTEXTS = ("max_position_embeddings", "max_seq_len")  # fields of a configuration that bound the length of a block
# Classes of layers that multiply with their weight, add their bias, and do nothing else; and dtypes of weights that are
# no codes.
PLAIN = (
    "torch.nn.modules.linear.Linear",
    "transformers.pytorch_utils.Conv1D",
    "transformers.models.falcon.modeling_falcon.FalconLinear",
)
WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Projection(NamedTuple):
    """One linear projection of a decoder layer, a `Linear` or `Conv1D`, or the block of a mixture of experts.

    path: its name in the model. module: itself.
    """

    layer: int
    role: str
    path: str
    module: nn.Module


def anatomy_of(config: PretrainedConfig) -> Anatomy:
    """The anatomy of a model by its configuration.

    Raises:
        UserError: the architecture is in no row of the table.
    """
    if config.model_type not in ANATOMIES:
        near = difflib.get_close_matches(config.model_type, ANATOMIES, n=3, cutoff=0.5)
        similar = f" (known and similar: {', '.join(near)})" if near else ""
        raise UserError(
            f"unknown architecture '{config.model_type}'{similar}; it needs a row in ANATOMIES of "
            "outliers/models/anatomy.py: where its decoder layers are and, in a layer, its attention, its norms and "
            f"the projections that read {', '.join(ROLES)}"
        )
    return ANATOMIES[config.model_type]


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model by its configuration; an unknown architecture counts as causal."""
    return FAMILIES[getattr(ANATOMIES.get(config.model_type), "family", "causal")]


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the text part of a model that takes pictures too; of others their own."""
    if config.model_type not in TEXT_PARTS:
        return config
    part = config.get_text_config()
    part._commit_hash = getattr(config, "_commit_hash", None)
    return part


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, in their order.

    Raises:
        UserError: the architecture is in no row of the table, or something is wrapped around the model.
    """
    layers = anatomy_of(model.config).layers if hasattr(model, "config") else ""
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{_kind(model)} is no transformers model; expected a PreTrainedModel: give the one that it wraps (compile "
            "or parallelize afterwards, and merge adapters before)"
        )
    return model.get_submodule(layers)


def projections(model: PreTrainedModel) -> Iterator[Projection]:
    """Every linear projection of the decoder layers, layer by layer in the order of `ROLES`.

    Raises:
        UserError: as `decoder_layers`.
    """
    layers, anatomy = decoder_layers(model), anatomy_of(model.config)
    for layer, block in enumerate(layers):
        roles = ROLES[:2] if has_experts(anatomy, block) else ROLES
        for role in roles:
            for name in getattr(anatomy, role):
                yield Projection(layer, role, f"{anatomy.layers}.{layer}.{name}", block.get_submodule(name))


def check_plain(projection: Projection) -> None:
    """Raise UserError unless all that a projection does is to multiply with its weight and add its bias.

    Whoever takes the weight of anything else in its place computes something else: an adapter around a layer and a
    layer of codes have a `weight` too, and a parametrized weight is made of others at every call.
    """
    module, parameters = projection.module, projection.module._parameters
    weight = parameters.get("weight")
    if _kind(module) not in PLAIN:
        found = f"is of {_kind(module)}"
    elif weight is None or set(parameters) != {"weight", "bias"}:
        found = f"makes its weight of {', '.join(sorted({*parameters} - {'bias'}))}"
    elif is_traceable_wrapper_subclass(weight):
        found = f"has a weight of {_kind(weight)}"
    elif weight.dtype not in WEIGHTS:
        found = f"has a weight of {weight.dtype}"
    else:
        return
    raise UserError(
        f"'{projection.path}' {found}; expected a plain torch.nn.Linear or transformers Conv1D with floating-point "
        "weights: merge adapters, remove parametrizations, or load the model that is not quantized"
    )


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def readers(model: PreTrainedModel) -> Iterator[Projection]:
    """The projections, and the blocks of mixtures of experts: all that reads a tracked hidden state."""
    yield from projections(model)
    anatomy = anatomy_of(model.config)
    for layer, block in enumerate(decoder_layers(model)):
        if has_experts(anatomy, block):
            name = anatomy.mixture.block
            yield Projection(layer, "ffn_in", f"{anatomy.layers}.{layer}.{name}", block.get_submodule(name))


def has_experts(anatomy: Anatomy, layer: nn.Module) -> bool:
    """Whether a layer has a mixture of experts in the place of its feed-forward projections."""
    return anatomy.mixture is not None and _has(layer, [anatomy.mixture.experts])


def _has(layer: nn.Module, paths: Iterable[str]) -> bool:
    return {path for path, _ in layer.named_modules()}.issuperset(paths)


def norms_of(anatomy: Anatomy, layer: nn.Module) -> Norms:
    """The norms of a layer that come before projections."""
    kinds = (anatomy.norms, *anatomy.other_norms)
    return next((norms for norms in kinds if _has(layer, norms)), anatomy.norms)


def weights_of_experts(model: PreTrainedModel) -> int:
    """How many of a model's parameters are those of experts."""
    anatomy = anatomy_of(model.config)
    layers = [layer for layer in decoder_layers(model) if has_experts(anatomy, layer)]
    experts = (parameter for layer in layers for parameter in layer.get_submodule(anatomy.mixture.experts).parameters())
    return sum(parameter.numel() for parameter in experts)


def context_length(config: PretrainedConfig) -> int | None:
    """The longest block that the model takes, in tokens; None where positions are unbounded (ALiBi)."""
    row = ANATOMIES.get(config.model_type)
    limit = next((getattr(config, field) for field in CONTEXTS if getattr(config, field, None)), None)
    return limit - config.pad_token_id - 1 if limit and row and row.padded_positions else limit


def check_block(config, block: int, largest_id: int = 0) -> None:
    """Raise UserError if a block of so many tokens does not fit a model's context, or its ids not the vocabulary."""
    limit = context_length(config)
    if limit is not None and block > limit:
        raise UserError(f"blocks of {block} tokens are longer than the model's context of {limit}; use --block {limit}")
    if largest_id >= config.vocab_size:
        raise UserError(
            f"token id {largest_id} is outside the model's vocabulary of {config.vocab_size}; the text was "
            "tokenised by another model's tokenizer"
        )


def check_features(features: Iterable[int], width: int) -> list[int]:
    """The features in ascending order; raise UserError if there is none, or one is no feature of so many."""
    try:
        features = sorted(set(map(operator.index, features)))
    except TypeError:
        raise UserError(f"features are whole numbers; expected some of 0 to {width - 1}") from None
    if not features:
        raise UserError(f"the list of features is empty; expected some of 0 to {width - 1}")
    if features[0] < 0 or features[-1] >= width:
        wrong = features[0] if features[0] < 0 else features[-1]
        raise UserError(f"feature {wrong} is out of range; the model's hidden states have features 0 to {width - 1}")
    return features


def norms_are_in_the_residual_stream(config: PretrainedConfig) -> bool:
    """Whether projections read what is added to the sub-layer's output (BERT, OPT-350m, a variant of BLOOM)."""
    return anatomy_of(config).norms_of_sums or not getattr(config, "do_layer_norm_before", True) or getattr(
        config, "apply_residual_connection_post_layernorm", False
    )


# Parts of what reads the residual stream

QKV = ("q", "k", "v")
GATE_UP = ("gate", "up")
NORMS = {"attn_in": "attn_norm", "ffn_in": "ffn_norm"}  # in front of the projections of a role


class Part(NamedTuple):
    """What reads the residual stream for one purpose: outputs of a projection, a norm, the router or the experts.

    outputs: those of its purpose, int64 (heads, head size), of a feed-forward projection (1, units); None for what is a
    module of its own. Where queries have more heads than keys and values, some in a row share one of these.
    """

    name: str
    reader: Projection
    outputs: torch.Tensor | None = None


def parts(model: PreTrainedModel, layer: int) -> Iterator[Part]:
    """The parts of a decoder layer: q, k, v, gate and up; router and experts; attn_norm and ffn_norm.

    A norm is there if it comes before projections and its output is not itself the residual stream.
    """
    config, block = model.config, decoder_layers(model)[layer]
    anatomy = anatomy_of(config)

    def reader(role: str, name: str) -> Projection:
        return Projection(layer, role, f"{anatomy.layers}.{layer}.{name}", block.get_submodule(name))

    attn_in = [reader("attn_in", name) for name in anatomy.attn_in]
    for number, outputs in enumerate(_by_heads(attn_in, anatomy.by_head, config)):
        yield Part(QKV[number], attn_in[number % len(attn_in)], outputs)
    if has_experts(anatomy, block):
        router = next(iter(anatomy.mixture.reads)).removesuffix(".weight")
        yield Part("router", reader("ffn_in", router))
        yield Part("experts", reader("ffn_in", anatomy.mixture.experts))
    else:
        ffn_in = [reader("ffn_in", name) for name in anatomy.ffn_in]
        units = [one[None] for reader in ffn_in for one in _numbers(reader).chunk(1 + anatomy.fused_gate)]
        for number, outputs in enumerate(units):
            yield Part(GATE_UP[number - len(units)], ffn_in[number % len(ffn_in)], outputs)
    if not norms_are_in_the_residual_stream(config):
        for name, roles in norms_of(anatomy, block).items():
            yield from (Part(NORMS[role], reader(NORMS[role], name)) for role in roles)


def _by_heads(attn_in: list[Projection], by_head: bool, config: PretrainedConfig) -> list[torch.Tensor]:
    """The outputs that are queries, keys and values, each (heads, head size)."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    numbers = [_numbers(one).view(-1, size) for one in attn_in]
    if len(numbers) > 1:
        return numbers
    of_keys = (len(numbers[0]) - heads) // 2
    groups = of_keys if by_head else 1
    of_group = [heads // groups, of_keys // groups, of_keys // groups]
    return [one.flatten(0, 1) for one in numbers[0].view(groups, -1, size).split(of_group, 1)]


def _numbers(projection: Projection) -> torch.Tensor:
    """Those of all outputs, of a projection under a scheme too."""
    module = projection.module  # Linear, Conv1D, or a layer of codes
    return torch.arange(getattr(module, "out_features", None) or getattr(module, "nf", None) or module.shape[0])


# What a family other than causal language models reads at once, and what of it is predicted

IGNORED = -100  # a label of what is not predicted, as transformers has it


class Example(NamedTuple):
    """What a model of a family other than causal language models reads at once.

    ids: what positions hold, int64 (T,). labels: what the last hidden states are to predict, int64 (T,), `IGNORED`
    where nothing is.
    """

    ids: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device | str) -> "Example":
        """The same on a device."""
        return Example(*(tensor.to(device) for tensor in self))


Block = torch.Tensor | Example  # of a causal language model the token ids alone, which are its labels too


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of one length. ids, labels: int64 (examples, T), see `Example`."""

    ids: torch.Tensor
    labels: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """How many, and their length."""
        return self.ids.shape

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: int | slice) -> "Example | Examples":
        kind = Examples if isinstance(part, slice) else Example
        return kind(self.ids[part], self.labels[part])

    def __iter__(self) -> Iterator[Example]:
        return (self[number] for number in range(len(self)))


def read_ids(block: Block | Examples) -> torch.Tensor:
    """The token ids of a block, int64 (T,); of examples (examples, T)."""
    return block.ids if isinstance(block, (Example, Examples)) else block


def predicted(block: Block, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the last hidden states (T, features) that predict a token, and which: int64 (predicted,)."""
    if isinstance(block, Example):
        asked = block.labels != IGNORED
        return states[asked.to(states.device)], block.labels[asked]
    return states[:-1], block[1:]
