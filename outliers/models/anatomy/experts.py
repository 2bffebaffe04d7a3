"""Experts of a mixture as linear projections: views of the parameters that hold the weights of all of them.

transformers looks up the function that calls experts in a registry. The function here calls the projections of each
expert as modules, so that hooks, schemes and ablations treat them as any other projection; its outputs equal those of
`eager` bit for bit.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import torch
from torch import nn

from outliers.models.anatomy.weights import is_offloaded, parameter_of
from outliers.models.internals import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

BY_PROJECTION = "by_projection"  # the name of our function in the registry


class Owner:
    """A weak reference from the projections of experts to the module that holds their weights.

    A strong one would be a reference cycle, which keeps the memory of an unused model until Python collects cycles. A
    copy refers to the copied module.
    """

    def __init__(self, module: nn.Module | None):
        self._module = module and weakref.ref(module)

    def __call__(self) -> nn.Module | None:
        return self._module and self._module()

    def __deepcopy__(self, memo: dict) -> "Owner":
        module = self()
        return Owner(memo.get(id(module), module))

    def __reduce__(self) -> tuple:
        return Owner, (self(),)


class ExpertProjection(nn.Linear):
    """A projection of one expert, without parameters of its own.

    name: the name of the parameter of all experts. number: that of the expert. See `belong`.
    """

    _is_hf_initialized = True  # else transformers would draw the values of the views

    def __init__(self, owner: nn.Module, name: str, number: int):
        nn.Module.__init__(self)
        self.name, self.number = name, number
        self.is_transposed, self.has_bias = owner.is_transposed, owner.has_bias
        self.belong(owner)
        self.out_features, self.in_features = self.weight.shape

    def belong(self, owner: nn.Module) -> None:
        """Use the weights of a module that holds those of all experts."""
        self.owner, self.of_all = Owner(owner), owner._parameters

    @property
    def weight(self) -> torch.Tensor:
        """The weight (outputs, inputs), which shares memory with that of all experts unless it is offloaded."""
        weight = self._of_expert(self.name)
        return weight.T if self.is_transposed else weight

    @property
    def is_transient(self) -> bool:
        """Whether the weight is read from its file for each call, so that nothing derived from it is worth keeping."""
        return is_in_pieces(self.owner())

    @property
    def bias(self) -> torch.Tensor | None:
        return self._of_expert(f"{self.name}_bias") if self.has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, then add the bias, as the experts of transformers do."""
        product = nn.functional.linear(x, self.weight)
        return product if self.bias is None else product + self.bias

    def _of_expert(self, name: str) -> torch.Tensor:
        parameter = self.of_all[name]
        if parameter.is_meta and (owner := self.owner()) is not None:
            if is_in_pieces(owner):
                return owner.pieces.read(name, self.number)
            if is_offloaded(owner):
                parameter = parameter_of(owner, name)
        return parameter[self.number]


class Pieces:
    """The weights of a layer's experts, read one expert at a time; those of the last one are kept.

    read_from: returns one expert's entry of a parameter, by the name of the parameter and the number of the expert.
    """

    def __init__(self, read_from: Callable[[str, int], torch.Tensor]):
        self._read_from = read_from
        self._last: tuple[int | None, dict[str, torch.Tensor]] = None, {}

    def __deepcopy__(self, _memo) -> "Pieces":
        return self  # a copy of the layer, such as one under a scheme, reads the same files

    def read(self, name: str, number: int) -> torch.Tensor:
        if self._last[0] != number:
            self._last = number, {}
        entries = self._last[1]
        if name not in entries:
            entries[name] = self._read_from(name, number)
        return entries[name]


def is_in_pieces(experts: nn.Module | None) -> bool:
    """Return whether the weights of experts are read for each call of one of them."""
    return experts is not None and "pieces" in vars(experts)


class Expert(nn.Module):
    """One expert, whose projections have the names of the parameters that hold their weights.

    tokens: the positions of the tokens that it computes, for hooks on its projections.
    """

    tokens: torch.Tensor | None = None

    def __init__(self, owner: nn.Module, number: int):
        super().__init__()
        for name in ("gate_up_proj" if owner.has_gate else "up_proj", "down_proj"):
            self.add_module(name, ExpertProjection(owner, name, number))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, owner: nn.Module) -> torch.Tensor:
        """Return the output (n, features) of this expert for the tokens that chose it.

        tokens: their positions. weights: those of the router, (n, 1).
        """
        self.tokens = tokens
        _, out = self._modules.values()
        outputs = out(self.units(x, owner))
        self.tokens = None
        return (owner.post_expert_norm(outputs) if owner.has_post_expert_norm else outputs) * weights

    def units(self, x: torch.Tensor, owner: nn.Module) -> torch.Tensor:
        """Return the input (n, units) of the second projection for hidden states (n, features)."""
        into, _ = self._modules.values()
        return owner._apply_gate(into(x)) if owner.has_gate else owner.act_fn(into(x))


