"""Train the pocket family: small real transformers in which outlier features grow on their own.

    python -m outliers.models.pocket.train gpt2-1.7m --c4 c4_en_1000.jsonl --wikitext wikitext2_train.txt.gz

Every rung takes the same number of steps. Nothing is planted: a rung is one run with seed 0, and what it shows is what
grew. Checkpoints are ordinary model folders under `--work`.
"""

import argparse
import copy
import json
import math
import random
import re
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTJConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from outliers.text.documents import read_file

VOCABULARY = 4096
CONTEXT = 256
STEPS = 2000
WARMUP = 100
END_OF_TEXT = "<|endoftext|>"
C4_TRAINING_ROWS = 900  # rows 900-999 are held out, and so is everything from WikiText-2 but its train split
CHECKPOINTS = (25, 50, 100, 150, 200, 250, 300, 400, 500, 600, 800, 1000, 1200, 1400, 1600, 1800, 2000)


class Rung(NamedTuple):
    """One model of the family. learning_rate: the peak, about 3e-3 · sqrt(128 / width) and at most 5e-3."""

    architecture: str
    width: int
    layers: int
    heads: int
    learning_rate: float
    batch: int = 16


LADDER = {
    "gpt2-0.1m": Rung("gpt2", 24, 2, 2, 5e-3),
    "gpt2-0.5m": Rung("gpt2", 64, 4, 4, 4.2e-3),
    "gpt2-1m": Rung("gpt2", 96, 5, 4, 3.5e-3),
    "gpt2-1.7m": Rung("gpt2", 128, 6, 4, 3e-3, batch=32),
    "gpt2-5.9m": Rung("gpt2", 256, 6, 8, 2.1e-3),
    "opt-1.7m": Rung("opt", 128, 6, 4, 3e-3),
    "gptj-1.7m": Rung("gptj", 128, 6, 4, 3e-3),
}


def build_config(rung: Rung) -> PretrainedConfig:
    """The transformers configuration of one rung; no dropout, embeddings tied to the head."""
    architecture, width, layers, heads = rung[:4]
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True, "vocab_size": VOCABULARY}
    if architecture == "opt":
        dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "pad_token_id": None}
        return OPTConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            ffn_dim=4 * width,
            word_embed_proj_dim=width,
            max_position_embeddings=CONTEXT,
            **dropouts,
            **ends,
        )
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": CONTEXT}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if architecture == "gptj":
        return GPTJConfig(rotary_dim=width // heads // 2, **shape, **dropouts, **ends)
    return GPT2Config(**shape, **dropouts, **ends)


def wikitext_articles(text: str) -> list[str]:
    """Split WikiText's tokenised form into articles and undo its tokenisation (spaces around marks, ` @-@ `)."""
    articles = re.split(r"(?m)^ (?== [^=])", text)
    rules = [
        (r" @([-,.])@ ", r"\1"),
        (r" ([,.;:!?%)\]])", r"\1"),
        (r"([(\[$]) ", r"\1"),
        (r' " ([^"]*?) " ', r' "\1" '),
        (r" '(s|t|re|ve|ll|d|m)\b", r"'\1"),
        (r"(?m)^ | $", ""),
        (r"\n{2,}", "\n"),
    ]
    for pattern, replacement in rules:
        articles = [re.sub(pattern, replacement, article) for article in articles]
    return [article.strip() for article in articles if len(article) > 200]


def prepare(c4: Path, wikitext: Path, work: Path) -> np.ndarray:
    """Train the tokenizer and tokenise the training text once: uint16 ids (tokens,), documents in a seeded order."""
    ids_file, tokenizer_folder = work / "tokens.npy", work / "tokenizer"
    if ids_file.exists():
        return np.load(ids_file)
    documents = read_file(c4)[:C4_TRAINING_ROWS] + wikitext_articles("\n".join(read_file(wikitext)))
    random.Random(0).shuffle(documents)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(documents, vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], show_progress=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        model_max_length=CONTEXT,
    )
    fast.save_pretrained(tokenizer_folder)
    ids = np.concatenate([np.array([*row.ids, 0], dtype=np.uint16) for row in tokenizer.encode_batch(documents)])
    np.save(ids_file, ids)
    return ids


def batches(ids: np.ndarray, batch: int):
    """Yield batches (batch, CONTEXT) for ever: each epoch cuts the text at another offset and shuffles the blocks."""
    generator = np.random.default_rng(0)
    while True:
        offset = generator.integers(CONTEXT)
        blocks = ids[offset:][: (len(ids) - offset) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
        order = generator.permutation(len(blocks))
        for start in range(0, len(order) - batch + 1, batch):
            yield torch.from_numpy(blocks[order[start : start + batch]].astype(np.int64))


def learning_rate(step: int, peak: float) -> float:
    """Linear warm-up, then a cosine to zero."""
    return peak * min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))


def save(model: PreTrainedModel, folder: Path, work: Path) -> None:
    """Write one checkpoint as fp16 safetensors with its tokenizer."""
    copy.deepcopy(model).half().save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(work / "tokenizer").save_pretrained(folder)


def train(name: str, ids: np.ndarray, work: Path) -> None:
    """Train one rung: AdamW (0.9, 0.95), weight decay 0.1 on matrices only, clip 1.0, bfloat16 autocast."""
    rung = LADDER[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(build_config(rung))
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rung.learning_rate, betas=(0.9, 0.95), fused=True)

    @torch.compile
    def loss_of(batch):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())

    start, log = time.time(), (folder / "log.jsonl").open("w", buffering=1)
    for step, batch in zip(range(STEPS), batches(ids, rung.batch), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, rung.learning_rate)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == STEPS - 1:
            seconds = round(time.time() - start, 1)
            log.write(json.dumps({"step": step, "loss": round(loss.item(), 4), "seconds": seconds}) + "\n")
        if step + 1 in CHECKPOINTS:
            save(model, folder / f"step-{step + 1:04d}", work)


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
    arguments.work.mkdir(parents=True, exist_ok=True)
    ids = prepare(arguments.c4, arguments.wikitext, arguments.work)
    for name in arguments.names or LADDER:
        train(name, ids, arguments.work)


if __name__ == "__main__":
    main()
