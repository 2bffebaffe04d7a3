"""The tables and figures of the paper in the order of their numbers, then those of experiments beyond it.

Each entry says which printed numbers stand beside which measured ones, and which view shows the rows. Nothing here
imports torch, because redrawing works without it.
"""

from functools import partial

from outliers.commands.ablate import Ablation
from outliers.commands.damage import Damage
from outliers.commands.emergence import Emergence
from outliers.commands.latency import Latency
from outliers.commands.measure import Cells
from outliers.commands.memory import Memory
from outliers.commands.origins import Account
from outliers.commands.sweep import Sweep
from outliers.commands.trace import Tracing
from outliers.commands.training import Training
from outliers.commands.zeroshot import ZeroShot
from outliers.config.experiment import Experiment
from outliers.errors import unknown_name
from outliers.paper.linear_layers import LinearLayers
from outliers.paper.published import BLOG, Artefact, Published
from outliers.published.numbers import model_key, numbers_of
from outliers.show.axes import count_label
from outliers.views.attention import attention_section
from outliers.views.causes import causes_section
from outliers.views.emergence import table4
from outliers.views.linear_layer import speed_rows
from outliers.views.memory import BITS, largest
from outliers.views.remedies import remedies_section
from outliers.views.table4 import PANELS, families_section, panel_section, table4_section
from outliers.views.table7 import table7_section, table9_section, table10_section
from outliers.views.training import settings
from outliers.views.zeroshot import PREFIX


def _largest_models(rows: list[dict]) -> list[dict]:
    return [
        {"hardware": f"{row['hardware']} {row['gigabytes']:g} GB", "bits": bits, "value": row[f"{bits}-bit"]}
        for row in largest(rows).to_dict("records")
        for bits in BITS
    ]


def _table4_values(rows: list[dict]) -> list[dict]:
    table = table4(rows).stack().dropna().rename_axis(["model", "metric"])
    return _named(table.rename("value").reset_index().to_dict("records"))


def _named(rows: list[dict]) -> list[dict]:
    """Rename models and metrics to the keys of the printed numbers."""
    return [row | {"model": model_key(row["model"]), "metric": row["metric"].removeprefix(PREFIX)} for row in rows]


def _trained(rows: list[dict]) -> list[dict]:
    return [
        run._asdict() | {"model": count_label(run.parameters), "value": run.perplexity.value} for run in settings(rows)
    ]


def _steps(rows: list[dict]) -> list[dict]:
    """Return the decode steps, because the paper prints their milliseconds per token."""
    steps = (row for row in rows if row["metric"] == "latency.decode")
    return _named([row | {"hardware": row["device_name"]} for row in steps])


def _table(number: int, kind: type[Experiment], keys: tuple[str, ...], form: str = "{:.4g}", more: str = "", **of_ours):
    """Make the artefact of a numbered table of the paper.

    keys, form: see `Published`. more: ending of `Published.source`. of_ours: fields of `Artefact` that measure and show
    our values.
    """
    published = Published(f"LLM.int8(), Table {number}{more}", keys, numbers_of(f"table{number}", keys), form)
    return Artefact(f"Table {number}", kind, published, **of_ours)


FIGURE1 = ("model", "task", "metric", "scheme")
RECIPE = ("model", "int8", "decomposition")
SCORES = ", scores of GLUE tasks"  # none was measured: our runs give perplexities
ARTEFACTS = {
    "table1": _table(1, Sweep, ("model", "scheme"), "{:.2f}", measured=_named),
    "figure1": Artefact(
        "Figure 1",
        ZeroShot,
        Published(f"{BLOG} (the paper's figure prints no numbers)", FIGURE1, numbers_of("figure1", FIGURE1)),
        measured=_named,
    ),
    "table3": _table(3, Memory, ("hardware", "bits"), "{}", measured=_largest_models),
    "table4": _table(4, Emergence, ("model", "metric"), measured=_table4_values, view=table4_section),
    **{
        panel: Artefact(panel.replace("figure", "Figure "), Emergence, view=partial(panel_section, panel))
        for panel in PANELS
    },
    "table5": _table(5, LinearLayers, ("way", "dimension"), "{:.2f}", measured=speed_rows),
    "table6": _table(6, Latency, ("model", "scheme", "hardware", "batch"), more=f"; {BLOG}", measured=_steps),
    "table7": _table(7, Training, RECIPE, "{:.2f}", measured=_trained, view=table7_section),
    "table10": _table(10, Training, (*RECIPE, "task"), more=SCORES, view=table10_section),
    "table9": _table(9, Training, ("method", "task"), more=SCORES, view=table9_section),
}
BEYOND = {
    "trace": Artefact("Outlier features", Tracing),
    "origins": Artefact("Origins", Account),
    "ablation": Artefact("Ablation", Ablation),
    "damage": Artefact("Damage", Damage),
    "sweep": Artefact("Sweep", Sweep),
    "token_losses": Artefact("Loss by token", Cells),
    "continuation": Artefact("Continuations", Cells),
    "remedies": Artefact("Remedies", Cells, view=remedies_section),
    "attention": Artefact("Attention in int8", Sweep, view=attention_section),
    "causes": Artefact("Causes", Training, view=causes_section),
    "families_table1": Artefact("Other families", Sweep),
    "pictures_table1": Artefact("Other families, pictures", Sweep),
    "families_table4": Artefact("Outlier features of other families", Emergence, view=families_section),
}
ARTEFACTS |= BEYOND


def check_shown(experiment: Experiment) -> None:
    """Raise UserError unless the experiment's field `shows` names a table or figure of its kind."""
    names = [name for name, artefact in ARTEFACTS.items() if artefact.kind is type(experiment)]
    if experiment.shows not in names:
        raise unknown_name("table or figure", str(experiment.shows), names, "(in field 'shows')")
