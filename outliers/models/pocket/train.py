"""Train the pocket family: small real transformers in which outlier features grow on their own.

    python -m outliers.models.pocket.train gpt2-1.7m --c4 c4_en_1000.jsonl --wikitext wikitext2_train.txt.gz

Every rung takes the same number of steps. Nothing is planted: a rung is one run with seed 0, and what it shows is what
grew. Checkpoints are ordinary model folders under `--work`; a run that was stopped goes on.
"""

import argparse
import copy
import json
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from outliers.models.pocket.ladder import CHECKPOINTS, LADDER
from outliers.specification.recipe import Recipe
from outliers.training.corpus import Corpus, blocks_in_order, prepare
from outliers.training.loop import train
from outliers.training.start import start


def save(model: PreTrainedModel, step: int, folder: Path, tokenizer: Path) -> dict:
    """Write one checkpoint as fp16 safetensors with its tokenizer; there is nothing to log."""
    folder = folder / f"step-{step:04d}"
    copy.deepcopy(model).half().save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokenizer).save_pretrained(folder)
    return {}


def train_rung(name: str, corpus: Corpus, work: Path) -> None:
    """Train one rung with seed 0: its models in `work / name / "step-0025"` and so on, its losses in `log.jsonl`."""
    recipe, folder = Recipe(start=name), work / name
    blocks = blocks_in_order(corpus.ids, recipe.steps, recipe.batch)
    saved = partial(save, folder=folder, tokenizer=corpus.tokenizer)
    logged = train(start(recipe, 0), recipe, blocks, folder, saved, CHECKPOINTS)
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in logged if "loss" in entry))


def main() -> None:
    """Train the named rungs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"rungs to train: {', '.join(LADDER)} (default: all)")
    parser.add_argument("--c4", type=Path, required=True, help="JSON lines of C4 (en), train split, first 1,000 rows")
    parser.add_argument("--wikitext", type=Path, required=True, help="WikiText-2 train, tokenised form")
    parser.add_argument("--work", type=Path, default=Path("build/pocket"), help="where checkpoints and logs go")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(LADDER):
        parser.error(f"unknown rung {sorted(unknown)}; expected: {', '.join(LADDER)}")
    torch.set_num_threads(arguments.threads)
    corpus = prepare(arguments.c4, arguments.wikitext, arguments.work)
    for name in arguments.names or LADDER:
        train_rung(name, corpus, arguments.work)


if __name__ == "__main__":
    main()
