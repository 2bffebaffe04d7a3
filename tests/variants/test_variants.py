"""Variants stand for layers, resident or streamed, alone or together, and leave the model as it was."""

import math
import pickle
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import outliers
from outliers import Planted, Quantized, Together, UserError, calibrate, plant, quantize, run, trace
from outliers.commands.ablate import Ablation
from outliers.criterion import OF_EVERY_STACK
from outliers.metrics.perplexity import perplexities, perplexity
from outliers.models.anatomy import projections
from outliers.models.load import load_model
from outliers.models.stream import AS_IT_IS, stream_model
from outliers.quantization.cache_formats import CacheFormat, Formats
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.schemes import SCHEMES, get_scheme
from outliers.tracing.result import STREAM
from outliers.variants.ablated import Ablated, Intervention
from outliers.variants.cached import Cached, Prefixed
from outliers.variants.edges import EDGE_PLACES
from outliers.variants.massive import Massive
from outliers.variants.peer import Bitsandbytes
from outliers.variants.term import WeightEntry
from outliers.variants.unattended import Unattended
from outliers.variants.weights import Scaled
from tests.small_models import make_model
from tests.tracing.test_tracing import hooks

MODEL = "pocket/gpt2-0.1m"
SCHEME = get_scheme("llm.int8", 2.0)
OF_SCHEME = {"scheme": "llm.int8", "alpha": 2.0, "outlier_weights": "exact"}
OF_ABLATION = {"method": "zero", "features": [1, 2], "where": ["attn_in"], "seed": 0}
PLANTED = {"planted": [3], "factor": 8.0}
ZERO = Ablated(Intervention((1, 2)))
FIELDS = {
    "as it is": (AS_IT_IS, {}),
    "quantized": (Quantized(SCHEME), OF_SCHEME),
    "ablated": (replace(ZERO, where=("attn_in", "ffn_in")), OF_ABLATION | {"where": ["attn_in", "ffn_in"]}),
    "planted": (Planted((3,), 8.0), PLANTED),
    "ablation under a scheme": (Together((Quantized(SCHEME), ZERO)), OF_SCHEME | OF_ABLATION),
    "scheme on planted outliers": (Together((Planted((3,), 8.0), Quantized(SCHEME))), OF_SCHEME | PLANTED),
}
VARIANTS = {name: variant for name, (variant, _) in FIELDS.items()}


@pytest.fixture(scope="module")
def models():
    return load_model(MODEL), stream_model(MODEL)


@pytest.fixture
def blocks(models):
    return torch.randint(models[0].config.vocab_size, (3, 24), generator=torch.Generator().manual_seed(0))


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
    with ExitStack() as stack:
        for layer in model.transformer.h:
            for module in (layer.attn.c_attn, layer.mlp.c_fc)[: 2 if name == "ablated" else 1]:
                stack.callback(module.register_forward_pre_hook(without).remove)
        return perplexity(model, blocks)


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
    fields = FIELDS[name][1]
    assert variant.fields() == fields
    assert variant.fields(models[0]) == fields | ({"kernels": "cpu"} if "scheme" in fields else {})


@pytest.mark.parametrize("written", ["shuffle(1,2)", "shuffle(1@ffn_in,seed=3)+llm.int8", "shuffle(2@layers.1.q)"])
def test_what_is_shuffled_depends_on_no_order(written, models, blocks):
    """Bit for bit streamed, layer by layer, as resident, block by block; and the same in parts of a text."""
    resident, streamed = models
    (whole,) = perplexities(resident, blocks, [outliers.variant(written)])
    assert whole != perplexity(resident, blocks)
    assert perplexities(streamed, blocks, [outliers.variant(written)]) == [whole]
    parts = [perplexities(resident, part[None], [outliers.variant(written)])[0] for part in blocks]
    assert math.prod(parts) ** (1 / len(parts)) == pytest.approx(whole, rel=1e-12)


WEIGHTS_OF = ["transformer.h.1.mlp.c_proj[2,60]", "transformer.h.0.attn.c_attn[:,3]", "transformer.h.1.mlp.c_fc[5,:]"]
SCALED = [*(f"zero({name})" for name in WEIGHTS_OF), "+".join(f"scale({name},factor=-2)" for name in WEIGHTS_OF)]
STREAMED = {  # variants by their writings
    "edges": ["zero(1,2@q)", "zero(1@layers.1:2.heads.1/up)", "zero(1@norm)", "zero(1@v)+absmax+zero(2@k)"],
    "places": ["absmax+skip=ffn_in", "absmax+only=layers.1", "absmax+only=ffn_in+skip=layers.0"],
    "massive entries": ["massive(3@layers.0,value=7,above=0.5)", "massive(3@layers.1,value=0,above=0.1)"],
    "weights": SCALED,
    **{f"weights {after}": [one + after for one in SCALED] for after in ("+absmax", "+plant(3,factor=8)")},
    "weights and edges under a scheme": [f"{one}+zero(3@q)+llm.int8+alpha=1" for one in SCALED],
}


@pytest.mark.parametrize("written", STREAMED.values(), ids=STREAMED)
def test_a_streamed_model_has_the_same_perplexities(written, models, blocks):
    """And the hash of what it read is that of its weights."""
    resident, streamed = (perplexities(model, blocks, list(map(outliers.variant, written))) for model in models)
    assert resident == streamed
    assert len({*resident, perplexity(models[0], blocks)}) == len(written) + 1
    assert models[1].stream.weights_hash() == stream_model(MODEL).stream.weights_hash()


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


def test_what_needs_a_trace_or_a_calibration_says_so(models, blocks):
    mean = Together((Quantized(SCHEME), Ablated(Intervention((1, 2), "mean"))))
    smooth = outliers.variant("zero(1)+absmax+smoothing")
    for variant, needs, message in (
        (mean, (True, False), "give it a trace"),
        (smooth, (False, True), "needs the magnitudes of the inputs"),
    ):
        assert (variant.needs_trace, variant.needs_calibration) == needs
        with pytest.raises(UserError, match=message):
            perplexities(models[0], blocks, [variant])
        known = variant.knowing(trace(models[0], blocks, STREAM, attention=False)) if variant is mean else variant
        known = pickle.loads(pickle.dumps(known.calibrated(calibrate(models[0], blocks))))
        assert not known.needs_trace and not known.needs_calibration
        one, other = (perplexities(model, blocks, [known]) for model in models)
        assert one == other != perplexities(models[0], blocks, [VARIANTS["ablation under a scheme"]])
    assert not any(variant.needs_trace or variant.needs_calibration for variant in VARIANTS.values())


def test_an_ablation_under_a_scheme_has_rows_of_its_own(tmp_path):
    fields = {"model": MODEL, "features": [1, 2], "block": 32, "blocks": 2}
    exact, rows = (
        [row for row in run(Ablation(**fields, scheme=scheme), tmp_path) if "subject" in row]
        for scheme in ("fp32", "absmax")
    )
    assert [{row["scheme"] for row in of_one} for of_one in (exact, rows)] == [{"fp32"}, {"absmax"}]
    changed = [row["value"] != old["value"] for row, old in zip(rows, exact, strict=True)]
    assert len(exact) == len(rows)
    assert sum(changed) > len(rows) / 2
    assert run(Ablation(**fields), tmp_path)[-len(exact) :] == exact
    row = run(Ablation(**fields, scheme="llm.int8", alpha=2), tmp_path)[-1]
    assert (row["alpha"], row["scheme_alpha"]) == (2, 2)


# Writing

