"""Exports of plans: each is read by its own library, applied to a model, and quantizes what the plan says."""

import copy
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
import transformers
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import outliers
from outliers.errors import UserError
from outliers.models.anatomy import experts_of, projections
from outliers.quantization.plans.assigned import patterns
from outliers.quantization.plans.exports import EXPORTS, export_text
from outliers.variants.draw import drawn, value_over_draws
from tests import gguf_files
from tests.conftest import C4, STORIES, needs_shared
from tests.models.test_experts import made as mixture
from tests.peers import APPLIED

IDS = torch.arange(1, 33)[None]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS = {
    "llama": AutoConfig.for_model("llama", **SIZES, num_key_value_heads=2, vocab_size=96, tie_word_embeddings=True),
    "opt": AutoConfig.for_model(  # with layers around the stack
        "opt",
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=96,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
    ),
    "gpt2": AutoConfig.for_model("gpt2", n_embd=64, n_layer=3, n_head=4, n_positions=64, vocab_size=96),
}
UNITS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
DRAWS = 5


def needs(package, why="of the extra peers"):
    there = importlib.util.find_spec(package.replace("-", "_")) is not None
    return pytest.mark.skipif(not there, reason=f"needs {package}, {why}")


NEEDS_LLM_COMPRESSOR = needs(
    "llmcompressor", "which asks for an older transformers, and works with this one: pip install --no-deps"
)


def of(package, *values):
    return pytest.param(package, *values, marks=needs(package), id="-".join(map(str, (package, *values))))


def make(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[kind]).eval()


@pytest.fixture(scope="module")
def llama():
    return make("llama")


@pytest.fixture(scope="module")
def stories():
    model, tokenizer = outliers.load_model(str(STORIES)), outliers.load_tokenizer(str(STORIES))
    return model, outliers.load_text(str(C4), tokenizer, block=128, blocks=16)


def paths_of(model):
    return [one.path for one in projections(model)]


def plan_of(model, scheme, **fields):
    return outliers.Plan(model="mine", scheme=scheme, projections=len(paths_of(model)), **fields)


def of_layers(model, *endings):
    return [path for path in paths_of(model) if path.endswith(endings)]


def quantized(model):
    """The full paths of what a library has quantized."""
    theirs = ("bitsandbytes", "torchao")
    return [
        path
        for path, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
        or type(module).__module__.startswith(theirs)
        or type(getattr(module, "weight", None)).__module__.startswith("torchao")
    ]


# What each library quantizes


@pytest.mark.parametrize(
    ("format", "scheme", "kind"),
    [
        *(of("compressed-tensors", scheme, "llama") for scheme in ("w8a8", "absmax", "zeropoint", "fp8-e4m3-row")),
        of("compressed-tensors", "w4a8-g32", "opt"),
        *(of("torchao", scheme, "llama") for scheme in ("w8a8", "absmax", "w8", "w6", "w4-g32")),
        of("torchao", "absmax-row", "opt"),
        *(of("bitsandbytes", "llm.int8", kind) for kind in MODELS),
        of("bitsandbytes", "w8a8", "llama"),
    ],
)
def test_a_library_quantizes_what_the_plan_says(format, scheme, kind):
    model = make(kind)
    exact = [paths_of(model)[0], *paths_of(model)[-3:-1]]
    made = APPLIED[format](model, outliers.export(plan_of(model, scheme, exact=exact), format, model))
    assert sorted(quantized(made)) == sorted(set(paths_of(model)) - set(exact))
    assert torch.isfinite(made(IDS).logits).all()


@needs("torchao")
def test_torchao_has_several_schemes(llama):
    better = of_layers(llama, "down_proj")
    plan = plan_of(llama, "w4-g32", exact=of_layers(llama, "0.self_attn.q_proj"), instead={"w8a8": better})
    made = APPLIED["torchao"](llama, outliers.export(plan, "torchao", llama))
    kinds = {path: type(made.get_submodule(path).weight).__name__ for path in quantized(made)}
    expected = {path: "IntxUnpackedToInt8Tensor" for path in paths_of(llama) if path not in plan.exact}
    assert kinds == expected | dict.fromkeys(better, "Int8Tensor")