@torch.compiler.disable  # which tokens an expert gets is data: a graph would serve one choice alone
def by_projection(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of each token, by states (T, features); this is an experts function of transformers."""
    unfold(experts)
    if (output := _run_grouped(experts, hidden_states, top_k_index, top_k_weights)) is not None:
        return output
    # not derived from a tensor, so that a pass that follows tensors sees only what experts add
    output = torch.zeros(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    for number, tokens, places in _choices(experts, top_k_index):
        x = hidden_states if hidden_states.is_meta else hidden_states[tokens]
        added = experts._modules[str(number)](x, tokens, top_k_weights[tokens, places, None], experts)
        output.index_add_(0, tokens, added.to(output.dtype))
    return output


def _run_grouped(
    experts: nn.Module, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor | None:
    """Compute each kind of projection of all experts at once, without waiting for the device; return None if their
    class has no such product, or if one of them has hooks.

    chosen, weights: the experts of each token and the weights of their outputs, (tokens, choices).
    """
    first = next(experts._modules["0"].children())
    if not hasattr(first, "multiply_all") or not first.multiplies_all(hidden_states):
        return None
    count, parts = expert_count(experts), [one for name, one in experts._modules.items() if name.isdigit()]
    into, out = zip(*(expert._modules.values() for expert in parts), strict=True)
    if any(one._forward_hooks or one._forward_pre_hooks for one in (*parts, *into, *out)):
        return None
    by_expert, order = chosen.T.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(count, device=by_expert.device), right=True)
    units = first.multiply_all(into, hidden_states[order % len(chosen)], ends)
    if units is None:
        return None
    units = experts._apply_gate(units) if experts.has_gate else experts.act_fn(units)
    if (outputs := out[0].multiply_all(out, units, ends)) is None:
        return None
    outputs = experts.post_expert_norm(outputs) if experts.has_post_expert_norm else outputs
    outputs = outputs.where(by_expert[:, None] < count, 0) * weights.T.flatten()[order, None]  # some choose no expert
    by_choice = torch.empty_like(outputs).index_copy_(0, order, outputs).view(-1, *hidden_states.shape)
    return by_choice.sum(0).to(hidden_states.dtype)


def _choices(experts: nn.Module, chosen: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each chosen expert with its tokens and, for each of them, which of the token's choices it was, int64
    (tokens,) both.

    On the meta device, where no choice has a value, all tokens choose each expert that has a module.
    """
    count, length = expert_count(experts), len(chosen)
    if chosen.is_meta:
        tokens = torch.arange(length, device=chosen.device)
        numbers = (number for number in range(count) if str(number) in experts._modules)
        yield from ((number, tokens, torch.zeros_like(tokens)) for number in numbers)
        return
    order = chosen.T.flatten().argsort(stable=True)  # first by the place of the choice, the order of transformers
    sizes = chosen.flatten().bincount(minlength=count + 1).tolist()  # the last number stands for no expert
    for number, places in enumerate(order.split(sizes)[:count]):
        if len(places):
            yield number, places % length, places // length


ALL_EXPERTS_FUNCTIONS.register(BY_PROJECTION, by_projection)


@torch.compiler.disable
def _batched_by_projection(experts: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the outputs of experts that each get the states of all tokens, (experts · T, features), as in Llama 4.

    The states are already weighted, and zero if a token did not choose an expert.
    """
    unfold(experts)
    output = torch.zeros(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    for number, x in enumerate(hidden_states.chunk(expert_count(experts))):
        tokens = torch.arange(len(x), device=x.device)
        tokens = tokens if x.is_meta else tokens[x.any(1)]
        expert = experts._modules.get(str(number))  # a pass that follows tensors has only the first one
        if len(tokens) and expert is not None:
            added = expert(x if x.is_meta else x[tokens], tokens, 1, experts)
            output.index_add_(0, number * len(x) + tokens, added)
    return output


def _adapt(experts: nn.Module) -> None:
    """Give a class that holds experts' weights, but is unknown to the registry of transformers, the attributes of
    registered classes, and let it call projections.

    Such a class takes the arguments of a registered one, or the states of all tokens for each expert: then it is
    batched.
    """
    kind, gate_up, down = type(experts), experts.gate_up_proj.shape, experts.down_proj.shape
    given, forward = len(inspect.signature(kind.forward).parameters) - 1, kind.forward
    transposed = (*gate_up[1:], 1) == (down[2], 2 * down[1], 1)
    if given not in (1, 3) or not (transposed or tuple(gate_up[1:]) == (2 * down[2], down[1])):
        return

    @functools.wraps(forward)
    def called(self: nn.Module, *given: torch.Tensor) -> torch.Tensor:
        config = getattr(self, "config", None)  # absent before `holds_experts` has seen the module
        if config is None or config._experts_implementation_internal != BY_PROJECTION:
            return forward(self, *given)
        return _batched_by_projection(self, *given) if self.is_batched else _with_others(forward, self, *given)

    kind.forward, kind.is_transposed, kind.is_batched = called, transposed, given == 1
    kind.has_gate = kind.is_concatenated = True
    kind.has_bias = kind.has_post_expert_norm = False
    if not hasattr(kind, "_apply_gate"):
        kind._apply_gate = _default_apply_gate


def _with_others(
    forward: Callable, experts: nn.Module, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of each token as `by_projection`, and let the class compute choices beyond the experts with
    weights, such as experts that pass on their input."""
    output = by_projection(experts, hidden_states, chosen, weights)
    others = chosen >= expert_count(experts)
    if not others.is_meta and others.any():
        chosen = chosen.where(others, expert_count(experts))
        output += forward(experts, hidden_states, chosen, weights * others)
    return output


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module holds the weights of experts and can be called by projections."""
    kind, parameters = type(module), module._parameters
    has_stacked_weights = all(getattr(parameters.get(name), "ndim", 0) == 3 for name in ("gate_up_proj", "down_proj"))
    if has_stacked_weights and not hasattr(module, "is_transposed"):
        _adapt(module)
    if hasattr(kind, "is_batched") and "config" not in vars(module):
        module.config = SimpleNamespace(_experts_implementation_internal=None)
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def is_of_experts(model: nn.Module, name: str) -> bool:
    """Return whether a tensor of a model holds the weights of a projection for all experts of a layer."""
    owner, _, part = name.rpartition(".")
    experts = model.get_submodule(owner)
    return holds_experts(experts) and part in getattr(experts._modules.get("0"), "_modules", ())


def is_batched(experts: nn.Module) -> bool:
    """Return whether each expert gets its own states of all tokens."""
    return getattr(experts, "is_batched", False)


def expert_count(experts: nn.Module) -> int:
    """Return the number of experts in a module that holds their weights."""
    down = experts._parameters.get("down_proj")
    return sum(map(str.isdigit, experts._modules)) if down is None else len(down)


def unfold(experts: nn.Module, first: int | None = None) -> None:
    """Give a module that holds the weights of experts a child for each of them, or for the first few, named by its
    number; do nothing if it has some already, or holds no experts."""
    if holds_experts(experts) and "0" not in experts._modules:
        for number in range(expert_count(experts) if first is None else first):
            experts.add_module(str(number), Expert(experts, number).train(experts.training))


def settle(model: nn.Module) -> None:
    """Let a copied model call its experts by projections that view its own weights, and release weights that no
    projection uses."""
    for experts in model.modules():
        if not holds_experts(experts) or "0" not in experts._modules:
            continue
        views = [module for module in experts.modules() if isinstance(module, ExpertProjection)]
        for module in views:
            module.belong(experts)
        for name in {*experts._modules["0"]._modules} - {module.name for module in views}:
            for parameter in (name, f"{name}_bias"):
                experts._parameters.pop(parameter, None)
        experts._is_hf_initialized = True  # else transformers would draw values for the released weights
    call_by_projection(model)


def set_weights(experts: nn.Module, name: str, stacked: torch.Tensor) -> None:
    """Copy the stacked weights or biases of all experts to those projections that have their own."""
    projection = name.removesuffix("_bias")
    for number, tensor in zip(range(expert_count(experts)) if "0" in experts._modules else (), stacked, strict=False):
        module = experts._modules[str(number)]._modules.get(projection)
        if module is None or isinstance(module, ExpertProjection):
            continue
        if name != projection:
            module.bias = nn.Parameter(tensor.clone(), requires_grad=False)
        else:
            module.set_weight(tensor.T if experts.is_transposed else tensor)


def call_by_projection(model: nn.Module) -> list[tuple[object, str | None]]:
    """Let transformers call all experts of a model by their projections; return what `restore` takes."""
    configs = {id(module.config): module.config for module in model.modules() if holds_experts(module)}
    before = [(config, config._experts_implementation_internal) for config in configs.values()]
    for config, _ in before:
        config._experts_implementation_internal = BY_PROJECTION
    return before


def restore(before: Iterable[tuple[object, str | None]]) -> None:
    """Undo `call_by_projection`."""
    for config, name in before:
        config._experts_implementation_internal = name
