"""Weights between two codes: a draw lets them fall either way, in every format, and moves nothing else."""

import statistics

import pytest
import torch
from torch import nn

from outliers import load_model, perplexity
from outliers.quantization.convert import quantize, quantized_layers
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.magnitudes import InputSummary
from outliers.quantization.schemes import get_scheme
from outliers.variants.draw import SIZE, drawn
from tests.small_models import make_model, sample_blocks

MODEL = "pocket/opt-1.7m"
ORDERS = (
    lambda w, most: w / (most / 7),
    lambda w, most: w * (7 / most),
    lambda w, most: (7 * w) / most,
    lambda w, most: (w / most) * 7,
    lambda w, most: w * (1 / (most / 7)),
    lambda w, most: (7 * w.double()) / most.double(),
)
BETWEEN = {  # by format: the largest of a group, and what then lies between two codes
    **dict.fromkeys(("int4", "int4-e4m3", "int4-int8"), (7.0, 2.5)),
    **dict.fromkeys(("mxfp4", "nvfp4"), (6.0, 2.5)),
    **dict.fromkeys(("fp8-e4m3", "mxfp8-e4m3"), (448.0, 2.125)),
    "int8": (127.0, 2.5),
    "int6": (31.0, 2.5),
    "fp8-e5m2": (57344.0, 2.25),
    "int4-in-int8": (119.0, 8.5),
}


@pytest.fixture(scope="module")
def blocks():
    return sample_blocks(MODEL, 64, 4)


def perplexity_in(model, blocks, draw: int) -> float:
    with drawn(model, draw):
        return perplexity(model, blocks)


def test_the_scatter_covers_orders_of_operations(blocks):
    """Of one quotient in six ways, which agree but for ties."""
    model = quantize(load_model(MODEL), "w4a4")
    values = [perplexity_in(model, blocks, draw) for draw in range(1, 9)]
    mean, scatter = statistics.fmean(values), statistics.stdev(values)
    orders = []
    for order in ORDERS:
        for layer in quantized_layers(model):
            weight, operand = layer.weight.detach(), layer.operand
            codes = order(weight, weight.abs().amax(1, keepdim=True)).round().to(torch.int8)
            assert (codes != operand.codes.codes).float().mean() < 0.001
            layer.made = layer.made._replace(operand=operand._replace(codes=operand.codes._replace(codes=codes)))
        orders.append(perplexity(model, blocks))
    assert max(orders) > min(orders)
    assert all(abs(value - mean) < 2.5 * scatter for value in orders)


@pytest.mark.parametrize("scheme", ["absmax", "llm.int8", "w4a4-g8", "zeropoint", "mxfp4"])
def test_without_ties_only_embeddings_move(scheme, blocks):
    model = quantize(make_model("gpt2"), scheme)
    ids = blocks[:2, :32] % model.config.vocab_size
    factors = torch.randn(model.transformer.wte.weight.shape, generator=torch.Generator().manual_seed(3))
    factors = factors.mul_(SIZE).add_(1)
    hook = model.transformer.wte.register_forward_hook(lambda _module, inputs, output: output * factors[inputs[0]])
    moved = perplexity(model, ids)
    hook.remove()
    assert perplexity_in(model, ids, 3) == moved


def with_tie(scheme: str) -> torch.Tensor:
    """A weight with a single entry between two codes, at [1, 70], by the format's largest value in each row."""
    most, tie = BETWEEN[get_scheme(scheme).weights.format]
    weight = torch.full((4, 128), 1.0)
    weight[:, ::32], weight[:, 1::32] = most, -most
    weight[1, 70] = tie
    return weight


@pytest.mark.parametrize(
    "scheme",
    [
        *("absmax", "absmax-vector", "zeropoint", "llm.int8", "llm.int8-bnb", "w4a4", "w4a8-g64", "w4a4+gptq"),
        *("mxfp4", "nvfp4", "mxfp8-e4m3", "qserve", "fireq", "comet", "flexq", "fp8-e5m2", "w4", "w6a6"),
    ],
)
def test_a_tie_falls_either_way_and_nothing_else_moves(scheme):
    projection, ones = nn.Linear(128, 4, bias=False), torch.ones(128)
    projection.weight = nn.Parameter(with_tie(scheme))
    layer = QuantizedLinear(projection, get_scheme(scheme), None, InputSummary(ones, ones, gram=torch.eye(128)))
    plain, in_draws = layer.quantized_weight.dequantize(), []
    for layer.draw in range(1, 13):
        in_draws.append(layer.quantized_weight.dequantize())
    moved = torch.stack([(values - plain).abs() > 1e-4 for values in in_draws])
    assert moved.any(0).nonzero().tolist() == [[1, 70]]
    assert 0 < int(moved[:, 1, 70].sum()) < 12
    layer.draw = 0
    assert torch.equal(layer.quantized_weight.dequantize(), plain)