PLACES_OF_SCHEMES = st.lists(
    st.sampled_from([*OF_EVERY_STACK, "attention", "layers.3", "layers.9:12", "*.down_proj"]), max_size=3
).map(tuple)
NUMBER = st.integers(0, 99_999)
FEATURES = st.lists(st.integers(0, 99_999), min_size=1, max_size=4).map(tuple)
NUMBERS = st.floats(1e-30, 1e30)
LAYERS = st.builds(lambda first, count: f"layers.{first}" + (f":{first + count}" if count else ""), NUMBER, NUMBER)
READERS = st.sampled_from([one for one in EDGE_PLACES if "norm" not in one])
EDGES = (
    READERS
    | st.builds("{}.{}".format, LAYERS, READERS)
    | st.builds("{}.heads.{}".format, LAYERS, NUMBER)
    | st.builds("heads.{}.{}".format, NUMBER, st.sampled_from(["q", "k", "v"]))
)
ABLATIONS = st.builds(
    Ablated,
    st.builds(Intervention, FEATURES, st.sampled_from(["zero", "mean", "shuffle"]), st.integers(0, 2**63 - 1)),
    st.lists(EDGES, min_size=1, max_size=3).map(tuple),
)
WEIGHTS = st.builds(
    Scaled,
    st.builds(WeightEntry, st.sampled_from(["lm_head", "model.layers.11.mlp.down_proj"]), st.none() | NUMBER, NUMBER),
    st.floats(allow_nan=False, allow_infinity=False),
)
PLANTS = st.builds(Planted, FEATURES, NUMBERS)
UNATTENDED = st.builds(Unattended, FEATURES)
MASSIVE = st.builds(Massive, FEATURES, NUMBER, st.floats(allow_nan=False, allow_infinity=False), NUMBERS)
REMEDIES = ["", "+hadamard", "+tokens=20@ffn_out+smoothing=0.75", "+clip=0.99"]
NAMES = [f"{name}{remedy}" for name in (*SCHEMES, "w4a8-g64") for remedy in REMEDIES if name != "fp32"]
NAMES = [name for name in NAMES if "clip" not in name or get_scheme(name.partition("+")[0]).activations]
QUANTIZED = st.builds(
    Quantized,
    st.builds(get_scheme, st.sampled_from(NAMES), st.none() | NUMBERS),
    skip=PLACES_OF_SCHEMES,
    only=PLACES_OF_SCHEMES,
)
PEERS = st.builds(Bitsandbytes, NUMBERS)
OTHER = ABLATIONS | MASSIVE | UNATTENDED | PLANTS | WEIGHTS
OTHERS = st.lists(OTHER, min_size=1, max_size=3)
CACHES = st.builds(
    CacheFormat, st.sampled_from(["int2", "int8"]), st.none() | NUMBER.filter(bool), NUMBER, NUMBER, st.booleans()
)
CACHED = st.builds(Cached, st.builds(Formats, CACHES, st.none() | CACHES))
TOKENS = st.lists(st.integers(0, 999), min_size=1, max_size=3).map(tuple)
PREFIXES = st.builds(Prefixed, TOKENS) | st.builds(Prefixed, st.none(), st.none() | st.integers(1, 9))
SEVERAL = st.builds(
    lambda prefix, before, one, after, cache: Together((*prefix, *before, one, *after, *cache)),
    st.lists(PREFIXES, max_size=1),
    OTHERS,
    QUANTIZED,
    OTHERS,
    st.lists(CACHED, max_size=1),
)


@settings(max_examples=200)
@given(st.one_of(st.just(AS_IT_IS), OTHER, QUANTIZED, PEERS, CACHED, PREFIXES, SEVERAL))
@example(Massive((0,), 0, -0.0, 1.0))
@example(Scaled(WeightEntry("lm_head", 0, 0), -0.0))
def test_a_writing_is_read_as_what_was_written(variant):
    again = outliers.variant(variant.name)
    assert again == variant
    assert again.name == variant.name
    assert repr(again.fields()) == repr(variant.fields()), "so that its rows are found again"
    assert hash(again) == hash(variant)
    assert pickle.loads(pickle.dumps(variant)) == variant


