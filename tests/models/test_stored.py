"""Checkpoints that other libraries wrote in few bits: against what these libraries read, or against packing by hand."""

import importlib
import itertools
import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import outliers
from outliers.errors import UserError
from outliers.models.anatomy import projections
from outliers.models.stored.words import unpack_words
from outliers.models.stream import stream_model
from outliers.quantization.peers import weight_of
from outliers.runs.frame import records_in
from tests.conftest import in_turn, words_of
from tests.models.test_experts import made as mixture
from tests.small_models import alter_config
from tests.typed import call

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
    alter_config(folder, **({"quantization_config": fields} if fields else {}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def into_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes along the last axis in words, the first in the lowest bits, by arithmetic on whole numbers."""
    rows = codes.flatten(0, -2).long().tolist()
    numbers = [sum(code << bits * place for place, code in enumerate(row)) for row in rows]
    words = [
        [number >> WORDS * place & 2**WORDS - 1 for place in range(bits * len(rows[0]) // WORDS)] for number in numbers
    ]
    return torch.tensor(words).unflatten(0, codes.shape[:-1]).int()


def weights_of(model) -> dict[str, torch.Tensor]:
    return {one.path: weight_of(one.module) for one in projections(model)}


def of_bitsandbytes(model, folder, **how):
    """A model as the library has it in memory, and as it writes it."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model.save_pretrained(folder / "exact")
    config = BitsAndBytesConfig(**how)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "exact", quantization_config=config, dtype=torch.float32)
    theirs.save_pretrained(folder / "theirs")
    return theirs


@pytest.mark.parametrize("kind", ["llama", "gpt2", "nf4", "fp4", "nested"])
def test_bitsandbytes(kind, tmp_path):
    bits = {"load_in_8bit": True} if kind in ("llama", "gpt2") else {"load_in_4bit": True}
    how = {"bnb_4bit_quant_type": "fp4" if kind == "fp4" else "nf4", "bnb_4bit_use_double_quant": kind == "nested"}
    model = outliers.load_model("pocket/gpt2-0.1m") if kind == "gpt2" else llama()
    theirs = of_bitsandbytes(model, tmp_path, **bits, **how)
    dequantized = importlib.import_module("bitsandbytes.functional").int8_vectorwise_dequant
    for path, weight in weights_of(outliers.load_model(str(tmp_path / "theirs"))).items():
        own = theirs.get_submodule(path)
        expected = dequantized(own.weight.data, own.weight.SCB) if "load_in_8bit" in bits else weight_of(own)
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)


