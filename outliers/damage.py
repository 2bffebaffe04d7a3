"""`python -m outliers.damage`: where 8-bit schemes damage a model, by projection, role and layer.

Find where schemes damage a model: the error of each projection, and what each role and layer costs of perplexity.

Prints tables and writes rows, tables and figures to results/damage/NAME. Run again, it goes on where it stopped.

Examples:

`python -m outliers.damage smollm2-135m --scheme absmax,llm.int8`

`python -m outliers.damage gpt2 --by error --text c4 --block 1024`
"""

from outliers.commands import measuring
from outliers.specification.kinds import Damage
from outliers.terminal.command import run

damage = measuring("damage", Damage, __doc__)

if __name__ == "__main__":
    run(damage)
