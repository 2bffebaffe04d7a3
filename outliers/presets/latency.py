"""Milliseconds a generated token of models under schemes, by batch (Table 6)."""

from itertools import product
from typing import TYPE_CHECKING

from outliers.metrics.latency import Latency
from outliers.specification import kinds
from outliers.specification.kinds import Settings, schemes_of
from outliers.subjects.cell import Cell, Plan, at_once
from outliers.subjects.served import Served
from outliers.variants.peer import PEER, Peer
from outliers.variants.quantized import Quantized

if TYPE_CHECKING:
    from outliers.models.stream import Variant


def latency_plans(spec: kinds.Latency) -> list[Plan]:
    """Of each model under each scheme the times of each batch; one is in memory at a time."""
    shared = spec.model_dump(include={"name", "text", "bos", "alpha", "device", "dtype"})
    settings = Settings(**shared, block=spec.prompt, blocks=max(spec.batches))
    generation = spec.model_dump(include={"prompt", "tokens", "repeats"})
    metrics = [Latency(batch=batch, **generation) for batch in spec.batches]
    pairs = product(spec.models, _variants(spec))
    return [_plan(Served(name, spec.revision, settings), variant, metrics) for name, variant in pairs]


def _plan(subject: Served, variant: "Variant", metrics: list[Latency]) -> Plan:
    cells = [Cell(subject, variant, metric) for metric in metrics]
    return Plan(subject, at_once(cells), PEER if isinstance(variant, Peer) else None)


def _variants(spec: kinds.Latency) -> "list[Variant]":
    """The schemes of a specification, and after them bitsandbytes where that is asked for."""
    peer = [Peer(spec.alpha)] if PEER in spec.schemes else []
    return [*(Quantized(scheme, tuple(spec.skip)) for scheme in schemes_of(spec)), *peer]
