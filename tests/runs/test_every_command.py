"""Whatever is measured: a cut run goes on, a finished one is not repeated, and a streamed model has the same rows."""

from collections.abc import Callable
from functools import cache

import pytest

from outliers import Cells, Sweep, run
from outliers.commands.ablate import Ablation
from outliers.commands.damage import Damage
from outliers.commands.emergence import Emergence
from outliers.commands.latency import Latency
from outliers.commands.memory import Memory
from outliers.commands.origins import Account
from outliers.commands.plan import Planning
from outliers.commands.trace import Tracing
from outliers.commands.zeroshot import ZeroShot
from outliers.runs.rows import FILE, Rows
from tests.conftest import lasting, needs_harness
from tests.metrics.test_zeroshot import LOCAL

MODEL, OTHER = "pocket/gpt2-0.1m", "pocket/gpt2-0.5m"
TEXT = {"block": 32, "blocks": 2, "alpha": 3}
MEASURES = ["agreement", "keys", "range", "top1", "sinks", "token_losses"]
MEASURED = {
    "sweep": Sweep(models=[MODEL], schemes=["fp32", "zeropoint", "llm.int8"], draws=2, **TEXT),
    "trace": Tracing(model=MODEL, **TEXT),
    "ablate": Ablation(model=MODEL, features=[3, 7], methods=["mean", "shuffle"], **TEXT),
    "origins": Account(
        model=MODEL, features=[3], by="writers,readers,weights,keys", places="q,up", controls=2, neurons=1, **TEXT
    ),
    "damage": Damage(model=MODEL, schemes=["absmax"], draws=2, **TEXT),
    "plan": Planning(model=MODEL, scheme="w4a4", cost="1%", confirm=3, draws=2, **TEXT),
    "emergence": Emergence(models=[MODEL, OTHER], **TEXT),
    "measure": Cells(
        models=[MODEL], metrics=MEASURES, variants=["absmax", "zero(3)+llm.int8", "absmax+zero(3)"], block=32, blocks=2
    ),
    "latency": Latency(
        models=[MODEL], schemes=["fp32", "llm.int8"], dtype="float32", batches=[1, 3], prompt=8, tokens=2, repeats=2
    ),
    "memory": Memory(models=[MODEL, OTHER], hardware=[{"hardware": "one", "gigabytes": 1}], context=64),
    "zeroshot": ZeroShot(models=[MODEL], schemes=["llm.int8", "fp32"], tasks=LOCAL, limit=3),
}
COMMANDS = [pytest.param(name, marks=needs_harness if name == "zeroshot" else ()) for name in MEASURED]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], tuple[list[dict], int]]:
    """The rows of an undisturbed run, and how many lines it wrote."""

    @cache
    def of(command: str) -> tuple[list[dict], int]:
        folder = tmp_path_factory.mktemp(command)
        return run(MEASURED[command], folder), (folder / FILE).read_bytes().count(b"\n")

    return of


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_goes_on_where_it_stopped(command, whole, monkeypatch, tmp_path):
    spec, (want, lines), add, added = MEASURED[command], whole(command), Rows.add, []

    def press(kept, *rows):
        add(kept, *rows)
        added.extend(rows)
        if len(added) >= lines // 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="finished row"):
        patch.setattr(Rows, "add", press)
        run(spec, tmp_path)
    begun = (tmp_path / FILE).read_bytes()
    rows = run(spec, tmp_path)
    finished = (tmp_path / FILE).read_bytes()
    assert finished.startswith(begun) and 0 < begun.count(b"\n") < finished.count(b"\n") == lines
    assert [row["metric"] for row in rows] == [row["metric"] for row in want]
    assert command == "latency" or lasting(rows) == lasting(want)
    assert run(spec, tmp_path) == rows
    assert (tmp_path / FILE).read_bytes() == finished, "nothing is measured again"


@pytest.mark.parametrize("command", [name for name, spec in MEASURED.items() if "stream" in type(spec).model_fields])
def test_a_streamed_model_has_the_same_rows(command, whole, tmp_path):
    want, _ = whole(command)
    rows = run(MEASURED[command].model_copy(update={"stream": True, "memory": 10_000}), tmp_path)
    assert {row.pop("streamed") for row in rows} == {True}
    for row, other in zip(lasting(rows), lasting(want), strict=True):
        assert {name for name in row | other if not alike(row.get(name), other.get(name))} == set()


def alike(one, other) -> bool:
    """Whether two values of rows are the same, up to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == (pytest.approx(other, rel=1e-6, abs=1e-9) if isinstance(other, float) else other)
