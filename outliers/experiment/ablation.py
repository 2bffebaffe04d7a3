"""Ablate one model to rows, going on where an earlier run stopped."""

import itertools
from pathlib import Path

from outliers.errors import UserError
from outliers.experiment.cell import Bench, Cell, check_same_weights
from outliers.experiment.engine import common_fields, engine_of, gather
from outliers.experiment.job import Counted, Job, prepare
from outliers.experiment.parts import ablation_parts
from outliers.experiment.place import check_alone, place_of
from outliers.experiment.provenance import measuring
from outliers.experiment.rows import RowFile
from outliers.measurements.ablation import Treatment, feature_means, measure, plan
from outliers.models.anatomy import check_features
from outliers.models.names import short_name
from outliers.specification.kinds import Ablation
from outliers.terminal.progress import Progress
from outliers.tracing.result import STREAM, Trace
from outliers.tracing.trace import trace
from outliers.variants.interventions import Means

METRICS = ("top1_softmax", "perplexity")
Key = tuple[str, Treatment]  # metric and treatment


def ablate_model(spec: Ablation, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Ablate features of a model: those of the specification, or the outlier features that a trace finds.

    Each finished row is on disk before the next one starts; rows found there are used again.

    Args:
        spec: what to run.
        out: folder for `rows.jsonl`; by default `results/ablate/<model>`, see `outliers.experiment.place.place_of`.
        force: measure again what is finished.

    Returns:
        One row a treatment (see `outliers.measurements.ablation.Treatment`) and metric.

    Raises:
        UserError: as `outliers.ablate`; there is no outlier feature; or `out` holds the results of another model.
    """
    job = prepare(spec.model, spec.revision, spec)
    width = job.config.hidden_size
    planned = plan(spec.features or [0], width, spec.methods, spec.controls, spec.seed, spec.where)
    folder = place_of(spec, out)
    row_file = RowFile(folder)
    with row_file, Progress(spec.blocks) as bar, engine_of(spec, bar) as engine:
        check_alone(spec, folder)  # another run may have ended there
        bar.set_description(spec.model)
        done = [] if force else row_file.likely(spec)
        left = max(0.0, 1 - len(done) / (len(METRICS) * len(planned)))
        engine.foresee([job], spec, ablation_parts(spec, width), left)
        (common,) = common_fields(engine, [job], spec)
        ((found, common),) = gather(engine, [Cell("trace", _trace, job, (spec, common), spec.blocks)])
        outliers = found.outlier_features()["feature"].tolist()
        if not (spec.features or outliers):
            raise _no_outlier(found, spec)
        features = check_features(spec.features or outliers, width)
        treatments = plan(features, width, spec.methods, spec.controls, spec.seed, spec.where, outliers)
        fields = {"experiment": "ablate", **common, "where": spec.where, "seed": spec.seed, "alpha": spec.alpha}
        asked = {key: _row(*key, fields) for key in itertools.product(METRICS, treatments)}
        rows = {} if force else {key: row for key, fields in asked.items() if (row := row_file.find(fields))}
        missing = [key for key in asked if key not in rows]
        means = feature_means(found) if "mean" in spec.methods else {}  # which travel with each cell
        cells = _cells(job, spec, common, missing, means)
        bar.total += sum(cell.steps for cell in cells)
        for _, measured in engine.run(cells):
            new = {key: asked[key] | value for key, value in measured.items()}
            check_same_weights([*rows.values(), *new.values()])
            row_file.add(*new.values())
            rows |= new
    return [rows[key] for key in asked]


def _row(metric: str, treatment: Treatment, common: dict) -> dict:
    """The fields of a row but its value."""
    of_treatment = {name: value for name, value in vars(treatment).items() if value is not None}
    return {**common, **of_treatment, "features": list(treatment.features), "metric": metric}


def _cells(job: Job, spec: Ablation, common: dict, missing: list[Key], means: Means) -> list[Cell]:
    """What is measured together: as much as one pass over the text, or over the layers, has in common."""
    cells = []
    for metric in METRICS:
        treatments = [treatment for of, treatment in missing if of == metric]
        together = metric == "top1_softmax" or spec.stream
        sets = [treatments] if together else [[treatment] for treatment in treatments]
        for some in filter(None, sets):
            steps = spec.blocks * (1 if metric == "top1_softmax" else len(some))
            cells.append(Cell(f"{metric} {len(cells)}", _measure, job, (spec, common, metric, some, means), steps))
    return cells


def _measure(
    bench: Bench, job: Job, spec: Ablation, common: dict, metric: str, treatments: list[Treatment], means: Means
) -> dict[Key, dict]:
    """The value of each treatment and what they have cost, as fields of rows."""
    model, _ = bench.load(job, spec, common)
    blocks = Counted(job.blocks, bench.bar)
    with measuring(spec.device) as spent:
        values = dict(measure(model, blocks, treatments, metric, spec.where, spec.seed, means))
    new = {"unit": "1"} | bench.weights() | spent.fields
    return {(metric, treatment): {"value": value} | new for treatment, value in values.items()}


def _trace(bench: Bench, job: Job, spec: Ablation, common: dict) -> tuple[Trace, dict]:
    model, _ = bench.load(job, spec, common)
    return trace(model, Counted(job.blocks, bench.bar), STREAM, spec.alpha, attention=False), common | bench.weights()


def _no_outlier(found: Trace, spec: Ablation) -> UserError:
    """The error for a model in which there is nothing to ablate."""
    nearest = found.features().iloc[0]
    return UserError(
        f"'{short_name(spec.model)}' has no outlier feature on this text (feature {nearest['feature']} hits "
        f"{nearest['layers']:.0%} of layers and {nearest['positions']:.1%} of positions); name features with "
        "--features or lower --alpha"
    )
