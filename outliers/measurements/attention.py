"""How sure attention is of its first choice, with and without features."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from outliers.models.anatomy import projections
from outliers.models.decoder import inference, run_decoder
from outliers.models.hooks import attention_hooks
from outliers.variants.interventions import Intervention


@inference
def top1_softmax(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], interventions: Iterable[Intervention] = (Intervention(()),)
) -> list[float]:
    """Mean top-1 softmax probability of the attention (LLM.int8(), section 4.2).

    The mean over layers, heads, query positions and sequences of the largest probability that a query gives to a key.
    An intervention changes the input of the q/k/v projection in one layer at a time; what goes on through the model is
    the layer's unchanged output. Probabilities of one layer at a time are held.

    Args:
        model: a causal language model, quantized or not.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,).
        interventions: what to change; one without features stands for the model as it is.

    Raises:
        UserError: a block does not fit the model, or the model's attention gives no probabilities.

    Returns:
        The probability under each intervention.
    """
    interventions = list(interventions)
    attn_in = defaultdict(list)
    for projection in projections(model):
        if projection.role == "attn_in":
            attn_in[projection.layer].append(projection)
    found = []

    def visit(layer, probabilities, recompute):
        of_layer = []
        for intervention in interventions:
            with intervention.on(attn_in[layer]):
                changed = recompute() if intervention.features else probabilities
            of_layer.append(changed.amax(-1).double().mean())
        found.append(torch.stack(of_layer))

    with attention_hooks(model, visit):
        for _ in run_decoder(model, blocks):
            pass
    return torch.stack([of_layer.cpu() for of_layer in found]).mean(0).tolist()
