"""Ablate one model to rows, going on where an earlier run stopped."""

import time
from pathlib import Path

from outliers.ablation.ablate import Cell, measure, plan
from outliers.errors import UserError
from outliers.experiment.job import Counted, Job, load, prepare, progress
from outliers.experiment.provenance import cost
from outliers.experiment.rows import RowFile
from outliers.experiment.spec import Ablation, short_name
from outliers.models.anatomy import check_features
from outliers.tracing.result import STREAM
from outliers.tracing.trace import trace

METRICS = ("top1_softmax", "perplexity")


def ablate_model(spec: Ablation, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Ablate features of a model: those of the specification, or the outlier features that a trace finds.

    Each finished row is on disk before the next one starts; rows found there are used again.

    Args:
        spec: what to run.
        out: folder for `rows.jsonl`; by default `results/ablate/<model>`.
        force: measure again what is finished.

    Returns:
        One row a cell (see `outliers.ablation.ablate.Cell`) and metric.

    Raises:
        UserError: as `outliers.ablate`; or there is no outlier feature.
    """
    job = prepare(spec.model, spec.revision, spec)
    width = job.config.hidden_size
    plan(spec.features or [0], width, spec.methods, spec.controls, spec.seed, spec.where)
    with RowFile(Path(out or spec.folder)) as row_file, progress(spec.blocks) as bar:
        bar.set_description(spec.model)
        model, common = load(job, spec)
        features = check_features(spec.features, width) if spec.features else _found(model, job, spec, bar)
        cells = plan(features, width, spec.methods, spec.controls, spec.seed, spec.where)
        common = {"experiment": "ablate", **common, "where": spec.where, "seed": spec.seed}
        if spec.features is None:
            common["alpha"] = spec.alpha
        of_cell = {(cell, metric): _row(cell, metric, common) for metric in METRICS for cell in cells}
        finished = {} if force else {key: row_file.find(row) for key, row in of_cell.items()}
        for metric in METRICS:
            missing = [cell for cell in cells if not finished.get((cell, metric))]
            bar.total += len(job.blocks) * (len(missing) if metric == "perplexity" else bool(missing))
            start = time.perf_counter()
            for cell, value in measure(model, Counted(job.blocks, bar), missing, metric, spec.where, spec.seed):
                row = of_cell[cell, metric] | {"value": value, "unit": "1"} | cost(start, model.device)
                row_file.add(row)
                finished[cell, metric] = row
    return [finished[key] for key in of_cell]


def _row(cell: Cell, metric: str, common: dict) -> dict:
    """The fields of a row but its value."""
    of_cell = {name: value for name, value in vars(cell).items() if value is not None}
    return {**common, **of_cell, "features": list(cell.features), "metric": metric}


def _found(model, job: Job, spec: Ablation, bar) -> list[int]:
    found = trace(model, Counted(job.blocks, bar), STREAM, spec.alpha, attention=False)
    outliers = found.outlier_features()
    if outliers.empty:
        nearest = found.features().iloc[0]
        raise UserError(
            f"'{short_name(spec.model)}' has no outlier feature on this text (feature {nearest['feature']} hits "
            f"{nearest['layers']:.0%} of layers and {nearest['positions']:.1%} of positions); name features with "
            "--features or lower --alpha"
        )
    return outliers["feature"].tolist()
