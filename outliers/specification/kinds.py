"""The kinds of specifications, validated."""

import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializationInfo,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outliers.criterion import ALPHA, check_share, check_threshold
from outliers.errors import UserError, shown, unknown_name
from outliers.models.names import full_name
from outliers.quantization.cache_formats import Formats
from outliers.quantization.plans.plan import expanded
from outliers.quantization.schemes import BASELINE, TABLE1, Scheme, by_weights, get_scheme, remedied
from outliers.terminal.amounts import parse_bytes
from outliers.terminal.printing import is_line
from outliers.variants.peer import PEER

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that file systems take
ATTENTION_16 = "16-bit"  # attention as it is
ATTENTION = re.compile(r"16-bit|int8(\+(?P<percent>[0-9]{1,2}(\.[0-9]{1,6})?)%)?")
UNKNOWN = "unknown_name"  # the kind of a mistake whose message says all
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
    is_object = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Iterator))
    return value if is_object else _line(as_string(os.fspath(value) if isinstance(value, os.PathLike) else value))


def _dump_text(value, info: SerializationInfo):
    """In JSON one's own text is what rows call it."""
    return value if info.mode != "json" or isinstance(value, str) else text_label(value)


def text_label(text) -> str:
    """The label of a text in rows: the name of a file without its folder, for the hash of its tokens tells files apart;
    or what kind of object it is."""
    if isinstance(text, (str, os.PathLike)):
        return os.path.basename(text)
    from outliers.text.given import text_name  # which imports torch

    return text_name(text)


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


def _feature(value):
    """A number of a feature; not a word, which pydantic calls no valid integer."""
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]{1,40}", value):
        raise ValueError("expected the numbers of features, such as 3,17; without them, those of a trace are taken")
    return _number(value)


def _by(check: Callable[[str, Any], float], value: Any) -> float:
    """A value as a check of another room leaves it, whose message is that of the field."""
    try:
        return check("it", value)
    except UserError as error:
        raise ValueError(str(error).partition("; ")[2]) from None


def _scheme(value: object, others: tuple[str, ...]) -> str | Scheme:
    """A scheme, or the name of one that there is; also `others`, which are not ours."""
    if isinstance(value, Scheme) or value in others:
        return value
    if not isinstance(value, str):
        raise ValueError("expected the name of a scheme, or a Scheme")
    with saying_all():
        try:
            return get_scheme(_line(value)) and value
        except UserError:
            from outliers.variants.written import variant

            read = variant(value)  # raises the same of a scheme
        do = f"`python -m outliers.measure --variant '{read.name}'`"
        raise UserError(f"'{value}' is a variant, not a scheme; use {do}")


def _cache(value: str) -> str:
    """The writing of a cache, as its variant is called."""
    with saying_all():
        return str(Formats.read(value))


def _skip(places: list[str]) -> list[str]:
    """Places, with those of a plan in the place of `@FILE`."""
    with saying_all():
        return list(expanded(places))


def _of_different_names(schemes: list[str | Scheme]) -> list[str | Scheme]:
    names = [scheme.name if isinstance(scheme, Scheme) else scheme for scheme in schemes]
    if len(set(names)) < len(names):
        raise ValueError("expected schemes of different names")
    return schemes


def _attention(value: str) -> str:
    if not ATTENTION.fullmatch(value):
        raise ValueError("expected 16-bit, int8, or int8+2% for a share of its products in 16 bits")
    return value


def _share(attention: str) -> str:
    """The remedy of attention in int8 as the name of a scheme has it."""
    if attention == ATTENTION_16:
        return ""
    percent = ATTENTION.fullmatch(attention)["percent"]
    return "attention" if percent is None else f"attention={float(percent) / 100:.12g}"


def _remedied(scheme: str | Scheme, written: str) -> str | Scheme:
    """A scheme with what is written behind its name; another library's as it is."""
    if scheme == PEER or not written:
        return scheme
    changed = remedied(get_scheme(scheme), written)
    return changed.name if isinstance(scheme, str) else changed


@contextmanager
def saying_all() -> Iterator[None]:
    """Let a UserError within be the mistake of a field, whose message says all."""
    try:
        yield
    except UserError as error:
        raise PydanticCustomError(UNKNOWN, "{message}", {"message": str(error)}) from None


