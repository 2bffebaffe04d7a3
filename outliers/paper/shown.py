"""The table of views: which view shows the rows of which kind of experiment."""

from pathlib import Path

from outliers.errors import UserError
from outliers.show.section import Section, View, section_of
from outliers.specification.fields import resolved
from outliers.specification.kinds import Named
from outliers.views import OF_METRICS

OF_KINDS = {
    "Experiment": OF_METRICS["perplexity"],
    "OneModel": "outliers.views.trace:kept_trace_section",
    "Ablation": "outliers.views.ablation:ablation_section",
    "Account": "outliers.views.account:account_section",
    "Damage": "outliers.views.damage:kept_damage_section",
    "Planning": "outliers.views.plan:kept_plan_section",
    "Emergence": "outliers.paper.table4:emergence_section",
    "Memory": OF_METRICS["memory"],
    "LinearLayers": OF_METRICS["linear_layer"],
    "Latency": OF_METRICS["latency"],
    "ZeroShot": OF_METRICS["zeroshot"],
    "Cells": "outliers.views.measured:measured_section",
}


def view_of(kind: type[Named]) -> View:
    """Return the view of a kind of experiment: its own `section`, or the one in the table; raise UserError without
    one."""
    views = (OF_KINDS[one.__name__] for one in kind.__mro__ if one.__name__ in OF_KINDS)
    view = kind.section or next(views, None)
    if view is None:
        raise UserError(f"{kind.__name__} has no view: what an experiment of it shows, its field 'shows' names")
    return resolved(view)


def show(spec: Named, folder: str | Path, rows: list[dict]) -> Section:
    """Make the section of an experiment's rows. folder: where the rows are kept."""
    before = (spec, folder) if spec.of_folder else ()
    return section_of(view_of(type(spec)), *before, rows)
