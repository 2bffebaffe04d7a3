"""Types of the fields of experiments and metrics: what each accepts, and the help of its option."""

import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from outliers.criterion import check_share, check_threshold
from outliers.errors import UserError, mistake_in, unknown_name
from outliers.models.names import normalized_name
from outliers.quantization.plans.plan import expanded
from outliers.quantization.schemes import Scheme, get_scheme, is_known
from outliers.terminal.printing import is_line
from outliers.variants.term import PEER

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that file systems take
UNKNOWN = "unknown_name"  # type of an error whose message is complete
OF_A_MODEL, OF_A_FILE = "name of a model", "name of a text, a file or a folder"  # marks of fields
LARGEST_LAYER = 131_072  # features: the sum of so many products of codes fits int32


def _check_line(value: str) -> str:
    if not value or not is_line(value):
        raise ValueError("expected text in one line")
    if len(value.encode()) > LONGEST_PATH or max(len(part.encode()) for part in value.split("/")) > LONGEST_NAME:
        raise ValueError(f"expected names of at most {LONGEST_NAME} bytes")
    return value


def _check_text(value, as_string: Callable[[object], str]):
    """Return the name of a text in one line, or a user's own text, as `outliers.load_text` takes it, unchanged.

    as_string: pydantic's check of a string.
    """
    is_object = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Iterator))
    return value if is_object else _check_line(as_string(os.fspath(value) if isinstance(value, os.PathLike) else value))


def text_label(text) -> str:
    """Return the label of a text in rows: the file name without its folder, or the kind of object.

    Files of the same name are told apart by the hash of their tokens.
    """
    if isinstance(text, (str, os.PathLike)):
        return os.path.basename(text)
    from outliers.text.given import text_name  # which imports torch

    return text_name(text)


def _check_name(value: str) -> str:
    if not re.fullmatch(r"\w[\w.@-]*(/\w[\w.@-]*)*", _check_line(value)):
        raise ValueError("expected letters, digits and any of _ . @ -, and / between folders")
    return value


def _number(value):
    """Return a value unchanged; raise ValueError for true and false, which would count as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _feature(value):
    """Return the number of a feature; raise ValueError for a word, with a better message than pydantic's."""
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]{1,40}", value):
        raise ValueError("expected the numbers of features, such as 3,17; without them, those of a trace are taken")
    return _number(value)


def _by(check: Callable[[str, Any], float], value: Any) -> float:
    """Return the result of another module's check of a value, with its UserError turned into a ValueError."""
    try:
        return check("it", value)
    except UserError as error:
        raise ValueError(str(error).partition("; ")[2]) from None


def _scheme(value: object) -> Scheme:
    if isinstance(value, Scheme):
        return value
    if not isinstance(value, str):
        raise ValueError("expected the name of a scheme, or a Scheme")
    with saying_all():
        try:
            return get_scheme(_check_line(value))
        except UserError:
            from outliers.variants.written import variant

            parsed = variant(value)  # raises the same error for a scheme
        command = f"`python -m outliers.measure --variant '{parsed.name}'`"
        raise UserError(f"'{value}' is a variant, not a scheme; use {command}")


def _skip(places: list[str]) -> list[str]:
    """Return places, with `@FILE` replaced by the places of that plan."""
    with saying_all():
        return list(expanded(places))


def _write_scheme(scheme: Scheme | str) -> str:
    """Return the name of a scheme, or all of its fields if no table has it."""
    if scheme == PEER:
        return PEER
    return scheme.name if is_known(scheme) else repr(scheme)


def _of_different_names(schemes: list[Scheme | str]) -> list[Scheme | str]:
    if len({getattr(scheme, "name", scheme) for scheme in schemes}) < len(schemes):
        raise ValueError("expected schemes of different names")
    return schemes


@contextmanager
def saying_all() -> Iterator[None]:
    """Turn a UserError within this context into the error of a field, with the whole message kept."""
    try:
        yield
    except UserError as error:
        raise PydanticCustomError(UNKNOWN, "{message}", {"message": str(error)}) from None


def _check_shape(value: str) -> str:
    if not re.fullmatch("[0-9]{1,9}x[0-9]{1,9}", value):
        raise ValueError("expected a number of features, or features and outputs such as 576x1536")
    if not all(0 < int(size) <= LARGEST_LAYER for size in value.split("x")):
        raise ValueError(f"expected features and outputs from 1 to {LARGEST_LAYER}")
    return value


def whole(most: int, **least: int):
    """Return the type of a whole number up to a limit, beyond which a run would never end or ask for all memory.

    least: a bound of pydantic's `Field`, such as `ge=0`; by default `gt=0`.
    """
    return Annotated[int, BeforeValidator(_number), Field(le=most, **(least or {"gt": 0}))]


