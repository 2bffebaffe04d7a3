"""The figures: what a trace, an ablation, the damage of schemes, and rows show, drawn with matplotlib."""

import importlib

_HOME = {
    "heat_map": "outliers.views.trace",
    "sorted_profile": "outliers.views.trace",
    "magnitude_by_position": "outliers.views.trace",
    "patch_map": "outliers.views.trace",
    "key_map": "outliers.views.keys",
    "ablation_bars": "outliers.views.ablation",
    "life_line": "outliers.views.origins",
    "weight_costs": "outliers.views.super_weights",
    "damage_map": "outliers.views.damage",
    "damage_bars": "outliers.views.damage",
    "damage_heads": "outliers.views.damage",
    "sweep_costs": "outliers.views.perplexity",
    "plan_curve": "outliers.views.plan",
    "remedy_costs": "outliers.views.remedies",
    "frontier": "outliers.views.remedies",
    "attention_costs": "outliers.views.attention",
    "accuracy_by_size": "outliers.views.zeroshot",
    "figure3": "outliers.views.emergence",
    "figure4": "outliers.views.emergence",
    "along_training": "outliers.views.emergence",
    "causes": "outliers.views.causes",
    "growth": "outliers.views.growth",
    "your_style": "outliers.show.style",
    "LOOK": "outliers.show.style",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    """Import a figure when it is first used, so that a command imports what it draws alone."""
    if name not in _HOME:
        raise AttributeError(f"module 'outliers.plot' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
