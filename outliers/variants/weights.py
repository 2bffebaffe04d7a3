"""Single weights multiplied by a factor or set to zero, or whole rows and columns of a weight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outliers.errors import UserError, unknown_name
from outliers.models.variant import Variant
from outliers.variants.term import Term, WeightEntry

if TYPE_CHECKING:  # parsing a variant does not import torch
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Scaled(Variant):
    """A factor of an entry, row or column of a weight; 0 sets it to zero.

    weight: its path is that of a module, or of a parameter of two dimensions. Its indices are (output, input) in
    whatever layout it is stored; (token, feature) for embeddings. Parameters that are tied to it change too.
    """

    weight: WeightEntry
    factor: float = 0.0

    @classmethod
    def read(cls, term: Term) -> "Scaled":
        """Parse `zero(PATH[OUTPUT,INPUT])` or `scale(PATH[OUTPUT,INPUT],factor=FACTOR)`; `:` stands for all outputs or
        inputs.

        Raises:
            UserError: there is another option, or the factor is missing or not finite.
        """
        options = ("factor",) if term.name == "scale" else ()
        term.check_options(options)
        if len(term.options) < len(options):
            raise UserError(f"'{term}' has no factor; expected one: {str(term)[:-1]},factor=0.5)")
        factor = float(term.options.get("factor", 0))
        if not abs(factor) < float("inf"):
            raise UserError(f"'{term}' has the factor {factor}; expected a finite number")
        return cls(term.weight, factor)

    @property
    def name(self) -> str:
        name, options = ("scale", {"factor": self.factor}) if self.factor else ("zero", {})
        return str(Term(name, options=options, weight=self.weight))

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        return {"weight": str(self.weight), "weight_factor": self.factor + 0}  # −0 as 0, as in names

    def first_layer(self, model: "PreTrainedModel") -> int:
        """Return the first layer that has the weight; 0 for a weight outside the layers."""
        return min(self._layers(model), default=0)

    def _layers(self, model: "PreTrainedModel") -> list[int]:
        """Return the layers that have the weight: several if it is shared, none if it is outside of all."""
        from outliers.models.anatomy import layers_of

        return [layer.number for layer in layers_of(model) if self.weight.path.startswith(f"{layer.path}.")]

    def check(self, model: "PreTrainedModel") -> "torch.Tensor":
        """Return the weight in a model, which may be on the meta device.

        Raises:
            UserError: the weight is not in the model, does not have two dimensions, or is quantized; or an index is out
                of range.
        """
        from outliers.models.anatomy import layers_of
        from outliers.models.anatomy.experts import ExpertProjection

        layers_of(model)  # gives experts their names
        path = self.weight.path
        module = dict(model.named_modules()).get(path)
        parameters = {
            name.removesuffix(".weight"): parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
        } | ({path: module.weight} if isinstance(module, ExpertProjection) else {})
        if path not in parameters:
            if hasattr(module, "scheme"):
                raise UserError(f"'{path}' is quantized already; expected the weight before the scheme: {self.name}+…")
            raise unknown_name("weight", path, parameters)
        if parameters[path].ndim != 2 or not parameters[path].is_floating_point():
            kind = f"{str(parameters[path].dtype).removeprefix('torch.')} of shape {tuple(parameters[path].shape)}"
            raise UserError(f"'{path}' is {kind}; expected floating-point numbers in two dimensions")
        shape = _by_outputs(model, path, parameters[path]).shape
        for kind, index, count in zip(("output", "input"), self.weight[1:], shape, strict=True):
            if index is not None and index >= count:
                raise UserError(f"'{self.weight}' has the {kind} {index}; expected one of 0 to {count - 1}")
        return parameters[path]

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        from outliers.models.stream import is_streamed

        layers = self._layers(model)
        if layers and layer not in (None, *layers):
            yield model
            return
        if not layers and is_streamed(model):
            raise UserError(
                f"'{self.weight.path}' is outside of the decoder layers, which alone change in a streamed model; leave "
                "--stream out"
            )
        path, *place = self.weight
        self.check(model)
        index = tuple(slice(None) if index is None else index for index in place)
        yield _with_weight(model, path, lambda weight: _by_outputs(model, path, weight)[index].mul_(self.factor))


def _by_outputs(model: "PreTrainedModel", path: str, weight: "torch.Tensor") -> "torch.Tensor":
    """Return the weight at a path as (outputs, inputs), sharing memory."""
    from transformers.pytorch_utils import Conv1D

    return weight.T if isinstance(dict(model.named_modules()).get(path), Conv1D) else weight


def _with_weight(model: "PreTrainedModel", path: str, change: "Callable[[torch.Tensor], object]") -> "PreTrainedModel":
    """Return a model that shares all parameters and buffers with another one except a weight, wherever it is used.

    change: function that edits a copy of the weight in place.
    """
    import torch
    from torch import nn

    from outliers.models.anatomy.experts import ExpertProjection
    from outliers.models.anatomy.weights import is_offloaded, load_offloaded, parameter_of
    from outliers.models.hooks import hand_over_hooks
    from outliers.models.stream import exchanged

    module = dict(model.named_modules()).get(path)
    if isinstance(module, ExpertProjection):
        with torch.no_grad():
            scaled = module.weight.clone(memory_format=torch.contiguous_format)
            change(scaled)
        linear = nn.Linear(*reversed(scaled.shape), bias=False, device="meta")
        linear.weight = nn.Parameter(scaled, requires_grad=False)
        if module.bias is not None:
            linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
        hand_over_hooks(module, linear)
        return exchanged(model, {path: linear.eval()})
    named = dict(model.named_parameters(remove_duplicate=False))
    name = path if path in named else f"{path}.weight"
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # offloaded weights that are tied share only a name
    first = tied.get(name, name)
    owner, _, part = name.rpartition(".")
    scaled = parameter_of(model.get_submodule(owner), part).detach().clone()
    if scaled.is_meta and any(map(is_offloaded, model.modules())):  # accelerate offloads it with an outer module
        raise UserError(f"'{path}' is offloaded together with others; expected a model whose weights are in memory")
    with torch.no_grad():
        change(scaled)
    scaled, changed = nn.Parameter(scaled, named[name].requires_grad), {}
    for other, parameter in named.items():
        offloaded = parameter.is_meta or named[name].is_meta  # of tied weights, one alone may be offloaded
        if parameter is named[name] or (offloaded and tied.get(other, other) == first):
            owner, _, part = other.rpartition(".")
            changed[owner] = changed.get(owner) or load_offloaded(exchanged(model.get_submodule(owner), {}))
            changed[owner]._parameters = changed[owner]._parameters | {part: scaled}
    return exchanged(model, changed)
