"""Milliseconds a generated token of models under schemes, by batch (Table 6)."""

from itertools import product

from outliers.metrics.records import Latency
from outliers.specification import kinds
from outliers.specification.kinds import Settings, schemes_of
from outliers.subjects.cell import Cell, Plan
from outliers.subjects.served import Served
from outliers.variants.peer import PEER, Peer
from outliers.variants.quantized import Quantized


def latency_plans(spec: kinds.Latency) -> list[Plan]:
    """Of each model under each scheme the times of each batch; one is in memory at a time."""
    shared = spec.model_dump(include={"name", "text", "bos", "alpha", "device", "dtype"})
    settings = Settings(**shared, block=spec.prompt, blocks=max(spec.batches))
    generation = spec.model_dump(include={"prompt", "tokens", "repeats"})
    metrics = [Latency(batch=batch, **generation) for batch in spec.batches]
    peer = [Peer(spec.alpha)] if PEER in spec.schemes else []
    pairs = product(spec.models, [*(Quantized(scheme, tuple(spec.skip)) for scheme in schemes_of(spec)), *peer])
    return [
        Plan.of(
            subject := Served(name, spec.revision, settings),
            [Cell(subject, variant, metric) for metric in metrics],
            PEER if isinstance(variant, Peer) else None,
        )
        for name, variant in pairs
    ]
