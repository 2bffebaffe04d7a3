"""Places and sizes of outlier features, and the row of Table 4: of one model, or along a family."""

from collections.abc import Sequence

from outliers.criterion import OF_EVERY_STACK
from outliers.errors import UserError
from outliers.metrics.records import KeptTrace, Perplexity, Top1, Trace
from outliers.runs.rows import Row
from outliers.specification.kinds import Emergence, OneModel
from outliers.subjects.causal import Causal, MaybeUnlabelled
from outliers.subjects.cell import Cell, Plan, Stages
from outliers.variants.ablated import WHERE, Ablated, Intervention
from outliers.variants.quantized import EXACT

CROSS = "cross"  # a view of an encoder-decoder, whose features are those of the encoder


def emergence_plans(spec: Emergence) -> list[Plan]:
    """The row of Table 4 of every model, or of every revision of one.

    Raises:
        UserError: there are revisions of several models.
    """
    if spec.revisions and len(spec.models) > 1:
        raise UserError(f"revisions of {len(spec.models)} models; expected revisions of one model")
    subjects = [Causal(name, revision, spec) for name in spec.models for revision in spec.revisions or [None]]
    return [Plan(subject, _stages(subject, Trace(alpha=spec.alpha))) for subject in subjects]


def trace_plans(spec: OneModel) -> list[Plan]:
    """The row of Table 4 of a model, and all that its trace says, which is kept."""
    files = {"tokens": spec.by_token, "imatrix": spec.imatrix, "masks": spec.masks}
    metric = KeptTrace(roles=OF_EVERY_STACK, alpha=spec.alpha, attention=True, details=True, **files)
    subject = MaybeUnlabelled(spec.model, spec.revision, spec)
    return [Plan(subject, _stages(subject, metric))]


def _stages(subject: Causal, metric: Trace) -> Stages:
    """Perplexity and trace; then how sure attention is, with and, where there are outlier features, without them."""
    _, traced = yield [Cell(subject, EXACT, Perplexity()), Cell(subject, EXACT, metric)]
    without = [view for view in counted(traced) if view["features"] and view.get("stack") != CROSS]
    ablated = [(Ablated(Intervention(tuple(view["features"])), where(view)), ablated_in(view)) for view in without]
    yield [Cell(subject, variant, Top1(), about) for variant, about in ((EXACT, {}), *ablated)]


def counted(traced: Row) -> list[dict]:
    """The values of a row of a trace that count outlier features, one each view of the model: which, in ascending
    order, and `hidden_size`; where there are several views `stack` and its `layers`, from the first to behind the last.
    """
    return [value for value in traced.values if value["metric"] == "count"]


def where(view: dict, roles: Sequence[str] = WHERE) -> tuple[str, ...]:
    """The places of some roles in the layers of a view that was counted."""
    before = "layers.{}:{}.".format(*view["layers"]) if "layers" in view else ""
    return tuple(f"{before}{role}" for role in roles)


def ablated_in(view: dict) -> dict[str, str]:
    """The fields of a row that name the ablated view; none where a model has one."""
    return {"ablated": view["stack"]} if "stack" in view else {}
