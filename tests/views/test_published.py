"""Facts of others beside what models show: files of facts, and models with planted facts, true and false ones."""

import csv
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageClassification

import outliers
from outliers.errors import UserError
from outliers.models.names import POCKET, short_name
from outliers.paper import agreement
from outliers.published.facts import COLUMNS, facts_of, read_facts
from tests.conftest import needs_smollm2
from tests.small_models import make_model
from tests.typed import call, refused

FEATURE, UNIT, LARGE = 5, 7, 3000.0


def write_facts(folder: Path, model: str, *lines: dict) -> Path:
    """A file of facts, of blocks of 32 tokens."""
    file = folder / "facts.csv"
    common = {"source": "Somebody, 2026", "model": model, "block": 32, "text": "sample", "fact": "this"}
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(common | line for line in lines)
    return file


def save(model, folder: Path) -> Path:
    """A model's folder, with a tokenizer."""
    model.save_pretrained(folder)
    for file in (POCKET / "gpt2-0.1m").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@torch.no_grad()
def plant_weight(model) -> None:
    """Let unit 7 of the second layer of an OPT be large, and one weight carry it into feature 5."""
    of_layer = model.model.decoder.layers[1]
    of_layer.fc1.bias[UNIT] = 100
    of_layer.fc2.weight[FEATURE, UNIT] = 5


@torch.no_grad()
def plant_position(model) -> None:
    """Let position 0 of a GPT-2 have a massive activation in feature 5, to which all heads attend."""
    width = model.config.n_embd
    model.transformer.wpe.weight[0, FEATURE] = LARGE
    for layer in model.transformer.h:
        layer.attn.c_attn.bias[:width] = 1
        layer.attn.c_attn.weight[FEATURE, width : 2 * width] = 10


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
    build = partial(make_model, vocabulary=4096)
    found = {"plain": save(build("gpt2"), folder / "plain")}
    weighted = build("opt")
    plant_weight(weighted)
    found["weight"] = save(weighted, folder / "weight")
    position = build("gpt2")
    plant_position(position)
    found["position"] = save(position, folder / "position")
    found["patch"] = plant_patch(folder / "patch")
    found["features"] = save(outliers.plant(build("llama"), [3, 17], 64.0), folder / "features")
    return found


def number(metric: str, column: str, published: object, where: str = "", tolerance: str = "") -> dict:
    """A line of a fact of a trace."""
    fields = {"metric": metric, "column": column, "published": published, "where": where, "tolerance": tolerance}
    return {"cell": "trace"} | fields


def weight(layer: int, output: int, input: int) -> list[dict]:
    """The lines of a super weight."""
    where = f"layer={layer} value=50.. spike=50.."
    both = {"output": output, "input": input}
    return [number("candidates.layer", *place, where) | {"cell": "candidates"} for place in both.items()]


BOTH = "layer=0..1"
MASSIVE, PICTURES = number("residual.massive", "value", "1..", BOTH), {"block": "", "text": ""}
CASES = {
    "weight": [
        (weight(1, FEATURE, UNIT), True),
        (weight(1, FEATURE, UNIT)[:1], True),  # a whole row
        (weight(1, FEATURE + 1, UNIT), False),
        (weight(9, FEATURE, UNIT), False),
    ],
    "position": [
        ([MASSIVE, number("residual.max", "feature", FEATURE, BOTH)], True),
        ([number("residual.max", "value", LARGE, BOTH, "10%")], True),
        ([number("residual.max", "value", f"{LARGE / 2}..{LARGE / 1.5}", BOTH, "10%")], False),
        ([MASSIVE, number("residual.max", "feature", FEATURE + 1, BOTH)], False),
        ([number("residual.max", "feature", f"{FEATURE} {FEATURE + 1}", BOTH)], True),
        ([number("attention_sink.share", "value", 0.97, "position=0", "0.05")], True),
        ([number("attention_sink.share", "value", 0.4, "position=0", "0.05")], False),
        ([number("attention_sink.share", "value", 0.5, "position=40", "0.05")], False),
    ],
    "plain": [([MASSIVE], False), ([number("residual.massive", "value", 0)], True)],
    "features": [([number("count", "features", "3 17")], True), ([number("count", "features", "3 4")], False)],
    "patch": [
        ([number("residual.max", "position", 2, "layer=0") | PICTURES], True),
        ([number("residual.max", "position", 1, "layer=0") | PICTURES], False),
    ],
}