def of_compressed_tensors(folder, how: str, weights: dict, activations: dict | None = None):
    """A checkpoint that the library itself writes."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors import quantization as library
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model, args = llama(), library.QuantizationArgs(**weights)
    inputs = activations and library.QuantizationArgs(**activations)
    scheme = library.QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs, format=how)
    said = {"ignore": ["lm_head"], "format": how, "quantization_status": "frozen"}
    library.apply_quantization_config(model, library.QuantizationConfig(config_groups={"group_0": scheme}, **said))
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


W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
COMPRESSED = {
    "w4a16": ("pack-quantized", W4),
    "w4a16-asymmetric": ("pack-quantized", W4 | {"symmetric": False}),
    "w8a16": ("pack-quantized", W8),
    "w8a8": ("int-quantized", W8, BY_TOKEN),
    "fp8": ("float-quantized", W8 | {"type": "float", "strategy": "tensor"}, BY_TOKEN | {"type": "float"}),
}


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(case, tmp_path):
    folder = of_compressed_tensors(tmp_path, *COMPRESSED[case])
    from transformers import CompressedTensorsConfig

    how = {"quantization_config": CompressedTensorsConfig(dequantize=True), "dtype": torch.float32}
    theirs = weights_of(AutoModelForCausalLM.from_pretrained(folder, **how))
    own = weights_of(outliers.load_model(str(folder)))
    assert [path for path, weight in own.items() if not torch.equal(weight, theirs[path])] == []


def gptq(
    weight: torch.Tensor, bits: int, order: torch.Tensor | None = None, sym: bool = False, size: int = 32
) -> tuple:
    """A weight (outputs, features) in groups of features, as AutoGPTQ packs it; what it stands for, and tensors."""
    groups = torch.arange(weight.shape[1]) // size if order is None else order // size
    levels, scales, zeros, codes = 2**bits - 1, [], [], torch.empty_like(weight)
    for group in range(weight.shape[1] // size):
        own = weight[:, groups == group]
        scales.append(2 * own.abs().amax(1) / levels if sym else (own.amax(1) - own.amin(1)) / levels)
        middle = torch.full_like(scales[-1], 2 ** (bits - 1))
        zeros.append(middle if sym else (-own.amin(1) / scales[-1]).round().clamp(1, levels))
        codes[:, groups == group] = (own / scales[-1][:, None] + zeros[-1][:, None]).round().clamp(0, levels)
    scales, zeros = torch.stack(scales), torch.stack(zeros)
    stands_for = torch.stack([(codes[:, j] - zeros[g]) * scales[g] for j, g in enumerate(groups.tolist())], 1)
    qweight = into_words(codes, bits).T
    tensors = {"qweight": qweight, "qzeros": into_words(zeros - 1, bits), "scales": scales, "g_idx": groups.int()}
    return stands_for, tensors


def of_version(tensors: dict, bits: int, version: str) -> dict:
    """The tensors of `gptq`, whose zero points are those of the first version, with those of another one."""
    zeros = unpack_words(tensors["qzeros"], bits).long() + 1
    words = into_words(zeros, bits)
    if version == "gptq":
        words = tensors["qzeros"]
    elif version == "gptqmodel":  # which subtracts from words, see its `convert_gptq_v2_to_v1_format`
        subtracted = {3: [0x24924924, 0x92492492, 0x49249249]}.get(
            bits, [sum(1 << place for place in range(0, 32, bits))]
        )
        words = (words.long() - torch.tensor(subtracted).repeat(words.shape[1] // len(subtracted))).int()
    return tensors | {"qzeros": words}


@pytest.mark.parametrize(
    ("bits", "stored"), [(4, "gptq"), (3, "gptq_v2"), (2, "gptqmodel"), (3, "gptqmodel"), (8, "gptqmodel")]
)
def test_symmetric_zero_points_tell_their_version(bits, stored, tmp_path):
    """Whatever the configuration says of it; `zero_points` says where it is wrong."""
    fields = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "sym": True}
    version = stored.replace("gptqmodel", "gptq")
    names = ("checkpoint_format", "format") if bits == 3 else ()
    labels = [{}, *({name: value} for name in names for value in ("gptq", "gptq_v2"))]
    for number, label in enumerate(labels):
        folder = tmp_path / str(number)
        save_like(folder, fields | label, lambda weight: of_version(gptq(weight, bits, sym=True)[1], bits, stored))
        model = outliers.load_model(str(folder))
        for one in projections(llama()):
            expected, _ = gptq(one.module.weight.detach(), bits, sym=True)
            torch.testing.assert_close(model.get_submodule(one.path).weight, expected)
        (said,) = label.values() or ["gptq"]
        assert (model.zero_points or version).startswith(version)
        assert (model.zero_points is None) == (said == version)


def test_zero_points_that_borrow_from_the_next_one(tmp_path):
    """Where a zero point is 0, who subtracts from words takes one from the next code, and who subtracts from codes has
    the largest code."""

    def packed(weight: torch.Tensor, borrows: bool) -> dict:
        tensors = gptq(weight, 4)[1]
        zeros = torch.randint(0, 16, tensors["scales"].shape, generator=torch.Generator().manual_seed(0))
        words = (into_words(zeros, 4).long() - 0x11111111).int() if borrows else into_words((zeros - 1) % 16, 4)
        return tensors | {"qzeros": words}

    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
    by_words = {**fields, "meta": {"quantizer": ["gptqmodel:4.2.5"]}}
    plain = outliers.load_model(str(save_like(tmp_path / "codes", fields, lambda weight: packed(weight, False))))
    words = outliers.load_model(str(save_like(tmp_path / "words", by_words, lambda weight: packed(weight, True))))
    for path, weight in weights_of(plain).items():
        assert torch.equal(weight, weights_of(words)[path])


def test_a_version_that_nothing_tells_is_said_in_the_row(monkeypatch, capsys, tmp_path):
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    packed = lambda weight: gptq(weight, 4)[1]  # noqa: E731
    second = outliers.load_model(str(save_like(tmp_path / "2", fields | {"checkpoint_format": "gptq_v2"}, packed)))
    assert second.zero_points == "gptq_v2 by assumption, where checkpoint_format says gptq_v2 and sym is not true"
    folder = save_like(tmp_path / "1", fields, packed, llama(4096))
    outliers.load_tokenizer("pocket/gpt2-0.1m").save_pretrained(folder)
    arguments = ["--model", folder, "--scheme", "fp32", "--block", 32, "--blocks", 1, "--stream", "--out", tmp_path]
    assert call(monkeypatch, capsys, *arguments)[0] == 0
    ((said, method),) = {(row["zero_points"], row["quantized_from"]) for row in records_in(tmp_path)}
    assert (said, method) == ("gptq by assumption, where no checkpoint_format and sym is not true", "gptq")
    assert f"zero points read as {said}" in words_of(tmp_path / "report.html")


def awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random codes of the shape of a weight, as AutoAWQ packs them; only the library says what they stand for."""
    outputs, features = weight.shape
    words = lambda rows: torch.randint(-(2**31), 2**31, (rows, outputs // 8), dtype=torch.int64).int()  # noqa: E731
    return {"qweight": words(features), "qzeros": words(features // 32), "scales": torch.rand(features // 32, outputs)}


def test_modules_of_gptq_that_have_fields_of_their_own(tmp_path):
    """By GPTQModel's `dynamic`: the first pattern that the name of a module begins with counts."""
    bits = {"q_proj": 8, "down_proj": 2}
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    fields["dynamic"] = {
        r"-:.*layers\.1\.mlp\.gate_proj": {},
        r"+:.*\.q_proj$": {"bits": 8},
        r".*\.down_proj": {"bits": 2},
        r".*proj": {"sym": False},
    }
    packed, whole = {}, "model.layers.1.mlp.gate_proj"
    for one in projections(llama()):
        weight, last = one.module.weight.detach(), one.path.rpartition(".")[2]
        packed[one.path] = (weight, {"weight": weight}) if one.path == whole else gptq(weight, bits.get(last, 4))
    made = iter(packed.values())  # of projections in their order
    save_like(tmp_path, fields, lambda _weight: next(made)[1])
    own = weights_of(outliers.load_model(str(tmp_path)))
    for path, (expected, _) in packed.items():
        torch.testing.assert_close(own[path], expected)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({r".*q_proj": {"bits": 8}}, r"q_proj.qzeros' as I32 .*bits 8"),
        ({r"-:.*k_proj": {}}, "k_proj.qweight'; expected none, as its 'quantization_config' leaves the module out"),
        ({"(": {}}, r"names modules by '\('"),
        ({r"(?:[\w.]|[\w.]{2}|[\w.]{3})+(?<=\d)$": {}}, "takes too long"),
        (
            {".*": {"rotation": "hadamard"}},
            r"gives modules '\.\*' the field 'rotation' .* expected some of bits, check",
        ),
        ({".*": {"pack_dtype": "int8"}}, r"dynamic\.\*\.pack_dtype \"int8\"; expected one of int32"),
        ({".*": {"bits": 5}}, r"dynamic\.\*\.bits 5; expected one of 4, 2, 3, 8"),
    ],
)
def test_modules_whose_own_fields_contradict_the_tensors(dynamic, message, tmp_path):
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "dynamic": dynamic}
    save_like(tmp_path, fields, lambda weight: gptq(weight, 4)[1])
    with pytest.raises(UserError, match=message):
        outliers.load_model(str(tmp_path))


def hqq(weight: torch.Tensor, bits: int, axis: int, viewed: bool = False) -> tuple[torch.Tensor, dict]:
    """A weight in groups of 32 as HQQ packs it: what it stands for in float64, and tensors."""
    size, whole = 32, weight.double()
    grid = whole.reshape(-1, size) if axis else whole.reshape(size, -1)
    low, high = grid.amin(axis, keepdim=True), grid.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).float()
    zero = (-low / scale).float()
    codes = (grid / scale + zero).round().clamp(0, 2**bits - 1).long()
    stands_for = ((codes.double() - zero.double()) * scale.double()).reshape(weight.shape)
    count = 10 if bits == 3 else 8 // bits
    rows = -(-len(codes) // count)
    padded = torch.zeros(rows * count, codes.shape[1], dtype=torch.long)
    padded[: len(codes)] = codes
    words = sum(padded[rows * place : rows * (place + 1)] << bits * (count - 1 - place) for place in range(count))
    packed = words.int() if bits == 3 else words.byte()
    packing = "3bit_32" if bits == 3 else f"{bits}bit_u8"
    return stands_for, {
        "W_q": packed.view(torch.float16) if viewed else packed,
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor(weight.shape),
        "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
        "compute_dtype": torch.tensor(list(b"torch.float16"), dtype=torch.uint8),
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in (("nbits", bits), ("axis", axis))},
        "group_size": torch.tensor(size, dtype=torch.int32),
        **{name: torch.tensor(0, dtype=torch.uint8) for name in ("quant_scale", "quant_zero", "offload_meta")},
        "view_as_float": torch.tensor(int(viewed), dtype=torch.uint8),
    }


