"""Recipes of training runs, all in which two of them can differ but the seed; and experiments of such runs."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outliers.criterion import ALPHA
from outliers.models.pocket.ladder import CHECKPOINTS, CONTEXT, LADDER, STEPS
from outliers.specification.kinds import (
    DRAWS,
    OUTLIER,
    TEXT,
    Batch,
    Count,
    Line,
    Name,
    Once,
    Repeats,
    Schemes,
    Split,
    Spread,
    Text,
    Threshold,
    Tokens,
)

Rate = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Split, Field(min_length=1), Once]
Share = Annotated[float, Field(ge=0, lt=1)]
FINE_TUNED = {"learning_rate": 2e-5, "batch": 8}  # where a recipe trains a model further and says no others


class Recipe(BaseModel):
    """A training run up to its seed.

    start: a rung of the pocket ladder, trained from nothing, or a model that is trained further. learning_rate: the
    peak, after which a cosine falls to zero; it and the batch are the rung's unless they are given. weight_decay: of
    matrices. attention, gated, positions, norm: see `outliers.training.architectures.change`. int8 and what follows:
    which products are in int8, and how, see `outliers.train_int8`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: Line = "gpt2-1.7m"
    steps: Count = STEPS
    batch: Batch | None = None
    learning_rate: Rate | None = None
    optimizer: Literal["adamw", "muon", "sgd", "adafactor"] = "adamw"
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    attention: Literal["softmax", "softmax-plus-one", "clipped-softmax"] = "softmax"
    gated: bool = False
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    int8: Annotated[list[Literal["ffn", "linear", "attention"]], Split, Once] = []
    decomposition: Share = 0.0
    outlier_threshold: Threshold | None = None
    stochastic: bool = False

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: dict) -> dict:
        """With the learning rate and the batch of the rung, where they are not given."""
        if not isinstance(fields, dict):
            return fields
        rung = LADDER.get(fields.get("start", cls.model_fields["start"].default))
        usual = FINE_TUNED if rung is None else {"learning_rate": rung.learning_rate, "batch": rung.batch}
        return usual | {name: value for name, value in fields.items() if value is not None}

    @property
    def in_rows(self) -> dict:
        """The fields of the recipe in rows of a run: its start as `model`, and the fields that are given."""
        return {"model": self.start, **self.model_dump(exclude={"start"}, exclude_none=True)}

    @property
    def objective(self) -> str:
        """Its objective, as `outliers.models.pocket.ladder.Rung` has it."""
        return LADDER[self.start].objective if self.from_nothing else "next tokens"

    @property
    def autocast(self) -> bool:
        """Whether it trains in bfloat16, where autocast has it."""
        return not self.from_nothing or LADDER[self.start].autocast

    @property
    def from_nothing(self) -> bool:
        """Whether what is trained is built and not loaded."""
        return self.start in LADDER


class Training(Spread):
    """Training runs that differ in one thing each: rungs of the pocket ladder on its text, or a model on WikiText-2."""

    plans, experiment = "outliers.presets.training:training_plans", "training"
    section, of_folder = "outliers.report.report:shown_section", True

    name: Name = "training"
    shows: Line | None = "causes"
    recipe: dict = Field({}, description="Fields of all runs.")
    runs: dict[Line, Recipe] = Field(min_length=1, description="Runs by name, with the fields in which they differ.")
    seeds: Seeds = Field([0], description="Seeds of weights and order of the text, for each run.")
    c4: Line = Field("c4_en_1000.jsonl", description="First 1,000 rows of C4 (en), train split, as JSON lines.")
    wikitext: Line = Field("wikitext2_train.txt.gz", description="WikiText-2 train, tokenised form.")
    text: Text = Field("sample", description=f"Text of the measurements: {TEXT}")
    block: Tokens = Field(CONTEXT, description="Tokens per block.")
    blocks: Count = Field(32, description="Number of blocks, from the start of the text.")
    alpha: Threshold = Field(ALPHA, description=OUTLIER)
    watched: Annotated[list[Count], Split, Once] = Field(
        list(CHECKPOINTS), description="Steps after which outlier features are measured; and at the end."
    )
    schemes: Schemes = Field(["absmax", "llm.int8"], description="Schemes under which the trained models are measured.")
    draws: Repeats = Field(3, description=DRAWS)
    work: Line = Field("build/training", description="Folder of checkpoints, from which stopped runs go on.")

    @model_validator(mode="before")
    @classmethod
    def _with_the_common_fields(cls, fields: dict) -> dict:
        common, runs = fields.get("recipe", {}), fields.get("runs")
        if not isinstance(common, dict) or not isinstance(runs, dict):
            return fields
        by_name = {name: {} if run is None else run for name, run in runs.items()}
        runs = {name: common | run if isinstance(run, dict) else run for name, run in by_name.items()}
        return fields | {"runs": runs}
