"""What other libraries make of a model by the export of a plan; each quantizes a copy."""

import copy
import logging
import tempfile

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

NOISY = ("bitsandbytes", "bitsandbytes.autograd._functions", "torchao", "torch.utils._pytree")  # at every layer


def by_torchao(model: PreTrainedModel, config) -> PreTrainedModel:
    """A model under a `FqnToConfig`."""
    from torchao.quantization import quantize_

    copied = copy.deepcopy(model)
    quantize_(copied, config, filter_fn=None)
    return copied


def by_compressed_tensors(model: PreTrainedModel, config: dict) -> PreTrainedModel:
    """A model whose layers round as the library does, to scales that it takes of the weights."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    copied = copy.deepcopy(model)
    apply_quantization_config(copied, QuantizationConfig.model_validate(config), show_progress=False)
    for module in copied.modules():
        if scheme := getattr(module, "quantization_scheme", None):
            _take_scales(module, scheme.weights)
    return copied


def _take_scales(module: nn.Module, arguments) -> None:
    """Set the scale and the zero point of a weight, of its smallest and largest values."""
    from compressed_tensors.offload import update_offload_parameter
    from compressed_tensors.quantization.utils import calculate_qparams

    rows = {
        "tensor": lambda weight: weight.reshape(1, -1),
        "channel": lambda weight: weight,
        "group": lambda weight: weight.unflatten(1, (-1, arguments.group_size)),
    }[arguments.strategy](module.weight.detach())
    found = calculate_qparams(*torch.aminmax(rows, dim=-1), arguments)
    for name, value in zip(("weight_scale", "weight_zero_point"), found, strict=True):
        place = getattr(module, name)
        update_offload_parameter(module, name, value.reshape(place.shape).to(place.dtype))


def by_bitsandbytes(model: PreTrainedModel, arguments: dict) -> PreTrainedModel:
    """A model as transformers loads it with a `BitsAndBytesConfig`."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = BitsAndBytesConfig(**arguments)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=model.dtype, device_map="cpu"
        ).eval()


#: By the format of an export; its argument is what `outliers.export` gives.
APPLIED = {"torchao": by_torchao, "compressed-tensors": by_compressed_tensors, "bitsandbytes": by_bitsandbytes}
