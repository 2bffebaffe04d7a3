"""Encoder-decoders: states, loss, schemes, planted outliers, streaming, and every command."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config

import outliers
from outliers import Ablated, Intervention, Trace, UserError, run
from outliers.commands.ablate import Ablation
from outliers.commands.latency import Latency
from outliers.commands.origins import Account
from outliers.commands.trace import Tracing
from outliers.config.experiment import Experiment
from outliers.metrics.attention import attention_results
from outliers.metrics.latency import encoding, latency
from outliers.metrics.sinks import COMPUTATION as SINKS
from outliers.metrics.top1 import COMPUTATION as TOP1
from outliers.models.anatomy.examples import Examples
from outliers.models.anatomy.stack_views import stack_views
from outliers.models.stream import stream_model
from outliers.runs.frame import records_in
from outliers.runs.run import show
from outliers.show.section import Context
from outliers.subjects.causal import ModelWithText
from outliers.subjects.model_cache import describe, protocol_of
from outliers.tracing.trace import traces
from outliers.views.growth import watched
from outliers.views.latency import latency_section
from outliers.views.table4 import emergence_section
from outliers.views.trace import trace_rows_section
from tests.gguf_files import fields_of, same_weights, tensors_of, vocabulary, write_gguf
from tests.subjects.test_families import T5, examples, made
from tests.text.test_seq2seq_text import tokenizer


def save(model, path: Path, sentinels: int = 30) -> Path:
    """A small model, its tokenizer and a text."""
    model.save_pretrained(path)
    tokenizer(sentinels).save_pretrained(path)
    (path / "text.txt").write_text(" ".join(f"w{number * 7 % 40}" for number in range(1200)))
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a model with a tokenizer that has sentinels, or some that have none."""

    return functools.cache(lambda case, sentinels=30: save(made(case), tmp_path_factory.mktemp(case), sentinels))


def test_wo_stays_in_float32(folder):
    """As transformers has it in a float16 model: states are float32 from the first layer on, streamed ones too."""
    loaded, streamed = (load(str(folder("t5")), "float16") for load in (outliers.load_model, stream_model))
    kept = [name for name, one in loaded.named_parameters() if one.dtype == torch.float32]
    assert len(kept) == 5 and all(name.endswith("wo.weight") for name in kept)
    assert outliers.perplexity(loaded, examples("t5")) == outliers.perplexity(streamed, examples("t5"))
    provenance = describe(ModelWithText(str(folder("t5")), None, Experiment(name="x", dtype="float16")), loaded)
    assert provenance["float32_parameters"] == 5 * 32 * 64


def settings(folder, **fields) -> dict:
    return {"text": str(folder / "text.txt"), "block": 30, "blocks": 3} | fields


@pytest.mark.parametrize(
    ("case", "sentinels", "fields", "found"),
    [
        ("t5", 30, {}, "first-blocks+span"),
        ("t5", 30, {"objective": "prefix"}, "first-blocks+prefix"),
        ("bart", 0, {}, "first-blocks+prefix"),
        ("bart", 0, {"objective": "span"}, "no sentinels"),
        *(("bart", 0, {seed: 2}, "leave --mask-seed and --mask-seeds out") for seed in ("mask_seed", "mask_seeds")),
        ("t5", 30, {"bos": True}, "leave --bos out"),
        ("t5", 30, {"block": 900}, "sentinels; use shorter blocks"),
        ("t5", 30, {"blocks": 900}, "too short"),
    ],
)
def test_what_is_predicted(folder, case, sentinels, fields, found):
    place = folder(case, sentinels)
    subject = ModelWithText(str(place), None, Experiment(name="x", **settings(place, **fields)))
    if found.startswith("first-blocks"):
        assert protocol_of(subject.experiment, subject.blocks) == found
        assert subject.request.get("objective") == fields.get("objective")
    else:
        with pytest.raises(UserError, match=found):
            subject.prepare()


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    """A T5 with two outlier features in both stacks, and its text."""
    return save(outliers.plant(made("t5"), [5, 17], 64.0), tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="session")
def traced(planted, tmp_path_factory):
    """What a trace with tokens keeps, its rows and its section."""
    spec, out = Tracing(model=str(planted), by_token=True, **settings(planted)), tmp_path_factory.mktemp("trace")
    rows = run(spec, out)
    return spec, out, rows, trace_rows_section(rows, Context(spec, out))


def test_each_view_is_traced_and_kept(traced, planted):
    spec, out, rows, _ = traced
    counts = {row["stack"]: row for row in rows if row["metric"] == "count"}
    assert list(counts) == ["encoder", "decoder", "cross"]
    assert [row["features"] for row in counts.values()] == [[5, 17], [5, 17], []]
    assert [row["layers"] for row in counts.values()] == [[0, 2], [2, 5], [2, 5]]
    model, blocks = outliers.load_model(str(planted)), ModelWithText(str(planted), None, spec).blocks
    for stack in counts:
        kept, alone = Trace.load(out / f"trace.{stack}"), outliers.trace(model, blocks, stack=stack)
        assert kept.roles == alone.roles
        for name, one in alone.statistics.items():  # parts of the text add up
            torch.testing.assert_close(kept.statistics[name], one, rtol=1e-9, atol=1e-9)
        assert kept.sketch == alone.sketch
        by_layer = kept.features(by="layer")
        assert by_layer["layer"].min() == alone.first_layer
        assert by_layer["median"].notna().sum() == (by_layer["hits"] > 0).sum() or "ffn_out" in set(by_layer["role"])
    assert run(spec, out) == rows, "they are found again"


