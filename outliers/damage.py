"""`python -m outliers.damage`: places of the damage by a scheme: projections, roles and layers.

Measure where schemes damage a model: the error of each projection, and the cost of each role and layer.

Prints tables and writes rows, tables and figures to results/damage/NAME. A second run resumes the first.

Examples:

`python -m outliers.damage smollm2-135m --scheme absmax,llm.int8`

`python -m outliers.damage gpt2 --by error --text c4 --block 1024`
"""

from outliers.app import run

if __name__ == "__main__":
    run("damage")
