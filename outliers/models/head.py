"""Logits of given hidden states, computed by the model's own forward."""

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

HEAD_OUTPUTS = 4096  # logits of 512 tokens are then 8 MB, which stay in a CPU's cache
WHOLE = slice(0, None)  # the vocabulary
# Output embeddings, and whether each of their rows gives the logits of a token by itself.
_splits: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class Head:
    """The head of a model for hidden states (T, features), of a part of the vocabulary at a time.

    The model's own forward runs with each of its stacks exchanged for one that returns the given states, so that caps,
    scales, biases and layers before the output embedding are the model's. Where logits are made of the output embedding
    one by one, a part of its rows stands in its place. All logits of a block, (T, vocabulary), are by far the largest
    tensor of an evaluation, and making them costs more than using them.

    kept: logits that are not made again, by the first token of their part.

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
        self.of_sequence = states.ndim == 2  # and not of a picture, (1, T, features)
        stacks = [stack_module(model, stack) for stack in stacks_of(model.config)]
        paths = {module: path for path, module in model.named_modules() if module in (*stacks, self.embedding)}
        self.path = paths.get(self.embedding)
        given = self.states[None] if self.of_sequence else self.states
        self.model = exchanged(model, {paths[stack]: _Given(stack, given) for stack in stacks})
        if self.path is not None and len(self.weight) > HEAD_OUTPUTS and self._splits_vocabulary():
            starts = range(0, len(self.weight), HEAD_OUTPUTS)
            self.parts = [slice(start, start + HEAD_OUTPUTS) for start in starts]

    def logits(self, part: slice, as_made: bool = False) -> torch.Tensor:
        """Those of a part, (T, tokens), in float32 or better; as_made: or in 16 bits, if the model does no more."""
        logits = self._forward(part)
        return logits if as_made else logits.to(torch.promote_types(logits.dtype, torch.float32))

    def kept_logits(self, part: slice) -> torch.Tensor:
        """Those of a part, from the second time on as they were kept."""
        if self.kept is None:
            return self.logits(part)
        if part.start not in self.kept:
            self.kept[part.start] = self.logits(part)
        return self.kept[part.start]

    def _splits_vocabulary(self) -> bool:
        """Whether a few rows of the output embedding give the logits of their tokens, by trying two."""
        if self.embedding not in _splits:
            try:
                two = type(self.embedding).forward is nn.Linear.forward and self._forward(slice(0, 2)).shape[-1] == 2
            except (RuntimeError, ValueError, IndexError):  # the head does more with the vocabulary as a whole
                two = False
            _splits[self.embedding] = two
        return _splits[self.embedding]

    def _forward(self, part: slice) -> torch.Tensor:
        model = self.model
        if part != WHOLE:
            model = exchanged(model, {self.path: _Rows(self.weight, self.bias, part)})
            vocabulary = len(self.weight)
            model._buffers = {  # such as a bias of all logits
                name: buffer[..., part] if buffer is not None and buffer.shape[-1:] == (vocabulary,) else buffer
                for name, buffer in model._buffers.items()
            }
        ids = self.states.new_zeros((1, self.states.shape[-2]), dtype=torch.int64)
        inputs = {model.main_input_name: ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
        # not through __call__, so that no hook on the model is called for it
        logits = model.forward(**inputs, **family_of(model.config).keywords).logits
        return logits[0] if self.of_sequence else logits


def output_embedding(model: PreTrainedModel) -> nn.Module | None:
    """The projection whose outputs are the logits, or the classifier of pictures, if a module is."""
    return model.get_output_embeddings() or getattr(model, "classifier", None)


class _Rows(nn.Module):
    """A part of the rows of an output embedding."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, part: slice):
        super().__init__()
        self.weight, self.bias = weight[part], None if bias is None else bias[part]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(states, self.weight, self.bias)


@dataclass
class _Output(ModelOutput):
    """Output of a stack that has last hidden states alone; all else is None."""

    last_hidden_state: torch.Tensor | None = None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands for a stack, all of whose attributes it has, and returns states that are given."""

    def __init__(self, stack: nn.Module, states: torch.Tensor):
        super().__init__()
        vars(self)["stack"], vars(self)["states"] = stack, states

    def __getattr__(self, name: str) -> object:
        return getattr(vars(self)["stack"], name)

    def forward(self, *_arguments, **_keywords) -> _Output:
        return _Output(last_hidden_state=self.states)
