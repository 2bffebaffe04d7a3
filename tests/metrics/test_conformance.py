"""What holds of every metric of the registry, whatever it measures; a new one is among them as soon as it is there."""

import pickle
from collections.abc import Callable
from functools import cache, partial

import pytest

from outliers import Cells, UserError, run, variant
from outliers.config.experiment import Experiment
from outliers.metrics.records import Metric, metrics
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache
from outliers.terminal.progress import Progress
from tests.runs.test_every_command import alike
from tests.runs.test_failures import Failing

MODEL, BLOCK, BLOCKS = "pocket/gpt2-0.1m", 16, 2
FIELDS = {  # of metrics that have no default, or a long one
    "origins": {"features": (3, 5), "positions": (4,)},
    "zeroshot": {"task": "lambada-local", "limit": 2},
    "fits": {"hardware": "a GPU", "gigabytes": 8},
}
EVERY: dict[str, Callable[[], Metric]] = {
    name: partial(record, **FIELDS.get(name, {})) for name, record in metrics().items()
}
OF_TEXT = [name for name, make in EVERY.items() if make().subject == Metric.subject and make().measurement.splits]
ONE_BY_ONE = {"layers", "weights"}  # of a model in memory alone


def values_in(parts: list[slice], metric: Metric, **how) -> list[dict]:
    """The values of a metric of which cells and results of parts of the text travel between machines."""
    subject = ModelWithText(MODEL, None, Experiment(name="text", block=BLOCK, blocks=BLOCKS, **how))
    subject.prepare()
    cell = pickle.loads(pickle.dumps(Cell(subject, variant("absmax"), metric)))
    measurement = metric.measurement
    measurement.check(cell)
    with Progress(0) as bar:
        model_cache = ModelCache(bar)
        results = [measurement.measure(model_cache, [cell], part, {}) for part in parts]
    return measurement.values(cell, [one for (one,) in pickle.loads(pickle.dumps(results))])


@cache
def whole(name: str) -> list[dict]:
    return values_in([slice(0, BLOCKS)], EVERY[name]())


@pytest.mark.parametrize("name", EVERY)
def test_a_request_makes_the_metric_again(name):
    request = dict(EVERY[name]().request)
    assert request.pop("name") == name
    assert metrics()[name](**FIELDS.get(name, {}) | request) == EVERY[name]()


@pytest.mark.parametrize("name", OF_TEXT)
def test_parts_of_a_text_add_up(name):
    assert alike(values_in([slice(0, 1), slice(1, BLOCKS)], EVERY[name]()), whole(name))


@pytest.mark.parametrize("name", OF_TEXT)
def test_a_streamed_model_has_the_same_values(name):
    if name in ONE_BY_ONE:
        with pytest.raises(UserError, match="of a streamed model; expected one in memory: leave --stream out"):
            values_in([slice(0, BLOCKS)], EVERY[name](), stream=True)
    else:
        assert alike(values_in([slice(0, BLOCKS)], EVERY[name](), stream=True), whole(name))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    """The rows of all metrics in one run, under a variant that fails between two that do not."""
    variants = ["fp32", Failing(UserError("no")), "absmax"]
    spec = Cells(
        models=[MODEL], metrics=WITH_ALL, variants=variants, block=BLOCK, blocks=BLOCKS, features=[3, 5], positions=[4]
    )
    return run(spec, tmp_path_factory.mktemp("all"))


# Of a whole model too, whose errors no variant makes.
WITH_ALL = [name for name in OF_TEXT if name not in ("errors", "places", "layers")]


@pytest.mark.parametrize("name", WITH_ALL)
def test_a_metric_fails_alone(name, rows):
    """Its row says why; beside it are the values that it has without the other metrics and variants."""
    mine = [row for row in rows if row["metric"] in {name, *(one["metric"] for one in whole(name))}]
    assert [row["failed"] for row in mine if row["variant"] == "failing"] == ["no"]
    measured = [row["value"] for row in mine if row["variant"] == "absmax"]
    assert alike(measured, [one["value"] for one in whole(name)])