# Experts


def in_layers(paths):
    """The names of these projections where experts have a linear layer for the gate and another one for up."""
    halves = {path: [path.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")] for path in paths}
    return sorted({name for path in paths for name in (halves[path] if ".experts." in path else [path])})


def few_exact(model):
    """Some projections of experts, and of the attention."""
    return of_layers(model, "0.mlp.experts.2.gate_up_proj", "1.mlp.experts.0.down_proj", "0.self_attn.q_proj")


@needs("compressed-tensors")
def test_compressed_tensors_quantizes_linear_layers_of_experts():
    model = mixture("qwen2_moe", hidden_size=64)
    plan = plan_of(model, "w8a8", exact=few_exact(model), instead={"w4a8-g16": of_layers(model, "3.down_proj")})
    exported = outliers.export(plan, "compressed-tensors", model)
    of_all = [group for group in exported["config_groups"].values() if group["targets"] == ["Linear"]]
    assert [group["weights"]["num_bits"] for group in of_all] == [8], "the larger one, so that few layers are named"
    for experts in experts_of(model).values():
        for name in [*experts._parameters]:
            delattr(experts, name)
        for number in range(4):
            into, out = nn.Linear(64, 16), nn.Linear(16, 64)
            expert = {"gate_proj": into, "up_proj": copy.deepcopy(into), "down_proj": out}
            experts.add_module(str(number), nn.ModuleDict(expert))
    paths = paths_of(mixture("qwen2_moe", hidden_size=64))
    made = APPLIED["compressed-tensors"](model, exported)
    assert sorted(quantized(made)) == in_layers(set(paths) - set(plan.exact))
    bits = {path for path in quantized(made) if made.get_submodule(path).quantization_scheme.weights.num_bits == 4}
    assert sorted(bits) == plan.instead["w4a8-g16"]


@NEEDS_LLM_COMPRESSOR
@pytest.mark.nightly("outliers/quantization/plans/")
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_oss", "olmoe"])
def test_llm_compressor_quantizes_experts_one_by_one(kind, tmp_path):
    from llmcompressor import oneshot

    model = mixture(kind, hidden_size=64)
    plan = plan_of(model, "w8", exact=few_exact(model), instead={"w4-g16": of_layers(model, "experts.3.down_proj")})
    (tmp_path / "recipe.yaml").write_text(export_text(plan, "llm-compressor", model))
    model.save_pretrained(tmp_path)
    made = oneshot(model=str(tmp_path), recipe=str(tmp_path / "recipe.yaml"), precision="float32")
    assert sorted(quantized(made)) == in_layers(set(paths_of(model)) - set(plan.exact))


@needs("torchao")
@pytest.mark.parametrize("scheme", ["w8", "w8a8", "w8-g16"])
def test_torchao_quantizes_the_parameters_of_experts(scheme):
    model = mixture("mixtral", hidden_size=64)
    into = of_layers(model, "gate_up_proj")
    config = outliers.export(plan_of(model, scheme, exact=into), "torchao", model)
    model.set_experts_implementation("eager")
    made = APPLIED["torchao"](model, config)
    names = [name for name, one in made.named_parameters() if ".experts." in name and type(one) is not nn.Parameter]
    assert names == [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2)]
    expected, found = model(IDS).logits, made(IDS).logits
    assert 0 < (found - expected).norm() < 0.2 * expected.norm()


@needs("torchao")
@pytest.mark.parametrize(
    ("kind", "scheme", "exact", "said"),
    [
        ("mixtral", "w8", ["0.mlp.experts.2.down_proj"], "one parameter, 'model.layers.0.mlp.experts.down_proj'"),
        ("mixtral", "absmax", [], "weights of three dimensions by this scheme"),
        ("mixtral", "w4-g16", [], "weights of three dimensions by this scheme"),
        ("gpt_oss", "w8", [], r"weights of \(inputs, outputs\)"),
    ],
)
def test_experts_that_torchao_does_not_multiply_are_refused(kind, scheme, exact, said):
    model = mixture(kind)
    with pytest.raises(UserError, match=f"is of an expert, .*{said}; expected .* or format llm-compressor"):
        outliers.export(plan_of(model, scheme, exact=of_layers(model, *exact) if exact else []), "torchao", model)


@needs("bitsandbytes")
def test_bitsandbytes_says_that_it_leaves_experts_exact():
    model = mixture("qwen2_moe")
    experts = [path for path in paths_of(model) if ".experts." in path]
    with pytest.warns(UserWarning, match="bitsandbytes leaves all experts exact, 14 projections that the plan quant"):
        arguments = outliers.export(plan_of(model, "llm.int8", exact=few_exact(model)), "bitsandbytes", model)
    made = APPLIED["bitsandbytes"](model, arguments)
    assert sorted(quantized(made)) == sorted(set(paths_of(model)) - {*experts, *few_exact(model)})
    others = sorted(set(paths_of(model)) - set(experts))
    with pytest.warns(UserWarning), pytest.raises(UserError, match="leaves every projection exact"):
        outliers.export(plan_of(model, "llm.int8", exact=others), "bitsandbytes", model)


# Perplexities


@needs_shared
@pytest.mark.parametrize(
    ("format", "scheme"),
    [
        of("torchao", "absmax-vector"),
        of("compressed-tensors", "absmax-vector"),
        of("compressed-tensors", "absmax"),
        of("bitsandbytes", "llm.int8-bnb"),
    ],
)
def test_perplexities_are_within_scatter_of_ours(format, scheme, stories):
    model, blocks = stories
    plan = plan_of(model, scheme, exact=of_layers(model, "0.mlp.down_proj"))
    made = (
        outliers.quantize(model, scheme, skip=plan.exact),
        APPLIED[format](model, outliers.export(plan, format, model)),
    )
    ours, theirs = (value_over_draws([perplexity(one, blocks, draw) for draw in range(DRAWS)]) for one in made)
    deviation = math.hypot(ours["standard_deviation"], theirs["standard_deviation"])
    assert abs(ours["value"] - theirs["value"]) < 3 * deviation  # two, and one for CPUs that sum in another order


def perplexity(model, blocks, draw):
    with drawn(model, draw):
        return outliers.perplexity(model, blocks)


# llama.cpp


def type_of_lines(lines, name, base="q8_0"):
    """What `llama-quantize` makes of a matrix: the type of the line whose expression is found in its name."""
    pairs = [line.rsplit("=", 1) for line in lines.split()]
    found = {kind for expression, kind in pairs if re.search(expression, name)}
    assert len(found) < 2, "versions differ in which of several counts"
    return gguf.GGMLQuantizationType[(found.pop() if found else base).upper()]


@pytest.mark.parametrize(("kind", "architecture"), [("llama", "llama"), ("gpt2", "gpt2")])
def test_a_gguf_file_of_these_types_is_quantized_as_the_plan_says(kind, architecture, tmp_path):
    model = make(kind)
    exact, better = paths_of(model)[1:3], paths_of(model)[-1:]
    lines = outliers.export(plan_of(model, "w4", exact=exact, instead={"w8": better}), "llama-quantize", model)
    stored = {}
    for name, tensor in gguf_files.tensors_of(model).items():
        own = type_of_lines(lines, name) if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        stored[name] = gguf.quantize(tensor, own), own
    fields = gguf_files.fields_of(model) | gguf_files.vocabulary(96)
    gguf_files.write_stored(tmp_path / "model.gguf", architecture, fields, stored)
    read = dict(outliers.load_model(str(tmp_path / "model.gguf")).named_parameters())
    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim > 1}
    changed = [name.removesuffix(".weight") for name, weight in weights.items() if not torch.equal(weight, read[name])]
    assert sorted(changed) == sorted(set(paths_of(model)) - set(exact))
    errors = {path: (read[f"{path}.weight"] - weights[f"{path}.weight"]).abs().mean().item() for path in changed}
    assert min(errors, key=errors.get) == better[0]