HQQ = {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {"weight_quant_params": {"nbits": 4}}}


def of_awq(weight: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """What codes of AutoAWQ stand for, whose eight of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7; and tensors."""
    tensors = awq(weight)
    places = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of the codes of eight outputs in a word

    def codes(name: str) -> torch.Tensor:
        return (tensors[name].long()[..., None] >> 4 * places & 15).flatten(1)

    spread = codes("qzeros").repeat_interleave(32, 0), tensors["scales"].repeat_interleave(32, 0)
    return ((codes("qweight") - spread[0]) * spread[1]).T, tensors


def test_awq_is_that_of_compressed_tensors():
    converters = pytest.importorskip(
        "compressed_tensors.entrypoints.convert.converters", reason="compressed-tensors is not installed"
    )
    stands_for, stored = of_awq(torch.zeros(64, 128))
    converter = converters.AutoAWQConverter(group_size=32)
    codes, zeros = converter.reverse_awq_order(*converter.unpack_awq(stored["qweight"], stored["qzeros"], 4), 4)
    zeros, scales = (zeros & 15).repeat_interleave(32, 0), stored["scales"].repeat_interleave(32, 0)
    torch.testing.assert_close(stands_for, (((codes & 15) - zeros) * scales).T)


def of_compressed(weight: torch.Tensor) -> tuple[torch.Tensor, dict]:
    codes, scales = torch.randint(16, weight.shape), torch.rand(len(weight), weight.shape[1] // 32)
    tensors = compressed(weight) | {"weight_packed": into_words(codes, 4), "weight_scale": scales}
    return (codes - 8) * scales.repeat_interleave(32, 1), tensors


def of_codes(weight: torch.Tensor) -> tuple[torch.Tensor, dict]:
    codes, scale = torch.randint(-128, 128, weight.shape), torch.rand(len(weight), 1)
    return codes * scale, {"weight": codes.to(torch.int8), "weight_scale": scale}


def fp8(weight: torch.Tensor, block: tuple | None = None, kind: torch.dtype = torch.float32) -> tuple:
    """A weight in fp8 with a scale for each block, the last of which are cut off: what it stands for, and tensors."""
    rows, columns = (torch.arange(size) // of for size, of in zip(weight.shape, block or weight.shape, strict=True))
    largest = torch.zeros(rows.max() + 1, columns.max() + 1)
    for i, j in itertools.product(*map(range, largest.shape)):
        largest[i, j] = weight[rows == i][:, columns == j].abs().max()
    scale = (largest / 448).to(kind)
    spread = scale.float()[rows][:, columns]
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * spread, {"weight": codes, "weight_scale_inv": scale if block else scale.squeeze()}


def in_another_order(weight: torch.Tensor) -> torch.Tensor:
    return torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))


def without_order(weight: torch.Tensor, size: int | None = 32) -> tuple:
    """As `gptq`, with no g_idx: the order is that of the features, or there is one group."""
    stands_for, tensors = gptq(weight, 4, size=size or weight.shape[1])
    return stands_for, {end: tensor for end, tensor in tensors.items() if end != "g_idx"}


def of_fp8(*block: int) -> dict:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block or None}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
# Which packs as one of two methods does, and leaves modules out by name.
LEFT_OUT = {"lm_head": {"bits": 16}, ".*mlp.*": {"bits": 4, "group_size": None}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
AUTO_ROUND |= {"packing_format": "auto_round:auto_gptq", "extra_config": LEFT_OUT}
COMPRESSED_TENSORS = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
IN_FOUR_BITS = COMPRESSED_TENSORS | {"config_groups": {"a": {"weights": W4}}}
CODES = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": W8}}}
BY_HAND = {  # by method: the fields of a checkpoint; and of a weight what it stands for, and its tensors
    **{f"gptq, {bits}": (GPTQ | {"bits": bits, "sym": False}, partial(gptq, bits=bits)) for bits in (2, 4, 8)},
    **{
        f"gptq, {bits}, in another order": (
            GPTQ | {"bits": bits, "sym": False},
            lambda weight, bits=bits: gptq(weight, bits, in_another_order(weight)),
        )
        for bits in (3, 4)
    },
    "gptq, static groups": (GPTQ | {"sym": False, "static_groups": True}, without_order),
    "gptq, one group": (GPTQ | {"sym": False, "group_size": -1}, partial(without_order, size=None)),
    "awq": (AWQ, of_awq),
    "auto-round": (AUTO_ROUND, partial(gptq, bits=4, sym=True)),
    "auto-round as awq": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, of_awq),
    "compressed": (IN_FOUR_BITS, of_compressed),
    "codes": (CODES, of_codes),
    "fp8": (of_fp8(), fp8),
    "fp8, 128": (of_fp8(128, 128), partial(fp8, block=(128, 128))),
    "fp8, cut off": (of_fp8(48, 40), partial(fp8, block=(48, 40), kind=torch.bfloat16)),
    "fp8, e8m0": (of_fp8(16, 32), partial(fp8, block=(16, 32), kind=torch.float8_e8m0fnu)),
    **{
        f"hqq, {bits}, {axis}": (
            HQQ | {"quant_config": {"weight_quant_params": {"nbits": bits, "group_size": 32, "axis": axis}}},
            partial(hqq, bits=bits, axis=axis, viewed=viewed),
        )
        for bits, axis, viewed in ((8, 1, False), (4, 0, True), (3, 1, False), (2, 0, False), (1, 1, False))
    },
}


