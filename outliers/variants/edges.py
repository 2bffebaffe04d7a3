"""Places where features are replaced: whole roles, or only some of the projections, layers, heads or norms."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Self

from outliers.criterion import of_transformerlens
from outliers.errors import UserError, unknown_name
from outliers.models.variant import Variant

if TYPE_CHECKING:  # to read a place takes no torch
    import torch
    from transformers import PreTrainedModel

    from outliers.models.anatomy import Projection
    from outliers.models.anatomy.parts import Part

HEADS = ("q", "k", "v")
ROLES = {"attn_in": (*HEADS, "mixer"), "ffn_in": ("gate", "up", "router", "experts")}
NORMS = ("attn_norm", "ffn_norm")
# Names of places, and what they are made of.
PLACES = ROLES | {part: (part,) for part in (*chain(*ROLES.values()), *NORMS)} | {"norm": NORMS}
ALL = tuple(chain(*ROLES.values()))  # where a place says layers or a head alone
_WRITTEN = re.compile(
    r"(layers\.(?P<first>[0-9]{1,9})(:(?P<end>[0-9]{1,9}))?(\.|$))?(heads\.(?P<head>[0-9]{1,9})(\.|$))?(?P<name>\w*)"
)
# Of a projection, by the field that says where it is, the value of the field, and the place as a scheme takes it.
WRITTEN = {"role": lambda part: (part.role, part.role), "layer": lambda part: (part.layer, f"layers.{part.layer}")}
HINT = "(of some layers or a head: layers.9:12.q, layers.9.heads.3)"
LIMITS = ("only", "skip")  # options that take places


class AtPlaces(Variant):
    """A variant of projections at some places: those of `only`, unless that is empty, and none of `skip`."""

    only: tuple[str, ...]
    skip: tuple[str, ...]

    @property
    def limits(self) -> list[str]:
        """Those of `LIMITS` that it has, as its name says them."""
        return [f"{option}={'/'.join(getattr(self, option))}" for option in LIMITS if getattr(self, option)]

    @property
    def is_of_places(self) -> bool:
        """Whether it changes nothing but some places."""
        return bool(self.only)

    def alone_at(self, place: str) -> Self:
        """The same at a place alone."""
        return replace(self, only=(place,))

    def exact_at(self, place: str) -> Self:
        """The same but at a place."""
        return replace(self, skip=(*self.skip, place))


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
        if state := of_transformerlens(written):
            written = "layers.{}.{}".format(*state)
        match = _WRITTEN.fullmatch(written)
        if match is None or match["name"] not in (*PLACES, "") or not written or written.endswith("."):
            raise unknown_name("place", written if match is None else match["name"] or written, PLACES, HINT)
        layers = head = None
        parts = PLACES.get(match["name"], ALL)
        if match["first"]:
            layers = int(match["first"]), int(match["end"] or int(match["first"]) + 1)
        if match["head"]:
            head, parts = int(match["head"]), tuple(part for part in parts if part in HEADS)
        if not parts or (layers and layers[0] >= layers[1]):
            raise UserError(f"place '{written}' has nothing in it; expected one such as layers.9:12.q or heads.3.k")
        return cls(written, parts, layers, head)

    def has(self, layer: int) -> bool:
        """Whether it is of a layer."""
        return self.layers is None or self.layers[0] <= layer < self.layers[1]

    def check(self, model: "PreTrainedModel") -> None:
        """Raise UserError where a model has not so many layers, or heads."""
        from outliers.models.anatomy import config_of_stack, heads_of, layers_of

        layers = layers_of(model)
        if self.layers and self.layers[1] > len(layers):
            raise UserError(
                f"place '{self.written}' in a model of {len(layers)} layers; expected some of layers.0:{len(layers)}"
            )
        for layer in layers if self.head is not None else ():
            heads = heads_of(layer, config_of_stack(model.config, layer.anatomy))
            if self.has(layer.number) and self.head >= heads:
                there = f"{heads} heads; expected one of 0 to {heads - 1}" if heads else "no attention; name others"
                raise UserError(f"place '{self.written}': layer {layer.number} has {there}")


class Edges(NamedTuple):
    """The readers of replaced features: modules, in all of their input; and some outputs of projections."""

    inputs: "list[Projection]"
    outputs: "list[tuple[Projection, torch.Tensor]]"


def edges(model: "PreTrainedModel", written: Iterable[str], layer: int | None = None) -> Edges:
    """The readers of a model, or of one layer, at some places; where all that read a hidden state are, it is a role's.

    Raises:
        UserError: a layer or a head is out of range, or a layer of a place has nothing of what the place says.
    """
    from outliers.models.anatomy import decoder_layers, readers

    places = [Place.read(name) for name in written]
    for place in places:
        place.check(model)
    every = list(readers(model, layer))
    whole = Edges([], [])
    for number in range(len(decoder_layers(model))) if layer is None else (layer,):
        here = [place for place in places if place.has(number)]
        roles = {place.written for place in here} & ROLES.keys()
        others = [place for place in here if place.written not in roles]
        at_others = _edges_of_layer(model, number, others, roles) if others else Edges([], [])
        whole.inputs.extend(reader for reader in every if reader.layer == number and reader.role in roles)
        whole.inputs.extend(at_others.inputs)
        whole.outputs.extend(at_others.outputs)
    for place in places if layer is None else ():
        if place.written in ROLES and not any(reader.role == place.written for reader in every):
            raise UserError(
                f"place '{place.written}': no layer of this model has such a projection; expected some of "
                f"{', '.join(dict.fromkeys(reader.role for reader in every if reader.role in ROLES))}"
            )
    return whole


def _edges_of_layer(model: "PreTrainedModel", layer: int, places: list[Place], roles: set[str]) -> Edges:
    """The readers at places of a layer but those of whole roles; roles of which all readers are there join these."""
    import torch

    from outliers.models.anatomy.parts import parts

    there = list(parts(model, layer))
    heads = next((len(part.outputs) for part in there if part.name == "q"), 0)
    outputs = {part.reader.path: torch.empty(0, dtype=torch.bool) for part in there}  # what of each reader is chosen
    for part in there:
        outputs[part.reader.path] = torch.cat([outputs[part.reader.path], torch.zeros(_count(part), dtype=torch.bool)])
    for place in places:
        chosen = [part for part in there if part.name in place.parts]
        if not chosen:
            raise UserError(
                f"place '{place.written}': layer {layer} has no such reader of the residual stream; expected some of "
                f"{', '.join(part.name for part in there)}"
            )
        for part in chosen:
            if part.outputs is None:
                outputs[part.reader.path][:] = True
            elif place.head is None:
                outputs[part.reader.path][part.outputs] = True
            else:  # of keys and values those that the head shares
                outputs[part.reader.path][part.outputs[place.head * len(part.outputs) // heads]] = True
    for role, names in ROLES.items():
        of_role = [outputs[part.reader.path].all() for part in there if part.name in names]
        if of_role and all(of_role):
            roles.add(role)
    left = {
        part.reader.path: part for part in there if part.reader.role not in roles and outputs[part.reader.path].any()
    }
    return Edges(
        [part.reader for part in left.values() if part.outputs is None],
        [(part.reader, outputs[path]) for path, part in left.items() if part.outputs is not None],
    )


def _count(part: "Part") -> int:
    """The number of a part's outputs; a module of its own counts as one."""
    return 1 if part.outputs is None else part.outputs.numel()
