"""Decode steps of a model as a CUDA graph, with keys and values in a static cache."""

import inspect
import warnings
from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from outliers.models.anatomy import stacks_of


class DecodeSteps:
    """Decode steps of a batch of sequences of up to `length` tokens, without synchronizing with the host.

    cache: keys and values of the tokens so far. ids: int64 (batch, 1), the tokens that a step reads and replaces by the
    next ones. run: makes one step, by a CUDA graph if there is one.
    """

    def __init__(self, model: PreTrainedModel, batch: int, length: int):
        self.model, self.cache = model, StaticCache(config=model.config, max_cache_len=length)
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.mask = self.ids.new_ones(batch, length)  # OPT would count tokens by it
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.run: Callable[[], object] = self.decode

    def decode(self) -> None:
        positions = {"position_ids": self.ids * 0 + self.cache.get_seq_length()} if self.takes_positions else {}
        self.ids.copy_(next_ids(self.model, self.ids, self.cache, attention_mask=self.mask, **positions))

    def after(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the next tokens after these, both (batch, 1)."""
        self.ids.copy_(ids)
        self.run()
        return self.ids.clone()


def next_ids(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, **given: torch.Tensor) -> torch.Tensor:
    """Return the greedy next token of each sequence, int64 (batch, 1), and add new tokens (batch, T) to the cache."""
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **given).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def captured_steps(model: PreTrainedModel, batch: int, length: int) -> DecodeSteps | None:
    """Return steps whose `run` replays a CUDA graph; length: at least two.

    Return None on a CPU, for encoder-decoders, and, with a warning, if the model cannot be captured, for example
    because it reads results of the GPU.
    """
    if model.device.type != "cuda" or len(stacks_of(model.config)) > 1:
        return None
    try:
        steps = DecodeSteps(model, batch, length)
        windows = any(type(layer) is not StaticLayer for layer in steps.cache.layers)
        if windows or not model._can_compile_fullgraph:  # according to transformers: GPT-Neo would choose other tokens
            raise ValueError("its attention does not take a cache of one size")
        steps.run = capture(steps.decode)
    except Exception as error:  # whatever its code raises
        reason = str(error).partition("\n")[0]
        warnings.warn(f"'{model.config.model_type}' decodes without a CUDA graph: {reason}", stacklevel=2)
        return None
    return steps


def capture(step: Callable[[], object]) -> Callable[[], None]:
    """Capture a step as a CUDA graph, and return a function that repeats it on the same memory.

    The step runs twice before, on the capturing stream, because kernels initialize state on their first use of a
    stream.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay
