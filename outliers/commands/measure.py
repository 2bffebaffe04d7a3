"""Any metrics of any models under any variants."""

from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, create_model

from outliers.commands import Command
from outliers.config.experiment import CALIBRATED, Experiment
from outliers.config.fields import Checked, Models, Name, Revision, Split, Unique, resolved, saying_all
from outliers.errors import UserError, unknown_name
from outliers.metrics.records import Metric, Perplexity, metrics
from outliers.subjects.cell import Cell, CellPlan

if TYPE_CHECKING:
    from outliers.models.variant import Variant

METRICS = {name: record for name, record in metrics().items() if record.subject}
VARIANT = (
    "Variant of a model, such as absmax+hadamard, 'zero(247)+llm.int8' or 'shuffle(3@ffn_in)'; several by several "
    "options."
)
METRIC = f"Metrics: {', '.join(METRICS)}; several with commas."
NO_OBJECTS = (bool, int, float, bytes, list, dict)  # types of values in files


def _parse_variant(value: Any) -> Any:
    from outliers.variants.written import variant  # late, for --help does not need it

    if value is None or isinstance(value, NO_OBJECTS):
        raise ValueError("expected the writing of a variant, or a Variant")
    with saying_all():
        return variant(value) if isinstance(value, str) else value


def _metric(value: Any) -> Any:
    """Return the class of a metric from its name, or the metric itself, with its parameters."""
    if value is None or isinstance(value, NO_OBJECTS):
        raise ValueError("expected the name of a metric, or a Metric")
    with saying_all():
        if isinstance(value, str) and value not in METRICS:
            raise unknown_name("metric", value, METRICS)
        return METRICS[value] if isinstance(value, str) else value


NAME = PlainSerializer(lambda variant_or_metric: variant_or_metric.name)
Variants = Annotated[
    list[Annotated[Any, PlainValidator(_parse_variant, json_schema_input_type=str), NAME]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(min_length=1),
]
Metrics = Annotated[
    list[Annotated[Any, PlainValidator(_metric, json_schema_input_type=str), NAME]],
    Split,
    Field(min_length=1),
    Unique,
]


Parameters = create_model(
    "Parameters",
    __base__=Checked,
    __doc__="The parameters of all metrics, each as a field that need not be given, but for those that are settings.",
    **{
        name: (field.annotation | None, Field(None, description=field.description))
        for record in METRICS.values()
        for name, field in record.model_fields.items()
        if name not in (*CALIBRATED, "name", "shows")
    },
)


class Cells(Parameters, Experiment):
    """Cells of models, variants and metrics; further fields are parameters of the metrics that have them."""

    takes = (*CALIBRATED, *Parameters.model_fields)
    view = "outliers.views.measured:measured_section"

    name: Name = "measure"
    models: Models
    revision: Revision = None
    variants: Variants = Field(default=["fp32"], description=VARIANT, validate_default=True)
    metrics: Metrics = Field(default=["perplexity"], description=METRIC, validate_default=True)

    @property
    def parametrized_metrics(self) -> list[Metric]:
        """The metrics, with those given fields that are their parameters.

        Raises:
            UserError: a field was given that is a parameter of none of them.
        """
        records = []
        for metric in self.metrics:
            if isinstance(metric, Metric):
                records.append(metric)
            else:
                given = self.model_fields_set & metric.model_fields.keys()
                records.append(metric(**{field: getattr(self, field) for field in given}))
        for field in sorted(self.model_fields_set & Parameters.model_fields.keys()):
            if not any(field in type(record).model_fields for record in records):
                raise UserError(
                    f"field '{field}' is a parameter of none of the requested metrics "
                    f"({', '.join(record.name for record in records)}); leave it out, or request a metric that has it"
                )
        return records

    def plans(self) -> list[CellPlan]:
        for variant in self.variants:
            if variant.needs_trace:
                raise UserError(
                    f"'{variant.name}' needs the mean of each feature over the text, which outliers.ablate finds; "
                    "expected zero or shuffle, or a variant that knows it"
                )
        groups: dict[tuple, list[tuple[Variant, Metric]]] = defaultdict(list)
        for variant, metric in product(self.variants, self.parametrized_metrics):
            kind = resolved(metric.subject)
            groups[kind, variant.name if kind.has_one_variant else None].append((variant, metric))
        subjects = [
            (kind(name, self.revision, self), pairs) for name in self.models for (kind, _), pairs in groups.items()
        ]
        return [CellPlan.of(subject, [Cell(subject, *pair) for pair in pairs]) for subject, pairs in subjects]


def _with_baseline(experiment: Cells) -> Cells:
    """Put the unmodified model before variants without it whose perplexity is measured: costs are relative to it."""
    from outliers.variants.quantized import EXACT  # late, as for variants

    variants = experiment.variants
    has_baseline = EXACT.name in [variant.name for variant in variants]
    if has_baseline or all(metric.name != Perplexity.name for metric in experiment.parametrized_metrics):
        return experiment
    return experiment.model_copy(update={"variants": [EXACT, *variants]})


COMMAND = Command(
    "any metric of any model under any variant",
    """Measure models under variants: schemes, ablations, planted outliers, several together.

Prints the values, then the tables of each metric, and writes rows, tables, figures and a page. A second run resumes
the first. A variant is a list of terms joined by +, in the order in which they act.

Examples:

`python -m outliers.measure pocket/gpt2-1.7m --metric perplexity,top1 --variant absmax --variant 'zero(3)+llm.int8'`

`python -m outliers.measure smollm2-135m --metric agreement --variant llm.int8+skip=layers.11 --draws 4`
""",
    Cells,
    completed=_with_baseline,
)
