"""The parts of one layer by role, derived from the histories of a pass."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn
from transformers import PretrainedConfig

from outliers.criterion import ROLES
from outliers.models.anatomy.discovery.flow import (
    MEMORY,
    MIXED,
    NORM,
    NOTHING,
    STREAM,
    SUM,
    History,
    Outputs,
    RecordedPass,
    ancestors,
    is_projection,
)
from outliers.models.anatomy.experts import Expert, expert_count, holds_experts
from outliers.models.anatomy.row import Anatomy

ROLES_OF = {  # by whether a branch mixes positions, and reads another stack's output
    (True, False): {"reads": "attn_in", "between": "attn_mid", "writes": "attn_out"},
    (False, False): {"reads": "ffn_in", "between": "ffn_mid", "writes": "ffn_out"},
    (True, True): {"reads": "cross_in", "memory": "cross_kv", "between": "attn_mid", "writes": "cross_out"},
}
KEY_HEADS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads")  # fields of configurations


@dataclass(frozen=True)
class Branch:
    """Connected projections: readers of the residual stream, intermediate ones, and those that write to it.

    mixes: whether the branch mixes positions. memory: the projections that read the output of another stack.
    """

    mixes: bool
    reads: tuple[str, ...]
    between: tuple[str, ...]
    writes: tuple[str, ...]
    memory: tuple[str, ...] = ()


class FoundLayer:
    """A layer of a recorded pass, from which its anatomy is derived; all paths are relative to the layer."""

    def __init__(self, seen: RecordedPass, path: str):
        self.seen, self.prefix, self.stream = seen, f"{path}.", STREAM + path
        self.calls = self._of_layer(seen.calls) | self._of_layer(seen.flow.loose)
        self.left = seen.left[path]
        self.experts = tuple(name for name in self._of_layer(seen.chosen))
        written, chosen = self.own(self.left), self.own(NOTHING.union(*self._of_layer(seen.chosen).values()))
        into = [name for name, call in self.calls.items() if self.stream in call.history]
        owners = {name: seen.model.get_submodule((self.prefix + name).rpartition(".")[0]) for name in into}
        # the input of experts may be weighted already
        self.weighted = {*self.experts, *(name for name, owner in owners.items() if isinstance(owner, Expert))}
        for name in self.weighted:
            read = self.calls[name].history
            chosen |= {other for other in into if self.prefix + other in read and SUM + self.prefix + other not in read}
        # hyper-connections add the output of a layer to several streams, each as wide as an embedding
        top = seen.layers[path][0]
        widths = {seen.widths[top], seen.wide().get(top)}
        weighs = {
            name
            for name, call in self.calls.items()
            if name in written
            and SUM + self.prefix + name not in self.left
            and (name in into or call.outputs not in widths)
        }
        routers: set[str] = set()
        for name in reversed(self.calls):  # a projection comes after its readers
            others = self._readers(name)
            if name not in self.weighted and others <= routers and (others or name in chosen | weighs):
                routers.add(name)
        routers |= self._stream_mixers(written - {*into}) if top in seen.wide() else set()
        self.routers = tuple(name for name in self.calls if name in routers)
        self.reads = [name for name in into if name not in self.routers]
        self.memory = [name for name, call in self.calls.items() if MEMORY in call.history and name not in into]
        self.writes = [name for name in self.calls if name in written and name not in (*into, *self.memory)]

    def _of_layer(self, found: Mapping[str, object]) -> dict:
        """Return the entries for paths in this layer, by the paths relative to it."""
        size = len(self.prefix)
        return {path[size:]: value for path, value in found.items() if path.startswith(self.prefix)}

    def own(self, history: History) -> set[str]:
        """Return the projections of this layer that are in a history."""
        return {label[len(self.prefix) :] for label in history if label.startswith(self.prefix)}

    def _readers(self, projection: str) -> set[str]:
        """Return the other projections that read a projection's output directly, not as part of the stream."""
        behind = {name for name, call in self.calls.items() if self.stream not in call.history and name != projection}
        return {name for name in behind - self.weighted if projection in self.own(self.calls[name].history)}

    def _stream_mixers(self, writes: set[str]) -> set[str]:
        """Return the projections that contribute to none of the outputs `writes` to the residual stream: they weigh the
        parallel streams of hyper-connections."""
        fed, left = {*writes, *self.weighted}, [*writes]
        while left:
            call = self.calls[left.pop()]
            more = self.own(call.history) - fed if self.stream not in call.history else set()
            fed |= more
            left += more
        return {name for name in self.calls if name not in fed}

    def branches(self) -> Iterator[Branch]:
        """Yield the branches of the layer, in the order of their first call."""
        members = [name for name in self.calls if name not in self.routers]
        first = {name: name for name in members}

        def root(name: str) -> str:
            while first[name] != name:
                name = first[name]
            return name

        for name in members:
            for other in self.own(self.calls[name].history) & first.keys() if name not in self.reads else ():
                roots = sorted((root(name), root(other)), key=members.index)
                first[roots[1]] = roots[0]
        ends = self.reads, self.writes, self.memory
        mixing = [self.own(history) for _, _, history in self.seen.flow.mixed]
        attending = {path.partition(".")[0] for path in self._softmaxes()}
        for start in dict.fromkeys(map(root, members)):
            joined = [name for name in members if root(name) == start]
            before = {*joined} - {*self.writes}
            mixes = any(MIXED in self.calls[name].history for name in joined) or any(map(before.intersection, mixing))
            reads, writes, memory = (tuple(name for name in joined if name in part) for part in ends)
            between = tuple(name for name in joined if name not in {*reads, *writes, *memory})
            if reads or memory:
                # a branch that writes nothing in this pass, such as a summary of more positions, belongs to its module
                inside = not writes and {name.partition(".")[0] for name in reads} & attending
                yield Branch(mixes or bool(inside), reads, between, writes, memory)

    def _softmaxes(self) -> dict[str, set[str]]:
        """Return the modules in which a softmax over positions runs, with the projections whose outputs it reads."""
        return {
            self._holder(path): self.own(history)
            for path, how, history in self.seen.flow.mixed
            if how == "softmax" and path.startswith(self.prefix)
        }

    def norms(self) -> dict[str, History]:
        """Return the norms of the layer with the histories of their inputs."""
        return {path: before for path, (before, behind) in self._of_layer(self.seen.norms).items() if behind}

    def anatomy(self) -> Anatomy:
        """Return the parts of the layer by role, without the fields of the whole stack."""
        norms, branches, of_experts = self.norms(), tuple(self.branches()), "it holds experts in a way of its own"
        apart = dict(self._without_role(branches)) | dict.fromkeys(self.experts, of_experts)
        roles: dict[str, list[str]] = {"attn_in": [], "attn_out": []}
        for branch in branches:
            for part, role in ROLES_OF[(branch.mixes or bool(branch.memory), bool(branch.memory))].items():
                roles.setdefault(role, []).extend(one for one in getattr(branch, part) if one not in apart)
        role_of = {one: role for role, names in roles.items() for one in names} | dict.fromkeys(self.experts, "ffn_in")
        in_front = {norm: self._reading(norm) for norm, before in norms.items() if self.stream in before}
        kept = [norm for norm in in_front if NORM + self.prefix + norm in self.left]
        front = {norm: readers for norm, readers in in_front.items() if norm not in kept and readers}
        behind = {
            norm: max(own)
            for norm, before in norms.items()
            if self.stream not in before
            and (own := self.own(before) - {*self.routers})
            and own <= {*self.writes, *self.experts}
        }
        crossed = {one for branch in branches if branch.memory for one in (*branch.reads, *branch.memory)}
        softmaxes = {path: bool(own & crossed) for path, own in self._softmaxes().items()}
        convolved = any(how == "convolution" and path.startswith(self.prefix) for path, how, _ in self.seen.flow.mixed)
        routers = tuple(one for one in self.routers if self._is_module(one))
        layer = self.seen.model.get_submodule(self.prefix[:-1])
        experts = next((name for name, one in layer.named_modules() if holds_experts(one)), None)
        # a state that only one expert reads is no state of the layer
        of_layer = {one: of for one, of in role_of.items() if of == "ffn_in" or not one.startswith(f"{experts}.")}
        attn_in, config = roles["attn_in"], self.seen.model.config
        ffn_in = [one for one in roles.get("ffn_in", ()) if not one.startswith(f"{experts}.")]
        anatomy = Anatomy(
            layers=self.seen.layers[self.prefix[:-1]][0],
            by_head=_is_by_head(self._split(attn_in, branches), config) if len(attn_in) == 1 else False,
            fused_gate=_is_gate(self._split(ffn_in, branches)) if len(ffn_in) == 1 else False,
            attention=next((path for path, cross in softmaxes.items() if not cross), None),
            cross_attention=next((path for path, cross in softmaxes.items() if cross), None),
            norms={
                norm: read
                for norm, readers in front.items()
                if (read := tuple(dict.fromkeys(role_of[one] for one in readers if one in role_of)))
            },
            norm_offset=_norm_offset(layer, front),
            read_by={norm: self._reading(norm) for norm in norms if norm not in {*front, *behind}} | front,
            recurrent=convolved or sum(branch.mixes for branch in branches) > len(softmaxes),
            norms_of_sums=tuple(norm for norm in kept if self.own(norms[norm]) - {*self.routers}),
            norms_behind={norm: "ffn_out" if one in self.experts else role_of[one] for norm, one in behind.items()},
            experts=experts,
            **{role: tuple(names) for role, names in roles.items()},
            router=routers,
            states=self._states(of_layer, routers),
            apart=apart,
            shares=self._other_layers(),
        )
        return _repeated_for_experts(anatomy, expert_count(layer.get_submodule(experts))) if experts else anatomy

    def _split(self, projections: Sequence[str], branches: Iterable[Branch]) -> tuple[Outputs | None, ...]:
        """Return the parts into which the outputs of the first projection are split, if it is the only reader of the
        stream in its branch; None stands for an irregular part."""
        alone = any(branch.reads == tuple(projections[:1]) for branch in branches)
        return tuple(dict.fromkeys(self.seen.flow.split.get(self.prefix + projections[0], ()))) if alone else ()

    def _reading(self, norm: str) -> tuple[str, ...]:
        """Return the projections and norms that read the output of a norm itself, and not only that of a later norm."""
        label, norms = NORM + self.prefix + norm, self.norms()
        behind = [other for other, before in norms.items() if label in before]
        hidden = {NORM + self.prefix + other for other in behind}
        histories = {name: call.history for name, call in self.calls.items()} | {name: norms[name] for name in behind}
        return tuple(name for name, history in histories.items() if label in history and not hidden & history)

    def _states(self, roles: Mapping[str, str], routers: Iterable[str]) -> dict[str, int]:
        """Number the hidden states of each role. Projections that read the first one are left out, and routers that
        read no state of ffn_in."""
        read: dict[str, dict[int, int]] = {}  # by role and tensor
        for name, role in roles.items():
            numbers = read.setdefault(role, {})
            numbers.setdefault(self.calls[name].input, len(numbers))
        states = {name: number for name, role in roles.items() if (number := read[role][self.calls[name].input])}
        ffn_states = read.get("ffn_in", {})
        inputs = {name: self.calls[name].input for name in routers}
        return states | {name: ffn_states[tensor] for name, tensor in inputs.items() if tensor in ffn_states}

    def _is_module(self, path: str) -> bool:
        return self.prefix + path in self.seen.paths.values()

    def _holder(self, path: str) -> str:
        """Return the path of the innermost module with children that contains a module or is that module."""
        module = self.seen.model.get_submodule(path)
        while not module._modules:
            path = path.rpartition(".")[0]
            module = self.seen.model.get_submodule(path)
        return path[len(self.prefix) :]

    def _without_role(self, branches: tuple[Branch, ...]) -> Iterator[tuple[str, str]]:
        """Yield the matrices without a role, each with the reason."""
        roles = {*self.routers, *self.experts}
        for branch in branches:
            roles |= {*branch.reads, *branch.between, *branch.writes, *branch.memory}
        modules = self._of_layer({path: module for module, path in self.seen.paths.items()})
        for path, call in self.calls.items():
            if self.prefix + path in self.seen.parted:
                yield path, "parts of its input are multiplied with parts of its weight"
            elif path not in self.routers and call.uses > self.seen.entered[self.prefix[:-1]]:
                yield path, f"it runs {call.uses} times in a pass"
            elif self.prefix + path in self.seen.flow.loose:
                if path not in self.routers or not self._is_module(path):
                    yield path, "its weight is multiplied with, and no module is called for that"
            elif path not in roles:
                yield path, "it reads no hidden state of this layer"
        for path, module in modules.items():
            inside = any(path.startswith(f"{one}.") for one in self.experts)
            if path in self.calls or inside or holds_experts(module):
                continue
            for name, one in module._parameters.items():
                if one is None or one.ndim < 2 or f"{path}.{name}" in self.calls:
                    continue
                if is_projection(module):
                    yield path, "it is never called"
                elif "Conv" in type(module).__name__:
                    yield path, "it is a convolution"
                elif isinstance(module, nn.Embedding):
                    yield path, "it is an embedding"
                else:
                    yield f"{path}.{name}", "its weight is no matrix that hidden states are multiplied with"

    def _other_layers(self) -> tuple[int, ...]:
        """Return the places of other layers from which this one reads something besides the residual stream."""
        labels = NOTHING.union(*(call.history | call.later for call in self.calls.values()), self.left)
        labels |= NOTHING.union(*(of for path, _, of in self.seen.flow.mixed if path.startswith(self.prefix)))
        places = set()
        for label in labels:
            path = label.rpartition(" ")[2]
            if path.startswith(self.prefix) or f"{path}." == self.prefix:
                continue
            owner = next((one for one in ancestors(path) if one in self.seen.layers), None)
            if owner in self.seen.left:
                places.add(self.seen.layers[owner][1])
        return tuple(sorted(places))