# A list may be given as "a,b", as on the command line; repeated entries count once.
Split = BeforeValidator(lambda value: [part for part in value.split(",") if part] if isinstance(value, str) else value)
Unique = AfterValidator(lambda entries: list(dict.fromkeys(entries)))
Line = Annotated[str, AfterValidator(_check_line)]
Name = Annotated[str, AfterValidator(_check_name)]
Names = Annotated[list[Line], Split, Field(min_length=1), Unique]
# Names are accepted, and values are schemes. Defaults are names, as the help shows them, so that fields validate them.
OneScheme = Annotated[str | Scheme, PlainValidator(_scheme, json_schema_input_type=str), PlainSerializer(_write_scheme)]
_PEER = WrapValidator(lambda value, check: PEER if str(value).lower() == PEER else check(value))
_SchemeOrPeer = Annotated[OneScheme, _PEER]
_OfSchemes = (Split, Field(min_length=1), Unique, AfterValidator(_of_different_names))
Schemes = Annotated[list[OneScheme], *_OfSchemes]
SchemesAndPeer = Annotated[list[_SchemeOrPeer], *_OfSchemes]  # also the layers of another library
Tokens = whole(10**7, ge=2)  # of a sequence
Count = whole(10**6)
Repeats = whole(10**4)
Several = whole(10**4, ge=2)  # one alone has no scatter
Seed = whole(2**32 - 1, ge=0)
Batch = whole(10**5)
Features = Annotated[list[Annotated[int, BeforeValidator(_feature)]], Split, Field(min_length=1), Unique]
Finite = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Share = BeforeValidator(partial(_by, check_share), json_schema_input_type=str)
# A model dimension d, of which a layer has 4 d outputs, or features and outputs as "576x1536".
LayerShape = whole(LARGEST_LAYER) | Annotated[str, AfterValidator(_check_shape)]
Shapes = Annotated[list[LayerShape], Split, Field(min_length=1), Unique]

# Fields of several kinds and metrics, with the help of their options.
NONE = "by default none."  # end of the description of an option that accepts the word none, too
TEXT = "sample, c4, wikitext2, or a .txt, .txt.gz or .jsonl file; for vision models a folder of pictures."
MODEL = "Hub id, local folder or GGUF file, pocket/NAME, or smollm2-135m."
Model = Annotated[Line, AfterValidator(normalized_name), OF_A_MODEL, Field(description=MODEL)]
_ModelsAsCalled = AfterValidator(lambda names: list(dict.fromkeys(map(normalized_name, names))))
Models = Annotated[Names, _ModelsAsCalled, OF_A_MODEL, Field(description=MODEL)]
File = Annotated[Line, OF_A_FILE]
Revision = Annotated[
    Line | None, Field(description="Branch, tag or commit on the hub, or a checkpoint's folder in a local folder.")
]
# In JSON, a user's own text is represented by its label.
_LABEL = PlainSerializer(lambda text, info: text_label(text) if info.mode == "json" and type(text) is not str else text)
Text = Annotated[str, OF_A_FILE, WrapValidator(_check_text), _LABEL, Field(description=TEXT)]
Begin = Annotated[bool, Field(description="Begin each block with the model's own first token, as Gemma needs it.")]
Threshold = Annotated[
    float,
    BeforeValidator(_number),
    AfterValidator(partial(_by, check_threshold)),
    Field(description="Magnitude from which a value is an outlier."),
]
SKIP = f"Exact projections: roles such as ffn_out, layers.N, patterns such as *.down_proj, @plan.yaml; {NONE}"
Skip = Annotated[list[Line], Split, AfterValidator(_skip), Unique, Field(description=SKIP)]
DRAWS = "Number of measurements with embeddings perturbed by 1e-6, for mean ± scatter by rounding."
Draws = Annotated[Repeats, Field(description=DRAWS)]
Positions = Annotated[
    list[whole(10**7, ge=0)],
    Split,
    Unique,
    Field(description="Further positions at which contributions are given, beside their means and the first position."),
]
NEURONS = "Neurons listed per layer, those with the largest contributions; the others are one writer."
Neurons = Annotated[Count, Field(description=NEURONS)]
ExampleLimit = Annotated[Count | None, Field(description="Examples of each task, from its start; by default all.")]
DATA = (
    "Folder with lambada_test.jsonl, piqa_valid.jsonl and piqa_valid_labels.lst, for more examples of the local tasks "
    "than the embedded ones."
)
Data = Annotated[File | None, Field(description=DATA)]

# Suffixes of a row's protocol: each block begins with the model's first token; each document passes by itself.
BOS, DOCUMENTS = "+bos", "+documents"


class FieldError(UserError):
    """A field that is unknown, missing or out of range.

    path: names of fields and indices of lists that lead to the field; empty if one is missing at the top level.
    """

    path: tuple = ()


class Checked(BaseModel):
    """A pydantic model whose validation errors are errors of the user.

    Raises:
        FieldError: a field is unknown, missing or out of range.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)  # built on first use: the help of a command needs none

    def __init__(self, **fields: object) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise field_error(error, type(self)) from None


def resolved(place: Any) -> Any:
    """Return the object that a text `module:object` names, which may be such a text again, or the object itself."""
    while isinstance(place, str):
        place = pkgutil.resolve_name(place)
    return place


def field_error(error: ValidationError, kind: type[BaseModel]) -> FieldError:
    """Return the first error of a validation as a message of one line."""
    first = error.errors(include_url=False)[0]
    path = tuple(part for part in first["loc"] if "[" not in str(part))  # without the types of a union
    if first["type"] == "extra_forbidden":
        *place, name = path
        what = f"field of {'.'.join(map(str, place))}" if place else "field"
        mistake = FieldError(str(unknown_name(what, str(name), _class_at(kind, place).model_fields)))
    else:
        mistake = FieldError(first["msg"] if first["type"] == UNKNOWN else mistake_in(first))
    mistake.path = path[:-1] if first["type"] == "missing" else path
    mistake.field = ".".join(map(str, path))
    return mistake


def _class_at(kind: type[BaseModel], path: list) -> type[BaseModel]:
    """Return the pydantic class at a path in an experiment, such as that of one of its runs."""
    for part in path:
        if part in kind.model_fields:
            kind = next(_kinds_in(kind.model_fields[part].annotation), kind)
    return kind


def _kinds_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models in the annotation of a field."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _kinds_in(part)
