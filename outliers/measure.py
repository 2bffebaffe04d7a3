"""`python -m outliers.measure`: any metric of any model under any variant.

Measure models under variants: schemes, ablations, planted outliers, several together.

Prints the values, then the tables of each metric, and writes rows, tables, figures and a page. A second run resumes
the first. A variant is a list of terms joined by +, in the order in which they act.

Examples:

`python -m outliers.measure pocket/gpt2-1.7m --metric perplexity,top1 --variant absmax --variant 'zero(3)+llm.int8'`

`python -m outliers.measure smollm2-135m --metric agreement --variant llm.int8+skip=layers.11 --draws 4`
"""

from outliers.app import run

if __name__ == "__main__":
    run("measure")
