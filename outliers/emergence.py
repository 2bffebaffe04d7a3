"""`python -m outliers.emergence`: outlier features along a family of models or along training, Figures 3 and 4.

Measure how outlier features emerge with size, with perplexity, or during training.

Prints the paper's Table 4 with the exponential fits of Figure 3b, and writes rows, tables, and Figures 3 and 4. By
default all pocket models, and SmolLM2-135M where it is installed. A second run resumes the first.

Examples:

`python -m outliers.emergence`

`python -m outliers.emergence --model gpt2 --model gpt2-medium --model gpt2-large --text c4 --block 1024`

`python -m outliers.emergence --model EleutherAI/pythia-160m --revisions step1000,step8000,step64000,step143000`

`python -m outliers.emergence --redraw my-training/outliers`
"""

from outliers.app import run

if __name__ == "__main__":
    run("emergence")
