"""Quantized caches of keys and values, simulated in attention or stored, and prefixes before every sequence."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache as once
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from outlier_kernels.dispatch import quantize
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from outliers.errors import UserError
from outliers.models.anatomy import context_length, family_of, stack_module, stacks_of
from outliers.models.anatomy.parts import stream_readers
from outliers.models.anatomy.weights import device_of
from outliers.models.attention import AttentionCall, States, attentions, check_replaceable_attention, product_hooks
from outliers.models.decoder import inference
from outliers.models.hooks import attached
from outliers.quantization.cache_formats import CacheFormat, Formats
from outliers.quantization.remedies.hadamard import random_rotation, rotate

HALF = torch.finfo(torch.float16)


class CacheCodes(NamedTuple):
    """Integer codes of keys or values: `states ≈ codes * scale + least`.

    codes: uint8 (…, positions, bytes), 8 // bits codes in a byte, the first one in the lowest bits. scale, least:
    float16, (…, positions, 1) by token, (…, groups, features) by channel. features: number of features of a position.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    least: torch.Tensor
    features: int

    @classmethod
    def of(cls, states: torch.Tensor, bits: int, group: int | None) -> "CacheCodes":
        """Quantize states (…, positions, features) by token, or by channel in groups of `group` positions."""
        states = states.float()
        groups = states.unflatten(-2, (-1, group)) if group else states
        dim, most = (-2 if group else -1), 2**bits - 1
        least, largest = (end.clamp(HALF.min, HALF.max) for end in groups.aminmax(dim=dim, keepdim=True))
        scale = ((largest - least) / most).clamp(HALF.smallest_normal, HALF.max).half()
        least = least.half()
        codes = ((groups - least.float()) / scale.float()).round_().clamp_(0, most).to(torch.uint8)
        if group:
            codes, scale, least = codes.flatten(-3, -2), scale.squeeze(-2), least.squeeze(-2)
        return cls(_packed(codes, bits), scale, least, states.shape[-1])

    def states(self, bits: int) -> torch.Tensor:
        """Dequantize to float32 (…, positions, features)."""
        group = self.codes.shape[-2] // max(1, self.scale.shape[-2])
        scale, least = (part.float().repeat_interleave(group, -2) if group > 1 else part.float() for part in self[1:3])
        places = [self.codes >> bits * place & 2**bits - 1 for place in range(8 // bits)]
        return torch.stack(places, -1).flatten(-2)[..., : self.features] * scale + least

    def join(self, other: "CacheCodes") -> "CacheCodes":
        return CacheCodes(*(torch.cat(pair, -2) for pair in zip(self[:3], other[:3], strict=True)), self.features)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (…, features) into bytes, as many as fit into each."""
    count = 8 // bits
    padded = nn.functional.pad(codes, (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count))
    return sum(padded[..., place] << bits * place for place in range(count))


def fake_quantize(
    states: torch.Tensor, format: CacheFormat, prefix: int = 0, largest: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize and dequantize keys or values (batch, heads, positions, features), in their dtype.

    prefix: number of leading positions that belong to a prefix and stay exact. largest: the largest |keys| of each
    channel, (heads, features), for formats that require them.
    """
    heads = slice(None)
    if format.heads:  # a pruned layer may have fewer heads
        heads = [head for head in chain.from_iterable(format.heads) if head < states.shape[1]]
    start = prefix + format.first
    end = start + format.quantized_count(states.shape[-2] - prefix)
    if end == start:
        return states
    quantized = states.clone()
    change = _change(format, states, None if largest is None else largest[heads])
    quantized[:, heads, start:end] = _quantize_states(states[:, heads, start:end], format, change).to(states.dtype)
    return quantized


def _quantize_states(states: torch.Tensor, format: CacheFormat, change: "ChannelChange") -> torch.Tensor:
    changed = change.of(states.float())
    if format.bits:
        return change.back(CacheCodes.of(changed, format.bits, format.channels).states(format.bits))
    return change.back(quantize(changed.flatten(0, -2), format.quantizer).dequantize().view(states.shape))


class ChannelChange(NamedTuple):
    """A change of the channels of states before they are quantized, and its inverse."""

    of: Callable[[torch.Tensor], torch.Tensor]
    back: Callable[[torch.Tensor], torch.Tensor]


def _change(format: CacheFormat, states: torch.Tensor, largest: torch.Tensor | None = None) -> ChannelChange:
    """Return the change of channels of a format, for states (batch, heads, positions, features)."""
    if format.hadamard:
        rotation = _rotation(states.shape[-1]).to(states.device)
        return ChannelChange(lambda states: states @ rotation, lambda states: states @ rotation.T)
    if format.smooth:
        factors = smoothing_of_keys(largest).to(states.device)[:, None]
        return ChannelChange(lambda states: states / factors, lambda states: states * factors)
    if format.reorder:
        order = largest.argsort(dim=-1, descending=True, stable=True).to(states.device)[:, None]
        return ChannelChange(partial(_permuted, order), partial(_permuted, order.argsort(-1)))
    return ChannelChange(lambda states: states, lambda states: states)


def _permuted(order: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    return states.gather(-1, order.expand_as(states))


def smoothing_of_keys(largest: torch.Tensor) -> torch.Tensor:
    """Return the factors by which keys are divided, from the largest |keys| of each channel, both (heads, features).

    λ_i = λ_(i + D/2) = max(|K_i|, |K_(i + D/2)|)^0.5, where D is the head size (QServe: Lin et al., 2024, section 4.2):
    channels that the rotary embedding mixes share a factor, so that weights can absorb it. A channel that was always
    zero keeps its scale.
    """
    halves = largest.unflatten(-1, (2, -1)) if largest.shape[-1] % 2 == 0 else largest[..., None, :]
    factors = halves.amax(-2, keepdim=True).expand_as(halves).flatten(-2).sqrt()
    return factors.masked_fill(factors == 0, 1)


@once
def _rotation(features: int) -> torch.Tensor:
    """Return the orthogonal matrix of the option `hadamard` for a number of channels, float32."""
    identity = torch.eye(features)
    return rotate(identity, random_rotation(identity, 0))


def check_cache_formats(model: PreTrainedModel, formats: Formats) -> None:
    """Raise UserError if a model, which may be on the meta device, cannot have a cache in these formats."""
    config = model.config
    if family_of(config).name != "causal":
        raise UserError(f"a cache of keys and values of '{config.model_type}'; expected a causal language model")
    check_replaceable_attention(model)
    by_layer = heads_of_keys(model)
    layers, heads = 1 + max(by_layer), max(by_layer.values())
    for format in filter(None, formats):
        _check_blocks(model, format)
        for name, ranges, most in (("layers", format.layers, layers), ("heads", format.heads, heads)):
            if ranges and max(span.stop for span in ranges) > most:
                raise UserError(f"'{format}' in a model with {most} {name} of keys; expected some of 0:{most}")
    normed = any("norm" in name for name, _ in next(attentions(model)).module.named_children())
    if formats.keys and formats.keys.before and normed:
        raise UserError(
            f"keys of '{config.model_type}' before the rotation, which a norm precedes; expected them after the "
            "rotation: leave before out"
        )
    if formats.values and formats.values.before:
        raise UserError(f"values in '{formats.values}', which no rotation changes; leave before out")


def _check_blocks(model: PreTrainedModel, format: CacheFormat) -> None:
    """Raise UserError if the channels of a head are not a multiple of the block that shares a scale."""
    block = None if format.bits else format.quantizer.group
    size = next(iter(_outputs_of_keys(model).values())).shape[1]
    if block and size % block:
        raise UserError(
            f"'{format}' has blocks of {block} channels, which do not divide the {size} of a head; expected a divisor "
            f"of {size}, as in bfp4/block={math.gcd(size, block)}"
        )


def heads_of_keys(model: PreTrainedModel) -> dict[int, int]:
    """Return the number of key heads of each layer that has attention."""
    return {layer: len(outputs) for layer, outputs in _outputs_of_keys(model).items()}


def cache_bits(model: PreTrainedModel, formats: Formats, *lengths: int) -> float:
    """Return the average bits per key or value of a model over sequences of these lengths, see `Formats.value_bits`."""
    sizes = len(list(attentions(model))), *next(iter(_outputs_of_keys(model).values())).shape
    bits = sum(length * formats.value_bits(length, *sizes) for length in lengths)
    return round(bits / sum(lengths), 4)


def _outputs_of_keys(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    """Return the outputs of a projection that are keys, (heads, features), for each layer with attention."""
    layers = [attention.layer for attention in attentions(model)]
    return {layer: part.outputs for layer in layers for part in stream_readers(model, layer) if part.name == "k"}


@contextmanager
def quantized_states(
    model: PreTrainedModel, formats: Formats, layer: int | None = None, keys: dict[int, torch.Tensor] | None = None
) -> Iterator[None]:
    """Quantize the keys and values that attention reads within this context, in all layers or in one.

    A query also reads its own position's key and value quantized, as later queries do.

    keys: by layer the largest |keys| of each channel, (heads, features), for formats that require them.
    """
    positions = prefix_length(model)

    def meet(number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _call: AttentionCall) -> States:
        key_format, value_format = formats.in_layer(number)
        if key_format and not key_format.before:
            key = fake_quantize(key, key_format, positions, (keys or {}).get(number))
        return query, key, fake_quantize(value, value_format, positions) if value_format else value

    def registered() -> Iterator[RemovableHandle]:
        for attention in attentions(model):
            key_format = formats.in_layer(attention.layer).keys
            if layer in (None, attention.layer) and key_format and key_format.before:
                yield _hook_before(model, attention.layer, key_format)

    with product_hooks(model, meet, layer), attached(registered()):
        yield


@contextmanager
def watched_keys(model: PreTrainedModel, see: Callable[[int, torch.Tensor], None], layer: int | None) -> Iterator[None]:
    """Pass the keys of each layer to `see` within this context, in all layers or in one.

    `see` gets the number of the layer and keys (batch, heads, T, features) after the rotary embedding, without those of
    a prefix. It is not called if the attention of the model cannot be replaced.
    """
    first = prefix_length(model)
    with product_hooks(model, lambda number, _query, key, *_: see(number, key[..., first:, :]), layer):
        yield


def _hook_before(model: PreTrainedModel, layer: int, keys: CacheFormat) -> RemovableHandle:
    """Add a hook on the projection of keys that quantizes them before the rotary embedding."""
    part = next(part for part in stream_readers(model, layer) if part.name == "k")

    def quantized(_module: nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        outputs = part.outputs.to(output.device)
        changed[..., outputs] = fake_quantize(output[..., outputs].transpose(-3, -2), keys).transpose(-3, -2)
        return changed

    return part.reader.module.register_forward_hook(quantized)


class QuantizedCacheLayer(DynamicLayer):
    """The keys and values of a layer, stored as codes and dequantized for attention."""

    is_croppable = False

    def __init__(self, formats: Formats):
        super().__init__()
        self.stores = [StoredStates(format) for format in formats]

    def lazy_initialization(self, key_states: torch.Tensor, _value_states: torch.Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_arguments, **_keywords) -> tuple:
        """Append states (batch, heads, T, features) and return all states so far, dequantized."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for store, states in zip(self.stores, (key_states, value_states), strict=True):
            store.add(states)
        return tuple(store.states() for store in self.stores)

    def get_seq_length(self) -> int:
        return self.stores[0].positions

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        for store in self.stores:
            store.take(beam_idx)

    def reset(self) -> None:
        self.stores = [StoredStates(store.format) for store in self.stores]


class StoredStates:
    """The keys, or the values, of all positions so far: exact first ones, then codes, then exact recent ones.

    first, recent: tensors (batch, heads, positions, features) in the dtype of the states that were added.
    """

    def __init__(self, format: CacheFormat | None):
        self.format, self.positions = format, 0
        self.first = self.codes = self.recent = None

    def add(self, states: torch.Tensor) -> None:
        """Append the states of later positions, and quantize the positions that are no longer recent."""
        self.recent = states if self.recent is None else torch.cat([self.recent, states], -2)
        self.positions += states.shape[-2]
        if self.format is None:
            return
        if self.first is None and self.positions >= self.format.first:
            self.first, self.recent = self.recent.split([self.format.first, self.positions - self.format.first], -2)
        more = self.format.quantized_count(self.positions) - (0 if self.codes is None else self.codes.codes.shape[-2])
        if more:
            coded, self.recent = self.recent[..., :more, :], self.recent[..., more:, :].clone()
            changed = _change(self.format, coded).of(coded.float())
            codes = CacheCodes.of(changed, self.format.bits, self.format.channels)
            self.codes = codes if self.codes is None else self.codes.join(codes)

    def states(self) -> torch.Tensor:
        """Return all states, dequantized to the dtype in which they were added."""
        decoded = None
        if self.codes is not None:
            states = self.codes.states(self.format.bits)
            decoded = _change(self.format, states).back(states).to(self.recent.dtype)
        return torch.cat([states for states in (self.first, decoded, self.recent) if states is not None], -2)

    def take(self, sequences: torch.Tensor) -> None:
        """Keep only the sequences of these indices, in their order, as a beam search does."""
        self.first, self.recent = (None if one is None else one[sequences] for one in (self.first, self.recent))
        if self.codes is not None:
            self.codes = CacheCodes(*(part[sequences] for part in self.codes[:3]), self.codes.features)

    @property
    def bytes(self) -> int:
        tensors = [self.first, self.recent, *(self.codes or ())[:3]]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class QuantizedCache(Cache):
    """A quantized cache of keys and values, which `generate` of transformers takes as `past_key_values`."""

    def __init__(self, formats: Formats, layers: int):
        super().__init__(layers=[QuantizedCacheLayer(formats.in_layer(layer)) for layer in range(layers)])

    @property
    def bytes(self) -> int:
        """Memory of keys and values of all layers, scales and exact positions included, in bytes."""
        return sum(store.bytes for layer in self.layers for store in layer.stores)


def cache(model: PreTrainedModel, formats: str | Formats) -> QuantizedCache:
    """Return an empty quantized cache of keys and values, for `model.generate(…, past_key_values=…)`.

    Args:
        model: a causal language model, quantized or not.
        formats: the name of a variant, such as `kv=int4` or `keys=int4/channels=32/recent=128+values=int4/recent=128`
            (KIVI: Liu et al., 2024, section 3).

    Raises:
        UserError: the attention of the model cannot be replaced, or a format can only be simulated by variants.

    Example:
        >>> text = model.generate(blocks[:1], max_new_tokens=4, past_key_values=outliers.cache(model, "kv=int4"))
    """
    formats = Formats.read(formats) if isinstance(formats, str) else formats
    check_cache_formats(model, formats)
    for format in filter(None, formats):
        if format.before or format.heads or format.needs_calibration or not format.bits:
            raise UserError(
                f"a cache in '{format}', which variants alone simulate; expected int2 to int8 of all heads, rotated"
            )
    return QuantizedCache(formats, 1 + max(attention.layer for attention in attentions(model)))


class PrefixLayer(DynamicLayer):
    """The keys and values of a prefix in a layer; it stores no sequence, so that one object serves all sequences."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_arguments, **_keywords) -> tuple:
        """Return the states of the prefix followed by those of a sequence (batch, heads, T, features)."""
        both = zip(self.of_batch(len(key_states)), (key_states, value_states), strict=True)
        return tuple(torch.cat(pair, -2) for pair in both)

    def of_batch(self, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the prefix, expanded to a number of sequences."""
        return tuple(states.expand(sequences, -1, -1, -1) for states in (self.keys, self.values))


class Prefix:
    """Tokens before every sequence, as keys and values of the model at the time of creation.

    positions: the number of tokens.
    """

    def __init__(self, model: PreTrainedModel, tokens: Sequence[int]):
        self.config, self.positions = model.config, len(tokens)
        self.cache = _cache_of(model, torch.tensor([tokens], device=device_of(model)))

    def behind(self, _model: nn.Module, inputs: tuple, keywords: dict) -> tuple[tuple, dict]:
        """Return the arguments of a model with the prefix put before the sequence; this is a forward pre-hook."""
        sequence = inputs[0] if inputs else keywords.get("input_ids", keywords.get("inputs_embeds"))
        _check_room(self.config, self.positions, sequence.shape[1])
        past, mask, places = (keywords.get(name) for name in ("past_key_values", "attention_mask", "position_ids"))
        if past is None or past is family_of(self.config).cache:
            keywords = keywords | {"past_key_values": self.cache}
        elif type(past) is not DynamicCache:
            raise UserError(f"a prefix in a cache of type {type(past).__name__}; expected a DynamicCache")
        elif not past.get_seq_length():  # a new cache, for generated positions
            for number, layer in enumerate(self.cache.layers):
                past.update(*layer.of_batch(len(sequence)), number)
        if mask is not None:
            keywords = keywords | {"attention_mask": nn.functional.pad(mask, (self.positions, 0), value=1)}
        if places is not None:
            keywords = keywords | {"position_ids": places + self.positions}
        return inputs, keywords


@inference
def _cache_of(model: PreTrainedModel, ids: torch.Tensor) -> Cache:
    cache = DynamicCache()  # without a configuration it has no sliding window and forgets no positions
    _decoder(model)(ids, past_key_values=cache, use_cache=True)
    known = [layer for layer in cache.layers if layer.keys is not None]
    if any(layer.keys.shape[-2] != ids.shape[1] for layer in known):
        raise UserError(
            "several layers of this model keep their keys and values in one place of a cache (the layer_idx of their "
            "attention is the same); expected layers without shared attention for a prefix"
        )
    # a layer without attention keeps nothing, and is only asked for the number of positions
    by_layer = [known[0] if layer.keys is None else layer for layer in cache.layers]
    return Cache(layers=[PrefixLayer(layer.keys, layer.values) for layer in by_layer])


def check_prefix(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Raise UserError if a model, which may be on the meta device, cannot have these tokens as a prefix."""
    config = model.config
    if family_of(config).name != "causal":
        raise UserError(f"a prefix before what '{config.model_type}' reads; expected a causal language model")
    if any(token >= config.vocab_size for token in tokens):
        raise UserError(f"token {max(tokens)} in a prefix; expected ids below {config.vocab_size}, of the vocabulary")
    _check_room(config, len(tokens), 1)


def _check_room(config: PretrainedConfig, positions: int, block: int) -> None:
    limit = context_length(config)
    if limit is not None and positions + block > limit:
        raise UserError(
            f"blocks of {block} tokens behind a prefix of {positions} exceed the model's context of {limit}; expected "
            f"at most {limit} together"
        )


@contextmanager
def behind_prefix(model: PreTrainedModel, tokens: Sequence[int]) -> Iterator[None]:
    """Put tokens before everything that a model reads within this context.

    Their keys and values are computed on entry; later changes of the model do not affect them. Positions are counted
    from the start of the prefix.
    """
    decoder, prefix = _decoder(model), Prefix(model, tokens)
    hook, decoder.prefix = decoder.register_forward_pre_hook(prefix.behind, with_kwargs=True), prefix
    try:
        yield
    finally:
        hook.remove()
        del decoder.prefix


def _decoder(model: PreTrainedModel) -> nn.Module:
    return stack_module(model, stacks_of(model.config)[-1])


def prefix_length(model: PreTrainedModel) -> int:
    """Return the number of positions of the prefix before every sequence of a model; 0 if it has none."""
    prefix = vars(_decoder(model)).get("prefix")
    return prefix.positions if prefix else 0
