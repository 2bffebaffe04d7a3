"""Experiments, and the fields that they share: where they run, on which models and text, and under which schemes."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from outliers.config.fields import (
    LONGEST_NAME,
    NONE,
    Begin,
    Checked,
    Count,
    Features,
    Line,
    Model,
    Models,
    Name,
    Repeats,
    Revision,
    Schemes,
    Seed,
    Skip,
    Split,
    Text,
    Threshold,
    Tokens,
    Unique,
    saying_all,
    whole,
)
from outliers.criterion import ALPHA, ROUTER
from outliers.errors import UserError, shown
from outliers.models.names import full_name
from outliers.quantization.schemes import Scheme, by_weights, get_scheme, remedied
from outliers.show.units import FEWEST
from outliers.terminal.amounts import parse_bytes
from outliers.variants.quantized import Quantized
from outliers.variants.term import PEER

# The default text of all commands, so that they all start from one perplexity: as many blocks as a claim needs, and so
# few tokens that `report look` and `origins` of SmolLM2-135M end within three minutes on two cores.
BLOCK, BLOCKS = 64, FEWEST
ATTENTION_16 = "16-bit"  # not quantized
ATTENTION = re.compile(r"16-bit|int8(\+(?P<percent>[0-9]{1,2}(\.[0-9]{1,6})?)%)?")


def _check_attention(value: str) -> str:
    if not ATTENTION.fullmatch(value):
        raise ValueError("expected 16-bit, int8, or int8+2% for a share of its products in 16 bits")
    return value


def _attention_remedy(attention: str) -> str:
    """Return the suffix of a scheme's name, such as attention=0.05, for int8 attention; an empty text for 16 bits."""
    if attention == ATTENTION_16:
        return ""
    percent = ATTENTION.fullmatch(attention)["percent"]
    return "attention" if percent is None else f"attention={float(percent) / 100:.12g}"


def _quantizes(scheme: Scheme | str) -> bool:
    """Return whether a scheme of this library quantizes projections."""
    return scheme != PEER and scheme.quantizes_projections


def _remedied(scheme: Scheme | str, written: str) -> Scheme | str:
    """Return a scheme with a remedy added; the layers of another library unchanged."""
    return scheme if scheme == PEER or not written else remedied(scheme, written)


Attentions = Annotated[list[Annotated[str, AfterValidator(_check_attention)]], Split, Field(min_length=1), Unique]


AnyExperiment = TypeVar("AnyExperiment", bound="Experiment")


