"""`python -m outliers.origins`: writers and readers of features, norms that suppress them, weights that matter.

Account for features: the heads, neurons and biases that write them, the projections that read them, single weights.

Prints the contributions to each feature, the norms that suppress it, the cost of removing it at its readers, super
weights beside their controls, massive activations and attention sinks after removals, and the key channels that it
enlarges; writes rows, tables and figures to results/origins/NAME. A second run resumes the first.

Examples:

`python -m outliers.origins pocket/gpt2-1.7m`

`python -m outliers.origins smollm2-135m --features 247,507 --text c4 --block 512 --blocks 4`

`python -m outliers.origins smollm2-135m --features 247 --by readers --place k,up,norm`

`python -m outliers.origins smollm2-135m --by weights --blocks 4 --block 512`
"""

from outliers.app import run

if __name__ == "__main__":
    run("origins")
