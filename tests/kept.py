"""The kept results, and what shows each run of them."""

from functools import cache, partial
from pathlib import Path

import pandas as pd

from outliers.quantization.plans.plan import Plan
from outliers.runs.frame import records_in
from outliers.runs.stages.plan import plan_of
from outliers.show.section import Section
from outliers.views.ablation import ablation_section
from outliers.views.account import account_section
from outliers.views.attention import attention_section
from outliers.views.causes import causes_section
from outliers.views.damage import damage_section
from outliers.views.keys import keys_section
from outliers.views.latency import latency_section
from outliers.views.linear_layer import linear_layer_section
from outliers.views.memory import memory_section
from outliers.views.origins import accounts_table, origins_section
from outliers.views.perplexity import perplexity_section
from outliers.views.plan import FILE, plan_section
from outliers.views.remedies import remedies_section
from outliers.views.table4 import families_section, table4_section
from outliers.views.table7 import table7_section, table9_section, table10_section
from outliers.views.zeroshot import zeroshot_section

KEPT = Path(__file__).parent.parent / "results" / "kept"
PLANS = {"plans/absmax": 0.05, "plans/w8a8": 0.02, "plans/w4a8-g64": 0.2}  # their costs
DAMAGED, CACHED_DAMAGE, COMPARED = "damage/smollm2-135m", "damage/caches", "damage/against"


@cache
def kept(run: str) -> list[dict]:
    """The rows of a kept run."""
    return records_in(KEPT / run)


def _damage_section(run: str, rows: list[dict]) -> Section:
    """With what its tokens look like."""
    errors = pd.read_csv(KEPT / run / "errors.csv")
    return damage_section(rows, dict(zip(errors["token"], errors["token_text"], strict=True)).get)


def _cached_damage_section(rows: list[dict]) -> Section:
    """Of no projections, so that no token has a name."""
    return damage_section(rows, str)


def plan_at(run: str) -> Plan:
    """The plan that a kept run ends in."""
    return plan_of(kept(run), "smollm2-135m", PLANS[run], 4)


def _plan_section(run: str, rows: list[dict]) -> Section:
    """With the file of the plan."""
    return plan_section(rows, plan_at(run), {FILE: plan_at(run).text})


def _of_variants(rows: list[dict]) -> Section:
    """The table of perplexities, a row each variant."""
    return perplexity_section(rows)


def checkpoints_section(rows: list[dict]) -> Section:
    """All accounts in a table, without those of each model."""
    return Section("", rows, tables=[accounts_table(rows)])


SECTIONS = {
    "pocket/table1": perplexity_section,
    "smollm2-135m/sweep": perplexity_section,
    "smollm2-135m/variants": _of_variants,
    **{f"ablation/{model}": ablation_section for model in ("gpt2-1.7m", "gpt2-5.9m", "opt-1.7m")},
    "smollm2-135m/ablation": ablation_section,
    "mixtures/drops": ablation_section,
    "mixtures/sweep": perplexity_section,
    **{run: partial(_damage_section, run) for run in (DAMAGED, COMPARED)},
    "mixtures/damage": partial(_damage_section, "mixtures/damage"),
    CACHED_DAMAGE: _cached_damage_section,
    "mechanism/smollm2-135m": origins_section,
    "mechanism/readers": account_section,
    "mechanism/weights": account_section,
    "mechanism/massive": account_section,
    "pocket/table3": memory_section,
    "pocket/table4": table4_section,
    "emergence": table4_section,
    "training": table4_section,
    "pocket/table5": linear_layer_section,
    "pocket/table6": latency_section,
    "pocket/figure1": zeroshot_section,
    "pocket/families_table1": perplexity_section,
    "pocket/pictures_table1": perplexity_section,
    "pocket/families_table4": families_section,
    "remedies": remedies_section,
    "caches": _of_variants,
    "keys": keys_section,
    "founding": _of_variants,
    **{run: partial(_plan_section, run) for run in PLANS},
    "weights": _of_variants,
    "attention/smollm2-135m": attention_section,
    "attention/pocket": perplexity_section,
    "attention/layers": _cached_damage_section,
    "training-runs/table7": table7_section,
    "training-runs/table10": table10_section,
    "training-runs/causes": causes_section,
}
# Further tables of a run, without sentences.
OTHERS = [("training-runs/table10", table9_section), ("mechanism/checkpoints", checkpoints_section)]


@cache
def section_of(run: str) -> Section:
    """The section of a kept run."""
    return SECTIONS[run](kept(run))
