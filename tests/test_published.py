"""Facts of others beside what models show: files of facts, and models with planted facts, true and false ones."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    BertConfig,
)

import outliers
from outliers.errors import UserError
from outliers.models.names import POCKET, short_name
from outliers.paper import agreement
from outliers.paper.agreement import AGREES, DIFFERS, NOT_MEASURED, NOT_RUN, verdicts
from outliers.paper.facts import Published, facts_of, read_sources
from outliers.report.__main__ import report as command
from outliers.terminal.command import run
from tests.conftest import CONFIGS, needs_smollm2
from tests.test_families import BERT
from tests.test_masked import tokenizer

SOURCE = {"name": "mine", "source": "Somebody, 2026", "where": "nowhere", "licence": "MIT", "protocol": "any"}
FEATURE, UNIT, LARGE = 5, 7, 3000.0


def write_facts(folder: Path, *facts: dict, **fields) -> Path:
    """A file of facts, of blocks of 32 tokens."""
    file = folder / "facts.yaml"
    facts = [{"model": "some/model", "block": 32} | fact for fact in facts]
    file.write_text(yaml.safe_dump(SOURCE | {"facts": facts} | fields))
    return file


def save(model, folder: Path) -> Path:
    """A model's folder, with a tokenizer."""
    model.save_pretrained(folder)
    for file in (POCKET / "gpt2-0.1m").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def build(case: str):
    torch.manual_seed(0)
    kind, fields = CONFIGS[case]
    config = AutoConfig.for_model(kind, vocab_size=4096, bos_token_id=0, eos_token_id=0, pad_token_id=0, **fields)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def plant_weight(model, case: str) -> None:
    """Let unit 7 of the second layer be large, and one weight carry it into feature 5."""
    if case == "gpt2":
        of_layer = model.transformer.h[1].mlp
        of_layer.c_fc.bias[UNIT] = 100
        of_layer.c_proj.weight[UNIT, FEATURE] = 5
    elif case == "opt":
        of_layer = model.model.decoder.layers[1]
        of_layer.fc1.bias[UNIT] = 100
        of_layer.fc2.weight[FEATURE, UNIT] = 5
    else:
        of_layer = model.model.layers[1].mlp
        of_layer.gate_proj.weight[UNIT] *= 300
        of_layer.up_proj.weight[UNIT] *= 300
        of_layer.down_proj.weight[FEATURE, UNIT] = 5


@torch.no_grad()
def plant_position(model) -> None:
    """Let position 0 of a GPT-2 have a massive activation in feature 5, to which all heads attend."""
    width = model.config.n_embd
    model.transformer.wpe.weight[0, FEATURE] = LARGE
    for layer in model.transformer.h:
        layer.attn.c_attn.bias[:width] = 1
        layer.attn.c_attn.weight[FEATURE, width : 2 * width] = 10


def plant_norms(folder: Path) -> Path:
    """A BERT whose layers end in norms with an outlier weight and, in all but one layer, an outlier bias."""
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(BertConfig(**BERT | {"num_hidden_layers": 5}))
    for number, layer in enumerate(model.bert.encoder.layer):
        layer.output.LayerNorm.weight.data[FEATURE] = 20
        layer.output.LayerNorm.bias.data[UNIT] = -20 if number else 0
        layer.output.LayerNorm.bias.data[UNIT + 1] = -20 if number > 1 else 0
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def plant_patch(folder: Path) -> Path:
    """A ViT for which the third of 17 positions has a massive activation."""
    shutil.copytree(POCKET / "vit-0.3m", folder)
    model = AutoModelForImageClassification.from_pretrained(folder)
    model.vit.embeddings.position_embeddings.data[0, 2, FEATURE] = LARGE
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> dict[str, Path]:
    """Folders of models with and without plants."""
    folder = tmp_path_factory.mktemp("planted")
    found = {"plain": save(build("gpt2"), folder / "plain"), "experts": save(build("mixtral"), folder / "experts")}
    for case in ("gpt2", "opt", "llama"):
        model = build(case)
        plant_weight(model, case)
        found[f"weight-{case}"] = save(model, folder / f"weight-{case}")
    position = build("gpt2")
    plant_position(position)
    found["position"] = save(position, folder / "position")
    found["norms"] = plant_norms(folder / "norms")
    found["patch"] = plant_patch(folder / "patch")
    found["features"] = save(outliers.plant(build("llama"), [3, 17], 64.0), folder / "features")
    return found


def verdict(folder: Path, tmp_path: Path, **fact):
    """What becomes of one fact about a model."""
    (source,) = read_sources([write_facts(tmp_path, fact)])
    (found,) = verdicts(str(folder), [Published(source.facts[0], source)])
    return found


