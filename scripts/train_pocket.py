"""Train the pocket family: small real transformers in which outlier features grow on their own.

    python scripts/train_pocket.py gpt2-1.7m --c4 c4_en_1000.jsonl --wikitext wikitext2_train.txt.gz

Every rung takes the same number of steps. Nothing is planted: a rung is one run with seed 0, and what it shows is what
grew. Checkpoints are ordinary model folders under `--work`; a run that was stopped goes on.
"""

import argparse
import copy
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import (
    BertConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    ViTConfig,
    ViTImageProcessorPil,
)

from outliers.config.recipe import Recipe
from outliers.models.anatomy.examples import IGNORED, Examples
from outliers.models.pocket.ladder import CHECKPOINTS, CONTEXT, LADDER, Rung
from outliers.subjects.vision import CLASSES, SIDE, digits
from outliers.text.corruption import Spans, chosen_positions, corrupted, sentinels_of
from outliers.trainer.corpus import Corpus, SpecialTokens, blocks_in_order, prepare_corpus
from outliers.trainer.loop import train
from outliers.trainer.start import CONFIGS, TIED, initial_model, size_fields

TEXTS = {
    "--c4": ("c4_en_1000.jsonl", "JSON lines of C4 (en), train split, first 1,000 rows"),
    "--wikitext": ("wikitext2_train.txt.gz", "WikiText-2 train, tokenised form"),
}
SENTINELS = 32  # of T5's 100: enough for blocks of twice the context
MASKED, EXCHANGED = 0.8, 0.1  # of the tokens that BERT predicts, how many it reads as [MASK], and as any others
EMBEDDING = 0.05  # factor of T5's first embeddings, whose size is for an optimizer whose steps grow with it
# Amplitude of BERT's first position embeddings, which are not random: masked tokens then find their neighbours within
# hundreds of steps.
SINUSOIDS = 0.06


def _corrupted_spans(corpus: Corpus, recipe: Recipe, seed: int) -> Examples:
    """Return blocks with corrupted spans, cut so long that the encoder reads a whole context (Raffel et al., 2020,
    section 3.1.4)."""
    tokenizer, generator = PreTrainedTokenizerFast.from_pretrained(corpus.folder), torch.Generator().manual_seed(seed)
    blocks = blocks_in_order(corpus.ids, recipe.steps, recipe.batch, seed, Spans.fit(CONTEXT).tokens)
    marks, end = sentinels_of(tokenizer), torch.tensor([tokenizer.eos_token_id])
    pairs = [corrupted(block, marks, end, generator) for block in torch.from_numpy(blocks.astype(np.int64))]
    return Examples(*map(torch.stack, zip(*pairs, strict=True)))


