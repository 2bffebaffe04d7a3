"""A PEFT adapter beside the weights of a model, merged by PEFT itself, one weight at a time as it is read."""

import copy
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outliers.errors import UserError, joined_names, shown
from outliers.models.skeleton import refusals, skeleton
from outliers.models.stored.tensors import Lazy, printable, read_safetensors
from outliers.models.weight_files import ADAPTER, ADAPTER_WEIGHTS, adapter_fields, adapter_in_words, regular_file

# Initializations of LoRA that leave the base weights unchanged.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", None)
# Settings for changes other than of modules' parameters.
UNREAD = ("target_parameters", "trainable_token_indices", "bias", "alora_invocation_tokens")


def merge_adapter(tensors: dict[str, Lazy], config: PretrainedConfig, folder: Path) -> dict[str, Lazy]:
    """Return the tensors of a model with the adapter of a folder merged into them.

    Raises:
        UserError: PEFT is not installed; or there is no adapter, it cannot be merged, or is of another model.
    """
    if (fields := adapter_fields(folder)) is None:
        raise UserError(f"'{folder}' has no {ADAPTER}; expected an adapter beside its weights: leave --adapter out")
    weights = regular_file(folder / ADAPTER_WEIGHTS)
    by_peft = "merge it by PEFT's merge_and_unload, and save the model"
    for name in UNREAD:
        if fields.get(name) not in (None, [], {}, "none"):
            raise UserError(f"the adapter in '{folder}' has {name} {shown(fields[name])}, which is not read; {by_peft}")
    if (start := fields.get("init_lora_weights")) not in PLAIN_STARTS:
        raise UserError(f"the adapter in '{folder}' began as {shown(start)}, by other weights than these; {by_peft}")
    base = skeleton(config, torch.float32)
    ties = {*base.all_tied_weights_keys, *base.all_tied_weights_keys.values()}
    layers, replaced = _peft_layers(base, folder, fields, weights)
    if tied := sorted(ties & layers.keys()):
        raise UserError(f"the adapter in '{folder}' changes a tied weight ({joined_names(tied)}); {by_peft}")
    if absent := sorted(layers.keys() - tensors.keys()):
        raise UserError(f"the adapter in '{folder}' is of another model: its weights lack {joined_names(absent)}")
    plain = tensors | replaced
    return plain | {name: _lazy(plain, layer, name) for name, layer in layers.items()}


def _peft_layers(
    base: PreTrainedModel, folder: Path, fields: dict, weights: Path
) -> tuple[dict[str, nn.Module], dict[str, Lazy]]:
    """Return PEFT's layers for the modules that an adapter changes, by the names of their parameters, and the base
    weights that the adapter holds whole, as PEFT saves embeddings."""
    try:
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper
    except ImportError:
        raise UserError("--adapter needs PEFT, which is not installed; install outliers[peers]") from None
    with refusals(str(folder), part="the adapter of "), warnings.catch_warnings(action="ignore"):
        settings = PeftConfig.from_pretrained(folder)
        if settings.is_prompt_learning:
            raise UserError(f"'{folder}' holds a {adapter_in_words(fields)}, which has no weights to merge")
        for module in base.modules():  # a weight on the CPU without memory, so that PEFT puts the adapter there
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.zeros(1).expand(parameter.shape), requires_grad=False)
        model = PeftModel.from_pretrained(base, folder, config=settings, low_cpu_mem_usage=True)
        _, stored = read_safetensors(weights, lambda: refusals(str(folder), part="the adapter of "))
        expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    layers, replaced = {}, {}
    for path, module in model.base_model.model.named_modules():
        if isinstance(module, BaseTunerLayer):
            layers |= {f"{path}.{name}": module for name, _ in module.get_base_layer().named_parameters()}
        elif isinstance(module, ModulesToSaveWrapper):
            layers |= {f"{path}.{name}": module for name, _ in module.original_module.named_parameters()}
    for lazy in stored:
        own = lazy.name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if ".base_layer." in lazy.name and own in layers:
            replaced[own] = lazy
        elif lazy.name not in expected or lazy.shape != expected[lazy.name].shape:
            raise UserError(
                f"the adapter in '{folder}' holds '{printable(lazy.name)}' of the shape {lazy.shape}, and its "
                f"{ADAPTER} asks for none such; download it again"
            )
    if absent := sorted(expected.keys() - {lazy.name for lazy in stored}):
        raise UserError(
            f"the adapter in '{folder}' lacks {len(absent)} tensors ({joined_names(absent)}); download it again"
        )
    return layers, replaced


def _lazy(plain: dict[str, Lazy], layer: nn.Module, name: str) -> Lazy:
    """Return a parameter, float32, into which a PEFT layer merges its adapter when it is read.

    plain: the parameters without the adapter, by name.
    """
    path, _, own = name.rpartition(".")

    def read() -> torch.Tensor:
        if hasattr(layer, "original_module"):  # the adapter replaces the whole module
            (kept,) = layer.modules_to_save.values()
            return kept.get_parameter(own).detach().float().clone()
        merging = copy.deepcopy(layer)
        whole = merging.get_base_layer()
        for part, _ in [*whole.named_parameters()]:
            setattr(whole, part, nn.Parameter(plain[f"{path}.{part}"].read().float(), requires_grad=False))
        with torch.no_grad():
            merging.merge()
        return merging.get_base_layer().get_parameter(own).data  # merging replaces the module of a norm

    return plain[name]._replace(dtype="F32", read=read, piece=None)
