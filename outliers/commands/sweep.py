"""A sweep: the perplexity of models under schemes (Table 1)."""

from pathlib import Path

from pydantic import Field

from outliers.commands import Command
from outliers.config.experiment import CALIBRATED, UNDER_SCHEMES, Experiment
from outliers.config.fields import Draws, Models, Name, Schemes
from outliers.criterion import LOG_PERPLEXITY, PICTURES
from outliers.errors import UserError
from outliers.metrics.records import Accuracy, Agreement, Metric, Perplexity
from outliers.quantization.schemes import BASELINE, TABLE1, get_scheme
from outliers.runs.rows import Row
from outliers.runs.run import run
from outliers.subjects.causal import MaybeUnlabelled
from outliers.subjects.cell import Cell, CellPlan, Stages, Subject
from outliers.variants.quantized import Quantized


class Sweep(Experiment):
    """A sweep: every model under every scheme on one text.

    Rounding scatters the results, which `draws` shows. A scheme has its own threshold unless `alpha` is given.

    Example:
        >>> fields = {"models": ["pocket/gpt2-0.1m"], "schemes": ["fp32", "absmax"], "block": 64, "blocks": 2}
        >>> len(outliers.run(outliers.Sweep(**fields)))
        2
    """

    takes = (*CALIBRATED, *UNDER_SCHEMES)
    view = "outliers.views.perplexity:perplexity_section"

    name: Name = "sweep"
    models: Models
    schemes: Schemes = Field(
        default=TABLE1,
        validate_default=True,
        description="fp32 (no quantization), and any of docs/schemes.md, such as w4a8-g64 or mxfp4.",
    )
    draws: Draws = 1

    def plans(self) -> list[CellPlan]:
        subjects = [MaybeUnlabelled(name, self.revision, self) for name in self.models]
        return [CellPlan(subject, _stages(subject, self.quantized, self.draws)) for subject in subjects]


def _with_baseline(experiment: Sweep) -> Sweep:
    """Put fp32 before schemes without it, because costs and their paired standard errors are relative to it."""
    exact = get_scheme(BASELINE)
    if exact in experiment.schemes:
        return experiment
    return experiment.model_copy(update={"schemes": [exact, *experiment.schemes]})


COMMAND = Command(
    "perplexity under every 8-bit scheme, as in Table 1 of the paper",
    """Measure the perplexity of models under every 8-bit scheme of the paper's Table 1.

Prints the table and writes rows, tables and a figure. A second run resumes the first. Options replace
the fields of the experiment; with models and no experiment, the other fields have their defaults.

Examples:

`python -m outliers.sweep`

`python -m outliers.sweep --model gpt2 --model facebook/opt-125m --text c4 --block 1024 --device cuda`

`python -m outliers.sweep pocket/table1 --scheme fp32 --scheme llm.int8 --alpha 4`
""",
    Sweep,
    default="pocket/table1",
    completed=_with_baseline,
)


def _stages(subject: Subject, variants: list[Quantized], draws: int) -> Stages:
    """Yield the cells for perplexity, then for pictures those for accuracy, or for agreement if classes are unknown."""

    def under_each(metric: Metric) -> list[Cell]:
        return [Cell(subject, variant, metric) for variant in variants]

    rows = yield under_each(Perplexity(draws=draws))
    measured = next((row for row in rows if isinstance(row, Row)), None)  # a row that did not fail
    if measured and measured.provenance.get("protocol") == PICTURES:
        by_class = measured.values[0]["metric"] in (Perplexity.name, LOG_PERPLEXITY)
        yield under_each((Accuracy if by_class else Agreement)(draws=draws))


def sweep(
    experiment: Sweep | None = None, out: str | Path | None = None, force: bool = False, **fields: object
) -> list[dict]:
    """Return the perplexity of every model under every scheme (LLM.int8(), Table 1).

    Args:
        experiment: the experiment to run.
        out, force: as for `run`.
        fields: those of the experiment in its place: `sweep(models=["gpt2"], schemes=["llm.int8", mine])`.

    Returns:
        One row a model and scheme, model by model; schemes that share weight codes are side by side. Of several draws
        the value is their mean, with their sample standard deviation.

    Raises:
        UserError: as `run`.

    Example:
        >>> rows = outliers.sweep(models=["pocket/gpt2-0.1m"], schemes=["fp32", "absmax"], block=64, blocks=2)
        >>> [row["scheme"] for row in rows]
        ['fp32', 'absmax']
    """
    if experiment is not None and fields:
        raise UserError(f"an experiment and its field '{min(fields)}'; expected one or the other")
    return run(experiment or Sweep(**fields), out, force)
