"""Measure the checkpoints that `train_pocket.py` left, and make the shipped family of them.

    python scripts/publish_pocket.py bert-1.4m --c4 c4_en_1000.jsonl --wikitext wikitext2_train.txt.gz

Of every named rung, or of all that are trained: the weights of its last checkpoint with tokenizer or image processor and
card in `outliers/models/pocket/NAME`, measured on the held-out rows of C4 or the held-out pictures. Of causal language
models also a row a checkpoint in `emergence.csv`, with a figure in `--work`.
"""

import argparse
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm
from train_pocket import OBJECTIVES, TEXTS
from transformers import PreTrainedModel

from outliers.config.experiment import Experiment
from outliers.criterion import CROSS
from outliers.metrics.perplexity import perplexity
from outliers.models.anatomy.examples import IGNORED, Examples
from outliers.models.anatomy.stack_views import stack_views
from outliers.models.load import load_model
from outliers.models.names import POCKET
from outliers.models.pocket.ladder import CONTEXT, LADDER, STEPS, VOCABULARY
from outliers.show.section import figure_bytes
from outliers.subjects.causal import ModelWithText
from outliers.subjects.vision import HELD_OUT
from outliers.tracing.result import STREAM
from outliers.tracing.trace import trace
from outliers.trainer.corpus import C4_TRAINING_ROWS, Corpus
from outliers.views.emergence import along_training

BLOCKS = 64
CAUSAL = "next tokens"
COLUMNS = ["model", "step", "tokens", "parameters", "perplexity", "max", "features_hit", "outlier_features", "feature"]
COLUMNS += ["layers", "positions", "positions_mean"]

CARD = """---
license: apache-2.0
{language}library_name: transformers
pipeline_tag: {tag}
---
# pocket/{name}

A {architecture} {kind} of {parameters:,} parameters, trained from scratch on a CPU for the `outliers` toolkit:
small enough to ship, real enough {worth}, and of no use for {use}.

| | |
|---|---|
| layers, model dimension, heads, {context_of} | {shape} |
| {learnt} |
| training | {seen}; AdamW {learning_rate}, cosine to 0, 100 warm-up steps, β 0.9/0.95, decay 0.1 on matrices, clip 1.0, no dropout, {precision}, seed 0 |
| held out | {measured}, weights in float16 as shipped |
| {value} |
{found}

Nothing was planted: one run with seed 0 made these weights, and what they show is what grew. In the folder above,
{beside}`README.md` says what was tried and did not work.
"""
FOUND = """| largest hidden state entering an attention or feed-forward projection{where} | {max:.2f} |
| features with a value of 6.0 or more anywhere{where} | {features_hit} |
| outlier features (≥ 25 % of layers, ≥ 6 % of positions){where} | {outlier_features} |
| most common one{where} | {common} |"""

