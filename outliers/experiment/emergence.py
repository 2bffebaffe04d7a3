"""Outlier features along a family of models, or along revisions of one, to rows."""

from functools import partial
from pathlib import Path

from outliers.errors import UserError
from outliers.experiment.cell import Bench, Cell, named
from outliers.experiment.engine import Engine, common_fields, engine_of, with_weights
from outliers.experiment.job import Counted, Job, prepare
from outliers.experiment.parts import trace_parts
from outliers.experiment.provenance import measuring
from outliers.experiment.rows import RowFile
from outliers.experiment.tracing import PASSES, measure_beside, tidy
from outliers.measurements.perplexity import perplexity_of
from outliers.models.names import full_name
from outliers.specification.kinds import Emergence
from outliers.terminal.progress import Progress
from outliers.tracing.result import PAPER
from outliers.tracing.table4 import is_whole_row, table4_row
from outliers.tracing.trace import trace

Place = tuple[str, str | None]  # model and revision
OF_TWINS = ("architecture", "parameters", "tokens_hash")  # what models of the same weights have in common


def emergence(spec: Emergence, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Measure the row of Table 4 of every model, or of every revision of one.

    The rows of a model are on disk before the next model starts; rows found there are used again. Revisions that hold
    the same weights are measured once; the later ones say so in `same_weights_as`.

    Args:
        spec: what to run.
        out: folder for `rows.jsonl`; by default `results/emergence`.
        force: measure again what is finished.

    Returns:
        One row a model and metric of `table4_row`.

    Raises:
        UserError: something is unknown, unreachable or does not fit together; or models failed on a cluster.
    """
    if spec.revisions and len(spec.models) > 1:
        raise UserError(f"revisions of {len(spec.models)} models; expected one model where there are revisions")
    places = [(name, revision) for name in spec.models for revision in spec.revisions or [None]]
    jobs = [prepare(name, revision, spec) for name, revision in places]
    rows: dict[Place, list[dict]] = {}
    row_file = RowFile(Path(out or spec.folder))
    with row_file, Progress(PASSES * spec.blocks * len(jobs)) as bar, engine_of(spec, bar) as engine:
        done = {} if force else {(row["model"], row.get("checkpoint")) for row in row_file.likely(spec)}
        engine.foresee(jobs, spec, trace_parts(spec, PAPER, attention=False), 1 - len(done) / len(jobs))
        for group in engine.groups(jobs):
            all_fields = [
                {"experiment": "emergence", **common, "alpha": spec.alpha}
                for common in common_fields(engine, group, spec)
            ]
            others = [*all_fields, *(of_model[0] for of_model in rows.values())]
            missing = []
            for job, fields in zip(group, all_fields, strict=True):
                fields = with_weights(engine, job, spec, fields, partial(_has_like, row_file, others, force))
                found = [] if force else row_file.find_all(fields)
                if is_whole_row({row["metric"]: row["value"] for row in found}):
                    rows[job.model, job.revision] = found
                    bar.skip(PASSES * spec.blocks)
                else:
                    missing.append((job, fields))
            _measure_missing(missing, rows, spec, row_file, engine, bar)
    return [row for place in places for row in rows[place]]


def _measure_missing(
    missing: list[tuple[Job, dict]],
    rows: dict[Place, list[dict]],
    spec: Emergence,
    row_file: RowFile,
    engine: Engine,
    bar: Progress,
) -> None:
    """Add the rows of models to those that are there; equal weights are measured once."""
    measured = {_hashes(of_model[0]): of_model for of_model in rows.values()}
    new = {}
    for job, fields in missing:
        if _hashes(fields) not in measured:
            new.setdefault(_hashes(fields), (job, fields))
    steps = PASSES * spec.blocks
    cells = [Cell("Table 4", _measure, job, (spec, fields), steps) for job, fields in new.values()]
    for cell, found in engine.run(cells):
        row_file.add(*found)
        rows[cell.job.model, cell.job.revision] = measured[_hashes(found[0])] = found
    for job, fields in missing:
        if (job.model, job.revision) not in rows:
            twins = measured[_hashes(fields)]
            same = {"same_weights_as": full_name(twins[0]["model"], twins[0].get("checkpoint"))}
            rows[job.model, job.revision] = [row | fields | same for row in twins]
            row_file.add(*rows[job.model, job.revision])
            bar.skip(steps)


def _has_like(row_file: RowFile, others: list[dict], force: bool, fields: dict) -> bool:
    """Whether there may be rows of the same weights as those of a model, or another model with the same."""
    twins = [other for other in others if all(other[field] == fields[field] for field in OF_TWINS)]
    return len(twins) > 1 or (not force and row_file.may_have(fields))


def _hashes(fields: dict) -> tuple[str, str]:
    """What makes two models the same: weights and tokens. Of weights that are not known, no other has the same."""
    return fields.get("weights_hash") or full_name(fields["model"], fields.get("checkpoint")), fields["tokens_hash"]


def _measure(bench: Bench, job: Job, spec: Emergence, fields: dict) -> list[dict]:
    """The rows of one model."""
    model, _ = bench.load(job, spec, fields)
    with named(job.name), measuring(spec.device) as spent:
        found = trace(model, Counted(job.blocks, bench.bar), PAPER, spec.alpha, attention=False)
        beside = measure_beside(model, job.blocks, found, bench.bar)
        values = table4_row(found, perplexity_of(beside.losses), beside.top1_softmax)
    new = bench.weights() | spent.fields
    return [fields | row | new for row in tidy([values])]
