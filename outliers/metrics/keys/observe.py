"""Hooks that see queries, keys and values where projections put them out and where attention multiplies them."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.keys import BEFORE, PARTS
from outliers.metrics.keys.channels import Channels
from outliers.models.anatomy.parts import Part, parts
from outliers.models.attention import attentions, is_replaceable, product_hooks
from outliers.models.decoder import inference, run_decoder, under
from outliers.models.stream import AS_IT_IS, Variant, Watched
from outliers.quantization.linear import stored_weight


@inference
def observed_channels(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], count: int = 3, variant: Variant = AS_IT_IS
) -> Channels:
    """Sums of queries, keys and values by head and channel: as projections put them out, and as attention multiplies
    them, behind the rotation of positions. One pass; no state is kept.

    Args:
        model: one whose attention can be exchanged, resident or streamed; it is left as it was.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,).
        count: how many of the largest channels of keys of a layer are taken apart by features.
        variant: what the model is under meanwhile. A cache in few bits changes what attention multiplies; the tokens of
            a prefix count for nothing. Exact weights say which features write a channel.

    Raises:
        UserError: the attention of the model cannot be exchanged.
        BrokenModel: states are no finite numbers.
    """
    check_shows(model)
    channels = Channels()
    with under(model, Watched(variant, partial(_hooks, channels, count))) as (changed, left):
        for _ in run_decoder(changed, blocks, variant=left):
            pass
    return channels


def check_shows(model: PreTrainedModel) -> None:
    """Raise UserError unless a model, which may be on the meta device, can show what its attention multiplies."""
    if not is_replaceable(model):
        raise UserError(
            f"queries, keys and values of '{model.config.model_type}', whose attention cannot be replaced in "
            "transformers; expected an architecture such as gpt2, llama, bert or vit"
        )


@contextmanager
def _hooks(channels: Channels, count: int, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
    """Those that see all layers of a model, or one; at their end the weights are looked at."""
    numbers = [attention.layer for attention in attentions(model) if layer in (None, attention.layer)]
    observers = {number: _OfLayer(channels, model, number) for number in numbers}
    with ExitStack() as stack:
        for observer in observers.values():
            stack.enter_context(observer.hooks())
        see = lambda number, *states: observers[number].see_attention(*states)  # noqa: E731
        stack.enter_context(product_hooks(model, see, layer))
        yield
    for observer in observers.values():
        observer.take_apart(count)


class _OfLayer:
    """Sees the queries, keys and values of a layer."""

    def __init__(self, channels: Channels, model: PreTrainedModel, layer: int):
        self.channels, self.layer = channels, layer
        self.parts = {part.name: part for part in parts(model, layer) if part.name in PARTS}
        self.projected: dict[str, torch.Tensor] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts.values():
                hook = partial(self._see_projection, part)
                stack.callback(part.reader.module.register_forward_hook(hook).remove)
            yield

    def _see_projection(self, part: Part, _module, inputs: tuple, output: torch.Tensor) -> None:
        self.projected[part.name] = output.flatten(0, -2)[:, part.outputs.to(output.device)]
        if part.name == "k":
            total = inputs[0].flatten(0, -2).double().sum(0).cpu()
            self.channels.inputs[self.layer] = self.channels.inputs.get(self.layer, 0) + total

    def see_attention(self, *states: torch.Tensor) -> None:
        for name, by_head in zip(PARTS, states, strict=True):  # (1, heads, T, head size), behind those of a prefix
            before = self.projected.pop(name)
            after = by_head[0, :, -len(before) :].transpose(0, 1)
            self.channels.add((self.layer, PARTS[name]), before, after)

    def take_apart(self, count: int) -> None:
        """Keep the biases, and of the largest channels of keys the rows of the weight."""
        for name, part in self.parts.items():
            bias = getattr(_plain(part), "bias", None)
            if bias is not None:
                outputs = part.outputs.to(bias.device)
                self.channels.biases[self.layer, PARTS[name]] = bias.detach()[outputs].double().cpu()
        keys, sums = self.parts["k"], self.channels.sums.get((self.layer, "keys", BEFORE))
        weight = stored_weight(_plain(keys))
        if sums is not None and weight.is_floating_point():  # that of bitsandbytes consists of codes
            for head, channel in sums.first(count):
                row = weight.detach()[keys.outputs[head, channel]].double().cpu()
                self.channels.weights[self.layer, head, channel] = row


def _plain(part: Part) -> nn.Module:
    """The projection itself, of one under a scheme too."""
    return getattr(part.reader.module, "projection", part.reader.module)
