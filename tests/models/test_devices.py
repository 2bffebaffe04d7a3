"""Models over several devices, on a machine that has one: devices that are pretended, copies on one, refusals."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import modeling

from outliers import UserError, load_int8, load_quantized, perplexity, quantize, save_quantized, trace
from outliers.models import load
from outliers.models.anatomy import anatomy_of, projections
from outliers.models.load import device_map, find_device, load_model, weights_hash
from outliers.models.stream import stream_model
from outliers.quantization.schemes import get_scheme
from outliers.subjects import provenance
from outliers.tracing.result import STREAM
from outliers.variants.ablated import METHODS, Intervention
from tests.pretend_devices import PretendDevices
from tests.small_models import make_model, make_tokenizer, top1_softmax

GB = 10**9


@pytest.fixture
def devices(monkeypatch):
    """Pretend devices, and the int8 products that run on them and on the CPU alike."""
    monkeypatch.setenv("OUTLIERS_KERNELS", "reference")
    return PretendDevices()


def places_of(model) -> dict[str, str]:
    """Embeddings and the head on the first device, a layer on each of the others, what follows them on the second."""
    layers, head, places = anatomy_of(model.config).layers, model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        if name.startswith(f"{layers}."):
            places[".".join(name.split(".")[: layers.count(".") + 2])] = None
        elif any(itertools.chain(module._parameters, module._buffers)):
            places[name] = "maia:1" if places and None in places.values() and module is not head else "maia:0"
    numbers = itertools.count(1)
    return {name: place or f"maia:{next(numbers)}" for name, place in places.items()}


def spread(model):
    """The model over three pretend devices."""
    skip = model._skip_keys_device_placement
    return dispatch_model(model, places_of(model), main_device="maia:0", skip_keys=skip)


def devices_of(model) -> dict[str, torch.device]:
    """Where each projection is."""
    return {projection.path: projection.module.weight.device for projection in projections(model)}


def same_trace(one, other) -> bool:
    """Whether two traces hold the same, bit for bit."""
    same = all(torch.equal(value, other.statistics[name]) for name, value in one.statistics.items())
    return same and one.statistics.keys() == other.statistics.keys() and one.sketch == other.sketch


def test_pretend_devices_refuse_what_devices_refuse(devices):
    with devices:
        one, other = torch.arange(4.0, device="maia:1"), torch.arange(4.0, device="maia")
        assert (str(one.device), str(other.device)) == ("maia:1", "maia:0")
        for mistake in (
            lambda: one + other,
            lambda: one + torch.ones(4),
            lambda: torch.stack([one, other]),
            lambda: torch.where(one > 1, one, other),
            lambda: one.__setitem__([0, 1], torch.ones(2)),
            lambda: torch.nn.functional.linear(one, other.view(1, 4)),
        ):
            with pytest.raises(RuntimeError, match=r"mixes devices: (cpu|maia:0), maia:1"):
                mistake()


def test_spread_models_give_the_same_numbers(model, case, blocks, devices):
    """Bit for bit those of the model on the CPU."""

    def numbers(model):
        found = trace(model, blocks, alpha=1.0, tokens=make_tokenizer())
        means = {(layer, role): found.statistics[f"{role}.sum"][layer] / 72 for layer in range(2) for role in STREAM}
        interventions = [Intervention(()), *(Intervention((3, 7), method, means=means) for method in METHODS)]
        inputs = [projection for projection in projections(model) if projection.role in STREAM]
        perplexities = []
        for intervention in interventions:
            with intervention.on(inputs):
                perplexities.append(perplexity(model, blocks[:1]))
        return found, perplexities, top1_softmax(model, blocks[:1], interventions), weights_hash(model)

    (expected, *others) = numbers(model)
    with devices:
        over_three = spread(make_model(case))
        assert len({str(parameter.device) for parameter in over_three.parameters()}) == 3
        (found, *found_others) = numbers(over_three)
    assert same_trace(found, expected)
    assert found_others == others
    assert len(set(others[0])) == len(set(others[1])) == 4, "every method changes it"


@pytest.mark.parametrize(
    ("keep", "schemes"), [("exact", ["zeropoint", "llm.int8", "llm.int8-bnb"]), ("int8", ["llm.int8-zeropoint"])]
)
def test_spread_models_under_schemes(model, case, blocks, devices, keep, schemes):
    schemes = [get_scheme(name, 1.0) for name in schemes]
    blocks = blocks[:1]
    expected = [perplexity(quantize(model, scheme, keep), blocks) for scheme in schemes]
    exact = perplexity(model, blocks)
    with devices:
        over_three = spread(make_model(case))
        places = devices_of(over_three)
        found = []
        for scheme in schemes:
            quantized = quantize(over_three, scheme, keep)
            found.append(perplexity(quantized, blocks))
            for projection in projections(quantized):
                module = projection.module
                tensors = [module.weight, *module.parameters(), *module.buffers()]
                assert {tensor.device for tensor in tensors} == {places[projection.path]}
            quantized.to("maia:2")
        assert found == expected
        assert devices_of(over_three) == places
        assert perplexity(over_three, blocks) == exact, "the original is as it was"


def test_nan_is_found_over_devices(blocks, devices):
    model = make_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[3] = torch.nan
    with devices, pytest.raises(UserError, match="first in the hidden states of layer 1, role ffn_out, feature 3"):
        perplexity(spread(model), blocks)


@pytest.fixture
def saved(case, tmp_path) -> str:
    """The checkpoint of a small model of every architecture."""
    make_model(case).save_pretrained(tmp_path / case)
    return str(tmp_path / case)


def test_loaded_over_devices(saved, case, blocks, devices, monkeypatch):
    """From checkpoints, and from folders of int8 models; `device_map` is tested by itself."""
    one, int8 = load_model(saved), load_int8(saved)
    expected = perplexity(one, blocks), perplexity(int8, blocks)
    save_quantized(int8, f"{saved}-int8")
    monkeypatch.setattr(load, "device_map", lambda skeleton, name: places_of(skeleton))
    with devices:
        three, int8, again = (
            load_model(saved, device="auto"),
            load_int8(saved, device="auto"),
            load_quantized(f"{saved}-int8", "auto"),
        )
        assert weights_hash(three) == weights_hash(one)
        assert perplexity(three, blocks) == expected[0]
        assert [perplexity(model, blocks) for model in (int8, again)] == [expected[1]] * 2


def memory(monkeypatch, **free: int) -> None:
    """Let accelerate find so many bytes free: gpu0, gpu1, … and cpu."""
    found = {int(place[3:]) if place.startswith("gpu") else place: size for place, size in free.items()}
    usual = modeling.get_max_memory
    for module in (load, modeling):
        monkeypatch.setattr(module, "get_max_memory", lambda given=None: dict(found) if given is None else usual(given))


def test_layers_are_shared_out_whole(model, monkeypatch):
    memory(monkeypatch, gpu0=3 * model.get_memory_footprint() // 4, gpu1=GB, cpu=GB)
    places = device_map(model, "it")
    assert set(places.values()) == {0, 1}
    layers = anatomy_of(model.config).layers
    assert {part.removeprefix(layers).count(".") for part in places if part.startswith(layers)} <= {0, 1}
    if model.config.tie_word_embeddings:
        assert next(place for part, place in places.items() if "lm_head.weight".startswith(part)) == 0


@pytest.mark.parametrize(
    ("free", "message"),
    [
        ({"gpu0": 60_000, "gpu1": 60_000, "cpu": GB}, "the GPUs have too little memory"),
        ({"gpu0": 60_000, "cpu": 1000}, "the GPUs have too little memory"),
        ({"cpu": 60_000}, "this machine has too little memory"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, free, message):
    make_model("opt").save_pretrained(tmp_path)
    memory(monkeypatch, **free)
    with pytest.raises(UserError, match=f"{message} free for all of it .*use --stream or a smaller --dtype"):
        load_model(str(tmp_path), device="auto")
    memory(monkeypatch, **dict.fromkeys(free, 5_000))
    with pytest.raises(UserError, match=message):
        load_int8(str(tmp_path), device="auto")
    save_quantized(quantize(make_model("opt"), "llm.int8", keep="int8"), tmp_path / "int8")
    with pytest.raises(UserError, match=message):
        load_quantized(tmp_path / "int8", "auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("case", ["gpt2", "mixtral"])
def test_auto_without_gpus_is_the_cpu(saved, blocks, monkeypatch):
    memory(monkeypatch, mps=GB)
    assert find_device("auto") == torch.device("cpu")
    for read in (load_model, load_int8):
        one, other = read(saved), read(saved, device="auto")
        assert other.device == torch.device("cpu")
        assert not any(hasattr(module, "_hf_hook") for module in other.modules())
        assert perplexity(other, blocks) == perplexity(one, blocks)


def test_streamed_hidden_states_are_on_a_gpu_if_they_leave_enough_of_it(tmp_path, devices, monkeypatch):
    make_model("opt").save_pretrained(tmp_path)
    stream = stream_model(str(tmp_path), memory=10**6).stream
    stream.device, shape = torch.device("maia:1"), (2, 3, 24, 32)
    size = 4 * torch.Size(shape).numel()
    for free, kind in ((2 * size, "maia"), (2 * size - 1, "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, GB))
        with devices:
            storage = stream.storage(shape, torch.float32, stream.device)
        assert (storage.device.type, storage.shape) == (kind, shape)


def test_provenance_of_several_gpus(monkeypatch):
    """Of which the first one is home."""
    names = ["NVIDIA H100", "NVIDIA H100", "NVIDIA L4"]
    three = {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "get_device_name": lambda device: names[torch.device(device).index or 0],
        "max_memory_allocated": lambda number: 10**number,
    }
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**vars(torch.cuda) | three))
    for device, name in {
        "cuda": "NVIDIA H100",
        torch.device("cuda:2"): "NVIDIA L4",
        "auto": "2 × NVIDIA H100, NVIDIA L4",
    }.items():
        fields = provenance.environment(device)
        assert (fields["device"], fields["device_name"]) == (str(device), name)
        with provenance.measuring(device) as spent:
            pass
        assert (spent.fields["device_name"], spent.fields["peak_memory_bytes"]) == (name, 111)
    assert find_device("auto") == torch.device("cuda:0")
    assert provenance.environment(torch.device("cpu"))["device"] == "cpu"
    with provenance.measuring("cpu") as spent:
        pass
    assert spent.fields["peak_memory_bytes"] > 10**6
    monkeypatch.undo()
    assert provenance.environment("auto")["device_name"] == provenance.environment("cpu")["device_name"]
