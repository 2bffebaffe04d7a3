"""Checkpoints whose tensors are not the model's own: experts in parts, weights in four bits, and those for pictures."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from outliers import UserError, load_int8, perplexity, quantize
from outliers.models.load import find_config, load_config, load_model, stored_as
from outliers.models.stream import stream_model
from outliers.models.weight_files import WEIGHTS
from tests.conftest import CONFIGS, GEMMA, WINDOWS
from tests.small_models import alter_config, alter_weights, make_model


def check_all_ways(folder, blocks, expected) -> None:
    """See that a checkpoint has these logits, streamed the same loss, and read as int8 what quantizing makes of it."""
    model = load_model(str(folder))
    assert torch.equal(model(blocks).logits, expected)
    assert perplexity(stream_model(str(folder)), blocks) == perplexity(model, blocks)
    small = quantize(model, "llm.int8", keep="int8")
    assert torch.equal(load_int8(str(folder))(blocks).logits, small(blocks).logits)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # OCP MX: by the lower three bits; the fourth is the sign


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4: groups of 32 values (…, groups, 16 bytes) with exponents of their scales (…, groups), as (…, values)."""
    nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    values = FP4[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    return (values * 2.0 ** (scales[..., None].float() - 127)).flatten(-2)


def test_experts_stored_in_four_bits(tmp_path, blocks):
    """As the published GPT-OSS checkpoints are."""
    model_type, fields = CONFIGS["gpt-oss"]
    fields = fields | {"intermediate_size": 32, "vocab_size": 100, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).eval()
    generator = torch.Generator().manual_seed(0)
    stored, exact = {}, {}
    for name, weight in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            codes = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 126, codes.shape[:-1], dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
            exact[name] = decoded(codes, scales).mT
        else:
            stored[name] = exact[name] = weight + 0.1 * torch.randn(weight.shape, generator=generator)
    model.load_state_dict(exact)
    model.config.save_pretrained(tmp_path)
    alter_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    check_all_ways(tmp_path, blocks, model(blocks).logits)
    assert stored_as(load_config(str(tmp_path))) == "mxfp4"
    load_model(str(tmp_path)).save_pretrained(tmp_path / "exact")
    assert stored_as(load_config(str(tmp_path / "exact"))) is None
    check_all_ways(tmp_path / "exact", blocks, model(blocks).logits)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_model_that_takes_pictures(prefix, tmp_path, blocks):
    text = {**GEMMA, **WINDOWS, "vocab_size": 100, "pad_token_id": None}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    whole.save_pretrained(tmp_path)

    def rename(tensors):
        for key in [key for key in tensors if key.startswith("language_model.model.")]:
            tensors[key.replace("language_model.model.", prefix)] = tensors.pop(key)

    alter_weights(tmp_path, rename)
    check_all_ways(tmp_path, blocks, whole(blocks).logits)
    assert load_config(str(tmp_path)).model_type == find_config(str(tmp_path)).model_type == "gemma3_text"
    model = load_model(str(tmp_path))
    model.save_pretrained(tmp_path / "text")
    assert torch.equal(load_model(str(tmp_path / "text"))(blocks).logits, whole(blocks).logits)


@pytest.mark.parametrize(
    ("before", "after", "part", "wrapped"),
    [
        ("", "_orig_mod.", "_orig_mod.", "torch.compile"),
        ("", "module.", "module.", "data parallelism"),
        ("", "base_model.model.", "base_model.model.", "PEFT"),
        ("", "module._orig_mod.", "_orig_mod.", "torch.compile"),
        ("layers.0.", "layers.0._checkpoint_wrapped_module.", "_checkpoint_wrapped_module.", "activation"),
        ("q_proj.", "q_proj.base_layer.", "base_layer.", "PEFT"),
    ],
)
def test_names_of_a_wrapped_model_are_explained(before, after, part, wrapped, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({name.replace(before, after, 1): of for name, of in tensors.items()}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=rf"lacks \d+ tensors .* contain '{part}', which {wrapped}.* puts there; save"):
        load_model(str(tmp_path))


def test_pickled_weights_are_refused_with_how_to_convert_them(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled ones are not read .* convert them .*\.save_pretrained\(OTHER\)"):
        load_model(str(tmp_path))
