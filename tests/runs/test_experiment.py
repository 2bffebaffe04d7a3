"""Sweep files, rows on disk, runs that are killed and go on."""

import shutil
import statistics

import pytest
import torch

from outliers import Sweep, UserError, load_model, load_text, load_tokenizer, quantize, run, sweep
from outliers.commands.ablate import Ablation
from outliers.commands.trace import Tracing
from outliers.config.files import make_experiment, read_experiment
from outliers.metrics import states
from outliers.metrics.perplexity import Loss, perplexity
from outliers.models.names import PACKAGED, POCKET, pocket_models
from outliers.quantization.schemes import TABLE1
from outliers.runs.engine import LocalEngine
from outliers.runs.frame import records_in as read_rows
from outliers.runs.run import show, stored_rows
from outliers.subjects.model_cache import ModelCache
from outliers.variants.draw import drawn
from tests.small_models import alter_weights, make_model, names_of, sample_blocks

SMALL = {"name": "small", "models": ["pocket/gpt2-0.1m", "pocket/gpt2-0.5m"], "block": 64, "blocks": 4}


def test_the_default_sweep_is_table_1_of_all_causal_pocket_models_without_experts():
    """Those of Table 4 on docs/pocket.md; the mixture, which has seen a quarter of their tokens, has a sweep of its own
    on docs/mixtures.md."""
    experiment = make_experiment(read_experiment("pocket/table1"), Sweep)
    assert experiment.name == "pocket/table1"
    assert names_of(experiment) == TABLE1
    assert set(experiment.models) == {*pocket_models("next tokens"), *PACKAGED} - {"pocket/mixtral-0.7m"}


def test_what_a_broken_model_loses_is_said_and_what_is_finished_stays(tmp_path):
    large = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "m")
    alter_weights(large, lambda tensors: tensors["transformer.ln_f.weight"].mul_(1e4))
    models = ["pocket/gpt2-0.1m", str(large)]
    model, blocks = load_model(models[1]), sample_blocks(models[1], 32, 1)
    loss = model(blocks, labels=blocks).loss.item()  # transformers' own
    assert loss > 1000
    with pytest.raises(UserError, match=f"the loss is {loss:,.0f} nats a token, whose exp"):
        perplexity(model, blocks)
    spec = Sweep(models=models, schemes=["fp32", "absmax"], block=32, blocks=1)
    fine, _, beyond, _ = rows = sweep(spec, tmp_path / "out")
    assert (fine["metric"], beyond["metric"], beyond["unit"]) == ("perplexity", "log_perplexity", "nats")
    assert beyond["value"] == pytest.approx(loss, rel=1e-5)
    assert sweep(spec, tmp_path / "out") == rows, "it is finished"
    shown = show(spec, tmp_path / "out", rows)
    assert f"> 1e308 ({beyond['value']:.2f} nats)" in shown.text
    assert f"is larger than any number: the loss is {loss:,.0f} nats a token." in shown.findings[0].text
    ablation = Ablation(model=models[1], features=[3], block=32, blocks=1)
    rows = run(ablation, tmp_path / "ablated")
    assert {"top1_softmax", "log_perplexity"} <= {row["metric"] for row in rows} and "failed" not in rows[0]
    assert "> 1e308" in show(ablation, tmp_path / "ablated", rows).text


@pytest.mark.parametrize(
    ("model", "revision", "folder"),
    [
        ("some/model", None, "trace/model"),
        ("a/model.gguf", "step8", "trace/model@step8"),
        ("some/model", "refs/pr/1", "trace/model@refs-pr-1"),
        (".", None, "trace/here"),
        ("deep/..", None, "trace/here"),
        ("some/model", "../../../up", "trace/model@..-..-..-up"),
        ("/", None, "trace/root"),
        ("a" * 200, "b" * 200, None),
    ],
)
def test_the_folder_of_results_is_in_results(model, revision, folder, tmp_path, monkeypatch):
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    spec = Tracing(model=model, revision=revision)
    if folder:
        assert str(spec.folder) == f"results/{folder}"
    else:
        with pytest.raises(UserError, match="have no folder of that name; choose one with --out"):
            spec.folder  # noqa: B018


def test_a_field_from_the_command_line_stands_in_no_file(tmp_path):
    (tmp_path / "a.yaml").write_text("models: [a]\nblock: 8\n")
    fields = read_experiment(str(tmp_path / "a.yaml")).replaced({"block": 0})
    with pytest.raises(UserError, match=r"^field 'block'"):
        make_experiment(fields, Sweep)


def test_repeated_names_count_once():
    assert Sweep(models=["a", "b", "a"]).models == ["a", "b"]


def test_draws_give_mean_and_scatter(tmp_path):
    asked = {**SMALL, "models": ["pocket/gpt2-0.5m"], "schemes": ["fp32", "absmax"]}
    rows = sweep(Sweep(**asked, draws=3), tmp_path)
    model, blocks = load_model("pocket/gpt2-0.5m"), sample_blocks("pocket/gpt2-0.5m", 64, 4)
    values = {"fp32": [], "absmax": []}
    for scheme, found in values.items():
        for draw in range(3):
            quantized = quantize(model, scheme)
            with drawn(quantized, draw):
                found.append(perplexity(quantized, blocks))
        assert perplexity(quantized, blocks) == found[0], "draw 0 changes nothing"
    for row in rows:
        assert (row["draws"], row["drawn"]) == (3, "embeddings, ties")
        assert row["value"] == statistics.fmean(values[row["scheme"]])
        assert row["standard_deviation"] == statistics.stdev(values[row["scheme"]])
    assert len(set(values["absmax"])) == 3
    assert rows[0]["standard_deviation"] < 1e-5 * rows[0]["value"], "without quantization nothing scatters"


