"""Shapes of the projections that a decoder layer multiplies for a further token, from a model's configuration."""

from contextlib import ExitStack

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outliers.errors import UserError
from outliers.metrics.memory.footprint import lists_of_layers, prompt, without_values
from outliers.models.skeleton import skeleton


@torch.inference_mode()
def decode_shapes(config: PretrainedConfig) -> tuple[list[tuple[int, int]], int]:
    """Features and outputs of each projection that the first decoder layer multiplies with a further token, in turn,
    and how many decoder layers there are.

    A step of a generation is passed through a model on the meta device. What an encoder has read is in the cache by
    then, so that cross-attention multiplies no keys and values. Experts of a mixture are left out.

    Raises:
        UserError: transformers has no such model, cannot run it on the meta device, or it generates nothing.
    """
    with without_values(config):
        model = skeleton(config)
        layers, shapes = lists_of_layers(model)[-1], []
        if not model.can_generate():
            raise UserError(f"a model of type '{config.model_type}' generates no tokens; expected one with a decoder")
        read = model(**prompt(model, 4, 1))

        def note(_module, inputs: tuple, output: torch.Tensor) -> None:
            shapes.append((inputs[0].shape[-1], output.shape[-1]))

        with ExitStack() as hooks:
            for module in layers[0].modules():
                if isinstance(module, (nn.Linear, Conv1D)):
                    hooks.callback(module.register_forward_hook(note).remove)
            model(**_further_token(model, read))
        return shapes, len(layers)


def _further_token(model: PreTrainedModel, read) -> dict:
    """The arguments of the call after the one that gave `read`."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    if model.config.is_encoder_decoder:
        encoded = {"encoder_outputs": (read.encoder_last_hidden_state,), "decoder_input_ids": token}
        return {**encoded, "past_key_values": read.past_key_values, "use_cache": True}
    return {"input_ids": token, "past_key_values": read.past_key_values, "use_cache": True}
