"""Schemes, the quantized layer against equation 8 in float64, whole models."""

import copy
import json
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from accelerate.hooks import CpuOffload, add_hook_to_module
from outlier_kernels import dispatch, reference
from outlier_kernels.formats import Quantizer
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor
from transformers import StaticCache
from transformers.pytorch_utils import Conv1D

from outliers import Sweep, UserError, perplexities, perplexity, plant, quantize
from outliers.models.anatomy import projections
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.peers import with_bitsandbytes
from outliers.quantization.schemes import TABLE1, Scheme, get_scheme, write_scheme
from outliers.quantization.store import load_int8, load_quantized, save_quantized
from tests.conftest import FIVE, in_turn, pairwise
from tests.fake import product_under, values_under
from tests.small_models import make_model

EIGHT_BIT = TABLE1[1:]

ACTIVATIONS_ALONE = Scheme("a8", Quantizer("int8", "row"), None)
MIXED = [  # schemes whose operands differ
    Scheme("mixed", Quantizer("int8", "row", False), Quantizer("int8", "column")),
    Scheme("weights-alone", None, Quantizer("int8", "column")),
    Scheme("w8-decomp", None, Quantizer("int8", "column"), 2.0),
]

# Outlier columns of 20 features.
OUTLIERS = {"none": [], "some": [3, 11], "all": list(range(20))}


def equation(x: torch.Tensor, weight: torch.Tensor, name: str | Scheme) -> torch.Tensor:
    """A scheme in float64, by its name alone if it has one: x (tokens, features), weight (outputs, features)."""
    if isinstance(name, Scheme):
        return product_under(x, weight, name.activations, name.weights, name.outlier_threshold)
    by_row, symmetric = name not in ("absmax", "zeropoint"), "zeropoint" not in name
    activations = Quantizer("int8", "row" if by_row else "tensor", symmetric)
    weights = Quantizer("int8", "column" if by_row and "row" not in name else "tensor", symmetric)
    threshold = 6.0 if "decomp" in name or "llm" in name else None
    return product_under(x, weight, activations, weights, threshold)


OURS = {
    "name": "ours",
    "activations": Quantizer("int8", "row"),
    "weights": Quantizer("int8", "column"),
    "outlier_threshold": 4.0,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": Quantizer("int5", "column")}, "format of the weights of scheme 'ours' is 'int5'; expected 'int8'"),
        ({"activations": None, "weights": None}, "threshold of .* is 4.0 where no operand is quantized; expected None"),
        ({"activations": Quantizer("int8", "row", 1)}, "symmetric of the activations .* is 1; expected True or False"),
        ({"activations": Quantizer("int8", "group128")}, "is 'group128'; expected 'tensor' or 'row'"),
        *(
            ({"outlier_threshold": value}, f"outlier_threshold of scheme 'ours' is {value!r}; expected a positive")
            for value in (0.0, float("nan"), float("inf"), "6", True)
        ),
        (
            {"arithmetic": "bitsandbytes", "activations": Quantizer("int8", "row", False)},
            "activations of .* is 'int8 row zeropoint' with arithmetic 'bitsandbytes'; expected 'int8 row absmax'",
        ),
        (
            {"arithmetic": "bitsandbytes", "weights": Quantizer("int8", "tensor")},
            "weights of .* with arithmetic 'bitsandbytes'; expected 'int8 column absmax'",
        ),
        ({"arithmetic": "yes"}, "arithmetic of scheme 'ours' is 'yes'; expected 'exact' or 'bitsandbytes'"),
        ({"name": ""}, "name of scheme '' is ''; expected text"),
    ],
)
def test_a_scheme_that_no_kernel_serves(fields, message, tmp_path):
    with pytest.raises(UserError, match=message):
        Scheme(**OURS | fields)
    save_file({}, tmp_path / "int8.safetensors", {"scheme": json.dumps(OURS | fields, default=vars), "skip": "[]"})
    with pytest.raises(UserError, match=f"cannot read an int8 model from .*(its scheme: .*{message})"):
        load_quantized(tmp_path)