@pytest.mark.parametrize(
    ("written", "variant"),
    {
        "fp32": AS_IT_IS,
        "shuffle(3@ffn_in,seed=1)": Ablated(Intervention((3,), "shuffle", 1), ("ffn_in",)),
        "zero(3@layers.9:12.k/norm)": Ablated(Intervention((3,)), ("layers.9:12.k", "norm")),
        "zero(model.layers.11.mlp.down_proj[507,1229])": Scaled(
            WeightEntry("model.layers.11.mlp.down_proj", 507, 1229)
        ),
        "scale(lm_head[:,3],factor=0.5)": Scaled(WeightEntry("lm_head", None, 3), 0.5),
        "massive(507@layers.11,value=-2.5,above=100)": Massive((507,), 11, -2.5, 100.0),
        "kv=int4": Cached(Formats(CacheFormat("int4"), CacheFormat("int4"))),
        "llm.int8+alpha=4": Quantized(get_scheme("llm.int8", 4)),
        "absmax+only=ffn_out+skip=layers.0:2/*.c_fc": Quantized(
            SCHEMES["absmax"], ("layers.0:2", "*.c_fc"), ("ffn_out",)
        ),
        "bitsandbytes": Bitsandbytes(),
        "zero(3)+bitsandbytes+alpha=4": Together((Ablated(Intervention((3,))), Bitsandbytes(4))),
        "plant(3,factor=8)+zero(3)+absmax+hadamard": Together(
            (Planted((3,), 8.0), Ablated(Intervention((3,))), Quantized(get_scheme("absmax+hadamard")))
        ),
    }.items(),
)
def test_writings(written, variant):
    assert outliers.variant(written) == variant
    assert variant.name == written


@pytest.mark.parametrize(
    ("written", "canonical"),
    {
        "zero(3, 17)": "zero(3,17)",
        "zero(247@k,v)": "zero(247@k/v)",
        "zero(lm_head.weight[1, :])": "zero(lm_head[1,:])",
        "plant(3,factor=1e+20)": "plant(3,factor=1e20)",
        "shuffle(3@attn_in,seed=0)": "shuffle(3)",
        "llm.int8+alpha=6": "llm.int8",
        "absmax+skip=ffn_in+hadamard": "absmax+hadamard+skip=ffn_in",
        "fp32+zero(3)": "zero(3)",
        "scale(model.x[1, :],factor=0)": "zero(model.x[1,:])",
        "against(a.gguf,only=ffn_out/attn_in)": "against(a.gguf,only=ffn_out/attn_in)",
    }.items(),
)
def test_other_writings_of_the_same(written, canonical):
    assert outliers.variant(written).name == canonical


def test_what_does_nothing_is_not_written():
    nothing = Ablated(Intervention(()))
    assert [one.name for one in (nothing, Together(()), Together((AS_IT_IS, nothing)))] == ["fp32"] * 3
    assert Together((AS_IT_IS, nothing, VARIANTS["planted"])).name == "plant(3,factor=8)"


