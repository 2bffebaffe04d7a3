"""Types of models that no table has, as scripts/every_type.py tries them; what is refused if a pass was wrong."""

import itertools
import math
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from outliers import adopt, damage, hooks, load_model, perplexities, perplexity, plant, quantize, trace, variant
from outliers.errors import UserError
from outliers.models.anatomy import OWN, layers_of, projections
from outliers.models.anatomy.experts import call_by_projection
from outliers.models.anatomy.found import _key
from outliers.models.hooks import attached
from outliers.models.load import weights_hash
from outliers.models.names import CACHE
from outliers.models.stream import stream_model
from outliers.quantization.schemes import SCHEMES
from scripts.every_type import checks, loss_of, text_of, tiny, tried
from tests import conftest
from tests.fake import product_under

NAMED = [
    *("mamba", "mamba2", "falcon_h1", "recurrent_gemma", "qwen3_next", "lfm2", "nemotron_h", "deepseek_v3"),
    *("gemma3n_text", "phi", "olmo3"),  # test_experts.py and the nightly sizes below have others
]
FEW = ("mamba", "nemotron_h")
# What a type refuses, and why; all else works.
REFUSED = {
    "gemma3n_text": {"stream": "reads what layer 2 has made"},
}


@pytest.mark.parametrize("kind", conftest.slow_but(NAMED, FEW))
def test_a_type_without_a_row_does_everything(kind):
    """Loss of transformers, traces, a planted feature, schemes, ablations, damage by layer and role, streaming."""
    found, refused = dict(tried(kind)), REFUSED.get(kind, {})
    assert {name: why for name, why in found.items() if why and name not in refused} == {}
    for name, why in refused.items():
        assert why in found[name]


SIZES = (  # in the place of the usual width, of the numbers of layers, heads and others, of units and of experts
    {64: 96, 4: 6, 96: 112, 48: 40, 8: 5},
    {64: 32, 4: 2, 96: 72, 48: 24, 8: 3},
)
RESIZED = [
    *("apertus", "bloom", "cohere2", "dots1", "ernie4_5_moe", "gemma2", "gemma3_text", "glm4_moe", "gpt2", "gpt_neox"),
    *("gptj", "granitemoe", "helium", "llama", "mamba", "mixtral", "olmo2", "phi", "qwen3_moe", "starcoder2"),
]


@pytest.mark.nightly("outliers/models/anatomy/", "scripts/every_type.py")
@pytest.mark.parametrize("sizes", SIZES, ids=("larger", "smaller"))
@pytest.mark.parametrize("kind", RESIZED)
def test_a_type_of_another_size_does_everything(kind, sizes):
    model, text = tiny(kind, sizes=sizes), text_of("causal")
    assert layers_of(model)[0].anatomy.width == sizes[64] and len(layers_of(model)) == sizes[4]
    expected = sum(loss_of(model, block) for block in text) / 2
    assert [name for name, check in checks(model, text, expected) if not check()] == []


EXACT = [
    *("cohere2", "deepseek_v3", "falcon_h1", "gemma3n_text", "lfm2", "llama4_text", "mamba", "nemotron_h", "olmo3"),
    "phi",
]