EARLIER = '{"name": "absmax", "bits": 8, "symmetric": true, "label": "Int8 absmax"}'
SOUND = write_scheme(Scheme(**OURS))
REMEDIES = "5", "[5]", '["hadamard"]', *(f"[[{one}]]" for one in ('"hadmard", 1, []', '"clip", [], []', "[], 1, []"))
REMEDIES += *(f'[["tokens", {number}, []]]' for number in ("NaN", "1" + "0" * 400, '"x"')), '[["clip", 0.9, [5]]]'


@pytest.mark.parametrize(
    ("scheme", "skip"),
    [
        *((scheme, "[]") for scheme in ("[" * 100_000, "[]", "5", '{"name": "x"}', '{"command": "x"}', "", "null")),
        (EARLIER, "[]"),
        *((f"{SOUND[:-3]}{written}}}", "[]") for written in REMEDIES),
        *((SOUND, skip) for skip in ('"all"', "[5]", "5", "null", "[" * 100_000, '["transformer.h.7"]', "nonsense")),
    ],
)
def test_what_a_file_says_that_is_no_scheme_or_no_places(scheme, skip, tmp_path):
    save_quantized(quantize(make_model("gpt2"), "absmax", "int8"), tmp_path)
    save_file({}, tmp_path / "int8.safetensors", {"scheme": scheme, "skip": skip})
    said = "unknown part 'bits'; quantize the exact model again" if scheme == EARLIER else "cannot read an int8 model"
    said = said if scheme != SOUND or skip in ("[" * 100_000, "nonsense") else "skip"
    with pytest.raises(UserError, match=said):
        load_quantized(tmp_path)


def test_a_scheme_keeps_its_threshold_unless_another_is_asked_for():
    for more in ({}, {"alpha": 6.0}, {"alpha": 5.0}):
        asked = Sweep(models=["pocket/gpt2-0.1m"], schemes=[Scheme(**OURS), "llm.int8", "fp32"], **more)
        found = {variant.scheme.name: variant.scheme.outlier_threshold for variant in asked.quantized}
        alpha = more.get("alpha")
        assert found == {"fp32": None, "ours": alpha or 4.0, "llm.int8": alpha or 6.0}