SUPER = {"kind": "super_weight"}
MASSIVE = {"kind": "massive_activation", "layers": [0, 1]}
OUTLIERS = {"kind": "outlier_features", "criterion": "llm.int8"}
FIRST = {"kind": "outlier_features", "criterion": "position 0"}
NORM = {"kind": "outlier_features", "criterion": "layer norm"}
HIGH = {"kind": "high_norm", "norm": LARGE / 2}
SINK = {"kind": "sink", "position": 0}
PICTURES = {"block": None}
CASES = [
    *(
        (f"weight-{case}", SUPER | {"weights": [weight]}, agrees)
        for case in ("gpt2", "opt", "llama")
        for weight, agrees in (([1, FEATURE, UNIT], True), ([1, FEATURE], True), ([1, FEATURE, UNIT + 1], False))
    ),
    ("weight-opt", SUPER | {"weights": [[0, FEATURE, UNIT]]}, False),
    ("weight-opt", SUPER | {"weights": [[1, FEATURE + 1, UNIT]]}, False),
    ("weight-opt", SUPER | {"weights": [[1, FEATURE, UNIT], [1, FEATURE, UNIT + 1]]}, False),
    ("weight-opt", SUPER | {"weights": [[9, FEATURE, UNIT]]}, False),
    ("position", MASSIVE | {"features": [FEATURE], "position": 0, "magnitude": [LARGE, LARGE]}, True),
    ("position", MASSIVE, True),
    ("position", MASSIVE | {"features": [FEATURE + 1]}, False),
    ("position", MASSIVE | {"features": [FEATURE, FEATURE + 1]}, False),
    ("position", MASSIVE | {"position": 1}, False),
    ("position", MASSIVE | {"magnitude": [LARGE / 2, LARGE / 1.5]}, False),
    ("position", MASSIVE | {"layers": [0, 2]}, False),
    ("plain", MASSIVE, False),
    ("features", OUTLIERS | {"features": [3, 17]}, True),
    ("features", OUTLIERS | {"features": [3, 4]}, False),
    ("position", FIRST | {"features": [FEATURE]}, True),
    ("position", FIRST | {"features": [FEATURE + 1]}, False),
    ("norms", NORM | {"features": [FEATURE, UNIT]}, True),
    ("norms", NORM | {"features": [FEATURE, UNIT + 1]}, False),  # an outlier in three layers
    ("norms", OUTLIERS | {"features": [FEATURE, UNIT]}, True),
    ("position", HIGH | {"share": 1 / 32}, True),
    ("position", HIGH | {"share": 1 / 10}, False),
    ("position", HIGH | {"layer": 0}, True),
    ("position", HIGH | {"layer": 9}, False),
    ("position", HIGH | {"norm": 2 * LARGE}, False),
    ("plain", HIGH, False),
    ("plain", HIGH | {"share": 0.0}, True),
    ("patch", PICTURES | HIGH | {"share": 1 / 17}, True),
    ("patch", PICTURES | HIGH | {"share": 1 / 4}, False),
    ("patch", PICTURES | MASSIVE | {"features": [FEATURE], "position": 2}, True),
    ("patch", PICTURES | MASSIVE | {"features": [FEATURE], "position": 1}, False),
    ("patch", PICTURES | FIRST | {"features": [FEATURE]}, False),
    ("position", SINK | {"share": 1.0}, True),
    ("position", SINK | {"share": 0.4}, False),
    ("position", {"kind": "sink", "position": 40, "share": 0.5}, False),
    *(("plain", {"kind": "none", "of": of}, True) for of in ("massive_activation", "super_weight")),
    ("position", {"kind": "none", "of": "massive_activation"}, False),
    ("weight-opt", {"kind": "none", "of": "super_weight"}, False),
    ("features", {"kind": "none", "of": "outlier_features"}, False),
]


@pytest.mark.parametrize(("model", "fact", "agrees"), CASES)
def test_planted_facts(planted, tmp_path, model, fact, agrees):
    found = verdict(planted[model], tmp_path, **fact)
    assert found.agreement == (AGREES if agrees else DIFFERS), found
    assert found.made.get("block") == (None if model == "patch" else 32)
    assert found.made["weights_hash"]


def test_what_is_largest_without_a_spike_is_no_super_weight(planted, tmp_path):
    model, tokenizer = (load(str(planted["plain"])) for load in (outliers.load_model, outliers.load_tokenizer))
    seen = agreement.look(model, outliers.load_text("sample", tokenizer, 32, agreement.BLOCKS), tokenizer, False)
    weight = [1, int(seen.outputs[1].argmax()), int(seen.inputs[1].argmax())]
    found = verdict(planted["plain"], tmp_path, **SUPER | {"weights": [weight]})
    assert found.agreement == DIFFERS
    assert f"output {weight[1]} " in found.measured


