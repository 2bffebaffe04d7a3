"""What an experiment needs to know, validated."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
    WrapValidator,
)

from outliers.criterion import ALPHA, check_threshold
from outliers.errors import UserError, shown, unknown_name
from outliers.models.names import full_name
from outliers.quantization.schemes import SCHEMES, TABLE1, get_scheme
from outliers.terminal.amounts import parse_bytes
from outliers.terminal.printing import is_line

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that file systems take
LARGEST_LAYER = 131_072  # features: so many products of codes have a sum that int32 holds


def _line(value: str) -> str:
    """Text that can be a name or a path."""
    if not value or not is_line(value):
        raise ValueError("expected text in one line")
    if len(value.encode()) > LONGEST_PATH or max(len(part.encode()) for part in value.split("/")) > LONGEST_NAME:
        raise ValueError(f"expected names of at most {LONGEST_NAME} bytes")
    return value


def _text(value, as_string: Callable[[object], str]):
    """A text that is named in one line; or, from Python, one's own, as `outliers.load_text` takes it, whole."""
    own = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Iterator))
    return value if own else _line(as_string(os.fspath(value) if isinstance(value, os.PathLike) else value))


def _dump_text(value, info: SerializationInfo):
    """In JSON one's own text is what rows call it."""
    if info.mode != "json" or isinstance(value, str):
        return value
    from outliers.text.blocks import text_name  # which imports torch

    return text_name(value)


def _name(value: str) -> str:
    """A folder in `results`, or one in another there."""
    if not re.fullmatch(r"\w[\w.@-]*(/\w[\w.@-]*)*", _line(value)):
        raise ValueError("expected letters, digits and any of _ . @ -, and / between folders")
    return value


def _number(value):
    """Anything but true and false, which count as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _threshold(value: float) -> float:
    try:
        return check_threshold("it", value)
    except UserError as error:
        raise ValueError(str(error).partition("; ")[2]) from None


def _shape(value: str) -> str:
    if not all(0 < int(size) <= LARGEST_LAYER for size in value.split("x")):
        raise ValueError(f"expected features and outputs from 1 to {LARGEST_LAYER}")
    return value


def _whole(most: int, **least: int):
    """A whole number up to a limit, beyond which a run would never end or ask for all memory."""
    return Annotated[int, BeforeValidator(_number), Field(le=most, **(least or {"gt": 0}))]


# A list may be given as "a,b", as on the command line; repeated entries count once.
Split = BeforeValidator(lambda value: [part for part in value.split(",") if part] if isinstance(value, str) else value)
Once = AfterValidator(lambda entries: list(dict.fromkeys(entries)))
Line = Annotated[str, AfterValidator(_line)]
Name = Annotated[str, AfterValidator(_name)]
Text = Annotated[str, WrapValidator(_text), PlainSerializer(_dump_text)]
Names = Annotated[list[Line], Split, Field(min_length=1), Once]
Tokens = _whole(10**7, ge=2)  # of a sequence
Count = _whole(10**6)
Repeats = _whole(10**4)
Batch = _whole(10**5)
Batches = Annotated[list[Batch], Split, Field(min_length=1), Once]
Features = Annotated[list[Annotated[int, BeforeValidator(_number)]], Split, Field(min_length=1), Once]
Finite = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Threshold = Annotated[float, BeforeValidator(_number), AfterValidator(_threshold)]
# A model dimension d, of which a layer has 4 d outputs, or features and outputs as "576x1536".
Shape = _whole(LARGEST_LAYER) | Annotated[str, Field(pattern=r"^[0-9]{1,9}x[0-9]{1,9}$"), AfterValidator(_shape)]
Shapes = Annotated[list[Shape], Split, Field(min_length=1), Once]

BOS = "+bos"  # in the protocol of a row: each block begins with the model's own first token


class FieldError(UserError):
    """A field that is unknown, missing or out of range; path: where it is, empty for what is missing at the top."""

    path: tuple = ()


class Named(BaseModel):
    """A name, which is also a folder in `results`, and the table or figure of the paper that it is for.

    Raises:
        FieldError: a field is unknown, missing or out of range.
    """

    model_config = ConfigDict(extra="forbid")

    name: Name
    shows: Line | None = None

    def __init__(self, **fields):
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _field_error(error, type(self)) from None

    @property
    def folder(self) -> Path:
        """Where its results go unless the user says otherwise."""
        return Path("results") / self.name


class Machine(Named):
    """Where something runs."""

    device: Line = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class Settings(Machine):
    """What a measurement over a text needs to know beside its model.

    block: tokens a block (T). blocks: how many (N). bos: whether each begins with the model's own first token. alpha:
    from which magnitude on a value is an outlier. stream: whether layers are read when their turn comes; memory: bytes
    of hidden states that are then held in memory, None for all of them. engine: where its cells run, in this process or
    as tasks of a Ray cluster.
    """

    text: Text = "sample"
    block: Tokens = 256
    blocks: Count = 32
    bos: bool = False
    alpha: Threshold = ALPHA
    stream: bool = False
    memory: Annotated[_whole(10**18) | None, BeforeValidator(parse_bytes)] = None
    engine: Literal["local", "ray"] = "local"


class Experiment(Settings):
    """A sweep: every model under every scheme on one text.

    draws: how many times each is measured, with embeddings changed by 1e-6; rounding scatters the results. A scheme has
    its own threshold unless `alpha` is given.
    """

    name: Name = "sweep"
    models: Names
    schemes: Names = TABLE1
    revision: Line | None = None
    draws: Repeats = 1


class OneModel(Settings):
    """A trace of one model."""

    name: Name = "trace"
    model: Line
    revision: Line | None = None

    @property
    def folder(self) -> Path:
        """Where its results go unless the user says otherwise."""
        name = full_name(self.model, self.revision).replace("/", "-")  # which a revision may have
        if len(name.encode()) > LONGEST_NAME:
            raise UserError(f"results of {shown(name)} have no folder of that name; choose one with --out")
        return super().folder / name


class Ablation(OneModel):
    """An ablation of one model; features: None for the outlier features that a trace finds.

    methods, where, controls and seed are the arguments of `outliers.ablate`.
    """

    name: Name = "ablate"
    features: Features | None = None
    methods: Names = ["zero"]
    where: Names = ["attn_in"]
    controls: int = 10
    seed: int = 0


class Emergence(Settings):
    """Outlier features along a family of models, or along revisions of one."""

    name: Name = "emergence"
    models: Names
    revisions: Names | None = None


class Hardware(BaseModel):
    """Some equal GPUs; gigabytes: of one of them, GiB. owner: who has such hardware."""

    model_config = ConfigDict(extra="forbid")

    hardware: Line
    owner: Line | None = None
    gpus: Count = 1
    gigabytes: Annotated[Finite, Field(gt=0)]


class Memory(Named):
    """What models need at inference, from their configurations, and the largest that some hardware holds.

    candidates: of the models those that the largest is one of, None for all; the largest of all is named beside it.
    context: tokens a sequence, at most the model's own. batch: sequences. headroom: GiB that each GPU keeps free. With
    these defaults the paper's Table 3 comes out as published; so it does with a headroom of 0.65 to 1.08 GiB at a
    context of 128, 0.57 to 0.92 at 256, 0.49 to 0.76 at 384, 0.41 to 0.56 at 512, 0.32 to 0.34 at 640; never at 768.
    """

    name: Name = "memory"
    models: Names
    candidates: Names | None = None
    hardware: list[Hardware] = []
    context: Tokens = 256
    batch: Batch = 1
    headroom: Annotated[Finite, Field(ge=0)] = 0.75


class LinearLayers(Machine):
    """The first feed-forward layer of models of some dimensions: d features, 4 d outputs, or as it says (Table 5).

    tokens: rows of the input. seconds: how long a layer is timed at least. dtype: what 16 bits are.
    """

    name: Name = "linear-layers"
    dtype: Literal["float16", "bfloat16"] = "bfloat16"
    dimensions: Shapes
    tokens: Count = 512
    seconds: Annotated[Finite, Field(gt=0, le=86400)] = 3.0


class Latency(Machine):
    """Time a generated token with a KV cache; prompts are the first tokens of a text, after the model's own with `bos`.

    schemes: those of a sweep, and "bitsandbytes" for the layers of that library. batches: sequences at once. prompt:
    tokens a sequence. tokens: how many are generated after the first. repeats: of the whole generation.
    """

    name: Name = "latency"
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    models: Names
    schemes: Names = ["fp32", "llm.int8"]
    revision: Line | None = None
    text: Text = "sample"
    bos: bool = False
    alpha: Threshold = ALPHA
    batches: Batches = [1, 8, 32]
    prompt: Tokens = 128
    tokens: Count = 32
    repeats: _whole(10**4, ge=2) = 3


class ZeroShot(Machine):
    """Zero-shot accuracy by the language model evaluation harness (Figure 1).

    tasks: of the harness, or of this project (`lambada-local`, `piqa-local`), which read the files in the folder
    `data`, or the examples that come along. limit: so many examples of each task; None for all.
    """

    name: Name = "zeroshot"
    models: Names
    schemes: Names = ["fp32", "absmax-vector", "llm.int8"]
    revision: Line | None = None
    tasks: Names = ["hellaswag", "piqa", "winogrande", "lambada_openai"]
    data: Line | None = None
    limit: Count | None = None
    alpha: Threshold = ALPHA


def alpha_of_schemes(spec: Experiment | Latency | ZeroShot) -> float | None:
    """What takes the place of every scheme's own threshold: alpha, where somebody asked for one."""
    return spec.alpha if "alpha" in spec.model_fields_set else None


def threshold_of(spec: Experiment | Latency | ZeroShot, scheme: str) -> float | None:
    """From which magnitude on a scheme of an experiment decomposes, as its rows say; None where it does not."""
    return get_scheme(scheme, alpha_of_schemes(spec)).outlier_threshold if scheme in SCHEMES else spec.alpha


def layer_shape(dimension: int | str) -> tuple[int, int]:
    """Features and outputs of a layer of `LinearLayers`."""
    if isinstance(dimension, int):
        return dimension, 4 * dimension
    features, outputs = map(int, dimension.split("x"))
    return features, outputs


def _field_error(error: ValidationError, kind: type[Named]) -> FieldError:
    """The first mistake of some fields in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    path, field = first["loc"], ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        found = FieldError(str(unknown_name("field", field, kind.model_fields)))
    else:
        message = first["msg"].removeprefix("Value error, ")
        found = FieldError(f"field '{field}': {message}, got {shown(first['input'])}")
    found.path = path[:-1] if first["type"] == "missing" else path
    return found
