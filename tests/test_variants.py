"""Variants stand for layers, resident or streamed, alone or together, and leave the model as it was."""

import pickle

import pytest
import torch

from outliers.errors import UserError
from outliers.experiment.runner import run, sweep
from outliers.metrics.perplexity.measure import perplexities, perplexity
from outliers.metrics.top1.measure import top1_softmax
from outliers.models.load import load_model, load_tokenizer
from outliers.models.stream import AS_IT_IS, stream_model
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import get_scheme
from outliers.specification.kinds import Ablation, Experiment
from outliers.text.blocks import load_text
from outliers.tracing.result import STREAM
from outliers.tracing.trace import trace
from outliers.variants.interventions import Intervention
from outliers.variants.plant import plant
from outliers.variants.variant import Ablated, Planted, Quantized, Together

MODEL = "pocket/gpt2-0.1m"
SCHEME = get_scheme("llm.int8", 2.0)
VARIANTS = {
    "as it is": AS_IT_IS,
    "quantized": Quantized(SCHEME),
    "ablated": Ablated(Intervention((1, 2)), ("attn_in", "ffn_in")),
    "planted": Planted((3,), 8.0),
    "ablation under a scheme": Together((Quantized(SCHEME), Ablated(Intervention((1, 2))))),
    "scheme on planted outliers": Together((Planted((3,), 8.0), Quantized(SCHEME))),
}
OF_SCHEME = {"scheme": "llm.int8", "alpha": 2.0, "outlier_weights": "exact"}
OF_ABLATION = {"method": "zero", "features": [1, 2], "where": ["attn_in"], "seed": 0}
FIELDS = {
    "as it is": {},
    "quantized": OF_SCHEME,
    "ablated": OF_ABLATION | {"where": ["attn_in", "ffn_in"]},
    "planted": {"planted": [3], "factor": 8.0},
    "ablation under a scheme": OF_SCHEME | OF_ABLATION,
    "scheme on planted outliers": OF_SCHEME | {"planted": [3], "factor": 8.0},
}


@pytest.fixture(scope="module")
def models():
    return load_model(MODEL), stream_model(MODEL)


@pytest.fixture
def blocks(models):
    return torch.randint(models[0].config.vocab_size, (3, 24), generator=torch.Generator().manual_seed(0))


def hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def by_hand(name: str, model, blocks) -> float:
    """The same by functions that know nothing of variants."""
    if name == "as it is":
        return perplexity(model, blocks)
    if name in ("planted", "scheme on planted outliers"):
        model = plant(model, [3], 8.0)
    if "scheme" in name or name == "quantized":
        model = quantize(model, SCHEME)
    if "ablat" not in name:
        return perplexity(model, blocks)
    roles = ("attn_in", "ffn_in") if name == "ablated" else ("attn_in",)
    handles = []
    for layer in model.transformer.h:
        inputs = {"attn_in": layer.attn.c_attn, "ffn_in": layer.mlp.c_fc}
        for role in roles:
            handles.append(inputs[role].register_forward_pre_hook(without))
    try:
        return perplexity(model, blocks)
    finally:
        for handle in handles:
            handle.remove()


def without(_module, inputs):
    changed = inputs[0].clone()
    changed[..., [1, 2]] = 0
    return (changed,)


@pytest.mark.parametrize("name", VARIANTS)
def test_resident_and_streamed_models_take_any(name, models, blocks):
    want = by_hand(name, models[0], blocks)
    if name != "planted":  # which changes nothing, as it is to
        assert name == "as it is" or want != by_hand("as it is", models[0], blocks)
    variant = pickle.loads(pickle.dumps(VARIANTS[name]))  # as it travels to another machine
    for model in models:
        state = [parameter.clone() for parameter in model.parameters() if not parameter.is_meta]
        assert perplexities(model, blocks, [variant, AS_IT_IS]) == [want, by_hand("as it is", models[0], blocks)]
        assert hooks(model) == 0
        assert all(map(torch.equal, state, (one for one in model.parameters() if not one.is_meta)))
    assert variant.name
    assert variant.fields() == FIELDS[name]
    assert variant.fields(models[0]) == FIELDS[name] | ({"kernels": "cpu"} if "scheme" in FIELDS[name] else {})


