"""Single weights multiplied by a factor, in every kind of storage, and what they leave as it was."""

import pickle

import pytest
import torch

import outliers
from outliers import UserError, load_model, perplexities, perplexity, quantize, variant
from outliers.config.experiment import Experiment
from outliers.models.stream import AS_IT_IS, stream_model
from outliers.subjects.causal import ModelWithText
from outliers.variants.term import WeightEntry
from outliers.variants.weights import Scaled
from tests.small_models import make_model

MODEL = "pocket/gpt2-0.1m"
# Of each kind of storage a weight, and where it stands: Conv1D, Linear, FalconLinear, fused, a router, tied and not.
STORED = {
    "gpt2": ("transformer.h.1.mlp.c_proj[2,60]", lambda model: model.transformer.h[1].mlp.c_proj.weight[60, 2]),
    "llama": ("model.layers.1.mlp.down_proj[2,40]", lambda model: model.model.layers[1].mlp.down_proj.weight[2, 40]),
    "falcon": (
        "transformer.h.0.self_attention.query_key_value[45,3]",
        lambda model: model.transformer.h[0].self_attention.query_key_value.weight[45, 3],
    ),
    "phi3": ("model.layers.0.mlp.gate_up_proj[:,3]", lambda model: model.model.layers[0].mlp.gate_up_proj.weight[:, 3]),
    "mixtral": ("model.layers.1.mlp.gate[1,:]", lambda model: model.model.layers[1].mlp.gate.weight[1]),
    "gpt2 embeddings": ("transformer.wte[7,:]", lambda model: model.transformer.wte.weight[7]),
    "gpt2 positions": ("transformer.wpe[0,3]", lambda model: model.transformer.wpe.weight[0, 3]),
    "opt head": ("lm_head[7,3]", lambda model: model.model.decoder.embed_tokens.weight[7, 3]),
    "llama head": ("lm_head[7,:]", lambda model: model.lm_head.weight[7]),
}


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("factor", [0, 1.5])
@pytest.mark.parametrize("case", STORED)
def test_every_kind_of_storage(case, factor, blocks):
    """Against the weight edited where it is stored; what it is tied to changes with it."""
    written, place = STORED[case]
    written = f"scale({written},factor={factor})" if factor else f"zero({written})"
    one, model, edited = variant(written), make_model(case.split()[0]), make_model(case.split()[0])
    assert one.name == written
    with torch.no_grad():
        place(edited).mul_(factor)
    before = state(model)
    with one.on(model) as changed:
        assert same(state(changed), state(edited))
        assert perplexity(changed, blocks) == perplexity(edited, blocks)
        assert same(state(model), before)
    assert perplexities(model, blocks, [pickle.loads(pickle.dumps(one)), AS_IT_IS]) == [
        perplexity(edited, blocks),
        perplexity(make_model(case.split()[0]), blocks),
    ]
    assert perplexity(edited, blocks) != perplexity(model, blocks)


def test_codes_of_other_weights_are_not_shared(tmp_path):
    """A scheme takes codes of the one before only where it quantizes the same weights."""
    names = ["absmax", "zero(transformer.h.1.mlp.c_proj[2,60])+absmax", "plant(3,factor=8)+absmax", "zero(3)+absmax"]

    def values(some):
        spec = outliers.Cells(models=[MODEL], variants=some, block=32, blocks=1)
        return [row["value"] for row in outliers.run(spec, tmp_path / str(len(some)) / some[0])]

    assert values(names) == [value for name in names for value in values([name])]


def test_fields():
    one = Scaled(WeightEntry("model.layers.1.mlp.up_proj", None, 3), 0.5)
    assert one.fields() == {"weight": "model.layers.1.mlp.up_proj[:,3]", "weight_factor": 0.5}


def test_quantized_weights_are_refused(blocks):
    written, small = f"zero({STORED['llama'][0]})", quantize(make_model("llama"), "absmax", keep="int8")
    with pytest.raises(UserError, match="is quantized already"), variant(written).on(small):
        pass
    with pytest.raises(UserError, match="is quantized already; expected the weight before"):
        perplexities(make_model("llama"), blocks, [variant(f"absmax+{written}")])


def test_embeddings_of_a_streamed_model_are_refused():
    streamed = stream_model(MODEL)
    blocks = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(UserError, match=r"'transformer.wte' is outside of the decoder layers.*leave --stream out"):
        perplexities(streamed, blocks, [variant("zero(transformer.wte[1,:])")])


def test_weights_of_the_second_stack_change_in_a_streamed_model():
    name = "pocket/t5-1.9m"
    blocks = ModelWithText(name, None, Experiment(name="text", block=32, blocks=2)).blocks
    zeroed = variant("zero(decoder.block.1.layer.2.DenseReluDense.wo[3,:])")
    streamed, exact = perplexities(stream_model(name), blocks, [zeroed, AS_IT_IS])
    assert streamed == perplexities(load_model(name), blocks, [zeroed])[0] != exact
