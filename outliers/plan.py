"""`python -m outliers.plan`: the fewest projections that have to stay exact under a scheme.

Find the fewest projections that have to stay exact, or get a better scheme, so that the whole costs little perplexity.

Prints what stays exact and what that costs on other blocks, and writes the plan, plan.yaml, with rows, tables, figures
and a page to results/plan/NAME. Run again, it goes on where it stopped.

Examples:

`python -m outliers.plan smollm2-135m --scheme absmax --cost 5%`

`python -m outliers.plan smollm2-135m --scheme w8a8 --cost 2% --instead llm.int8 --by parameters`
"""

from outliers.commands import measuring
from outliers.specification.kinds import Planning
from outliers.terminal.command import run

plan = measuring("plan", Planning, __doc__)

if __name__ == "__main__":
    run(plan)
