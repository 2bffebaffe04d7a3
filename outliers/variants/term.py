"""A term of a variant's name with features or a weight: `shuffle(3,17@attn_in/ffn_in,seed=1)`."""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from outliers.errors import UserError, unknown_name

PEER, AGAINST, PREFIX = "bitsandbytes", "against", "prefix"  # names of terms
PLUS = re.compile(r"\+(?![^()]*\))")  # joins terms; inside parentheses, + belongs to a number or a scheme's name
EXAMPLES = "zero(247), shuffle(3,17@ffn_in,seed=1), zero(model.layers.11.mlp.down_proj[507,1229]) or plant(3,factor=8)"
_PLACE = r"[\w.:]+"
_WRITTEN = re.compile(
    rf"(?P<name>[\w.-]+)\(((?P<features>[0-9]{{1,9}}(,[0-9]{{1,9}})*)(@(?P<places>{_PLACE}([/,]{_PLACE})*))?"
    r"|(?P<weight>[\w.]+)\[(?P<output>[0-9]{1,9}|:),(?P<input>[0-9]{1,9}|:)\]"
    rf"|(?P<alone>[A-Za-z]{_PLACE}(/{_PLACE})*))(?P<options>(,\w+=[^,=]+)*)\)"
)


class WeightEntry(NamedTuple):
    """The position of an entry of a weight; of a row or column if its output or input is None. path: of the weight's
    module in the model."""

    path: str
    output: int | None
    input: int | None

    def __str__(self) -> str:
        output, input = (":" if index is None else index for index in self[1:])
        return f"{self.path}[{output},{input}]"


class Term(NamedTuple):
    """A method, `name`, with either features and the places where they are read, or a weight, or places alone."""

    name: str
    features: tuple[int, ...] = ()
    places: tuple[str, ...] = ()
    options: Mapping[str, int | float] = MappingProxyType({})
    weight: WeightEntry | None = None

    @classmethod
    def read(cls, written: str) -> "Term":
        """Parse a term.

        Raises:
            UserError: the text is malformed, or an option is repeated or not a number.
        """
        match = _WRITTEN.fullmatch(written.replace(" ", ""))
        if match is None:
            raise UserError(f"'{written}' is malformed; expected a term such as {EXAMPLES}")
        pairs = [pair.split("=") for pair in match["options"].split(",")[1:]]
        options = {option: read_number(value, written) for option, value in pairs}
        if len(options) < len(pairs):
            raise UserError(f"'{written}' has an option twice; expected it once")
        if match["weight"]:
            place = (None if match[part] == ":" else int(match[part]) for part in ("output", "input"))
            return cls(match["name"], (), (), options, WeightEntry(match["weight"].removesuffix(".weight"), *place))
        if match["alone"]:
            return cls(match["name"], (), tuple(match["alone"].split("/")), options)
        places = match["places"].replace(",", "/").split("/") if match["places"] else ()
        return cls(match["name"], tuple(map(int, match["features"].split(","))), tuple(places), options)

    def check_options(self, known: Collection[str]) -> None:
        """Raise UserError if the term has another option."""
        for option in self.options:
            if option not in known:
                raise unknown_name(f"option of '{self.name}'", option, known)

    def __str__(self) -> str:
        places = "@" * bool(self.features) + "/".join(self.places) if self.places else ""
        options = "".join(f",{option}={write_number(value)}" for option, value in self.options.items())
        return f"{self.name}({self.weight or ','.join(map(str, self.features))}{places}{options})"


def read_number(value: str, written: str) -> int | float:
    """Parse a number in a term; raise UserError if it is not a number."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    raise UserError(f"'{written}' has '{value}' as a number; expected one such as 8 or 0.5") from None


def write_number(value: int | float) -> str:
    """Write a number with all its digits, −0 as 0, without the + of an exponent, because + joins terms."""
    return repr(value + 0).removesuffix(".0").replace("e+", "e")
