"""All public functions over models whose weights are elsewhere, or whose modules are compiled: the numbers of the plain
model, or one line that says why not."""

import tempfile
from collections.abc import Callable
from functools import cache

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import outliers
from outliers.metrics.keys import observed_channels
from outliers.metrics.range import largest_numbers
from outliers.models.stream import AS_IT_IS
from tests.conftest import in_turn, pairwise
from tests.small_models import make_model, make_tokenizer

BLOCKS = torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def dispatched(*places: str) -> Callable:
    """A model of which some modules are on a disk, and all others in memory."""

    def put(model):
        device_map, covered = {}, []
        for path, module in model.named_modules():
            layer = path.rpartition(".")[0].endswith(("layers", "h"))
            inside = any(path.startswith(f"{done}.") for done in covered)
            if path and not inside and (layer or not list(module.children())):
                covered.append(path)
                device_map[path] = "disk" if any(path.endswith(place) for place in places) else "cpu"
        folder = tempfile.mkdtemp()
        return dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)

    return put


def compiled(path: str) -> Callable:
    def put(model):
        model.get_submodule(path).compile(backend="eager")
        return model

    return put


PLACES = {
    "a layer on a disk": dispatched(".1"),
    "the head on a disk": dispatched("lm_head"),
    "the embedding on a disk": dispatched("embed_tokens", "wte"),
    "all in the memory of a CPU": lambda model: cpu_offload(model, CPU),
    "all on a disk": lambda model: disk_offload(model, tempfile.mkdtemp(), CPU),
}
PATHS = {
    "llama": ("model.layers.1.mlp.down_proj", "model.embed_tokens"),
    "gpt2": ("transformer.h.1.mlp.c_proj", "transformer.wte"),
}


def costs(*written: str) -> Callable:
    return lambda model: outliers.perplexities(model, BLOCKS, [outliers.variant(one) for one in written])


def seen_by_hooks(model) -> list:
    seen = []
    with outliers.hooks(model, lambda layer, role, x: seen.append((layer, role, x.abs().max().item()))):
        model(BLOCKS)
    return seen


def traced(model) -> dict:
    trace = outliers.trace(model, BLOCKS)
    return {name: statistic.tolist() for name, statistic in trace.statistics.items()}


def accounted(model) -> tuple:
    account = outliers.origins(model, BLOCKS, [3])
    sums = {key: of_key.at.tolist() for key, of_key in account.sums.items()}
    return sums, account.gains, {layer: rows.tolist() for layer, rows in account.weights.items()}


def trained(model) -> float:
    return outliers.train_int8(model)(BLOCKS, labels=BLOCKS).loss.item()


def saved(model) -> float:
    with tempfile.TemporaryDirectory() as folder:
        outliers.save_quantized(outliers.quantize(model, "absmax", keep="int8"), folder)
        return outliers.perplexity(outliers.load_quantized(folder), BLOCKS)


def calibrated(model) -> dict:
    found = outliers.calibrate(model, BLOCKS, keys=True)
    return {place: [value.tolist() for value in known[:3]] for place, known in found.magnitudes.items()}


def marked(model) -> tuple:
    masks = outliers.masks(model, BLOCKS)
    return {name: mask.tolist() for name, mask in masks.features.items()}, masks.labels


