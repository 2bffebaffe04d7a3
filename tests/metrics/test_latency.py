"""What generating tokens and multiplying linear layers take: never how long, but that the right things are timed."""

import csv
import gc
import logging
import weakref

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from outliers import UserError, load_int8, load_model, load_quantized, quantize, run, save_quantized
from outliers.commands.latency import Latency
from outliers.config.files import make_experiment, read_experiment
from outliers.metrics.latency import Timings, latency, quartiles
from outliers.metrics.linear_layer import LEAST_ROUNDS, milliseconds, timing_rows, ways
from outliers.models.anatomy import projections
from outliers.paper.linear_layers import LinearLayers
from outliers.quantization.linear import stored_weight
from outliers.quantization.peers import has_bitsandbytes, with_bitsandbytes
from outliers.show.write import write
from outliers.views import linear_layer as table5
from tests.conftest import PAPER_TABLES, needs_paper
from tests.small_models import make_model

CPU = torch.device("cpu")
needs_bitsandbytes = pytest.mark.skipif(not has_bitsandbytes(), reason="bitsandbytes is not installed")


def generated(model, prompts, tokens: int) -> torch.Tensor:
    """What `generate` of transformers appends greedily to the prompts."""
    model.generation_config.eos_token_id = None
    attention_mask = torch.ones_like(prompts)
    out = model.generate(prompts, attention_mask=attention_mask, max_new_tokens=tokens, do_sample=False)
    return out[:, prompts.shape[1] :]


@pytest.mark.parametrize(("int8", "batch"), [(False, 3), (True, 3), (True, 1)])
def test_tokens_are_those_of_generate(case, int8, batch, blocks):
    model = quantize(make_model(case), "llm.int8", keep="int8") if int8 else make_model(case)
    timings = latency(model, blocks[:batch], 8, 2)
    assert timings.ids.equal(generated(model, blocks[:batch], 9))
    assert len(timings.ids.unique()) > 2, "a model that repeats one token would hide a wrong cache"


def test_passes_through_the_model(blocks):
    """The prompt once a generation, then a token at a time; one untimed generation; logits of one position."""
    model, read, projected = make_model("opt"), [], []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: read.append(tuple(args[0].shape)))
    model.lm_head.register_forward_pre_hook(lambda _, args: projected.append(tuple(args[0].shape[:2])))
    timings = latency(model, blocks, 4, 2)
    assert read == 3 * [(3, 24), *4 * [(3, 1)]]
    assert projected == 15 * [(3, 1)]
    assert len(timings.prefills) == 2
    assert [len(steps) for steps in timings.steps] == [4, 4]
    assert min(timings.prefills + timings.per_token) > 0
    assert timings.ids.shape == (3, 5)


