"""The greedy continuation of the beginning of a text."""

import sys
from collections.abc import Iterable, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.measurement import CellMeasurement
from outliers.models.anatomy import context_length, family_of
from outliers.models.anatomy.causal import CAUSAL
from outliers.models.anatomy.examples import input_ids
from outliers.models.decoder import inference, under
from outliers.models.stream import Variant
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache


class ContinuationMeasurement(CellMeasurement):
    """The measurement that continues the first tokens of the first block."""

    cost = 0.3  # of a token that passes alone: all weights are read for it
    splits = False

    def check(self, cell: Cell) -> None:
        subject = cell.subject
        if (family := family_of(subject.config).name) != CAUSAL.name:
            raise UserError(f"'{subject.model}' is of the family '{family}' and continues no text; use another metric")
        if subject.experiment.stream:
            raise UserError("a continuation reads all layers for each token; leave --stream out")
        if _prompt_length(cell) < 1:
            raise UserError(
                f"{cell.metric.tokens} further tokens are more than the context of '{subject.model}' has; use fewer"
            )

    def steps(self, cells: Sequence[Cell]) -> int:
        """Return the number of further tokens, each of which passes the model alone."""
        return sum(cell.metric.tokens for cell in cells)

    def measure_cell(
        self, _model_cache: ModelCache, cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Variant
    ) -> list[int]:
        """Return the token ids that continue the first block."""
        prompt = input_ids(next(iter(blocks)))[: _prompt_length(cell)]
        with under(model, variant) as (changed, _):
            return continued(changed, prompt, cell.metric.tokens)

    def values(self, cell: Cell, results: list[list[int]]) -> list[dict]:
        (ids,), tokenizer = results, cell.subject.preprocessor
        prompt = input_ids(cell.subject.blocks[0])[: _prompt_length(cell)].tolist()
        texts = {"prompt_text": tokenizer.decode(prompt), "continuation": tokenizer.decode(ids)}
        return [{"metric": "continuation", "value": len(ids), "unit": "tokens", **texts, "continuation_ids": ids}]


def _prompt_length(cell: Cell) -> int:
    """Return how many tokens of the block are continued: as many as the context has room for."""
    context = context_length(cell.subject.config) or sys.maxsize
    return min(cell.metric.prompt, cell.subject.experiment.block, context - cell.metric.tokens)


@inference
def continued(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> list[int]:
    """Return the most probable next tokens after a prompt (T,), one after the other, until the end-of-text token."""
    ends = model.config.eos_token_id  # a list where several tokens end a text
    padding = ends[0] if isinstance(ends, list) else ends
    greedy = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=ends, pad_token_id=padding)
    ids = prompt[None].to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)[0, len(prompt) :].tolist()


MEASUREMENT = ContinuationMeasurement()
