"""The search of a plan: projections that a scheme breaks are found, others are not, and other blocks confirm it."""

import contextlib
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import outliers
from outliers import SCHEMES, Quantized, load_model, perplexity, plan, run
from outliers.commands.plan import Planning
from outliers.metrics.records import Perplexity
from outliers.models.anatomy import projections
from outliers.quantization.linear import stored_weight
from outliers.runs.stages.plan import (
    CONFIRM,
    SINGLE,
    Choice,
    CostAlone,
    Search,
    _choice,
    _confirmation_stages,
    _enough,
    _removal_stages,
    exports_of,
    passes_of,
    plan_of,
)
from outliers.show.section import Context
from outliers.show.tables import measured_on
from outliers.subjects.cell import Cell
from outliers.subjects.given import Given
from outliers.views.plan import plan_curve, plan_points, plan_rows_section
from tests.small_models import records_of, sample_blocks

MODEL = "pocket/gpt2-0.1m"
BROKEN = ["transformer.h.1.mlp.c_proj"]  # the last one, whose output nothing quantized reads
SMALL = {"block": 32, "blocks": 2, "confirm": 3, "draws": 2}


@pytest.fixture(scope="module")
def broken():
    """A model with one large weight in a projection, which takes the digits of one scale for the whole weight."""
    model = load_model(MODEL)
    modules = {one.path: one.module for one in projections(model)}
    with torch.no_grad():
        for path in BROKEN:
            weight = stored_weight(modules[path])
            weight[3, 5] = 60 * weight.abs().max()
    return model


@pytest.fixture(scope="module")
def blocks():
    return sample_blocks(MODEL, 64, 8)


def test_what_is_broken_stays_exact_and_the_cost_is_that_of_the_model_without_it(broken, blocks):
    found = plan(broken, blocks[:3], "absmax", blocks[3:], cost=0.02, draws=2)
    assert found.exact == BROKEN
    assert found.projections == 8 and found.instead == {}
    measured = found.measured
    alone = perplexity(outliers.quantize(broken, "absmax", skip=found.exact), blocks[3:])
    exact = perplexity(broken, blocks[3:])
    assert measured["unquantized"] == pytest.approx(exact, rel=1e-4)  # a mean of two draws
    assert measured["cost"] == pytest.approx(alone / exact - 1, abs=5e-3)
    assert measured["cost"] <= measured["allowed"] == 0.02
    whole = perplexity(outliers.quantize(broken, "absmax"), blocks[3:]) / exact - 1
    assert whole > 0.05


def test_a_better_scheme_is_enough_where_it_mends(broken, blocks):
    """A scale for each output leaves the other outputs their digits."""
    found = plan(broken, blocks[:3], "absmax", blocks[3:], cost=0.02, draws=2, instead=["absmax-row", "absmax-vector"])
    assert found.exact == [] and found.instead == {"absmax-vector": BROKEN}


@pytest.mark.nightly("outliers/commands/plan.py", "outliers/quantization/plans/")
def test_no_single_projection_can_be_left_out(blocks):
    model = load_model("pocket/opt-1.7m")
    text = sample_blocks("pocket/opt-1.7m", 128, 12)
    found = plan(model, text[:4], "w4a4", text[4:], cost=0.03, draws=4)
    unquantized = perplexity(model, text[4:])

    def cost(exact) -> float:
        (value,) = records_of(
            [Cell(Given(model, text[4:]), Quantized(SCHEMES["w4a4"], tuple(exact)), Perplexity(draws=4))]
        )
        return value["value"] / unquantized - 1

    assert cost(found.exact) == pytest.approx(found.measured["cost"], abs=1e-6) and found.measured["cost"] <= 0.03
    without = [cost(set(found.exact) - {path}) for path in found.exact]
    assert min(without) > 0.03
    assert found.measured["without_one"] == pytest.approx(min(without), abs=1e-6), "of all draws, and not of one"
    assert found.measured["without_one_deviation"] > 0


def test_what_one_draw_makes_the_least_is_measured_with_all():
    """By a single draw the second member is spared best, by all draws the third; the first is clearly not."""
    once, drawn = {"a": 1.5, "b": 1.08, "c": 1.09}, {"b": (1.2, 0.05), "c": (1.1, 0.05)}
    choices = [choice(path, 1) for path in once]
    stages = _removal_stages(LeftOut(), choices, math.log(1.05), [row_of(1.05, 0.05)])
    next(stages)
    asked = stages.send([row_of(1.0), *map(row_of, once.values())])
    measured = []
    with pytest.raises(StopIteration):
        while True:
            measured += asked
            asked = stages.send([row_of(*drawn[asked[0]])])
    assert measured == ["b", "c"]


