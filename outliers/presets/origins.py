"""What writes features of one model: those that are asked for, or those that stand out."""

from outliers.metrics.origins import Origins
from outliers.metrics.trace import Trace
from outliers.presets.emergence import counted
from outliers.runs.rows import Row
from outliers.specification.kinds import Account
from outliers.subjects.causal import Causal
from outliers.subjects.cell import Cell, Plan, Stages
from outliers.tracing.result import STREAM
from outliers.variants.quantized import EXACT


class ToAccount(Causal):
    """A model that is checked with the features to account for."""

    settings: Account

    def prepare(self) -> None:
        super().prepare()
        metric = _metric(self.settings, self.settings.features or [0])
        metric.measurement.check(Cell(self, EXACT, metric))  # before a trace is made


def origins_plans(spec: Account) -> list[Plan]:
    """The account of the features of a specification; by default of what a trace finds."""
    subject = ToAccount(spec.model, spec.revision, spec)
    return [Plan(subject, _stages(subject))]


def _stages(subject: ToAccount) -> Stages:
    spec, features = subject.settings, subject.settings.features
    if not features:
        (traced,) = yield [Cell(subject, EXACT, Trace(roles=STREAM, alpha=spec.alpha, details=True))]
        features = standing_out(traced)
    yield [Cell(subject, EXACT, _metric(spec, features))]


def _metric(spec: Account, features: list[int]) -> Origins:
    return Origins(features=features, positions=spec.positions, neurons=spec.neurons)


def standing_out(traced: Row) -> list[int]:
    """The outlier features, and that of the largest entry of the residual stream."""
    largest = [value for value in traced.values if value["metric"] == "residual.value"]
    massive = max(largest, key=lambda value: abs(value["value"]))["feature"]
    return list(dict.fromkeys([*counted(traced)["features"], massive]))
