"""The parser of variants' names, such as `zero(247)+llm.int8`."""

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import groupby

from outliers.criterion import CACHE_PARTS
from outliers.errors import UserError, shown, unknown_name
from outliers.models.variant import AS_IT_IS, Variant
from outliers.quantization.plans.plan import MARK
from outliers.quantization.schemes import BASELINE
from outliers.variants.ablated import METHODS
from outliers.variants.quantized import Quantized
from outliers.variants.term import AGAINST, EXAMPLES, PEER, PLUS, PREFIX, Term
from outliers.variants.together import Together

FEATURE_TERMS = {  # locations of classes, by the names of terms with features or positions
    **dict.fromkeys(METHODS, "outliers.variants.ablated:Ablated"),
    "plant": "outliers.variants.planted:Planted",
    "massive": "outliers.variants.massive:Massive",
    "unattended": "outliers.variants.unattended:Unattended",
}
PLACE_TERMS = {"drop": "outliers.variants.dropped:Dropped"}  # by the names of terms with places alone
# By the names of terms with a weight.
WEIGHT_TERMS = dict.fromkeys(("zero", "scale"), "outliers.variants.weights:Scaled")
WHOLE_TERMS = {  # by the names of terms that their classes parse whole; the terms of a cache are parsed together
    PREFIX: "outliers.variants.cached:Prefixed",
    AGAINST: "outliers.variants.peer:Against",
    **dict.fromkeys(CACHE_PARTS, "outliers.variants.cached:Cached"),
}
PEERS = {PEER: "outliers.variants.peer:Bitsandbytes"}
# By an attribute of variants that stand first, or last: the rule, for messages.
FIRST = {"swaps": "another model stands first", "is_prefix": "a prefix stands first"}
LAST = {"cache": "a cache stands last"}


def variant(written: str) -> Variant:
    """Return the variant that a text such as "absmax+hadamard" names; its `name` is that text again.

    Terms are joined by + in the order in which they act. `zero(3,17)`, `mean(3)` and `shuffle(3@attn_in/ffn_in,seed=1)`
    replace features in the inputs of projections, by default in attn_in, or of selected readers, as in `zero(3@q)` and
    `zero(3@layers.9:12.k/layers.9.heads.3)`, see `Place`; `plant(3,factor=8)` plants outliers.
    `massive(507@layers.11,value=0,above=100)` replaces entries above 100 of a feature in a layer's output by a value.
    `unattended(0)` keeps later positions from attending to the first one. `drop(layers.2.experts.7)` lets an
    expert add nothing, and `zero(3@layers.2.experts.7.down)` takes out one of its units.
    `zero(model.layers.11.mlp.down_proj[507,1229])` sets a weight to zero, `[:,1229]` and `[507,:]` a whole column or
    row, and `scale(…,factor=0.5)` multiplies it. A scheme may have remedies, as in `absmax+hadamard`, and options:
    `alpha=4` is its threshold of outliers, `only=ffn_out` quantizes only a place, and `skip=layers.0/*.down_proj`
    leaves places exact, see `outliers.quantize`; `instead=llm.int8@ffn_out` gives places another scheme, in parentheses
    if that has remedies. `@plan.yaml` stands for a whole plan. `bitsandbytes` uses the layers of that library, and
    `fp32` does nothing. `kv=int4` quantizes the keys and values that attention reads,
    `keys=int4/channels=32+values=int4` each in its own format, see `CacheFormat`. `against(path/to/model)` replaces the
    model by another one, named as for `outliers.load_model`. `prefix` before a scheme puts the most frequent outlier
    tokens of a calibration text before every sequence, `prefix(30,198)` the tokens with these ids.

    Args:
        written: terms joined by +.

    Raises:
        UserError: a term is unknown or malformed, or there are two schemes; as `get_scheme`.

    Example:
        >>> outliers.variant("zero(3)+absmax").name
        'zero(3)+absmax'
    """
    if not isinstance(written, str) or not written:
        raise UserError(f"{shown(written)} is not a variant; expected one such as absmax+hadamard, {EXAMPLES}")
    variants = [part for parse, terms in groupby(PLUS.split(written), _parser) for part in parse(list(terms))]
    for attribute, rule in (FIRST | LAST).items():
        ordered = sorted(variants, key=lambda part, name=attribute: bool(getattr(part, name)) == (name in LAST))
        if ordered != variants:
            raise UserError(f"'{written}': {rule}: {'+'.join(part.name for part in ordered)}")
    if sum(bool(part.swaps or part.is_prefix) for part in variants) > 1:
        raise UserError(f"'{written}' has several terms that stand first; expected one prefix, or one other model")
    if sum(bool(part.schemes or part.package) for part in variants) > 1:
        raise _two_schemes(written)
    parts = tuple(part for part in variants if part.name != BASELINE)
    if not parts:
        return AS_IT_IS
    return parts[0] if len(parts) == 1 else Together(parts)


class Unreadable(Variant):
    """The variant of a row whose name cannot be parsed, such as one of a missing plugin."""

    name = "unreadable"


def variant_of(row: Mapping) -> Variant:
    """Return the variant that a row names, or `Unreadable`."""
    return _named(row["variant"])


@cache
def _named(written: str) -> Variant:
    try:
        return variant(written)
    except UserError:
        return Unreadable()


def _two_schemes(written: str) -> UserError:
    return UserError(f"'{written}' has two schemes, of which the second would replace the first; expected one")


def _parser(term: str) -> Callable[[list[str]], Iterable[Variant]]:
    """Return the function that parses a term together with the following terms that belong to it."""
    in_parentheses = not {"(", ")"}.isdisjoint(term) and not term.startswith(MARK)
    return PARSERS.get(_word(term)) or (_terms if in_parentheses else _scheme)


def _word(term: str) -> str:
    return re.split("[=(]", term)[0]


def _scheme(terms: list[str]) -> list[Variant]:
    """Parse a scheme, with its remedies and options."""
    if any(term == PEER or term.startswith(MARK) for term in terms[1:]):
        raise _two_schemes("+".join(terms))
    return [(pkgutil.resolve_name(PEERS[terms[0]]) if terms[0] in PEERS else Quantized).read(terms)]


def _terms(written: list[str]) -> Iterable[Variant]:
    """Parse terms of features, weights or places, such as zero(3)."""
    for term in map(Term.read, written):
        known = WEIGHT_TERMS if term.weight else FEATURE_TERMS if term.features else PLACE_TERMS
        if known is PLACE_TERMS and term.name in FEATURE_TERMS:
            raise UserError(f"'{term}' names no features; expected a term such as {EXAMPLES}")
        if term.name not in known:
            raise unknown_name("variant of a weight" if term.weight else "variant", term.name, known)
        yield pkgutil.resolve_name(known[term.name]).read(term)


def _read_whole(terms: list[str]) -> Iterable[Variant]:
    """Parse terms of a prefix, another model or a cache, whose variants parse them themselves."""
    return [pkgutil.resolve_name(WHOLE_TERMS[_word(term)]).read(term) for term in terms]


PARSERS = {  # by the first words of terms; other terms begin or continue a scheme
    **dict.fromkeys((PREFIX, AGAINST), _read_whole),
    **dict.fromkeys(CACHE_PARTS, lambda terms: _read_whole(["+".join(terms)])),
    **dict.fromkeys(FEATURE_TERMS | PLACE_TERMS | WEIGHT_TERMS, _terms),
    "instead": _scheme,
}