def _one_scheme(*others: str):
    """A scheme, by name or as it is; also `others`, which are not ours."""
    written = PlainSerializer(lambda scheme: scheme if isinstance(scheme, str) else repr(scheme))
    check = PlainValidator(partial(_scheme, others=others), json_schema_input_type=str)
    return Annotated[str | Scheme, check, written]


def _schemes(*others: str):
    return Annotated[list[_one_scheme(*others)], Split, Field(min_length=1), Once, AfterValidator(_of_different_names)]


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
OneScheme = _one_scheme()
Schemes = _schemes()
SchemesAndPeer = _schemes(PEER)
Skip = Annotated[list[Line], Split, AfterValidator(_skip), Once]
Attentions = Annotated[list[Annotated[str, AfterValidator(_attention)]], Split, Field(min_length=1), Once]
Caches = Annotated[list[Annotated[Line, AfterValidator(_cache)]], Split, Once]
Tokens = _whole(10**7, ge=2)  # of a sequence
Count = _whole(10**6)
Repeats = _whole(10**4)
Seed = _whole(2**32 - 1, ge=0)
Batch = _whole(10**5)
Batches = Annotated[list[Batch], Split, Field(min_length=1), Once]
Features = Annotated[list[Annotated[int, BeforeValidator(_feature)]], Split, Field(min_length=1), Once]
Positions = Annotated[list[_whole(10**7, ge=0)], Split, Once]
Finite = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Share = BeforeValidator(partial(_by, check_share), json_schema_input_type=str)
Cost = Annotated[float, Share, Field(gt=0, le=100, allow_inf_nan=False)]
Threshold = Annotated[float, BeforeValidator(_number), AfterValidator(partial(_by, check_threshold))]
# A model dimension d, of which a layer has 4 d outputs, or features and outputs as "576x1536".
Shape = _whole(LARGEST_LAYER) | Annotated[str, Field(pattern=r"^[0-9]{1,9}x[0-9]{1,9}$"), AfterValidator(_shape)]
Shapes = Annotated[list[Shape], Split, Field(min_length=1), Once]

# What fields of several kinds are; descriptions of fields are the help of their options.
MODEL = "Hub id, local folder or GGUF file, pocket/NAME, or smollm2-135m."
TEXT = "sample, c4, wikitext2, or a .txt, .txt.gz or .jsonl file; for vision models a folder of pictures."
NONE = "by default none."  # with which descriptions of fields end that take the word, too
TRANSFORM = f"Remedies for all schemes, such as hadamard or tokens=20+smoothing=0.75; {NONE}"
ATTENTIONS = "Attention of all schemes: 16-bit, int8, int8+2% for a share of it in 16 bits, or several."
BEGIN = "Begin each block with the model's own first token, as Gemma needs it."
BY_DOCUMENT = "Read what a block holds of each document by itself: positions and attention begin anew with it."
OBJECTIVE = (
    "Of encoder-decoders: span corruption, by default where the tokenizer has sentinels for it, or the second half of "
    "a block (prefix). Of masked language models: each token, masked by itself, for pseudo-perplexity."
)
OUTLIER = "Magnitude from which a value is an outlier."
SKIP = f"Exact projections: roles such as ffn_out, layers.N, patterns such as *.down_proj, @plan.yaml; {NONE}"
DRAWS = "Number of measurements with embeddings perturbed by 1e-6, for mean ± scatter by rounding."
DATA = (
    "Folder with lambada_test.jsonl, piqa_valid.jsonl and piqa_valid_labels.lst, for more examples of the local tasks "
    "than the embedded ones."
)
POSITIONS = "Further positions at which contributions are given, beside their means and the first position."
PLACES = "Readers without the features, such as q, layers.9:12.k or norm; by default all, alone and together."
NEURONS = "Neurons listed per layer, those with the largest contributions; the others are one writer."
CONTROLS = "Draws of random features, as controls."
SEED = "Seed of random draws."
INSTEAD = f"Better schemes to try before a projection stays exact, such as llm.int8,w8a8; {NONE}"
EXPORT = "Formats of other libraries in which to write the plan too, such as compressed-tensors or torchao."
LIMIT = "Examples of each task, from its start; by default all."
AGAINST = "Other models to compare with, such as a quantized checkpoint; instead of schemes, as with caches."
REVISION = "Branch, tag or commit on the hub, or a checkpoint's folder in a local folder."

PICTURES = "pictures"  # the protocol of vision models
# In the protocol of a row: each block begins with the model's own first token; each document passes by itself.
BOS, DOCUMENTS = "+bos", "+documents"


