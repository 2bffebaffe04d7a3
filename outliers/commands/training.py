"""Training runs that differ in one field each."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from outliers.commands import Command
from outliers.config.experiment import ON_ENGINE, Experiment
from outliers.config.fields import (
    TEXT,
    Count,
    Draws,
    File,
    Line,
    Name,
    Schemes,
    Split,
    Text,
    Threshold,
    Tokens,
    Unique,
)
from outliers.config.recipe import Recipe
from outliers.criterion import ALPHA
from outliers.errors import UserError
from outliers.metrics import records
from outliers.models.pocket.ladder import CHECKPOINTS, CONTEXT
from outliers.subjects.cell import Cell, CellPlan
from outliers.subjects.training_run import TrainingRun
from outliers.variants.quantized import EXACT

TEXTS = {  # descriptions of the training texts, by field
    "c4": "the first 1,000 rows of C4 (allenai/c4 of the hub, en, train split) as JSON lines",
    "wikitext": "WikiText-2 (Salesforce/wikitext of the hub, wikitext-2-v1, train split) as text",
}
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Split, Field(min_length=1), Unique]


class Training(Experiment):
    """Training runs that differ in one thing each: rungs of the pocket ladder on its text, or a model on WikiText-2."""

    takes = ON_ENGINE
    command = "training"

    name: Name = "training"
    shows: Line | None = "causes"
    recipe: dict = Field(default={}, description="Fields of all runs.")
    runs: dict[Line, Recipe] = Field(min_length=1, description="Runs by name, with the fields in which they differ.")
    seeds: Seeds = Field(default=[0], description="Seeds of weights and order of the text, for each run.")
    c4: File = Field(default="c4_en_1000.jsonl", description="First 1,000 rows of C4 (en), train split, as JSON lines.")
    wikitext: File = Field(default="wikitext2_train.txt.gz", description="WikiText-2 train, tokenised form.")
    text: Text = Field(default="sample", description=f"Text of the measurements: {TEXT}")
    block: Tokens = Field(default=CONTEXT, description="Tokens per block.")
    blocks: Count = Field(default=32, description="Number of blocks, from the start of the text.")
    alpha: Threshold = ALPHA
    watched: Annotated[list[Count], Split, Unique] = Field(
        default=list(CHECKPOINTS), description="Steps after which outlier features are measured; and at the end."
    )
    schemes: Schemes = Field(
        default=["absmax", "llm.int8"],
        validate_default=True,
        description="Schemes under which the trained models are measured.",
    )
    draws: Draws = 3
    work: Line = Field(default="build/training", description="Folder of checkpoints, from which stopped runs go on.")

    @model_validator(mode="before")
    @classmethod
    def _with_the_common_fields(cls, fields: dict) -> dict:
        common, runs = fields.get("recipe", {}), fields.get("runs")
        if not isinstance(common, dict) or not isinstance(runs, dict):
            return fields
        by_name = {name: {} if run is None else run for name, run in runs.items()}
        runs = {name: common | run if isinstance(run, dict) else run for name, run in by_name.items()}
        return fields | {"runs": runs}

    @property
    def requested_schemes(self) -> list:
        return []  # alpha is for outlier features, too

    def check(self) -> None:
        """Raise UserError if a run is not of a causal language model, or a training text or start model is missing."""
        from outliers.config.validate import check_model  # late, for `--help` does not need it

        for name, run in self.runs.items():
            if run.objective != "next tokens":
                raise UserError(
                    f"run '{name}' trains '{run.start}', which learns {run.objective}; expected a rung that learns "
                    "next tokens: `python scripts/train_pocket.py` of the repository trains the others"
                )
        from_nothing = any(run.from_nothing for run in self.runs.values())
        for field in ("c4", "wikitext") if from_nothing else ("wikitext",):
            if not Path(getattr(self, field)).is_file():
                raise UserError(
                    f"text file '{getattr(self, field)}' does not exist; expected {TEXTS[field]}: give it with "
                    f"--{field}"
                )
        for name in dict.fromkeys(run.start for run in self.runs.values() if not run.from_nothing):
            check_model(name)

    def plans(self) -> list[CellPlan]:
        metric = records.TrainingMetric(alpha=self.alpha, watched=self.watched, schemes=self.schemes, draws=self.draws)
        subjects = [TrainingRun(label, run, seed, self) for label, run in self.runs.items() for seed in self.seeds]
        return [CellPlan.of(subject, [Cell(subject, EXACT, metric)]) for subject in subjects]


COMMAND = Command(
    "training runs that differ in one setting each, and their outlier features",
    """Run training experiments: int8 training beside 16 bits, and causes of outlier features.

Trains each run with each seed, measures it after some steps, measures the trained models under schemes, and writes
rows, tables, figures and a page to results/NAME. It takes hours: an interrupted run resumes from its last checkpoint,
in the folder of --work. Embedded experiments: training/causes, training/table7.

Examples:

`python -m outliers.training training/table7 --c4 c4_en_1000.jsonl --wikitext wikitext2_train.txt.gz`

`python -m outliers.training training/causes --seeds 0,1,2 --engine ray`

`python -m outliers.training mine.yaml --out results/mine`
""",
    Training,
    example="training/causes",
)
