# Of the tables in __init__.py, by scripts/stubs.py: public names, as type checkers and editors see them.

from outliers.show.style import LOOK as LOOK
from outliers.show.style import your_style as your_style
from outliers.views.ablation import ablation_bars as ablation_bars
from outliers.views.attention import attention_costs as attention_costs
from outliers.views.causes import causes as causes
from outliers.views.damage import damage_bars as damage_bars
from outliers.views.damage import damage_heads as damage_heads
from outliers.views.damage import damage_map as damage_map
from outliers.views.emergence import along_training as along_training
from outliers.views.emergence import figure3 as figure3
from outliers.views.emergence import figure4 as figure4
from outliers.views.experts import expert_map as expert_map
from outliers.views.growth import growth as growth
from outliers.views.keys import key_map as key_map
from outliers.views.origins import life_line as life_line
from outliers.views.perplexity import sweep_costs as sweep_costs
from outliers.views.plan import plan_curve as plan_curve
from outliers.views.remedies import frontier as frontier
from outliers.views.remedies import remedy_costs as remedy_costs
from outliers.views.super_weights import weight_costs as weight_costs
from outliers.views.trace import heat_map as heat_map
from outliers.views.trace import magnitude_by_position as magnitude_by_position
from outliers.views.trace import patch_map as patch_map
from outliers.views.trace import sorted_profile as sorted_profile
from outliers.views.zeroshot import accuracy_by_size as accuracy_by_size
