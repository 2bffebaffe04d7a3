"""The largest attention probability of each query, with and without some features."""

import itertools
from collections import defaultdict
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from outliers.metrics.attention import AttentionComputation, Visits, attended
from outliers.models.anatomy.stack_views import stack_view
from outliers.models.stream import AS_IT_IS, Variant
from outliers.show import units
from outliers.variants.ablated import Ablated, Intervention


def top1_softmax(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    interventions: Iterable[Intervention | Ablated] = (Intervention(()),),
    variant: Variant = AS_IT_IS,
    stack: str | None = None,
) -> list[float]:
    """Return the mean top-1 softmax probability of the attention under each intervention (LLM.int8(), section 4.2).

    This is the mean over layers, heads, query positions and sequences of the largest probability that a query gives to
    a key; each query counts alike, however long its sequence. An intervention changes the input of the q/k/v projection
    in one layer at a time, an ablation the readers at its places; the next layers get the layer's unchanged output.
    Only the probabilities of one layer are held at a time.

    blocks: token ids, int64 (blocks, T), or any iterable of (T,). variant: a change of the whole model, such as a
    scheme. stack: as for `outliers.trace`.
    """
    ablations = [change if isinstance(change, Ablated) else Ablated(change) for change in interventions]
    results = attended(model, blocks, [(ablated, [COMPUTATION]) for ablated in ablations], variant)
    return [by_view[stack_view(model, stack).name][1] for (by_view,) in results]


def _measure(probabilities: torch.Tensor, _visible: torch.Tensor, _cross: bool) -> torch.Tensor:
    return probabilities.amax(-1).double().mean()


def _by_ablation(visits: Visits) -> list[tuple[int, float, list[tuple[float, float]]]]:
    """Return, for each ablation, the number of visits, their mean probability, and the sum and count of each
    sequence."""
    weights = visits.queries / visits.queries.mean()  # exactly 1 where all are equal
    means = (visits.measured * weights[:, None]).mean(0).tolist()
    numbers = defaultdict(itertools.count)  # by layer: each layer visits the sequences one after the other
    sequences = torch.tensor([next(numbers[layer]) for layer in visits.layers.tolist()])
    nothing = torch.zeros(int(sequences.max()) + 1, len(means), dtype=torch.float64)
    sums = nothing.index_add(0, sequences, visits.measured * visits.queries[:, None])
    counts = nothing[:, 0].index_add(0, sequences, visits.queries).tolist()
    return [
        (len(visits.queries), mean, list(zip(of_sequences, counts, strict=True)))
        for mean, of_sequences in zip(means, sums.T.tolist(), strict=True)
    ]


def _values(results: list[tuple[int, float, list[tuple[float, float]]]]) -> list[dict]:
    visits = sum(count for count, *_ in results)
    return [
        {
            "metric": "top1_softmax",
            "value": sum(count / visits * part_mean for count, part_mean, _ in results),
            "unit": "1",
            **units.fields([[of_sequence for *_, sequences in results for of_sequence in sequences]]),
        }
    ]


COMPUTATION = AttentionComputation(_measure, _by_ablation, _values)