@pytest.mark.parametrize(
    ("written", "message"),
    {
        "": "'' is not a variant; expected one such as absmax",
        "zero": "'zero' is malformed; expected a term such as zero",
        "zero(3@ffn_out)": "unknown place 'ffn_out'; did you mean ffn_norm or ffn_in",
        "zero(3,sed=1)": "unknown option of 'zero' 'sed'; did you mean seed",
        "zero(3,seed=-1)": "has the seed -1; expected a whole number",
        "zero(3,seed=1,seed=2)": "has an option twice",
        "massive(3@layers.1,value=0)": "lacks a layer, a value or a magnitude; expected massive(FEATURE@layers.LAYER",
        "massive(3@layers.1,value=inf,above=1)": "has inf and 1.0; expected a finite value",
        "unattended(0@q)": "has a place; expected positions of a sequence alone",
        "plant(3)": "has no factor, or has a place; expected",
        "plant(3,factor=0)": "the factor of 'plant(3,factor=0)' is 0; expected a positive number",
        "absmax+skip=": "has an option twice or without a value; expected",
        "absmax+alpha=4": "has no threshold of outliers, which alpha=4 would change; expected",
        "bitsandbytes+hadamard": "expected bitsandbytes, or its threshold of outliers as in bitsandbytes+alpha=4",
        "bitsandbytes+alpha=4+alpha=5": "expected bitsandbytes, or its threshold of outliers",
        "bitsandbytes+alpha=0": "the threshold of bitsandbytes is 0; expected a positive number",
        "zero(3@x)": "unknown place 'x'; known: attn_in, ffn_in, q, k, v",
        "zero(3@blocks.1.)": "unknown place",  # and of TransformerLens what no projection reads
        **{f"zero(3@blocks.1.{name})": "unknown place" for name in ("ln1.hook_normalized", "mlp.hook_post")},
        "zero(3@layers.2:2.q)": "place 'layers.2:2.q' has nothing in it; expected",
        "zero(3@heads.1.up)": "place 'heads.1.up' has nothing in it; expected",
        "mean(3@norm)": "the mean of what a norm reads, as 'norm' asks for it, is not known; expected zero or shuffle",
        "zero(model.x[1,2]@q)": "is malformed",
        "mean(model.x[1,2])": "unknown variant of a weight 'mean'; known: zero, scale",
        "scale(model.x[1,2])": "has no factor; expected one: scale(model.x[1,2],factor=0.5)",
        "scale(model.x[1,2],factor=inf)": "has the factor inf; expected a finite number",
        **dict.fromkeys(("against()", "against(a(b))", "against"), "is malformed; expected the name of a model"),
        "against(a)+against(b)": "has several terms that stand first; expected one prefix, or one other model",
    }.items(),
)
def test_what_cannot_be_read_is_refused(written, message):
    with pytest.raises(UserError, match=re.escape(message)):
        outliers.variant(written)


def test_a_scheme_of_ones_own_is_written_by_its_name(monkeypatch):
    mine = Quantized(replace(SCHEMES["llm.int8"], name="mine", outlier_threshold=3.0), only=("ffn_in",))
    assert mine.name == "mine+only=ffn_in"
    with pytest.raises(UserError, match="unknown scheme 'mine'"):
        outliers.variant(mine.name)
    monkeypatch.setitem(SCHEMES, "mine", mine.scheme)
    assert outliers.variant(mine.name) == mine


def test_to_read_takes_no_torch():
    """So that a mistake is refused at once."""
    read = "outliers.variant('plant(3,factor=8)+mean(3)+w4+skip=ffn_in')"
    code = f"import sys, outliers; {read}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# Places


@pytest.mark.parametrize(
    ("places", "is_inside"),
    [
        ({"only": ("ffn_in",)}, lambda one: one.role == "ffn_in"),
        ({"skip": ("attn_out",)}, lambda one: one.role != "attn_out"),
        ({"only": ("layers.1",)}, lambda one: one.layer == 1),
        ({"skip": ("layers.1:2",)}, lambda one: one.layer == 0),
        ({"skip": ("layers.0",), "only": ("ffn_in", "ffn_out")}, lambda one: one.layer and one.role[:3] == "ffn"),
    ],
)
def test_places_are_roles_and_layers(places, is_inside, models):
    parts = list(projections(models[0]))
    with Quantized(SCHEMES["absmax"], **places).on(models[0]) as changed:
        found = {one.path for one in projections(changed) if isinstance(one.module, QuantizedLinear)}
    assert found == {one.path for one in parts if is_inside(one)}


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"skip": ("ffn_ot",)}, "unknown place in skip 'ffn_ot'; did you mean ffn_out"),
        ({"only": ("layers.99",)}, "only has 'layers.99', of a model with"),
        ({"only": ("layers.1:1",)}, "only has 'layers.1:1', of a model with"),
        ({"only": "ffn_in"}, "only is 'ffn_in'; expected a list of places"),
        ({"skip": (5,)}, "skip is (5,); expected a list of places"),
        ({"only": ("ffn_in",), "skip": ("*.mlp",)}, "and only=['ffn_in'] leaves nothing for scheme 'absmax'"),
        ({"only": ("attention",)}, "and only=['attention'] leaves nothing for scheme 'absmax'"),
    ],
)
def test_places_that_there_are_not(places, message, models, blocks):
    for model in models:
        with pytest.raises(UserError, match=re.escape(message)):
            perplexities(model, blocks, [Quantized(SCHEMES["absmax"], **places)])
        with pytest.raises(UserError, match="feature 999 is out of range"):
            perplexities(model, blocks, [outliers.variant("zero(1,999)")])


