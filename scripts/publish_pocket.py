"""Measure the checkpoints that `outliers.models.pocket.train` left, and make the shipped family of them.

    python scripts/publish_pocket.py --c4 c4_en_1000.jsonl

For every trained rung: the weights of its last checkpoint with tokenizer and card in `outliers/models/pocket/NAME`, and
a row a checkpoint in `emergence.csv`, measured on the held-out rows of C4. A figure of it goes to `--work`.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from outliers.metrics.perplexity.measure import perplexity
from outliers.models.load import load_model, load_tokenizer
from outliers.models.names import POCKET
from outliers.models.pocket.ladder import CONTEXT, LADDER, STEPS, Rung
from outliers.plot.emergence import along_training
from outliers.report.section import drawn
from outliers.text.blocks import load_text
from outliers.tracing.result import STREAM
from outliers.tracing.trace import trace
from outliers.training.corpus import C4_TRAINING_ROWS

BLOCKS = 64

CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# pocket/{name}

A {architecture} language model of {parameters:,} parameters, trained from scratch on a CPU for the `outliers` toolkit:
small enough to ship, real enough to grow outlier features. It is for studying those, and of no use for writing text.

| | |
|---|---|
| layers, model dimension, heads, context | {layers}, {width}, {heads}, {context} |
| training text | C4 (en), rows 0-{last_row} of the train split (ODC-BY), and WikiText-2 train (CC BY-SA 3.0), detokenised |
| tokenizer | byte-level BPE, 4,096 entries, trained on the same text |
| training | {steps:,} steps of {batch} × {context} tokens ({tokens:.1f} M); AdamW {learning_rate}, cosine to 0, 100 warm-up steps, β 0.9/0.95, decay 0.1 on matrices, clip 1.0, no dropout, bfloat16 autocast, seed 0 |
| held out | C4 rows {first_held_out}-999; the numbers below are over its first {blocks} blocks of {context} tokens, weights in float16 as shipped |
| perplexity | {perplexity:.2f} |
| largest hidden state entering an attention or feed-forward projection | {max:.2f} |
| features with a value of 6.0 or more anywhere | {features_hit} |
| outlier features (≥ 25 % of layers, ≥ 6 % of positions) | {outlier_features} |
| most common one | feature {feature}: {layers_affected:.0%} of layers, {positions:.1%} of positions |

Nothing was planted: one run with seed 0 made these weights, and what they show is what grew. In the folder above,
`emergence.csv` has the same numbers along the training, and `README.md` says what was tried and did not work.
"""


def measure(folder: Path, blocks: torch.Tensor) -> dict:
    """Perplexity and outlier statistics of one checkpoint."""
    model = load_model(str(folder))
    found = trace(model, blocks, STREAM, attention=False)
    features = found.features()
    return {
        "parameters": model.num_parameters(),
        "perplexity": round(perplexity(model, blocks), 3),
        "max": round(features["max"].max(), 3),
        "features_hit": int((features["layers"] > 0).sum()),
        "outlier_features": len(found.outlier_features()),
        "feature": int(features["feature"][0]),
        "layers": round(features["layers"][0], 4),
        "positions": round(features["positions"][0], 4),
        "positions_mean": round(features["positions_mean"][0], 5),
    }


def emergence(name: str, work: Path, c4: Path) -> list[dict]:
    """One row a checkpoint of a rung; `feature` is the one that hits the most positions."""
    folders = sorted((work / name).glob("step-*"))
    blocks = load_text(str(c4), load_tokenizer(str(folders[-1])), CONTEXT, BLOCKS)
    rows = []
    for folder in tqdm(folders, desc=name, disable=None):
        step = int(folder.name.removeprefix("step-"))
        tokens = step * LADDER[name].batch * CONTEXT
        rows.append({"model": f"pocket/{name}", "step": step, "tokens": tokens, **measure(folder, blocks)})
    return rows


def ship(name: str, rung: Rung, last: dict, work: Path) -> None:
    """Copy the last checkpoint into the package and write its card."""
    source, target = work / name / f"step-{STEPS:04d}", POCKET / name
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    fields = {**rung._asdict(), **last, "layers": rung.layers, "layers_affected": last["layers"], "name": name}
    fields |= {"context": CONTEXT, "steps": STEPS, "tokens": last["tokens"] / 1e6, "blocks": BLOCKS}
    fields |= {"last_row": C4_TRAINING_ROWS - 1, "first_held_out": C4_TRAINING_ROWS}
    (target / "README.md").write_text(CARD.format(**fields))


def main() -> None:
    """Publish every rung that is trained to the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--c4", type=Path, required=True, help="the same file as for training")
    parser.add_argument("--work", type=Path, default=Path("build/pocket"), help="where `train` left its checkpoints")
    arguments = parser.parse_args()
    held_out = arguments.work / "held_out.jsonl"
    held_out.write_text("".join(arguments.c4.read_text().splitlines(keepends=True)[C4_TRAINING_ROWS:]))
    rows = []
    for name, rung in LADDER.items():
        if (arguments.work / name / f"step-{STEPS:04d}").exists():
            rows += emergence(name, arguments.work, held_out)
            ship(name, rung, rows[-1], arguments.work)
    checkpoints = pd.DataFrame(rows)
    checkpoints.to_csv(POCKET / "emergence.csv", index=False)
    figure = along_training(checkpoints)[0].figure
    for kind in ("png", "svg"):
        (arguments.work / f"emergence.{kind}").write_bytes(drawn(figure, kind))


if __name__ == "__main__":
    main()
