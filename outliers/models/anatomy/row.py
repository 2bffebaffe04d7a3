"""The record of an architecture: the place of a stack's layers, and the parts of one layer."""

from dataclasses import dataclass, field, replace

from transformers import PretrainedConfig

from outliers.criterion import QUANTIZED

Norms = dict[str, tuple[str, ...]]  # by norm, the roles whose projections read its output


@dataclass(frozen=True)
class Anatomy:
    """What has to be known of a stack of layers in a model, and of one kind of its layers; `others` has the other
    kinds.

    Paths are relative to the layer unless something else is said. The roles, from `attn_in` to `router`, hold the paths
    of the projections by what they read (docs/architectures.md).

    Attributes:
        layers: the path of the list of layers in the model.
        attention: the module that returns the attention probabilities; None if the layer has no attention.
        norms: norms in front of projections, each with the roles that read its output.
        attn_in, attn_mid, attn_out: the first, middle and last projections of branches that mix positions.
        ffn_in, ffn_mid, ffn_out: those of branches that do not; a gate belongs to `ffn_in`.
        cross_attention: the cross-attention of a decoder, with the roles cross_in (queries), cross_kv (keys and values,
            which read the encoder's output) and cross_out.
        stack: the name of this stack in a model with several.
        module: the path of the module that runs the stack; None for the base model.
        decoder: the stack that reads the output of this one.
        config: the field of the configuration that holds the stack's own; None if it has none.
        by_head: whether a fused q/k/v projection groups its outputs by heads of keys, instead of all queries first;
            None if unknown.
        fused_gate: whether the first feed-forward projection also computes the gate, in its first outputs; None if
            unknown.
        others: the other kinds of layers of the stack.
        experts: the module that holds the weights of experts, under which each expert gets a module by its number.
        norm_offset: the number that norms add to their weight before multiplying with it.
        alibi: the argument with position biases of an attention whose mask may contain them too.
        window: the buffer of an attention that hides keys in addition to the mask, bool (1, 1, context, context).
        bidirectional: whether positions also attend to later ones.
        padded_positions: whether position numbers start behind that of padding.
        norms_of_sums: norms behind sub-layers through which the residual stream itself goes; projections read their
            output, which is the stream.
        embedding: the path of a module other than an embedding of tokens that starts the stream, such as the
            convolution that makes patches of pixels.
        positions, embedding_norm: paths in the model of the module whose output is added to the embedding, and of the
            norm of the sum.
        norms_behind: norms behind projections, each with the role of the projection.
        residual_scale: the field of the configuration that multiplies the outputs of sub-layers.
        router: projections that only choose or weigh the outputs of others.
        kind_numbers: for each module in the list of layers, the place of its kind in `layer_kinds`; None for one that
            never runs.
        turns: the places of the layers in the list, in the order in which they run. A module that runs several times is
            several layers.
        states: the number of the hidden state that a projection reads, if it is not the first one of its role; and of
            the state of `ffn_in` that a router reads.
        apart: modules with weights but without a role, and the reason.
        shares: the places of other layers from which the layer reads more than the residual stream.
        width: the number of features of the residual stream.
        streams: the number of residual streams at each position, more than one with hyper-connections.
        last_norm: the path in the model of the norm that reads the last layer's output.
        recurrent: whether something other than a softmax mixes positions.
        read_by: for each norm, all modules that read its output, routers and experts included.
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
    kind_numbers: tuple[int | None, ...] = ()
    turns: tuple[int, ...] = ()
    states: dict[str, int] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)
    shares: tuple[int, ...] = ()
    width: int = 0
    streams: int = 1
    last_norm: str | None = None
    recurrent: bool = False
    read_by: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def layer_kinds(self) -> tuple["Anatomy", ...]:
        """The kinds of layers of the stack, this one first."""
        return (self, *self.others)

    @property
    def parts(self) -> set[str]:
        """The paths of the norms and projections of a layer of this kind."""
        return {*self.norms, *(name for role in QUANTIZED for name in getattr(self, role))}


def of_all_kinds(anatomy: Anatomy, **fields: object) -> Anatomy:
    """Return a stack with fields replaced in all kinds of its layers."""
    return replace(anatomy, **fields, others=tuple(replace(one, **fields) for one in anatomy.others))


def config_of_stack(config: PretrainedConfig, stack: Anatomy) -> PretrainedConfig:
    """Return the configuration of a stack, which may be a field of the model's."""
    return getattr(config, stack.config) if stack.config else config