@pytest.mark.parametrize(
    ("case", "written", "message"),
    [
        ("olmo2", "zero(3@norm)", "place 'norm': layer 0 has no such reader"),
        ("gpt2", "zero(3@layers.1:3.q)", "place 'layers.1:3.q' in a model of 2 layers; expected some of layers.0:2"),
        ("gpt2", "zero(3@layers.0.heads.4)", "'layers.0.heads.4': layer 0 has 4 heads; expected one of 0 to 3"),
        ("gpt2", "massive(99@layers.0,value=0,above=1)", "feature 99"),
        ("llama", "zero(model.norm[0,0])", "'model.norm' is float32 of shape (32,); expected floating-point numbers"),
        ("mixtral", "zero(model.layers.0.mlp.experts.down_proj[0,0])", "is float32 of shape (4, 32, 48); expected"),
        ("llama", "zero(model.layers.1.mlp.down_proj[32,0])", "has the output 32; expected one of 0 to 31"),
        ("gpt2", "zero(transformer.h.0.attn.c_attn[96,:])", "has the output 96; expected one of 0 to 95"),
    ],
)
def test_what_a_model_has_not(case, written, message):
    """Said of its values, and of its shapes alone."""
    model, one = make_model(case), outliers.variant(written)
    with pytest.raises(UserError, match=re.escape(message)):
        perplexities(model, torch.arange(24).view(2, 12), [one])
    with pytest.raises(UserError, match=re.escape(message)):
        one.check(model.to("meta"))


def test_places_are_fields(models):
    fields = outliers.variant("w4a8+only=layers.1/ffn_in+skip=*.c_proj").fields(models[0])
    assert (fields["scheme"], fields["only"], fields["skip"]) == ("w4a8", ["ffn_in", "layers.1"], ["*.c_proj"])
    of_ffn_in = [outliers.variant(name).fields(models[0]) for name in ("w4a8+only=ffn_in", "w4a8")]
    assert of_ffn_in[0]["weight_bits"] != of_ffn_in[1]["weight_bits"]


@pytest.mark.parametrize(
    ("written", "layer"),
    {
        "fp32": "all",
        "absmax": 0,
        "absmax+only=layers.1": 1,
        "fp32+instead=w4a4@layers.1": 1,
        "fp32+attention+skip=*.0.*products+instead=w4a4@layers.0": 0,
        "plant(3,factor=8)": 0,
        "massive(3@layers.1,value=0,above=1)": 1,
        "zero(3)+absmax+only=layers.1": 0,
        "zero(3@layers.1.q)": 1,
        "zero(3@heads.1)": 0,
        "zero(transformer.h.1.mlp.c_fc[0,0])": 1,
    }.items(),
)
def test_the_first_layer_that_changes(written, layer, models):
    for model in models:
        want = model.config.num_hidden_layers if layer == "all" else layer
        assert outliers.variant(written).first_layer(model) == want
    assert Together(()).first_layer(models[0]) == models[0].config.num_hidden_layers
    assert Ablated(Intervention(())).first_layer(models[0]) == models[0].config.num_hidden_layers


def test_a_scheme_instead_of_none_quantizes(models):
    quantized = outliers.variant("fp32+instead=w4a4@layers.1")
    assert (quantized.is_exact, quantized.has_output_errors) == (False, True)
    assert quantized.fields(models[0])["instead"] == ["w4a4@layers.1"]