def test_experts_of_a_gguf_file_are_quantized_as_the_plan_says():
    """All of a layer alike, because they are one tensor there; a shared expert is a projection as others are."""
    model = mixture("qwen2_moe", **SIZES | {"num_hidden_layers": 2}, **UNITS)
    exact = of_layers(model, *(f"layers.0.mlp.experts.{number}.down_proj" for number in range(4)), "k_proj")
    better = of_layers(model, *(f"layers.1.mlp.experts.{number}.gate_up_proj" for number in range(4)))
    plan = plan_of(model, "w4", exact=exact, instead={"w8": better})
    lines = outliers.export(plan, "llama-quantize", model)
    matrices = [name for name, tensor in gguf_files.tensors_of(model).items() if tensor.ndim > 1]
    kinds = {
        name: type_of_lines(lines, name).name for name in matrices if "ffn_gate_inp" not in name
    }  # never quantized
    kept = {
        "blk.0.ffn_down_exps.weight",
        "blk.0.attn_k.weight",
        "blk.1.attn_k.weight",
        "token_embd.weight",
        "output.weight",
    }
    assert {name for name, kind in kinds.items() if kind == "F32"} == kept
    assert {name for name, kind in kinds.items() if kind == "Q8_0"} == {
        f"blk.1.ffn_{kind}_exps.weight" for kind in ("gate", "up")
    }
    assert {kind for name, kind in kinds.items() if "_shexp." in name} == {"Q4_0"}
    with pytest.raises(UserError, match=r"experts\.\d\.down_proj' is of an expert, .* 'blk.0.ffn_down_exps.weight'"):
        outliers.export(plan.model_copy(update={"exact": exact[:-3]}), "llama-quantize", model)


