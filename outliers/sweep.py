"""`python -m outliers.sweep`: perplexity under every 8-bit scheme, as in Table 1 of the paper.

Measure the perplexity of models under every 8-bit scheme of the paper's Table 1.

Prints the table and writes rows, tables and a figure. A second run resumes the first. Options replace
the fields of the experiment; with models and no experiment, the other fields have their defaults.

Examples:

`python -m outliers.sweep`

`python -m outliers.sweep --model gpt2 --model facebook/opt-125m --text c4 --block 1024 --device cuda`

`python -m outliers.sweep pocket/table1 --scheme fp32 --scheme llm.int8 --alpha 4`
"""

from outliers.app import run

if __name__ == "__main__":
    run("sweep")