def test_a_section_names_its_views(traced):
    *_, rows, section = traced
    names = {one.name for one in (*section.tables, *section.drawings)}
    assert {"features_encoder", "features_decoder", "largest_cross", "heat_map_cross", "token_types_decoder"} <= names
    assert section.rows == rows and len(section.findings) == 6
    assert {one.text.partition(":")[0] for one in section.findings} == {"Encoder", "Decoder", "Cross-attention"}
    assert [one.content["first"] for one in section.explorers] == [0, 2, 2], "layers are counted as in tables"
    of_top1 = [row for row in rows if row["metric"] == "top1_softmax"]
    assert [(row.get("ablated"), row["stack"]) for row in of_top1[3:6]] == [
        ("encoder", stack) for stack in ("encoder", "decoder", "cross")
    ]


def test_a_role_is_traced_with_its_counterparts_in_other_views_alone(planted):
    views = traces(outliers.load_model(str(planted)), examples("t5")[:1], ["attn_in"], attention=False)
    assert {role for view in views for role in view.roles} == {"attn_in", "cross_in", "cross_kv"}


def test_attention_is_told_apart(planted):
    """Self-attention of either stack and cross-attention, against what transformers attends to."""
    model, blocks = outliers.load_model(str(planted)), examples("t5")[:1]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        given = {"input_ids": blocks[0].ids[None], "labels": blocks[0].labels[None]}
        out = model(**given, output_attentions=True, use_cache=False)
    expected = {"encoder": out.encoder_attentions, "decoder": out.decoder_attentions, "cross": out.cross_attentions}
    (((of_top1, of_sinks)),) = attention_results(model, blocks, [(Ablated(Intervention(())), [TOP1, SINKS])])
    for stack, layers in expected.items():
        top1 = torch.stack([layer.amax(-1).double().mean() for layer in layers]).mean().item()
        assert TOP1.values([of_top1[stack]])[0]["value"] == pytest.approx(top1, rel=1e-6)
        whole, *heads = SINKS.values([of_sinks[stack]])
        queries = slice(0, None) if stack == "cross" else slice(1, None)
        share = torch.stack([layer[0, :, queries, 0].double().mean() for layer in layers]).mean().item()
        assert whole["value"] == pytest.approx(share, rel=1e-5)
        assert sorted({head["layer"] for head in heads}) == list(stack_views(model)[stack].layers)