class LeftOut:
    """A search whose cells are the members that are left out."""

    def cell_of(self, _stage, _variant, _about):
        return "exact"

    def cells_without(self, _stage, _chosen, left):
        return [one.path for one in left]


def row_of(perplexity, deviation=None):
    """A row of a perplexity."""
    scatter = {} if deviation is None else {"standard_deviation": deviation}
    return SimpleNamespace(values=[{"metric": "perplexity", "value": perplexity, **scatter}])


def test_other_blocks_ask_for_more(broken, blocks):
    """The scheme costs little on one block, and much on others."""
    easy, hard = blocks[2:3], blocks[4:6]
    few, more = (plan(broken, easy, "absmax", one, cost=0.02, draws=2) for one in (easy, hard))
    assert few.exact == [] and set(BROKEN) <= set(more.exact)


def choice(path, gain, price=1.0):
    return Choice(path, gain, price, None)


def test_as_many_are_taken_as_should_suffice():
    choices = [choice("a", 0.5), choice("b", 0.3), choice("c", 0.1)]
    assert [_enough(choices, loss) for loss in (-1, 0.5, 0.6, 0.85, 2)] == [0, 1, 2, 3, 3]


def test_the_rise_of_few_tokens_counts_little():
    """With as much noise as signal it is the mean of both; over many tokens it is what was measured."""
    assert CostAlone.of(0.0, 0.02, tokens=100).loss == pytest.approx(0.01)
    assert CostAlone.of(-0.3, 0.02, tokens=10**9).loss == pytest.approx(-0.3, rel=1e-6)
    assert CostAlone.of(0.0, 0.0, tokens=100) == (0.0, 0.0)


def test_the_first_scheme_that_suffices_is_taken():
    search = Search(None, None, None, tuple(map(SCHEMES.get, ["absmax-row", "w8a8"])), 0, "count", 2)
    for others, scheme, gain in (
        ([CostAlone(0.4, 0.05), CostAlone(0.1, 0.01)], "absmax-row", 0.1),
        ([CostAlone(0.4, 0.2), CostAlone(0.1, 0.05)], "w8a8", 0.4),
        ([CostAlone(0.4, 0.2), CostAlone(0.1, 0.06)], None, 0.5),
    ):
        found = _choice(search, "p", [CostAlone(0.5, 0.5), *others])
        assert (found.scheme and found.scheme.name, found.price, found.gain) == (scheme, 1, pytest.approx(gain))
    by_size = replace(search, by="parameters")
    vars(by_size)["sizes"] = {"p": 12}
    assert _choice(by_size, "p", [CostAlone(0.5, 0.5)]).price == 12


@pytest.mark.parametrize(
    ("needed", "sizes"), [(2, [2]), (7, [2, 4, 6, 8, 7]), (8, [2, 4, 6, 8, 7]), (99, [2, 4, 6, 8, 9])]
)
def test_other_blocks_add_as_few_as_suffice(needed, sizes):
    """Where the search expects that two more suffice each time; the last sets are halved."""
    every = [choice(str(number), 0.1) for number in range(9)]
    search = SimpleNamespace(cell_of=lambda *_: None, cells_of=lambda _, *sets: list(sets), allowed=lambda _exact: 1.0)
    stages = _confirmation_stages(search, every[:2], every[2:])
    measured, cells = [], next(stages)[1:]
    with contextlib.suppress(StopIteration):
        while True:
            losses = [1.0 if len(one) >= needed else 1.15 for one in cells]
            measured += [len(one) for one in cells if one]
            rows = [SimpleNamespace(values=[{"value": math.exp(loss)}]) for loss in losses]
            cells = stages.send([None, *rows] if len(measured) == 1 else rows)
    assert measured == sizes


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    spec = Planning(model=MODEL, scheme="w4a4", cost="1%", **SMALL)
    return spec, folder, run(spec, folder)


def test_other_blocks_confirm_it(kept):
    _, _, rows = kept
    confirmed = [row for row in rows if row.get("stage") == CONFIRM]
    text = sample_blocks(MODEL, 32, 5)
    exact = next(row for row in confirmed if row["variant"] == "fp32")
    assert {(row["first_block"], row["blocks"], row["draws"]) for row in confirmed} == {(2, 3, 2)}
    assert exact["value"] == pytest.approx(perplexity(load_model(MODEL), text[2:]), rel=1e-5)