HELD_OUT_TEXT = (
    f"C4 rows {C4_TRAINING_ROWS}-999; the numbers below are over its first {BLOCKS} blocks of {CONTEXT} tokens"
)
OF_TEXT = {
    "language": "language: en\n",
    "context_of": "context",
    "shape": f"{{layers}}, {{width}}, {{heads}}, {CONTEXT}",
    "learnt": f"training text | C4 (en), rows 0-{C4_TRAINING_ROWS - 1} of the train split (ODC-BY), and WikiText-2 train "
    "(CC BY-SA 3.0), detokenised |\n| tokenizer | byte-level BPE, 4,096 entries, trained on the same text",
    "seen": f"{STEPS:,} steps of {{batch}} × {CONTEXT} tokens ({{tokens:.1f}} M)",
}
WORDS = {  # of the models of each objective
    CAUSAL: OF_TEXT
    | {
        "tag": "text-generation",
        "kind": "language model",
        "worth": "to grow outlier features. It is for studying those",
        "use": "writing text",
        "measured": HELD_OUT_TEXT,
        "value": "perplexity | {perplexity:.2f}",
        "beside": "`emergence.csv` has the same numbers along the training, and ",
    },
    "masked tokens": OF_TEXT
    | {
        "tag": "fill-mask",
        "kind": "masked language model",
        "worth": "to run every command on, though it has learnt little more than how frequent each token is",
        "use": "filling in words",
        "seen": OF_TEXT["seen"] + "; 15 % are predicted, of which 80 % are read as [MASK] and 10 % as any other token; "
        "position embeddings begin as sinusoids",
        "measured": HELD_OUT_TEXT + ", of which 15 % are masked with seed 0",
        "value": "perplexity of the masked tokens | {perplexity:.2f} |\n| the same by the frequencies of tokens in the training "
        "text alone | {by_frequencies:.2f}",
        "beside": "",
    },
    "corrupted spans": OF_TEXT
    | {
        "tag": "text2text-generation",
        "kind": "encoder-decoder",
        "worth": "to run every command on",
        "use": "writing text",
        "context_of": "context of the encoder",
        "shape": f"{{layers}} and {{layers}}, {{width}}, {{heads}}, {CONTEXT}",
        "seen": OF_TEXT["seen"].replace(" tokens (", " tokens in the encoder (")
        + "; 15 % are predicted, in spans of three on average; embeddings begin a twentieth as large as T5's",
        "measured": HELD_OUT_TEXT + " in the encoder, spans with seed 0",
        "value": "perplexity of all that the decoder predicts | {perplexity:.2f}",
        "beside": "",
    },
    "pictures": {
        "language": "",
        "tag": "image-classification",
        "kind": "picture classifier",
        "worth": "to run every command on",
        "use": "reading digits of any other size or origin",
        "context_of": "positions",
        "shape": "{layers}, {width}, {heads}, [CLS] and 16 patches of 2 × 2 pixels",
        "learnt": f"training pictures | {1797 - HELD_OUT:,} of the 1,797 handwritten digits in scikit-learn (UCI, CC BY 4.0), "
        "8 × 8 pixels, grey in three channels",
        "seen": f"{STEPS:,} steps of {{batch}} pictures",
        "measured": f"the other {HELD_OUT} pictures, chosen with seed 0; the numbers below are over all of them",
        "value": "top-1, mean cross-entropy | {accuracy:.1%}, {loss:.3f}",
        "beside": "",
    },
}


def held_out(folder: Path, c4: Path, objective: str) -> Examples:
    """Return the text or pictures that a rung is measured on, as its family reads them."""
    of_text = {"text": str(c4), "block": CONTEXT, "blocks": BLOCKS}
    settings = {"text": "sample", "blocks": HELD_OUT} if objective == "pictures" else of_text
    return ModelWithText(str(folder), None, Experiment(name="held-out", **settings)).blocks


def features_of(model: PreTrainedModel, blocks: Examples, stack: str) -> dict:
    """Return outlier statistics of one stack; `feature` is the one with hits at the most positions."""
    found = trace(model, blocks, STREAM, attention=False, stack=stack or None)
    features = found.features()
    return {
        "max": round(float(features["max"].max()), 3),
        "features_hit": int((features["layers"] > 0).sum()),
        "outlier_features": len(found.outlier_features()),
        "feature": int(features["feature"][0]),
        "layers": round(features["layers"][0], 4),
        "positions": round(features["positions"][0], 4),
        "positions_mean": round(features["positions_mean"][0], 5),
    }


def by_frequencies(blocks: Examples, seen: np.ndarray) -> float:
    """Return the perplexity of the labels under the frequencies of tokens in a text.

    seen: ids of the text (tokens,); each token counts once more than it occurs.
    """
    counts = np.bincount(seen, minlength=VOCABULARY) + 1
    return float(np.exp(-np.log(counts / counts.sum())[blocks.labels[blocks.labels != IGNORED]].mean()))


