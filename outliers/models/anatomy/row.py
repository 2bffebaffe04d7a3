"""The record of an architecture: where the layers of a stack are, and the parts of one layer."""

from dataclasses import dataclass, field

from transformers import PretrainedConfig

from outliers.criterion import QUANTIZED

Norms = dict[str, tuple[str, ...]]  # each norm, and the roles whose projections read its output


@dataclass(frozen=True)
class Anatomy:
    """The place of a stack's layers, and the parts of one layer; projections by the role of their input.

    attention: the module that returns the attention probabilities. bidirectional: whether positions attend to later
    ones too. norms: those that come before projections. attn_in: the q/k/v projection, fused or not. attn_out: the
    attention output projection. ffn_in: the first feed-forward projection, gate included. ffn_out: the second
    feed-forward projection. Of a decoder that reads an encoder, the same of its cross-attention: cross_attention;
    cross_in, the projection of queries; cross_kv, those of keys and values, whose input is what the encoder puts out;
    cross_out.

    stack: what this stack is called where a model has several. module: the module that runs it, if that is not the base
    model. decoder: the stack that reads what this one puts out. config: the field of the configuration that holds that
    of this stack, if it has one of its own.

    by_head: whether a fused q/k/v projection has the outputs of each head of keys together, and not all queries first;
    None if that is not known. fused_gate: whether the first feed-forward projection is the gate too, whose outputs come
    first; None if that is not known.

    others: other kinds of layers that there are. experts: the module that holds the weights of experts, whose
    projections are named as if each had modules of its own. norm_offset: what norms add to their weight before they
    multiply with it. alibi: the argument of the attention in which its position biases are, if the attention mask may
    hold them too. window: the buffer of the attention that says beside the mask which keys each query sees, bool (1, 1,
    context, context). padded_positions: whether the first position has the number after that of padding. norms_of_sums:
    the norms of the residual stream with what a sub-layer adds, one behind each sub-layer, where the projections read
    the residual stream itself.

    embedding: of pictures, the convolution that makes patches of pixels. attn_mid, ffn_mid: projections between those
    of a branch that read the residual stream and those that write to it. router: projections that only choose or weigh
    what others put out. kinds: of each layer of the stack the place of its kind among this one and `others`; None of
    one that is never called. states: of projections that read another hidden state than the first of their role, and of
    routers that read one of ffn_in, which. apart: weights without a role, and why. shares: the places of other layers
    of which it reads something beside the residual stream. uses: how often a layer runs in a pass. width: the features
    of the residual stream. recurrent: whether positions are mixed otherwise than by a softmax too. read_by: of each
    norm all that reads its output, routers and experts too.

    What is added to the residual stream: positions, embedding_norm: in the model, the module whose output is added to
    the embedding, and the norm of embeddings. norms_behind: each norm behind a projection, and the role of the
    projection's input. residual_scale: the field of the configuration with which outputs of sub-layers are multiplied.
    """

    layers: str
    attention: str | None
    norms: Norms
    attn_in: tuple[str, ...]
    attn_out: tuple[str, ...]
    ffn_in: tuple[str, ...] = ()
    ffn_out: tuple[str, ...] = ()
    cross_attention: str | None = None
    cross_in: tuple[str, ...] = ()
    cross_kv: tuple[str, ...] = ()
    cross_out: tuple[str, ...] = ()
    stack: str = ""
    module: str | None = None
    decoder: "Anatomy | None" = None
    config: str | None = None
    by_head: bool | None = False
    fused_gate: bool | None = False
    others: tuple["Anatomy", ...] = ()
    experts: str | None = None
    norm_offset: float = 0.0
    alibi: str | None = None
    window: str | None = None
    bidirectional: bool = False
    padded_positions: bool = False
    norms_of_sums: tuple[str, ...] = ()
    embedding: str | None = None
    positions: str | None = None
    embedding_norm: str | None = None
    norms_behind: dict[str, str] = field(default_factory=dict)
    residual_scale: str | None = None
    attn_mid: tuple[str, ...] = ()
    ffn_mid: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
    kinds: tuple[int | None, ...] = ()
    states: dict[str, int] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)
    shares: tuple[int, ...] = ()
    uses: int = 1
    width: int = 0
    streams: int = 1
    last_norm: str | None = None
    recurrent: bool = False
    read_by: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def layer_kinds(self) -> tuple["Anatomy", ...]:
        """All kinds of layers of the stack, this one first; `kinds` has their places."""
        return (self, *self.others)

    @property
    def parts(self) -> set[str]:
        """The norms and projections that a layer of this kind has."""
        return {*self.norms, *(name for role in QUANTIZED for name in getattr(self, role))}


def config_of_stack(config: PretrainedConfig, stack: Anatomy) -> PretrainedConfig:
    """The configuration of a stack, which may be a part of the model's."""
    return getattr(config, stack.config) if stack.config else config