# What each public function says of a model.
SAID = {
    "anatomy": lambda model: str(outliers.anatomy(model)),
    "perplexity": lambda model: outliers.perplexity(model, BLOCKS),
    "perplexities": costs("zero(3)", "zero(3@layers.1.heads.1)", "kv=int4", "prefix(3)", "unattended(0)"),
    "variant": lambda model: costs(*(f"{kind}({path}{place})" for kind, path, place in weights_of(model)))(model),
    "Planted": costs("plant(3,factor=8)"),
    "Quantized": costs("absmax"),
    "Ablated": costs("massive(3@layers.1,value=0,above=1)"),
    "Intervention": costs("shuffle(3@layers.0.q)"),
    "Together": costs("zero(3)+zero(5)"),
    "cache": costs("keys=int4/before"),
    "bits_per_byte": lambda model: outliers.bits_per_byte(model, "sample", make_tokenizer(), 24, 2),
    "quantize": lambda model: outliers.perplexity(outliers.quantize(model, "llm.int8", skip=["layers.1"]), BLOCKS),
    "calibrate": calibrated,
    "save_quantized": saved,
    "hooks": seen_by_hooks,
    "hidden_states": lambda model: [state.tolist() for state in outliers.hidden_states(model, BLOCKS, 1, "ffn_out")],
    "trace": traced,
    "masks": marked,
    "watch": lambda model: {
        name: value for name, value in outliers.watch(model, BLOCKS).items() if "second" not in name
    },
    "ablate": lambda model: outliers.ablate(model, BLOCKS, [3]).to_dict("list"),
    "origins": accounted,
    "readers": lambda model: outliers.readers(model, BLOCKS, [3], ["q", "norm"], controls=2)["perplexity"].tolist(),
    "super_weights": lambda model: outliers.super_weights(model, BLOCKS, controls=2)["perplexity"].tolist(),
    "damage": lambda model: outliers.damage(model, BLOCKS, "absmax", by=["error", "role"]).roles.to_dict("list"),
    "plan": lambda model: outliers.plan(model, BLOCKS[:1], "absmax", confirm=BLOCKS[1:], draws=2).exact,
    "train_int8": trained,
    "plant": lambda model: outliers.perplexity(outliers.plant(model, [3], 8.0), BLOCKS),
    "range": lambda model: largest_numbers(model, BLOCKS, AS_IT_IS),
    "keys": lambda model: list(observed_channels(model, BLOCKS, 2, AS_IT_IS).records(2)),
}
# Public names that take no model.
OTHERS = {
    *("UserError", "SCHEMES", "Scheme", "Quantizer", "load_model", "load_tokenizer", "pocket_models", "load_text"),
    *("Calibration", "Transform", "Plan", "read_plan", "export", "load_quantized", "load_int8", "OutliersConfig"),
    *("Variant", "Trace", "OutlierCallback", "compare", "table4_row", "Sweep", "Emergence", "run", "sweep", "Cells"),
    *("frame", "plot", "adopt"),
}


def weights_of(model) -> list[tuple[str, str, str]]:
    projection, embedding = PATHS[model.config.model_type]
    of_projection = [
        (kind, projection, place) for kind, place in (("zero", "[3,7]"), ("zero", "[:,7]"), ("zero", "[3,:]"))
    ]
    return [*of_projection, ("zero", embedding, "[:,3]"), ("zero", "lm_head", "[:,3]")]


@cache
def plain(name: str, case: str) -> object:
    """What a function says of the plain model."""
    return SAID[name](make_model(case))


def same(found: object, expected: object) -> bool:
    return found == expected or str(found) == str(expected)  # NaN is NaN


def test_every_public_name_is_here():
    assert set(outliers.__all__) == (SAID.keys() - {"range", "keys"}) | OTHERS


NEEDS_WEIGHTS = {"Planted", "Quantized", "quantize", "save_quantized", "damage", "plan", "train_int8", "plant"}


@pairwise("name place", SAID, [*PLACES][:3])
def test_weights_elsewhere(name, place):
    found_or_refused(name, place, "llama")


@pytest.mark.slow
@in_turn("name place", SAID, [*PLACES])
def test_weights_of_another_architecture_elsewhere(name, place):
    found_or_refused(name, place, "gpt2")


def found_or_refused(name: str, place: str, case: str) -> None:
    try:
        found = SAID[name](PLACES[place](make_model(case)))
    except outliers.UserError as refused:
        assert name in NEEDS_WEIGHTS and "offloaded by accelerate" in str(refused)
        return
    assert same(found, plain(name, case))


# `plan` says only what stays exact, which is nothing here.
@in_turn("name path", [name for name in SAID if name != "plan"], ["model.layers.1", "model.layers.1", "model", ""])
def test_compiled_modules(name, path):
    try:
        found = SAID[name](compiled(path)(make_model("llama")))
    except outliers.UserError as refused:
        assert name in ("hooks", "train_int8") and "is compiled; expected a model that is not" in str(refused)
        return
    assert same(found, plain(name, "llama"))


def test_what_torch_compile_wraps_is_refused():
    model = make_model("llama")
    model.model = torch.compile(model.model, backend="eager")
    with pytest.raises(outliers.UserError, match=r"'model' is an OptimizedModule of torch.compile, which hides its"):
        outliers.perplexity(model, BLOCKS)