def emergence(name: str, work: Path, c4: Path) -> list[dict]:
    """Return a row for each checkpoint of a rung."""
    folders = sorted((work / name).glob("step-*"))
    blocks, rows = held_out(folders[-1], c4, CAUSAL), []
    for folder in tqdm(folders, desc=name, disable=None):
        step, model = int(folder.name.removeprefix("step-")), load_model(str(folder))
        seen = {"model": f"pocket/{name}", "step": step, "tokens": step * LADDER[name].batch * CONTEXT}
        seen |= {"parameters": model.num_parameters(), "perplexity": round(perplexity(model, blocks), 3)}
        rows.append(seen | features_of(model, blocks, ""))
    return rows


def card(name: str, folder: Path, c4: Path, seen: Corpus) -> str:
    """Return the card of a rung with its measurements. c4: the held-out rows. seen: the training text."""
    rung = LADDER[name]
    model, blocks = load_model(str(folder)), held_out(folder, c4, rung.objective)
    fields = {**rung._asdict(), "name": name, "tokens": STEPS * rung.batch * CONTEXT / 1e6}
    fields |= {"parameters": model.num_parameters(), "perplexity": perplexity(model, blocks)}
    if rung.objective == "masked tokens":
        fields |= {"by_frequencies": by_frequencies(blocks, seen.ids)}
    if rung.objective == "pictures":
        predicted = model(pixel_values=blocks.ids).logits.argmax(-1)
        fields |= {"accuracy": (predicted == blocks.labels[:, 0]).float().mean().item()}
        fields |= {"loss": math.log(fields["perplexity"])}
    found = []
    for stack in stack_views(model):
        if stack != CROSS:
            of_one = features_of(model, blocks, stack)
            common = "feature {feature}: {layers:.0%} of layers, {positions:.1%} of positions".format(**of_one)
            where = f", {stack}" if stack else ""
            found.append(FOUND.format(**of_one, where=where, common=common if of_one["features_hit"] else "none"))
    words = {key: text.format(**fields) for key, text in WORDS[rung.objective].items()}
    precision = "bfloat16 autocast" if rung.autocast else "float32"
    return CARD.format(**fields | words, precision=precision, found="\n".join(found))


def ship(name: str, work: Path, c4: Path, seen: Corpus) -> None:
    """Copy the last checkpoint into the package and write its card."""
    source, target = work / name / f"step-{STEPS:04d}", POCKET / name
    shutil.copytree(source, target, dirs_exist_ok=True)
    (target / "README.md").write_text(card(name, source, c4, seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"rungs to publish: {', '.join(LADDER)} (default: all)")
    for option, (file, _) in TEXTS.items():
        parser.add_argument(option, type=Path, default=Path(file), help="the same file as for training")
    parser.add_argument(
        "--work", type=Path, default=Path("build/pocket"), help="where `train_pocket.py` left its checkpoints"
    )
    arguments = parser.parse_args()
    work, text = arguments.work, arguments.work / "held_out.jsonl"
    text.write_text("".join(arguments.c4.read_text().splitlines(keepends=True)[C4_TRAINING_ROWS:]))
    trained = [name for name in arguments.names or LADDER if (work / name / f"step-{STEPS:04d}").exists()]
    for name in trained:
        seen = OBJECTIVES[LADDER[name].objective].prepare(arguments.c4, arguments.wikitext, work)
        ship(name, work, text, seen)
    causal = [name for name in trained if LADDER[name].objective == CAUSAL]
    if causal:
        rows = [row for name in causal for row in emergence(name, work, text)]
        kept = pd.read_csv(POCKET / "emergence.csv")
        others = kept[~kept["model"].isin([row["model"] for row in rows])]
        checkpoints = pd.concat([others, pd.DataFrame(rows)])[COLUMNS]
        checkpoints.to_csv(POCKET / "emergence.csv", index=False)
        figure = along_training(checkpoints)[0].figure
        for kind in ("png", "svg"):
            (work / f"emergence.{kind}").write_bytes(figure_bytes(figure, kind))


if __name__ == "__main__":
    main()
