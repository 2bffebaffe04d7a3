"""Traces, emergence and ablations as cells: against second computations, killed, and drawn again."""

import json
import shutil
from contextlib import contextmanager

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from outliers import SCHEMES, Cells, Intervention, Quantized, Trace, UserError, ablate, perplexity
from outliers.commands.ablate import Ablation
from outliers.commands.emergence import Emergence
from outliers.commands.trace import Tracing
from outliers.criterion import OF_EVERY_STACK, PAPER
from outliers.models.load import load_model, load_tokenizer
from outliers.models.names import POCKET
from outliers.runs.engine import LocalEngine
from outliers.runs.frame import records_in
from outliers.runs.rows import index
from outliers.runs.run import records, rows_of, run
from outliers.subjects.provenance import measuring
from outliers.tracing.table4 import table4_row, trace_row
from outliers.tracing.trace import trace
from outliers.views.emergence import column_of
from tests.conftest import TIMES, lasting
from tests.small_models import alter_weights, sample_blocks, top1_softmax, trace_model

TRACED = {"model": "pocket/gpt2-0.1m", "block": 64, "blocks": 6, "alpha": 3}


def metrics(rows: list[dict]) -> dict:
    """Values of rows that name no place."""
    return {column_of(row): row["value"] for row in rows if not {"feature", "layer", "position"} & set(row)}


