"""The layers of other libraries that ours are timed beside: each computes what the tables say, however fast it is."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from outlier_kernels import reference
from outlier_kernels.formats import Quantizer
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import rival_layers
import rivals

KEPT = Path(__file__).parents[2] / "results/kept/benchmarks/zen-4"
ROW, TENSOR = Quantizer("int8", "row"), Quantizer("int8", "tensor")
COLUMN, UNSIGNED = Quantizer("int8", "column"), Quantizer("int8", "tensor", symmetric=False)
# Activations and weights, by what the tables say.
OPERANDS = {
    rival_layers.BY_ROW: (ROW, COLUMN),
    rival_layers.DECOMPOSED: (ROW, COLUMN),
    "int8 32 features of a token × int8 an output": (Quantizer("int8", "group-32"), COLUMN),
    "uint8 a tensor × int8 an output": (UNSIGNED, COLUMN),
    "uint8 in 7 bits a tensor × int8 a tensor": (UNSIGNED, TENSOR),
}
# Libraries whose codes are not ours, for they divide by another number: how much their outputs change from the exact
# product, as a share of what our reference changes. torch takes half the codes.
CHANGES = {"torchao": (0.9, 1.1), "onnxruntime": (0.9, 1.1), "torch": (1.5, 2.5)}
FARTHEST = {"bitsandbytes": 0.5}  # and of the others how far they are from the reference: 16 bits are float16 there


@pytest.fixture
def layer_and_input():
    torch.manual_seed(0)
    exact, x = nn.Linear(96, 80), torch.randn(24, 96)
    x[3, 5] = 9.0
    return exact, x


def made(name, exact):
    """A rival's layer; a test is skipped where its library is missing."""
    rival = (rival_layers.OURS | rival_layers.RIVALS)[name]
    if importlib.util.find_spec(rival.package) is None:
        pytest.skip(f"needs {rival.package}")
    return rival.layer(exact)


@torch.inference_mode()
@pytest.mark.parametrize("name", [*rival_layers.OURS, *list(rival_layers.RIVALS)[1:]])
def test_computes_what_the_tables_say(name, layer_and_input):
    exact, x = layer_and_input
    rival = (rival_layers.OURS | rival_layers.RIVALS)[name]
    found, plain = made(name, exact)(x), exact(x)
    activations, weights = OPERANDS[rival.computes]
    threshold = 6.0 if rival.computes == rival_layers.DECOMPOSED else None
    operand = reference.quantize(exact.weight, weights)
    expected = reference.linear(x, operand, exact.bias, activations, threshold)
    changed = (expected - plain).norm()
    if rival.package in CHANGES:
        least, most = CHANGES[rival.package]
        assert least * changed < (found - plain).norm() < most * changed
    else:
        assert (found - expected).norm() < FARTHEST.get(rival.package, 1e-3) * changed


def test_exact_products_are_exact(layer_and_input):
    exact, x = layer_and_input
    assert torch.equal(made("torch, not quantized", exact)(x), exact(x))


def test_a_row_compares_the_smallest_times():
    times = {"prefill": {"rival": [3.0, 8.0, 5.0], "vector-wise": [1.0, 4.0, 5.0], "LLM.int8()": [2.0, 2.0, 2.0]}}
    assert rivals.compared(times) == {
        "milliseconds": {"prefill": {"rival": 3.0, "vector-wise": 1.0, "LLM.int8()": 2.0}},
        "ratios": {"prefill": {"vector-wise": 3.0, "LLM.int8()": 1.5}},
    }


def identity():
    return lambda thing: thing


def test_who_has_no_turn_is_stopped():
    player = rivals.Player(identity)
    assert player.turn("shape") == "shape"
    state = Path(f"/proc/{player.process.pid}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "T":  # as it is when the signal has arrived
        pass
    player.end()
    assert not player.process.is_alive()


@torch.inference_mode()
def test_a_turn_of_a_layer_is_its_fastest_call(monkeypatch, constants):
    calls = []
    monkeypatch.setitem(rivals.SHAPES, "small", (4, 8, 8))
    constants("rivals", TURN=0.0)
    monkeypatch.setattr(rivals, "timed", lambda run, _device: (10.0 - len(calls), calls.append(run())))
    assert rivals.layer_timer("torch, not quantized", "vector-wise", torch.float32)("small") == 11.0 - rivals.CALLS
    assert [tuple(output.shape) for output in calls] == rivals.CALLS * [(4, 8)]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("rivals", [(name, dtype) for name, one in rival_layers.RIVALS.items() for dtype in one.dtypes]),
        (
            "rivals_smollm2-135m",
            [(name, one.dtypes[0]) for name, one in (rival_layers.OURS | rival_layers.RIVALS).items() if one.in_models],
        ),
    ],
)
def test_kept_rows_are_whole(file, expected):
    """As many as there are rivals and dtypes; what is timed of each, the tables of docs show."""
    kept = json.loads((KEPT / f"{file}.json").read_text())["rows"]
    assert [(row["rival"], row["dtype"]) for row in kept] == [(name, rivals.name_of(dtype)) for name, dtype in expected]
    assert len({row["code"] for row in kept}) == 1
    for row in kept:
        one = (rival_layers.OURS | rival_layers.RIVALS)[row["rival"]]
        assert (row["computes"], row["alike"]) == (one.computes, one.alike)