def verdicts(folder: Path, tmp_path: Path, *facts: list[dict], **fields) -> list[agreement.Verdict]:
    """What becomes of facts about a model."""
    lines = [line | {"fact": f"fact {at}"} | fields for at, fact in enumerate(facts) for line in fact]
    read = read_facts(write_facts(tmp_path, folder.name, *lines))
    return agreement.verdicts_of(folder.name, str(folder), read, tmp_path, model_cache=agreement.ModelCache())


@pytest.mark.parametrize("model", CASES)
def test_planted_facts(planted, tmp_path, model):
    found = verdicts(planted[model], tmp_path, *(lines for lines, _ in CASES[model]))
    assert [one.agreement for one in found] == ["agrees" if agrees else "differs" for _, agrees in CASES[model]], found
    assert found[0].row.provenance["weights_hash"]


def test_what_is_largest_without_a_spike_is_no_super_weight(planted, tmp_path):
    (found,) = verdicts(planted["plain"], tmp_path, weight(1, 0, 0))
    assert (found.agreement, found.measured) == ("differs", "output none at layer 1, input none at layer 1")


def test_perplexities(planted, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "One of my documents, which is not long. It is repeated."}\n' * 20)
    folder = str(planted["plain"])
    model, tokenizer = outliers.load_model(folder), outliers.load_tokenizer(folder)
    value = outliers.perplexity(model, outliers.load_text(str(text), tokenizer, block=32))
    facts = [[number("perplexity", "value", x, "", "1%") | {"cell": "perplexity"}] for x in (value, 1.02 * value)]
    found = verdicts(planted["plain"], tmp_path, *facts, [{"published": value, "under": "int8"}], text=str(text))
    assert [one.agreement for one in found] == ["agrees", "differs", "not measured"]
    assert found[2].measured == "–"


def test_what_cannot_be_run(planted, tmp_path):
    facts = [MASSIVE | {"block": 512}], [MASSIVE | {"cell": "perplexity", "text": "nothing"}]
    long, unknown = verdicts(planted["plain"], tmp_path, *facts)
    assert "blocks of 512 tokens are longer than the model's context of 64" in long.reason
    assert "unknown text 'nothing'" in unknown.reason
    assert {(one.agreement, one.row) for one in (long, unknown)} == {("not run", None)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"cell": "weights"}, "line 2 of '{}' is no fact: cell 'weights'"),
        (MASSIVE | {"block": "many"}, "'many'"),
        (MASSIVE | {"published": "2 to 3"}, "'to'"),
        (MASSIVE | {"where": "layer"}, "line 2 of"),
        (MASSIVE | {"tolerance": "some"}, "'some'"),
    ],
)
def test_mistakes_in_a_file_are_one_line(tmp_path, monkeypatch, capsys, line, message):
    file = write_facts(tmp_path, "a", line)
    assert message.format(file) in refused(monkeypatch, capsys, "published", file, command="report")


