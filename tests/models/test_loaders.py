"""Our layers and numbers in other libraries: the loaders of transformers, adapters of PEFT, lm-eval's command line."""

import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

import outliers
from outliers.metrics.perplexity import perplexity
from outliers.metrics.zeroshot import FOLDER
from outliers.models.anatomy import projections
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.remedies.hadamard import _drawn
from outliers.quantization.schemes import get_scheme
from tests.conftest import FIVE, SIZES, needs_harness
from tests.models.test_devices import places_of
from tests.pretend_devices import PretendDevices
from tests.small_models import alter_config, make_model

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft of outliers[peers]")
OWN = outliers.Scheme("mine", outliers.Quantizer("int8", "row"), outliers.Quantizer("int8", "column"), 4.0)
KEPT_AS = {"llm.int8": "int8", "absmax+hadamard@ffn_out": "int8", "w4a8-g16": "int8", "zeropoint+attention": "int8"}
KEPT_AS |= {"fp8-e4m3-row": "exact", "absmax+tokens=4": "exact", "fp32": "int8", "fp32+attention": "int8", OWN: "int8"}
OTHERS = {
    "bert": (transformers.AutoModelForMaskedLM, {**SIZES, "intermediate_size": 48}),
    "t5": (transformers.AutoModelForSeq2SeqLM, {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of an architecture the folder with a small random model."""
    found = {}

    def saved(case: str) -> Path:
        if case not in found:
            found[case] = tmp_path_factory.mktemp(case)
            if case in OTHERS:
                kind, fields = OTHERS[case]
                kind.from_config(AutoConfig.for_model(case, vocab_size=100, **fields)).save_pretrained(found[case])
            else:
                make_model(case).save_pretrained(found[case])
        return found[case]

    return saved


@pytest.fixture
def llama(folder):
    return folder("llama")


def load(path, *arguments, kind=AutoModelForCausalLM, dtype="auto", **fields):
    return kind.from_pretrained(path, dtype=dtype, quantization_config=outliers.OutliersConfig(*arguments, **fields))


@torch.no_grad()
def same(one, other, ids) -> bool:
    others = {"decoder_input_ids": ids} if one.config.is_encoder_decoder else {}
    return torch.equal(one(ids, **others).logits, other(ids, **others).logits)


@pytest.mark.parametrize(
    ("case", "scheme", "how"),
    [
        *((case, "llm.int8", {"skip": ["layers.0"]}) for case in FIVE),
        ("mixtral", "llm.int8", {"skip": ["layers.1.experts.2"]}),
        *((case, scheme, {}) for scheme, case in zip(KEPT_AS, itertools.cycle(["gpt2", "llama", "opt"]), strict=False)),
        *((case, "llm.int8", {}) for case in OTHERS),
        *(("gpt2", "llm.int8", {"dtype": torch.bfloat16}), ("llama", "llm.int8", {"dtype": torch.float16})),
    ],
    ids=str,
)
def test_a_model_is_ours_bit_for_bit_and_comes_back_from_disk(case, scheme, how, folder, blocks, tmp_path):
    """Scales stay in 32 bits, and what a scheme draws is not drawn on "meta", where transformers makes the model."""
    kind, skip, dtype = OTHERS.get(case, (AutoModelForCausalLM,))[0], how.get("skip", ()), how.get("dtype", "auto")
    _drawn.cache_clear()
    theirs = load(folder(case), scheme, kind=kind, **how)
    ours = outliers.quantize(kind.from_pretrained(folder(case), dtype=dtype), scheme, KEPT_AS[scheme], skip)
    assert same(ours, theirs, blocks)
    theirs.save_pretrained(tmp_path / "saved")
    assert same(theirs, kind.from_pretrained(tmp_path / "saved"), blocks)
    if "dtype" in how:
        assert theirs.dtype == dtype
        assert {one.module.scale.dtype for one in projections(theirs)} == {torch.float32}


def test_a_plan_goes_with_the_model(llama, blocks, tmp_path):
    """Its content, for the file may be gone."""
    model = AutoModelForCausalLM.from_pretrained(llama)
    paths = [one.path for one in projections(model)]
    plan = outliers.Plan(
        model="mine", scheme="absmax", exact=paths[:2], instead={"llm.int8": paths[2:4]}, projections=len(paths)
    )
    plan.write(tmp_path / "plan.yaml")
    theirs = load(llama, plan=tmp_path / "plan.yaml", skip=["*.o_proj"])
    ours = outliers.quantize(model, "absmax", "int8", [*paths[:2], "*.o_proj"], instead=plan.instead)
    (tmp_path / "plan.yaml").unlink()
    theirs.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert same(ours, theirs, blocks) and same(theirs, again, blocks)
    assert outliers.Plan(**again.config.quantization_config.plan) == plan


def test_what_is_saved_are_codes(llama, tmp_path):
    """A byte a weight, and no weight of a projection that has codes."""
    model = load(llama, "llm.int8", skip=["ffn_out"])
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for one in projections(model):
        if one.role == "ffn_out":
            assert stored[f"{one.path}.weight"].dtype == torch.float32
        else:
            assert f"{one.path}.weight" not in stored
            assert stored[f"{one.path}.codes"].nbytes == one.module.in_features * one.module.out_features


@pytest.mark.parametrize(("scheme", "case"), [("llm.int8", "gpt2"), ("zeropoint+attention", "llama")])
def test_over_several_devices(scheme, case, folder, blocks, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTLIERS_KERNELS", "reference")
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # pretend devices are known to one thread
    model = load(folder(case), scheme)
    model.save_pretrained(tmp_path)
    expected, places = perplexity(model, blocks), places_of(make_model(case))
    config = outliers.OutliersConfig(scheme)
    with PretendDevices():
        fresh = AutoModelForCausalLM.from_pretrained(folder(case), quantization_config=config, device_map=places)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places)
        assert set(map(str, fresh.hf_device_map.values())) == {"maia:0", "maia:1", "maia:2"}
        assert [perplexity(one, blocks) for one in (fresh, again)] == [expected] * 2


def test_our_own_file_is_written_of_it_too(llama, blocks, tmp_path):
    model = load(llama, "llm.int8")
    outliers.save_quantized(model, tmp_path)
    assert same(model, outliers.load_quantized(tmp_path), blocks)


# The configuration.


def test_a_configuration_is_one_line():
    config = outliers.OutliersConfig("absmax+hadamard", skip=["ffn_out"])
    assert repr(config) == "OutliersConfig('absmax+hadamard', skip=['ffn_out'])"


PLAN = {"model": "m", "scheme": "absmax", "projections": 3}
MISTAKES = {
    "scheme": (("llm.int9",), {}, "unknown scheme 'llm.int9'; did you mean llm.int8"),
    "none": ((), {}, "without a scheme; expected one, such as 'llm.int8', or a plan"),
    "key": (("llm.int8",), {"skipp": [], "dtype": 1}, "unknown dtype, skipp in OutliersConfig; expected scheme, skip"),
    "calibration": (("absmax+smoothing",), {}, "needs the magnitudes of the inputs; expected a calibration"),
    "skip": (("llm.int8",), {"skip": "ffn_out"}, r"skip is 'ffn_out'; expected a list of places"),
    "no plan": (("llm.int8",), {"plan": "nowhere.yaml"}, "cannot read the plan 'nowhere.yaml'"),
    "other scheme": (("llm.int8",), {"plan": PLAN}, "a plan for 'absmax' beside scheme 'llm.int8'"),
    "plan's key": ((), {"plan": PLAN | {"exakt": []}}, "the plan is none: unknown field 'exakt'"),
    "own weights": ((outliers.Scheme("a", OWN.activations, None),), {}, "quantizes no weights"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_configuration(mistake):
    arguments, fields, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message) as raised:
        outliers.OutliersConfig(*arguments, **fields)
    assert "\n" not in str(raised.value)


def test_a_models_file_names_no_other_file(llama, tmp_path):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    written = outliers.OutliersConfig("llm.int8").to_dict() | {"plan": "/etc/hostname"}
    alter_config(tmp_path, quantization_config=written)
    with pytest.raises(ValueError, match="plan is '/etc/hostname' in a dictionary; expected the content of a plan"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


REFUSED = {
    "place": ({"scheme": "llm.int8", "skip": ["*.absent"]}, "unknown place in skip '\\*.absent'"),
    "nothing left": ({"scheme": "llm.int8", "skip": ["*"]}, "leaves nothing for scheme 'llm.int8' to quantize"),
    "groups": ({"scheme": "w4a8-g64"}, "groups of 64 features"),
    "plan of another model": ({"plan": PLAN | {"exact": ["h.0"]}}, "unknown projection 'h.0'"),
    "size of another model": ({"plan": PLAN}, "with 3 projections, and this model has 14"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_does_not_go_with_a_model_is_refused_before_it_is_read(mistake, llama):
    fields, message = REFUSED[mistake]
    with pytest.raises(ValueError, match=message):
        load(llama, **fields)


def test_a_model_without_a_head_is_refused(llama):
    with pytest.raises(ValueError, match="LlamaModel has no head; expected one that has, as of AutoModelForCausalLM"):
        load(llama, "llm.int8", kind=AutoModel)


@pytest.mark.parametrize(
    "options", [{"device_map": {"": "disk"}}, {"device_map": "auto", "max_memory": {"cpu": "20KB"}}]
)
def test_parts_on_disk_are_refused(options, llama, tmp_path):
    config = outliers.OutliersConfig("llm.int8")
    with pytest.raises(ValueError, match="device_map has parts on 'disk'"):
        AutoModelForCausalLM.from_pretrained(llama, quantization_config=config, offload_folder=tmp_path, **options)


# Whether it is found.


def run(*arguments) -> str:
    answer = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer.stdout


def test_one_import_is_enough_for_what_was_saved(llama, tmp_path):
    load(llama, "llm.int8").save_pretrained(tmp_path)
    read = "AutoModelForCausalLM.from_pretrained(sys.argv[1]).config.quantization_config.scheme"
    lines = f"import sys; from transformers import AutoModelForCausalLM; import outliers; print({read})"
    assert run("-c", lines, tmp_path) == "llm.int8\n"


def test_an_import_alone_imports_neither_torch_nor_transformers(monkeypatch):
    """And lets waiting threads sleep, unless the user wants otherwise."""
    names = "{'torch', 'transformers'} & sys.modules.keys()"
    line = f"import os, sys, outliers; print(os.environ['OMP_WAIT_POLICY'], {names})"
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert run("-c", line) == "PASSIVE set()\n"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert run("-c", line.replace("sys, ", "sys, transformers, ")) == "ACTIVE {'transformers'}\n"


def test_loading_and_quantizing_a_model_imports_nothing_that_measures_or_draws():
    unused = {"numba", "pandas", "pyarrow", "matplotlib", "pydantic", "typer", "gguf", "datasets"}
    imports = "import sys, outliers, outliers.quantization.convert, outlier_kernels.dispatch"
    line = f"{imports}; outliers.load_model('pocket/gpt2-0.1m'); print({unused} & sys.modules.keys())"
    assert run("-c", line) == "set()\n"


# Gradients and adapters.


@pytest.mark.parametrize("scheme", ["llm.int8", "zeropoint-vector", "w4a8-g16", "absmax+hadamard"])
def test_gradients_are_those_of_the_weights_that_codes_stand_for(scheme):
    """By autograd, of a product in floats with them."""
    torch.manual_seed(0)
    layer, x, out = Int8Linear(nn.Linear(32, 8), get_scheme(scheme)), torch.randn(3, 5, 32), torch.randn(3, 5, 8)
    basis = torch.eye(32)
    if scheme == "absmax+hadamard":
        basis = layer.here.transforms[0].call("hidden_states", basis, layer.fitted)
    exact = nn.Linear(32, 8)
    with torch.no_grad():
        exact.weight.copy_(layer._quantized().dequantize() @ basis.T)
    layer.straight_through = True
    found = []
    for module in (layer, exact):
        inputs = x.clone().requires_grad_()
        found.append(torch.autograd.grad((module(inputs) * out).sum(), [inputs, module.bias]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_trainers_take_adapters_on_codes_alone(llama, tmp_path):
    """As transformers says it of each method."""
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        Trainer(load(llama, "llm.int8"), TrainingArguments(tmp_path, use_cpu=True, report_to="none"))
    assert load(llama, "llm.int8").hf_quantizer.is_trainable
    assert not load(llama, "fp8-e4m3-row").hf_quantizer.is_trainable


def with_adapters(model, config=None):
    from peft import LoraConfig, get_peft_model

    from outliers.plugins.adapters import LAYERS

    config = config or LoraConfig(r=4, target_modules=["q_proj", "down_proj", "c_attn", "c_proj"])
    config._register_custom_module(LAYERS)
    return get_peft_model(model, config)


@needs_peft
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_adapters_train_on_codes_and_come_back_from_disk(case, folder, blocks, tmp_path):
    from peft import PeftConfig, PeftModel

    from outliers.plugins.adapters import LAYERS

    model = with_adapters(load(folder(case), "llm.int8"))
    codes = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith(".codes")}
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        losses.append(model(input_ids=blocks, labels=blocks).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in codes.items())
    model.eval().save_pretrained(tmp_path)
    config = PeftConfig.from_pretrained(tmp_path)
    config._register_custom_module(LAYERS)
    again = PeftModel.from_pretrained(load(folder(case), "llm.int8"), tmp_path, config=config)
    with torch.no_grad():
        assert torch.equal(again(input_ids=blocks).logits, model(input_ids=blocks).logits)


@needs_peft
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize("safe", [False, True])
def test_adapters_are_not_merged_into_codes(safe, llama):
    with pytest.raises(ValueError, match="an adapter cannot be merged into int8 codes"):
        with_adapters(load(llama, "llm.int8")).merge_and_unload(safe_merge=safe)


# lm-eval.

TASKS = ["lambada-local", "piqa-local"]


@needs_harness
@pytest.mark.nightly("outliers/plugins/")
@pytest.mark.parametrize("scheme", ["absmax+hadamard", "llm.int8+skip=ffn_out"])
def test_lm_eval_from_its_own_command_line(scheme, tmp_path):
    """The values of `outliers.zeroshot`, digit for digit."""
    from outliers.metrics.zeroshot import zeroshot
    from outliers.variants.quantized import Quantized

    name, limit = "pocket/gpt2-1.7m", 12
    run(
        *("-m", "outliers.plugins.harness", "--model", "outliers", "--tasks", ",".join(TASKS), "--limit", limit),
        *("--model_args", f"pretrained={name},scheme={scheme}", "--include_path", FOLDER, "--output_path", tmp_path),
    )
    (file,) = tmp_path.rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    with Quantized.read(scheme.split("+")).on(outliers.load_model(name)) as model:
        expected = zeroshot(model, outliers.load_tokenizer(name), TASKS, limit=limit)
    assert len(expected) == 4
    assert {(one["task"], one["metric"]): one["value"] for one in expected} == {
        (one["task"], one["metric"]): found[one["task"]][f"{one['metric']},none"] for one in expected
    }


@needs_harness
@pytest.mark.nightly("outliers/plugins/")
def test_a_mistake_on_lm_evals_command_line_is_one_line():
    model = ["--model", "outliers", "--model_args", "pretrained=pocket/gpt2-0.1m,scheme=llm.int9"]
    arguments = ["-m", "outliers.plugins.harness", *model, "--include_path", FOLDER, "--tasks", TASKS[0]]
    answer = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1].startswith("error: unknown scheme 'llm.int9'; did you mean")


HARNESS_MISTAKES = {
    "scheme": ({"scheme": "llm.int9"}, "unknown scheme 'llm.int9'"),
    "key": ({"schem": "llm.int8"}, "unknown schem in --model_args; expected pretrained, scheme"),
    "batch": ({"batch_size": "auto"}, "--batch_size is auto; expected 1"),
    "calibration": ({"scheme": "absmax+smoothing"}, "expected a calibration"),
}


@needs_harness
@pytest.mark.parametrize("mistake", HARNESS_MISTAKES)
def test_mistakes_of_model_args(mistake):
    from outliers.plugins.harness import OutliersLM

    given, message = HARNESS_MISTAKES[mistake]
    with pytest.raises(outliers.UserError, match=message):
        OutliersLM("pocket/gpt2-0.1m", **given)