class Experiment(Checked):
    """An experiment: the fields that all of them share, with a name, which is also a folder in `results`.

    A class of experiments has the shared fields that it declares itself or names in `takes`. The other ones are no
    fields of it, but attributes with their defaults.
    """

    takes: ClassVar[Iterable[str]] = ()
    command: ClassVar[str | None] = None  # which rows name as their experiment; None: the name of the experiment
    # A function that makes a section of flat rows and `outliers.show.section.Context`, or its location; None: the view
    # depends on the field `shows`.
    view: ClassVar[Callable | str | None] = None
    with_weights: ClassVar[bool] = True  # False: needs the configurations of models alone

    name: Name
    shows: Line | None = None
    device: Line = Field(default="cpu", description="cpu, cuda, cuda:N, or auto: layers spread over all GPUs.")
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="Type of weights and activations."
    )
    engine: Literal["local", "ray"] = Field(
        default="local", description="This process, or a Ray cluster (at RAY_ADDRESS, or of this machine)."
    )
    text: Text = "sample"
    block: Tokens = Field(default=BLOCK, description="Tokens per block.")
    blocks: Count = Field(default=BLOCKS, description="Number of blocks, from the start of the text.")
    bos: Begin = False
    documents: bool = Field(
        default=False,
        description="Read what a block holds of each document by itself: positions and attention begin anew with it.",
    )
    stride: Count | None = Field(
        default=None,
        description="Tokens by which blocks advance; the last so many of each are scored, and all of the first one. By "
        "default blocks do not overlap.",
    )
    scored: Count | None = Field(
        default=None, description="Tokens at the end of each block that are scored; by default all but the first."
    )
    mask_seed: Seed = Field(default=0, description="Seed of the choice of masked tokens or spans.")
    mask_seeds: Repeats = Field(default=1, description="Number of mask seeds, from that one on, for mean ± scatter.")
    objective: Literal["span", "prefix", "each"] | None = Field(
        default=None,
        description="Of encoder-decoders: span corruption, by default where the tokenizer has sentinels for it, or the "
        "second half of a block (prefix). Of masked language models: each token, masked by itself, for "
        "pseudo-perplexity.",
    )
    alpha: Threshold = ALPHA
    stream: bool = Field(default=False, description="Load one layer at a time: for models larger than memory.")
    memory: Annotated[whole(10**18) | None, BeforeValidator(parse_bytes, json_schema_input_type=str)] = Field(
        default=None,
        description="With --stream: memory for hidden states, such as 4GB; more are kept in a file. A layer of "
        "experts that alone is larger is read one expert at a time. By default no limit.",
    )

    minutes: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = Field(
        default=None,
        description="Measure as many blocks as fit into so many minutes, at most --blocks. By default all of these.",
    )
    calibration: Text | None = Field(
        default=None, description="Text to calibrate on; by default the blocks after the measured ones."
    )
    calibration_blocks: Count = Field(default=4, description="Number of blocks of it.")
    model: Model = ""
    models: Models = Field(default=[])
    features: Features | None = None
    schemes: Schemes = Field(default=[])
    transform: Line | None = Field(
        default=None, description=f"Remedies for all schemes, such as hadamard or tokens=20+smoothing=0.75; {NONE}"
    )
    attention: Attentions = Field(
        default=[ATTENTION_16],
        description="Attention of all schemes: 16-bit, int8, int8+2% for a share of it in 16 bits, or several.",
    )
    router: bool = Field(default=False, description="Quantize routers of mixtures too, which otherwise stay exact.")
    skip: Skip = Field(default=[])
    revision: Revision = None
    _fitted: bool = PrivateAttr(default=False)  # whether `blocks` is the number that fits into `minutes`

    @classmethod
    def __pydantic_init_subclass__(cls, **_options: object) -> None:
        for name in SHARED.difference(cls.takes, cls.__annotations__):
            field = cls.model_fields.pop(name)
            setattr(cls, name, NO_TEXT.get(name, field.get_default(call_default_factory=True)))

    @model_validator(mode="before")
    @classmethod
    def _without_none(cls, fields: dict) -> dict:
        """Remove fields whose value is the word none, if their help offers it, so that they have their defaults."""
        empty = {name for name, field in cls.model_fields.items() if (field.description or "").endswith(NONE)}
        return {name: value for name, value in fields.items() if not (name in empty and value in ("none", ["none"]))}

    @model_validator(mode="after")
    def _join_remedies(self):
        """Put the remedies of the fields transform, attention and router into the names of the schemes."""
        if not self.schemes or (self.transform is None and self.attention == [ATTENTION_16] and not self.router):
            return self
        with saying_all():
            schemes = self.schemes
            if self.router:
                schemes = [_remedied(scheme, ROUTER) if _quantizes(scheme) else scheme for scheme in schemes]
            if self.transform is not None:
                if not any(map(_quantizes, schemes)):
                    raise UserError(
                        f"transform '{self.transform}' with schemes that quantize nothing; expected one that does"
                    )
                schemes = [_remedied(scheme, self.transform) if _quantizes(scheme) else scheme for scheme in schemes]
            schemes = [
                _remedied(scheme, written) for scheme in schemes for written in map(_attention_remedy, self.attention)
            ]
        self.schemes, self.transform, self.attention = list(dict.fromkeys(schemes)), None, [ATTENTION_16]
        self.router = False
        return self

    def plans(self) -> list:
        """Return the cells of this experiment as `outliers.subjects.cell.CellPlan`, without reading any subject."""
        raise NotImplementedError  # not abstract: subjects without plans have an experiment, too

    def check(self) -> None:
        """Raise UserError if something is missing, before torch is imported."""

    @property
    def checkpoints(self) -> list[tuple[str, str | None]]:
        """The models, each with its revision."""
        return [(name, self.revision) for name in self.models or filter(None, [self.model])]

    @property
    def folder(self) -> Path:
        folder = Path("results") / self.name
        if not self.model:
            return folder
        name = full_name(self.model, self.revision).replace("/", "-")  # a revision may contain a slash
        if len(name.encode()) > LONGEST_NAME:
            raise UserError(f"results of {shown(name)} have no folder of that name; choose one with --out")
        return folder / name

    @property
    def alpha_of_schemes(self) -> float | None:
        """The threshold that replaces that of every scheme, if alpha is given."""
        return self.alpha if "alpha" in self.model_fields_set else None

    @property
    def requested_schemes(self) -> list[Scheme | str]:
        """The schemes in the fields of this experiment, whichever fields it has; empty if there is none."""
        return self.schemes

    @property
    def quantized(self) -> list[Quantized]:
        """Our own schemes as variants, ordered so that those that share weight codes are adjacent."""
        schemes = by_weights(
            get_scheme(scheme, self.alpha_of_schemes) for scheme in self.requested_schemes if scheme != PEER
        )
        return [Quantized(scheme, tuple(self.skip)) for scheme in schemes]

    @property
    def has_fitted_blocks(self) -> bool:
        """Whether the number of blocks was chosen to fit into `minutes`."""
        return self._fitted

    def with_fitted_blocks(self, blocks: int) -> Self:
        """Return a copy with a number of blocks, which was found to fit into `minutes`."""
        copy = self.model_copy(update={"blocks": blocks})
        copy._fitted = True
        return copy

    def non_default(self, *names: str) -> dict:
        """Return the named fields that differ from their defaults; by default all such fields that identify rows."""
        defaults = {name: Experiment.model_fields[name].default for name in names or IN_ROWS}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    @property
    def sequences(self) -> int:
        """The number of sequences that pass a model: blocks repeat for each mask seed, or for each masked token."""
        return self.blocks * (self.block - 2 if self.objective == "each" else self.mask_seeds)


SHARED = Experiment.model_fields.keys() - {"name", "shows"}
NO_TEXT = {"block": 1, "blocks": 1}  # of experiments that read no text
IN_ROWS = ("device", "bos", "documents", "mask_seed", "mask_seeds", "objective", "stride", "scored")
ON_MACHINE = ("device", "dtype")
ON_ENGINE = (*ON_MACHINE, "engine")
ON_TEXT = (
    *ON_ENGINE,
    *("text", "block", "blocks", "bos", "documents", "stride", "scored", "mask_seed", "mask_seeds", "objective"),
    *("alpha", "stream", "memory", "minutes"),
)
CALIBRATED = (*ON_TEXT, "calibration", "calibration_blocks")
UNDER_SCHEMES = ("schemes", "transform", "attention", "router", "skip", "revision")
