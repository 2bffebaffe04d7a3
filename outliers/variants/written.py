"""Read what the names of variants say: `zero(247)+llm.int8`."""

import re
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

from outliers.errors import UserError, shown, unknown_name
from outliers.quantization.cache_formats import PARTS, Formats
from outliers.quantization.plans.plan import MARK
from outliers.quantization.schemes import BASELINE
from outliers.variants.ablated import METHODS, Ablated
from outliers.variants.cached import PREFIX, Cached, Prefixed
from outliers.variants.massive import Massive
from outliers.variants.peer import AGAINST, PEER, Against, Peer
from outliers.variants.planted import Planted
from outliers.variants.quantized import Quantized
from outliers.variants.term import EXAMPLES, PLUS, Term
from outliers.variants.together import Together
from outliers.variants.unattended import Unattended
from outliers.variants.weights import METHODS as OF_WEIGHTS
from outliers.variants.weights import Scaled

if TYPE_CHECKING:
    from outliers.models.variant import Variant

KINDS = {  # by the names of terms with features, or positions
    **dict.fromkeys(METHODS, Ablated),
    "plant": Planted,
    "massive": Massive,
    "unattended": Unattended,
}
WEIGHTS = dict.fromkeys(OF_WEIGHTS, Scaled)  # by those of terms with a weight


def variant(written: str) -> "Variant":
    """Return the variant that a text such as "absmax+hadamard" names; its `name` is that text again.

    Terms are joined by + in the order in which they act. `zero(3,17)`, `mean(3)` and `shuffle(3@attn_in/ffn_in,seed=1)`
    replace features in inputs of projections, of attn_in where none is named, or where only some read them, as
    `zero(3@q)` and `zero(3@layers.9:12.k/layers.9.heads.3)`, see `Place`; `plant(3,factor=8)` plants outliers.
    `massive(507@layers.11,value=0,above=100)` sets what is larger than 100 in a feature behind a layer to a value.
    `unattended(0)` lets no later position attend to the first one.
    `zero(model.layers.11.mlp.down_proj[507,1229])` sets a weight to zero, `[:,1229]` and `[507,:]` a whole column or
    row, and `scale(…,factor=0.5)` multiplies it. A scheme stands with its remedies, as `absmax+hadamard`, and with
    options: `alpha=4` is its threshold of outliers, `only=ffn_out` quantizes nothing but a place, and
    `skip=layers.0/*.down_proj` leaves some, see `outliers.quantize`; `instead=llm.int8@ffn_out` gives places another
    scheme, in parentheses where it has remedies. `@plan.yaml` stands for all that a plan says.
    `bitsandbytes` stands for the layers of that library, and `fp32` does nothing. `kv=int4` quantizes the keys and
    values that attention meets, `keys=int4/channels=32+values=int4` each in a way of its own, see `CacheFormat`.
    `against(path/to/model)` stands for a model of somebody else in the place of ours, a name as `outliers.load_model`
    takes it.
    `prefix` stands before a scheme: all is read behind the most frequent outlier tokens of a calibration text, and
    behind those with some ids as `prefix(30,198)`.

    Raises:
        UserError: a term is unknown or malformed, or there are two schemes; as `get_scheme`.

    Example:
        >>> outliers.variant("zero(3)+absmax").name
        'zero(3)+absmax'
    """
    if not isinstance(written, str) or not written:
        raise UserError(f"{shown(written)} is not a variant; expected one such as absmax+hadamard, {EXAMPLES}")
    variants, terms = [], PLUS.split(written)
    _check_places(written, terms)
    for read, group in groupby(terms, _reader):
        variants += read(list(group))
    if sum(isinstance(part, Quantized | Peer) for part in variants) > 1:
        raise _two_schemes(written)
    variants = [part for part in variants if part.name != BASELINE]
    if not variants:
        from outliers.models.stream import AS_IT_IS  # late, for it brings torch

        return AS_IT_IS
    return variants[0] if len(variants) == 1 else Together(tuple(variants))


def _check_places(written: str, terms: list[str]) -> None:
    """Raise UserError unless what stands first or last in a variant does."""
    readers = list(map(_reader, terms))
    for reader, rule, key in (
        (_against, "another model stands first", lambda place: readers[place] is not _against),
        (_prefix, "a prefix stands first", lambda place: readers[place] is not _prefix),
        (_cache, "a cache stands last", lambda place: readers[place] is _cache),
    ):
        ordered = [terms[place] for place in sorted(range(len(terms)), key=key)]
        if reader in readers and ordered != terms:
            raise UserError(f"'{written}': {rule}: {'+'.join(ordered)}")
    if readers.count(_against) + readers.count(_prefix) > 1:
        raise UserError(f"'{written}' has several terms that stand first; expected one prefix, or one other model")
    schemes = [term for term, reader in zip(terms, readers, strict=True) if reader is _scheme]
    if any(term == PEER or term.startswith(MARK) for term in schemes[1:]):
        raise _two_schemes(written)


def _two_schemes(written: str) -> UserError:
    return UserError(f"'{written}' has two schemes, of which the second would replace the first; expected one")


def _reader(term: str) -> Callable[[list[str]], "list[Variant]"]:
    """The function that parses a term, and those behind it that belong to it."""
    if re.match(rf"{PREFIX}\b", term):
        return _prefix
    if re.match(rf"{AGAINST}\b", term):
        return _against
    if term.startswith((MARK, "instead=")):
        return _scheme
    if term in KINDS | WEIGHTS or not {"(", ")"}.isdisjoint(term):  # it has features or a weight, or is meant to
        return _terms
    return _cache if term.partition("=")[0] in PARTS else _scheme


def _prefix(terms: list[str]) -> list[Prefixed]:
    return list(map(Prefixed.read, terms))


def _against(terms: list[str]) -> list[Against]:
    return list(map(Against.read, terms))


def _cache(terms: list[str]) -> list[Cached]:
    return [Cached(Formats.read("+".join(terms)))]


def _scheme(terms: list[str]) -> list[Quantized | Peer]:
    return [Peer.read(terms) if terms[0] == PEER else Quantized.read(terms)]


def _terms(written: list[str]) -> list[Ablated | Massive | Planted | Scaled | Unattended]:
    terms = [Term.read(text) for text in written]
    for term in terms:
        kinds = WEIGHTS if term.weight else KINDS
        if term.name not in kinds:
            raise unknown_name("variant of a weight" if term.weight else "variant", term.name, kinds)
    return [(WEIGHTS if term.weight else KINDS)[term.name].read(term) for term in terms]