class FieldError(UserError):
    """A field that is unknown, missing or out of range; path: where it is, empty for what is missing at the top."""

    path: tuple = ()


class Checked(BaseModel):
    """A model of pydantic whose mistakes are those of a user.

    Raises:
        FieldError: a field is unknown, missing or out of range.
    """

    def __init__(self, **fields: object) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise field_error(error, type(self)) from None


class Named(Checked):
    """A name, which is also a folder in `results`, and the table or figure of the paper that it is for."""

    model_config = ConfigDict(extra="forbid", defer_build=True)  # until one is made: the help of a command needs none

    # `module:function`, or a method, that says which cells it asks for, as a list of `outliers.subjects.cell.Plan`.
    plans: ClassVar[str | Callable | None] = None
    experiment: ClassVar[str | None] = None  # what its rows say that they are of, where that is not its name
    # What shows its rows, as `plans`, where no table says so; imported when a command has run. of_folder: whether it
    # takes the specification and the folder before the rows, because the folder holds more, or the tokenizer is needed.
    section: ClassVar[str | Callable | None] = None
    of_folder: ClassVar[bool] = False

    name: Name
    shows: Line | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_none(cls, fields: dict) -> dict:
        """With the default in the place of the word none, where the help has it."""
        empty = {name for name, field in cls.model_fields.items() if (field.description or "").endswith(NONE)}
        return {name: value for name, value in fields.items() if not (name in empty and value in ("none", ["none"]))}

    @property
    def folder(self) -> Path:
        """The folder of its results unless the user says otherwise."""
        return Path("results") / self.name


class Machine(Named):
    """The machine on which something runs."""

    device: Line = Field(default="cpu", description="cpu, cuda, cuda:N, or auto: layers spread over all GPUs.")
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="Type of weights and activations."
    )


class Spread(Machine):
    """The engine of cells: in this process one after the other, or as tasks of a Ray cluster."""

    engine: Literal["local", "ray"] = Field(
        default="local", description="This process, or a Ray cluster (at RAY_ADDRESS, or of this machine)."
    )


class Settings(Spread):
    """The settings of a measurement over a text, beside its model."""

    text: Text = Field(default="sample", description=TEXT)
    block: Tokens = Field(default=256, description="Tokens per block.")
    blocks: Count = Field(default=32, description="Number of blocks, from the start of the text.")
    bos: bool = Field(default=False, description=BEGIN)
    documents: bool = Field(default=False, description=BY_DOCUMENT)
    mask_seed: Seed = Field(default=0, description="Seed of the choice of masked tokens or spans.")
    mask_seeds: Repeats = Field(default=1, description="Number of mask seeds, from that one on, for mean ± scatter.")
    objective: Literal["span", "prefix", "each"] | None = Field(default=None, description=OBJECTIVE)
    alpha: Threshold = Field(default=ALPHA, description=OUTLIER)
    stream: bool = Field(default=False, description="Load one layer at a time: for models larger than memory.")
    memory: Annotated[_whole(10**18) | None, BeforeValidator(parse_bytes, json_schema_input_type=str)] = Field(
        default=None,
        description="With --stream: memory for hidden states, such as 4GB; more are kept in a file. By default "
        "no limit.",
    )

    @property
    def sequences(self) -> int:
        """The number of sequences that pass a model."""
        return self.blocks * (self.block - 2 if self.objective == "each" else self.mask_seeds)


class Calibrated(Settings):
    """A measurement of schemes of which some have to know how large the inputs are."""

    calibration: Text | None = Field(
        default=None, description="Text to calibrate on; by default the blocks after the measured ones."
    )
    calibration_blocks: Count = Field(default=4, description="Number of blocks of it.")


class OfSchemes(Named):
    """A measurement of models under schemes, with what all schemes get; their names say it then."""

    schemes: Schemes
    transform: Line | None = Field(default=None, description=TRANSFORM)
    attention: Attentions = Field(default=[ATTENTION_16], description=ATTENTIONS)
    skip: Skip = Field(default=[], description=SKIP)
    revision: Line | None = Field(default=None, description=REVISION)

    @model_validator(mode="after")
    def _into_schemes(self):
        if self.transform is None and self.attention == [ATTENTION_16]:
            return self
        with saying_all():
            schemes = self.schemes
            if self.transform is not None:
                changed = [scheme for scheme in schemes if scheme != PEER and get_scheme(scheme).quantizes_projections]
                if not changed:
                    raise UserError(
                        f"transform '{self.transform}' with schemes that quantize nothing; expected one that does"
                    )
                schemes = [_remedied(scheme, self.transform) if scheme in changed else scheme for scheme in schemes]
            schemes = [_remedied(scheme, written) for scheme in schemes for written in map(_share, self.attention)]
        self.schemes, self.transform, self.attention = list(dict.fromkeys(schemes)), None, [ATTENTION_16]
        return self


