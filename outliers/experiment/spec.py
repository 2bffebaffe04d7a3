"""What an experiment needs to know, validated."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)

from outliers.criterion import ALPHA
from outliers.experiment.amounts import parse_bytes
from outliers.quantization.schemes import TABLE1

# A list may be given as "a,b", as on the command line; repeated entries count once.
Split = BeforeValidator(lambda value: [part for part in value.split(",") if part] if isinstance(value, str) else value)
Once = AfterValidator(lambda entries: list(dict.fromkeys(entries)))
Names = Annotated[list[str], Split, Field(min_length=1), Once]
Numbers = Annotated[list[int], Split, Field(min_length=1), Once]
Counts = Annotated[list[PositiveInt], Split, Field(min_length=1), Once]
# A model dimension d, of which a layer has 4 d outputs, or features and outputs as "576x1536".
Shape = PositiveInt | Annotated[str, Field(pattern=r"^[1-9]\d*x[1-9]\d*$")]
Shapes = Annotated[list[Shape], Split, Field(min_length=1), Once]
Name = Annotated[str, Field(pattern=r"^\w[\w.@-]*(/\w[\w.@-]*)*$")]

BOS = "+bos"  # in the protocol of a row: each block begins with the model's own first token


class Named(BaseModel):
    """A name, which is also a folder in `results`, and the table or figure of the paper that it is for."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    shows: str | None = None

    @property
    def folder(self) -> Path:
        """Where its results go unless the user says otherwise."""
        return Path("results") / self.name


class Machine(Named):
    """Where something runs."""

    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class Settings(Machine):
    """What a measurement over a text needs to know beside its model.

    block: tokens a block (T). blocks: how many (N). bos: whether each begins with the model's own first token. alpha:
    from which magnitude on a value is an outlier. stream: whether layers are read when their turn comes; memory: bytes
    of hidden states that are then held in memory, None for all of them. engine: where its cells run, in this process or
    as tasks of a Ray cluster.
    """

    text: str = "sample"
    block: Annotated[int, Field(ge=2)] = 256
    blocks: PositiveInt = 32
    bos: bool = False
    alpha: PositiveFloat = ALPHA
    stream: bool = False
    memory: Annotated[PositiveInt | None, BeforeValidator(parse_bytes)] = None
    engine: Literal["local", "ray"] = "local"


class Experiment(Settings):
    """A sweep: every model under every scheme on one text.

    draws: how many times each is measured, with embeddings changed by 1e-6; rounding scatters the results.
    """

    name: Name = "sweep"
    models: Names
    schemes: Names = TABLE1
    revision: str | None = None
    draws: PositiveInt = 1


class OneModel(Settings):
    """A trace of one model."""

    name: Name = "trace"
    model: str
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """Where its results go unless the user says otherwise."""
        return super().folder / full_name(self.model, self.revision).replace("/", "-")  # which a revision may have


class Ablation(OneModel):
    """An ablation of one model; features: None for the outlier features that a trace finds.

    methods, where, controls and seed are the arguments of `outliers.ablate`.
    """

    name: Name = "ablate"
    features: Numbers | None = None
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

    hardware: str
    owner: str | None = None
    gpus: PositiveInt = 1
    gigabytes: PositiveFloat


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
    context: Annotated[int, Field(ge=2)] = 256
    batch: PositiveInt = 1
    headroom: NonNegativeFloat = 0.75


class LinearLayers(Machine):
    """The first feed-forward layer of models of some dimensions: d features, 4 d outputs, or as it says (Table 5).

    tokens: rows of the input. seconds: how long a layer is timed at least. dtype: what 16 bits are.
    """

    name: Name = "linear-layers"
    dtype: Literal["float16", "bfloat16"] = "bfloat16"
    dimensions: Shapes
    tokens: PositiveInt = 512
    seconds: PositiveFloat = 3.0


class Latency(Machine):
    """Time a generated token with a KV cache; prompts are the first tokens of a text, after the model's own with `bos`.

    schemes: those of a sweep, and "bitsandbytes" for the layers of that library. batches: sequences at once. prompt:
    tokens a sequence. tokens: how many are generated after the first. repeats: of the whole generation.
    """

    name: Name = "latency"
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    models: Names
    schemes: Names = ["fp32", "llm.int8"]
    revision: str | None = None
    text: str = "sample"
    bos: bool = False
    alpha: PositiveFloat = ALPHA
    batches: Counts = [1, 8, 32]
    prompt: Annotated[int, Field(ge=2)] = 128
    tokens: PositiveInt = 32
    repeats: Annotated[int, Field(ge=2)] = 3


class ZeroShot(Machine):
    """Zero-shot accuracy by the language model evaluation harness (Figure 1).

    tasks: of the harness, or of this project (`lambada-local`, `piqa-local`), which read the files in the folder
    `data`, or the examples that come along. limit: so many examples of each task; None for all.
    """

    name: Name = "zeroshot"
    models: Names
    schemes: Names = ["fp32", "absmax-vector", "llm.int8"]
    revision: str | None = None
    tasks: Names = ["hellaswag", "piqa", "winogrande", "lambada_openai"]
    data: str | None = None
    limit: PositiveInt | None = None
    alpha: PositiveFloat = ALPHA


def layer_shape(dimension: int | str) -> tuple[int, int]:
    """Features and outputs of a layer of `LinearLayers`."""
    if isinstance(dimension, int):
        return dimension, 4 * dimension
    features, outputs = map(int, dimension.split("x"))
    return features, outputs


def short_name(model: str) -> str:
    """A model's name without where it comes from."""
    name = model.rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):  # a folder that is named by where it is
        name = Path(model).resolve().name or "root"
    return name.removesuffix(".gguf")


def distinct_names(places: Iterable[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """The full names of models with their revisions; of those that share one, what they are asked for by."""
    places = list(dict.fromkeys(places))
    names = Counter(full_name(*place) for place in places)
    typed = {place: place[0] if place[1] is None else "@".join(place) for place in places}
    return {place: typed[place] if names[full_name(*place)] > 1 else full_name(*place) for place in places}


def full_name(model: str, revision: str | None) -> str:
    """The short name of a model with its revision, if it has one."""
    return short_name(model) if revision is None else f"{short_name(model)}@{revision}"