@conftest.in_turn("kind scheme", EXACT, ["absmax", "w4a4", "llm.int8"])
def test_a_loss_under_a_scheme_is_that_of_fake_quantization(kind, scheme):
    """That of transformers' own pass in float64, in which every projection computes the equation of the scheme."""
    model, text, outliers = tiny(kind).double(), text_of("causal"), []
    operands = SCHEMES[scheme].activations, SCHEMES[scheme].weights, SCHEMES[scheme].outlier_threshold
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.shape == (64,):
            parameter[::16] *= 8

    def fake(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        if not inputs[0].any():  # zeros, as Gemma 3n has them, have no scale
            return output
        outliers.append(bool((inputs[0].abs() >= 6).any()))
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        product = product_under(inputs[0].flatten(0, -2), weight, *operands)
        return (product if module.bias is None else product + module.bias).view(output.shape)

    def loss() -> float:
        return sum(loss_of(model, block) for block in text) / len(text)

    call_by_projection(model)
    found, exact = math.log(perplexity(quantize(model, scheme), text)), loss()
    handles = [part.module.register_forward_hook(fake) for part in projections(model)]
    with attached(handles):
        expected = loss()
    assert any(outliers)
    assert abs(found - expected) < 1e-7 < abs(expected - exact) / 100  # recurrences are in float32


PLANTED = ["nanochat", "minimax", "olmo2", "flex_olmo", "longcat_flash", "qwen4_exp_text", "inkling2_text"]


@pytest.mark.parametrize("kind", ["xmod", "fnet", "deberta"])
def test_a_feature_is_planted_within_layers(kind):
    """Adapters read the last norm's output, a Fourier transform, and queries without biases."""
    model, text = tiny(kind, "masked"), text_of("masked")
    found = trace(plant(model, [3], 64.0), text, attention=False).outlier_features(roles=["ffn_in"])
    assert 3 in list(found["feature"])


@pytest.mark.parametrize("kind", PLANTED)
def test_a_feature_is_planted_beside_the_weights_of_norms(kind):
    """Norms without weights, norms through which the stream goes, norms of what sub-layers add, a mixture, experts that
    are no projections, several streams in one norm, and a norm of a norm's output."""
    model, ids = tiny(kind), torch.randint(3, 512, (2, 32))
    planted = plant(model, [3], 64.0)
    with torch.no_grad():
        assert torch.allclose(planted(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    before, after = (trace(one, ids, attention=False).statistics for one in (model, planted))
    for role in ("attn_in.squares", "ffn_in.squares"):
        assert torch.allclose(after[role][:, 3], 64**2 * before[role][:, 3], rtol=1e-3)


def test_a_plant_that_nothing_undoes_is_refused():
    model = small()
    plant(model, [3], 64.0)
    block = model.model.layers[0].mlp
    block.forward = MethodType(lambda self, x: type(self).forward(self, x) + x * x, block)
    with pytest.raises(UserError, match="more reads the norms' outputs than a pass has found"):
        plant(model, [3], 64.0)


def test_keys_that_are_no_positions_are_refused():
    """DeepSeek-V4 makes keys of several positions each, beside those of the positions."""
    model, ids = tiny("deepseek_v4"), torch.randint(3, 512, (1, 32))
    with pytest.raises(UserError, match="attention of layer 1 has 40 keys for 32 positions"):
        trace(model, ids)
    assert trace(model, ids, attention=False).roles


@pytest.mark.parametrize("kind", ["deepseek_v4", "qwen4_exp_text"])
def test_the_residual_stream_of_several_streams_is_their_mean(kind):
    """They are in an axis of their own, or one behind the other."""
    model, seen, ids = tiny(kind), {}, torch.randint(3, 512, (1, 24))
    layer = layers_of(model)[1]
    assert (layer.anatomy.streams, layer.anatomy.width) == (4, 64)
    handle = layer.module.register_forward_hook(lambda _module, _inputs, output: seen.update(state=output))
    with hooks(model, lambda layer, _role, x: seen.update({layer: x}), ["residual"]), torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    assert torch.equal(seen[1], seen["state"].view(24, 4, 64).mean(1))


def test_probabilities_within_windows_are_refused():
    """Longformer gives each query those of the keys around it."""
    model, text = tiny("longformer", "masked"), text_of("masked")
    with pytest.raises(UserError, match=r"attention of layer 0 gives probabilities of the shape \(1, 32, 4, 17\)"):
        trace(model, text)
    assert trace(model, text, attention=False).roles


def test_positions_that_are_no_tokens_are_refused(tmp_path):
    """CPM-Ant has a prompt of 32 positions before each text, over which kernels wrote beyond the end of counts."""

    def streamed(_model: nn.Module, ids: torch.Tensor) -> float:
        return perplexity(stream_model(str(tmp_path)), ids)

    model, ids = tiny("cpmant"), torch.randint(100, (1, 24))
    model.save_pretrained(tmp_path)
    for measured in (trace, partial(damage, scheme="absmax", by=["error"]), streamed):
        with pytest.raises(UserError, match="states of 56 positions for 24 tokens"):
            measured(model, ids)


def test_heads_that_read_more_than_the_last_states_are_refused():
    """ProphetNet predicts each token from states of their own."""
    with pytest.raises(UserError, match="the head of 'prophetnet' reads more than the last hidden states"):
        perplexity(tiny("prophetnet", "encoder-decoder"), text_of("encoder-decoder"))


@pytest.mark.parametrize(
    ("kind", "family", "why"),
    [
        ("xlm", "causal", r"in two lists, 'transformer\."),
        ("hrm_text", "causal", "run in turns"),
        ("squeezebert", "masked", "not of their forward methods"),
    ],
)
def test_layers_that_cannot_be_told_apart_are_refused(kind, family, why):
    with pytest.raises(UserError, match=why):
        layers_of(tiny(kind, family))


def albert() -> tuple[nn.Module, nn.Module]:
    """An ALBERT, and one with a layer of its own for each time that the first one calls its only layer."""
    model = tiny("albert", "masked")
    config = type(model.config).from_dict(model.config.to_dict() | {"num_hidden_groups": 4})
    written_out = type(model)(config).eval()
    groups = model.albert.encoder.albert_layer_groups
    first = groups[0].state_dict()
    written_out.load_state_dict(model.state_dict(), strict=False)
    for group in written_out.albert.encoder.albert_layer_groups:
        group.load_state_dict(first)
    return model, written_out


def test_a_layer_that_runs_several_times_is_several_layers():
    """In a trace, under schemes and ablations of some layers, and in damage by layer."""
    text, found = text_of("masked"), []
    for model in albert():
        statistics = trace(model, text).statistics
        variants = ["zero(3@layers.2)", "absmax", "llm.int8", "zero(3@layers.0.q)"]
        found.append(
            (
                {name: statistic.tolist() for name, statistic in statistics.items()},
                perplexities(model, text, list(map(variant, variants))),
                perplexity(quantize(model, "w4a4", only=["layers.1"]), text),
                damage(model, text, "absmax", by=["error", "layer", "role"]).layers.to_dict("list"),
                perplexity(plant(model, [3], 64.0), text),
            )
        )
    assert found[0] == found[1]


def test_the_calls_of_a_layer_are_counted_from_the_start_of_each_pass():
    """Also behind a pass that an error has ended in its second layer."""
    model, text = quantize(albert()[0], "absmax", only=["layers.0"]), text_of("masked")
    expected = perplexity(model, text)
    second = layers_of(model)[1].module
    handle = second.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        perplexity(model, text)
    handle.remove()
    assert perplexity(model, text) == expected


def test_a_layer_that_runs_several_times_is_neither_streamed_nor_given_hooks(tmp_path):
    model = tiny("albert", "masked")
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"layer 'albert.* runs 4 times in a pass"):
        stream_model(str(tmp_path))
    with pytest.raises(UserError, match="runs 4 times in a pass"), hooks(model, print):
        pass


def small(kind: str = "phi") -> nn.Module:
    fields = {**conftest.LLAMA, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).eval()


def test_a_model_that_does_something_else_than_was_found_is_refused():
    """Logits that are not those of the layers and the head; losses, where logits are nearly the same, and steep; and a
    projection that runs twice."""
    blocks = torch.randint(100, (1, 24))
    perplexity(small(), blocks)
    for wrong, said in (
        (_scaled, "logits of 'phi' differ by"),
        (_steep, "the loss of 'phi' by its layers and its head"),
        (_twice, "fc1' of 'phi' runs 2 times in a pass"),
    ):
        with pytest.raises(UserError, match=said):
            perplexity(wrong(small()), blocks)


def _scaled(model: nn.Module, by: float = 1.0) -> nn.Module:
    """Its stack puts out other states each time."""
    stack, calls = model.model.forward, itertools.count()
    model.model.forward = lambda *args, **kwargs: BaseModelOutputWithPast(
        (1 + by * next(calls)) * stack(*args, **kwargs)[0]
    )
    return model


def _steep(model: nn.Module) -> nn.Module:
    model.lm_head.weight.data *= 200
    return _scaled(model, 4e-6)


def _twice(model: nn.Module) -> nn.Module:
    """Its first feed-forward projection runs twice."""
    block = model.model.layers[0].mlp
    forward = block.forward
    block.forward = lambda x: 0 * block.fc1(x).sum() + forward(x)
    return model


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("emu3", "causal"),  # the checkpoint names its class
        ("moss_transcribe_diarize", "causal"),  # its text part has no head of its own
        ("llava", "image-text"),
        ("aya_vision", "image-text"),  # its head scales no logits
        ("deepseek_vl", "image-text"),  # its head is its embedding
        ("qwen3_vl", "image-text"),  # transformers makes no text part alone
        ("minimax_m3_vl", "image-text"),  # names that the rules of the whole model alone know
        ("qwen3_vl_moe", "image-text"),  # and its experts are split by their size
        ("switch_transformers", "encoder-decoder"),  # experts by name
        ("t5gemma2", "encoder-decoder"),  # keys of both stacks in one softmax
    ],
)
def test_a_checkpoint_has_the_loss_that_transformers_has(kind, family, tmp_path):
    model, text = tiny(kind, family), text_of(family)
    expected = sum(loss_of(model, block) for block in text) / 2
    model.save_pretrained(tmp_path)
    assert math.log(perplexity(load_model(str(tmp_path)), text)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "family", "layers"),
    [("gemma3n_text", "causal", (3, 2)), ("gemma4_text", "causal", (3, 1)), ("pegasus_x", "encoder-decoder", (1, 0))],
)
def test_states_beside_the_stream_are_not_streamed(kind, family, layers, tmp_path):
    """Keys of an earlier layer, and PEGASUS-X's states of the whole text beside those of its tokens."""
    tiny(kind, family).save_pretrained(tmp_path)
    said = "layer {} of .* reads what layer {} has made, beside the residual stream".format(*layers)
    with pytest.raises(UserError, match=said):
        stream_model(str(tmp_path))