def test_the_section_writes_the_plan(kept, tmp_path):
    spec, folder, rows = kept
    section = plan_rows_section(rows, Context(spec, folder))
    (tmp_path / "plan.yaml").write_text(section.files["plan.yaml"])
    found = outliers.read_plan(tmp_path / "plan.yaml")
    assert found == plan_of(rows, MODEL, 0.01, 2)
    assert found.measured["cost"] <= 0.01 and found.measured["first_block"] == 2
    assert len(section.tables[0].cells) == len(found.exact) > 0
    unquantized = next(row["value"] for row in rows if row.get("stage") == CONFIRM and "chosen" not in row)
    (singles,) = (table.data for table in section.tables if table.name == "plan_single")
    assert singles["cost"].tolist() == pytest.approx((singles["perplexity"] / unquantized - 1).tolist())
    (finding,) = section.findings
    assert f"With {len(found.exact)} exact of 8 projections, w4a4 changes the perplexity by" in finding.text
    for rows in (section.rows, [row for row in section.rows if row.get("skip")][:5]):
        assert "not quantized" not in measured_on(rows), "what sets leave exact is no setting"


def test_exports_are_files_beside_the_plan(kept):
    _, _, rows = kept
    plan = plan_of(rows, MODEL, 0.01, 2).model_copy(update={"scheme": "w8a8", "exact": BROKEN})
    found = exports_of(["bitsandbytes"], plan)
    assert set(found) == {"bitsandbytes.json"}
    assert BROKEN[0] in json.loads(found["bitsandbytes.json"])["llm_int8_skip_modules"]


def test_the_curve_has_a_point_for_each_set(kept):
    _, _, rows = kept
    points = plan_points(rows)
    sets = {(row["stage"], row["variant"]) for row in rows if "chosen" in row and row["stage"] != SINGLE}
    assert len(points) == len(sets)
    axes = plan_curve(rows, allowed=0.01)
    drawn = [len(line.get_xdata()) for line in axes.get_lines() if line.get_marker() not in ("None", None, "")]
    assert sum(drawn) == len(points)


OPT = "pocket/opt-1.7m"
FIRST, *_, LAST = SETS = ["model.decoder.layers.1.fc1", "model.decoder.layers.3.fc2", "model.decoder.layers.4.fc2"]


@pytest.fixture(scope="module")
def opt():
    return load_model(OPT), sample_blocks(OPT, 128, 4)


def perplexities_of(subject, *sets, draws=2):
    cells = [Cell(subject, Quantized(SCHEMES["absmax"], exact), Perplexity(draws=draws)) for exact in sets]
    return [record["value"] for record in records_of(cells)]


def test_a_set_passes_from_the_layer_in_which_it_differs(opt, calls_of):
    """Bit by bit the perplexities of each set alone, from fewer layers."""
    model, blocks = opt
    calls = calls_of("transformers.models.opt.modeling_opt.OPTDecoderLayer.forward")
    sets = [tuple(path for path in SETS if path != left) for left in SETS]
    alone = [perplexities_of(Given(model, blocks), exact)[0] for exact in sets]
    count = len(calls)
    assert perplexities_of(Given(model, blocks), *sets) == alone
    assert len(calls) - count <= count - 2 * len(blocks) * (1 + 2), "from the second and the fourth layer on"


def test_sets_of_other_blocks_begin_anew(opt):
    """As many, so that nothing but the blocks tells them apart."""
    model, blocks = opt
    searched, confirmed = Given(model, blocks[:2]), Given(model, blocks[2:])
    cells = [Cell(one, Quantized(SCHEMES["absmax"], (LAST,)), Perplexity()) for one in (searched, confirmed)]
    assert [record["value"] for record in records_of(cells)] == [
        perplexities_of(one, (LAST,), draws=1)[0] for one in (searched, confirmed)
    ]


def test_the_usual_search_takes_as_long_as_that_of_smollm2_under_absmax():
    """By default 204 times as long as the unquantized model passes the blocks of the search."""
    search = Search(SimpleNamespace(span=(0, 4)), SimpleNamespace(span=(4, 8)), None, (), 0.05, "count", 3)
    vars(search)["sizes"] = dict.fromkeys(range(210), 1)
    assert 204 <= passes_of(search) < 1.5 * 204
