"""The figures: what a trace, an ablation, the damage of schemes, and rows show, drawn with matplotlib."""

import importlib

_HOME = {
    "heat_map": "outliers.plot.trace",
    "sorted_profile": "outliers.plot.trace",
    "magnitude_by_position": "outliers.plot.trace",
    "patch_map": "outliers.plot.trace",
    "key_map": "outliers.plot.trace",
    "ablation_bars": "outliers.plot.ablation",
    "life_line": "outliers.plot.origins",
    "weight_costs": "outliers.plot.ablation",
    "damage_map": "outliers.plot.damage",
    "damage_bars": "outliers.plot.damage",
    "damage_heads": "outliers.plot.damage",
    "sweep_costs": "outliers.views.perplexity",
    "plan_curve": "outliers.views.plan",
    "remedy_costs": "outliers.plot.remedies",
    "frontier": "outliers.plot.remedies",
    "attention_costs": "outliers.plot.attention",
    "accuracy_by_size": "outliers.plot.zeroshot",
    "figure3": "outliers.plot.emergence",
    "figure4": "outliers.plot.emergence",
    "along_training": "outliers.plot.emergence",
    "causes": "outliers.plot.training",
    "growth": "outliers.plot.training",
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
