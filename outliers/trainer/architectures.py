"""Changes of GPT-2 that are said to prevent outliers: other attention, positions and norms.

A model is changed in place after it was built from its configuration and before it is trained. No configuration of
transformers describes the result, so that results of such models are stored as rows, not as weights.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2LMHeadModel, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from outliers.errors import UserError

CLIPPED_BELOW = -4.0  # γ · T of the clipped softmax, with γ scaled by the length T of the sequence
ROTARY_BASE = 10_000.0
AS_IT_IS = ("softmax", False, "learned", "layernorm")
GATE_BIAS = 2.0  # initial bias of gates, which are then 88 % open


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return exp(x_i) / Σ exp(x_j) of scores (…, queries, keys)."""
    return functional.softmax(scores, -1, dtype=torch.float32)


def softmax_plus_one(scores: torch.Tensor) -> torch.Tensor:
    """Return exp(x_i) / (1 + Σ exp(x_j)), which lets a head attend to nothing (Miller, "Attention is off by one",
    2023)."""
    scores = scores.float()
    largest = scores.amax(-1, keepdim=True).clamp(min=0).detach()
    exponentials = (scores - largest).exp()
    return exponentials / ((-largest).exp() + exponentials.sum(-1, keepdim=True))


def clipped_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax stretched to the range from γ to 1 and clipped at 0, so that small probabilities become
    exactly 0.

    Bondarenko et al., "Quantizable transformers", 2023, equation 4, with ζ = 1 and γ = −4 / T.
    """
    below = CLIPPED_BELOW / scores.shape[-1]
    return ((1 - below) * softmax(scores) + below).clamp(0, 1)


NORMALIZED = {"softmax": softmax, "softmax-plus-one": softmax_plus_one, "clipped-softmax": clipped_softmax}


def rotated(states: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to queries or keys (batch, heads, T, features) (Su et al., "RoFormer", 2021)."""
    length, features = states.shape[-2:]
    frequencies = ROTARY_BASE ** (-torch.arange(0, features, 2, device=states.device) / features)
    angles = torch.arange(length, device=states.device)[:, None] * frequencies
    cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    even, odd = states[..., ::2], states[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)


class ChangedAttention(GPT2Attention):
    """The causal attention of GPT-2 with replaced parts, for whole sequences without a cache."""

    normalize: Callable[[torch.Tensor], torch.Tensor]
    rotary: bool
    gate: nn.Linear | None

    def forward(self, hidden_states: torch.Tensor, **_others) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs (batch, T, features) for states of that shape, and probabilities (batch, heads, T, T)."""
        split = self.c_attn(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if self.rotary:
            query, key = rotated(query), rotated(key)
        scores = query @ key.mT * self.scaling
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        probabilities = self.normalize(scores.masked_fill(~causal, -math.inf)).to(value.dtype)
        states = (probabilities @ value).transpose(1, 2)
        if self.gate is not None:
            states = states * self.gate(hidden_states).sigmoid()[..., None]
        return self.c_proj(states.flatten(-2)), probabilities


def modify_gpt2(model: PreTrainedModel, attention: str, gated: bool, positions: str, norm: str) -> PreTrainedModel:
    """Replace parts of a GPT-2 that was just built; a model that keeps all parts is returned as it is.

    Args:
        model: a model before training, which is changed in place.
        attention: a name in `NORMALIZED`.
        gated: whether the output of each head is multiplied by a sigmoid gate of its own, linear in the attention's
            input (Bondarenko et al., 2023, equation 5).
        positions: "learned", or "rotary", without a positional embedding.
        norm: "layernorm", or "rmsnorm", here without weights.

    Raises:
        UserError: a part of a model other than GPT-2 would be replaced.
    """
    parts = attention, gated, positions, norm
    if parts == AS_IT_IS:
        return model
    if not isinstance(model, GPT2LMHeadModel):
        raise UserError(f"{' and '.join(map(str, parts))} with '{model.config.model_type}'; expected a gpt2")
    decoder, rotary = model.transformer, positions == "rotary"
    if parts[:3] != AS_IT_IS[:3]:
        for block in decoder.h:
            _change_attention(block.attn, NORMALIZED[attention], gated, rotary)
    if rotary:
        decoder.wpe.weight.requires_grad_(False).zero_()
    if norm == "rmsnorm":
        for module, name in [*((block, name) for block in decoder.h for name in ("ln_1", "ln_2")), (decoder, "ln_f")]:
            before = getattr(module, name)
            setattr(module, name, nn.RMSNorm(before.normalized_shape, before.eps, elementwise_affine=False))
    return model


def _change_attention(module: GPT2Attention, normalize: Callable, gated: bool, rotary: bool) -> None:
    module.__class__, module.normalize, module.rotary, module.gate = ChangedAttention, normalize, rotary, None
    if gated:
        module.gate = nn.Linear(module.embed_dim, module.num_heads)
        nn.init.zeros_(module.gate.weight)
        nn.init.constant_(module.gate.bias, GATE_BIAS)