def test_a_block_that_layers_share_is_streamed(tmp_path):
    """Zamba's, of which a checkpoint holds one."""
    model, ids = tiny("zamba"), text_of("causal")
    model.save_pretrained(tmp_path)
    streamed = stream_model(str(tmp_path))
    assert perplexity(streamed, ids) == perplexity(model, ids)
    assert streamed.stream.weights_hash() == weights_hash(load_model(str(tmp_path)))


def assert_everything(model: nn.Module, own: nn.Module, ids: torch.Tensor) -> None:
    """The loss is that of one's own model, and all that needs no checkpoint works."""
    logits = [own(one[None]) for one in ids]
    logits = [getattr(one, "logits", one)[0, :-1].detach().double() for one in logits]
    losses = [nn.functional.cross_entropy(one, block[1:]) for one, block in zip(logits, ids, strict=True)]
    found = {name: check() for name, check in checks(model, ids, float(sum(losses) / 2)) if name != "stream"}
    assert [name for name, passes in found.items() if not passes] == []


class OwnLayer(nn.Module):
    """A layer with other names than any in transformers, and its queries, keys and values in one projection."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.see, self.tell = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.see(self.first(x)).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        x = x + self.tell(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class OwnModule(nn.Module):
    """A model without any class of transformers, whose head is tied to its embedding."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.config, self.tokens = config, nn.Embedding(config.words, config.width)
        self.steps = nn.ModuleList(OwnLayer(config.width, config.heads) for _ in range(config.depth))
        self.end, self.words = nn.LayerNorm(config.width), nn.Linear(config.width, config.words, bias=False)
        self.words.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for step in self.steps:
            x = step(x)
        return self.words(self.end(x))


