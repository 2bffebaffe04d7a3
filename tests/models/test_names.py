"""Names of hidden states in TransformerLens and nnsight: the same values as there, and the same changes."""

import json
import sys
from pathlib import Path

import pytest
import torch

import outliers
from outliers import Trace, UserError, run, variant
from outliers.commands.trace import Tracing
from outliers.criterion import OF_EVERY_STACK, RESIDUAL, in_transformerlens
from outliers.metrics.keys import observed_channels
from outliers.metrics.records import AFTER, ATTENDED, BEFORE
from outliers.models.anatomy.names import state_names
from tests.small_models import make_model

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import lens_values  # noqa: E402

# What `python scripts/lens_values.py` writes; the file names the versions of the libraries.
VALUES = json.loads((Path(__file__).parent / "lens_values.json").read_text(encoding="utf-8"))
KINDS = [*lens_values.MODELS]
NORMS = {  # of layer 1
    "gpt2": ["transformer.h.1.ln_1", "transformer.h.1.ln_2"],
    "llama": ["model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm"],
}


def close(one: torch.Tensor, other) -> bool:
    """Within the rounding of float32."""
    return torch.allclose(one, torch.as_tensor(other), rtol=1e-4, atol=1e-5)


def state(model, name: str) -> torch.Tensor:
    """A hidden state by its name in TransformerLens."""
    return next(outliers.hidden_states(model, lens_values.IDS, name))


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_by_a_name_are_those_of_transformerlens(kind):
    model, values = lens_values.make_model(kind), VALUES[kind]["bridge"]
    assert set(values) == {in_transformerlens(1, role) for role in (*OF_EVERY_STACK, RESIDUAL)}
    assert all(close(state(model, name), value) for name, value in values.items())


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_by_names_of_nnsight_see_what_it_sees(kind):
    model, found = lens_values.make_model(kind), {}
    with (
        torch.no_grad(),
        outliers.hooks(model, lambda _, name, x: found.update({name: x}), [*OF_EVERY_STACK, RESIDUAL], [1], "nnsight"),
    ):
        model(lens_values.IDS)
    assert found.keys() == VALUES[kind]["nnsight"].keys()
    assert all(close(found[name], value) for name, value in VALUES[kind]["nnsight"].items())


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_at_a_name_are_those_of_transformerlens(kind):
    model, values = lens_values.make_model(kind), VALUES[kind]["ablated"]
    with torch.no_grad():
        unchanged = model(lens_values.IDS).logits[0, -1]
        for name, expected in values.items():
            with variant(f"zero({','.join(map(str, lens_values.FEATURES))}@{name})").on(model) as changed:
                logits = changed(lens_values.IDS).logits[0, -1]
            assert close(logits, expected), name
            assert not close(logits, unchanged), name


@pytest.mark.parametrize("kind", KINDS)
def test_hooked_transformer_has_some_of_the_names(kind):
    """Its `hook_normalized` is before the gain, and the bias, of the norm."""
    model, values = lens_values.make_model(kind), VALUES[kind]["classic"]
    normalized = [name for name in values if name.endswith("hook_normalized")]
    assert all(close(state(model, name), value) for name, value in values.items() if name not in normalized)
    for name, role, path in zip(normalized, ("attn_in", "ffn_in"), NORMS[kind], strict=True):
        read, norm = state(model, in_transformerlens(1, role)), model.get_submodule(path)
        before = torch.tensor(values[name])
        assert close(before * norm.weight + getattr(norm, "bias", 0), read)
        assert not close(before, read)


@pytest.mark.parametrize("kind", KINDS)
def test_queries_keys_and_values_are_those_of_transformerlens(kind):
    found = observed_channels(lens_values.make_model(kind), lens_values.IDS).sums
    values = VALUES[kind]["keys"]
    assert len(values) == (5 if kind == "llama" else 3)
    for name, states in values.items():
        side = AFTER if "rot" in name else BEFORE
        magnitudes = found[1, ATTENDED[name[-1]], side].magnitudes
        assert close(magnitudes.float(), torch.tensor(states).abs().amax(0).view(magnitudes.shape))


# Not kinds of Falcon that TransformerLens cannot run.


def test_a_name_says_layer_and_role(blocks):
    model, seen = make_model("llama"), []
    with outliers.hooks(model, lambda *state: seen.append(state[:2]), ["blocks.1.mlp.hook_post", "attn_in"], [0]):
        outliers.perplexity(model, blocks[:1])
    assert seen == [(0, "attn_in"), (1, "ffn_out")]


def test_a_place_by_either_name_is_one_variant():
    assert variant("zero(3@blocks.1.attn.hook_in)") == variant("zero(3@layers.1.attn_in)")
    assert variant("shuffle(3@q/blocks.0.ln2.hook_in,seed=1)").name == "shuffle(3@q/layers.0.ffn_norm,seed=1)"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"names": "baukit"}, "unknown names 'baukit'; known: transformerlens, nnsight"),
        ({"roles": "blocks.1.attn.q.hook_in"}, "unknown role 'blocks.1.attn.q.hook_in'"),
        ({"roles": "blocks.7.attn.hook_z"}, r"no hidden states of role blocks.7.attn.hook_z in layers .7.; .* 0 to 1"),
    ],
)
def test_names_that_are_not_there(arguments, said):
    with pytest.raises(UserError, match=said), outliers.hooks(make_model("llama"), print, **arguments):
        pass


def test_a_trace_knows_the_names(model, blocks, tmp_path):
    outliers.trace(model, blocks).save(tmp_path / "trace")
    found = Trace.load(tmp_path / "trace").hooks()
    for tool in ("transformerlens", "nnsight"):
        names = dict(zip(zip(found["layer"], found["role"], strict=True), found[tool], strict=True))
        assert names == {state: name for state, name in state_names(model, tool).items() if state in names}
    assert list(found.columns) == ["layer", "role", "transformerlens", "nnsight"]


def test_traces_of_stacks_have_names_in_nnsight_alone(tmp_path):
    run(Tracing(model="pocket/t5-1.9m", blocks=2, block=64), tmp_path)
    for stack, first in (("encoder", "encoder.block["), ("decoder", "decoder.block["), ("cross", "decoder.block[")):
        found = Trace.load(tmp_path / f"trace.{stack}").hooks()
        assert found["transformerlens"].isna().all()
        assert found["nnsight"].str.startswith(first).all()


def test_a_trace_of_an_earlier_version_has_no_paths(blocks):
    found = outliers.trace(make_model("llama"), blocks)
    found.modules = {}
    assert found.hooks()["nnsight"].isna().all()
    assert found.hooks()["transformerlens"].notna().all()
