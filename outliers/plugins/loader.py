"""Our layers in transformers: `from_pretrained(…, quantization_config=OutliersConfig("llm.int8"))`.

Importing this module registers the quantization method "outliers". transformers has no entry points for methods, so
`outliers` imports it with `outliers.OutliersConfig`, and by itself where transformers is imported already.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from outliers.errors import UserError, mistake_in, shown
from outliers.models.anatomy import projections, stacks_of
from outliers.models.anatomy.experts import expert_count, holds_experts, set_weights, settle
from outliers.quantization.attention import AttentionProducts, put_attention
from outliers.quantization.convert import check_calibrated, check_kept, quantize, skipped
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.plans.plan import Plan, read_plan
from outliers.quantization.schemes import Scheme, get_scheme, is_known, read_scheme, write_scheme

METHOD = "outliers"  # `quant_method` in config.json
KEYS = ("scheme", "skip", "plan")


@contextmanager
def _value_errors() -> Iterator[None]:
    """Turn a UserError within this context into a ValueError, which users of transformers expect."""
    try:
        yield
    except UserError as error:
        raise ValueError(str(error)) from None
    except ValidationError as error:
        raise ValueError(f"the plan is none: {mistake_in(error.errors(include_url=False)[0])}") from None


@register_quantization_config(METHOD)
class OutliersConfig(QuantizationConfigMixin):
    """Quantization by `from_pretrained`: to int8 codes alone, or beside exact weights where codes are no int8.

    The model is that of `outliers.quantize` with the same scheme, skip and plan, bit for bit, kept as `keep` says.

    Args:
        scheme: name, or a scheme of one's own; by default that of the plan.
        skip: places that stay exact, as for `outliers.quantize`.
        plan: a `Plan` or its file: what else stays exact or gets another scheme. Its content is kept, not its path.

    Raises:
        ValueError: a key or scheme is unknown, there is none, or it needs a calibration; skip is no list of places; the
            plan cannot be read, or is for another scheme.

    Example:
        >>> outliers.OutliersConfig("llm.int8", skip=["ffn_out"]).to_dict()["skip"]
        ['ffn_out']
    """

    def __init__(
        self,
        scheme: str | Scheme | dict | None = None,
        skip: Collection[str] = (),
        plan: str | Path | Plan | dict | None = None,
        quant_method: str = METHOD,  # as config.json has it
        **unknown: Any,
    ):
        if unknown:
            raise ValueError(f"unknown {', '.join(sorted(unknown))} in OutliersConfig; expected {', '.join(KEYS)}")
        if isinstance(skip, str) or not isinstance(skip, Collection):
            raise ValueError(f"skip is {shown(skip)}; expected a list of places, such as ['ffn_out', '*.down_proj']")
        with _value_errors():
            plan = read_plan(plan) if isinstance(plan, str | Path) else plan and Plan.model_validate(plan)
            if scheme is None and plan is None:
                raise ValueError("OutliersConfig without a scheme; expected one, such as 'llm.int8', or a plan")
            scheme = _scheme(plan.scheme if scheme is None else scheme)
            if plan and plan.scheme != scheme.name:
                raise ValueError(f"a plan for '{plan.scheme}' beside scheme '{scheme.name}'; expected one of the two")
            check_calibrated(scheme, None)
            self.quant_method = METHOD
            self.scheme = _written(scheme)
        self.skip, self.plan = list(skip), plan and plan.model_dump()

    @classmethod
    def from_dict(cls, config_dict: dict, *arguments: Any, **keywords: Any) -> "OutliersConfig":
        """Read a dictionary of `to_dict`; a plan by its content, for a model's file must not name other files."""
        if isinstance(config_dict.get("plan"), str):
            raise ValueError(f"plan is {shown(config_dict['plan'])} in a dictionary; expected the content of a plan")
        return super().from_dict(config_dict, *arguments, **keywords)

    @property
    def arguments(self) -> dict:
        """The arguments of `outliers.quantize`."""
        plan = self.plan or {"exact": [], "instead": {}}
        return {"scheme": _scheme(self.scheme), "skip": [*self.skip, *plan["exact"]], "instead": plan["instead"]}

    @property
    def keep(self) -> str:
        """The weights that the model keeps: "int8" codes alone, or "exact" ones where a scheme has no such codes."""
        try:
            for scheme in (self.scheme, *self.arguments["instead"]):
                check_kept(_scheme(scheme))
        except UserError:
            return "exact"
        return "int8"

    def __repr__(self) -> str:
        scheme = self.arguments["scheme"].name
        plan = f", plan=<of {self.plan['model']!r}>" if self.plan else ""
        return f"OutliersConfig({scheme!r}{f', skip={self.skip}' if self.skip else ''}{plan})"


def _scheme(written: str | Scheme | dict) -> Scheme:
    return read_scheme(json.dumps(written)) if isinstance(written, dict) else get_scheme(written)


def _written(scheme: Scheme) -> str | dict:
    """Return a scheme's name if a table has the scheme, or else its fields, from which it can be read back."""
    if is_known(scheme):
        return scheme.name
    parts = json.loads(write_scheme(scheme))
    _scheme(parts)  # raises an error if it cannot be read back
    return parts


