"""Anatomy, loading, the pocket family."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from outliers import load_model, load_tokenizer, plant, trace
from outliers.errors import UserError, reason_of
from outliers.models.anatomy import context_length
from outliers.models.names import POCKET, pocket_models
from outliers.models.pocket.ladder import LADDER
from outliers.models.skeleton import skeleton
from outliers.quantization.store import load_int8
from tests.conftest import CONFIGS, every_kind
from tests.small_models import make_model


@pytest.mark.parametrize("name", [name for name in pocket_models() if "vit" not in name])
def test_pocket_models(name):
    model, tokenizer = load_model(name), load_tokenizer(name)
    assert model.config.vocab_size == len(tokenizer) == 4096
    assert getattr(model.config, "max_position_embeddings", 256) == tokenizer.model_max_length == 256
    text = "A recipe for 2 loaves: flour, water & salt.\n"
    special = LADDER[name.removeprefix("pocket/")].objective != "next tokens"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=special) == text
    assert (POCKET / name.removeprefix("pocket/") / "README.md").exists()


def test_pocket_family_is_complete_and_light():
    shipped = {name.removeprefix("pocket/") for name in pocket_models()}
    assert shipped == set(LADDER)
    assert {LADDER[name].architecture for name in shipped} == {"gpt2", "opt", "gptj", "mixtral", "t5", "bert", "vit"}
    assert sum(file.stat().st_size for file in POCKET.rglob("*.safetensors")) <= 40e6


@every_kind
def test_planting_keeps_the_function(case, blocks):
    """Exactly for a power of two, up to rounding for another factor; the given model is not touched, and the features
    are found."""
    model = make_model(case)
    before, weights = model(blocks).logits, {k: v.clone() for k, v in model.state_dict().items()}
    if case != "opt-350m":  # where a constant is added
        assert torch.equal(plant(model, [3, 17], 64)(blocks).logits, before)
    planted = plant(model, [3, 17], 37.7)
    assert (planted(blocks).logits - before).abs().max() < 2e-5 * before.abs().max()
    found = trace(planted, blocks, attention=False).outlier_features()
    assert (sorted(found["feature"]) == [3, 17] and (found["layers"] == 1).all()) or case == "opt-350m"
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("features", "factor", "message"),
    [([], 2, "empty"), ([32], 2, "out of range"), ([1], 0, "factor is 0"), ([1], float("inf"), "is inf")],
)
def test_planting_mistakes(features, factor, message):
    with pytest.raises(UserError, match=message):
        plant(make_model("gpt2"), features, factor)


@pytest.mark.parametrize(("case", "buffers"), [("gpt2", False), ("gptj", True), ("gemma3", True)])
def test_a_skeleton_is_the_model_without_its_values(case, buffers, tmp_path):
    """As it is loaded: positions of GPT-J are not rounded, as those of a model that is made in 16 bits are."""
    made, verbosity = make_model(case), logging.get_verbosity()
    before = copy.deepcopy(made.config.to_dict())
    model = skeleton(made.config, torch.bfloat16, buffers)
    assert (model.dtype, made.config.to_dict()) == (torch.bfloat16, before), "the configuration is left as it was"
    made.save_pretrained(tmp_path)
    real = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert not model.training
    assert logging.get_verbosity() == verbosity
    found, expected = dict(model.named_parameters()), dict(real.named_parameters())
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in expected.items()}
    assert {(tensor.device.type, tensor.dtype) for tensor in found.values()} == {("meta", torch.bfloat16)}
    found, expected = dict(model.named_buffers()), dict(real.named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.is_meta != buffers
        if buffers:
            assert torch.equal(tensor, expected[name])


SCALED = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("case", "scaling", "length"),
    [
        *(("gpt2", None, 64), ("opt", None, 64), ("mpt", None, 64), ("bloom", None, None)),
        ("llama", SCALED | {"original_max_position_embeddings": 32}, 128),
        ("llama", SCALED, 128),  # of the length that the configuration has
        ("llama", SCALED | {"factor": 2.0, "original_max_position_embeddings": 16}, 32),
        ("llama", {"rope_type": "linear", "factor": 4.0}, 128),
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, 128),
        ("llama", {"rope_type": "default"}, 32),
        ("gemma3", {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {}}, 128),
    ],
)
def test_context_length(case, scaling, length):
    """As positions are scaled; of layers of two kinds the longer one."""
    kind, fields = CONFIGS[case]
    if scaling:
        nested = {name: of | {"rope_theta": 1e4} for name, of in scaling.items() if isinstance(of, dict)}
        fields = fields | {"max_position_embeddings": 32, "rope_parameters": nested or scaling | {"rope_theta": 1e4}}
    assert context_length(AutoConfig.for_model(kind, **fields)) == length


def test_what_another_library_says_is_one_line_and_never_nothing():
    assert reason_of(ValueError("one\n  two\tthree"), 9) == "one two t"
    assert reason_of(KeyError(), 9) == "KeyError"


def test_a_model_generates_as_its_folder_says(tmp_path):
    make_model("gpt2").save_pretrained(tmp_path)
    GenerationConfig(max_new_tokens=7).save_pretrained(tmp_path)
    for loaded in (load_model(str(tmp_path)), load_int8(str(tmp_path), "absmax")):
        assert loaded.generation_config.max_new_tokens == 7