class Experiment(OfSchemes, Calibrated):
    """A sweep: every model under every scheme on one text.

    Rounding scatters the results, which `draws` shows. A scheme has its own threshold unless `alpha` is given.

    Example:
        >>> spec = outliers.Experiment(models=["pocket/gpt2-0.1m"], schemes=["fp32", "absmax"], block=64, blocks=2)
        >>> len(outliers.run(spec))
        2
    """

    plans = "outliers.presets.sweep:sweep_plans"

    name: Name = "sweep"
    models: Names = Field(description=MODEL)
    schemes: Schemes = Field(
        default=TABLE1,
        description="fp32 (no quantization), and any of docs/schemes.md, such as w4a8-g64 or mxfp4.",
    )
    draws: Repeats = Field(default=1, description=DRAWS)


class OfOneModel(Settings):
    """A measurement of one model."""

    model: Line = Field(description=MODEL)
    revision: Line | None = Field(default=None, description=REVISION)

    @property
    def folder(self) -> Path:
        """The folder of its results unless the user says otherwise."""
        name = full_name(self.model, self.revision).replace("/", "-")  # which a revision may have
        if len(name.encode()) > LONGEST_NAME:
            raise UserError(f"results of {shown(name)} have no folder of that name; choose one with --out")
        return super().folder / name


class OneModel(OfOneModel):
    """A trace of one model."""

    plans, experiment = "outliers.presets.emergence:trace_plans", "trace"
    of_folder = True

    name: Name = "trace"
    by_token: bool = Field(
        default=False, title="tokens", description="Find the tokens that carry the outlier features."
    )
    imatrix: bool = Field(default=False, description="Also write imatrix.gguf for llama-quantize.")
    masks: bool = Field(
        default=False, description="Also write masks of outlier features and tokens; takes another pass."
    )


class Ablation(OfOneModel):
    """An ablation of one model, by the arguments of `outliers.ablate`."""

    plans, experiment = "outliers.presets.ablate:ablation_plans", "ablate"

    name: Name = "ablate"
    scheme: OneScheme = Field(default=BASELINE, description="Scheme of the model.")
    skip: Skip = Field(default=[], description=SKIP)
    features: Features | None = Field(
        default=None, description="Features, such as 3,17; by default the outlier features of a trace."
    )
    methods: Names = Field(default=["zero"], description="Ways to remove them: zero, mean, shuffle, or several.")
    where: Names = Field(
        default=["attn_in"], description="Inputs without them for perplexity: attn_in, ffn_in, or both."
    )
    controls: int = Field(default=10, description="Draws of random features, as controls.")
    seed: int = Field(default=0, description="Seed of the draws and of shuffling.")


class Account(OfOneModel):
    """The writers and readers of features of one model, by the arguments of `outliers.origins` and `readers`."""

    plans, experiment = "outliers.presets.origins:origins_plans", "origins"

    name: Name = "origins"
    features: Features | None = Field(
        default=None, description="Features, such as 3,17; by default the outlier features of a trace, and the largest."
    )
    positions: Positions = Field(default=[], description=POSITIONS)
    neurons: Count = Field(default=3, description=NEURONS)
    by: Names = Field(
        default=["writers", "readers", "weights", "massive", "keys"],
        description="Parts of the account: writers and readers of features, single weights, massive activations, keys.",
    )
    places: Names | None = Field(default=None, description=PLACES)
    controls: _whole(10**4, ge=2) = Field(default=5, description=CONTROLS)
    seed: int = Field(default=0, description=SEED, ge=0, lt=2**63)
    blocks: Count = Field(default=8, description="Number of blocks, from the start of the text.")


DAMAGE_BY = ("error", "role", "layer", "stack", "head", "model")  # parts of the damage, which cost differently


