"""Figures of traces, ablations, damage by schemes, and rows, drawn with matplotlib."""

import importlib

_VIEWS = {  # the figures of each module of outliers.views
    "trace": ["heat_map", "sorted_profile", "magnitude_by_position", "patch_map"],
    "keys": ["key_map"],
    "ablation": ["ablation_bars"],
    "origins": ["life_line"],
    "super_weights": ["weight_costs"],
    "damage": ["damage_map", "damage_bars", "damage_heads"],
    "experts": ["expert_map"],
    "perplexity": ["sweep_costs"],
    "plan": ["plan_curve"],
    "remedies": ["remedy_costs", "frontier"],
    "attention": ["attention_costs"],
    "zeroshot": ["accuracy_by_size"],
    "emergence": ["figure3", "figure4", "along_training"],
    "causes": ["causes"],
    "growth": ["growth"],
}
_HOME = {name: f"outliers.views.{view}" for view, names in _VIEWS.items() for name in names}
_HOME |= dict.fromkeys(["your_style", "LOOK"], "outliers.show.style")
__all__ = list(_HOME)


def __getattr__(name: str):
    """Import a figure when it is first used, so that a command imports what it draws alone."""
    if name not in _HOME:
        raise AttributeError(f"module 'outliers.plot' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
