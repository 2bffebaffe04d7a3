"""The 8-bit layers of bitsandbytes in the place of all projections, to compare with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outliers.criterion import ALPHA, check_threshold
from outliers.errors import UserError
from outliers.variants.term import read_number, write_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEER = "bitsandbytes"


@dataclass(frozen=True)
class Peer:
    """A model under LLM.int8() as bitsandbytes computes it; alpha: from which magnitude on a feature is an outlier."""

    alpha: float = ALPHA
    needs_trace = needs_calibration = False
    in_memory = True

    @classmethod
    def read(cls, terms: Sequence[str]) -> "Peer":
        """Its name, and `alpha=NUMBER`.

        Raises:
            UserError: there is something else.
        """
        option, _, value = "".join(terms[1:]).partition("=")
        if len(terms) > 2 or (terms[1:] and not (option == "alpha" and value)):
            raise UserError(f"'{'+'.join(terms)}'; expected {PEER}, or its threshold of outliers as in {PEER}+alpha=4")
        if not value:
            return cls()
        return cls(check_threshold(f"the threshold of {PEER}", read_number(value, "+".join(terms))))

    @property
    def name(self) -> str:
        """Its writing."""
        return PEER if self.alpha == ALPHA else f"{PEER}+alpha={write_number(self.alpha)}"

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        """As those of a scheme; the library computes with weights that it rebuilds from codes."""
        return {"scheme": PEER, "alpha": self.alpha, "kernels": PEER, "outlier_weights": "dequantized"}

    def first_layer(self, _model: "PreTrainedModel") -> int:
        """It changes all layers."""
        return 0

    def served(self, *place: str | None) -> "PreTrainedModel":
        """A model by its name, as `outliers.load_model` takes it, whose exact projections are gone."""
        from outliers.models.load import load_model
        from outliers.quantization.peers import with_bitsandbytes

        return with_bitsandbytes(load_model(*place), self.alpha)

    @contextmanager
    def on(self, model: "PreTrainedModel", _layer: int | None = None) -> "Iterator[PreTrainedModel]":
        """A model that shares what is no projection."""
        from outliers.quantization.peers import with_bitsandbytes

        yield with_bitsandbytes(model, self.alpha)
