"""Places where features are replaced: whole roles, or selected projections, layers, heads or norms.

An edge leads from a hidden state to a projection that reads it.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Self

from outliers.criterion import of_transformerlens
from outliers.errors import UserError, unknown_name
from outliers.models.variant import Variant

if TYPE_CHECKING:  # parsing a place does not import torch
    import torch
    from transformers import PreTrainedModel

    from outliers.models.anatomy import Projection

HEADS = ("q", "k", "v")
ROLES = {"attn_in": (*HEADS, "mixer"), "ffn_in": ("gate", "up", "router", "experts")}
NORMS = ("attn_norm", "ffn_norm")
# The parts of each place, by its name.
EDGE_PLACES = ROLES | {part: (part,) for part in (*chain(*ROLES.values()), *NORMS)} | {"norm": NORMS}
ALL = tuple(chain(*ROLES.values()))  # the parts of a place that names only layers or a head
_WRITTEN = re.compile(
    r"(layers\.(?P<first>[0-9]{1,9})(:(?P<end>[0-9]{1,9}))?(\.|$))?(heads\.(?P<head>[0-9]{1,9})(\.|$))?"
    r"(experts\.(?P<expert>[0-9]{1,9})\.)?(?P<name>\w*)"
)
IN_EXPERT = {"up": "ffn_in", "down": "ffn_out"}  # projections of an expert, and the roles of their inputs
# By field of a row: a projection's value, and its place as an option of schemes.
PLACES_BY_FIELD = {
    "role": lambda part: (part.role, part.role),
    "layer": lambda part: (part.layer, f"layers.{part.layer}"),
    "expert": lambda part: 2 * (f"layers.{part.layer}.experts.{part.expert}",),
}
HINT = "(of some layers or a head: layers.9:12.q, layers.9.heads.3)"
LIMITS = ("only", "skip")  # options that take places


class AtPlaces(Variant):
    """A variant that changes projections only at the places of `only`, if there are any, except those of `skip`."""

    only: tuple[str, ...]
    skip: tuple[str, ...]

    @property
    def limits(self) -> list[str]:
        """The options `only` and `skip` as written in the name."""
        return [f"{option}={'/'.join(getattr(self, option))}" for option in LIMITS if getattr(self, option)]

    @property
    def is_limited(self) -> bool:
        return bool(self.only)

    def only_at(self, place: str) -> Self:
        """Return the variant that changes projections at one place only."""
        return replace(self, only=(place,))

    def except_at(self, place: str) -> Self:
        """Return the variant that leaves a further place as it is."""
        return replace(self, skip=(*self.skip, place))


class Place(NamedTuple):
    """A selection of readers in decoder layers.

    written: as in a variant's name. parts: kinds of readers, such as q or gate. layers: the first one, and the
    exclusive end; None for all. head: None for all. expert: the expert that the parts belong to; None if they belong to
    no expert.
    """

    written: str
    parts: tuple[str, ...]
    layers: tuple[int, int] | None = None
    head: int | None = None
    expert: int | None = None

    @classmethod
    def read(cls, written: str) -> "Place":
        """Parse a name of `EDGE_PLACES`, layers, a head, or these together: `q`, `layers.9:12.q`, `layers.9.heads.3`.

        The TransformerLens name of such a reader in a layer is accepted too: `blocks.9.attn.q.hook_in` is `layers.9.q`.

        Raises:
            UserError: the text is no place, or a head is given for parts that have none.
        """
        if state := of_transformerlens(written):
            written = "layers.{}.{}".format(*state)
        match = _WRITTEN.fullmatch(written)
        known = IN_EXPERT if match and match["expert"] else (*EDGE_PLACES, "")
        if match is None or match["name"] not in known or not written or written.endswith("."):
            raise unknown_name("place", written if match is None else match["name"] or written, EDGE_PLACES, HINT)
        layers = head = expert = None
        parts = EDGE_PLACES.get(match["name"], ALL)
        if match["expert"]:
            parts, expert = (match["name"],), int(match["expert"])
        if match["first"]:
            layers = int(match["first"]), int(match["end"] or int(match["first"]) + 1)
        if match["head"]:
            head, parts = int(match["head"]), tuple(part for part in parts if part in HEADS)
        if not parts or (layers and layers[0] >= layers[1]):
            raise UserError(f"place '{written}' has nothing in it; expected one such as layers.9:12.q or heads.3.k")
        return cls(written, parts, layers, head, expert)

    def has(self, layer: int) -> bool:
        return self.layers is None or self.layers[0] <= layer < self.layers[1]

    def check(self, model: "PreTrainedModel") -> None:
        """Raise UserError if a model has too few layers or heads."""
        from outliers.models.anatomy import heads_of, layers_of
        from outliers.models.anatomy.row import config_of_stack

        layers = layers_of(model)
        if self.layers and self.layers[1] > len(layers):
            raise UserError(
                f"place '{self.written}' in a model of {len(layers)} layers; expected some of layers.0:{len(layers)}"
            )
        for layer in layers if self.head is not None else ():
            heads = heads_of(layer, config_of_stack(model.config, layer.anatomy))
            if self.has(layer.number) and self.head >= heads:
                expected = f"{heads} heads; expected one of 0 to {heads - 1}" if heads else "no attention; name others"
                raise UserError(f"place '{self.written}': layer {layer.number} has {expected}")


class ReplacedReaders(NamedTuple):
    """The readers of replaced features: whole modules, and projections with the mask of the outputs that read them."""

    inputs: "list[Projection]"
    outputs: "list[tuple[Projection, torch.Tensor]]"


def replaced_readers(model: "PreTrainedModel", written: Iterable[str], layer: int | None = None) -> ReplacedReaders:
    """Return the readers of a model, or of one layer, at some places; if all readers of a hidden state are chosen, they
    count as its role.

    Raises:
        UserError: a layer or a head is out of range, or a layer of a place lacks the parts of the place.
    """
    from outliers.models.anatomy import decoder_layers, state_readers

    places = [Place.read(name) for name in written]
    for place in places:
        place.check(model)
    expert_places = [place for place in places if place.expert is not None]
    places = [place for place in places if place.expert is None]
    every = list(state_readers(model, layer))
    whole = ReplacedReaders([reader for place in expert_places for reader in _in_experts(model, place, layer)], [])
    for number in range(len(decoder_layers(model))) if layer is None else (layer,):
        in_layer = [place for place in places if place.has(number)]
        roles = {place.written for place in in_layer} & ROLES.keys()
        others = [place for place in in_layer if place.written not in roles]
        selected = _readers_in_layer(model, number, others, roles) if others else ReplacedReaders([], [])
        whole.inputs.extend(reader for reader in every if reader.layer == number and reader.role in roles)
        whole.inputs.extend(selected.inputs)
        whole.outputs.extend(selected.outputs)
    for place in places if layer is None else ():
        if place.written in ROLES and not any(reader.role == place.written for reader in every):
            raise UserError(
                f"place '{place.written}': no layer of this model has such a projection; expected some of "
                f"{', '.join(dict.fromkeys(reader.role for reader in every if reader.role in ROLES))}"
            )
    return whole


def _in_experts(model: "PreTrainedModel", place: Place, layer: int | None) -> "list[Projection]":
    """Return the projections at a place of an expert, in all layers of the place or in one."""
    from outliers.models.anatomy import projections

    role = IN_EXPERT[place.parts[0]]
    every = [part for part in projections(model) if part.role == role and place.has(part.layer)]
    found = [part for part in every if part.expert == place.expert]
    if not found:
        count = len({part.expert for part in every} - {None})
        expected = f"experts.0 to experts.{count - 1}" if count else "another place, for there are no experts"
        raise UserError(f"place '{place.written}': no such expert; expected {expected}")
    return [part for part in found if layer in (None, part.layer)]


def _readers_in_layer(model: "PreTrainedModel", layer: int, places: list[Place], roles: set[str]) -> ReplacedReaders:
    """Return the readers at places of a layer, except those of whole roles.

    If all readers of a role are chosen, the role is added to `roles` instead.
    """
    import torch

    from outliers.models.anatomy.parts import stream_readers

    in_layer = list(stream_readers(model, layer))
    heads = next((len(part.outputs) for part in in_layer if part.name == "q"), 0)
    counts = Counter()  # number of outputs of each reader; 1 for a whole module
    for part in in_layer:
        counts[part.reader.path] += 1 if part.outputs is None else part.outputs.numel()
    outputs = {path: torch.zeros(count, dtype=torch.bool) for path, count in counts.items()}  # whether each is chosen
    for place in places:
        chosen = [part for part in in_layer if part.name in place.parts]
        if not chosen:
            raise UserError(
                f"place '{place.written}': layer {layer} has no such reader of the residual stream; expected some of "
                f"{', '.join(part.name for part in in_layer)}"
            )
        for part in chosen:
            if part.outputs is None:
                outputs[part.reader.path][:] = True
            elif place.head is None:
                outputs[part.reader.path][part.outputs] = True
            else:  # keys and values may be shared by several heads
                outputs[part.reader.path][part.outputs[place.head * len(part.outputs) // heads]] = True
    for role, names in ROLES.items():
        are_chosen = [outputs[part.reader.path].all() for part in in_layer if part.name in names]
        if are_chosen and all(are_chosen):
            roles.add(role)
    selected = {
        part.reader.path: part for part in in_layer if part.reader.role not in roles and outputs[part.reader.path].any()
    }
    return ReplacedReaders(
        [part.reader for part in selected.values() if part.outputs is None],
        [(part.reader, outputs[path]) for path, part in selected.items() if part.outputs is not None],
    )
