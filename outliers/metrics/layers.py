"""The loss and agreement of a model in which a single layer is under a variant."""

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.agreement import Agreeing, AgreementReader, values_of
from outliers.metrics.measurement import Measurement, by_draw, loaded
from outliers.metrics.perplexity import Loss, LossReader, finite_losses, perplexity_value, read_logits
from outliers.models.anatomy import count_layers
from outliers.models.decoder import inference, map_blocks, run_decoder, run_exchanged
from outliers.models.variant import Variant
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache, naming
from outliers.variants.draw import drawn, untied
from outliers.variants.quantized import EXACT

BlockResult = tuple[Loss, Agreeing]


@inference
def layer_by_layer(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Variant, draw: int = 0
) -> dict[int, list[BlockResult]]:
    """Return, for each layer, the results of each block, ids (T,), if only this layer is under a variant."""
    layers, readers = range(count_layers(model.config)), (LossReader, AgreementReader)
    with EXACT.on(model) as exact, variant.on(model) as changed, drawn(exact, draw), untied(changed, draw):

        def measure(_number: int, block: torch.Tensor) -> list[BlockResult]:
            ((_, ids, states),) = run_decoder(exact, [block])
            under = [(exact, after) for _, _, after in run_exchanged(exact, changed, block, layers)]
            return [tuple(finite_losses(results)) for results in read_logits(ids, under, readers, (exact, states))]

        by_block = list(map_blocks(exact, measure, blocks))
    return {layer: [by_layer[layer] for by_layer in by_block] for layer in layers}


class LayersMeasurement(Measurement):
    """The measurement of all layers of a resident model under one variant."""

    def check(self, cell: Cell) -> None:
        if cell.subject.experiment.stream:
            raise UserError("layers one by one of a streamed model; expected one in memory: leave --stream out")

    def steps(self, cells: Sequence[Cell]) -> int:
        return sum(count_layers(cell.subject.config) * len(cell.subject.blocks) * cell.metric.draws for cell in cells)

    def measure(
        self, model_cache: ModelCache, cells: Sequence[Cell], part: slice, provenance: dict
    ) -> list[list[dict]]:
        """Return the results of each block by draw and layer."""
        ((cell,), subject) = cells, cells[0].subject
        model, (variant,) = loaded(model_cache, subject, [cell.variant], provenance)
        blocks = model_cache.with_progress(subject.blocks[part], count_layers(model.config))
        with naming(subject.name, variant.name):
            return [[layer_by_layer(model, blocks, variant, draw) for draw in range(cell.metric.draws)]]

    def values(self, cell: Cell, results: list[list[dict[int, list[BlockResult]]]]) -> list[dict]:
        values = []
        for layer in results[0][0]:
            draws = by_draw(([draw[layer] for draw in result] for result in results), cell.subject.seed_count)
            losses, agreements = zip(*([*zip(*draw, strict=True)] for draw in draws), strict=True)
            metrics = [perplexity_value("damage.perplexity", map(list, losses)), *values_of(agreements)]
            values += [{**metric, "metric": f"{metric['metric']}_only", "layer": layer} for metric in metrics]
        return values


MEASUREMENT = LayersMeasurement()