def test_exact_weights_of_a_gguf_file_have_the_type_of_the_model(llama):
    plan = plan_of(llama, "w8a8", exact=paths_of(llama)[:1])
    lines = outliers.export(plan, "llama-quantize", make("llama").to(torch.bfloat16))
    assert lines.splitlines()[0] == r"^blk\.0\.attn_q\.weight$=bf16"
    assert {line.rpartition("=")[2] for line in lines.splitlines()} == {"bf16"}


def test_features_that_fill_no_block_are_refused(llama):
    with pytest.raises(UserError, match="reads 64 features, and Q6_K has blocks of 256"):
        outliers.export(plan_of(llama, "w6"), "llama-quantize", llama)


# Files


@pytest.mark.parametrize(
    ("format", "scheme", "read"),
    [
        ("compressed-tensors", "w8a8", json.loads),
        ("llm-compressor", "w8a8", yaml.safe_load),
        ("bitsandbytes", "llm.int8", json.loads),
        ("llama-quantize", "w8a8", str),
    ],
)
def test_a_text_says_the_same(format, scheme, read, llama):
    plan = plan_of(llama, scheme, exact=paths_of(llama)[:2])
    assert read(export_text(plan, format, llama)) == outliers.export(plan, format, llama)


@needs("torchao")
def test_torchao_reads_its_text(llama):
    from torchao.core.config import config_from_dict

    plan = plan_of(llama, "w8a8", exact=paths_of(llama)[:2])
    assert config_from_dict(json.loads(export_text(plan, "torchao", llama))) == outliers.export(plan, "torchao", llama)


def test_a_pattern_stands_for_the_layers_of_a_name():
    paths = ["lm_head", "model.layers.1.mlp.up", "model.layers.11.mlp.up", "model.layers.1.mlp.up2"]
    head, up, up2 = patterns(paths)
    assert (head, up, up2) == ("lm_head", r"re:model\.layers\.(1|11)\.mlp\.up$", r"re:model\.layers\.(1)\.mlp\.up2$")
    assert [path for path in paths if re.match(up.removeprefix("re:"), path)] == paths[1:3]


# The page

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text(encoding="utf-8")
USES = {
    format: "\n".join(re.findall(r"`([^`]+)`", cell))
    for format, cell in re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (`.+`) \|$", PAGE, re.MULTILINE)
}


