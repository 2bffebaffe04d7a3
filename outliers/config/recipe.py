"""Recipes of training runs."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outliers.config.fields import Batch, Count, Model, Split, Threshold, Unique
from outliers.models.pocket.ladder import LADDER, STEPS

Rate = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
FINE_TUNED = {"learning_rate": 2e-5, "batch": 8}  # defaults of a recipe that trains a model further


class Recipe(BaseModel):
    """Everything that determines a training run but its seed.

    start: a rung of the pocket ladder, trained from scratch, or a model that is trained further. learning_rate: the
    peak, followed by a cosine decay to zero; it and the batch are the rung's unless given. weight_decay: of matrices
    and embeddings. attention, gated, positions, norm: see `outliers.trainer.architectures.modify_gpt2`. int8 and later
    fields: which products are in int8, and how, see `outliers.train_int8`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: Model = "gpt2-1.7m"
    steps: Count = STEPS
    batch: Batch | None = None
    learning_rate: Rate | None = None
    optimizer: Literal["adamw", "muon", "sgd", "adafactor"] = "adamw"
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    attention: Literal["softmax", "softmax-plus-one", "clipped-softmax"] = "softmax"
    gated: bool = False
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    int8: Annotated[list[Literal["ffn", "linear", "attention"]], Split, Unique] = []
    decomposition: Share = 0.0
    outlier_threshold: Threshold | None = None
    stochastic: bool = False

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: dict) -> dict:
        """Add the learning rate and the batch of the rung, unless given."""
        if not isinstance(fields, dict):
            return fields
        rung = LADDER.get(fields.get("start", cls.model_fields["start"].default))
        defaults = FINE_TUNED if rung is None else {"learning_rate": rung.learning_rate, "batch": rung.batch}
        return defaults | {name: value for name, value in fields.items() if value is not None}

    @property
    def in_rows(self) -> dict:
        """The fields of the recipe in rows: its start as `model`, and the fields that are not None."""
        return {"model": self.start, **self.model_dump(exclude={"start"}, exclude_none=True)}

    @property
    def objective(self) -> str:
        """The training objective, as in `outliers.models.pocket.ladder.Rung`."""
        return LADDER[self.start].objective if self.from_nothing else "next tokens"

    @property
    def autocast(self) -> bool:
        """Whether training uses torch's autocast to bfloat16."""
        return not self.from_nothing or LADDER[self.start].autocast

    @property
    def from_nothing(self) -> bool:
        """Whether the model is trained from scratch."""
        return self.start in LADDER