def test_a_draw_changes_every_embedding_entry_and_leaves_the_model():
    model, ids = make_model("llama"), torch.arange(40)[None]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with drawn(model, 5):
        changed = model(ids).logits
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert model(ids).logits.equal(model(ids).logits)
    noise = torch.randn(model.get_input_embeddings().weight.shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1 + 1e-6 * noise)
    assert model(ids).logits.equal(changed)


def test_another_alpha_measures_what_depends_on_it_and_force_all(tmp_path, monkeypatch):
    sweep(Sweep(**SMALL), tmp_path)
    measured = []
    monkeypatch.setattr(states, "_resident", lambda *arguments: measured.append(arguments) or [[Loss(0.0, 1)] * 4])
    with_alpha = sweep(Sweep(**SMALL, alpha=3), tmp_path)
    assert len(measured) == 6, "only the three decomposing schemes of two models depend on alpha"
    assert {row["value"] for row in with_alpha if "alpha" in row} == {1.0}
    assert len(read_rows(tmp_path)) == 24
    sweep(Sweep(**SMALL), tmp_path, force=True)
    assert len(measured) == 24
    assert len(read_rows(tmp_path)) == 24, "a row that is measured again replaces the old one"


def test_a_text_is_the_same_in_another_folder_and_another_one_under_its_name(tmp_path):
    """Rows say the name of a file, which the hash of its tokens tells from others; old rows say its folder too."""
    specs = []
    for folder, words in (("here", "One of two. "), ("there", "One of two. "), ("beyond", "Something else. ")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.txt").write_text(words * 99)
        specs.append(Sweep(**SMALL | {"models": ["pocket/gpt2-0.1m"]}, text=str(tmp_path / folder / "mine.txt")))
    here, there, beyond = (sweep(spec, tmp_path / "out") for spec in specs)
    assert {row["text"] for row in here} == {"mine.txt"}
    assert there == here
    assert beyond[0]["value"] != here[0]["value"]
    assert len(read_rows(tmp_path / "out")) == 2 * len(here)
    assert stored_rows(specs[1], tmp_path / "out") == beyond, "of rows that ask the same the last one counts"
    assert stored_rows(Sweep(**SMALL, text="other.txt"), tmp_path / "out") == []


def test_rows_with_the_first_token_are_others(tmp_path):
    """Also for what reads rows without asking models; the first token is not predicted."""
    plain, bos = (Sweep(**SMALL, schemes=["fp32"], bos=bos) for bos in (False, True))
    rows = [*sweep(plain, tmp_path), *sweep(bos, tmp_path)]
    assert [row["protocol"] for row in rows] == ["first-blocks"] * 2 + ["first-blocks+bos"] * 2
    assert len(read_rows(tmp_path)) == 4
    assert stored_rows(plain, tmp_path) == rows[:2]
    assert stored_rows(bos, tmp_path) == rows[2:]
    blocks = load_text("sample", load_tokenizer("pocket/gpt2-0.1m"), 64, 4, bos=True)
    model = load_model("pocket/gpt2-0.1m")
    with torch.inference_mode():
        predicted = model(blocks).logits[:, :-1].log_softmax(-1).gather(2, blocks[:, 1:, None])
    assert rows[2]["value"] == pytest.approx(predicted.double().mean().neg().exp().item(), rel=1e-5)


STREAMED = {"block": 64, "blocks": 4, "stream": True}
SWEPT = Sweep(models=["pocket/gpt2-0.1m"], schemes=["fp32", "absmax"], **STREAMED)
TRACED = Tracing(model="pocket/gpt2-0.1m", **STREAMED)


@pytest.mark.parametrize(
    ("changed", "asked", "finished"),
    [("part", SWEPT, set()), ("part", TRACED, {"other"}), ("question", SWEPT, {"one"})],
)
def test_all_rows_of_a_model_are_of_the_same_weights(changed, asked, finished, tmp_path, monkeypatch, lacking):
    """As where a file changes between two workers, which know a streamed model's weights once they have read them."""
    seen = []

    def weights(_model_cache):
        seen.append(len(seen))
        return {"weights_hash": "one" if len(seen) == 1 else "other"}

    if changed == "part":
        monkeypatch.setattr(LocalEngine, "parts", lambda _engine, _blocks, _cells: [slice(0, 1), slice(1, 4)])
    else:
        monkeypatch.setattr(states.StatesMeasurement, "shared", lambda _measurement, cell: id(cell))
    monkeypatch.setattr(ModelCache, "weights", weights)
    lacking("outliers.subjects.model_cache.ModelCache.check_weights")
    rows = run(asked, tmp_path)
    assert "the weights of 'pocket/gpt2-0.1m' changed while they were measured" in rows[-1]["failed"]
    assert {row["weights_hash"] for row in rows if "failed" not in row} == finished
