"""The figures: what a trace, an ablation, the damage of schemes, and rows show, drawn with matplotlib."""

import importlib

_HOME = {
    "heat_map": "trace",
    "sorted_profile": "trace",
    "magnitude_by_position": "trace",
    "patch_map": "trace",
    "key_map": "trace",
    "ablation_bars": "ablation",
    "life_line": "origins",
    "weight_costs": "ablation",
    "damage_map": "damage",
    "damage_bars": "damage",
    "damage_heads": "damage",
    "sweep_costs": "sweep",
    "plan_curve": "sweep",
    "remedy_costs": "remedies",
    "frontier": "remedies",
    "attention_costs": "attention",
    "accuracy_by_size": "zeroshot",
    "figure3": "emergence",
    "figure4": "emergence",
    "along_training": "emergence",
    "causes": "training",
    "growth": "training",
    "your_style": "style",
    "LOOK": "style",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    """Import a figure when it is first used, so that a command imports what it draws alone."""
    if name not in _HOME:
        raise AttributeError(f"module 'outliers.plot' has no attribute '{name}'")
    return getattr(importlib.import_module(f"outliers.plot.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