class Damage(OfSchemes, OfOneModel, Calibrated):
    """The damage of schemes to one model, by the arguments of `outliers.damage`."""

    plans = "outliers.presets.damage:damage_plans"
    of_folder = True

    name: Name = "damage"
    schemes: Schemes = Field(default=["absmax", "llm.int8"], description="Schemes whose damage is measured.")
    caches: Caches = Field(default=[], description="Caches such as kv=int4; instead of schemes unless some are given.")
    against: Names = Field(default=[], description=AGAINST)
    by: Names = Field(
        default=list(DAMAGE_BY),
        description="Parts of the damage: errors of projections, perplexity by role, layer, stack or head of a "
        "cache, whole model.",
    )
    draws: Repeats = Field(default=1, description=DRAWS)


class Planning(OfOneModel, Calibrated):
    """The projections of one model that stay exact under a scheme, so that it costs at most so much."""

    plans, experiment = "outliers.presets.plan:planning_plans", "plan"
    of_folder = True

    name: Name = "plan"
    scheme: OneScheme = Field(default="absmax", description="Scheme of all other projections.")
    cost: Cost = Field(default=0.05, description="Largest increase of perplexity, such as 5%.")
    by: Literal["count", "parameters"] = Field(default="count", description="Size of the plan to minimize.")
    instead: Annotated[list[OneScheme], Split, Once] = Field(default=[], description=INSTEAD)
    block: Tokens = Field(default=512, description="Tokens per block.")
    blocks: Count = Field(default=4, description="Blocks of the search, from the start of the text.")
    confirm: Count = Field(default=8, description="Blocks after them, on which the plan is confirmed.")
    draws: _whole(10**4, ge=2) = Field(default=4, description=DRAWS)  # which one alone would not scatter
    export: Annotated[list[Line], Split, Once] = Field(default=[], description=EXPORT)


class Emergence(Settings):
    """Outlier features along a family of models, or along revisions of one.

    Example:
        >>> rows = outliers.run(outliers.Emergence(models=["pocket/gpt2-0.1m"], block=64, blocks=2))
    """

    plans, experiment = "outliers.presets.emergence:emergence_plans", "emergence"

    name: Name = "emergence"
    models: Names = Field(description=MODEL)
    revisions: Names | None = Field(
        default=None, description="Revisions of one model, such as step1000,step8000; or folders in its own."
    )


class Hardware(BaseModel):
    """Some equal GPUs; gigabytes: of one of them, GiB. owner: who has such hardware."""

    model_config = ConfigDict(extra="forbid")

    hardware: Line
    owner: Line | None = None
    gpus: Count = 1
    gigabytes: Annotated[Finite, Field(gt=0)]


