"""Outlier features along a family of models, or along revisions of one, to rows."""

import time
from pathlib import Path

from tqdm import tqdm

from outliers.errors import UserError
from outliers.experiment.job import Counted, Job, load, prepare, progress
from outliers.experiment.provenance import cost
from outliers.experiment.rows import RowFile
from outliers.experiment.spec import Emergence, full_name
from outliers.experiment.tracing import PASSES, measure_table4, tidy
from outliers.tracing.trace import trace


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
        UserError: something is unknown, unreachable or does not fit together.
    """
    if spec.revisions and len(spec.models) > 1:
        raise UserError(f"revisions of {len(spec.models)} models; expected one model where there are revisions")
    places = [(name, revision) for name in spec.models for revision in spec.revisions or [None]]
    jobs = [prepare(name, revision, spec) for name, revision in places]
    measured: dict[tuple, list[dict]] = {}
    with RowFile(Path(out or spec.folder)) as row_file, progress(PASSES * spec.blocks * len(jobs)) as bar:
        return [row for job in jobs for row in _measure(job, spec, row_file, force, bar, measured)]


def _measure(
    job: Job, spec: Emergence, row_file: RowFile, force: bool, bar: tqdm, measured: dict[tuple, list[dict]]
) -> list[dict]:
    """The rows of one model; `measured` has those of the models before, by hash of weights and tokens."""
    bar.set_description(full_name(job.model, job.revision))
    start = time.perf_counter()
    model, common = load(job, spec)
    cell = {"experiment": "emergence", **common, "alpha": spec.alpha}
    hashes = common["weights_hash"], common["tokens_hash"]
    rows = [] if force else row_file.find_all(cell)
    if rows or hashes in measured:
        bar.update(PASSES * len(job.blocks))
    if not rows and hashes in measured:
        twin = measured[hashes][0]
        same = {"same_weights_as": full_name(twin["model"], twin.get("checkpoint"))}
        rows = [row | cell | same for row in measured[hashes]]
        row_file.add(*rows)
    elif not rows:
        found = trace(model, Counted(job.blocks, bar), alpha=spec.alpha, attention=False)
        values = measure_table4(model, job.blocks, found, bar)
        spent = cost(start, model.device)
        rows = [cell | row | spent for row in tidy([values])]
        row_file.add(*rows)
    measured.setdefault(hashes, rows)
    return rows
