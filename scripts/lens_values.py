"""Write what TransformerLens and nnsight see in two small models, for a test of their names.

    python scripts/lens_values.py

Neither is a requirement. Run this in an environment of its own with transformers, nnsight and TransformerLens 3, the
last version with HookedTransformer beside TransformerBridge; it needs nothing of this project.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PATH = Path(__file__).parent.parent / "tests" / "models" / "lens_values.json"
IDS = torch.tensor([[3, 17, 5, 30, 11, 0, 8]])
FEATURES = [1, 6]  # those that are set to zero
SIZES = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
MODELS = {
    "gpt2": {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "llama": {
        "hidden_size": 8,
        "intermediate_size": 12,
        "max_position_embeddings": 16,
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    },
}
# The states of layer 1, by their names; and what reads the residual stream, in which features are set to zero.
STATES = ("attn.hook_in", "attn.hook_z", "mlp.hook_in", "mlp.hook_post", "hook_resid_post")
READERS = (
    *("attn.hook_in", "mlp.hook_in", "attn.q.hook_in", "attn.k.hook_in", "attn.v.hook_in"),
    *("mlp.gate.hook_in", "mlp.in.hook_in", "ln1.hook_in", "ln2.hook_in"),
)
# Queries, keys and values, by head; and behind the rotation of positions, where there is one.
KEYS = {"gpt2": ("attn.hook_q", "attn.hook_k", "attn.hook_v")}
KEYS["llama"] = (*KEYS["gpt2"], "attn.hook_rot_q", "attn.hook_rot_k")
CLASSIC = ("ln1.hook_normalized", "ln2.hook_normalized", "attn.hook_z", "mlp.hook_post", "hook_resid_post")
NNSIGHT = {
    "gpt2": [
        *(f"transformer.h[1].{path}.input" for path in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        "transformer.h[1].output",
    ],
    "llama": [
        *(f"model.layers[1].self_attn.{name}.input" for name in ("q_proj", "o_proj")),
        *(f"model.layers[1].mlp.{name}.input" for name in ("gate_proj", "down_proj")),
        "model.layers[1].output",
    ],
}


def make_model(kind: str) -> PreTrainedModel:
    """Return a model whose weights are computed, because random numbers differ between versions of torch."""
    config = AutoConfig.for_model(kind, **SIZES, **MODELS[kind], attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            places = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
            parameter.copy_(torch.sin(1.7 * places + number + 1) * 0.5 + (parameter.ndim == 1))
    return model


def make_bridge(kind: str, model: PreTrainedModel):
    """Return the model in TransformerLens, with its weights unchanged."""
    from transformer_lens.model_bridge import TransformerBridge

    name = {"gpt2": "gpt2", "llama": "meta-llama/Llama-2-7b-hf"}[kind]
    return TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=_tokenizer(), device="cpu")


def seen(bridge, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return states of layer 1 by their names in TransformerLens, (T, features), heads side by side."""
    found = {}
    keep = [(f"blocks.1.{name}", lambda x, hook, name=name: found.update({f"blocks.1.{name}": x})) for name in names]
    with torch.no_grad():
        bridge.run_with_hooks(IDS, fwd_hooks=keep)
    return {name: x.detach().reshape(IDS.shape[1], -1) for name, x in found.items()}


def ablated(bridge, name: str) -> torch.Tensor:
    """Return the last logits (vocabulary,) with features of a state of layer 1 set to zero."""

    def zero(x, hook):
        x = x.clone()
        x[..., FEATURES] = 0
        return x

    with torch.no_grad():
        return bridge.run_with_hooks(IDS, fwd_hooks=[(f"blocks.1.{name}", zero)])[0, -1]


def in_nnsight(model: PreTrainedModel, name: str) -> torch.Tensor:
    """Return a state by its path in nnsight, (T, features)."""
    from nnsight import NNsight

    wrapped = NNsight(model)
    with wrapped.trace(IDS):
        found = eval(f"wrapped.{name}").save()
    return found.detach().reshape(IDS.shape[1], -1)


def classic(kind: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the states of HookedTransformer with the weights of the model, unprocessed."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions

    of_kind = {
        "gpt2": {"d_mlp": 32, "act_fn": "gelu_new", "normalization_type": "LN", "eps": 1e-5},
        "llama": {
            "d_mlp": 12,
            "act_fn": "silu",
            "normalization_type": "RMS",
            "eps": 1e-6,
            "gated_mlp": True,
            "positional_embedding_type": "rotary",
            "rotary_dim": 4,
            "rotary_adjacent_pairs": False,
            "final_rms": True,
        },
    }[kind]
    sizes = {"n_layers": 2, "d_model": 8, "n_ctx": 16, "d_head": 4, "n_heads": 2, "d_vocab": SIZES["vocab_size"]}
    config = HookedTransformerConfig(**sizes, **of_kind, device="cpu")
    hooked = HookedTransformer(config)
    convert = getattr(weight_conversions, f"convert_{kind}_weights")
    changes = ("fold_ln", "fold_value_biases", "center_writing_weights", "center_unembed")
    hooked.load_and_process_state_dict(convert(model, config), **dict.fromkeys(changes, False))
    return seen(hooked, CLASSIC)


def _tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(SIZES["vocab_size"])}, "w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0")


def _of(kind: str) -> dict:
    """Return the states and logits of a model in both libraries.

    Each library gets a model of its own, because TransformerLens takes its model apart.
    """
    bridge = make_bridge(kind, make_model(kind))
    readers = [name for name in READERS if kind == "llama" or name != "mlp.gate.hook_in"]
    found = {
        "bridge": seen(bridge, STATES),
        "keys": seen(bridge, KEYS[kind]),
        "ablated": {f"blocks.1.{name}": ablated(bridge, name) for name in readers},
        "classic": classic(kind, make_model(kind)),
        "nnsight": {name: in_nnsight(make_model(kind), name) for name in NNSIGHT[kind]},
    }
    return {tool: {name: x.tolist() for name, x in states.items()} for tool, states in found.items()}


def main() -> None:
    """Write the values of all models, with the versions of the libraries."""
    from importlib.metadata import version

    versions = {name: version(name) for name in ("transformer-lens", "nnsight", "transformers", "torch")}
    PATH.write_text(json.dumps(versions | {kind: _of(kind) for kind in MODELS}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