@needs_shared
@pytest.mark.parametrize(
    "format",
    [
        of("compressed-tensors"),
        pytest.param("llm-compressor", marks=NEEDS_LLM_COMPRESSOR),
        of("torchao"),
        of("bitsandbytes"),
    ],
)
def test_the_lines_of_the_page_quantize_by_the_plan(format, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = outliers.load_model(str(STORIES))
    paths = paths_of(model)
    names = {"model": model, "plan": plan_of(model, "w8a8", exact=paths[:2]), "folder": str(STORIES.resolve())}
    names |= {"outliers": outliers, "yaml": yaml, "Path": Path}
    used = re.findall(r"\b\w+Config\b|\bAuto\w+", USES[format])
    names |= {name: getattr(transformers, name) for name in used if hasattr(transformers, name)}
    exec(compile(USES[format], format, "exec"), names)
    assert sorted(quantized(names.get("quantized", model))) == sorted(paths[2:])


def test_the_lines_of_the_page_write_a_file_for_llama_cpp(llama, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(llama, "w8a8", exact=paths_of(llama)[:2])
    exec(USES["llama-quantize"], {"model": llama, "plan": plan, "outliers": outliers, "Path": Path})
    assert Path("types.txt").read_text() == outliers.export(plan, "llama-quantize", llama)


def test_the_page_shows_every_format():
    assert list(USES) == list(EXPORTS)


@needs("torchao")
def test_commands_do_not_pass_on_what_torchao_warns_of(tmp_path):
    command = ["-m", "outliers.trace", "pocket/gpt2-0.1m", "--block", "32", "--blocks", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert "torchao" not in done.stderr
    assert "Enum" not in done.stderr


# Refusals

NO_SCHEMES = {
    "compressed-tensors": ("llm.int8", "absmax+hadamard", "mxfp4", "bfp8-g64", "w4a8-g32+gptq"),
    "torchao": ("llm.int8", "w4a8", "absmax+tokens=20", "mxfp4", "w8a8-g32"),
    "bitsandbytes": ("absmax", "zeropoint-vector", "w4", "absmax-row-decomp", "llm.int8+hadamard"),
    "llama-quantize": ("llm.int8", "absmax", "zeropoint-vector", "w4a4", "fp8-e4m3"),
}


@pytest.mark.parametrize(
    ("format", "scheme"),
    [
        of(format, scheme) if format == "torchao" else (format, scheme)
        for format, schemes in NO_SCHEMES.items()
        for scheme in schemes
    ],
)
def test_a_scheme_that_a_format_cannot_say_is_refused(format, scheme, llama):
    said = (
        rf"'{format}' cannot express scheme '{re.escape(scheme)}' \(.*\); expected one that it can express: "
        rf".*\b(w8|w8a8)\b"
    )
    with pytest.raises(UserError, match=said):
        outliers.export(plan_of(llama, scheme), format, llama)


@pytest.mark.parametrize("format", EXPORTS)
def test_a_plan_of_another_model_is_refused(format, llama):
    with pytest.raises(UserError, match=r"unknown projection 'model.layers.7.mlp.down_proj'.*another model"):
        outliers.export(plan_of(llama, "w8a8", exact=["model.layers.7.mlp.down_proj"]), format, llama)
    with pytest.raises(UserError, match="with 210 projections, and this model has 21"):
        outliers.export(plan_of(llama, "w8a8").model_copy(update={"projections": 210}), format, llama)


@pytest.mark.parametrize("format", ["compressed-tensors", "llm-compressor", of("torchao")])
def test_layers_that_a_library_does_not_quantize_are_refused(format):
    model = make("gpt2")
    with pytest.raises(UserError, match=f"is a Conv1D, and '{format}' quantizes Linear alone"):
        outliers.export(plan_of(model, "w8a8"), format, model)


def test_a_format_of_one_scheme_refuses_several(llama):
    plan = plan_of(llama, "w8a8", instead={"llm.int8": paths_of(llama)[:1]})
    with pytest.raises(UserError, match="'bitsandbytes' stores one scheme per model, and this plan has 2"):
        outliers.export(plan, "bitsandbytes", llama)


def test_a_missing_library_is_named(llama, lacking):
    lacking("importlib.util.find_spec")
    with pytest.raises(UserError, match=r"format 'torchao' needs the library torchao; expected it installed"):
        outliers.export(plan_of(llama, "w8a8"), "torchao", llama)