@pytest.mark.parametrize("how", BY_HAND)
def test_weights_are_what_was_packed_by_hand(how, tmp_path):
    """Streamed too; what is saved of them is plain."""
    torch.manual_seed(0)
    (fields, packed), expected = BY_HAND[how], []

    def pack(weight: torch.Tensor) -> dict:
        stands_for, tensors = packed(weight)
        expected.append(stands_for.detach())
        return tensors

    model = outliers.load_model(str(save_like(tmp_path / "packed", fields, pack)))
    for one, stands_for in zip(projections(model), expected, strict=True):
        torch.testing.assert_close(one.module.weight.double(), stands_for.double(), rtol=1e-5, atol=1e-7)
    ids = torch.arange(24).view(2, 12)
    assert outliers.perplexity(stream_model(str(tmp_path / "packed")), ids) == outliers.perplexity(model, ids)
    model.save_pretrained(tmp_path / "plain")
    again = weights_of(outliers.load_model(str(tmp_path / "plain")))
    assert all(torch.equal(weight, again[path]) for path, weight in weights_of(model).items())


def test_fp8_is_that_of_transformers():
    """Whose function takes no blocks that are cut off, and rounds to bfloat16."""
    stands_for, tensors = fp8(torch.randn(64, 128), (16, 32), torch.float8_e8m0fnu)
    theirs = Fp8Dequantize(None)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"])
    torch.testing.assert_close(stands_for.float(), theirs.float(), rtol=1e-2, atol=0)