@pytest.mark.parametrize("content", [b"", b"model\ngpt2\n", b"\xff\xfe", None])
def test_what_is_no_file_of_facts(tmp_path, content):
    if content is not None:
        (tmp_path / "facts.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"facts\.csv"):
        read_facts(tmp_path / "facts.csv")


def test_a_page_of_a_model(planted, tmp_path, monkeypatch, capsys):
    """Drawn again it is the same, though nothing is measured."""
    folder = planted["weight"]
    both = (weight(1, FEATURE, UNIT), "1[5, 7]"), (weight(1, FEATURE + 1, UNIT), "1[6, 7]")
    lines = [line | {"fact": f"super weight {at}"} for lines, at in both for line in lines]
    file = write_facts(tmp_path, folder.name, *lines)
    monkeypatch.chdir(tmp_path)
    code, said, _ = call(monkeypatch, capsys, "published", file, folder, command="report")
    assert code == 0
    assert said.index("differs: super weight 1[6, 7]") < said.index("agrees: super weight 1[5, 7]")
    place = tmp_path / "results" / "published" / short_name(str(folder))
    assert {"published.md", "sources.csv", "rows.jsonl", "report.html"} <= {one.name for one in place.iterdir()}
    assert (place / "sources.csv").read_text().startswith("source,where,licence,looked up,protocol\n")
    page = (place / "report.html").read_text()
    for part in ("Somebody, 2026", "1[5, 7]", "differs", "agrees", f"outliers.report published {file} {folder}"):
        assert part in page
    assert call(monkeypatch, capsys, "published", file, folder, "--redraw", command="report")[1] == said


def test_all_that_is_published_without_a_model(tmp_path, monkeypatch, lacking, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agreement, "packaged_models", list)
    lacking(f"{agreement.__name__}.is_cached")
    monkeypatch.setenv("COLUMNS", "160")
    code, said, _ = call(monkeypatch, capsys, "published", command="report")
    assert code == 0
    assert "models: not on this machine" in said
    assert "super weight 2[3968, 7003]" in said
    assert "Nothing was measured." in (tmp_path / "results" / "published" / "report.html").read_text()


@pytest.mark.parametrize(
    ("model", "expected"),
    [("qwen", "did you mean qwen2.5-3b or qwen2.5-7b or"), ("UNKNOWN", "python -m outliers.report")],
)
def test_a_model_of_which_nothing_is_published(tmp_path, monkeypatch, capsys, model, expected):
    monkeypatch.chdir(tmp_path)
    error = refused(monkeypatch, capsys, "published", "gpt2", model, command="report")
    assert not list(tmp_path.iterdir())
    assert f"no fact about '{model.lower()}' is in the files; {expected}" in error
    assert "python -m outliers.report published --redraw lists all 58 models" in error


def test_redraw_runs_nothing(planted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, said, _ = call(monkeypatch, capsys, "published", "gpt2", "--redraw", command="report")
    assert code == 0
    assert "--redraw measures nothing" in said


def test_what_stands_in_the_files():
    """The numbers that sources state, as they were looked up."""
    facts = read_facts()
    assert len(facts) == 163

    def said(model: str) -> set[str]:
        return {fact.words for fact in facts_of(facts, [model])}

    assert "super weight 2[3968, 7003]" in said("huggyllama/llama-7b")
    assert {"super weight 1[2070, 7310]", "row 1[2070, :]"} <= said("mistralai/Mistral-7B-v0.1")
    assert "massive activations in layers 2 to 9, feature 447 at position 0, 2,480 to 3,024" in said("gpt2")
    assert {"perplexity on wikitext2 30.22", "perplexity on wikitext2 30.21, massive activations zero"} <= said("gpt2")
    assert said("facebook/dinov2-giant") == {"2.4 % of the positions have a norm above 150 after the last layer"}


@needs_smollm2
@pytest.mark.nightly("outliers/metrics/", "outliers/paper/", "outliers/published/")
def test_a_published_row_of_smollm2(tmp_path):
    facts = facts_of(read_facts(), ["smollm2-135m"])
    cache = agreement.ModelCache()
    (found,) = agreement.verdicts_of("smollm2-135m", "smollm2-135m", facts, tmp_path, model_cache=cache)
    assert (found.agreement, found.measured) == ("agrees", "output 507 at layer 11")
