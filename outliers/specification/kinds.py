"""Fields that specifications share: where they run, on which text, and under which schemes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from outliers.criterion import ALPHA, ROUTER
from outliers.errors import UserError, shown
from outliers.models.names import full_name
from outliers.quantization.schemes import Scheme, by_weights, get_scheme, remedied
from outliers.show.units import FEWEST
from outliers.specification.fields import (
    LONGEST_NAME,
    NONE,
    Begin,
    Checked,
    Count,
    Line,
    Model,
    Name,
    Once,
    Repeats,
    Revision,
    Schemes,
    Seed,
    Skip,
    Split,
    Text,
    Threshold,
    Tokens,
    saying_all,
    whole,
)
from outliers.terminal.amounts import parse_bytes
from outliers.variants.peer import PEER
from outliers.variants.quantized import Quantized

# The default text of all commands, so that they all start from one perplexity: as many blocks as a claim needs, and so
# few tokens that `report look` and `origins` of SmolLM2-135M end within three minutes on two cores.
BLOCK, BLOCKS = 64, FEWEST
ATTENTION_16 = "16-bit"  # not quantized
ATTENTION = re.compile(r"16-bit|int8(\+(?P<percent>[0-9]{1,2}(\.[0-9]{1,6})?)%)?")


def _attention(value: str) -> str:
    if not ATTENTION.fullmatch(value):
        raise ValueError("expected 16-bit, int8, or int8+2% for a share of its products in 16 bits")
    return value


def _share(attention: str) -> str:
    """Return int8 attention as a remedy in the name of a scheme; an empty text for 16-bit attention."""
    if attention == ATTENTION_16:
        return ""
    percent = ATTENTION.fullmatch(attention)["percent"]
    return "attention" if percent is None else f"attention={float(percent) / 100:.12g}"


def _remedied(scheme: str | Scheme, written: str) -> str | Scheme:
    """Return a scheme with a remedy added; the scheme of another library unchanged."""
    if scheme == PEER or not written:
        return scheme
    changed = remedied(get_scheme(scheme), written)
    return changed.name if isinstance(scheme, str) else changed


Attentions = Annotated[list[Annotated[str, AfterValidator(_attention)]], Split, Field(min_length=1), Once]


class Named(Checked):
    """A specification: its name, which is also a folder in `results`, and the table or figure of the paper for it."""

    experiment: ClassVar[str | None] = None  # experiment of its rows, if that is not its name
    # A function of flat rows and `outliers.show.section.Context` that makes a section, or its location; None: what is
    # shown depends on the field `shows`.
    view: ClassVar[Callable | str | None] = None
    with_weights: ClassVar[bool] = True  # False: needs the configurations of models alone

    name: Name
    shows: Line | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_none(cls, fields: dict) -> dict:
        """Remove fields whose value is the word none, if their help offers it, so that they have their defaults."""
        empty = {name for name, field in cls.model_fields.items() if (field.description or "").endswith(NONE)}
        return {name: value for name, value in fields.items() if not (name in empty and value in ("none", ["none"]))}

    def plans(self) -> list:
        """Return the cells of this specification as `outliers.subjects.cell.CellPlan`, without reading any subject."""
        raise NotImplementedError  # not abstract: settings of a subject, which has no plans, are instances too

    def check(self) -> None:
        """Raise UserError if something is missing, before torch is imported."""

    @property
    def folder(self) -> Path:
        return Path("results") / self.name

    @property
    def alpha_of_schemes(self) -> float | None:
        """The threshold that replaces that of every scheme, if alpha is given."""
        return self.alpha if "alpha" in self.model_fields_set else None


class Machine(Named):
    """A specification with the device and the type of numbers that it computes with."""

    device: Line = Field(default="cpu", description="cpu, cuda, cuda:N, or auto: layers spread over all GPUs.")
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="Type of weights and activations."
    )


class Spread(Machine):
    """A specification with the engine that runs its cells: this process one after the other, or a Ray cluster."""

    engine: Literal["local", "ray"] = Field(
        default="local", description="This process, or a Ray cluster (at RAY_ADDRESS, or of this machine)."
    )


class Settings(Spread):
    """A specification of a measurement over a text: all but its models."""

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
        description="With --stream: memory for hidden states, such as 4GB; more are kept in a file. By default "
        "no limit.",
    )

    minutes: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = Field(
        default=None,
        description="Measure as many blocks as fit into so many minutes, at most --blocks. By default all of these.",
    )
    _fitted: bool = PrivateAttr(default=False)  # whether `blocks` is the number that fits into `minutes`

    @property
    def is_fitted(self) -> bool:
        return self._fitted

    def of_blocks(self, blocks: int) -> "Settings":
        """Return a copy with the number of blocks that fits into the minutes."""
        copy = self.model_copy(update={"blocks": blocks})
        copy._fitted = True
        return copy

    @property
    def sequences(self) -> int:
        return self.blocks * (self.block - 2 if self.objective == "each" else self.mask_seeds)


class Calibrated(Settings):
    """A measurement of schemes, some of which are calibrated on the magnitudes of inputs."""

    calibration: Text | None = Field(
        default=None, description="Text to calibrate on; by default the blocks after the measured ones."
    )
    calibration_blocks: Count = Field(default=4, description="Number of blocks of it.")


class OfSchemes(Named):
    """A measurement of models under schemes, with options that apply to all schemes and become part of their names."""

    schemes: Schemes
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

    @property
    def quantized(self) -> list[Quantized]:
        """Our own schemes as variants, ordered so that those that share weight codes are adjacent."""
        schemes = by_weights(get_scheme(scheme, self.alpha_of_schemes) for scheme in self.schemes if scheme != PEER)
        return [Quantized(scheme, tuple(self.skip)) for scheme in schemes]

    @model_validator(mode="after")
    def _into_schemes(self):
        if self.transform is None and self.attention == [ATTENTION_16] and not self.router:
            return self
        with saying_all():
            schemes = self.schemes
            if self.router:
                quantizing = {one for one in schemes if one != PEER and get_scheme(one).quantizes_projections}
                schemes = [_remedied(one, ROUTER) if one in quantizing else one for one in schemes]
            if self.transform is not None:
                changed = [scheme for scheme in schemes if scheme != PEER and get_scheme(scheme).quantizes_projections]
                if not changed:
                    raise UserError(
                        f"transform '{self.transform}' with schemes that quantize nothing; expected one that does"
                    )
                schemes = [_remedied(scheme, self.transform) if scheme in changed else scheme for scheme in schemes]
            schemes = [_remedied(scheme, written) for scheme in schemes for written in map(_share, self.attention)]
        self.schemes, self.transform, self.attention = list(dict.fromkeys(schemes)), None, [ATTENTION_16]
        self.router = False
        return self


class OfOneModel(Settings):
    model: Model
    revision: Revision = None

    @property
    def folder(self) -> Path:
        name = full_name(self.model, self.revision).replace("/", "-")  # a revision may contain a slash
        if len(name.encode()) > LONGEST_NAME:
            raise UserError(f"results of {shown(name)} have no folder of that name; choose one with --out")
        return super().folder / name
