"""`python -m outliers.zeroshot`: zero-shot accuracy under 8-bit schemes, as in Figure 1 of the paper.

Measure the zero-shot accuracy of models under 8-bit schemes with the harness lm-eval.

Prints the table and writes rows, the table and a figure. A second run resumes the first. Options replace
the fields of the experiment; with models and no experiment, the other fields have their defaults. The harness
comes with `pip install 'outliers[zeroshot]'`.

Examples:

`python -m outliers.zeroshot`

`python -m outliers.zeroshot --model smollm2-135m --task lambada-local --scheme fp32 --scheme absmax`

`python -m outliers.zeroshot paper/figure1 --model facebook/opt-125m --task piqa --task winogrande`
"""

from outliers.app import run

if __name__ == "__main__":
    run("zeroshot")
