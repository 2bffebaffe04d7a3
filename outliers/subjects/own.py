"""Modules of one's own as causal language models."""

import copy
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from outliers.errors import UserError, reason_of
from outliers.models.anatomy import know_class
from outliers.models.stream import exchanged

PROBE, CLOSE = 8, 1e-5  # tokens; difference of logits that is allowed, as a share of the largest one


class _Body(nn.Module):
    """Everything of a module that runs before its head."""

    def __init__(self, module: nn.Module, head: str):
        super().__init__()
        self.module = exchanged(module, {head: nn.Identity()})

    def forward(self, input_ids: torch.Tensor, **_others: object) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=_tensor(self.module(input_ids)))


class Own(PreTrainedModel):
    """A module of one's own, as its parts before the head and the head."""

    base_model_prefix = "stack"

    def __init__(self, config: PretrainedConfig, stack: _Body, head: nn.Linear):
        super().__init__(config)
        self.stack, self.head = stack, head

    @classmethod
    def _from_config(cls, config: PretrainedConfig, **_options: object) -> "Own":
        """Return a model on the device "meta", in which a forward pass finds the layers and projections."""
        return cls(config, *copy.deepcopy(cls.without_values))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def get_input_embeddings(self) -> nn.Embedding:
        return next(module for module in self.stack.modules() if _embeds(module, self.head))

    def forward(self, input_ids: torch.Tensor, **_others: object) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(self.stack(input_ids).last_hidden_state))


def adopt(module: nn.Module) -> PreTrainedModel:
    """Return one's own module as a model that all functions take; the weights are shared.

    Args:
        module: a causal language model that is no `PreTrainedModel`: it returns logits (sequences, tokens, vocabulary),
            or something with `logits`, for token ids, from layers in a `ModuleList` and a last `Linear`. Its `config`
            holds fields of any names.

    Raises:
        UserError: the module has no `config`, no embedding and head of one vocabulary, or changes what the head puts
            out.

    Example:
        >>> outliers.adopt(outliers.load_model("pocket/gpt2-0.1m")).dtype  # a transformers model is returned as it is
        torch.float32
    """
    if isinstance(module, PreTrainedModel):
        return module
    kind, fields = type(module).__name__, getattr(module, "config", None)
    with suppress(TypeError):  # of an object without fields
        fields = fields.to_dict() if isinstance(fields, PretrainedConfig) else vars(fields)
    if not isinstance(fields, Mapping):
        raise UserError(f"'{kind}' has no 'config' with fields; expected one, such as a dataclass")
    linear = {path: part for path, part in module.named_modules() if isinstance(part, nn.Linear)}
    heads = [path for path, head in linear.items() if any(_embeds(part, head) for part in module.modules())]
    if not heads:
        raise UserError(f"'{kind}' has no Linear with an output for each token of an Embedding; expected a head")
    configs = type(f"{kind}Config", (PretrainedConfig,), {"model_type": kind})
    config = configs(**{name: value for name, value in fields.items() if name != "model_type"})
    config.vocab_size = linear[heads[-1]].out_features
    parts = _Body(module, heads[-1]), linear[heads[-1]]
    empty = {id(buffer): buffer.detach().to("meta") for buffer in module.buffers()}
    empty |= {id(part): nn.Parameter(part.detach().to("meta"), part.requires_grad) for part in module.parameters()}
    own = type(kind, (Own,), {"config_class": configs, "without_values": copy.deepcopy(parts, empty)})
    model = own(config, *parts).train(module.training)
    ids = torch.arange(PROBE, device=linear[heads[-1]].weight.device)[None] % config.vocab_size
    with torch.no_grad():
        try:
            expected, logits = _tensor(module(ids)), model(ids).logits
        except Exception as error:  # of any kind, for the module's code is not ours
            raise UserError(f"'{kind}' does not run on token ids (1, {PROBE}): {reason_of(error, 200)}") from None
    if not float((logits - expected).abs().max()) <= CLOSE * float(expected.abs().max()):
        raise UserError(f"'{kind}' changes what its head '{heads[-1]}' puts out; expected these as its logits")
    know_class(model)
    return model


def _embeds(module: nn.Module, head: nn.Linear) -> bool:
    return isinstance(module, nn.Embedding) and module.num_embeddings == head.out_features


def _tensor(output: object) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits
