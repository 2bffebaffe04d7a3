"""The record of a metric: what it is called, its parameters, and where it is measured."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict, Field

from outliers.specification.kinds import DRAWS, Checked, Repeats, resolved

if TYPE_CHECKING:
    from outliers.metrics.attention import Look
    from outliers.metrics.measurement import Measurement, Read, Seen


class Metric(Checked):
    """A measurement of a subject under a variant; its fields are its parameters, and options of commands.

    name: in rows and on the command line. measured_by: its `Measurement`, or `module:object`, which is imported when
    something is measured. subject: the class of what it is asked of, by its place, made of model, revision and
    settings; None where it is asked of something else than a model. timed: whether it measures time, so that the
    machine is a fact of its rows. needs: facts, and fields of each value, that its tables and figures take. view: what
    shows its flat rows as an `outliers.show.section.Section`, or its place; the field `scheme` of rows is their
    variant then.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)  # until one is made, as `Named`

    name: ClassVar[str]
    measured_by: "ClassVar[str | Measurement]"
    subject: ClassVar[str | None] = "outliers.subjects.causal:Causal"
    timed: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()
    view: ClassVar[str | Callable | None] = None

    @property
    def asked(self) -> dict:
        """Its fields in rows: its name, and its parameters but for defaults, so that a new one keeps old rows."""
        return {"name": self.name, **self.model_dump(mode="json", exclude_defaults=True)}

    @property
    def measurement(self) -> "Measurement":
        """Its measurement."""
        return resolved(self.measured_by)


class StatesMetric(Metric):
    """A metric of the last hidden states; all that are asked of one variant ride on one pass over the text.

    seen_by: how it is made of them. of_text: whether what is predicted has to be tokens.
    """

    measured_by = "outliers.metrics.states:STATES"
    seen_by: "ClassVar[str | Seen | Read]"
    of_text: ClassVar[bool] = False

    draws: Repeats = Field(1, description=DRAWS)


class AttentionMetric(Metric):
    """A metric of attention probabilities; all that are asked of one variant ride on one pass over the text, in which
    ablations change the attention of a layer at a time.

    seen_by: how it is made of them.
    """

    measured_by = "outliers.metrics.attention:ATTENTION"
    seen_by: "ClassVar[str | Look]"