def _gpus(value):
    """Hardware that is given as 8x24 or 24: how many GPUs, and the GiB of each; what is no text as it is."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(?:([0-9]{1,9})x)?([0-9]{1,9}(?:\.[0-9]+)?)", value)
    if not match:
        raise UserError(f"hardware '{value}'; expected a number of GPUs and the GiB of each, such as --gpu 8x24")
    count = int(match[1] or 1)
    return {"hardware": f"{count}x GPU", "gpus": count, "gigabytes": float(match[2])}


class Memory(Named):
    """The memory that models need at inference, from their configurations, and the largest that some hardware holds.

    With these defaults the paper's Table 3 comes out as published; so it does with a headroom of 0.65 to 1.08 GiB at a
    context of 128, 0.57 to 0.92 at 256, 0.49 to 0.76 at 384, 0.41 to 0.56 at 512, 0.32 to 0.34 at 640; never at 768.
    """

    plans = "outliers.presets.memory:memory_plans"

    name: Name = "memory"
    models: Names = Field(description=MODEL)
    candidates: Names | None = Field(
        default=None, description="Candidates for the largest model that fits; by default all."
    )
    hardware: Annotated[list[Annotated[Hardware, BeforeValidator(_gpus)]], Split, Field(min_length=1)] = Field(
        default=[], title="gpus", description="Hardware: 8x24 for eight GPUs of 24 GiB, 24 for one."
    )
    context: Tokens = Field(default=256, description="Tokens per sequence, at most the model's context.")
    batch: Batch = Field(default=1, description="Batch size.")
    headroom: Annotated[Finite, Field(ge=0)] = Field(default=0.75, description="GiB of each GPU left free.")


class LinearLayers(Machine):
    """The first feed-forward layer of models of some dimensions: d features, 4 d outputs, or as it says (Table 5).

    tokens: rows of the input. seconds: how long a layer is timed at least. dtype: what 16 bits are.
    """

    plans = "outliers.presets.linear_layers:linear_layer_plans"

    name: Name = "linear-layers"
    dtype: Literal["float16", "bfloat16"] = "bfloat16"
    dimensions: Shapes
    tokens: Count = 512
    seconds: Annotated[Finite, Field(gt=0, le=86400)] = 3.0


class Latency(OfSchemes, Machine):
    """Time a generated token with a KV cache; prompts are the first tokens of a text."""

    plans = "outliers.presets.latency:latency_plans"

    name: Name = "latency"
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="bfloat16", description="Type of all that is not quantized."
    )
    models: Names = Field(description=MODEL)
    schemes: SchemesAndPeer = Field(
        default=["fp32", "llm.int8"],
        description="Schemes as for a sweep, fp32 (no quantization), or bitsandbytes for the layers of that library.",
    )
    text: Text = Field(default="sample", description=TEXT)
    bos: bool = Field(default=False, description=BEGIN)
    alpha: Threshold = Field(default=ALPHA, description=OUTLIER)
    batches: Batches = Field(default=[1, 8, 32], description="Batch size.")
    prompt: Tokens = Field(default=128, description="Tokens of the prompt.")
    tokens: Count = Field(default=32, description="Timed decode steps of a generation, after the first token.")
    repeats: _whole(10**4, ge=2) = Field(default=3, description="Timed generations.")


class ZeroShot(OfSchemes, Spread):
    """Zero-shot accuracy by the language model evaluation harness (Figure 1)."""

    plans = "outliers.presets.zeroshot:zeroshot_plans"

    name: Name = "zeroshot"
    models: Names = Field(description=MODEL)
    schemes: Schemes = Field(
        default=["fp32", "absmax-vector", "llm.int8"], description="Schemes; fp32 is not quantized."
    )
    tasks: Names = Field(
        default=["hellaswag", "piqa", "winogrande", "lambada_openai"],
        description="Tasks of lm-eval; or lambada-local and piqa-local, with 200 embedded examples each.",
    )
    data: Line | None = Field(default=None, description=DATA)
    limit: Count | None = Field(default=None, description=LIMIT)
    alpha: Threshold = Field(default=ALPHA, description=OUTLIER)


def resolved(place: Any) -> Any:
    """The object that is named as `module:object`, which may name another one; or the object itself."""
    while isinstance(place, str):
        place = pkgutil.resolve_name(place)
    return place


def alpha_of_schemes(spec: Experiment | Ablation | Damage | Latency | ZeroShot) -> float | None:
    """The threshold that replaces that of every scheme: alpha, where it is given."""
    return spec.alpha if "alpha" in spec.model_fields_set else None


def schemes_of(spec: Experiment | Damage | Latency | ZeroShot) -> list[Scheme]:
    """The schemes of a specification, but for that of others; those that share weight codes are side by side."""
    alpha = alpha_of_schemes(spec)
    return by_weights(get_scheme(scheme, alpha) for scheme in spec.schemes if scheme != PEER)


def layer_shape(dimension: int | str) -> tuple[int, int]:
    """Features and outputs of a layer of `LinearLayers`."""
    if isinstance(dimension, int):
        return dimension, 4 * dimension
    features, outputs = map(int, dimension.split("x"))
    return features, outputs


def field_error(error: ValidationError, kind: type[BaseModel]) -> FieldError:
    """The first mistake of some fields in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = tuple(part for part in first["loc"] if "[" not in str(part))  # but for the types of a union
    field = ".".join(map(str, path))
    if first["type"] == "extra_forbidden":
        *place, name = path
        of = f"field of {'.'.join(map(str, place))}" if place else "field"
        mistake = FieldError(str(unknown_name(of, str(name), _kind_at(kind, place).model_fields)))
    elif first["type"] == UNKNOWN:
        mistake = FieldError(first["msg"])
    else:
        message = first["msg"].removeprefix("Value error, ")
        mistake = FieldError(f"field '{field}': {message}, got {shown(first['input'])}")
    mistake.path = path[:-1] if first["type"] == "missing" else path
    return mistake


def _kind_at(kind: type[BaseModel], path: list) -> type[BaseModel]:
    """The kind of the specification at a path, such as of one of its runs."""
    for part in path:
        if part in kind.model_fields:
            kind = next(_kinds_in(kind.model_fields[part].annotation), kind)
    return kind


def _kinds_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The specifications that values of a type are, or hold."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _kinds_in(part)
