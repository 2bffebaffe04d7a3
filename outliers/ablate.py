"""`python -m outliers.ablate`: loss of a model without its outlier features.

Measure attention and perplexity of a model without its outlier features, beside random features.

Prints the table and writes rows, tables and a figure to results/ablate/NAME. A second run resumes the first.

Examples:

`python -m outliers.ablate pocket/opt-1.7m --method zero,mean,shuffle`

`python -m outliers.ablate gpt2 --features 138,378,447 --text c4 --block 1024`
"""

from outliers.app import run

if __name__ == "__main__":
    run("ablate")
