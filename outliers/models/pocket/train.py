"""Train the pocket family: small real transformers in which outlier features grow on their own.

    python -m outliers.models.pocket.train gpt2-1.7m --c4 c4_en_1000.jsonl --wikitext wikitext2_train.txt.gz

Every rung takes the same number of steps. Nothing is planted: a rung is one run with seed 0, and what it shows is what
grew. Checkpoints are ordinary model folders under `--work`; a run that was stopped goes on.
"""

import argparse
import copy
import json
import shutil
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outliers.models.pocket.ladder import CHECKPOINTS, LADDER
from outliers.specification.recipe import Recipe
from outliers.training.loop import train
from outliers.training.objectives import OBJECTIVES
from outliers.training.start import start

TEXTS = {
    "--c4": ("c4_en_1000.jsonl", "JSON lines of C4 (en), train split, first 1,000 rows"),
    "--wikitext": ("wikitext2_train.txt.gz", "WikiText-2 train, tokenised form"),
}


def save(model: PreTrainedModel, step: int, folder: Path, reader: Path) -> dict:
    """Write one checkpoint as fp16 safetensors with its tokenizer or image processor; there is nothing to log."""
    folder = folder / f"step-{step:04d}"
    copy.deepcopy(model).half().save_pretrained(folder)
    shutil.copytree(reader, folder, dirs_exist_ok=True)
    return {}


def train_rung(name: str, c4: Path, wikitext: Path, work: Path) -> None:
    """Train one rung with seed 0: its models in `work / name / "step-0025"` and so on, its losses in `log.jsonl`."""
    recipe, folder = Recipe(start=name), work / name
    objective = OBJECTIVES[recipe.objective]
    corpus = objective.prepare(c4, wikitext, work)
    blocks = objective.examples(corpus, recipe, 0)
    saved = partial(save, folder=folder, reader=corpus.reader)
    logged = train(start(recipe, 0), recipe, blocks, folder, saved, CHECKPOINTS)
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in logged if "loss" in entry))


def main() -> None:
    """Train the named rungs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"rungs to train: {', '.join(LADDER)} (default: all)")
    for option, (file, what) in TEXTS.items():
        parser.add_argument(option, type=Path, default=Path(file), help=f"{what} (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("build/pocket"), help="where checkpoints and logs go")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(LADDER):
        parser.error(f"unknown rung {sorted(unknown)}; expected: {', '.join(LADDER)}")
    torch.set_num_threads(arguments.threads)
    for name in arguments.names or LADDER:
        train_rung(name, arguments.c4, arguments.wikitext, arguments.work)


if __name__ == "__main__":
    main()
