"""The logits of given hidden states, computed by the model's own forward pass."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from outliers.errors import UserError
from outliers.models.anatomy import family_of, stack_module, stacks_of
from outliers.models.anatomy.weights import parameter_of
from outliers.models.stream import exchanged

HEAD_OUTPUTS = 4096  # for 512 tokens these logits take 8 MB, which fit a CPU's cache
WHOLE = slice(0, None)  # the whole vocabulary
# By output embedding: whether each of its rows alone gives the logits of a token.
_splits: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class Head:
    """The head of a model for hidden states (T, features), evaluated in parts of the vocabulary.

    The model's own forward runs with each of its stacks replaced by one that returns the given states, so that caps,
    scales, biases and layers before the output embedding apply. If each row of the output embedding gives the logits of
    one token, a part of the rows replaces it. All logits of a block, (T, vocabulary), would be by far the largest
    tensor of an evaluation, and computing them takes longer than using them.

    kept: cache of logits, by the first token of their part.

    Raises:
        UserError: the model has no head.
    """

    def __init__(self, model: PreTrainedModel, states: torch.Tensor, kept: dict[int, torch.Tensor] | None = None):
        self.kept, self.parts = kept, [WHOLE]
        self.embedding = output_embedding(model)
        if isinstance(self.embedding, nn.Identity):
            raise UserError(
                "the model has no classifier, and so predicts nothing; trace it (outliers trace), or measure the "
                "errors of its projections (outliers damage --by error)"
            )
        self.weight, self.bias = (parameter_of(self.embedding, name) for name in ("weight", "bias"))
        self.device = states.device if self.weight is None else self.weight.device
        self.states = states.to(self.device)
        self.of_sequence = states.ndim == 2  # else of a picture, (1, T, features)
        stacks = [stack_module(model, stack) for stack in stacks_of(model.config)]
        paths = {module: path for path, module in model.named_modules() if module in (*stacks, self.embedding)}
        self.path = paths.get(self.embedding)
        given = self.states[None] if self.of_sequence else self.states
        self.model = exchanged(model, {paths[stack]: _Given(stack, given) for stack in stacks})
        if self.path is not None and len(self.weight) > HEAD_OUTPUTS and self._splits_vocabulary():
            starts = range(0, len(self.weight), HEAD_OUTPUTS)
            self.parts = [slice(start, start + HEAD_OUTPUTS) for start in starts]

    def logits(self, part: slice, as_made: bool = False) -> torch.Tensor:
        """Return the logits of a part, (T, tokens), in float32 or better.

        as_made: whether 16 bits are allowed if the model computes in these.
        """
        logits = self._forward(part)
        return logits if as_made else logits.to(torch.promote_types(logits.dtype, torch.float32))

    def kept_logits(self, part: slice) -> torch.Tensor:
        """Return the logits of a part, cached if there is a cache."""
        if self.kept is None:
            return self.logits(part)
        if part.start not in self.kept:
            self.kept[part.start] = self.logits(part)
        return self.kept[part.start]

    def _splits_vocabulary(self) -> bool:
        """Return whether a few rows of the output embedding give the logits of their tokens; tried with two rows."""
        if self.embedding not in _splits:
            try:
                splits = type(self.embedding).forward is nn.Linear.forward and self._forward(slice(0, 2)).shape[-1] == 2
            except (RuntimeError, ValueError, IndexError):  # the head uses the vocabulary as a whole
                splits = False
            _splits[self.embedding] = splits
        return _splits[self.embedding]

    def _forward(self, part: slice) -> torch.Tensor:
        model = self.model
        if part != WHOLE:
            model = exchanged(model, {self.path: _Rows(self.weight, self.bias, part)})
            vocabulary = len(self.weight)
            model._buffers = {  # such as a bias of the logits
                name: buffer[..., part] if buffer is not None and buffer.shape[-1:] == (vocabulary,) else buffer
                for name, buffer in model._buffers.items()
            }
        ids = self.states.new_zeros((1, self.states.shape[-2]), dtype=torch.int64)
        inputs = {model.main_input_name: ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
        # not through __call__, so that no hook of the model is called
        logits = model.forward(**inputs, **family_of(model.config).keywords).logits
        return logits[0] if self.of_sequence else logits


def output_embedding(model: PreTrainedModel) -> nn.Module | None:
    """Return the projection whose outputs are the logits, or the classifier of pictures, if there is one."""
    return model.get_output_embeddings() or getattr(model, "classifier", None)


class _Rows(nn.Module):
    """Some rows of an output embedding."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, part: slice):
        super().__init__()
        self.weight, self.bias = weight[part], None if bias is None else bias[part]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(states, self.weight, self.bias)


@dataclass
class _Output(ModelOutput):
    """The output of a stack, with last hidden states only; all other attributes are None."""

    last_hidden_state: torch.Tensor | None = None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """A stand-in for a stack with all its attributes, which returns given states."""

    def __init__(self, stack: nn.Module, states: torch.Tensor):
        super().__init__()
        vars(self)["stack"], vars(self)["states"] = stack, states

    def __getattr__(self, name: str) -> object:
        return getattr(vars(self)["stack"], name)

    def forward(self, *_arguments, **_keywords) -> _Output:
        return _Output(last_hidden_state=self.states)
