"""`python -m outliers.trace`: outlier features of a model, their places and magnitudes.

Trace a model's hidden states: its outlier features and its row in the paper's Table 4.

Prints the features, the largest input of each kind of projection, massive activations and attention sinks; writes
the trace, rows, tables and figures to results/trace/NAME. A second run resumes the first.

Examples:

`python -m outliers.trace pocket/gpt2-1.7m`

`python -m outliers.trace smollm2-135m --tokens`

`python -m outliers.trace smollm2-135m --imatrix --masks`

`python -m outliers.trace facebook/opt-1.3b --text c4 --block 2048 --device cuda --dtype float16`
"""

from outliers.app import run

if __name__ == "__main__":
    run("trace")