def test_perplexities(planted, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "One of my documents, which is not long. It is repeated."}\n' * 20)
    model, tokenizer = (load(str(planted["plain"])) for load in (outliers.load_model, outliers.load_tokenizer))
    value = outliers.perplexity(model, outliers.load_text(str(text), tokenizer, block=32))
    fact = {"kind": "perplexity", "text": str(text), "value": value}
    assert verdict(planted["plain"], tmp_path, **fact).agreement == AGREES
    assert verdict(planted["plain"], tmp_path, **fact | {"value": 1.02 * value}).agreement == DIFFERS
    assert verdict(planted["plain"], tmp_path, **fact | {"under": "int8"}).agreement == NOT_MEASURED


@pytest.mark.parametrize(
    ("model", "fact", "reason"),
    [
        ("plain", NORM | {"features": [FEATURE]}, "no norm ends the layers of this model"),
        ("plain", HIGH | PICTURES, "about pictures (block: null), and the model reads text"),
        ("patch", HIGH, "about blocks of 32 tokens, and the model reads pictures"),
        ("patch", PICTURES | NORM | {"features": [FEATURE]}, "no norm ends the layers of this model"),
        ("patch", PICTURES | {"kind": "perplexity", "text": "sample", "value": 1.0}, "has no perplexity on a text"),
        ("experts", SUPER | {"weights": [[0, 1, 2]]}, "not every layer of this model has one second feed-forward"),
        ("plain", MASSIVE | {"block": 512}, "blocks of 512 tokens are longer than the model's context of 64"),
        ("plain", {"kind": "perplexity", "text": "nothing", "value": 1.0}, "unknown text 'nothing'"),
        (None, MASSIVE, "unknown model 'pocket/nothing'"),
    ],
)
def test_what_cannot_be_run(planted, tmp_path, model, fact, reason):
    found = verdict(planted[model] if model else "pocket/nothing", tmp_path, **fact)
    assert found.agreement == NOT_RUN
    assert reason in found.reason
    assert not found.made


def test_a_criterion_that_is_not_measured(planted, tmp_path):
    fact = {"kind": "outlier_features", "criterion": "six sigma", "features": [FEATURE]}
    assert verdict(planted["norms"], tmp_path, **fact).agreement == NOT_MEASURED


def test_facts_that_share_blocks_share_a_trace(planted, tmp_path, monkeypatch):
    looks, look = [], agreement.look
    monkeypatch.setattr(agreement, "look", lambda *given: looks.append(given) or look(*given))
    facts = [MASSIVE, {"kind": "none", "of": "super_weight"}, MASSIVE | {"block": 16}]
    (source,) = read_sources([write_facts(tmp_path, *facts)])
    found = verdicts(str(planted["position"]), [Published(fact, source) for fact in source.facts])
    assert [one.made["block"] for one in found] == [32, 32, 16]
    assert len(looks) == 2


def call(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["report", "published", *map(str, arguments)])
    try:
        run(command)
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"facts": [{"kind": "superweight", "model": "a", "weights": [[1, 2, 3]]}]}, "line 2, field 'facts.0'"),
        ({"facts": [{"kind": "super_weight", "model": "a"}]}, "weights"),
        ({"facts": [{"kind": "super_weight", "model": "a", "weights": [[1]]}]}, "weights.0"),
        ({"facts": [{"kind": "sink", "model": "a", "position": -1, "share": 0.5}]}, "position"),
        ({"facts": [{"kind": "sink", "model": "a", "position": 1, "share": 0.5, "colour": 1}]}, "colour"),
        ({"facts": []}, "field 'facts'"),
        ({"licens": "MIT"}, "unknown field 'licens'; did you mean licence"),
    ],
)
def test_mistakes_in_a_file_are_one_line(tmp_path, monkeypatch, capsys, fields, message):
    code, said, errors = call(monkeypatch, capsys, write_facts(tmp_path, MASSIVE, **fields))
    assert (code, said, errors.count("\n")) == (2, "", 1)
    assert message in errors


@pytest.mark.parametrize("content", ["", "[1, 2]", "a: [", "name: mine\n"])
def test_what_is_no_file_of_facts(tmp_path, content):
    (tmp_path / "facts.yaml").write_text(content)
    with pytest.raises(UserError, match=r"facts\.yaml|field 'source'"):
        read_sources([tmp_path / "facts.yaml"])


