"""The mean top-1 softmax probability: the mean of the largest probability of each query (LLM.int8(), 4.2)."""

import itertools
from collections import defaultdict

import torch

from outliers.metrics.attention import AttentionComputation, Visits
from outliers.show import units


def _measure(probabilities: torch.Tensor, _visible: torch.Tensor, _cross: bool) -> torch.Tensor:
    return probabilities.amax(-1).double().mean()


def _by_ablation(visits: Visits) -> list[tuple[int, float, list[tuple[float, float]]]]:
    """Return, for each ablation, the number of visits, their mean probability, and each sequence's sum and count."""
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
