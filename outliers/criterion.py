"""Names of hidden states, and the criteria of outlier features, massive activations and attention sinks."""

import math
import re
from numbers import Real

from outliers.errors import UserError, shown

# Hidden states are named by the projections that read them. Attention ("attn") and feed-forward ("ffn") have first
# projections ("in"), the output projection ("out") and those between ("mid"). The cross-attention of a decoder has
# queries, keys and values, which read the encoder's output, and an output projection. A router chooses or weighs the
# outputs of others.
CROSS_ROLES = ("cross_in", "cross_kv", "cross_out")
CROSS = "cross"  # the encoder's states as a decoder's layers read them; stands beside the names of stacks
OF_EVERY_STACK = ("attn_in", "attn_out", "ffn_in", "ffn_out")
ROUTER = "router"
QUANTIZED = ("attn_in", "attn_mid", "attn_out", "ffn_in", "ffn_mid", "ffn_out", *CROSS_ROLES)
ROLES = (*QUANTIZED, ROUTER)
CACHE_PARTS = {"kv": ("keys", "values"), "keys": ("keys",), "values": ("values",)}  # by the names of terms of variants
STREAM = ("attn_in", "ffn_in")  # roles on the feature axis of the residual stream
PAPER = ("attn_in", "attn_out", "ffn_in")  # roles in which the paper counts outliers
RESIDUAL = "residual"  # the output of a layer, beside the roles
PICTURES = "pictures"  # the protocol of vision models
LOG_PERPLEXITY = "log_perplexity"  # the metric in the place of a perplexity that is larger than any number

# Names in TransformerLens, after `blocks.LAYER.`, of the hidden states of a layer, and of the inputs of single readers
# of the residual stream (docs/names.md). Not `ln1.hook_normalized`, which is before the gain and the bias of the norm.
TRANSFORMERLENS = {
    "attn_in": "attn.hook_in",
    "attn_out": "attn.hook_z",
    "ffn_in": "mlp.hook_in",
    "ffn_out": "mlp.hook_post",
    RESIDUAL: "hook_resid_post",
    "q": "attn.q.hook_in",
    "k": "attn.k.hook_in",
    "v": "attn.v.hook_in",
    "gate": "mlp.gate.hook_in",
    "up": "mlp.in.hook_in",
    "attn_norm": "ln1.hook_in",
    "ffn_norm": "ln2.hook_in",
}

# Outlier features: LLM.int8(), section 4.1.
ALPHA = 6.0  # magnitude of a hidden state
LAYERS = 0.25  # fraction of the layers with at least one hit
POSITIONS = 0.06  # fraction of the positions of a sequence with at least one hit
FEW = 0.5  # fraction of all features; if more pass, as with large gains of norms, the criterion does not discriminate

# Bounds of a threshold, which is compared with hidden states in float32 and has to be a normal number of that type.
THRESHOLDS = (2.0**-126, 3.4e38)

# Massive activations: Sun et al., 2024, section 2.
MASSIVE = 100.0  # magnitude of an entry of the residual stream
MASSIVE_RATIO = 1000.0  # times the median magnitude of that layer's state

SPIKE = 50.0  # magnitude at the input and at the output of a projection with a super weight: Yu et al., 2024

# Mean square of a feature below which it never fires. llama.cpp multiplies up to three importances in float32, and of a
# block without any it makes NaN or zeros; the cube of this one is a normal number.
DEAD = 1e-12

SINK = 0.3  # mean attention that a sink receives: Gu et al., 2024, section 3


def role_of(state: str) -> str:
    """Return the role of a hidden state from its name in rows: "attn_mid" of "attn_mid 2", a layer's second one."""
    return state.partition(" ")[0]


def in_transformerlens(layer: int, place: str) -> str | None:
    """Return the name in TransformerLens, if any, of a hidden state, blocks.3.mlp.hook_post for (3, ffn_out), or of the
    input of a projection that reads one, blocks.3.attn.q.hook_in for (3, q)."""
    return f"blocks.{layer}.{TRANSFORMERLENS[place]}" if place in TRANSFORMERLENS else None


def in_nnsight(role: str, module: str) -> str:
    """Return the name of a hidden state in nnsight, from the path of a module: model.layers[3].mlp.down_proj.input."""
    return re.sub(r"\.(\d+)", r"[\1]", module) + (".output" if role == RESIDUAL else ".input")


def of_transformerlens(name: str) -> tuple[int, str] | None:
    """Return the layer and the place of a name in TransformerLens, as `in_transformerlens` takes them, or None."""
    match = re.fullmatch(r"blocks\.([0-9]{1,9})\.(.+)", name)
    places = [place for place, hook in TRANSFORMERLENS.items() if match and hook == match[2]]
    return (int(match[1]), places[0]) if places else None


def check_threshold(name: str, value: float, example: float = ALPHA) -> float:
    """Return the threshold as a float; raise UserError if it is not a positive number that float32 can hold."""
    low, high = THRESHOLDS
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:
        raise UserError(f"{name} is {shown(value)}; expected a positive number, such as {example}")
    return float(value)


def check_share(name: str, value: float | str, whole: bool = False) -> float:
    """Return the share as a float, from 0.05 or "5%"; raise UserError for anything else, and for 5, which may mean 5 %.

    whole: whether 1 means all of something; otherwise it is refused, as it may mean 1 %.
    """
    percent = isinstance(value, str) and value.endswith("%")
    try:
        number = float(value.removesuffix("%") if isinstance(value, str) else value) / (100 if percent else 1)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise UserError(f"{name} is {shown(value)}; expected a share such as 5% or 0.05")
    if not percent and (number > 1 or (number == 1 and not whole)):
        written = f"{number:g} % is written {number:g}% or {number / 100:g}"
        raise UserError(f"{name} is {shown(value)}; expected a share: {written}")
    return number
