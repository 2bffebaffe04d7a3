"""`python -m outliers.plan`: projections that have to stay exact under a scheme, so that it costs little.

Find projections to keep exact, or under a better scheme, so that a scheme costs little and none can be left out.

Prints these projections and the increase on other blocks, and writes the plan, plan.yaml, with rows, tables, figures
and a page to results/plan/NAME. A second run resumes the first.

Examples:

`python -m outliers.plan smollm2-135m --scheme absmax --cost 5%`

`python -m outliers.plan smollm2-135m --scheme w8a8 --cost 2% --instead llm.int8 --by parameters`
"""

from outliers.app import run

if __name__ == "__main__":
    run("plan")
