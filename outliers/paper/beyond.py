"""Artefacts without a number in the paper, in the order of a page."""

from outliers.paper.published import Artefact
from outliers.paper.table4 import families_section
from outliers.presets.ablate import Ablation
from outliers.presets.cells import Cells
from outliers.presets.damage import Damage
from outliers.presets.emergence import Emergence, OneModel
from outliers.presets.origins import Account
from outliers.presets.sweep import Experiment
from outliers.presets.training import Training
from outliers.views.attention import attention_section
from outliers.views.causes import causes_section
from outliers.views.remedies import remedies_section

ARTEFACTS = {
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
