"""Experiments of training runs."""

from typing import Annotated

from pydantic import Field, model_validator

from outliers.criterion import ALPHA
from outliers.models.pocket.ladder import CHECKPOINTS, CONTEXT
from outliers.specification.kinds import (
    DRAWS,
    OUTLIER,
    TEXT,
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
from outliers.specification.recipe import Recipe

Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Split, Field(min_length=1), Once]


class Training(Spread):
    """Training runs that differ in one thing each: rungs of the pocket ladder on its text, or a model on WikiText-2."""

    plans, experiment = "outliers.presets.training:training_plans", "training"

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
