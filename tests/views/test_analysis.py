"""What numbers say: costs, scatter, intervals, whether two values are apart; and how tables write them."""

import math

import numpy as np
import pandas as pd
import pytest

from outliers.show.tables import Table, cell, scattered, with_interval
from outliers.show.value import Value, comparable_rows, exact, mean, ratio, reach, value_of
from outliers.views.perplexity import costs


def test_a_prefix_and_a_cache_are_no_baseline():
    """Places that fp32 would leave exact change nothing of it."""
    variants = {"fp32+skip=ffn_out": 20.0, "prefix(30)": 10.0, "kv=int4": 40.0}
    rows = [{"model": "a", "variant": name, "value": value} for name, value in variants.items()]
    assert [row["cost"].mean for row in costs(rows)] == [0.0, -0.5, 1.0]


def test_the_scatter_of_a_value_has_its_column():
    assert value_of({"value": 2.0, "standard_deviation": 0.5}) == Value(2.0, 0.5)
    table = {"perplexity": 3.0, "perplexity_deviation": math.nan, "standard_deviation": 9.0}
    assert value_of(table, "perplexity") == Value(3.0)
    assert value_of({}, "perplexity") == Value(None)


def test_two_values_are_apart_by_the_scatter_of_their_difference():
    low = Value(100.0, 1.2)
    assert not Value(103.0, 1.2).is_apart(low), "it scatters more than either"
    assert Value(104.0, 1.2).is_apart(low), "and less than both together"
    assert Value(104.0, 1.2).is_above(low) and not low.is_above(Value(104.0, 1.2))
    assert not Value(103.0, 1.2).is_above(low)
    assert Value(100.9, 0.4).is_apart(exact(100.0)) and not Value(100.9, 0.5).is_apart(exact(100.0))
    assert not Value(200.0).is_apart(exact(100.0)) and not exact(100.0).is_apart(Value(200.0)), "of a single draw"


def test_an_interval_is_students():
    assert reach(1.0, 1) == pytest.approx(12.7062, abs=1e-4)
    assert reach(np.array([1.0, 2.0]), 30) == pytest.approx([2.0423, 4.0845], abs=1e-4)
    assert mean([1.0, 3.0]).reach == pytest.approx(12.7062, abs=1e-4)
    assert mean([3.0]) == (3.0, None, 1)


def test_a_ratio_is_shown_beyond_the_scatter_of_seeds():
    shown = ratio({0: 2.0, 1: 2.1, 2: 1.9}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert shown.differs_from_one and shown.interval[0] < shown.value < shown.interval[1]
    assert not ratio({0: 2.0, 1: 0.5}, {0: 1.0, 1: 1.0}).differs_from_one
    assert not ratio({0: 2.0}, {0: 1.0}).differs_from_one, "one seed"


def test_an_empty_cell_of_a_data_frame_is_no_field():
    rows = [{"a": 1, "b": [1, 2]}, {"a": 2, "c": "x"}]
    assert comparable_rows(pd.DataFrame(rows)) == rows
    assert comparable_rows(rows) == rows


def test_cells():
    assert cell(".2f", 1.234) == "1.23"
    assert cell("+.2f", 0.5, 0.01, unit=100) == "+50.0±1.0", "the sign is of the number alone"
    assert cell("+.2f", 14217.3, 14309.0) == "+14,217±14,309"
    assert cell(".2f", 2e7, 3.0) == "2.00e+07±3.00", "broken models make no wide tables"
    assert [cell(".2f", value) for value in (None, math.nan)] == ["–", "–"]
    assert cell(".2f", 1.0, math.nan) == "1.00"
    assert scattered("kl", ".1f", 10)({"kl": 0.1, "kl_deviation": 0.02}) == "1.0±0.2"
    assert with_interval("{:.1f}".format, 2.0, 1.0, 3.0) == "2.0 [1.0, 3.0]"
    assert with_interval("{:.1f}".format, 2.0) == "2.0"


def test_zero_has_no_minus():
    cells = [["a", "-0.00±0.03"], ["b", "-0.004"], ["c", "-0.0"], ["d", "-10.0"], ["e", "+0.00"]]
    lines = Table("of", "", ["name", "value"], cells, pd.DataFrame()).form("github").splitlines()[2:]
    assert [line.split("|")[2].strip() for line in lines] == ["0.00±0.03", "−0.004", "0.0", "−10.0", "+0.00"]
