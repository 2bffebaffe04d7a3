"""Weights of modules, in memory or offloaded by accelerate."""

from collections.abc import Iterator

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import align_module_device, has_offloaded_params
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError

ACCELERATED = ("forward", "_old_forward", "_hf_hook")  # attributes that accelerate sets on a module


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate gives a module its weights only during a call."""
    return has_offloaded_params(module)


def check_in_memory(model: PreTrainedModel, what: str) -> None:
    """Raise UserError if weights of a model are offloaded, so that a change would be lost; what: the change."""
    path = next((path for path, module in model.named_modules() if is_offloaded(module)), None)
    if path is not None:
        raise UserError(
            f"the weights of '{path}' are offloaded by accelerate, and {what} needs all of them in memory; expected a "
            "model on one device, or a streamed one"
        )


def shared_in_copies(model: PreTrainedModel) -> dict[int, object]:
    """Return a memo for `copy.deepcopy` with which copies share parameters and offloaded weights."""
    hooks = (module._hf_hook for module in model.modules() if is_offloaded(module))
    kept = (mapping for hook in hooks for mapping in (hook.weights_map, hook.tied_params_map))
    return {id(one): one for one in (*model.parameters(), *kept) if one is not None}


def parameter_of(module: nn.Module, name: str = "weight") -> torch.Tensor | None:
    """Return the weight or another parameter of a module, on the device that computes with it; None if it has none.

    For an offloaded module this is a copy.
    """
    if not is_offloaded(module):
        return getattr(module, name, None)
    with align_module_device(module):
        return module._parameters.get(name)


def own_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by name, of tied ones only the first."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = dict(model.named_parameters())
    # Tied weights that are in memory are one parameter; accelerate makes two, of which it may offload one alone.
    pairs = {name: (parameters[name], parameters.get(tied[name])) for name in tied.keys() & parameters.keys()}
    repeated = {name for name, pair in pairs.items() if any(one is not None and one.is_meta for one in pair)}
    return {name: parameter for name, parameter in parameters.items() if name not in repeated}


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values of all parameters, and of tied ones only the first.

    Raises:
        UserError: one is neither in memory nor offloaded by accelerate.
    """
    for path, parameter in own_parameters(model).items():
        if not parameter.is_meta:
            yield path, parameter
        else:
            owner, _, name = path.rpartition(".")
            weight = parameter_of(model.get_submodule(owner), name)
            if weight is None or weight.is_meta:
                raise UserError(f"'{path}' has no values; expected a model with all weights in memory or offloaded")
            yield path, weight


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model reads its inputs, also if its first weights are offloaded."""
    hooks = (vars(module).get("_hf_hook") for module in model.modules() if is_offloaded(module))
    if model.device.type != "meta" or (hook := next(hooks, None)) is None:
        return model.device
    return torch.device(hook.execution_device)


def load_offloaded(module: nn.Module) -> nn.Module:
    """Load the offloaded weights of a module into it permanently, and return it; nothing else may use the module."""
    if is_offloaded(module):
        with align_module_device(module):
            parameters, buffers = dict(module._parameters), dict(module._buffers)
        module._parameters, module._buffers = parameters, buffers
        hook = module._hf_hook
        for name in ACCELERATED:
            vars(module).pop(name)
        kept = {name: getattr(hook, name) for name in ("execution_device", "io_same_device", "skip_keys")}
        add_hook_to_module(module, AlignDevicesHook(**kept))
    return module
