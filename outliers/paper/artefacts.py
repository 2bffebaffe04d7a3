"""The tables and figures of the paper in the order of their numbers, then what experiments beyond it show.

A row says which printed values stand beside which measured ones, and what shows the rows. Nothing here imports torch,
which drawing again does without.
"""

from functools import partial

from outliers.paper.published import BLOG, Artefact, Published, by_keys
from outliers.paper.table4 import PANELS, families_section, panel_section, table4_section
from outliers.paper.table7 import table7_section, table9_section, table10_section
from outliers.presets.ablate import Ablation
from outliers.presets.cells import Cells
from outliers.presets.damage import Damage
from outliers.presets.emergence import Emergence, OneModel
from outliers.presets.latency import Latency
from outliers.presets.linear_layers import LinearLayers
from outliers.presets.memory import Memory
from outliers.presets.origins import Account
from outliers.presets.sweep import Experiment
from outliers.presets.training import Training
from outliers.presets.zeroshot import ZeroShot
from outliers.show.axes import count_label
from outliers.views.attention import attention_section
from outliers.views.causes import causes_section
from outliers.views.emergence import table4
from outliers.views.linear_layer import times_of
from outliers.views.memory import BITS, largest
from outliers.views.published import numbers_of
from outliers.views.remedies import remedies_section
from outliers.views.training import settings
from outliers.views.zeroshot import PREFIX


def _largest(rows: list[dict]) -> list[dict]:
    """The largest candidate for each hardware and number of bits."""
    return [
        {"hardware": f"{row['hardware']} {row['gigabytes']:g} GB", "bits": bits, "value": row[f"{bits}-bit"]}
        for row in largest(rows).to_dict("records")
        for bits in BITS
    ]


def _metrics(rows: list[dict]) -> list[dict]:
    """The numbers of Table 4, one by one."""
    table = table4(rows).stack().dropna().rename_axis(["model", "metric"])
    return table.rename("value").reset_index().to_dict("records")


def _tasks(rows: list[dict]) -> list[dict]:
    return [row | {"metric": row["metric"].removeprefix(PREFIX)} for row in rows]


def _trained(rows: list[dict]) -> list[dict]:
    return [
        run._asdict() | {"size": count_label(run.parameters), "value": run.perplexity.value} for run in settings(rows)
    ]


def _steps(rows: list[dict]) -> list[dict]:
    """Decode steps, of which the paper prints the milliseconds a token."""
    return [row for row in rows if row["metric"] == "latency.decode"]


PAPER, SCORES = "LLM.int8(), Table ", ", scores of GLUE tasks"
RECIPE = ("model", "int8", "decomposition")
ARTEFACTS = {
    "table1": Artefact(
        "Table 1",
        Experiment,
        Published(f"{PAPER}1", ("model", "scheme"), numbers_of("table1"), "{:.2f}"),
        by_keys("model", "scheme"),
    ),
    "figure1": Artefact(
        "Figure 1",
        ZeroShot,
        Published(
            f"{BLOG} (the paper's figure prints no numbers)",
            ("model", "task", "metric", "scheme"),
            numbers_of("figure1", 3),
        ),
        by_keys("model", "task", "metric", "scheme", of=_tasks),
    ),
    "table3": Artefact(
        "Table 3",
        Memory,
        Published(f"{PAPER}3", ("hardware", "bits"), numbers_of("table3"), "{}"),
        by_keys("hardware", "bits", of=_largest),
    ),
    "table4": Artefact(
        "Table 4",
        Emergence,
        Published(f"{PAPER}4", ("model", "metric"), numbers_of("table4")),
        by_keys("model", "metric", of=_metrics),
        table4_section,
    ),
    **{
        panel: Artefact(panel.replace("figure", "Figure "), Emergence, section=partial(panel_section, panel))
        for panel in PANELS
    },
    "table5": Artefact(
        "Table 5",
        LinearLayers,
        Published(f"{PAPER}5", ("way", "dimension"), numbers_of("table5"), "{:.2f}"),
        by_keys("way", "dimension", of=times_of),
    ),
    "table6": Artefact(
        "Table 6",
        Latency,
        Published(f"{PAPER}6; {BLOG}", ("model", "scheme", "hardware", "batch"), numbers_of("table6", 3)),
        by_keys("model", "scheme", "device_name", "batch", of=_steps),
    ),
    "table7": Artefact(
        "Table 7",
        Training,
        Published(f"{PAPER}7", RECIPE, numbers_of("table7", 3), "{:.2f}"),
        by_keys("size", "int8", "decomposition", of=_trained),
        table7_section,
    ),
    # Of Tables 10 and 9 nothing was measured: ours are perplexities, and the paper's are scores of tasks.
    "table10": Artefact(
        "Table 10",
        Training,
        Published(f"{PAPER}10{SCORES}", (*RECIPE, "task"), numbers_of("table10", 3)),
        section=table10_section,
    ),
    "table9": Artefact(
        "Table 9",
        Training,
        Published(f"{PAPER}9{SCORES}", ("method", "task"), numbers_of("table9")),
        section=table9_section,
    ),
}
BEYOND = {
    "trace": Artefact("Outlier features", OneModel),
    "origins": Artefact("Origins", Account),
    "ablation": Artefact("Ablation", Ablation),
    "damage": Artefact("Damage", Damage),
    "sweep": Artefact("Sweep", Experiment),
    "token_losses": Artefact("Loss by token", Cells),
    "remedies": Artefact("Remedies", Cells, section=remedies_section),
    "attention": Artefact("Attention in int8", Experiment, section=attention_section),
    "causes": Artefact("Causes", Training, section=causes_section),
    "families_table1": Artefact("Other families", Experiment),
    "pictures_table1": Artefact("Other families, pictures", Experiment),
    "families_table4": Artefact("Outlier features of other families", Emergence, section=families_section),
}
ARTEFACTS |= BEYOND