@register_quantizer(METHOD)
class OutliersQuantizer(HfQuantizer):
    """Quantizes a model while transformers loads it.

    With int8 codes each weight is quantized as it is read; a saved model has codes, which are read; a scheme that keeps
    exact weights quantizes the model once all are read. layers: by path, the layers whose weights are not read yet.
    """

    quantization_config: OutliersConfig
    quantized_element_size = 1

    def __init__(self, quantization_config: OutliersConfig, **keywords):
        super().__init__(quantization_config, **keywords)
        self.layers: dict[str, Int8Linear] = {}

    def validate_environment(self, *_, device_map: dict | str | None = None, **__) -> None:
        """Refuse parts on disk: codes are not read back from there."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map has parts on 'disk'; expected devices with memory, such as 'cpu'")

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_) -> None:
        config, modules = self.quantization_config, dict(model.named_modules())
        if any(stack.layers not in modules for stack in stacks_of(model.config)):
            raise ValueError(f"{type(model).__name__} has no head; expected one that has, as of AutoModelForCausalLM")
        # A scheme draws random numbers on the CPU, while transformers keeps the model on "meta".
        with _value_errors(), torch.device("cpu"):
            if config.plan:
                Plan.model_validate(config.plan).check(projection.path for projection in projections(model))
            quantized = quantize(model, **config.arguments, keep=config.keep)  # of "exact", too: it refuses misfits
        self.layers = _layers(quantized, Int8Linear)
        if self.pre_quantized:
            _replace(model, self.layers)
            settle(model)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_) -> bool:
        """Return whether a tensor of a checkpoint becomes codes, or biases of experts that have codes."""
        path, _, name = param_name.rpartition(".")
        return (name == "weight" and path in self.layers) or bool(_expert_layers(model, param_name, self.layers))

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that quantizes a weight."""
        return _Codes(self.layers)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_) -> PreTrainedModel:
        arguments = self.quantization_config.arguments
        for layer in self.layers.values():
            layer.straight_through = True  # as other layers of transformers, so that adapters train on them
            layer.codes = layer.codes.to(torch.int8)  # transformers 5.0 reads them in float32 for T5's "wo"
        self.layers = {}
        with _value_errors():
            if self.quantization_config.keep == "exact":
                _replace(model, _layers(quantize(model, **arguments), QuantizedLinear))
            settle(model)
            if arguments["scheme"].attention is not None:
                left = skipped(model, arguments["skip"], arguments["scheme"])
                put_attention(model, AttentionProducts.of(arguments["scheme"]), left)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel, *_) -> tuple[dict | None, dict]:
        """Return the tensors that `save_pretrained` writes: codes, or exact weights by their original names."""
        exact = _layers(model, QuantizedLinear)
        if not exact:
            return None, {}
        renamed = {f"{path}.projection.{name}": f"{path}.{name}" for path in exact for name in ("weight", "bias")}
        return {renamed.get(name, name): tensor for name, tensor in model.state_dict().items()}, {}

    def is_serializable(self, *_) -> bool:
        """Return whether `save_pretrained` can write the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters train on top."""
        return self.quantization_config.keep == "int8"


class _Codes(ConversionOps):
    """An operation that turns a weight into the buffers of its layer, which replaces the projection."""

    def __init__(self, layers: dict[str, Int8Linear]):
        self.layers = layers

    def convert(self, input_dict: dict, model: PreTrainedModel, missing_keys: set[str], **_) -> dict[str, torch.Tensor]:
        converted = {}
        for name, weight in input_dict.items():
            weight = weight[0] if isinstance(weight, list) else weight
            missing_keys.discard(name)
            path, _, part = name.rpartition(".")
            module = model.get_submodule(path)
            if layers := _expert_layers(model, name, self.layers):
                _replace(model, layers)
                set_weights(module, part, weight)
                if len(layers) < expert_count(module):  # some experts stay exact
                    converted[name] = weight
            else:
                layers = {path: self.layers[path]}
                self.layers[path].bias = module.bias
                self.layers[path].set_weight(weight)
                _replace(model, layers)
            for path, layer in layers.items():
                tensors = (*layer.named_parameters(), *layer.named_buffers())
                converted |= {f"{path}.{field}": value for field, value in tensors if not value.is_meta}
        return converted


def _layers(model: PreTrainedModel, kind: type) -> dict[str, Any]:
    """Return the projections of a model that are of a type, by path."""
    modules = {projection.path: projection.module for projection in projections(model)}
    return {path: module for path, module in modules.items() if isinstance(module, kind)}


def _expert_layers(model: PreTrainedModel, name: str, layers: dict[str, Int8Linear]) -> dict[str, Int8Linear]:
    """Return those of some layers, by path, whose weights or biases are in the tensor `name` of all experts."""
    path, _, part = name.rpartition(".")
    if not holds_experts(model.get_submodule(path)):
        return {}
    ending = f".{part.removesuffix('_bias')}"
    return {place: layer for place, layer in layers.items() if place.startswith(f"{path}.") and place.endswith(ending)}


def _replace(model: PreTrainedModel, modules: dict[str, torch.nn.Module]) -> None:
    for path, module in modules.items():
        model.set_submodule(path, module)
