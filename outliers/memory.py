"""`python -m outliers.memory`: memory of models, and the largest model that some GPUs hold, as in Table 3.

Compute the memory of models at inference in 16 and in 8 bits, and the largest model that fits GPUs.

Counts weights, KV cache and activations from a model's configuration: no weights are loaded, no GPU is needed. With
no model, those of the paper's Table 3 and their families; with no model and no GPUs, Table 3.

Examples:

`python -m outliers.memory`

`python -m outliers.memory --gpu 2x24 --gpu 16 --context 2048`

`python -m outliers.memory facebook/opt-6.7b bigscience/bloom-7b1 --gpu 12 --batch 8`
"""

from outliers.app import run

if __name__ == "__main__":
    run("memory")