OF_INPUTS = {"config_groups": {"a": {"apply": [{"location": "input"}]}}}


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("gptq", {"bits": 5}, "with bits 5; expected one of 4, 2, 3, 8"),
        ("gptq", {"dynamic": [{"bits": 4}]}, r'with dynamic \[\{"bits": 4\}\]; expected a JSON object'),
        ("auto-round", {"extra_config": {"lm_head": 16}}, r"with extra_config\.\* 16; expected a JSON object"),
        ("hqq", {"quant_config": {"weight_quant_params": 4}}, r"with quant_config\.weight_quant_params 4; expected a"),
        ("gptq", {"checkpoint_format": "marlin"}, 'with checkpoint_format "marlin"; expected one of gptq'),
        ("gptq", {"checkpoint_format": "gptq", "format": "marlin"}, 'with format "marlin"'),
        ("gptq", {"is_marlin_format": True}, "with is_marlin_format true"),
        ("gptq", {"pack_dtype": "int8"}, 'with pack_dtype "int8"'),
        ("awq", {"version": "gemv"}, 'with version "gemv"; expected one of gemm'),
        ("awq", {"version": "GEMM", "format": "marlin"}, 'with format "marlin"; expected one of gemm'),
        ("bitsandbytes", {"bnb_4bit_quant_storage": "bfloat16"}, "with bnb_4bit_quant_storage"),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized"}, "expected one of dense"),
        ("compressed-tensors", {"config_groups": {"a": {"format": "marlin-24"}}}, r'config_groups\.\*\.format "marl'),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24"}}, 'sparsity_config.format "sparse-24"'),
        ("compressed-tensors", {"transform_config": OF_INPUTS}, 'location "input"; expected one of weight_input'),
        ("fp8", {"scale_fmt": "e5m3"}, 'with scale_fmt "e5m3"; expected one of float, ue8m0'),
        ("fp8", {"expert_dtype": "fp4"}, 'with expert_dtype "fp4"'),
        ("auto-round", {"packing_format": "auto_round:llm_compressor"}, "expected one of auto_round:auto_gptq"),
        ("auto-round", {"data_type": "mx_fp"}, 'with data_type "mx_fp"'),
        (["gptq"], {}, "expected 16 or 32 bits"),
    ],
)
def test_what_is_not_undone_is_refused(method, fields, message, tmp_path):
    save_like(tmp_path, {"quant_method": method} | fields, lambda weight: {"weight": weight})
    with pytest.raises(UserError, match=message):
        outliers.load_model(str(tmp_path))


def nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random codes of a weight as bitsandbytes stores them: blocks of 64, whose scales are codes in blocks of 256."""
    count = weight.numel()
    state = {"shape": list(weight.shape), "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.5}
    return {
        "weight": torch.zeros(count // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(count // 64, dtype=torch.uint8),
        "weight.quant_map": torch.ones(16),
        "weight.nested_absmax": torch.ones(-(-count // 64 // 256)),
        "weight.nested_quant_map": torch.ones(256),
        "weight.quant_state.bitsandbytes__nf4": written(state),
    }


def written(state: dict) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes of 8 bits, as bitsandbytes stores them."""
    return {
        "weight": weight.sign().to(torch.int8),
        "SCB": torch.ones(len(weight)),
        "weight_format": torch.tensor(0).byte(),
    }


def compressed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes of 4 bits in groups of 32, as compressed-tensors packs them."""
    outputs, features = weight.shape
    scales = torch.ones(outputs, features // 32)
    codes = torch.full(weight.shape, 9)
    return {"weight_packed": into_words(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


PACKINGS = {  # by method: the fields of a checkpoint that is right, and its tensors
    "gptq": (GPTQ, lambda weight: gptq(weight, 4, sym=True)[1]),
    "auto-round": (AUTO_ROUND, lambda weight: gptq(weight, 4, sym=True)[1]),
    "awq": (AWQ, awq),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, int8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "compressed": (IN_FOUR_BITS, compressed),
    "codes": (CODES, lambda weight: of_codes(weight)[1]),
    "fp8": (of_fp8(32, 32), lambda weight: fp8(weight, (32, 32))[1]),
    "hqq": (HQQ, lambda weight: hqq(weight, 4, 1)[1]),
}
PATH = "model.layers.0.self_attn.q_proj"  # 64 outputs, 64 features
W4_IN_GROUPS = {"config_groups": {"a": {"weights": W4 | {"group_size": 64}}}}
ASYMMETRIC = {"config_groups": {"a": {"weights": W4 | {"symmetric": False}}}}
STATE = "weight.quant_state.bitsandbytes__nf4"


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("method", "fields", "tensors", "message"),
    [
        ("gptq", {"bits": 8}, {}, r"qzeros' as I32 of the shape \(4, 8\); expected I32 of the shape \(2, 16\).*bits 8"),
        ("gptq", None, {}, r"holds packed codes 'model.layers.0.*qweight', and .* says nothing of them"),
        ("gptq", {"group_size": "32"}, {}, "'group_size' '32'; expected a whole number"),
        ("gptq", {}, {"qzeros": None}, r"lacks '{}.qzeros'; expected I32 of the shape \(2, 8\)"),
        ("gptq", {}, {"scales": ints(2, 64)}, r"'{}.scales' as I32 of the shape \(2, 64\); expected F16"),
        ("gptq", {}, {"g_idx": None}, r"lacks '{}.g_idx'; expected I32 or I64 of the shape \(64,\).*desc_act True"),
        (
            "gptq",
            {},
            {"g_idx": ints(64)},
            "'{}.g_idx' with groups from 0 to 0; expected groups from 0 to 1, each whole",
        ),
        ("gptq", {"desc_act": False}, {"g_idx": torch.arange(64).int() % 2}, "'{}.g_idx' with features in another"),
        ("gptq", {}, {"qzeros": ints(2, 8)}, "'{}.qzeros' with zero points from 0 to 0; expected 8 everywhere, or 7"),
        ("gptq", {}, {"qweight": ints(64)}, "cannot load '{}.qweight'"),
        ("gptq", {}, {"weight": torch.zeros(64, 64)}, "holds a tensor twice: '{}.weight' in .* and '{}.qweight'"),
        ("gptq", {"quant_method": "bitsandbytes"}, {}, "holds packed codes '.*qweight', and .* says 'bitsandbytes'"),
        ("auto-round", {"extra_config": {PATH: {"bits": 16}}}, {}, "'{}.qweight'; expected none, as its .* leaves the"),
        ("awq", {}, {"qweight": ints(8, 64)}, r"'{}.qzeros' .* expected I32 of the shape \(1, 64\)"),
        ("awq", {"zero_point": False}, {}, "'.*qzeros' with zero points from 0 to 15; expected 8 everywhere"),
        ("int8", {"load_in_8bit": False}, {}, "'.*SCB'; expected none.*load_in_8bit False"),
        ("int8", {}, {"weight_format": torch.tensor(2).byte()}, "'{}.weight_format' with col_turing; expected row"),
        ("nf4", {"load_in_4bit": False}, {}, "'.*weight.absmax'; expected none.*load_in_4bit False"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, {}, "'.*bitsandbytes__nf4'; expected fp4"),
        ("nf4", {}, {"weight": torch.zeros(64, 1).byte()}, r"'{}.weight' as U8 of the shape \(64, 1\); .*\(2048, 1\)"),
        ("nf4", {}, {"weight.absmax": torch.zeros(64)}, "'{}.weight.absmax' as F32 .*; expected U8"),
        ("nf4", {}, {STATE: None}, "lacks '{}.weight.quant_state.bitsandbytes__nf4'"),
        ("compressed", W4_IN_GROUPS, {}, r"weight_scale' as F32 of the shape \(64, 4\); .*\(64, 2\).*group_size 64"),
        ("compressed", ASYMMETRIC, {}, "lacks '.*weight_zero_point'; expected I32.*symmetric False"),
        ("compressed", {"config_groups": {}}, {}, "'.*weight_packed'; expected a 'quantization_config' that says"),
        ("compressed", {}, {"weight_zero_point": ints(8, 2)}, "'{}.weight_zero_point'; expected none.*symmetric True"),
        ("compressed", {}, {"weight_shape": None}, "lacks '{}.weight_shape'"),
        ("compressed", {}, {"weight_shape": torch.tensor([64, 32])}, r"'{}.weight_packed' .*\(64, 8\); .*\(64, 4\)"),
        ("compressed", {}, {"weight_g_idx": ints(64)}, "'{}.weight_g_idx'; expected none"),
        ("fp8", {"weight_block_size": [16, 64]}, {}, r"weight_scale_inv' as F32 .*\(2, 4\); expected .* \(4, 2\)"),
        ("fp8", {"weight_block_size": [16]}, {}, r"'weight_block_size' \[16\]; expected two whole numbers"),
        ("fp8", {}, {"weight_scale_inv": None}, "holds '{}.weight' as F8_E4M3; expected F64"),
        ("fp8", {}, {"weight": torch.zeros(64, 64)}, "'{}.weight' as F32 .* expected F8_E4M3"),
        ("hqq", {"quant_config": {"weight_quant_params": {"nbits": 8}}}, {}, "nbits' 4; expected 8, as its 'quant"),
        ("hqq", {}, {"scale": torch.zeros(64, 1)}, r"'{}.scale' as F32 .*\(64, 1\); expected .*\(128, 1\)"),
        ("hqq", {}, {"shape": None}, "lacks '{}.shape'; expected what the library writes"),
        (
            "hqq",
            {},
            {"quant_scale": torch.tensor(1).byte()},
            "'{}.quant_scale' of scales or zero points that are codes",
        ),
        ("hqq", {}, {"packing": torch.tensor(list(b"4bit_32")).byte()}, "'{}.packing' '4bit_32'; expected one of 8bit"),
        ("codes", {}, {"weight_zero_point": torch.ones(64, 1).char()}, "'{}.weight_zero_point' with zero points that"),
        ("codes", {}, {"weight": torch.zeros(64, 64).to(torch.float8_e4m3fn)}, "'{}.weight' as F8_E4M3 .* expected I8"),
    ],
)
def test_sizes_and_labels_that_contradict_the_tensors_are_one_line(method, fields, tensors, message, tmp_path):
    """With the tensor, what was expected of it, and what it is; of two, one of which is not there, of a projection."""
    own, packed = PACKINGS[method]
    save_like(tmp_path, fields if fields is None else own | fields, packed)
    stored = load_file(tmp_path / "model.safetensors")
    changed = {f"{PATH}.{end}": tensor for end, tensor in tensors.items()}
    stored = {key: tensor for key, tensor in (stored | changed).items() if tensor is not None}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=message.replace("{}", PATH)):
        outliers.load_model(str(tmp_path))


def test_weights_that_alone_know_how_they_multiply_have_none():
    assert weight_of(SimpleNamespace()) is None


# Mixtures


@in_turn("how kind", ["gptq, 4", "awq", "compressed", "codes", "fp8, 128"], ("mixtral", "qwen3_moe", "glm4_moe"))
def test_experts_by_their_own_names(how, kind, tmp_path):
    """Weights of each expert as publishers pack them, under the names that transformers writes."""
    fields, packed = BY_HAND[how]
    model = mixture(kind, hidden_size=160, intermediate_size=192, moe_intermediate_size=192)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    experts = [name for name in stored if ".experts." in name]
    assert len(experts) >= 12 and all(stored[name].ndim == 2 for name in experts)
    expected = model.state_dict()
    for name in experts:
        stands_for, parts = packed(stored.pop(name))
        stored |= {f"{name.removesuffix('weight')}{end}": part.contiguous() for end, part in parts.items()}
        layer, number, part = re.fullmatch(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight", name).groups()
        joined = f"model.layers.{layer}.mlp.experts.{'down' if part in ('w2', 'down_proj') else 'gate_up'}_proj"
        place = expected[joined][int(number)]
        if joined.endswith("gate_up_proj"):
            place = place.chunk(2)[part in ("w3", "up_proj")]
        place.copy_(stands_for)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    alter_config(tmp_path, quantization_config=fields)
    found = outliers.load_model(str(tmp_path))
    for name, weight in found.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6, msg=name)
    ids = torch.arange(24).view(2, 12)
    assert outliers.perplexity(stream_model(str(tmp_path)), ids) == outliers.perplexity(found, ids)