def test_features_of_a_stack_are_taken_out_in_its_layers(planted, tmp_path):
    spec = Ablation(model=str(planted), methods=["mean"], **settings(planted, blocks=1))
    rows = run(spec, tmp_path)
    nothing = [row for row in rows if row.get("subject") == "none"]
    assert [row.get("stack") for row in nothing] == ["encoder", "decoder", "cross", None], "measured once"
    shown = show(spec, tmp_path, rows)
    assert [table.cells[0][0] for table in shown.tables] == ["nothing"] * 2, "and shown with each stack"
    rows = [row for row in rows if row.get("subject") == "outliers"]
    where = {row["ablated"]: row["where"] for row in rows}
    assert where == {"encoder": ["attn_in"], "decoder": ["attn_in"]}
    assert {row["variant"] for row in rows} == {"mean(5,17@layers.0:2.attn_in)", "mean(5,17@layers.2:5.attn_in)"}
    model, blocks = outliers.load_model(str(planted)), ModelWithText(str(planted), None, spec).blocks
    for stack in ("encoder", "decoder"):
        table = outliers.ablate(model, blocks, [5, 17], methods=["mean"], stack=stack)
        of_stack = {row["metric"]: row["value"] for row in rows if {row["ablated"], row.get("stack", stack)} == {stack}}
        alone = table.loc[table["subject"] == "outliers"].iloc[0]
        assert of_stack["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-9)
        assert of_stack["top1_softmax"] == pytest.approx(alone["top1_softmax"], rel=1e-9)
    with pytest.raises(UserError, match="the encoder's states in cross-attention cannot be ablated"):
        outliers.ablate(model, blocks, [5], stack="cross")


def test_damage_by_stack():
    model = made("t5")
    found = outliers.damage(model, examples("t5"), "absmax", by=["role", "stack"])
    assert list(found.stacks["stack"]) == ["encoder", "decoder"] and "cross_kv" in set(found.roles["role"])
    only = [outliers.quantize(model, "absmax", only=[layers]) for layers in ("layers.0:2", "layers.2:5")]
    assert list(found.stacks["perplexity_only"]) == [outliers.perplexity(one, examples("t5")) for one in only]
    assert list(found.stacks["perplexity_without"]) == list(found.stacks["perplexity_only"])[::-1]


@pytest.mark.parametrize("by", ["writers", "readers", "weights", "massive"])
def test_accounts_are_of_one_residual_stream(planted, by):
    spec = Account(model=str(planted), by=[by], features=[3], **settings(planted))
    with pytest.raises(UserError, match="'t5' has an encoder and a decoder, each with its own residual stream"):
        run(spec)


@pytest.mark.parametrize("case", ["t5", "bart", "t5gemma"])
def test_generation_is_that_of_transformers(case):
    """Greedy tokens behind the start token; the encoder is timed by itself too."""
    model, prompts = made(case), torch.stack([one.ids for one in examples("t5")])
    found = latency(model, prompts, 5, 2)
    with torch.no_grad():
        ids = model.prepare_decoder_input_ids_from_labels(labels=prompts[:, :1])
        for _ in range(6):
            logits = model(input_ids=prompts, decoder_input_ids=ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found.ids, ids[:, 1:])
    assert (len(found.prefills), [len(steps) for steps in found.steps]) == (2, [5, 5])
    assert len(encoding(model, prompts, 2).encodings) == 2


def test_latency_of_each_part(planted, tmp_path):
    text = {"text": str(planted / "text.txt"), "prompt": 8, "tokens": 3}
    spec = Latency(models=[str(planted)], schemes=["llm.int8"], batches=[1], **text)
    rows = run(spec, tmp_path)
    parts = [row["metric"].removeprefix("latency.") for row in rows]
    assert parts == ["decode", "prefill", "end_to_end", "encode"]
    headers = {header for table in latency_section(rows).tables for header in table.headers}
    assert {"encode 1", "prefill 1"} <= headers, headers


def test_callback_of_a_trainer(tmp_path):
    """Every view is watched, and drawn from the rows."""
    first, _, third = examples("t5")
    held_out = Examples(torch.stack([first.ids, third.ids]), torch.stack([first.labels] * 2))
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "max_steps": 2}
    data = [{"input_ids": one.ids, "labels": one.labels} for one in held_out]
    model = copy.deepcopy(made("t5"))
    trainer = Seq2SeqTrainer(model, Seq2SeqTrainingArguments(str(tmp_path), **quiet), train_dataset=data)
    trainer.add_callback(outliers.OutlierCallback(trainer, held_out, every=1))
    trainer.train()
    rows = records_in(tmp_path / "outliers")
    assert [row["value"] for row in rows if row["metric"] == "perplexity"] == [
        pytest.approx(outliers.perplexity(made("t5"), held_out), rel=1e-6),
        pytest.approx(trainer.state.log_history[1]["outliers/perplexity"]),
        pytest.approx(outliers.perplexity(model, held_out), rel=1e-6),
    ]
    last = {(row.get("stack"), row["metric"]): row["value"] for row in rows if row["checkpoint"] == "step-2"}
    for stack in ("encoder", "decoder", "cross"):
        largest = outliers.trace(model, held_out, stack=stack).hidden_states()["infinity_norm"].max()
        assert max(value for (view, name), value in last.items() if view == stack and "max." in name) >= largest
    assert {f"outliers/{view}.count" for view in ("encoder", "decoder", "cross")} <= trainer.state.log_history[0].keys()
    assert list(watched(rows)) == [f"{tmp_path} ({view})" for view in ("encoder", "decoder", "cross")]
    assert [one.name for one in emergence_section(rows).drawings[:3]] == ["growth", "growth-2", "growth-3"]


@pytest.mark.parametrize(("feed_forward", "tied"), [("gated-gelu", False), ("relu", True)])
def test_gguf(tmp_path, feed_forward, tied):
    """T5 1.1, and the first T5: what transformers' own reader of configurations leaves as it is in neither."""
    torch.manual_seed(0)
    fields = T5 | {"d_kv": 16, "feed_forward_proj": feed_forward, "tie_word_embeddings": tied}
    model = AutoModelForSeq2SeqLM.from_config(T5Config(**fields)).eval()
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(99, 32) / 20)
    said = fields_of(model) | vocabulary(99) | {"decoder_block_count": 2}
    file = str(write_gguf(tmp_path / "t5.gguf", "t5", said, tensors_of(model)))
    resident, streamed = outliers.load_model(file), stream_model(file)
    assert same_weights(resident, model)
    found = [outliers.perplexity(one, examples("t5")) for one in (model, resident, streamed)]
    assert found[0] == found[1] == found[2]


def test_gguf_that_is_no_t5_of_one_depth(tmp_path):
    """transformers reads the same number of layers into both stacks."""
    said = fields_of(made("t5")) | vocabulary(99) | {"decoder_block_count": 3}
    file = write_gguf(tmp_path / "t5.gguf", "t5", said, tensors_of(made("t5")))
    with pytest.raises(UserError, match="3 layers in its decoder and 2 in its encoder"):
        outliers.load_model(str(file))
