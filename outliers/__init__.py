"""See the emergent outlier features of a transformer, and measure what every 8-bit scheme costs because of them.

Example:
    >>> import outliers
    >>> model = outliers.load_model("pocket/gpt2-0.1m")
    >>> tokenizer = outliers.load_tokenizer("pocket/gpt2-0.1m")
    >>> blocks = outliers.load_text("sample", tokenizer, block=64, blocks=2)

The examples of all public names go on from here.
"""

import importlib.util
import os
import re
import sys
from types import ModuleType

# transformers and bitsandbytes import a package `kernels` for kernels of the hub. In a clone that name may find the
# clone's own folder, which is another thing: None makes the import fail as if there were no such package.
_spec = None if "kernels" in sys.modules else importlib.util.find_spec("kernels")
if _spec and any(os.path.isdir(f"{place}/outlier_kernels") for place in _spec.submodule_search_locations or ()):
    sys.modules["kernels"] = None

# OpenMP threads spin for a while when they wait for another one. On a core that other programs use, they thereby keep
# the awaited thread from running: on two busy cores a block took 28 s, and 3 s where waiting threads sleep. OpenMP
# reads the variable when torch is imported; a value of the user stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.2.0"

_HOME = {
    "UserError": "outliers.errors",
    "SCHEMES": "outliers.quantization.schemes",
    "Scheme": "outliers.quantization.schemes",
    "Quantizer": "outlier_kernels.formats",
    "load_model": "outliers.models.load",
    "load_tokenizer": "outliers.models.load",
    "adopt": "outliers.subjects.own",
    "anatomy": "outliers.views.anatomy",
    "pocket_models": "outliers.models.names",
    "load_text": "outliers.text.blocks",
    "quantize": "outliers.quantization.convert",
    "calibrate": "outliers.quantization.calibration",
    "Calibration": "outliers.quantization.magnitudes",
    "Transform": "outliers.quantization.remedies",
    "Plan": "outliers.quantization.plans.plan",
    "read_plan": "outliers.quantization.plans.plan",
    "export": "outliers.quantization.plans.exports",
    "save_quantized": "outliers.quantization.store",
    "load_quantized": "outliers.quantization.store",
    "load_int8": "outliers.quantization.store",
    "OutliersConfig": "outliers.plugins.loader",
    "perplexity": "outliers.metrics.perplexity",
    "perplexities": "outliers.metrics.perplexity",
    "bits_per_byte": "outliers.metrics.perplexity",
    "Variant": "outliers.models.variant",
    "variant": "outliers.variants.written",
    "cache": "outliers.quantization.caches",
    "Intervention": "outliers.variants.ablated",
    "Ablated": "outliers.variants.ablated",
    "Planted": "outliers.variants.planted",
    "Quantized": "outliers.variants.quantized",
    "Together": "outliers.variants.together",
    "hooks": "outliers.models.hooks",
    "hidden_states": "outliers.tracing.states",
    "trace": "outliers.tracing.trace",
    "Trace": "outliers.tracing.result",
    "masks": "outliers.tracing.masks",
    "watch": "outliers.metrics.training",
    "OutlierCallback": "outliers.runs.callback",
    "compare": "outliers.tracing.compare",
    "table4_row": "outliers.tracing.table4",
    "ablate": "outliers.commands.ablate",
    "origins": "outliers.metrics.origins",
    "readers": "outliers.runs.stages.readers",
    "super_weights": "outliers.runs.stages.super_weights",
    "damage": "outliers.commands.damage",
    "plan": "outliers.commands.plan",
    "train_int8": "outliers.trainer.layers",
    "plant": "outliers.variants.plant",
    "Sweep": "outliers.commands.sweep",
    "Emergence": "outliers.commands.emergence",
    "run": "outliers.runs.run",
    "sweep": "outliers.commands.sweep",
    "Cells": "outliers.commands.measure",
    "frame": "outliers.runs.frame",
}
_ROOMS = ("plot",)  # public as they are, with names of their own
__all__ = [*_HOME, *_ROOMS]


def __getattr__(name: str):
    """Import a public name when it is first used, so that `import outliers` does not import torch."""
    if name in _ROOMS:
        return importlib.import_module(f"outliers.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'outliers' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Package(ModuleType):
    """A package whose functions keep their names: `import outliers.trace` does not bind the command's module."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


# A program that has imported transformers may load models saved with our layers; others need not wait for the import.
if {"transformers", "torch"} <= sys.modules.keys():
    importlib.import_module("outliers.plugins.loader")

# Python imports this package before it looks for the module of a command, and of a mistyped name says only that it is
# missing. Until the module is found, the first argument is "-m".
if sys.argv[:1] == ["-m"]:
    for _named in filter(None, (re.fullmatch(r"(?:-m)?outliers\.(\w+)", argument) for argument in sys.orig_argv)):
        if importlib.util.find_spec(f"outliers.{_named[1]}") is None:
            importlib.import_module("outliers.__main__").refuse(_named[1])
