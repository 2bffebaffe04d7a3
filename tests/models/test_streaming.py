"""Layers that are read when their turn comes: the same numbers as from a resident model."""

import gc
import os
import shutil
import subprocess
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outliers import Intervention, Quantized, UserError, ablate, calibrate, quantize, run, trace, variant
from outliers.commands.ablate import Ablation
from outliers.commands.damage import Damage
from outliers.commands.trace import Tracing
from outliers.metrics.perplexity import perplexities, perplexity
from outliers.models.anatomy import anatomy_of, decoder_layers, experts_of, layers_of, projections
from outliers.models.load import load_model, weights_hash
from outliers.models.names import POCKET
from outliers.models.stored.tensors import Lazy
from outliers.models.stream import WatchedVariant, give_memory_back, stream_model
from outliers.quantization.schemes import TABLE1, get_scheme
from outliers.subjects.causal import ModelWithText
from outliers.subjects.model_cache import ModelCache
from outliers.terminal.progress import Progress
from tests.conftest import FIVE, lasting, slow_but
from tests.gguf_files import save_gguf
from tests.models.test_experts import made as mixture
from tests.small_models import make_model, make_tokenizer, top1_softmax


@pytest.fixture
def folder(case, tmp_path) -> str:
    """The checkpoint of a small model of every architecture, in shards."""
    make_model(case).save_pretrained(tmp_path / case, max_shard_size="20KB")
    assert len(list((tmp_path / case).glob("*.safetensors"))) > 3
    return str(tmp_path / case)


@pytest.fixture
def saved(tmp_path) -> str:
    """The checkpoint of one small model."""
    make_model("opt").save_pretrained(tmp_path / "opt", max_shard_size="20KB")
    return str(tmp_path / "opt")


@pytest.fixture
def pieces(calls_of) -> list[int]:
    """Bytes of each piece that is read of a file of weights."""
    sizes = []
    calls_of("outliers.models.stored.tensors.WeightFile.read", lambda calls: sizes.append(calls[-1][2] - calls[-1][1]))
    return sizes


def on_meta(model) -> bool:
    """Whether no decoder layer has weights."""
    return all(parameter.is_meta for layer in decoder_layers(model) for parameter in layer.parameters())


# Experts, and what else goes beside the states of a layer: positions that no file holds, their biases, windows.
OTHERS = ("mixtral", "gptj", "bloom", "mpt", "falcon-rw", "gemma3", "olmo2", "smollm3")


@pytest.mark.parametrize("case", slow_but([*FIVE, *OTHERS]))
def test_same_numbers_for_every_architecture(folder, blocks):
    resident, streamed = load_model(folder), stream_model(folder)
    assert on_meta(streamed)
    some = [blocks[0], blocks[1, :9], blocks[2, :17], blocks[0, 7:16]]  # of several lengths
    assert perplexity(streamed, some) == perplexity(resident, some)
    one, other = (trace(model, some, alpha=1.0, tokens=make_tokenizer()) for model in (resident, streamed))
    assert one.names == other.names
    assert one.statistics.keys() == other.statistics.keys()
    for name, values in one.statistics.items():
        assert torch.equal(values, other.statistics[name]), name
    assert one.sketch == other.sketch
    interventions = [Intervention(()), Intervention((1, 5)), Intervention((2,))]
    assert top1_softmax(streamed, blocks, interventions) == pytest.approx(
        top1_softmax(resident, blocks, interventions), rel=1e-12
    )
    assert on_meta(streamed)


@pytest.mark.parametrize("case", ["gpt2", "gpt-oss"])
def test_all_schemes_in_one_pass(folder, blocks, pieces):
    resident, streamed = load_model(folder), stream_model(folder)
    names = [*TABLE1, "llm.int8-bnb"]
    pieces.clear()
    found = perplexities(streamed, blocks, [Quantized(get_scheme(name, 1.0)) for name in names])
    prefix = f"{anatomy_of(streamed.config).layers}."
    stored = (stored for own, stored in streamed.stream.stored.items() if own.startswith(prefix))
    layers = sum(end - start for of_one in stored for _, start, end in of_one.spans)
    assert sum(pieces) == layers, "each weight of the layers is read once"
    expected = [perplexity(quantize(resident, get_scheme(name, 1.0)), blocks) for name in names]
    assert found == pytest.approx(expected, rel=1e-6)
    assert on_meta(streamed)