@pairwise(
    "name outliers conv1d",
    [*EIGHT_BIT, *MIXED, ACTIVATIONS_ALONE],
    OUTLIERS,
    [False, True],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_layer_is_the_equation(name, outliers, conv1d):
    """Of codes alone, outlier features meet weights that are rebuilt of them."""
    torch.manual_seed(0)
    scheme = get_scheme(name)
    projection = (Conv1D(30, 20) if conv1d else nn.Linear(20, 30)).double()
    nn.init.normal_(projection.bias)
    weight = projection.weight.T if conv1d else projection.weight
    x = torch.randn(2, 8, 20, dtype=torch.float64)
    x[0, 5, OUTLIERS[outliers]] = -9.0
    rows, weight, bias = x.flatten(0, 1), weight.detach(), projection.bias.detach()
    with torch.no_grad():
        got = QuantizedLinear(projection, scheme)(x)
        want = equation(rows, weight, name) + bias
        torch.testing.assert_close(got, want.view(2, 8, 30), rtol=1e-12, atol=1e-12)
        if scheme.weights is not None:
            rebuilt = torch.from_numpy(values_under(weight.numpy(), scheme.weights))
            want = product_under(rows, rebuilt, scheme.activations, None, scheme.outlier_threshold) + bias
            torch.testing.assert_close(Int8Linear(projection, scheme)(x), want.view(2, 8, 30), rtol=1e-12, atol=1e-12)
    assert QuantizedLinear(projection.bfloat16(), scheme)(x.bfloat16()).dtype == torch.bfloat16


def test_model_is_quantized_and_the_original_is_not(model):
    quantized = quantize(model, "absmax")
    assert {type(p.module) for p in projections(quantized)} == {QuantizedLinear}
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert quantized.num_parameters() == model.num_parameters()
    stored = [one.get_input_embeddings().weight.data_ptr() for one in (model, quantized)]
    assert stored[0] == stored[1], "what is not quantized is shared"
    quantized.half()
    assert model.dtype == torch.float32


@pytest.mark.parametrize("name", ["zeropoint", "llm.int8"])
def test_codes_made_in_inference_mode_serve_outside_of_it(name, blocks):
    quantized = quantize(make_model("gpt2"), name)
    with torch.inference_mode():
        inside = quantized(blocks).logits
    outside = quantized(blocks).logits
    assert torch.equal(outside.detach(), inside)
    assert not quantized.transformer.h[0].mlp.c_fc.quantized_weight.scale.requires_grad


RESCHEMED = ["fp32", "absmax", "zeropoint-vector", "llm.int8", "llm.int8-bnb", "w4-g16", "nvfp4"]


@pytest.fixture(scope="module")
def afresh() -> dict:
    """A model under each of them, which has run, and its logits."""
    model, ids = make_model("llama"), torch.arange(24)[None]
    return {name: (one := quantize(model, name), ids, one(ids).logits) for name in RESCHEMED}


@pytest.mark.parametrize("name", RESCHEMED)
def test_rescheming_equals_quantizing_afresh(name, afresh):
    for first, ids, _ in afresh.values():
        assert torch.equal(quantize(first, name)(ids).logits, afresh[name][2])


def test_int8_model_in_16_bits(blocks):
    small = quantize(make_model("llama"), "llm.int8", keep="int8")
    small(blocks)
    layer = small.model.layers[0].mlp.up_proj
    scale = quantize(make_model("llama"), "llm.int8", keep="int8").model.layers[0].mlp.up_proj.scale
    half = small.bfloat16()
    assert torch.equal(layer.scale, scale), "scales stay as they are in another dtype"
    assert half(blocks).logits.dtype == torch.bfloat16


def test_a_model_made_in_inference_mode_is_quantized_as_any_other(blocks):
    with torch.inference_mode():
        model = make_model("gpt2")
    (named,) = perplexities(make_model("gpt2"), blocks, ["absmax"])
    assert perplexity(quantize(model, "absmax"), blocks) == named


def pruned():
    """A model whose first feed-forward block has fewer units than its configuration says."""
    model = make_model("llama")
    block = model.model.layers[0].mlp
    for projection in (block.gate_proj, block.up_proj):
        projection.weight = nn.Parameter(projection.weight[:16])
    block.down_proj.weight = nn.Parameter(block.down_proj.weight[:, :16])
    return model


def test_int8_mistakes(tmp_path, blocks):
    model = make_model("gpt2")
    small = quantize(model, "llm.int8", keep="int8")
    for message, call in {
        "keeps only int8 codes": lambda: quantize(small, "absmax"),
        "'a8' quantizes no weights, whose codes could be kept": lambda: quantize(model, ACTIVATIONS_ALONE, "int8"),
        "unknown way to keep weights 'int4'": lambda: quantize(model, "absmax", keep="int4"),
        "does not keep int8 codes alone": lambda: save_quantized(quantize(model, "absmax"), tmp_path),
        "its configuration makes one of": lambda: save_quantized(quantize(pruned(), "absmax", keep="int8"), tmp_path),
        "quantizes no projections; use load_model": lambda: load_int8("pocket/gpt2-0.1m", "fp32"),
    }.items():
        with pytest.raises(UserError, match=message):
            call()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write to"):
        save_quantized(small, tmp_path / "file" / "folder")
    save_quantized(small, tmp_path / "small")
    file = tmp_path / "small" / "int8.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match="cannot read an int8 model"):
        load_quantized(tmp_path / "small")


class Doubled(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def with_weight(projection: nn.Linear, weight: torch.Tensor) -> nn.Linear:
    projection.weight = nn.Parameter(weight, requires_grad=False)
    return projection


def hooked(projection: nn.Linear, register: str) -> nn.Linear:
    getattr(projection, register)(lambda *_: None)
    return projection


def with_forward(projection: nn.Linear) -> nn.Linear:
    projection.forward = lambda x: 2 * nn.functional.linear(x, projection.weight, projection.bias)
    return projection


# What a projection may be turned into that is more than its weight, or less, and what is said of it.
MORE_THAN_WEIGHTS = {
    "subclass": (lambda projection: Doubled(32, 32), "is of tests.quantization.test_quantization.Doubled"),
    "pruned": (lambda one: prune.random_unstructured(one, "weight", 0.5), "makes its weight of weight_orig"),
    "narrow": (lambda one: with_weight(one, one.weight.to(torch.float8_e4m3fn)), "float8_e4m3fn"),
    "two in one": (lambda one: with_weight(one, TwoTensor(*[one.weight.detach()] * 2)), "TwoTensor"),
    "forward": (with_forward, "has a forward method in the place of its own"),
    "offloaded": (lambda projection: add_hook_to_module(projection, CpuOffload("cpu")), "accelerate's CpuOffload"),
    "gradients": (lambda projection: hooked(projection, "register_full_backward_hook"), "has backward_hooks"),
    "state": (lambda projection: hooked(projection, "register_state_dict_post_hook"), "has state_dict_hooks"),
}


@pytest.mark.parametrize("kind", MORE_THAN_WEIGHTS)
def test_what_is_more_than_its_weight_is_refused(kind):
    change, message = MORE_THAN_WEIGHTS[kind]
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    attention.o_proj = change(attention.o_proj)
    changes = [partial(quantize, model, *how) for how in (["absmax"], ["fp32"], ["absmax", "int8"])]
    for call in [*changes, partial(with_bitsandbytes, model)]:
        with pytest.raises(UserError, match=rf"'model.layers.1.self_attn.o_proj' .*{message}.*"):
            call()


def test_nothing_is_planted_in_codes(blocks):
    for keep in ("exact", "int8"):
        with pytest.raises(UserError, match=r"'transformer.h.0.attn.c_attn' is of outliers.quantization.*; expected a"):
            plant(quantize(make_model("gpt2"), "absmax", keep), [3], 2.0)


class Watch:
    """A hook that refers to the whole model."""

    def __init__(self, model):
        self.model, self.seen = model, []

    def __call__(self, _module, _inputs, output):
        self.seen.append(output)
        return 2 * output


@pytest.mark.parametrize("keep", ["exact", "int8"])
def test_forward_hooks_are_kept(keep, blocks):
    model = make_model("llama")
    plain = quantize(model, "absmax", keep)
    projection, watch = model.model.layers[0].self_attn.o_proj, Watch(model)
    projection.register_forward_hook(watch)
    projection.register_forward_pre_hook(lambda _module, inputs, _keywords: ((-inputs[0],), {}), with_kwargs=True)
    hooked = quantize(model, "absmax", keep)
    alike = plain.model.layers[0].self_attn.o_proj
    alike.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    alike.register_forward_pre_hook(lambda _module, inputs: -inputs[0])
    got = hooked(blocks).logits
    assert torch.equal(got, plain(blocks).logits)
    assert len(watch.seen) == 1
    if keep == "exact":  # from one scheme to another, and back to none
        again = quantize(quantize(hooked, "llm.int8"), "absmax")
        assert torch.equal(again(blocks).logits, got)
        assert torch.equal(quantize(hooked, "fp32")(blocks).logits, model(blocks).logits)
        assert len(watch.seen) == 4


def test_the_mode_of_a_projection_is_kept():
    model = make_model("gpt2")
    model.transformer.h[1].train()
    for keep in ("exact", "int8"):
        modes = [projection.module.training for projection in projections(quantize(model, "absmax", keep))]
        assert modes == [False] * 4 + [True] * 4


def test_a_projection_that_is_used_twice(blocks):
    model = make_model("llama")
    layers = model.model.layers
    layers[1].mlp.up_proj = layers[0].mlp.up_proj
    layers[1].mlp.down_proj.weight = layers[0].mlp.down_proj.weight
    for keep in ("exact", "int8"):
        quantized = quantize(model, "absmax", keep)
        assert quantized.model.layers[0].mlp.up_proj is quantized.model.layers[1].mlp.up_proj
        assert torch.equal(quantized(blocks).logits, quantize(copy.deepcopy(model), "absmax", keep)(blocks).logits)
    exact = quantize(model, "absmax").model.layers
    assert exact[0].mlp.down_proj.projection.weight is exact[1].mlp.down_proj.projection.weight


def other_model(case: str) -> nn.Module:
    """A model of other weights."""
    model = make_model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def replace_data(model, other):
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = value.detach().clone()


def replace_parameters(model, other):
    for module, value in zip(model.modules(), other.modules(), strict=True):
        module._parameters.update(value._parameters)


EDITS = {
    "load_state_dict": lambda model, other: model.load_state_dict(other.state_dict()),
    "data": replace_data,
    "parameters": replace_parameters,
}


@in_turn("edit case", EDITS, ["gpt2", "llama"])
def test_codes_are_those_of_the_weights_that_are_there(case, edit, blocks):
    """The weights change after codes were made of them."""
    quantized, other = (quantize(model, "absmax-vector") for model in (make_model(case), other_model(case)))
    before, expected = quantized(blocks).logits, other(blocks).logits
    EDITS[edit](quantized, other)
    shared = quantize(quantized, "llm.int8")
    assert torch.equal(quantized(blocks).logits, expected)
    assert not torch.equal(before, expected)
    assert torch.equal(shared(blocks).logits, quantize(other_model(case), "llm.int8")(blocks).logits)


def test_codes_follow_the_original_whose_weights_they_share(blocks):
    model = make_model("gpt2")
    quantized = quantize(model, "absmax-vector")
    quantized(blocks)
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.mul_(0.5)
    assert torch.equal(quantized(blocks).logits, quantize(model, "absmax-vector")(blocks).logits)
    layer = quantized.double().transformer.h[0].mlp.c_fc
    assert layer.quantized_weight.scale.dtype == torch.float64, "they follow the weights to another dtype"


@pairwise(
    "case scheme assign ran", ["gpt2", "llama"], ["llm.int8", "zeropoint-vector"], [False, True], ["01", "10", "11"]
)
def test_state_of_an_int8_model(case, scheme, assign, ran, blocks):
    """Into a model of other weights, from each state into each state: before a forward pass and after."""
    expected = quantize(make_model(case), scheme, "int8")(blocks).logits
    source, target = (quantize(model, scheme, "int8") for model in (make_model(case), other_model(case)))
    for model, has_run in zip((source, target), ran, strict=True):
        if has_run == "1":
            model(blocks)
    report = target.load_state_dict(source.state_dict(), assign=assign)
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert torch.equal(target(blocks).logits, expected)
    assert torch.equal(source(blocks).logits, expected)


@pytest.mark.parametrize("ran", [False, True])
def test_codes_and_scales_are_not_mixed(ran, blocks):
    small = quantize(make_model("gpt2"), "absmax", "int8")
    expected = small(blocks).logits
    if not ran:
        small = quantize(make_model("gpt2"), "absmax", "int8")
    zeropoint = quantize(other_model("gpt2"), "zeropoint", "int8").state_dict()
    without_codes = {name: value for name, value in small.state_dict().items() if not name.endswith(".codes")}
    for state in (other_model("gpt2").state_dict(), zeropoint, without_codes):
        of_projections = {name: value for name, value in state.items() if ".h." in name and ".ln_" not in name}
        with pytest.raises(RuntimeError, match=r"h.0.attn.c_attn' is under 'absmax' and takes codes, scale, got "):
            small.load_state_dict(of_projections, strict=False)
        assert torch.equal(small(blocks).logits, expected)


def test_what_is_replaced_of_an_int8_layer_is_multiplied():
    torch.manual_seed(0)
    x, layer = torch.randn(3, 16), Int8Linear(nn.Linear(16, 8, bias=False), get_scheme("absmax-vector"))
    before = layer(x)
    layer.scale = 2 * layer.scale
    assert torch.allclose(layer(x), 2 * before)
    layer.scale /= 2
    assert torch.allclose(layer(x), before)
    layer._plain()
    layer.codes = -layer.codes
    assert torch.allclose(layer(x), -before)


def pickled(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))


@in_turn(
    "kind others",
    [QuantizedLinear, Int8Linear],
    [copy.deepcopy, copy.deepcopy, pickled, pickled, lambda layer: layer, lambda layer: layer.state_dict() and layer],
    ids=None,
)
def test_threads_that_come_first(kind, others):
    """Many threads call a layer for the first time at once; one of them copies it first, or asks for its state."""
    projection, x, scheme = nn.Linear(16, 8), torch.randn(3, 16), get_scheme("absmax-vector")
    expected = kind(projection, scheme)(x)
    start, interval = threading.Barrier(8), sys.getswitchinterval()

    def run(number, layer):
        start.wait()
        return torch.equal((layer if number else others(layer))(x), expected)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(40):
                assert all(pool.map(run, range(8), [kind(projection, scheme)] * 8))
    finally:
        sys.setswitchinterval(interval)


@in_turn("case keep", FIVE, ["exact", "int8"])
def test_a_backward_pass_is_refused(case, keep, blocks):
    """And only that: with gradients enabled the outputs are what they are without."""
    quantized = quantize(make_model(case), "llm.int8", keep)
    with torch.no_grad():
        expected = quantized(blocks).logits
    logits = quantized(blocks).logits
    assert torch.equal(logits, expected)
    with pytest.raises(UserError, match="a projection in 8 bits has no gradient"):
        logits.sum().backward()
    quantized.requires_grad_(False)
    assert not quantized(blocks).logits.requires_grad
    head = quantized.get_output_embeddings().requires_grad_()
    if head.weight is not quantized.get_input_embeddings().weight:
        quantized(blocks).logits.sum().backward()
        assert head.weight.grad is not None, "what comes after the projections can be trained"


@pytest.mark.parametrize("place", ["self_attention.query_key_value", "mlp.dense_h_to_4h"])
def test_a_backward_pass_to_one_weight_is_refused(place, blocks):
    """Also where no input has a gradient. Falcon adds what its attention makes to what its feed-forward makes, in
    place."""
    quantized = quantize(make_model("falcon").requires_grad_(False), "llm.int8")
    quantized.get_submodule(f"transformer.h.0.{place}").projection.requires_grad_()
    with pytest.raises(UserError, match="a projection in 8 bits has no gradient"):
        quantized(blocks).logits.sum().backward()


def compiled(model: nn.Module, backend: str) -> nn.Module:
    """One graph of the whole model, or an error."""
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.nightly("kernels/outlier_kernels/", "outliers/quantization/")
def test_a_compiled_int8_model_is_one_graph(blocks):
    """The same bits, where the arithmetic is left alone; also once its weights are others."""
    small, other = (quantize(model, "llm.int8", "int8") for model in (make_model("gpt2"), other_model("gpt2")))
    with torch.no_grad():
        run = compiled(small, "eager")
        assert torch.equal(run(blocks).logits, quantize(make_model("gpt2"), "llm.int8", "int8")(blocks).logits)
        small.load_state_dict(other.state_dict())
        assert torch.equal(run(blocks).logits, other(blocks).logits)
    with pytest.raises(UserError, match="a projection in 8 bits has no gradient"):
        compiled(small, "aot_eager")(blocks).logits.sum().backward()


def test_a_compiled_decode_step_is_one_graph(blocks):
    """With keys and values of earlier tokens, in the dtype in which models generate: the same bits."""
    small = quantize(make_model("llama").bfloat16(), "llm.int8", "int8")

    def logits(step: nn.Module) -> list[torch.Tensor]:
        cache = StaticCache(config=small.config, max_cache_len=8)
        small(blocks[:1, :4], past_key_values=cache, use_cache=True)
        given = ({"position_ids": torch.tensor([[place]]), "past_key_values": cache} for place in range(4, 7))
        return [step(blocks[:1, place : place + 1], **one).logits for place, one in enumerate(given, 4)]

    with torch.inference_mode():
        assert all(map(torch.equal, logits(compiled(small, "eager")), logits(small)))


@torch.no_grad()
def test_biases_of_layers_that_are_multiplied_at_once_are_stacked_until_one_changes(monkeypatch):
    monkeypatch.setattr(dispatch, "grouped_linear", reference.grouped_linear)
    layers = tuple(Int8Linear(nn.Linear(8, 4), get_scheme("absmax-vector")) for _ in range(3))
    first, given = layers[0], (torch.randn(6, 8), torch.tensor([2, 4, 6]))
    before, stacked = first.multiply_all(layers, *given), first.stacked_bias
    assert first.multiply_all(layers, *given).equal(before) and first.stacked_bias is stacked
    layers[1].bias += 1
    assert (first.multiply_all(layers, *given) - before).round().sum(1).tolist() == [0, 0, 4, 4, 0, 0]
    layers[2].bias = nn.Parameter(layers[2].bias + 1)
    assert (first.multiply_all(layers, *given) - before).round().sum(1).tolist() == [0, 0, 4, 4, 4, 4]
