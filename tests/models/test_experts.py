"""Experts as projections, beside transformers' own and beside fake quantization in float64."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from outlier_kernels.formats import FORMATS, Quantizer, granularities
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from outliers import (
    UserError,
    calibrate,
    damage,
    load_int8,
    load_model,
    load_quantized,
    load_text,
    load_tokenizer,
    perplexities,
    perplexity,
    quantize,
    run,
    save_quantized,
    trace,
    variant,
)
from outliers.commands.ablate import Ablation
from outliers.models.anatomy import experts_of, layers_of, projections
from outliers.models.anatomy.experts import BY_PROJECTION, call_by_projection
from outliers.models.stream import stream_model
from outliers.quantization.calibration import FEW
from outliers.quantization.schemes import SCHEMES, Scheme, parse_grouped
from outliers.tracing.result import Trace
from outliers.views.experts import drops_section
from outliers.views.trace import trace_findings
from tests.conftest import LLAMA, slow_but
from tests.fake import product_of_bitsandbytes, product_under
from tests.small_models import inputs_of, make_model

SHAPE = {**LLAMA, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "head_dim": 8}
SHAPE |= {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 16}
SHAPE |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "sliding_window": 8}
SHAPE |= {"shared_expert_intermediate_size": 16, "first_k_dense_replace": 1, "moe_num_experts": 4, "moe_k": 2}
KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "glm4_moe", "phimoe", "granitemoe", "ernie4_5_moe")
OUTSIDE = ("llama4_text", "longcat_flash")  # of transformers' registry; their sums are in another order, 1e-7 away
KINDS += OUTSIDE
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4}
SIZES = {  # of fields that other types do not have, or have with other values
    "longcat_flash": {"num_hidden_layers": 4, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16}
    | {"zero_expert_num": 2, "moe_topk": 2, **LATENT},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
}
MIXTURES = ("mixtral", "gpt-oss")
LARGE = 20.0  # beyond what units of these models have, and below what the largest of GPT-OSS, which are clamped, can
EVERY_SCHEME = {name: parse_grouped(f"{name}-g16") or scheme for name, scheme in SCHEMES.items() if name != "fp32"}
EVERY_SCHEME |= {  # and every format, in all groups that it has
    written: Scheme(written, replace(weights, granularity=granularity.replace("column", "row")), weights)
    for name, format in FORMATS.items()
    for granularity in [one.replace("64", "16") for one in granularities(name, "weights")]
    for symmetric in format.symmetric
    for weights in [Quantizer(name, granularity, symmetric)]
    for written in [str(weights)]
}
OF_EXPERTS = ("experts.tokens", "experts.max", "experts.hits", "experts.largest")


def made(kind: str, **sizes: int):
    """A small random model of a type of mixtures."""
    usual, fields = AutoConfig.for_model(kind), SHAPE | SIZES.get(kind, {}) | sizes
    config = AutoConfig.for_model(kind, **{name: value for name, value in fields.items() if hasattr(usual, name)})
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kind", slow_but(KINDS, ("qwen2_moe", "gpt_oss")))
def test_a_type_of_mixtures(kind, as_they_are, blocks, tmp_path):
    """Bit for bit that of transformers, called afterwards as before; streamed, transformed, and with an outlier."""
    model = made(kind)
    before = model.config._experts_implementation
    outside = kind in OUTSIDE
    if not outside:
        model.set_experts_implementation("eager")
    expected = model(blocks, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(expected[:, :-1].double().flatten(0, 1), blocks[:, 1:].flatten())
    assert math.log(perplexity(model, blocks)) == pytest.approx(float(losses), abs=1e-6)
    model.config._experts_implementation = before
    states = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    usual = trace(model, blocks, alpha=LARGE, attention=False)
    assert model.config._experts_implementation == before
    assert all(torch.equal(tensor, states[name]) for name, tensor in model.state_dict().items())

    model.save_pretrained(tmp_path)
    variants = [variant("fp32"), variant("absmax")]
    assert perplexities(stream_model(str(tmp_path)), blocks, variants) == perplexities(model, blocks, variants)

    for remedy in ("smoothing", "hadamard", "rotation=2"):  # where every value is its own code
        calibration = calibrate(model, blocks, [f"same+{remedy}"])
        found = quantize(model, f"same+{remedy}", calibration=calibration)(blocks, use_cache=False).logits
        assert 0 < (found - expected).norm() <= 1e-5 * expected.norm(), remedy

    call_by_projection(model)
    found = model(blocks, use_cache=False).logits
    assert torch.equal(found, expected) or (outside and torch.allclose(found, expected, rtol=1e-5, atol=1e-5))

    chosen = usual.expert_shares().query("layer == 1").sort_values("share")["expert"].iloc[-1]
    into, out = (part.module for part in projections(model, 1) if part.expert == chosen)
    unit, units = 5, out.in_features
    interleaved = not getattr(experts_of(model)[1], "is_concatenated", True)
    into.weight[[2 * unit, 2 * unit + 1] if interleaved else [unit, units + unit]] *= 100
    out.weight[7, unit] = 1
    found = trace(model, blocks, alpha=LARGE, attention=False)
    assert usual.statistics["experts.hits"].sum() == 0
    assert found.statistics["experts.hits"].nonzero()[:, :3].tolist() == [[1, chosen, unit]]
    table = found.expert_shares().set_index(["layer", "expert"])
    assert table["value"].abs().idxmax() == (1, chosen) and table.loc[(1, chosen), "feature"] == 7


@pytest.fixture(scope="module")
def in_float64() -> list[tuple]:
    """Two mixtures with an outlier feature in what experts read, each with ids and the inputs of their projections."""
    ids, mixtures = torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1)), []
    for kind in ("mixtral", "gpt_oss"):
        model = made(kind, intermediate_size=64).double()  # units that groups of 32 divide
        for layer in layers_of(model):
            layer.module.post_attention_layernorm.weight[3] = 20
        call_by_projection(model)
        with inputs_of({part.path: part.module for part in projections(model) if part.expert is not None}) as inputs:
            model(ids)
        mixtures.append((model, ids, inputs))
    return mixtures


@pytest.mark.parametrize("scheme", [pytest.param(scheme, id=name) for name, scheme in EVERY_SCHEME.items()])
def test_every_scheme_quantizes_every_expert(scheme, in_float64):
    """As fake quantization in float64 does."""
    for model, ids, inputs in in_float64:
        calibration = calibrate(model, ids, [scheme]) if scheme.needs_calibration else None
        changed = quantize(model, scheme, only=["*.experts.*"], calibration=calibration)
        parts = {part.path: part.module for part in projections(changed) if part.expert is not None}
        for path, (x,) in inputs.items():
            (number, name), here = path.split(".")[-2:], parts[path].here
            of_all = model.get_submodule(path.rpartition(".experts.")[0]).experts
            weight = getattr(of_all, name)[int(number)]
            weight = weight.T if of_all.is_transposed else weight
            sorts = here.needs_calibration  # COMET, by the largest inputs
            order = parts[path].magnitudes.inputs.argsort(descending=True) if sorts else slice(None)
            if scheme.arithmetic == "bitsandbytes":
                expected, most = product_of_bitsandbytes(x, weight, scheme.outlier_threshold), 1e-6
            else:
                operands = here.activations, here.weights, here.outlier_threshold
                expected, most = product_under(x[:, order], weight[:, order], *operands), 1e-12
            if of_all.has_bias:
                expected += getattr(of_all, f"{name}_bias")[int(number)]
            error = (parts[path](x) - expected).abs().max() / expected.abs().max()
            assert error <= most, path


def test_one_factor_smooths_what_all_experts_read(blocks):
    model = make_model("mixtral")
    calibration = calibrate(model, blocks, ["absmax+smoothing"])
    changed = quantize(model, "absmax+smoothing", calibration=calibration)
    layer = layers_of(model)[1]
    seen = []
    layer.module.get_submodule("mlp").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].abs()))
    model(blocks)
    weights = layer.module.get_submodule("mlp.experts").gate_up_proj.abs().amax((0, 1))
    expected = (seen[0].amax((0, 1)) / weights).sqrt()
    for part in projections(changed, 1):
        if part.expert is not None and part.role == "ffn_in":
            torch.testing.assert_close(part.module.operand.fitted[0], expected)


def test_an_expert_with_few_tokens_is_calibrated_on_all(blocks, caplog):
    """A token that is repeated has the same two experts at all positions."""
    caplog.set_level(logging.INFO, "outliers")
    model, ids = make_model("mixtral"), torch.full((1, FEW), 3)
    found = calibrate(model, ids, ["absmax-vector+gptq"]).magnitudes
    assert f"4 of 8 experts got fewer than {FEW} tokens of the calibration text" in caplog.text
    experts, seen = layers_of(model)[0].module.mlp.experts, []
    experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(ids)
    gram = seen[0].T @ seen[0]
    for number in range(4):
        torch.testing.assert_close(found[0, f"ffn_in of expert {number}"].gram, gram)
        units = experts._apply_gate(seen[0] @ experts.gate_up_proj[number].T)
        torch.testing.assert_close(found[0, f"ffn_out of expert {number}"].gram, units.T @ units)


@pytest.mark.parametrize("case", MIXTURES)
def test_int8_experts_on_disk_and_while_read(case, blocks, tmp_path):
    model = make_model(case)
    model.save_pretrained(tmp_path / "exact")
    small = quantize(model, "absmax-vector", keep="int8")
    held = sum(one.nbytes for one in (*small.parameters(), *small.buffers()))
    assert held < 0.45 * sum(one.nbytes for one in model.parameters()), "weights beside codes"
    expected = perplexity(small, blocks)
    save_quantized(small, tmp_path / "int8")
    assert perplexity(load_quantized(tmp_path / "int8"), blocks) == expected
    assert perplexity(load_int8(str(tmp_path / "exact"), "absmax-vector"), blocks) == expected


@pytest.mark.parametrize("case", MIXTURES)
def test_a_trace_sees_inside_every_expert(case, blocks, tmp_path):
    """As hooks of our own see it; of two parts of a text that are merged and saved, and streamed."""
    model = make_model(case)
    model.save_pretrained(tmp_path / "model")
    parts = [trace(model, part, alpha=0.5, attention=False) for part in (blocks[:1], blocks[1:])]
    parts[0].merge(parts[1]).save(tmp_path / "trace")
    found = Trace.load(tmp_path / "trace")
    streamed = trace(stream_model(str(tmp_path / "model")), blocks, alpha=0.5, attention=False)
    assert all(torch.equal(found.statistics[name], streamed.statistics[name]) for name in OF_EXPERTS)
    model.config._experts_implementation = BY_PROJECTION
    for layer in layers_of(model):
        experts = layer.module.mlp.experts
        for number in range(4):
            with inputs_of({"": experts.get_submodule(f"{number}.down_proj")}) as seen:
                for block in blocks:
                    model(block[None])
            units = torch.cat(seen[""]).abs() if seen[""] else torch.zeros(0, experts.down_proj.shape[1])
            assert found.statistics["experts.tokens"][layer.number, number] == len(units)
            assert torch.equal(found.statistics["experts.hits"][layer.number, number], (units >= 0.5).sum(0))
            if len(units):
                assert torch.equal(found.statistics["experts.max"][layer.number, number], units.amax(0))


def test_a_router_may_name_the_operands_of_its_product(blocks, monkeypatch):
    plain = perplexity(quantize(make_model("mixtral"), "w4a4+router"), blocks)

    def forward(self, hidden_states):
        states = hidden_states.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(weight=self.weight, input=states)
        scores, numbers = torch.topk(logits.float().softmax(-1), self.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True), numbers

    monkeypatch.setattr(MixtralTopKRouter, "forward", forward)
    assert perplexity(quantize(make_model("mixtral"), "w4a4+router"), blocks) == pytest.approx(plain, rel=1e-6)


def test_an_expert_that_is_skipped_stays_exact_while_streamed(blocks, tmp_path):
    """As if exact layers stood in its place, beside routers that are quantized."""
    model = make_model("mixtral").requires_grad_(False)
    model.save_pretrained(tmp_path)
    (number,) = trace(model, blocks).expert_shares().query("layer == 1").sort_values("share").tail(1)["expert"]
    changed = quantize(model, "w4a4+router")
    whole = perplexity(changed, blocks)
    expert = layers_of(changed)[1].module.mlp.experts.get_submodule(str(number))
    for name, quantized in list(expert.named_children()):
        exact = torch.nn.Linear(*quantized.weight.T.shape, bias=False)
        exact.weight = torch.nn.Parameter(quantized.weight.clone(), requires_grad=False)
        expert.add_module(name, exact)
    expected = perplexity(changed, blocks)
    skipped = variant(f"w4a4+router+skip=layers.1.experts.{number}")
    for given in (model, stream_model(str(tmp_path))):
        assert perplexities(given, blocks, [skipped]) == [pytest.approx(expected, rel=1e-6)] != [whole]
        assert perplexities(given, blocks, [variant("w4a4+router")]) == [pytest.approx(whole, rel=1e-6)]


def test_a_finding_names_the_expert_that_adds_a_massive_activation(blocks):
    model = make_model("mixtral").requires_grad_(False)
    usual = trace(model, blocks)
    (chosen,) = usual.expert_shares().query("layer == 1").sort_values("share").tail(1)["expert"]
    experts = layers_of(model)[1].module.mlp.experts
    experts.gate_up_proj[chosen, [5, 48 + 5]] *= 100
    experts.down_proj[chosen, 7, 5] = 1
    said = [finding.text for finding in trace_findings(trace(model, blocks), {}, str)]
    assert any(text.startswith(f"Expert {chosen} of layer 1 adds") and "to feature 7 at" in text for text in said)
    assert not any(" adds " in finding.text for finding in trace_findings(usual, {}, str))


def test_the_damage_of_each_expert_alone(blocks):
    """By patterns of its projections; errors by the tokens that it got, and the largest input at its own place."""
    model = make_model("mixtral")
    found = damage(model, blocks, "absmax", by=["error", "expert"])
    names = [f"layers.{layer}.experts.{number}" for layer in (0, 1) for number in range(4)]
    assert sorted(found.experts["expert"]) == names
    for row in found.experts.to_dict("records"):
        layer, number = row["expert"].split(".")[1::2]
        alone = quantize(model, "absmax", only=[f"model.layers.{layer}.mlp.experts.{number}"])
        assert row["perplexity_only"] == pytest.approx(perplexity(alone, blocks), rel=1e-6)
    table = trace(model, blocks).expert_shares()
    errors = found.errors[found.errors["role"] == "ffn_out"]
    for layer, of_layer in table.groupby("layer"):
        (largest,) = set(errors[errors["layer"] == layer]["largest"])
        assert largest == pytest.approx(of_layer["max"].max())
    with pytest.raises(UserError, match=r"'layers.1.experts.4', of layers with 4 experts; expected experts.0 to"):
        quantize(model, "absmax", skip=["layers.1.experts.4"])
    with pytest.raises(UserError, match="has no experts under 'absmax'"):
        damage(make_model("llama"), blocks, "absmax", by=["expert"])


@pytest.mark.parametrize("case", MIXTURES)
def test_what_is_taken_out_of_an_expert_is_as_if_its_weights_were_zero(case, blocks, tmp_path):
    """A unit, written as a feature or as a column, a weight, and all of an expert; resident and streamed."""
    model = make_model(case).requires_grad_(False)
    model.save_pretrained(tmp_path)
    streamed = stream_model(str(tmp_path))
    exact = perplexity(model, blocks)
    (number,) = trace(model, blocks).expert_shares().query("layer == 1").sort_values("share").tail(1)["expert"]
    place, path = f"layers.1.experts.{number}", f"model.layers.1.mlp.experts.{number}"
    cases = {
        f"zero(3@{place}.down)": ("down_proj", (slice(None), 3)),
        f"zero({path}.down_proj[:,3])": ("down_proj", (slice(None), 3)),
        f"zero({path}.down_proj[5,3])": ("down_proj", (5, 3)),
        f"zero(3@{place}.up)": ("gate_up_proj", (slice(None), 3)),
        f"drop({place})": ("down_proj", (slice(None), slice(None))),
    }
    for text, (name, index) in cases.items():
        other = make_model(case).requires_grad_(False)
        experts = layers_of(other)[1].module.mlp.experts
        experts.get_submodule(f"{number}.{name}").weight[index] = 0
        if text.startswith("drop") and experts.has_bias:
            experts.down_proj_bias[number] = 0
        without = perplexity(other, blocks)
        assert without != exact
        for given in (model, streamed):
            assert perplexities(given, blocks, [variant(text)]) == [pytest.approx(without, rel=1e-6)], text
    assert perplexity(model, blocks) == exact


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drop(layers.1.experts.4)", "no expert 4 in layer 1 of this model; expected one of it: layers 0, 1 have 4"),
        ("drop(layers.1)", "has the place 'layers.1'; expected experts, as in drop"),
        ("zero(3@layers.1.experts.4.down)", "no such expert; expected experts.0 to experts.3"),
        ("zero(48@layers.1.experts.0.down)", "feature 48 is out of range; .* features 0 to 47"),
        ("zero(3@layers.1.experts.0.down/q)", "features of the residual stream and units of an expert"),
        ("mean(3@layers.1.experts.0.down)", "the mean of what an expert reads"),
        ("zero(model.layers.1.mlp.experts.4.down_proj[0,0])", "unknown weight"),
        ("zero(layers.1.experts.0)", "names no features"),
    ],
)
def test_places_in_experts_that_are_not_there(text, said):
    with pytest.raises(UserError, match=said):
        variant(text).check(make_model("mixtral"))


def test_a_weight_of_an_expert_is_found_before_anything_asked_for_layers():
    weight = variant("zero(model.layers.1.mlp.experts.3.down_proj[0,0])").check(make_model("mixtral"))
    assert weight.shape == (32, 48)


@pytest.mark.nightly("outliers/models/anatomy/", "outliers/quantization/")
def test_a_compiled_mixture_under_a_scheme_computes_the_same(blocks):
    """For other choices of experts too, without being compiled again."""
    changed, others = quantize(make_model("mixtral").requires_grad_(False), "absmax-vector"), (blocks + 1) % 100
    compiled = torch.compile(changed, backend="eager")
    with torch.inference_mode():
        expected = changed(blocks, use_cache=False).logits
        for _ in range(2):  # the first time makes codes
            assert torch.equal(compiled(blocks, use_cache=False).logits, expected)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(others, use_cache=False).logits, changed(others, use_cache=False).logits)


def test_experts_of_a_copy_have_the_weights_of_the_copy(blocks):
    """Which it takes along to another dtype, while the model stays as it was."""
    model = make_model("mixtral")
    copied = quantize(model, "absmax-vector", only=["attn_in"])
    expected = perplexity(copied, blocks)
    assert perplexity(copied.double(), blocks) == pytest.approx(expected, rel=1e-5)
    assert model.dtype == torch.float32 and copied.dtype == torch.float64


def test_what_each_expert_is_worth(tmp_path):
    """All of them in one command, beside the loss without each, and with the error of the text."""
    spec = Ablation(model="pocket/mixtral-0.7m", drop="experts", block=32, blocks=8)
    rows = run(spec, tmp_path)
    section = drops_section(rows)
    model, tokenizer = load_model(spec.model), load_tokenizer(spec.model)
    blocks = load_text("sample", tokenizer, block=32, blocks=8)
    call_by_projection(model)
    losses = {}
    for place in ("layers.0.experts.3", "layers.3.experts.2"):
        with variant(f"drop({place})").on(model):
            losses[place] = torch.stack([model(block[None], labels=block[None]).loss.double() for block in blocks])
    whole = torch.stack([model(block[None], labels=block[None]).loss.double() for block in blocks])
    table = section.tables[0].data.set_index("place")
    assert len(table) == 32 and table["damage"].is_monotonic_decreasing
    for place, without in losses.items():
        ratio = (without.mean() - whole.mean()).exp()
        assert table.loc[place, "damage"] + 1 == pytest.approx(ratio.item(), rel=1e-5)
        assert table.loc[place, "cost"] == pytest.approx(ratio.log().item(), abs=1e-5)
        error = ratio * (without - whole).std() / math.sqrt(len(blocks))
        assert table.loc[place, "error"] == pytest.approx(error.item(), rel=0.05, abs=1e-6)
    text = section.findings[0].text
    assert text.startswith("Expert 3 of layer 0 matters most: without it the perplexity changes by +")
