"""How sure attention is of its first choice, with and without features."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transformers import PreTrainedModel

from outliers.metrics.measurement import Keeps, Measurement
from outliers.models.decoder import inference, run_decoder, under
from outliers.models.hooks import attention_hooks, eager
from outliers.models.stream import AS_IT_IS, Variant, Watched
from outliers.subjects.bench import Bench, named_under
from outliers.subjects.cell import Cell
from outliers.variants.ablated import Ablated, Intervention
from outliers.variants.edges import ROLES
from outliers.variants.together import Together, parts_of

PROBABILITIES = 4  # (heads, T, T) of a layer at once: scores, what is made of them, and of those under an intervention


@inference
def top1_softmax(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    interventions: Iterable[Intervention | Ablated] = (Intervention(()),),
    variant: Variant = AS_IT_IS,
) -> list[float]:
    """Mean top-1 softmax probability of the attention under each intervention (LLM.int8(), section 4.2).

    The mean over layers, heads, query positions and sequences of the largest probability that a query gives to a key;
    each query counts alike, however long its sequence.
    An intervention changes the input of the q/k/v projection in one layer at a time, an ablation what reads at its
    places; what goes on through the model is the layer's unchanged output. Probabilities of one layer at a time are
    held.

    blocks: token ids, int64 (blocks, T), or any iterable of (T,). variant: what all of it is under, such as a scheme.
    """
    ablations = [one if isinstance(one, Ablated) else Ablated(one) for one in interventions]
    found, queries = [], []

    def visit(model: PreTrainedModel, layer: int, probabilities: torch.Tensor, recompute: Callable) -> None:
        of_layer = []
        for ablated in ablations:
            with ablated.on(model, layer):
                changed = recompute() if ablated.intervention.features else probabilities
            of_layer.append(changed.amax(-1).double().mean())
        found.append(torch.stack(of_layer))
        queries.append(probabilities.shape[-2])

    with eager(model), under(model, Watched(variant, partial(_hooks, visit))) as (changed, left):
        for _ in run_decoder(changed, blocks, variant=left):
            pass
    counts = torch.tensor(queries, dtype=torch.float64)
    weights = counts / counts.mean()  # exactly 1 where all are equal
    return (torch.stack([of_layer.cpu() for of_layer in found]) * weights[:, None]).mean(0).tolist()


@contextmanager
def _hooks(visit: Callable, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
    """Let `visit` see the attention of all layers, or of one."""
    with attention_hooks(model, partial(visit, model), layer):
        yield


class OfAttention(Measurement):
    """All interventions on what one variant makes of a model come from one pass."""

    def bundles(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        bundles: dict[str, list[Cell]] = {}
        for cell in cells:
            bundles.setdefault(_parted(cell.variant)[0].name, []).append(cell)
        return list(bundles.values())

    def keeps(self, cells: Sequence[Cell]) -> Keeps:
        return super().keeps(cells)._replace(attention=PROBABILITIES, variants=1)

    def steps(self, cells: Sequence[Cell]) -> int:
        return len(cells[0].subject.blocks)

    def answer(self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict) -> list[tuple[int, float]]:
        """Of each cell how many blocks were looked at, and the probability over them."""
        subject = cells[0].subject
        model, blocks = subject.load(bench, facts), subject.blocks[part]
        parted = list(map(_parted, bench.knowing([cell.variant for cell in cells], subject)))
        variant, interventions = parted[0][0], [intervention for _, intervention in parted]
        with named_under(subject, variant):
            found = top1_softmax(model, bench.counted(blocks), interventions, variant)
        return [(len(blocks), value) for value in found]

    def values(self, cell: Cell, answers: list[tuple[int, float]]) -> list[dict]:
        blocks = sum(count for count, _ in answers)
        value = sum(count / blocks * of_part for count, of_part in answers)
        return [{"metric": "top1_softmax", "value": value, "unit": "1"}]


def _parted(variant: Variant) -> tuple[Variant, Ablated]:
    """What a model is under, and its last ablation, which changes the attention of a layer at a time.

    One of whole roles changes the input of the q/k/v projection; one of edges that others read too acts everywhere.
    """
    *others, last = parts_of(variant)
    if isinstance(last, Ablated) and set(last.where) <= ROLES.keys():
        last = Ablated(last.intervention)
    elif not isinstance(last, Ablated) or not last.in_attention:
        return variant, Ablated(Intervention(()))
    return Together(tuple(others)) if others else AS_IT_IS, last


TOP1 = OfAttention()
