# Of the tables in __init__.py, by scripts/stubs.py: public names, as type checkers and editors see them.

from outliers.plot.ablation import ablation_bars as ablation_bars
from outliers.plot.ablation import weight_costs as weight_costs
from outliers.plot.attention import attention_costs as attention_costs
from outliers.plot.damage import damage_bars as damage_bars
from outliers.plot.damage import damage_heads as damage_heads
from outliers.plot.damage import damage_map as damage_map
from outliers.plot.emergence import along_training as along_training
from outliers.plot.emergence import figure3 as figure3
from outliers.plot.emergence import figure4 as figure4
from outliers.plot.origins import life_line as life_line
from outliers.plot.remedies import frontier as frontier
from outliers.plot.remedies import remedy_costs as remedy_costs
from outliers.plot.trace import heat_map as heat_map
from outliers.plot.trace import key_map as key_map
from outliers.plot.trace import magnitude_by_position as magnitude_by_position
from outliers.plot.trace import patch_map as patch_map
from outliers.plot.trace import sorted_profile as sorted_profile
from outliers.plot.training import causes as causes
from outliers.plot.training import growth as growth
from outliers.plot.zeroshot import accuracy_by_size as accuracy_by_size
from outliers.show.style import LOOK as LOOK
from outliers.show.style import your_style as your_style
from outliers.views.perplexity import sweep_costs as sweep_costs
from outliers.views.plan import plan_curve as plan_curve
