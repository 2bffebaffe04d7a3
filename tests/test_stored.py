"""Checkpoints that other libraries wrote in few bits: against what these libraries read, or against packing by hand."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import outliers
from outliers.errors import UserError
from outliers.models.anatomy import projections
from outliers.models.stored.bitsandbytes import unpack_4_bits
from outliers.models.stored.words import unpack_words
from outliers.models.stream import stream_model
from outliers.quantization.peers import weight_of

WORDS = 32  # bits


def llama(vocabulary: int = 100) -> LlamaForCausalLM:
    """A random model whose widths are whole blocks of every format."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=vocabulary, tie_word_embeddings=False, max_position_embeddings=64)
    return LlamaForCausalLM(config).eval()


def save_like(folder, fields: dict, packed, model=None):
    """A checkpoint whose projections are what `packed` makes of each weight, tensors by their ends."""
    model = model or llama()
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    for one in projections(model):
        weight = tensors.pop(f"{one.path}.weight")
        tensors |= {
            f"{one.path}.{end}": tensor.clone(memory_format=torch.contiguous_format)
            for end, tensor in packed(weight).items()
        }
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": fields}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def into_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes along the last axis in words, the first in the lowest bits, by arithmetic on whole numbers."""
    of_word = codes.long().unflatten(-1, (-1, WORDS // bits))
    words = sum(of_word[..., place] * 2 ** (bits * place) for place in range(WORDS // bits))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def weights_of(model) -> dict[str, torch.Tensor]:
    return {one.path: weight_of(one.module) for one in projections(model)}


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_bitsandbytes_in_8_bits(model, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    (llama() if model == "llama" else outliers.load_model("pocket/gpt2-0.1m")).save_pretrained(tmp_path / "exact")
    config = BitsAndBytesConfig(load_in_8bit=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", quantization_config=config, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    own = weights_of(outliers.load_model(str(tmp_path / "theirs")))
    assert own
    for path, weight in own.items():
        layer = theirs.get_submodule(path)
        expected = bitsandbytes.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_in_4_bits(kind, nested, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    llama().save_pretrained(tmp_path / "exact")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", quantization_config=config, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    own = weights_of(outliers.load_model(str(tmp_path / "theirs")))
    for path, expected in weights_of(theirs).items():
        torch.testing.assert_close(own[path], expected, rtol=1e-6, atol=0)


def of_compressed_tensors(folder, how: str, weights: dict, activations: dict | None = None):
    """A checkpoint that the library itself writes."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model, args = llama(), QuantizationArgs(**weights)
    inputs = activations and QuantizationArgs(**activations)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs, format=how)
    said = {"ignore": ["lm_head"], "format": how, "quantization_status": "frozen"}
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, **said))
    for one in projections(model):
        groups = one.module.weight.data.unflatten(1, (-1, weights.get("group_size", one.module.weight.shape[1])))
        groups = groups if weights["strategy"] != "tensor" else groups.flatten()[None, None]
        scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        one.module.weight_scale.data = scale.view_as(one.module.weight_scale)
        if not weights["symmetric"]:
            one.module.weight_zero_point.data = zero_point.to(one.module.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


BY_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
COMPRESSED = {
    "w4a16": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
    ),
    "w4a16-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32},
    ),
    "w8a16": ("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
    "w8a8": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        {**BY_TOKEN, "type": "int"},
    ),
    "fp8": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"},
        {**BY_TOKEN, "type": "float"},
    ),
}


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(case, tmp_path):
    folder = of_compressed_tensors(tmp_path, *COMPRESSED[case])
    from transformers import CompressedTensorsConfig

    how = {"quantization_config": CompressedTensorsConfig(dequantize=True), "dtype": torch.float32}
    theirs = weights_of(AutoModelForCausalLM.from_pretrained(folder, **how))
    own = weights_of(outliers.load_model(str(folder)))
    assert [path for path, weight in own.items() if not torch.equal(weight, theirs[path])] == []


def gptq(weight: torch.Tensor, bits: int, order: torch.Tensor | None = None) -> tuple[torch.Tensor, dict]:
    """A weight (outputs, features) in groups of 32 features, as AutoGPTQ packs it; what it stands for, and tensors."""
    size = 32
    groups = torch.arange(weight.shape[1]) // size if order is None else order // size
    levels, scales, zeros, codes = 2**bits - 1, [], [], torch.empty_like(weight)
    for group in range(weight.shape[1] // size):
        own = weight[:, groups == group]
        scales.append((own.amax(1) - own.amin(1)) / levels)
        zeros.append((-own.amin(1) / scales[-1]).round().clamp(1, levels))
        codes[:, groups == group] = (own / scales[-1][:, None] + zeros[-1][:, None]).round().clamp(0, levels)
    scales, zeros = torch.stack(scales), torch.stack(zeros)
    stands_for = torch.stack([(codes[:, j] - zeros[g]) * scales[g] for j, g in enumerate(groups.tolist())], 1)
    qweight = into_words(codes, bits).T
    tensors = {"qweight": qweight, "qzeros": into_words(zeros - 1, bits), "scales": scales, "g_idx": groups.int()}
    return stands_for, tensors


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq(bits, ordered, tmp_path):
    def order(width: int) -> torch.Tensor | None:
        return None if ordered else torch.randperm(width, generator=torch.Generator().manual_seed(1))

    fields = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": not ordered}
    save_like(tmp_path, fields, lambda weight: gptq(weight, bits, order(weight.shape[1]))[1])
    own = weights_of(outliers.load_model(str(tmp_path)))
    for one in projections(llama()):
        expected, _ = gptq(one.module.weight.detach(), bits, order(one.module.weight.shape[1]))
        torch.testing.assert_close(own[one.path], expected)


def awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random codes of the shape of a weight, as AutoAWQ packs them; only the library says what they stand for."""
    outputs, features = weight.shape
    words = lambda rows: torch.randint(-(2**31), 2**31, (rows, outputs // 8), dtype=torch.int64).int()  # noqa: E731
    return {"qweight": words(features), "qzeros": words(features // 32), "scales": torch.rand(features // 32, outputs)}


def test_awq(tmp_path):
    converters = pytest.importorskip(
        "compressed_tensors.entrypoints.convert.converters", reason="compressed-tensors is not installed"
    )
    torch.manual_seed(0)
    save_like(tmp_path, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq)
    tensors = load_file(tmp_path / "model.safetensors")
    own = outliers.load_model(str(tmp_path))
    converter = converters.AutoAWQConverter(group_size=32)
    for one in projections(own):
        stored = {end: tensors[f"{one.path}.{end}"] for end in ("qweight", "qzeros", "scales")}
        codes, zeros = converter.reverse_awq_order(*converter.unpack_awq(stored["qweight"], stored["qzeros"], 4), 4)
        codes, zeros = codes & 15, zeros & 15
        spread = zeros.repeat_interleave(32, 0), stored["scales"].repeat_interleave(32, 0)
        torch.testing.assert_close(one.module.weight, ((codes - spread[0]) * spread[1]).T)


def test_words_hold_codes_from_their_lowest_bits():
    codes = torch.randint(0, 16, (3, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_words(into_words(codes, 4), 4), codes)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The folder of a GPTQ checkpoint."""
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    return save_like(tmp_path_factory.mktemp("packed"), fields, lambda weight: gptq(weight, 4)[1])


def test_blocks_of_any_size_ask_for_no_memory():
    state = {"shape": [4, 64], "blocksize": 64, "nested_blocksize": 10**12, "nested_offset": 0.0}
    tensors = {
        "weight": torch.zeros(128, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(4, dtype=torch.uint8),
        "weight.quant_map": torch.ones(16),
        "weight.nested_absmax": torch.ones(1),
        "weight.nested_quant_map": torch.ones(256),
    }

    def unpacked(**fields) -> torch.Tensor:
        written = torch.tensor(list(json.dumps(state | fields).encode()), dtype=torch.uint8)
        return unpack_4_bits(tensors | {"weight.quant_state.bitsandbytes__nf4": written}, {})

    assert torch.equal(unpacked(), torch.ones(4, 64))
    with pytest.raises(ValueError, match=r"256 entries in blocks of 1,000,000,000,000, with 4 scales"):
        unpacked(blocksize=10**12)


def test_every_loader_reads_the_same(packed):
    ids = torch.arange(20)
    model, streamed = outliers.load_model(str(packed)), stream_model(str(packed))
    assert outliers.perplexity(model, [ids]) == outliers.perplexity(streamed, [ids])
    small = outliers.load_int8(str(packed), "absmax-vector")
    expected = outliers.quantize(model, "absmax-vector", keep="int8")
    assert outliers.perplexity(small, [ids]) == outliers.perplexity(expected, [ids])


def test_what_is_saved_of_it_is_plain(packed, tmp_path):
    model = outliers.load_model(str(packed))
    model.save_pretrained(tmp_path)
    again = outliers.load_model(str(tmp_path))
    assert all(torch.equal(weight, weights_of(again)[path]) for path, weight in weights_of(model).items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "with bits 3; expected one of 4, 8"),
        ({"quant_method": "awq", "version": "gemv"}, 'with version "gemv"; expected one of gemm'),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "expected one of dense"),
        ({"quant_method": "hqq"}, "by 'hqq'; expected 16 or 32 bits or mxfp4, bitsandbytes"),
        ({"quant_method": ["gptq"]}, "expected 16 or 32 bits"),
    ],
)
def test_what_is_not_undone_is_refused(fields, message, tmp_path):
    save_like(tmp_path, fields, lambda weight: {"weight": weight})
    with pytest.raises(UserError, match=message):
        outliers.load_model(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"qzeros": torch.zeros(1, 1, dtype=torch.int32)},
        {"scales": torch.zeros(3, 5)},
        {"g_idx": torch.full((64,), 99, dtype=torch.int32)},
        {"qweight": torch.zeros(4, 64, dtype=torch.int32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_tensors_that_do_not_fit_are_one_line(change, tmp_path):
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    save_like(tmp_path, fields, lambda weight: gptq(weight, 4)[1] | change)
    with pytest.raises(UserError, match=r"^(cannot load|the checkpoint of|the configuration of) [^\n]*$"):
        outliers.load_model(str(tmp_path))


def test_weights_that_alone_know_how_they_multiply_have_none():
    assert weight_of(SimpleNamespace()) is None
