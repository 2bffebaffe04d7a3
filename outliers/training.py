"""`python -m outliers.training`: training runs that differ in one setting each, and their outlier features.

Run training experiments: int8 training beside 16 bits, and causes of outlier features.

Trains each run with each seed, measures it after some steps, measures the trained models under schemes, and writes
rows, tables, figures and a page to results/NAME. It takes hours: an interrupted run resumes from its last checkpoint,
in the folder of --work. Embedded experiments: training/causes, training/table7.

Examples:

`python -m outliers.training training/table7 --c4 c4_en_1000.jsonl --wikitext wikitext2_train.txt.gz`

`python -m outliers.training training/causes --seeds 0,1,2 --engine ray`

`python -m outliers.training mine.yaml --out results/mine`
"""

from outliers.app import run

if __name__ == "__main__":
    run("training")
