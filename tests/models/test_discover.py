"""The anatomy that a pass finds, beside what is known and beside transformers' own modules."""

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from outliers import anatomy
from outliers.criterion import QUANTIZED
from outliers.errors import UserError
from outliers.models.anatomy import anatomy_of, found, layers_of
from outliers.models.anatomy.discovery import find_stacks
from outliers.models.anatomy.row import Anatomy
from scripts.every_type import tiny
from tests import conftest, small_models
from tests.subjects import test_families

CASES = [*conftest.CONFIGS, *conftest.VARIANTS, *test_families.CONFIGS]
RECURRENT_OR_LATENT = ("falcon_h1", "mamba2", "deepseek_v3")
# What the layers of models are, as somebody read it off transformers' code: for each case how many follow each other.
KNOWN = json.loads((Path(__file__).parent / "anatomies.json").read_text())
FIELDS = (*QUANTIZED, "norms", "norms_of_sums", "norms_behind", "norm_offset", "attention", "cross_attention")
FIELDS += ("experts", "bidirectional", "stack", "layers", "module", "config", "residual_scale")
FIELDS += ("by_head", "fused_gate", "alibi", "window", "padded_positions", "router", "recurrent", "states")
ADDED = ("positions", "embedding_norm")


@pytest.mark.parametrize("case", [*CASES, *RECURRENT_OR_LATENT])
def test_a_pass_finds_what_is_known(case):
    of_another_family = case in test_families.CONFIGS
    make = test_families.made if of_another_family else tiny if case in RECURRENT_OR_LATENT else small_models.make_model
    fields, found = FIELDS if of_another_family else (*FIELDS, *ADDED), []
    for layer in layers_of(make(case)):
        parts = {name: getattr(layer.anatomy, name) for name in fields}
        for role in ("ffn_in", "ffn_out"):  # test_experts.py compares what experts consist of
            parts[role] = [name for name in parts[role] if not name.startswith(f"{layer.anatomy.experts}.")]
        found.append(json.loads(json.dumps({name: value for name, value in parts.items() if value})))
    assert [[len([*alike]), layer] for layer, alike in itertools.groupby(found)] == KNOWN[case]


def test_what_was_found_is_kept(constants, tmp_path):
    """In the user's cache, for the configuration, not for its name; what is damaged there is found again."""
    constants(found.__name__, CACHE=tmp_path)
    configs = [AutoConfig.for_model("phi", **conftest.LLAMA, num_labels=7, name_or_path=name) for name in "ab"]
    first = anatomy_of(configs[0])
    assert anatomy_of(configs[0]) is first and anatomy_of(configs[1]) == first
    (file,) = (tmp_path / "anatomy").iterdir()
    kept, changed = file.read_text(), file.read_text().replace("q_proj", "k_proj")
    for content, same in ((kept[:-20], True), (changed, False)):
        file.write_text(content)
        found._by_key.clear()
        assert (anatomy_of(copy.deepcopy(configs[0])) == first) is same
    found._by_key.clear()


def test_the_anatomy_command_shows_roles_shapes_and_what_stays_exact(capsys, monkeypatch):
    """DeepSeek-V3 in its default size, of which no weights are there."""
    monkeypatch.setenv("COLUMNS", "200")
    from outliers.app import command_of

    command_of("anatomy")(["deepseek_v3"])
    text = capsys.readouterr().out
    assert text.startswith("deepseek_v3: causal, 61 layers of 2 kinds, 7,168 features, 671B parameters.")
    (mid,) = [line.split() for line in text.splitlines() if "q_b_proj" in line][:1]
    assert mid[:3] == ["self_attn.q_a_layernorm", "attn_mid", "self_attn.q_b_proj"]
    assert "Layers 0–2: " in text and "Layers 3–60: " in text
    (router,) = [line.split()[1:3] for line in text.splitlines() if " router " in line]
    assert router == ["router", "mlp.gate"]


def test_every_weight_of_a_layer_is_in_its_anatomy():
    """Of a recurrent layer, which has weights that are not called, or are no matrices."""
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=100)
    found = anatomy(config)
    assert list(found.table.query("kind == 0")["module"]) == [
        *("mixer.in_proj", "mixer.x_proj", "mixer.out_proj", "mixer.dt_proj", "mixer.A_log", "mixer.conv1d")
    ]
    assert list(found.table["role"]) == ["attn_in", "attn_mid", "attn_out", "–", "–", "–"]
    quantized, others = 32 * 128 + 64 * 10 + 64 * 32, (2 * 64 + 64, 4 * 64, 4 * 64 + 64)
    assert found.quantized == pytest.approx(100 * quantized / (quantized + sum(others)))


UNHEARD_OF = PretrainedConfig()
UNHEARD_OF.model_type = "olmo9"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (UNHEARD_OF, r"unknown architecture 'olmo9' .*similar: olmo.*newer transformers"),
        ("beit", "unknown architecture 'beit': transformers makes no language model of it"),
        ("cohere_compass_text", "^cannot build a model of type"),
        ("nowhere/x", "nowhere"),
    ],
)
def test_what_has_no_anatomy(name, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=said):
        anatomy(name)


class Stacked(PreTrainedModel):
    """An embedding, and two layers of a class."""

    config_class = PretrainedConfig

    def __init__(self, layer: type[nn.Module]):
        super().__init__(PretrainedConfig())
        self.tokens = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


WIDTH = 24


class Parts(nn.Module):
    """What layers below are made of."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into, self.other, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.filter = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.gate = nn.Linear(WIDTH, 1, bias=False)


class Scan(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.into(self.norm(x)).cumsum(1))


class Convolution(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.filter(self.into(self.norm(x)).mT).mT)


class NormedValues(Parts):
    """Attention whose values are the normed states themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        scores = self.into(normed) @ self.other(normed).mT
        return x + self.out(scores.softmax(-1) @ normed)


class ScaledSum(Parts):
    """A projection of the stream to itself, of which half is added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * self.into(self.norm(x))


class RouterInDouble(Parts):
    """A gate that multiplies with a copy of its weight in another dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.linear(x.double(), self.gate.weight.double()).sigmoid()
        return x + self.out(self.into(x).relu()) * gate.to(x.dtype)


def kind_of(layer: type[nn.Module]) -> Anatomy:
    with torch.device("meta"):
        model, ids = Stacked(layer), torch.zeros(1, 13, dtype=torch.int64)
    (stack,) = find_stacks(model, {"input_ids": ids})
    assert stack.kind_numbers == (0, 0)
    return stack


@pytest.mark.parametrize("layer", [Scan, Convolution])
def test_a_scan_or_a_convolution_alone_mixes_positions(layer):
    kind = kind_of(layer)
    assert (kind.attn_in, kind.attn_out, kind.ffn_in) == (("into",), ("out",), ())
    assert kind.recurrent and not kind.attention


def test_what_attention_puts_out_was_not_normed():
    kind = kind_of(NormedValues)
    assert kind.norms == {"norm": ("attn_in",)} and kind.read_by == {"norm": ("into", "other")}


def test_a_projection_whose_scaled_output_is_added_is_no_router():
    kind = kind_of(ScaledSum)
    assert kind.ffn_in == ("into",) and not kind.router


def test_a_copied_weight_is_that_of_its_module():
    kind = kind_of(RouterInDouble)
    assert (kind.router, kind.ffn_in, kind.ffn_out) == (("gate",), ("into",), ("out",))
