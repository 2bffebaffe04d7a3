"""Where a model's outlier features are and how large, and its row of Table 4: of one model, or along a family."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.measurements.attention import PROBABILITIES, top1_softmax
from outliers.measurements.bench import Bench, Counted, Job, named
from outliers.measurements.measurement import First, Keeps, Measurement, Question
from outliers.measurements.perplexity import Loss, losses, perplexity_of
from outliers.models.anatomy import ROLES
from outliers.models.hooks import RESIDUAL
from outliers.specification.kinds import Emergence, OneModel
from outliers.tracing.result import PAPER, Trace
from outliers.tracing.table4 import is_whole_row, table4_row
from outliers.tracing.trace import trace
from outliers.variants.ablated import Intervention

PASSES = 3  # over the text: the trace, top-1 softmax probability, perplexity
PLACES = ("feature", "layer", "role", "position", "token")  # columns that say where, not what
NAME = "token_text"  # of a token, whose id identifies it


class TraceRows(Measurement[OneModel]):
    """The rows of Table 4, `outlier_feature.*`, `hidden_state.*`, `largest.value`, `residual.*` and
    `attention_sink.share` of a model that is traced; tokens are ids."""

    splits = True
    experiment = "trace"

    @property
    def first(self) -> First:
        return First(ROLES, attention=True, kept=True, tokens=self.spec.by_token)

    def subjects(self) -> list[Job]:
        return [Job.of(self.spec.model, self.spec.revision, self.spec)]

    def keeps(self, _job: Job) -> Keeps:
        return Keeps(attention=PROBABILITIES, roles=(*ROLES, RESIDUAL) if self.spec.by_token else ROLES)

    def total(self, _job: Job) -> int:
        return PASSES * self.spec.blocks

    def look(self, bench: Bench, job: Job) -> tuple[dict, None]:
        return bench.load(job, self.spec)[1] | {"alpha": self.spec.alpha, "roles": list(ROLES)}, None

    def questions(self, _job: Job, _facts: None, trace: Trace) -> list[Question]:
        return [Question("Table 4", {}, tuple(trace.outlier_features()["feature"].tolist()))]

    def is_whole(self, _question: Question, rows: list[dict], trace: Trace) -> bool:
        top1_softmax = [0.0] * (1 if trace.outlier_features().empty else 2)
        expected = [*tidy([table4_row(trace, 1.0, top1_softmax)]), *details(trace)]
        return set(map(_which, rows)) == set(map(_which, expected))

    def steps(self, questions: list[Question]) -> int:
        return (PASSES - 1) * self.spec.blocks * len(questions)

    def answer(self, bench: Bench, job: Job, questions: list[Question], part: slice, fields: dict) -> list:
        model, _ = bench.load(job, self.spec, fields)
        return [measure_beside(model, bench.counted(job.blocks[part]), questions[0].about)]

    def rows(self, _question: Question, answers: list["BesideTrace"], trace: Trace) -> list[dict]:
        shares = [len(beside.losses) / self.spec.blocks for beside in answers]
        of_parts = zip(*(beside.top1_softmax for beside in answers), strict=True)
        top1 = [sum(share * value for share, value in zip(shares, values, strict=True)) for values in of_parts]
        found = perplexity_of([loss for beside in answers for loss in beside.losses])
        return [*tidy([table4_row(trace, found, top1)]), *details(trace)]


class EmergenceRows(Measurement[Emergence]):
    """The row of Table 4 of every model, or of every revision of one; equal weights are measured once."""

    twins = True
    experiment = "emergence"

    def subjects(self) -> list[Job]:
        spec = self.spec
        if spec.revisions and len(spec.models) > 1:
            raise UserError(f"revisions of {len(spec.models)} models; expected one model where there are revisions")
        places = [(name, revision) for name in spec.models for revision in spec.revisions or [None]]
        return [Job.of(name, revision, spec) for name, revision in places]

    def keeps(self, _job: Job) -> Keeps:
        return Keeps(attention=PROBABILITIES, roles=PAPER)

    def total(self, _job: Job) -> int:
        return PASSES * self.spec.blocks

    def look(self, bench: Bench, job: Job) -> tuple[dict, None]:
        return bench.load(job, self.spec)[1] | {"alpha": self.spec.alpha}, None

    def questions(self, _job: Job, _facts: None, _trace: None) -> list[Question]:
        return [Question("Table 4", {})]

    def is_whole(self, _question: Question, rows: list[dict], _trace: None) -> bool:
        return is_whole_row({row["metric"]: row["value"] for row in rows})

    def steps(self, questions: list[Question]) -> int:
        return PASSES * self.spec.blocks * len(questions)

    def answer(self, bench: Bench, job: Job, _questions: list[Question], _part: slice, fields: dict) -> list:
        model, _ = bench.load(job, self.spec, fields)
        blocks = bench.counted(job.blocks)
        with named(job.name):
            found = trace(model, blocks, PAPER, self.spec.alpha, attention=False)
            outliers = found.outlier_features()["feature"].tolist()
            beside = measure_beside(model, blocks, outliers)
            return [table4_row(found, perplexity_of(beside.losses), beside.top1_softmax)]

    def rows(self, _question: Question, answers: list[dict], _trace: None) -> list[dict]:
        return tidy(answers)


class BesideTrace(NamedTuple):
    """What the row of Table 4 needs beside the trace: top-1 softmax probability with and, if there are outliers,
    without them; the loss of each block."""

    top1_softmax: list[float]
    losses: list[Loss]


def measure_beside(model: PreTrainedModel, blocks: Counted, outliers: Sequence[int]) -> BesideTrace:
    """Measure it on blocks of a text that was traced, which has shown these outlier features."""
    interventions = [Intervention(()), Intervention(tuple(outliers))] if outliers else [Intervention(())]
    top1 = top1_softmax(model, blocks, interventions)
    return BesideTrace(top1, losses(model, blocks))


def details(found: Trace) -> list[dict]:
    """Rows of the trace beyond those of Table 4."""
    sinks = found.attention_sinks()
    tables = {
        "outlier_feature": found.outlier_features(),
        "hidden_state": found.hidden_states(),
        "largest": found.largest_values(by="layer").drop(columns="max"),  # an infinity norm
        "residual": found.massive_activations(),
        "attention_sink": sinks[sinks["share"] > 0],
    }
    return [row for prefix, table in tables.items() for row in tidy(table, f"{prefix}.")]


def tidy(table: pd.DataFrame | list[dict], prefix: str = "") -> list[dict]:
    """One row a value of a table; what is missing, or has no end, gives none."""
    rows = []
    for record in pd.DataFrame(table).drop(columns=NAME, errors="ignore").to_dict("records"):
        places = {name: record[name] for name in PLACES if name in record}
        values = {name: value for name, value in record.items() if name not in PLACES and np.isfinite(value)}
        rows += [{**places, "metric": f"{prefix}{name}", "value": float(v), "unit": "1"} for name, v in values.items()]
    return rows


def _which(row: dict) -> tuple:
    return tuple(row.get(field) for field in ("metric", *PLACES))