def test_a_plain_module_of_ones_own(tmp_path):
    """It is measured in all ways in which a model of transformers is, and stays as it is."""
    torch.manual_seed(0)
    module, ids = OwnModule(SimpleNamespace(words=100, width=32, heads=4, depth=3)).eval(), torch.arange(48).view(2, 24)
    with pytest.raises(UserError, match=r"or outliers\.adopt\(model\)"):
        perplexity(module, ids)
    model = adopt(module)
    anatomy = layers_of(model)[0].anatomy
    roles = [getattr(anatomy, role) for role in ("attn_in", "attn_out", "ffn_in", "ffn_out")]
    assert roles == [("see",), ("tell",), ("wide",), ("narrow",)] and layers_of(model)[2].path == "stack.module.steps.2"
    assert anatomy.norms == {"first": ("attn_in",), "second": ("ffn_in",)}
    assert_everything(model, module, ids)
    assert isinstance(module.words, nn.Linear) and module.words.weight is module.tokens.weight
    assert not list((CACHE / "anatomy").glob(f"{_key(model.config, OWN)}*")), "its code may change"


class Capped(OwnModule):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 3 * torch.tanh(super().forward(ids) / 3)


def test_a_module_whose_head_is_not_its_end_is_not_adopted():
    with pytest.raises(UserError, match="changes what its head 'words' puts out"):
        adopt(Capped(SimpleNamespace(words=100, width=32, heads=4, depth=1)))