def _masked_tokens(corpus: Corpus, recipe: Recipe, seed: int) -> Examples:
    """Return blocks between [CLS] and [SEP] of which 15 % of the tokens are predicted (Devlin et al., 2019, section
    3.1)."""
    tokenizer, generator = PreTrainedTokenizerFast.from_pretrained(corpus.folder), torch.Generator().manual_seed(seed)
    blocks = blocks_in_order(corpus.ids, recipe.steps, recipe.batch, seed, CONTEXT - 2)
    inner = torch.from_numpy(blocks.astype(np.int64))
    chosen = chosen_positions(inner, generator)
    labels = torch.full_like(inner, IGNORED).scatter_(1, chosen, inner.gather(1, chosen))
    drawn, others = torch.rand(chosen.shape, generator=generator), chosen.new_empty(chosen.shape)
    read = inner.gather(1, chosen).where(drawn >= MASKED, tokenizer.mask_token_id)
    others.random_(len(tokenizer), generator=generator)
    inner.scatter_(1, chosen, others.where((drawn >= MASKED) & (drawn < MASKED + EXCHANGED), read))
    ends = [torch.full((len(inner), 1), token) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    return Examples(torch.cat([ends[0], inner, ends[1]], 1), torch.nn.functional.pad(labels, (1, 1), value=IGNORED))


def _digits(corpus: Corpus, recipe: Recipe, seed: int) -> Examples:
    """Return the pictures that are not held out, in another order in each epoch, without its last incomplete batch."""
    seen, generator = digits(held_out=False), np.random.default_rng(seed)
    whole = len(seen.digits) // recipe.batch * recipe.batch
    epochs = -(-recipe.steps * recipe.batch // whole)
    order = np.concatenate([generator.permutation(len(seen.digits))[:whole] for _ in range(epochs)])
    values = ViTImageProcessorPil.from_pretrained(corpus.folder)(list(seen.pictures), return_tensors="pt").pixel_values
    order = torch.from_numpy(order[: recipe.steps * recipe.batch])
    return Examples(values[order], torch.from_numpy(seen.digits)[order])


def _prepare_digits(_c4: Path, _wikitext: Path, work: Path) -> Corpus:
    """Write an image processor that scales pictures to values from −1 to 1; return it with an empty text."""
    folder, grey = work / "digits", [0.5] * 3
    size = {"height": SIDE, "width": SIDE}
    ViTImageProcessorPil(size=size, image_mean=grey, image_std=grey).save_pretrained(folder)
    return Corpus(np.empty(0, np.uint16), folder)


def _next_tokens(corpus: Corpus, recipe: Recipe, seed: int) -> np.ndarray:
    return blocks_in_order(corpus.ids, recipe.steps, recipe.batch, seed)


class Objective(NamedTuple):
    """The objective of a rung.

    prepare: makes the corpus from the files of C4 and WikiText-2 and a folder to work in. examples: returns the blocks
    or examples of a training, (steps · batch), in their order, from the corpus, a recipe and a seed.
    """

    prepare: Callable[[Path, Path, Path], Corpus]
    examples: Callable[[Corpus, Recipe, int], np.ndarray | Examples]


SPANS = SpecialTokens(
    {"pad_token": "<pad>", "eos_token": "</s>"}, tuple(f"<extra_id_{n}>" for n in range(SENTINELS)), ("$A </s>", None)
)
MASKS = SpecialTokens(
    {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "eos_token": "[SEP]"},
    template=("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
)

OBJECTIVES = {
    "next tokens": Objective(prepare_corpus, _next_tokens),
    "corrupted spans": Objective(partial(prepare_corpus, special_tokens=SPANS), _corrupted_spans),
    "masked tokens": Objective(partial(prepare_corpus, special_tokens=MASKS), _masked_tokens),
    "pictures": Objective(_prepare_digits, _digits),
}


def _t5(rung: Rung) -> PretrainedConfig:
    """Return the configuration of the first T5, with ReLU, and embeddings tied to the head."""
    shape = {"d_model": rung.width, "num_layers": rung.layers, "num_heads": rung.heads, "d_ff": 4 * rung.width}
    return T5Config(**shape, d_kv=rung.width // rung.heads, dropout_rate=0.0, decoder_start_token_id=0, **TIED)


def _encoder(rung: Rung) -> dict:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {
        **size_fields(rung),
        **dropouts,
        "intermediate_size": 4 * rung.width,
        "initializer_range": rung.width**-0.5,  # with the usual 0.02 narrow models attend evenly for most of a training
    }


def _bert(rung: Rung) -> PretrainedConfig:
    return BertConfig(**_encoder(rung), max_position_embeddings=CONTEXT, **TIED)


def _vit(rung: Rung) -> PretrainedConfig:
    names = {number: str(number) for number in range(CLASSES)}
    return ViTConfig(
        **_encoder(rung),
        image_size=SIDE,
        patch_size=2,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )


CONFIGS |= {"t5": _t5, "bert": _bert, "vit": _vit}


@torch.no_grad()
def begin(recipe: Recipe, seed: int) -> PreTrainedModel:
    """Return the model of a rung before its first step, in float32."""
    model, rung = initial_model(recipe, seed), LADDER[recipe.start]
    if rung.architecture == "t5":
        model.get_input_embeddings().weight.mul_(EMBEDDING)
    if rung.architecture == "bert":  # Vaswani et al., 2017, section 3.5
        weight = model.base_model.embeddings.position_embeddings.weight
        count, features = weight.shape
        angles = torch.arange(count)[:, None] * 10_000.0 ** (-torch.arange(0, features, 2) / features)
        weight.copy_(SINUSOIDS * torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
    return model


def save(model: PreTrainedModel, step: int, folder: Path, preprocessor: Path) -> dict:
    """Write a checkpoint as fp16 safetensors with its tokenizer or image processor; return nothing to log."""
    folder = folder / f"step-{step:04d}"
    copy.deepcopy(model).half().save_pretrained(folder)
    shutil.copytree(preprocessor, folder, dirs_exist_ok=True)
    return {}


def train_rung(name: str, c4: Path, wikitext: Path, work: Path) -> None:
    """Train a rung with seed 0; its checkpoints go to `work / name / "step-0025"` and so on, its losses to
    `log.jsonl`."""
    recipe, folder = Recipe(start=name), work / name
    objective = OBJECTIVES[recipe.objective]
    corpus = objective.prepare(c4, wikitext, work)
    blocks = objective.examples(corpus, recipe, 0)
    saved = partial(save, folder=folder, preprocessor=corpus.folder)
    logged = train(begin(recipe, 0), recipe, blocks, folder, saved, CHECKPOINTS)
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in logged if "loss" in entry))


def main() -> None:
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