LARGER = {"n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 100}
GROWTH = """
import sys
import torch
from outliers.models.stream import stream_model
from outliers.tracing.trace import trace

def anonymous():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * int(lines["RssAnon"].split()[0])

torch.set_num_threads(1)
model, peaks = stream_model(sys.argv[1], memory=1000), {}
blocks = torch.randint(100, (64, 64), generator=torch.Generator().manual_seed(0))
for count in (4, 4, 64):
    peak = []
    model.base_model.h[-1].register_forward_hook(lambda *_: peak.append(anonymous()))
    trace(model, blocks[:count], attention=False)
    peaks[count] = max(peak)
print(peaks[64] - peaks[4])
"""


@pytest.mark.nightly("outliers/models/", "outliers/tracing/")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the resident memory from /proc")
def test_memory_of_a_streamed_trace_does_not_grow_with_blocks(tmp_path):
    """What it keeps of them is in the file of the hidden states, which is not this process's own memory."""
    config = AutoConfig.for_model("gpt2", **LARGER)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", GROWTH, str(tmp_path)], capture_output=True, text=True, check=True)
    states = 64 * 64 * 256 * 4
    assert int(done.stdout) < states / 2


def test_what_a_trace_keeps_of_blocks_counts_as_hidden_states_do(saved, blocks):
    """Three blocks of the states, of the magnitudes of two roles, and of the hits of heads and feed-forward units."""
    states, hits = 3 * 24 * 32 * 4, 3 * 24 * 32
    for memory, taken in ((None, 3 * states + hits + 2 * hits), (2 * states, 2 * states), (1000, 0)):
        streamed = stream_model(saved, memory=memory)
        trace(streamed, blocks)
        assert streamed.stream.taken.total() == taken
        perplexity(streamed, blocks)
        assert streamed.stream.taken.total() == (0 if memory == 1000 else states)


def test_an_ablation_reads_the_weights_less_than_four_times(saved, blocks, pieces):
    """Once for means, for attention, and for all cells of perplexity together."""
    assert len(ablate(stream_model(saved), blocks, [3, 7], methods=["zero", "mean"])) == 27
    size = sum(path.stat().st_size for path in Path(saved).glob("*.safetensors"))
    assert sum(pieces) < 4 * size


def test_leaves_the_model_as_it_was_after_an_error(saved, blocks):
    streamed = stream_model(saved)
    before = perplexity(streamed, blocks)

    def stop(*_):
        raise RuntimeError("stopped")

    for place in (decoder_layers(streamed)[1], streamed.model.decoder.final_layer_norm):
        handle = place.register_forward_hook(stop)
        with pytest.raises(RuntimeError, match="stopped"):
            perplexity(streamed, blocks)
        handle.remove()
        assert on_meta(streamed)
        assert perplexity(streamed, blocks) == before


def test_weights_that_cannot_be_read_do_not_stay(saved, blocks):
    """Nor is a process killed whose file is cut short while it is read, as one is that maps it."""
    streamed = stream_model(saved)
    for file in Path(saved).glob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(UserError, match="corrupt"):
        perplexity(streamed, blocks)
    assert on_meta(streamed)


def test_hash_is_that_of_the_resident_model(folder, blocks, pieces):
    """Whether all is read for it, or it is gathered while blocks pass."""
    expected = weights_hash(load_model(folder))
    read = stream_model(folder)
    assert read.stream.weights_hash() == expected
    passed = stream_model(folder)
    perplexity(passed, blocks)
    pieces.clear()
    assert passed.stream.weights_hash() == expected
    assert not pieces, "nothing is read twice for it"
    perplexity(passed, blocks)
    assert passed.stream.weights_hash() == expected
    half = weights_hash(load_model(folder, "float16"))
    assert stream_model(folder, "float16").stream.weights_hash() == half != expected


SHORT = {"block": 32, "blocks": 2, "stream": True}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Tracing, {}),
        (Damage, {"schemes": ["absmax"], "by": ["role"]}),
        (Ablation, {"features": [1, 2], "methods": ["mean"]}),
    ],
    ids=["trace", "damage", "ablation"],
)
def test_other_weights_are_measured_again(kind, fields, tmp_path):
    """Those of a file that was changed at one place, and has its size and its time."""
    folder = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")
    file, spec = folder / "model.safetensors", kind(model=str(folder), **SHORT, **fields)
    before = run(spec, tmp_path / "out")
    times, content = file.stat(), bytearray(file.read_bytes())
    content[-2] ^= 64  # half or twice the last number
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = run(spec, tmp_path / "out")
    assert {row["weights_hash"] for row in before} != {row["weights_hash"] for row in after}
    assert [row["value"] for row in before] != [row["value"] for row in after]
    assert lasting(run(spec, tmp_path / "out")) == lasting(after)