def test_a_page_of_a_model(planted, tmp_path, monkeypatch, capsys):
    folder = planted["weight-opt"]
    weights = [[[1, FEATURE, UNIT]], [[1, FEATURE + 1, UNIT]]]
    file = write_facts(tmp_path, *({"model": folder.name, **SUPER, "weights": some} for some in weights))
    monkeypatch.chdir(tmp_path)
    code, said, _ = call(monkeypatch, capsys, file, folder)
    assert code == 0
    assert said.index("differs: super weight") < said.index("agrees: super weight")
    place = tmp_path / "results" / "published" / short_name(str(folder))
    assert {"published.md", "sources.csv", "rows.parquet", "report.html"} <= {one.name for one in place.iterdir()}
    page = (place / "report.html").read_text()
    for part in ("Somebody, 2026", "1[5, 7]", "differs", "agrees", f"outliers.report published {file} {folder}"):
        assert part in page


def test_a_page_of_a_masked_model(planted, tmp_path, monkeypatch, capsys):
    """One of the name of a public model, which it is not."""
    folder = shutil.copytree(planted["norms"], tmp_path / "bert-base-uncased")
    monkeypatch.chdir(tmp_path)
    code, said, _ = call(monkeypatch, capsys, folder)
    assert code == 0
    (line,) = (line for line in said.splitlines() if "308 and 381 (layer norm)" in line and "Puccetti" in line)
    assert "differs" in line and f"layer norm: {FEATURE} and {UNIT}" in line
    (line,) = (line for line in said.splitlines() if "(six sigma)" in line)
    assert "not measured" in line


def test_all_that_is_published_without_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agreement, "packaged_models", list)
    monkeypatch.setattr(agreement, "is_cached", lambda _model: False)
    code, said, _ = call(monkeypatch, capsys)
    assert code == 0
    assert "models: not on this machine" in said
    assert "super weight 2[3968, 7003]" in said
    assert "Nothing was measured." in (tmp_path / "results" / "published" / "report.html").read_text()


@pytest.mark.parametrize(
    ("model", "expected"), [("qwen", "did you mean qwen2.5-7b or"), ("UNKNOWN", "python -m outliers.report")]
)
def test_a_model_of_which_nothing_is_published(tmp_path, monkeypatch, capsys, model, expected):
    monkeypatch.chdir(tmp_path)
    code, said, error = call(monkeypatch, capsys, "gpt2", model)
    assert (code, said, error.count("\n"), list(tmp_path.iterdir())) == (2, "", 1, [])
    assert f"no fact about '{model.lower()}' is in the files; {expected}" in error
    assert "python -m outliers.report published --redraw lists all 58 models" in error


def test_redraw_runs_nothing(planted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, said, _ = call(monkeypatch, capsys, "gpt2", "--redraw")
    assert code == 0
    assert "--redraw measures nothing" in said


def test_what_stands_in_the_files():
    """The numbers that sources state, as they were looked up."""
    sources = read_sources()
    names = [source.name for source in sources]
    assert len(set(names)) == len(names)

    def said(model: str) -> set[str]:
        return {one.fact.claim for one in facts_of(sources, [model])}

    assert "super weight 2[3968, 7003]" in said("huggyllama/llama-7b")
    assert "super weights 1[1764, 1710] and 2[1764, 8041]" in said("allenai/OLMo-1B-0724-hf")
    assert {"super weight 1[2070, 7310]", "row 1[2070, :]"} <= said("mistralai/Mistral-7B-v0.1")
    assert "massive activations in layers 2 to 9, feature 447 at position 0, 2,480 to 3,024" in said("gpt2")
    assert {"perplexity on wikitext2 30.22", "perplexity on wikitext2 30.21, massive activations zero"} <= said("gpt2")
    assert "outlier features 138, 378 and 447 (position 0)" in said("gpt2")
    assert "no massive activation" in said("allenai/OLMo-2-1124-7B")
    assert "row 11[507, :]" in said("smollm2-135m")
    systems = ("5.70, QoQ W4A8KV4, groups of 128", "5.75, QoQ W4A8KV4", "5.73, FMPQ W4AxKV4")
    assert {f"perplexity on wikitext2 {one}" for one in systems} <= said("meta-llama/Llama-2-7b-hf")
    assert "perplexity on wikitext2 7.06, FireQ" in said("meta-llama/Meta-Llama-3-8B")
    assert {f"outlier features 308 and 381 ({by})" for by in ("layer norm", "llm.int8")} <= said("bert-base-uncased")
    assert "outlier features 77 and 588 (layer norm)" in said("FacebookAI/roberta-base")
    assert said("facebook/dinov2-giant") == {"2.4 % of the positions have a norm above 150 after the last layer"}
    assert said("facebook/dino-vitb16") == {"0 % of the positions have a norm above 150 after the last layer"}


@needs_smollm2
@pytest.mark.slow
def test_a_published_row_of_smollm2():
    (found,) = verdicts("smollm2-135m", facts_of(read_sources(), ["smollm2-135m"]))
    assert found.agreement == AGREES
    assert "input 1229" in found.measured
