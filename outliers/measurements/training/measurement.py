"""Training runs that differ in one thing each: what grows in them, and what they end with (LLM.int8(), appendix E)."""

import hashlib
import json
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outliers.measurements.bench import Bench, check_machine, named
from outliers.measurements.measurement import Measurement, Question
from outliers.measurements.training.watch import watch
from outliers.metrics.perplexity.measure import perplexity
from outliers.models.load import find_device, load_tokenizer
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import BASELINE, get_scheme
from outliers.specification.door import check_training
from outliers.specification.kinds import said_of_text
from outliers.specification.recipe import Recipe, Training
from outliers.text.blocks import find_text, load_text, tokens_hash
from outliers.training.corpus import Corpus, blocks_in_order, prepare
from outliers.training.layers import train_int8
from outliers.training.loop import train
from outliers.training.start import start
from outliers.variants.draw import drawn, scattered

# What is kept of a model in the middle of its training; of the trained one it is all that `watch` finds.
ALONG = ("perplexity", "count", "layers", "positions", "attention_sink", "max")  # and those of each role


class Run(NamedTuple):
    """A recipe with a seed, by the name that the experiment gives it.

    held_out: blocks (blocks, T) that it is measured on. text: hash of what it is trained on, in its order.
    """

    label: str
    recipe: Recipe
    seed: int
    held_out: torch.Tensor
    text: str

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"{self.label}, seed {self.seed}"

    @property
    def key(self) -> str:
        """12 hex digits of all that decides its weights but the code."""
        said = json.dumps([self.recipe.model_dump(), self.seed, self.text], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]


class Answer(NamedTuple):
    """What a run came to: facts of its model, what was logged along it, and the perplexity under each scheme."""

    facts: dict
    logged: list[dict]
    found: dict[str, dict]


class TrainingRows(Measurement[Training]):
    """Of each run: every metric of `watch` after some steps and at the end; there also the perplexity in float32 and
    under schemes, with its scatter.

    A run that was stopped goes on from its last checkpoint.
    """

    unit = "step"
    experiment = "training"

    def subjects(self) -> list[Run]:
        check_machine(self.spec)
        check_training(self.spec)
        pairs = [(label, recipe, seed) for seed in self.spec.seeds for label, recipe in self.spec.runs.items()]
        return [self._run(*pair) for pair in pairs]

    def _run(self, label: str, recipe: Recipe, seed: int) -> Run:
        spec = self.spec
        tokenizer = self._tokenizer(recipe)
        held_out = load_text(spec.text, tokenizer, spec.block, spec.blocks)
        read = hashlib.sha256(self._blocks(recipe, seed).tobytes()).hexdigest()[:12]
        return Run(label, recipe, seed, held_out, read)

    def total(self, run: Run) -> int:
        return run.recipe.steps

    def look(self, _bench: Bench, run: Run) -> tuple[dict, None]:
        spec = self.spec
        fields = {
            "run": run.label,
            "seed": run.seed,
            **run.recipe.in_rows,
            "trained_on": run.text,
            "text": said_of_text(spec.text),
            "tokens_hash": tokens_hash(run.held_out),
            "protocol": find_text(spec.text).protocol,
            **spec.model_dump(include={"block", "blocks", "alpha", "dtype", "draws"}),
        }
        return fields, None

    def questions(self, run: Run, _facts: None) -> list[Question]:
        return [Question("training", {}, run)]

    def is_whole(self, _question: Question, rows: list[dict]) -> bool:
        return {f"perplexity.{scheme}" for scheme in self._schemes} <= {row["metric"] for row in rows}

    def steps(self, question: Question) -> int:
        return question.about.recipe.steps

    def answer(self, bench: Bench, run: Run, _question: Question, _fields: dict) -> Answer:
        spec, recipe = self.spec, run.recipe
        model = start(recipe, run.seed, find_device(spec.device))
        facts = {"architecture": model.config.model_type, "parameters": model.num_parameters()}
        seen = partial(_seen, blocks=run.held_out, alpha=spec.alpha)
        with named(run.name):
            folder = Path(spec.work) / run.key
            at = {*spec.watched, recipe.steps}
            logged = train(model, recipe, self._blocks(recipe, run.seed), folder, seen, at, bench.bar.update)
            found = self._under_schemes(model, run)
        return Answer(facts, logged, found)

    def _under_schemes(self, model: PreTrainedModel, run: Run) -> dict[str, dict]:
        """The perplexity of a trained model under each scheme; that of BASELINE is of its weights in float32."""
        train_int8(model, ffn=False, linear=False)
        found = {}
        for scheme in self._schemes:
            changed, draws = quantize(model, get_scheme(scheme)), []
            for draw in range(self.spec.draws):
                with drawn(changed, draw):
                    draws.append(perplexity(changed, run.held_out))
            found[scheme] = scattered(draws)
        return found

    def rows(self, question: Question, answer: Answer) -> list[dict]:
        facts, logged, found = answer
        steps = question.about.recipe.steps
        along = [
            {"checkpoint": f"step-{entry['step']}", "metric": metric, "value": value}
            for entry in logged
            if "perplexity" in entry
            for metric, value in entry.items()
            if metric in ALONG
            or metric.startswith("max.")
            or (entry["step"] == steps and metric not in ("step", "epoch"))
        ]
        last = f"step-{steps}"
        at_the_end = [{"checkpoint": last, "metric": f"perplexity.{name}"} | of_one for name, of_one in found.items()]
        return [facts | row | {"unit": "1"} for row in along + at_the_end]

    @property
    def _schemes(self) -> list[str]:
        return [BASELINE, *(scheme for scheme in self.spec.schemes if scheme != BASELINE)]

    @cached_property
    def _corpus(self) -> Corpus:
        return prepare(Path(self.spec.c4), Path(self.spec.wikitext), Path(self.spec.work))

    def _tokenizer(self, recipe: Recipe) -> PreTrainedTokenizerBase:
        return load_tokenizer(str(self._corpus.tokenizer) if recipe.from_nothing else recipe.start)

    def _blocks(self, recipe: Recipe, seed: int) -> np.ndarray:
        """What is trained on, in the order of a seed: ids (steps · batch, T)."""
        if recipe.from_nothing:
            return blocks_in_order(self._corpus.ids, recipe.steps, recipe.batch, seed)
        count = recipe.steps * recipe.batch
        blocks = load_text(self.spec.wikitext, load_tokenizer(recipe.start), self.spec.block, count).numpy()
        return np.random.default_rng(seed).permutation(blocks)


def _seen(model: PreTrainedModel, _step: int, blocks: torch.Tensor, alpha: float) -> dict[str, float]:
    return watch(model, blocks, alpha)