def in_any_order(rows: list[dict]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def test_trace_rows_are_what_the_api_measures(tmp_path):
    found, rows = trace_model(Tracing(**TRACED), tmp_path)
    assert in_any_order(records_in(tmp_path)) == in_any_order(rows)
    model, blocks = load_model(TRACED["model"]), sample_blocks(TRACED["model"], 64, 6)
    want = trace(model, blocks, alpha=3)
    assert found.sketch == want.sketch
    assert Trace.load(tmp_path / "trace").outlier_features().equals(want.outlier_features())
    features = tuple(want.outlier_features()["feature"])
    assert features
    top1 = top1_softmax(model, blocks, [Intervention(()), Intervention(features)])
    assert metrics(rows) == pytest.approx(table4_row(want, perplexity(model, blocks), top1))
    row = next(row for row in rows if row["metric"] == "outlier_feature.positions" and row["feature"] == features[0])
    assert row["value"] == want.outlier_features()["positions"][0]
    assert {"hidden_state.kurtosis_token", "residual.max", "hidden_state.infinity_norm_rest"} <= {
        row["metric"] for row in rows
    }
    largest = [row for row in rows if row["metric"] == "largest.value"]
    places = ["role", "layer", "feature", "position", "token", "value"]
    wanted = want.largest_values(by="layer")[places]
    assert [[row[name] for name in places] for row in largest] == wanted.to_numpy().tolist()
    assert {row["role"] for row in largest} == set(row["roles"]) == set(OF_EVERY_STACK)
    assert {"weights_hash", "tokens_hash", "alpha", "block", "version", *TIMES} <= set(row)


def test_a_kept_trace_without_tokens_is_made_again_for_them(tmp_path):
    """And not otherwise; the rows are those of before, for none has anything of it."""
    plain, rows = trace_model(Tracing(**TRACED), tmp_path)
    found, again = trace_model(Tracing(**TRACED, by_token=True), tmp_path)
    assert again == rows
    assert not plain.names
    assert all(torch.equal(value, found.statistics[name]) for name, value in plain.statistics.items())
    tokenizer = load_tokenizer(TRACED["model"])
    want = trace(load_model(TRACED["model"]), sample_blocks(TRACED["model"], 64, 6), alpha=3, tokens=tokenizer)
    assert found.tokens(3).equals(want.tokens(3))
    written = (tmp_path / "trace.safetensors").stat().st_mtime_ns
    for by_token in (False, True):
        assert trace_model(Tracing(**TRACED, by_token=by_token), tmp_path)[0].names == found.names
    assert (tmp_path / "trace.safetensors").stat().st_mtime_ns == written


def test_traces_of_all_requests_are_kept(tmp_path):
    """The last one in its place, others below `earlier`, with what was made of them; none is traced again, as rows
    would say by their seconds, and files by their own."""
    specs = {blocks: Tracing(**TRACED | {"blocks": blocks}, masks=True) for blocks in (6, 2, 4)}
    kept, beside = {}, ["excerpt.safetensors", "masks.safetensors", "masks.json"]
    for blocks, spec in specs.items():
        kept[blocks] = trace_model(spec, tmp_path)[1]
        kept[blocks, "beside"] = [(tmp_path / file).stat().st_mtime_ns for file in beside]
        assert Trace.load(tmp_path / "trace").sequences == blocks

    for blocks in (6, 2, 4, 4, 6):
        found, rows = trace_model(specs[blocks], tmp_path)
        assert (found.sequences, rows) == (blocks, kept[blocks])
        assert [(tmp_path / file).stat().st_mtime_ns for file in beside] == kept[blocks, "beside"]
    aside = [{file.name for file in place.iterdir()} for place in (tmp_path / "earlier").iterdir()]
    assert aside == [{"trace.safetensors", *beside}] * 2


def test_a_kept_trace_of_other_roles_is_not_taken_for_this(tmp_path):
    """As a version of this project that traced fewer has left it."""
    found, rows = trace_model(Tracing(**TRACED), tmp_path)
    found.labels["roles"] = list(PAPER)
    found.save(tmp_path / "trace")
    again, new = trace_model(Tracing(**TRACED), tmp_path)
    assert again.labels["roles"] == list(OF_EVERY_STACK)
    assert new == rows


def test_the_cost_of_a_trace_is_in_its_rows(tmp_path, monkeypatch):
    @contextmanager
    def expensive(device):
        with measuring(device) as spent:
            yield spent
        spent.fields |= {"wall_seconds": 1000.0}

    monkeypatch.setattr("outliers.runs.planner.measuring", expensive)
    _, rows = trace_model(Tracing(**TRACED), tmp_path)
    seconds = {row["metric"]: int(row["wall_seconds"] // 1000) for row in rows}
    assert (seconds["count"], seconds["perplexity"]) == (TRACED["blocks"], 1), "each block is a part of its own"


def test_a_trace_goes_on_where_it_stopped(tmp_path, constants, calls_of):
    want = lasting(trace_model(Tracing(**TRACED), tmp_path / "whole")[1])
    constants("outliers.runs.planner", SECONDS_BETWEEN_SAVES=0)

    def stop(calls):
        if len(calls) > 4:
            raise KeyboardInterrupt

    read = calls_of("outliers.metrics.trace.traces", stop)
    with pytest.raises(KeyboardInterrupt):
        trace_model(Tracing(**TRACED), tmp_path / "cut")
    assert Trace.load(tmp_path / "cut" / "trace").sequences == 4
    assert not (tmp_path / "cut" / "rows.jsonl").exists()
    streamed = shutil.copytree(tmp_path / "cut", tmp_path / "streamed")
    read[:] = [None] * 3  # one more pass may be made, over the two blocks that are missing
    rows = trace_model(Tracing(**TRACED, stream=True), streamed)[1]
    assert [row["value"] for row in rows] == pytest.approx([row["value"] for row in want], rel=1e-9)
    read[:] = [None] * 2  # two more blocks may be read, and two are missing
    assert lasting(trace_model(Tracing(**TRACED), tmp_path / "cut")[1]) == want
    read[:] = [None] * 4  # none may be read
    assert lasting(trace_model(Tracing(**TRACED), tmp_path / "cut")[1]) == want
    with pytest.raises(KeyboardInterrupt):
        trace_model(Tracing(**TRACED), tmp_path / "cut", force=True)
    with pytest.raises(KeyboardInterrupt):
        trace_model(Tracing(**{**TRACED, "alpha": 2}), tmp_path / "cut")


def test_what_is_saved_of_a_trace_is_its_beginning(tmp_path, monkeypatch, constants, calls_of):
    """Also where the last blocks arrive first, as from several machines."""
    want, _ = trace_model(Tracing(**TRACED), tmp_path / "forwards")
    forwards = LocalEngine.run
    monkeypatch.setattr(LocalEngine, "run", lambda engine, cells: forwards(engine, list(cells)[::-1]))
    constants("outliers.runs.planner", SECONDS_BETWEEN_SAVES=0)

    def stop(calls):
        if len(calls) == TRACED["blocks"]:
            raise KeyboardInterrupt

    calls_of("outliers.metrics.trace.traces", stop)
    with pytest.raises(KeyboardInterrupt):
        trace_model(Tracing(**TRACED), tmp_path / "backwards")
    assert not list(tmp_path.glob("backwards/trace.*")), "without the first block there is no beginning"
    found, _ = trace_model(Tracing(**TRACED), tmp_path / "backwards")
    assert found.sketch == want.sketch


def treated(rows: list[dict]) -> list[dict]:
    """Rows of an ablation without those of its trace."""
    return [row for row in rows if "subject" in row]


def test_rows_of_an_ablation_are_what_the_api_measures(tmp_path):
    asked = {"methods": ["mean", "shuffle"], "where": ["ffn_in"], "seed": 5}
    spec = Ablation(**TRACED | {"blocks": 2}, features=[3, 7], **asked)
    want = run(spec, tmp_path)
    model, blocks = load_model(TRACED["model"]), sample_blocks(TRACED["model"], 64, 2)
    table = ablate(model, blocks, [3, 7], alpha=spec.alpha, **asked)
    for metric in ("top1_softmax", "perplexity"):
        values = [row["value"] for row in treated(want) if row["metric"] == metric]
        assert values == pytest.approx(table[metric].tolist(), rel=1e-6)


def test_ablation_finds_its_features_and_is_drawn_again_without_the_model(tmp_path):
    """Of so few features some are drawn several times as controls, whose rows differ in their numbers alone."""
    model = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")
    spec = Ablation(**TRACED | {"blocks": 2, "model": str(model)})
    rows = run(spec, tmp_path / "out")
    found = trace(load_model(TRACED["model"]), sample_blocks(TRACED["model"], 64, 2), alpha=3)
    outliers = next(row for row in rows if row.get("subject") == "outliers")
    assert outliers["features"] == sorted(found.outlier_features()["feature"])
    controls = [row for row in rows if row.get("subject") == "control" and row["metric"] == "perplexity"]
    assert len({tuple(row["features"]) for row in controls}) < len({row["draw"] for row in controls}) == 10
    with pytest.raises(UserError, match=r"has no outlier feature on this text .* --features or lower --alpha"):
        run(Ablation(**{**TRACED, "alpha": 6}), tmp_path / "none")
    shutil.rmtree(model)
    assert records(rows_of(spec, index(tmp_path / "out"))) == rows
    assert rows_of(spec.model_copy(update={"seed": 1}), index(tmp_path / "out")) == [], "a trace alone is no ablation"
    assert rows_of(Ablation(**{**TRACED, "alpha": 6}), index(tmp_path / "none")) == []


def test_a_model_without_attention_is_drawn_again_without_it(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 4096}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path / "mamba")
    load_tokenizer(TRACED["model"]).save_pretrained(tmp_path / "mamba")
    fields = TRACED | {"model": str(tmp_path / "mamba"), "blocks": 1}
    kept = []
    for spec in (Tracing(**fields), Ablation(**fields, features=[3])):
        rows = run(spec, tmp_path / spec.name)
        kept.append((spec, rows))
        assert "perplexity" in {row["metric"] for row in rows} and "top1_softmax" not in {row["metric"] for row in rows}
    shutil.rmtree(tmp_path / "mamba")
    for spec, rows in kept:
        assert records(rows_of(spec, index(tmp_path / spec.name))) == rows


def test_a_trace_under_a_scheme(tmp_path):
    fields = {"models": [TRACED["model"]], "block": 64, "blocks": 2}
    rows = run(Cells(**fields, variants=["absmax"], metrics=["trace"], alpha=3), tmp_path)
    model, blocks = load_model(TRACED["model"]), sample_blocks(TRACED["model"], 64, 2)
    found = trace(model, blocks, PAPER, 3, attention=False, variant=Quantized(SCHEMES["absmax"]))
    assert metrics(rows) == trace_row(found) != trace_row(trace(model, blocks, PAPER, 3, attention=False))
    assert {(row["scheme"], row["alpha"]) for row in rows} == {("absmax", 3)}


def test_emergence_over_checkpoints_of_a_folder(tmp_path):
    """Three checkpoints, the last two with the same weights; the second run measures nothing."""
    folder = tmp_path / "run"
    for step in ("step-1", "step-2", "step-3"):
        shutil.copytree(POCKET / "gpt2-0.1m", folder / step)
    alter_weights(folder / "step-1", lambda tensors: tensors["transformer.wte.weight"].mul_(1.5))
    fields = {"block": 64, "blocks": 2, "alpha": 3}
    spec = Emergence(models=[str(folder)], revisions=["step-1", "step-2", "step-3"], **fields)
    rows = run(spec, tmp_path / "out")
    by_step = {step: [row for row in rows if row["checkpoint"] == step] for step in ("step-1", "step-2", "step-3")}
    values = {step: {row["metric"]: row["value"] for row in of_step} for step, of_step in by_step.items()}
    assert values["step-2"] == values["step-3"] != values["step-1"]
    assert {row.get("same_weights_as") for row in by_step["step-3"]} == {"run@step-2"}
    assert not any("same_weights_as" in row for row in by_step["step-1"] + by_step["step-2"])
    alone = run(Emergence(models=["pocket/gpt2-0.1m"], **fields), tmp_path / "alone")
    assert {row["metric"]: row["value"] for row in alone} == values["step-2"]
    written = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert run(spec, tmp_path / "out") == rows
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == written

    with pytest.raises(UserError, match=r"unknown revision .* 'step-4'; did you mean step-"):
        run(Emergence(models=[str(folder)], revisions=["step-4"]), tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_equal_weights_with_another_tokenizer_are_measured(tmp_path):
    """They see other tokens."""
    folder = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["."], vocabulary[","] = vocabulary[","], vocabulary["."]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    fields = {"block": 32, "blocks": 1, "alpha": 3}
    rows = run(Emergence(models=["pocket/gpt2-0.1m", str(folder)], **fields), tmp_path / "out")
    assert not any("same_weights_as" in row for row in rows)
    one, other = (
        [row["value"] for row in rows if row["model"] == model] for model in ("pocket/gpt2-0.1m", str(folder))
    )
    assert one != other