def test_attention_under_a_variant(models, blocks):
    interventions = [Intervention(()), Intervention((1, 2))]
    want = top1_softmax(quantize(models[0], SCHEME), blocks, interventions)
    for model in models:
        assert top1_softmax(model, blocks, interventions, Quantized(SCHEME)) == want
    assert want != top1_softmax(models[0], blocks, interventions)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_trace_under_a_variant(name, models, blocks):
    one, other = (trace(model, blocks, alpha=1.0, variant=VARIANTS[name]) for model in models)
    assert one.statistics.keys() == other.statistics.keys()
    for statistic, value in one.statistics.items():
        torch.testing.assert_close(other.statistics[statistic], value, rtol=1e-12, atol=0, equal_nan=True)
    assert [hooks(model) for model in models] == [0, 0]
    if name == "planted":
        by_hand = trace(plant(models[0], [3], 8.0), blocks, alpha=1.0)
        assert torch.equal(one.statistics["attn_in.max"], by_hand.statistics["attn_in.max"])
        assert not torch.equal(one.statistics["attn_in.max"], trace(models[0], blocks).statistics["attn_in.max"])
    if name == "quantized":
        by_hand = trace(quantize(models[0], SCHEME), blocks, alpha=1.0)
        assert torch.equal(one.statistics["ffn_out.sum"], by_hand.statistics["ffn_out.sum"])


def test_what_needs_a_trace_says_so(models, blocks):
    mean = Together((Quantized(SCHEME), Ablated(Intervention((1, 2), "mean"))))
    assert mean.needs_trace
    assert not any(variant.needs_trace for variant in VARIANTS.values())
    with pytest.raises(UserError, match="give it a trace"):
        perplexities(models[0], blocks, [mean])
    known = mean.knowing(trace(models[0], blocks, STREAM, attention=False))
    assert not known.needs_trace
    one, other = (perplexities(model, blocks, [known]) for model in models)
    assert one == other != perplexities(models[0], blocks, [VARIANTS["ablation under a scheme"]])


@pytest.mark.parametrize("stream", [False, True])
def test_an_ablation_under_a_scheme_has_rows_of_its_own(stream, tmp_path):
    fields = {"model": MODEL, "features": [1, 2], "block": 32, "blocks": 2, "stream": stream}
    exact = run(Ablation(**fields), tmp_path)
    rows = run(Ablation(**fields, scheme="absmax"), tmp_path)
    assert [{row["scheme"] for row in of_one} for of_one in (exact, rows)] == [{"fp32"}, {"absmax"}]
    changed = [row["value"] != old["value"] for row, old in zip(rows, exact, strict=True)]
    assert len(exact) == len(rows)
    assert sum(changed) > len(rows) / 2
    assert run(Ablation(**fields), tmp_path) == exact
    (row, *_) = run(Ablation(**fields, scheme="llm.int8", alpha=2), tmp_path)
    assert (row["alpha"], row["scheme_alpha"]) == (2, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_are_those_of_a_model_in_which_something_is_skipped(stream, models, tmp_path):
    fields = {"block": 32, "blocks": 1, "stream": stream, "skip": ["*.c_proj"]}
    (row,) = sweep(Experiment(models=[MODEL], schemes=["absmax"], **fields), tmp_path)
    blocks = load_text("sample", load_tokenizer(MODEL), 32, 1)
    some = quantize(models[0], "absmax", skip=["*.c_proj"])
    assert row["value"] == pytest.approx(perplexity(some, blocks), rel=1e-6)
    assert row["value"] != pytest.approx(perplexity(quantize(models[0], "absmax"), blocks), rel=1e-6)
    ablated = run(Ablation(model=MODEL, features=[1], scheme="absmax", **fields), tmp_path / "ablated")
    values = {one["metric"]: one["value"] for one in ablated if one["subject"] == "none"}
    top1 = pytest.approx(top1_softmax(some, blocks, [Intervention(())])[0], rel=1e-6)
    assert values == {"perplexity": row["value"], "top1_softmax": top1}