def test_weights_that_are_not_those_of_another_process(tmp_path):
    """As where a file changes between two workers: it shows when the layers were read."""
    spec = Tracing(model="pocket/gpt2-0.1m", **SHORT)
    subject = ModelWithText(spec.model, None, spec)
    with Progress(0) as bar:
        model_cache = ModelCache(bar)
    model, fields = model_cache.load(subject)
    assert "weights_hash" not in fields
    model, _ = model_cache.load(subject, fields | {"weights_hash": "0" * 16})
    perplexity(model, subject.blocks)
    with pytest.raises(UserError, match="changed while they were measured"):
        model_cache.check_weights()


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_codes_of_a_layer_are_gone_before_the_next_is_read(case, tmp_path, blocks):
    """And with them its weights, which they keep, without a search for circles of references."""
    make_model(case).save_pretrained(tmp_path)
    streamed, left, alive = stream_model(str(tmp_path)), [], []

    @contextmanager
    def see(changed, layer):
        left.extend(weakref.ref(part.module) for part in projections(changed, layer))
        yield

    def reading(lazy: Lazy) -> Lazy:
        def read():
            alive.append(sum(one() is not None for one in left))
            return lazy.read()

        return lazy._replace(read=read)

    stored = streamed.stream.stored
    streamed.stream.stored = {name: reading(lazy) if ".layers.1." in name else lazy for name, lazy in stored.items()}
    gc.disable()
    try:
        perplexities(streamed, blocks, [WatchedVariant(variant("absmax"), see)])
    finally:
        gc.enable()
    assert left and alive and not any(alive)


# A layer that alone is larger than memory, which its experts take most of

UNDER = ("fp32", "absmax", "llm.int8", "w4a4-g16+hadamard", "drop(layers.1.experts.2)")


@pytest.mark.parametrize("stored", ["mixtral", "gpt_oss", "llama4_text", "gguf"])
def test_experts_of_a_layer_are_read_one_by_one(stored, blocks, tmp_path, pieces):
    """From tensors of one expert, or of all of a layer, exact or in codes, with the same results and hash."""
    folder, model = str(tmp_path), mixture("mixtral" if stored == "gguf" else stored, hidden_size=64)
    if stored == "gguf":
        folder = str(save_gguf(model, tmp_path / "model.gguf", "Q8_0"))
    else:
        model.save_pretrained(folder)
    whole, by_expert = stream_model(folder), stream_model(folder, memory=1000)
    (of_expert,) = {part.module.weight.nbytes for part in projections(model) if part.path.endswith("0.gate_up_proj")}
    for remedy in ("smoothing", "gptq"):
        found = [calibrate(one, blocks, [f"absmax-vector+{remedy}"]) for one in (whole, by_expert)]
        variants = [Quantized(get_scheme(f"absmax-vector+{remedy}")).calibrated(one) for one in found]
        assert perplexities(whole, blocks, variants[:1]) == perplexities(by_expert, blocks, variants[1:])
    expected = perplexities(whole, blocks, [*map(variant, UNDER)])
    outside = max(lazy.read().nbytes for name, lazy in whole.stream.stored.items() if ".experts." not in name)
    pieces.clear()
    assert perplexities(by_expert, blocks, [*map(variant, UNDER)]) == expected
    assert max(pieces) <= max(of_expert, outside)
    assert whole.stream.weights_hash() == by_expert.stream.weights_hash()
    assert not any("pieces" in vars(experts) for experts in experts_of(by_expert).values())


def peak() -> int:
    """The most bytes that this process had in memory since this was reset."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="resets the peak of a process in /proc")
def test_memory_of_a_layer_that_is_read_by_expert(tmp_path):
    model = mixture("mixtral", hidden_size=512, num_experts=64, num_local_experts=64, intermediate_size=256)
    model.save_pretrained(tmp_path)
    layer = sum(one.nbytes for one in layers_of(model)[0].module.parameters())
    del model
    blocks, peaks = torch.arange(64).view(2, 32), []
    for memory in (None, layer - 1):
        streamed = stream_model(str(tmp_path), memory=memory)
        give_memory_back()
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        perplexities(streamed, blocks, [variant("absmax")])
        peaks.append(peak() - before)
    assert peaks[0] > layer > 2 * peaks[1], (peaks, layer)