def _repeated_for_experts(anatomy: Anatomy, count: int) -> Anatomy:
    """Repeat the parts of the first expert, the only one that a pass follows, for all experts of a layer."""
    first = f"{anatomy.experts}.0."

    def named(name: str) -> list[str]:
        if not name.startswith(first):
            return [name]
        return [f"{anatomy.experts}.{number}.{name.removeprefix(first)}" for number in range(count)]

    def listed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(chain.from_iterable(map(named, names)))

    return replace(
        anatomy,
        **{role: listed(getattr(anatomy, role)) for role in ROLES},
        read_by={norm: listed(names) for norm, names in anatomy.read_by.items()},
        states={name: state for projection, state in anatomy.states.items() for name in named(projection)},
    )


def _is_by_head(parts: tuple[Outputs | None, ...], config: PretrainedConfig) -> bool | None:
    """Return whether a fused projection groups its outputs by heads of keys; None if unknown."""
    groups = {part and part[0] for part in parts}
    if len(groups) != 1 or None in groups or parts[0][1]:
        return None
    return groups != {1} if groups <= {1, *(getattr(config, name, 1) for name in KEY_HEADS)} else None


def _is_gate(parts: tuple[Outputs | None, ...]) -> bool | None:
    """Return whether the first half of a projection's outputs is the gate; None if unknown."""
    if not parts:
        return False
    halves = len(parts) == 2 and None not in parts and all(part[0] == 1 for part in parts)
    return True if halves and parts[1][1] == parts[0][2] == parts[1][2] and not parts[0][1] else None


def _norm_offset(layer: nn.Module, norms: Iterable[str]) -> float:
    """Measure the number that norms add to their weight before multiplying with it."""
    for path in norms:
        norm = layer.get_submodule(path)
        weight = norm._parameters.get("weight")
        if weight is None:
            continue
        outputs = []
        for value in (0.0, 1.0):
            probe = copy.deepcopy(norm).to_empty(device="cpu")
            for name, parameter in probe.named_parameters():
                nn.init.constant_(parameter, value if name == "weight" else 0.0)
            with torch.no_grad():
                outputs.append(probe(torch.linspace(-1, 1, len(weight))[None].to(weight.dtype)).float())
        norm_of_zero, norm_of_one = (float(output.norm()) for output in outputs)
        return 0.0 if norm_of_zero == 0 else round(norm_of_zero / (norm_of_one - norm_of_zero), 6)
    return 0.0
