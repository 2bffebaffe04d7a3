"""The int8 layers of other libraries, as `benchmarks/rivals.py` times them beside ours.

Each function makes one of an `nn.Linear`, whose dtype its inputs have, and imports its library itself. Weights by
output are scaled to 127 times the scale at most, activations as the library does it.
"""

import copy
import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from outlier_kernels import reference
from outlier_kernels.formats import ROWS
from torch import nn

from outliers.quantization.int8 import Int8Linear
from outliers.quantization.peers import bitsandbytes_layer
from outliers.quantization.schemes import SCHEMES


class Rival(NamedTuple):
    """A layer to compare with.

    package: the library, whose version is kept. computes: the format of the codes, and what shares a scale in
    activations and weights. layer: makes it from an `nn.Linear`. dtypes: of the timed inputs and outputs. alike: the
    name of our layer that computes the same; None if there is none. compiled: whether it is used with `torch.compile`.
    in_models: whether it is a module that a model can run on.
    """

    package: str
    computes: str
    layer: Callable[[nn.Linear], Callable[[torch.Tensor], torch.Tensor]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    alike: str | None = None
    compiled: bool = False
    in_models: bool = False


class ZentorchLinear(nn.Module):
    """AMD's operator of a dynamically quantized layer, with our codes."""

    def __init__(self, exact: nn.Linear):
        super().__init__()
        import zentorch  # noqa: F401, registers the operators

        weight = reference.quantize(exact.weight.detach(), ROWS)
        packed = torch.ops.zentorch.zentorch_weight_prepack_for_dynamic_qlinear(weight.codes)
        self.register_buffer("weight", packed)
        self.register_buffer("scale", weight.scale.flatten())
        self.bias = exact.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.zentorch.zentorch_dynamic_qlinear(
            x, self.weight, self.scale, self.bias, is_weight_prepacked=True
        )


def torchao_layer(exact: nn.Linear) -> nn.Module:
    """Return the layer of torchao, which is made to be compiled."""
    for name in ("torchao", "torch.utils._pytree"):  # which complain of kernels for GPUs
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerRow, quantize_

    layer = copy.deepcopy(exact).eval()
    quantize_(layer, Int8DynamicActivationInt8WeightConfig(granularity=PerRow()))
    return layer


def torch_layer(exact: nn.Linear) -> nn.Module:
    """Return the layer of `quantize_dynamic` with its defaults: 7 of 8 bits for activations, for processors without
    VNNI."""
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(exact), {nn.Linear}, torch.qint8)[0]


def onnxruntime_layer(exact: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a graph of one layer under `quantize_dynamic` of onnxruntime."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime.quantization import quantize_dynamic

    weight, bias = exact.weight.detach().T.contiguous(), exact.bias.detach()
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, size])
        for name, size in zip("xy", weight.shape, strict=True)
    ]
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["p"]), helper.make_node("Add", ["p", "bias"], ["y"])]
    values = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in (("weight", weight), ("bias", bias))]
    graph = helper.make_graph(nodes, "layer", ends[:1], ends[1:], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(model, path, per_channel=True)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def openvino_layer(exact: nn.Linear, group: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a graph of one layer with codes as weight, and activations in float32 that the library quantizes.

    group: number of features of a token that share a scale; by default all.
    """
    import numpy
    import openvino
    from openvino import opset13

    weight = reference.quantize(exact.weight.detach(), ROWS)
    x = opset13.parameter([-1, exact.in_features], numpy.float32)
    scaled = opset13.multiply(opset13.convert(weight.codes.numpy(), "f32"), weight.scale.view(-1, 1).numpy())
    product = opset13.matmul(x, scaled, False, True)
    model = openvino.Model([opset13.add(product, exact.bias.detach().numpy())], [x])
    settings = {
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group or exact.in_features),
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = openvino.compile_model(model, "CPU", settings).create_infer_request()
    return lambda x: torch.from_numpy(request.infer([x.numpy()], share_inputs=True, share_outputs=True)[0])


FLOATS = (torch.bfloat16, torch.float32)
BY_ROW = "int8 a token × int8 an output"
DECOMPOSED = f"{BY_ROW}, outlier features in 16 bits"
RIVALS = {
    "torch, not quantized": Rival("torch", "exact products", copy.deepcopy, FLOATS, in_models=True),
    "bitsandbytes": Rival(
        "bitsandbytes", DECOMPOSED, bitsandbytes_layer, FLOATS[:1], alike="LLM.int8()", in_models=True
    ),
    "zentorch_dynamic_qlinear": Rival("zentorch", BY_ROW, ZentorchLinear, FLOATS, alike="vector-wise", in_models=True),
    "torchao PerRow, compiled": Rival("torchao", BY_ROW, torchao_layer, FLOATS[:1], alike="vector-wise", compiled=True),
    "OpenVINO, a scale a token": Rival("openvino", BY_ROW, openvino_layer, alike="vector-wise"),
    "OpenVINO, groups of 32": Rival(
        "openvino", "int8 32 features of a token × int8 an output", partial(openvino_layer, group=32)
    ),
    "onnxruntime quantize_dynamic": Rival("onnxruntime", "uint8 a tensor × int8 an output", onnxruntime_layer),
    "torch quantize_dynamic": Rival("torch", "uint8 in 7 bits a tensor × int8 a tensor", torch_layer, in_models=True),
}


def own_layer(exact: nn.Linear, scheme: str) -> Int8Linear:
    return Int8Linear(exact, SCHEMES[scheme])


# Those that others are timed beside.
OURS = {
    "vector-wise": Rival("outliers", BY_ROW, partial(own_layer, scheme="absmax-vector"), FLOATS, in_models=True),
    "LLM.int8()": Rival("outliers", DECOMPOSED, partial(own_layer, scheme="llm.int8"), FLOATS, in_models=True),
}
