"""Keys and values in few bits: codes by their definition, what attention meets, and caches that generate the same."""

import copy

import pytest
import torch
from outlier_kernels.formats import Quantizer
from outlier_kernels.reference import quantize
from transformers import DynamicCache

import outliers
from outliers import UserError, calibrate, perplexities, perplexity
from outliers.models.stream import AS_IT_IS, stream_model
from outliers.quantization.cache_formats import CacheFormat, Formats
from outliers.quantization.caches import CacheCodes, fake_quantize
from tests.conftest import in_turn
from tests.small_models import make_model
from tests.typed import call

# Learned positions, rotations, biases of keys, fused projections.
CACHED = ["gpt2", "opt", "llama", "qwen2", "gpt_neox"]
KIVI = "keys=int4/channels=8/recent=5+values=int4/recent=5"


def by_definition(states: torch.Tensor, bits: int) -> torch.Tensor:
    """What the codes of each last dimension stand for, in float64, scales and minima rounded to float16."""
    states = states.double()
    least, largest = states.amin(-1, keepdim=True), states.amax(-1, keepdim=True)
    scale = ((largest - least) / (2**bits - 1)).half().double()
    least = least.half().double()
    return ((states - least) / scale).round().clamp(0, 2**bits - 1) * scale + least


@pytest.fixture(scope="module")
def states() -> torch.Tensor:
    return torch.randn(2, 3, 21, 12, generator=torch.Generator().manual_seed(0)) * 5


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_by_token(states, bits):
    torch.testing.assert_close(CacheCodes.of(states, bits, None).states(bits).double(), by_definition(states, bits))
    torch.testing.assert_close(fake_quantize(states, CacheFormat(f"int{bits}")).double(), by_definition(states, bits))


def test_codes_by_channel_leave_an_incomplete_group_exact(states):
    met = fake_quantize(states, CacheFormat("int4", channels=8))
    groups = states[:, :, :16].unflatten(2, (2, 8)).transpose(-1, -2)
    expected = by_definition(groups, 4).transpose(-1, -2).flatten(2, 3)
    torch.testing.assert_close(met[:, :, :16].double(), expected)
    assert torch.equal(met[:, :, 16:], states[:, :, 16:])


def test_first_and_recent_positions_and_other_heads_stay_exact(states):
    met = fake_quantize(states, CacheFormat("int3", first=2, recent=4, heads=(range(1, 2),)))
    changed = (met != states).any(-1).nonzero()
    assert {tuple(one) for one in changed[:, 1:].tolist()} == {(1, position) for position in range(2, 17)}
    assert torch.equal(met[:, 1, 2:17], fake_quantize(states[:, 1:2, 2:17], CacheFormat("int3"))[:, 0])


def test_a_rotation_spreads_a_large_channel(states):
    large = states.clone()
    large[..., 3] += 300 * torch.sign(states[..., 3])
    errors = [(fake_quantize(large, CacheFormat("int4", hadamard=one)) - large).abs().median() for one in (False, True)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize(
    ("format", "block"), [("fp8-e4m3", None), ("mxfp4", None), ("nvfp4", None), ("bfp6", None), ("bfp4", 8)]
)
def test_other_formats_are_those_of_matrices(format, block):
    """Of rows of all channels, or of blocks of them."""
    states = torch.randn(1, 2, 5, 32, generator=torch.Generator().manual_seed(1))
    quantizer = Quantizer(format, "block" if format in ("mxfp4", "nvfp4") else "row")
    expected = quantize(states.view(-1, block or 32), quantizer).dequantize().view(states.shape)
    assert torch.equal(fake_quantize(states, CacheFormat(format, block=block)), expected)


def test_channels_are_ordered_by_their_magnitudes_and_put_back(states):
    """In the order of the calibration's, which are those of each head."""
    largest = states.abs().amax((0, 2))
    expected = torch.empty_like(states)
    for head, order in enumerate(largest.sort(descending=True).indices):
        blocks = states[:, head, :, order].reshape(-1, 4)
        expected[:, head, :, order] = quantize(blocks, Quantizer("bfp4", "row")).dequantize().view(2, 21, 12)
    met = fake_quantize(states, CacheFormat("bfp4", block=4, reorder=True), 0, largest)
    assert torch.equal(met, expected)


def test_smoothing_is_that_of_keys_and_queries_in_the_weights(blocks):
    """λ of channels that rotate into each other, taken into the projections: nothing changes, and then plain codes."""
    model = make_model("llama").double()
    found = calibrate(model, blocks[:2], keys=True)
    smooth = outliers.variant("keys=int4/smooth").calibrated(found)
    folded = copy.deepcopy(model)
    for layer, largest in zip(folded.model.layers, found.keys.values(), strict=True):
        half = largest.shape[1] // 2
        factors = torch.maximum(largest[:, :half], largest[:, half:]).sqrt().repeat(1, 2).double()
        attention = layer.self_attn
        with torch.no_grad():
            attention.k_proj.weight /= factors.reshape(-1, 1)
            attention.q_proj.weight *= factors.repeat_interleave(attention.num_key_value_groups, 0).reshape(-1, 1)
    assert perplexity(folded, blocks) == pytest.approx(perplexity(model, blocks), rel=1e-9)
    met, plain = perplexities(model, blocks, [smooth]), perplexities(folded, blocks, [outliers.variant("keys=int4")])
    assert met == [pytest.approx(plain[0], rel=1e-6)]
    assert met != [pytest.approx(perplexity(model, blocks), rel=1e-5)]


@pytest.mark.parametrize("case", CACHED)
def test_a_calibration_knows_the_largest_keys(case, blocks, tmp_path):
    """Those that a cache of transformers keeps; of a streamed model and of parts merged the same."""
    model = make_model(case)
    found, kept = calibrate(model, blocks, keys=True), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(blocks, past_key_values=kept)
    for layer, states in enumerate(kept.layers):
        torch.testing.assert_close(found.keys[layer], states.keys.abs().amax((0, 2)), rtol=1e-5, atol=1e-6)
    merged = calibrate(model, blocks[:1], keys=True).merge(calibrate(model, blocks[1:], keys=True))
    model.save_pretrained(tmp_path)
    for other in (merged, calibrate(stream_model(str(tmp_path)), blocks, keys=True)):
        assert all(torch.equal(other.keys[layer], largest) for layer, largest in found.keys.items())
    variant = outliers.variant("keys=bfp4/block=2/reorder").calibrated(found)
    assert perplexities(stream_model(str(tmp_path)), blocks, [variant]) == perplexities(model, blocks, [variant])


def test_keys_of_a_prefix_stay_exact_and_are_not_calibrated_on(blocks):
    model, kept, short, prefix = make_model("llama"), DynamicCache(), blocks[:1, :3], torch.arange(5, 25)[None]
    with outliers.variant(f"prefix({','.join(map(str, prefix[0].tolist()))})").on(model) as behind:
        found = calibrate(behind, short, keys=True)
    with torch.inference_mode():
        model(torch.cat([prefix, short], 1), past_key_values=kept)
    for layer, states in enumerate(kept.layers):
        expected = states.keys[:, :, prefix.shape[1] :].abs().amax((0, 2))
        torch.testing.assert_close(found.keys[layer], expected, rtol=1e-5, atol=1e-6)


def test_a_run_calibrates_keys_on_other_blocks(tmp_path):
    fields = {"models": ["pocket/gpt2-0.1m"], "variants": ["fp32", "keys=int3/smooth"], "metrics": ["perplexity"]}
    rows = outliers.run(outliers.Cells(**fields, block=32, blocks=1), tmp_path)
    of_variant = {row["variant"]: row for row in rows}
    assert set(of_variant["keys=int3/smooth"]) - set(of_variant["fp32"]) == {"keys", "calibration_hash", "cache_bits"}
    assert of_variant["keys=int3/smooth"]["cache_bits"] == pytest.approx((3 + 32 / 12 + 16) / 2, abs=1e-4)
    model = outliers.load_model("pocket/gpt2-0.1m")
    with (
        pytest.raises(UserError, match="'keys=int3/smooth' needs the magnitudes of keys; expected a calibration"),
        outliers.variant("keys=int3/smooth").on(model),
    ):
        pass


@pytest.mark.parametrize("case", CACHED)
def test_attention_meets_codes(case, blocks, tmp_path):
    """Of all heads and layers, in fused kernels and plain products, streamed too; in 8 bits next to nothing is lost."""
    model, names = make_model(case), ("kv=int8", "kv=int2", "kv=int2/layers=1", "keys=int2/before")
    variants = [AS_IT_IS, *map(outliers.variant, names)]
    exact, eight, two, of_one, before = perplexities(model, blocks, variants)
    assert abs(eight / exact - 1) < 1e-3 < abs(two / exact - 1)
    assert len({exact, eight, two, of_one, before}) == 5
    with variants[2].on(model):
        met = perplexity(model, blocks)
        assert met == pytest.approx(two, rel=1e-9)
        model.set_attn_implementation("eager")
        assert perplexity(model, blocks) == pytest.approx(two, rel=1e-4)
    model.set_attn_implementation("sdpa")
    assert perplexity(model, blocks) == exact, "it is as it was"
    model.save_pretrained(tmp_path)
    assert perplexities(stream_model(str(tmp_path)), blocks, variants[1:]) == [eight, two, of_one, before]


def test_keys_before_the_rotation(blocks):
    """As if the projection itself put out what the codes stand for."""
    model = make_model("llama")
    before = perplexities(model, blocks, [outliers.variant("keys=int3/before")])
    heads = model.config.num_key_value_heads

    def quantized(_module, _inputs, output):
        of_heads = output.unflatten(-1, (heads, -1))
        return by_definition(of_heads, 3).flatten(-2).to(output.dtype)

    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(quantized)
    assert before == [pytest.approx(perplexity(model, blocks), rel=1e-6)]


@in_turn("case variant", ["llama", "gpt2"], ["kv=int4", KIVI, "kv=int3/first=3/hadamard", "keys=int8"])
def test_a_cache_generates_what_the_variant_does(case, variant, blocks):
    model, prompts = make_model(case), blocks[:2, :12]
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    kept = model.generate(prompts, past_key_values=outliers.cache(model, variant), **options)
    with outliers.variant(variant).on(model):
        simulated = model.generate(prompts, past_key_values=DynamicCache(config=model.config), **options)
    assert torch.equal(kept.sequences, simulated.sequences)
    torch.testing.assert_close(torch.stack(kept.logits), torch.stack(simulated.logits), rtol=0, atol=1e-5)


def test_a_beam_search_takes_the_cache_along(blocks):
    model, options = make_model("llama"), {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    beams = [
        model.generate(blocks[:2, :9], past_key_values=outliers.cache(model, name), **options)
        for name in ("kv=int8", KIVI.replace("int4", "int8"))
    ]
    assert torch.equal(beams[0], model.generate(blocks[:2, :9], **options))
    assert torch.equal(beams[0], beams[1])


@pytest.mark.parametrize(
    ("written", "bits"),
    {
        "kv=int4": 4.5,
        "kv=int4/channels=32": 5,  # 32 bits of a scale and a minimum over 32 positions
        "kv=int4/channels=32/recent=96": (416 * 5 + 96 * 16) / 512,
        "keys=int4": (4.5 + 16) / 2,
        "kv=int8/layers=0": (8.5 + 3 * 16) / 4,
        "kv=int8/layers=0.2:4": (3 * 8.5 + 16) / 4,
        "kv=mxfp4": 4.25,
        "kv=bfp4/block=16": 4.5,
        "keys=int4/before/heads=0": (10.25 + 16) / 2,
        "keys=int4/smooth": (4.5 + 16) / 2,
        "keys=bfp4/block=16/reorder": (4.5 + 16) / 2,
    }.items(),
)
def test_bits_of_a_value(written, bits):
    """At 512 positions, in 4 layers of 2 heads of 64 channels; of a format that is read as it is written."""
    formats = Formats.read(written)
    assert formats.value_bits(512, 4, 2, 64) == bits
    assert Formats.read(str(formats)) == formats


@pytest.mark.parametrize(
    ("written", "message"),
    {
        "kv=fp8": "unknown format of a cache 'fp8'",
        "kv=int9": "unknown format of a cache 'int9'",
        "kv=int4/group=3": "unknown option of a cache 'group'",
        "kv=int4/channels=0": "has 'channels=0'; expected one such as",
        "kv=int4/recent=2/recent=3": "has an option twice",
        "kv=int4+keys=int8": "has keys twice; expected each once",
        "kv=mxfp4/channels=8": "has groups of positions in 'mxfp4'",
        "kv=int4/layers=0:2.1:3": "has 'layers=0:2.1:3', whose ranges overlap; expected each number once",
        "kv=int4/layers=3:3": "has 'layers=3:3'; expected one such as",
        "kv=int4/heads=0:2.3:3": "has 'heads=0:2.3:3'; expected one such as",
        "kv=int4/recent=2:3": "has 'recent=2:3'; expected one such as",
        "kv=int4/block=8": "has blocks of channels, and int4 has a scale a token, or one for each channel",
        "kv=mxfp4/block=8": "has blocks of channels, and mxfp4 fixes blocks of 32",
        "keys=bfp4/reorder": "reorders channels that share one scale, to no effect; expected blocks",
        "keys=int4/smooth/hadamard": "changes channels by hadamard and smooth; expected one of them",
        "keys=int4/smooth/before": "is defined after the rotation of positions; leave before out",
        "kv=int4/smooth": "values in 'int4/smooth', which is for keys; expected it for these alone: keys=int4/smooth",
    }.items(),
)
def test_malformed_writings_are_refused(written, message):
    with pytest.raises(UserError, match=message):
        outliers.variant(written)


def test_damage_by_place_is_that_of_the_variants_that_name_it(blocks):
    """Keys, values, layers and heads of a cache, each alone, and all but each but for heads."""
    model = make_model("llama")
    damage = outliers.damage(model, blocks, outliers.variant("kv=int2"), by=("role", "layer", "head"))
    places = {
        "roles": {"keys": ("keys=int2", "values=int2"), "values": ("values=int2", "keys=int2")},
        "layers": {0: ("kv=int2/layers=0", "kv=int2/layers=1"), 1: ("kv=int2/layers=1", "kv=int2/layers=0")},
        "heads": {f"layers.{n}.heads.{head}": (f"kv=int2/layers={n}/heads={head}",) for n in (0, 1) for head in (0, 1)},
    }
    for field, variants in places.items():
        table, kinds = getattr(damage, field), list(zip(*variants.values(), strict=True))
        assert list(table.iloc[:, 0]) == list(variants)
        for column, names in zip(("perplexity_only", "perplexity_without")[: len(kinds)], kinds, strict=True):
            expected = perplexities(model, blocks, list(map(outliers.variant, names)))
            assert list(table[column]) == pytest.approx(expected, rel=1e-12)
    assert "perplexity_without" not in damage.heads
    assert damage.errors.empty


def test_the_command_measures_caches_alone_unless_schemes_are_named(monkeypatch, capsys, tmp_path):
    options = ["--cache", "kv=int2", "--block", "32", "--blocks", "1", "--out", tmp_path]
    code, output, _ = call(monkeypatch, capsys, "pocket/gpt2-0.1m", *options, command="damage")
    assert code == 0
    assert "absmax" not in output
    assert (tmp_path / "damage_heads.png").exists()


@pytest.mark.parametrize("format", ["keys=int4/before", "keys=int4/smooth", "keys=bfp4"])
def test_a_simulated_format_is_no_cache(format):
    with pytest.raises(UserError, match="which variants alone simulate"):
        outliers.cache(make_model("gpt2"), format)


def test_latency_takes_the_cache_of_a_variant(tmp_path):
    spec = {"models": ["pocket/gpt2-0.1m"], "variants": ["fp32", "kv=int4"], "metrics": ["latency"]}
    of_time = {"block": 32, "blocks": 1, "prompt": 16, "tokens": 2, "repeats": 2}
    rows = outliers.run(outliers.Cells(**spec, **of_time), tmp_path)
    sizes = {row["variant"]: row["value"] for row in rows if row["metric"] == "latency.cache"}
    of_heads = 2 * 2 * 2  # layers, keys and values, heads
    assert sizes == {"kv=int4": of_heads * 18 * (6 + 4)}, "18 positions of 12 channels, a scale and a minimum"
