"""Places and sizes of outlier features, and the row of Table 4, of one model or along a family."""

from collections.abc import Sequence

from pydantic import Field

from outliers.criterion import OF_EVERY_STACK
from outliers.errors import UserError
from outliers.metrics.records import KeptTrace, Perplexity, Top1, Trace
from outliers.runs.rows import Row
from outliers.specification.fields import Models, Name, Names
from outliers.specification.kinds import OfOneModel, Settings
from outliers.subjects.causal import Causal, MaybeUnlabelled
from outliers.subjects.cell import Cell, Plan, Stages
from outliers.variants.ablated import WHERE, Ablated, Intervention
from outliers.variants.quantized import EXACT

USUAL = 4  # passes over the blocks, two of them for the attention
CROSS = "cross"  # view of an encoder-decoder: the encoder's states in cross-attention


class Emergence(Settings):
    """Outlier features along a family of models, or along revisions of one.

    Example:
        >>> rows = outliers.run(outliers.Emergence(models=["pocket/gpt2-0.1m"], block=64, blocks=2))
    """

    experiment = "emergence"

    name: Name = "emergence"
    models: Models
    revisions: Names | None = Field(
        default=None, description="Revisions of one model, such as step1000,step8000; or folders in its own."
    )

    def plans(self) -> list[Plan]:
        """Return the cells for the row of Table 4 of every model, or of every revision of one.

        Raises:
            UserError: there are revisions of several models.
        """
        if self.revisions and len(self.models) > 1:
            raise UserError(f"revisions of {len(self.models)} models; expected revisions of one model")
        subjects = [Causal(name, revision, self) for name in self.models for revision in self.revisions or [None]]
        return [Plan(subject, _stages(subject, Trace(alpha=self.alpha)), usual=lambda: USUAL) for subject in subjects]


class OneModel(OfOneModel):
    """A trace of one model."""

    experiment = "trace"
    of_folder = True

    name: Name = "trace"
    by_token: bool = Field(
        default=False, title="tokens", description="Find the tokens that carry the outlier features."
    )
    imatrix: bool = Field(default=False, description="Also write imatrix.gguf for llama-quantize.")
    masks: bool = Field(
        default=False, description="Also write masks of outlier features and tokens; takes another pass."
    )

    def plans(self) -> list[Plan]:
        files = {"tokens": self.by_token, "imatrix": self.imatrix, "masks": self.masks}
        metric = KeptTrace(roles=OF_EVERY_STACK, alpha=self.alpha, attention=True, details=True, **files)
        subject = MaybeUnlabelled(self.model, self.revision, self)
        return [Plan(subject, _stages(subject, metric), usual=lambda: USUAL)]


def _stages(subject: Causal, metric: Trace) -> Stages:
    """Yield perplexity and trace; then top-1 attention, also without the outlier features if there are any."""
    _, traced = yield [Cell(subject, EXACT, Perplexity()), Cell(subject, EXACT, metric)]
    if not attends(traced):
        return
    without = [view for view in counted(traced) if view["features"] and view.get("stack") != CROSS]
    ablated = [(Ablated(Intervention(tuple(view["features"])), where(view)), ablated_in(view)) for view in without]
    yield [Cell(subject, variant, Top1(), labels) for variant, labels in ((EXACT, {}), *ablated)]


def attends(traced: Row) -> bool:
    """Return whether the model of a trace's row has attention, without its configuration."""
    return traced.provenance.get("attends", True)


def counted(traced: Row) -> list[dict]:
    """Return those values of a trace's row that count outlier features, one for each view of the model.

    Each has `features` in ascending order, and `hidden_size`; with several views also `stack` and its `layers`, the
    first and the one after the last.
    """
    return [value for value in traced.values if value["metric"] == "count"]


def where(view: dict, roles: Sequence[str] = WHERE) -> tuple[str, ...]:
    """Return the places of some roles in the layers of a view from `counted`."""
    before = "layers.{}:{}.".format(*view["layers"]) if "layers" in view else ""
    return tuple(f"{before}{role}" for role in roles)


def ablated_in(view: dict) -> dict[str, str]:
    """Return the field of a row that names the view in which features are ablated; empty for a model of one view."""
    return {"ablated": view["stack"]} if "stack" in view else {}
