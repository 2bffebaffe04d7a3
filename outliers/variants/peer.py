"""Models of other libraries as variants: the 8-bit layers of bitsandbytes, or any model of the same architecture."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outliers.criterion import ALPHA, check_threshold
from outliers.errors import UserError
from outliers.models.variant import Variant
from outliers.variants.edges import LIMITS, PLACES_BY_FIELD, AtPlaces
from outliers.variants.term import AGAINST, PEER, read_number, write_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AGAINST = re.compile(
    rf"{AGAINST}\((?P<other>[^()]+?)(,only=(?P<only>[^(),=]+))?(,skip=(?P<skip>[^(),=]+))?\)"
)  # groups are named like the fields of `Against`


@dataclass(frozen=True)
class Bitsandbytes(Variant):
    """A model under LLM.int8() as bitsandbytes computes it; alpha: magnitude from which on a feature is an outlier."""

    alpha: float = ALPHA
    has_codes = True
    in_memory = True
    package = PEER

    @classmethod
    def read(cls, terms: Sequence[str]) -> "Bitsandbytes":
        """Parse `bitsandbytes`, optionally followed by `alpha=NUMBER`.

        Raises:
            UserError: there are other terms.
        """
        option, _, value = "".join(terms[1:]).partition("=")
        if len(terms) > 2 or (terms[1:] and not (option == "alpha" and value)):
            raise UserError(f"'{'+'.join(terms)}'; expected {PEER}, or its threshold of outliers as in {PEER}+alpha=4")
        if not value:
            return cls()
        return cls(check_threshold(f"the threshold of {PEER}", read_number(value, "+".join(terms))))

    @property
    def name(self) -> str:
        return PEER if self.alpha == ALPHA else f"{PEER}+alpha={write_number(self.alpha)}"

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        """Return the fields of a scheme; bitsandbytes multiplies outliers with dequantized weights."""
        return {"scheme": PEER, "alpha": self.alpha, "kernels": PEER, "outlier_weights": "dequantized"}

    def served(self, model: str, dtype: str, device: str, revision: str | None) -> "PreTrainedModel":
        """Load a model by its name, see `outliers.load_model`, and return it without its exact projections."""
        from outliers.models.load import load_model
        from outliers.quantization.peers import with_bitsandbytes

        return with_bitsandbytes(load_model(model, dtype, device, revision), self.alpha)

    @contextmanager
    def on(self, model: "PreTrainedModel", _layer: int | None = None) -> "Iterator[PreTrainedModel]":
        from outliers.quantization.peers import with_bitsandbytes

        yield with_bitsandbytes(model, self.alpha)


def is_against(written: str) -> bool:
    return written.startswith(f"{AGAINST}(")


@dataclass(frozen=True)
class Against(AtPlaces):
    """Another model, in place of ours or of some of its projections: quantized, fine-tuned, or damaged.

    other: its name, see `outliers.load_model`, the folder of one that `outliers.save_quantized` wrote, or the model
    itself, whose modules are used as they are. only, skip: places whose projections are taken from it, or not; without
    both the whole model is used.
    """

    other: "str | PreTrainedModel"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    has_output_errors = True
    place_kinds = ("role",)
    in_memory = True

    @classmethod
    def read(cls, term: str) -> "Against":
        """Parse `against(MODEL)` or `against(MODEL,only=PLACE/PLACE)`.

        Raises:
            UserError: the text is malformed.
        """
        match = _AGAINST.fullmatch(term)
        if match is None:
            raise UserError(f"'{term}' is malformed; expected the name of a model, such as {AGAINST}(path/to/folder)")
        places = {name: tuple(match[name].split("/")) if match[name] else () for name in LIMITS}
        return cls(match["other"], **places)

    @property
    def swaps(self) -> tuple["Against", ...]:
        return (self,)

    @property
    def called(self) -> str:
        """The other model's name, without the places."""
        if isinstance(self.other, str):
            return self.other
        return self.other.config.name_or_path or type(self.other).__name__

    @property
    def name(self) -> str:
        return f"{AGAINST}({','.join([self.called, *self.limits])})"

    def fields(self, model: "PreTrainedModel | None" = None) -> dict:
        """Return the fields of the other model's weights and their storage, if it is loaded by name."""
        from outliers.quantization.peers import other_fields

        return other_fields(self.other, model) if model is not None and isinstance(self.other, str) else {}

    def check(self, model: "PreTrainedModel") -> None:
        """Raise UserError if the other model differs in architecture, sizes or vocabulary from `model`, which may
        lack values."""
        from outliers.quantization.peers import check_alike

        check_alike(model, self.other)

    def places(self, model: "PreTrainedModel", field: str) -> dict[str | int, str]:
        """Return every role or layer (field) with projections, each with its place for `only` and `skip`."""
        from outliers.models.anatomy import projections

        return dict(map(PLACES_BY_FIELD[field], projections(model)))

    @contextmanager
    def on(self, model: "PreTrainedModel", _layer: int | None = None) -> "Iterator[PreTrainedModel]":
        from outliers.quantization.peers import other_model, with_projections_of

        with other_model(self.other, model) as other:
            yield with_projections_of(other, model, self.only, self.skip) if self.only or self.skip else other
