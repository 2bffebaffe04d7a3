"""What has no number in the paper, in the order of a page."""

from outliers.metrics.perplexity.view import sweep_section
from outliers.metrics.trace.view import kept_trace_section
from outliers.report.paper.published import Artefact
from outliers.report.views.ablation import ablation_section
from outliers.report.views.account import account_section
from outliers.report.views.attention import attention_section
from outliers.report.views.causes import causes_section
from outliers.report.views.damage import kept_damage_section
from outliers.report.views.remedies import remedies_section
from outliers.specification.kinds import Ablation, Account, Damage, Experiment, OneModel
from outliers.specification.recipe import Training

ARTEFACTS = {
    "trace": Artefact("Outlier features", OneModel, kept_trace_section, of_folder=True),
    "origins": Artefact("Origins", Account, account_section),
    "ablation": Artefact("Ablation", Ablation, ablation_section),
    "damage": Artefact("Damage", Damage, kept_damage_section, of_folder=True),
    "sweep": Artefact("Sweep", Experiment, sweep_section),
    "remedies": Artefact("Remedies", Experiment, remedies_section),
    "attention": Artefact("Attention in int8", Experiment, attention_section),
    "causes": Artefact("Causes", Training, causes_section),
}
