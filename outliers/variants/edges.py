"""Where features are replaced: in what whole roles read, or only some of the projections, layers, heads or norms."""

import re
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from outliers.criterion import of_transformerlens
from outliers.errors import UserError, unknown_name

if TYPE_CHECKING:  # to read a place takes no torch
    import torch
    from transformers import PreTrainedModel

    from outliers.models.anatomy import Projection
    from outliers.models.anatomy.parts import Part

ROLES = {"attn_in": ("q", "k", "v"), "ffn_in": ("gate", "up", "router", "experts")}
NORMS = ("attn_norm", "ffn_norm")
# Names of places, and what they are made of.
PLACES = ROLES | {part: (part,) for part in (*chain(*ROLES.values()), *NORMS)} | {"norm": NORMS}
ALL = tuple(chain(*ROLES.values()))  # where a place says layers or a head alone
_WRITTEN = re.compile(
    r"(layers\.(?P<first>[0-9]{1,9})(:(?P<end>[0-9]{1,9}))?(\.|$))?(heads\.(?P<head>[0-9]{1,9})(\.|$))?(?P<name>\w*)"
)
HINT = "(of some layers or a head: layers.9:12.q, layers.9.heads.3)"


class Place(NamedTuple):
    """Parts of decoder layers; layers: the first, and before which they end; None for all. head: None for all."""

    written: str
    parts: tuple[str, ...]
    layers: tuple[int, int] | None = None
    head: int | None = None

    @classmethod
    def read(cls, written: str) -> "Place":
        """A name of `PLACES`, of some layers or of a head, or these alone: `q`, `layers.9:12.q`, `layers.9.heads.3`.

        What TransformerLens calls such a reader in one layer is one too: `blocks.9.attn.q.hook_in` is `layers.9.q`.

        Raises:
            UserError: it is none, or what it is made of has no heads.
        """
        if named := of_transformerlens(written):
            written = "layers.{}.{}".format(*named)
        found = _WRITTEN.fullmatch(written)
        if found is None or found["name"] not in (*PLACES, "") or not written or written.endswith("."):
            raise unknown_name("place", written if found is None else found["name"] or written, PLACES, HINT)
        layers = head = None
        parts = PLACES.get(found["name"], ALL)
        if found["first"]:
            layers = int(found["first"]), int(found["end"] or int(found["first"]) + 1)
        if found["head"]:
            head, parts = int(found["head"]), tuple(part for part in parts if part in ROLES["attn_in"])
        if not parts or (layers and layers[0] >= layers[1]):
            raise UserError(f"place '{written}' has nothing in it; expected one such as layers.9:12.q or heads.3.k")
        return cls(written, parts, layers, head)

    def has(self, layer: int) -> bool:
        """Whether it is of a layer."""
        return self.layers is None or self.layers[0] <= layer < self.layers[1]

    def check(self, model: "PreTrainedModel") -> None:
        """Raise UserError where a model has not so many layers, or heads."""
        from outliers.models.anatomy import anatomy_of, config_of_stack, decoder_layers, heads_of

        stack = anatomy_of(model.config)
        layers, heads = len(decoder_layers(model)), heads_of(config_of_stack(model.config, stack), stack)
        if self.layers and self.layers[1] > layers:
            raise UserError(f"place '{self.written}' in a model of {layers} layers; expected some of layers.0:{layers}")
        if self.head is not None and self.head >= heads:
            raise UserError(f"place '{self.written}' in a model of {heads} heads; expected one of 0 to {heads - 1}")


class Edges(NamedTuple):
    """What reads features that are replaced: modules, in all of their input; and some outputs of projections."""

    inputs: "list[Projection]"
    outputs: "list[tuple[Projection, torch.Tensor]]"


def edges(model: "PreTrainedModel", written: Iterable[str], layer: int | None = None) -> Edges:
    """What of a model, or of one layer, is at some places; where all that read a hidden state are, it is a role's.

    Raises:
        UserError: a layer or a head is out of range, or a layer of a place has nothing of what the place says.
    """
    from outliers.models.anatomy import decoder_layers, readers

    places = [Place.read(one) for one in written]
    for place in places:
        place.check(model)
    every = [one for one in readers(model) if layer in (None, one.layer)]
    found = Edges([], [])
    for number in range(len(decoder_layers(model))) if layer is None else (layer,):
        here = [place for place in places if place.has(number)]
        roles = {place.written for place in here} & ROLES.keys()
        others = [place for place in here if place.written not in roles]
        at_others = _edges_of_layer(model, number, others, roles) if others else Edges([], [])
        found.inputs.extend(one for one in every if one.layer == number and one.role in roles)
        found.inputs.extend(at_others.inputs)
        found.outputs.extend(at_others.outputs)
    return found


def _edges_of_layer(model: "PreTrainedModel", layer: int, places: list[Place], roles: set[str]) -> Edges:
    """What is at places of a layer and not of roles; roles of which all readers are there are added to these."""
    import torch

    from outliers.models.anatomy.parts import parts

    there = list(parts(model, layer))
    heads = next(len(one.outputs) for one in there if one.name == "q")
    outputs = {one.reader.path: torch.empty(0, dtype=torch.bool) for one in there}  # what of each reader is chosen
    for one in there:
        outputs[one.reader.path] = torch.cat([outputs[one.reader.path], torch.zeros(_count(one), dtype=torch.bool)])
    for place in places:
        chosen = [one for one in there if one.name in place.parts]
        if not chosen:
            raise UserError(
                f"place '{place.written}': layer {layer} has no such reader of the residual stream; expected some of "
                f"{', '.join(one.name for one in there)}"
            )
        for one in chosen:
            if one.outputs is None:
                outputs[one.reader.path][:] = True
            elif place.head is None:
                outputs[one.reader.path][one.outputs] = True
            else:  # of keys and values those that the head shares
                outputs[one.reader.path][one.outputs[place.head * len(one.outputs) // heads]] = True
    for role, names in ROLES.items():
        if all(outputs[one.reader.path].all() for one in there if one.name in names):
            roles.add(role)
    left = {one.reader.path: one for one in there if one.reader.role not in roles and outputs[one.reader.path].any()}
    return Edges(
        [one.reader for one in left.values() if one.outputs is None],
        [(one.reader, outputs[path]) for path, one in left.items() if one.outputs is not None],
    )


def _count(part: "Part") -> int:
    """How many outputs a part has; a module of its own counts as one."""
    return 1 if part.outputs is None else part.outputs.numel()