class _Products(TorchDispatchMode):
    """A mode that records the size of the larger matrix of each product."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.name().startswith(("aten::mm", "aten::bmm", "aten::addmm")):
            self.sizes.append(max(argument.numel() for argument in arguments if isinstance(argument, torch.Tensor)))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("saved", [False, True])
def test_the_head_of_an_int8_model_is_not_copied_for_each_sequence(saved, tmp_path):
    """As torch does in the prefill of a batch where the weight has no gradient: most of the time on SmolLM2."""
    model = load_int8("pocket/gpt2-0.1m", "llm.int8", "bfloat16")
    if saved:
        save_quantized(model, tmp_path / "saved")
        model = load_quantized(tmp_path / "saved")
    head = model.get_output_embeddings().weight
    with torch.no_grad(), _Products() as products:  # in inference mode it sees no products in layers
        model(torch.arange(60).view(5, 12), logits_to_keep=1)
    assert head.numel() in products.sizes
    assert max(products.sizes) == head.numel()


def test_generations_that_do_not_fit(blocks):
    model = make_model("opt")
    assert latency(model, blocks, 40, 1).ids.shape == (3, 41), "the context of 64 tokens is full"
    with pytest.raises(UserError, match="prompts of 24 tokens and 41 generated ones exceed the model's context of 64"):
        latency(model, blocks, 41, 1)
    with pytest.raises(UserError, match="token id 100 is outside the model's vocabulary of 100"):
        latency(model, blocks + 100 - blocks.max(), 1, 1)
    for tokens, repeats in [(0, 1), (1, 0)]:
        with pytest.raises(UserError, match="expected at least one generation of one token"):
            latency(model, blocks, tokens, repeats)


SMALL = {
    "models": ["pocket/gpt2-0.1m"],
    "batches": [1, 3],
    "prompt": 16,
    "tokens": 4,
    "repeats": 2,
    "alpha": 3,
    "dtype": "bfloat16",
}


@pytest.fixture
def timed_generations(monkeypatch) -> list[tuple]:
    """Batch, tokens and repeats of every measurement, which takes as long as its place in the list."""
    calls = []

    def take(model, prompts, tokens, repeats, see, _empty):
        calls.append((tuple(prompts.shape), tokens, repeats))
        steps = [[len(calls) * float(1 + step) for step in range(tokens)] for _ in range(repeats)]
        ids = torch.zeros(len(prompts), 1 + tokens, dtype=torch.int64)
        return Timings([100.0 * len(calls) * (1 + n) for n in range(repeats)], steps, ids)

    monkeypatch.setattr("outliers.metrics.latency.latency", take)
    return calls


def test_rows(tmp_path, timed_generations):
    rows = run(Latency(**SMALL), tmp_path)
    assert timed_generations == 2 * [((1, 16), 4, 2), ((3, 16), 4, 2)]
    keys = [(row["scheme"], row["batch"], row["metric"]) for row in rows]
    metrics = ["latency.decode", "latency.prefill", "latency.end_to_end"]
    assert keys == [(scheme, batch, m) for scheme in ("fp32", "llm.int8") for batch in (1, 3) for m in metrics]
    decode, prefill, end_to_end = rows[3:6]  # the second measurement, of three sequences
    assert (decode["value"], decode["q1"], decode["q3"]) == pytest.approx((5 / 3, 3.5 / 3, 6.5 / 3))
    assert (prefill["value"], prefill["q1"], prefill["q3"]) == (300, 250, 350)
    assert end_to_end["value"] == (300 + 20) / 15
    assert [row["unit"] for row in rows[:3]] == ["ms/token", "ms", "ms/token"]
    fields = {"prompt", "tokens", "repeats", "dtype", "device", "threads", "weights_hash", "tokens_hash", "text"}
    assert all(fields | {"version", "torch", "wall_seconds", "peak_memory_bytes"} <= set(row) for row in rows)
    assert all(("alpha" in row) == ("kernels" in row) == (row["scheme"] == "llm.int8") for row in rows)


def test_what_is_said_of_weights(tmp_path, timed_generations):
    rows = run(Latency(**{**SMALL, "batches": [1], "schemes": ["fp32", "llm.int8", "zeropoint"]}), tmp_path)
    said = {row["scheme"]: row for row in rows}
    model = load_model("pocket/gpt2-0.1m")
    assert {row["parameters"] for row in rows} == {model.num_parameters()}
    assert said["fp32"]["weights_bytes"] == 2 * model.num_parameters()
    assert len({row["weights_hash"] for row in rows}) == 3
    save_quantized(load_int8("pocket/gpt2-0.1m", "llm.int8", "bfloat16"), tmp_path / "saved")
    on_disk = sum(tensor.nbytes for tensor in load_file(tmp_path / "saved" / "int8.safetensors").values())
    assert said["llm.int8"]["weights_bytes"] == on_disk


def test_one_model_is_in_memory_at_a_time(tmp_path, monkeypatch):
    alive = []

    def alone(load):
        def check(*arguments, **keywords):
            assert not [model for model in alive if model() is not None]
            model = load(*arguments, **keywords)
            alive.append(weakref.ref(model))
            return model

        return check

    for load in (load_model, load_int8):
        monkeypatch.setattr(f"{load.__module__}.{load.__name__}", alone(load))
    gc.disable()  # nothing may wait for the garbage collector
    try:
        run(Latency(**{**SMALL, "models": ["pocket/gpt2-0.1m", "pocket/opt-1.7m"]}), tmp_path)
    finally:
        gc.enable()
    assert len(alive) == 4


@needs_bitsandbytes
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_bitsandbytes_layers_compute_what_our_scheme_of_their_name_does(case):
    """Conv1D and Linear, with and without bias; their CPU path scales by a constant that is off by 2e-5."""
    model = make_model(case)
    for own, peer in zip(
        projections(quantize(model, "llm.int8-bnb")), projections(with_bitsandbytes(model)), strict=True
    ):
        assert type(peer.module).__name__ == "Linear8bitLt"
        x = torch.randn(7, stored_weight(own.module.projection).shape[1], generator=torch.Generator().manual_seed(0))
        x[2, 3] = 20.0
        ours, theirs, exact = own.module(x), peer.module(x), own.module.projection(x)
        assert (theirs - ours).norm() < 2e-3 * ours.norm()
        assert (theirs - ours).norm() < 0.3 * (ours - exact).norm(), "they round alike"


@needs_bitsandbytes
def test_bitsandbytes_is_timed_beside_our_schemes(tmp_path, caplog, monkeypatch, lacking):
    asked = {**SMALL, "models": ["pocket/gpt2-0.1m"], "schemes": ["fp32", "llm.int8", "bitsandbytes"]}
    rows = run(Latency(**asked), tmp_path)
    of_peer = [row for row in rows if row["scheme"] == "bitsandbytes"]
    assert {row["kernels"] for row in of_peer} == {"bitsandbytes"}
    assert of_peer[0]["weights_bytes"] < next(row["weights_bytes"] for row in rows if row["scheme"] == "fp32")
    lacking("importlib.util.find_spec")
    monkeypatch.setattr(logging.getLogger("outliers"), "propagate", True)
    with caplog.at_level("INFO"):
        assert [row["scheme"] for row in run(Latency(**asked), tmp_path)] == [
            row["scheme"] for row in rows if row["scheme"] != "bitsandbytes"
        ]
    assert "goes on without it" in caplog.text


def test_bitsandbytes_alone_is_refused_where_it_is_not_installed(tmp_path, lacking):
    lacking("importlib.util.find_spec")
    with pytest.raises(UserError, match=r"'outliers\[peers\]'\), and nothing else is measured"):
        run(Latency(**SMALL | {"models": ["pocket/gpt2-0.1m"], "schemes": ["bitsandbytes"]}), tmp_path)


def test_ways_are_one_product():
    """All but the bare product of codes are the exact layer up to rounding, and so are the outlier features in it."""
    named = ways(32, 64, 48, CPU, torch.bfloat16)
    with torch.inference_mode():
        results = {name: run() for name, run in named.items()}
        again = {name: run() for name, run in ways(32, 64, 48, CPU, torch.bfloat16).items()}
    exact = results["32 bits"]
    assert list(named)[:3] == ["16 bits", "int8 alone", "absmax, plain torch"]
    assert ("bitsandbytes" in named) == has_bitsandbytes()
    errors = {
        name: ((result.float() - exact).norm() / exact.norm()).item()
        for name, result in results.items()
        if name not in ("32 bits", "int8 alone")
    }
    assert all(0 < error < 0.1 for error in errors.values()), errors
    assert errors["LLM.int8()"] < 0.75 * errors["vector-wise"]
    assert results["int8 alone"].dtype == torch.int32
    for name, result in results.items():
        assert name == "int8 alone" or result.dtype == (torch.float32 if "32 bits" in name else torch.bfloat16)
        assert result.shape == (32, 48)
        assert result.equal(again[name])


def test_ways_are_timed_in_turn():
    called = []
    named = {name: lambda name=name: called.append(name) for name in ("16 bits", "int8 alone", "other")}
    times = milliseconds(named, CPU, 1e-9)
    assert called == (1 + LEAST_ROUNDS) * list(named)
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys(named, LEAST_ROUNDS)


def test_rows_of_ways():
    times = {"16 bits": [4.0, 8.0, 10.0], "other": [8.0, 2.0, 5.0]}
    rows = {row["way"]: row for row in timing_rows((10, 20, 30), times)}
    assert [row["times_16_bits"] for row in rows.values()] == [1, 2]
    assert (rows["other"]["times_16_bits_q1"], rows["other"]["times_16_bits_q3"]) == (1.25, 3)
    assert [rows["other"][f"milliseconds{end}"] for end in ("", "_q1", "_q3")] == [5, 3.5, 6.5]
    assert [rows["other"][f"{value}_smallest"] for value in ("milliseconds", "times_16_bits")] == [2, 2]
    assert quartiles([5.0]) == (5, 5, 5)


LAYERS = {"dimensions": [16, "24x8"], "tokens": 8, "seconds": 1e-6}


def test_linear_layers(tmp_path):
    """Of dimensions, and of real models."""
    rows = run(LinearLayers(**LAYERS), tmp_path)
    names = list(ways(8, 16, 64, CPU, torch.bfloat16))
    metrics = ["linear_layer.milliseconds", "linear_layer.times_16_bits"]
    keys = [(row["dimension"], row["way"], row["metric"]) for row in rows]
    assert keys == [(dimension, way, m) for dimension in LAYERS["dimensions"] for way in names for m in metrics]
    assert {(row["dimension"], row["outputs"]) for row in rows} == {(16, 64), ("24x8", 8)}
    assert all(row["q1"] <= row["value"] <= row["q3"] for row in rows)
    assert {row["value"] for row in rows if row["way"] == "16 bits" and row["unit"] == "1"} == {1.0}
    assert {"tokens", "dtype", "kernels", "device", "threads", "version", "wall_seconds"} <= set(rows[0])
    assert table5.speed_table(rows).headers == ["way", "16", "24x8"]
    write(table5.linear_layer_section(rows), tmp_path, "python -m outliers.report")
    assert set(pd.read_parquet(tmp_path / "rows.parquet")["dimension"]) == {"16", "24x8"}
    with pytest.raises(UserError, match="field 'dimensions"):
        LinearLayers(dimensions=["24by8"], name="x")


def test_linear_layers_on_a_device_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="device 'cuda:77' is not there"):
        run(LinearLayers(**LAYERS, device="cuda:77"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_paper
def test_the_papers_sizes():
    with open(PAPER_TABLES / "table5_matmul_speed.csv") as file:
        dimensions = [int(row["model_dim"]) for row in csv.DictReader(file)]
    assert make_experiment(read_experiment("paper/table5"), LinearLayers).dimensions == dimensions
    columns = pd.read_csv(PAPER_TABLES / "table6_latency_ms_per_token.csv").columns
    batches = [int(name.removeprefix("batch_")) for name in columns if name.startswith("batch_")]
    assert make_experiment(read_experiment("paper/table6"), Latency).batches == batches
