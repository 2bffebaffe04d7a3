"""`python -m outliers.latency`: milliseconds per generated token, as in Table 6 of the paper.

Time the generation of tokens with a KV cache, with and without int8 weights.

Prints the paper's Table 6, milliseconds per generated token by batch, and writes rows, tables and a page. A second run
resumes the first.

Examples:

`python -m outliers.latency pocket/gpt2-5.9m`

`python -m outliers.latency facebook/opt-1.3b --batch 1,8 --prompt 512 --tokens 64`

`python -m outliers.latency bigscience/bloom-7b1 --scheme fp32,absmax-vector,llm.int8 --device cuda --dtype float16`
"""

from outliers.app import run

if __name__ == "__main__":
    run("latency")
