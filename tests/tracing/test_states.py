"""What a trace keeps of states: every path against the reference, and the reference against numpy and scipy."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from outlier_kernels import reference_states, states
from outlier_kernels.cpu import states as cpu_states

from tests.conftest import pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUMS = ("sum", "squares", "squares_rest")
ALPHA = 6.0
LIMITS = (100.0, 1000.0)
# tokens, features: one, few, and several pieces and strips with something left over
SHAPES = [(1, 1), (1, 700), (300, 1), (7, 33), (2 * cpu_states.ROWS + 1, 40), (130, cpu_states.STRIP + 5)]
HOSTILE = [0.0, -0.0, 1e-45, -1e-40, 1e-30, 6.0, -6.0, 5.9999995, 7.5, -7.5, 3e38, -3e38, 65504.0]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids_of(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x)) * 7 % 101


def kept_of(x: torch.Tensor, kept: str) -> torch.Tensor | None:
    """Zeros, as a trace keeps them."""
    dtypes = {"magnitudes": x.dtype, "hits": torch.bool}
    return torch.zeros(x.shape, dtype=dtypes[kept], device=x.device) if kept in dtypes else None


def add(path, statistics: states.Statistics, x: torch.Tensor, kept: torch.Tensor | None = None) -> tuple:
    """The hits of each feature, and all of them in the order of their bytes."""
    found = states.Found()
    hits = path.add(states.State(x, ids_of(x).to(x.device), statistics, kept, found), ALPHA)
    found.read()
    return hits, np.sort(np.concatenate([of_state for _, of_state in found.hits] or [np.empty(0, states.HIT)]))


def add_residual(path, statistics: states.Statistics, x: torch.Tensor, kept: torch.Tensor | None = None) -> list[int]:
    """The massive activations at each position."""
    found, massive = states.Found(), torch.zeros(len(x), dtype=torch.int64, device=x.device)
    path.add_residual(states.State(x, ids_of(x).to(x.device), statistics, kept, found), LIMITS, massive)
    found.read()
    return massive.tolist()


def added(path, table: dict, sequences: list[torch.Tensor], add) -> tuple[states.Statistics, list]:
    """The statistics of some sequences on a path, and what it returned of each."""
    statistics = states.empty(table, sequences[0].shape[1], sequences[0].device)
    return statistics, [add(path, statistics, x) for x in sequences]


def assert_same_states(path, sequences: list[torch.Tensor], kept: str = "magnitudes", shift: float | None = 0) -> None:
    """A path against the reference: bit by bit but for sums, whose rounding may be another one.

    shift: how far from 0 the states are, in which the terms of kurtoses cancel as its fourth power; None if beyond all
    bounds.
    """
    kinds = {module: kept_of(sequences[0], kept) for module in (reference_states, path)}
    of_kind = lambda module, statistics, x: add(module, statistics, x, kinds[module])  # noqa: E731
    want, wanted = added(reference_states, states.STATISTICS, sequences, of_kind)
    got, found = added(path, states.STATISTICS, sequences, of_kind)
    for x, (hits, listed), (wanted_hits, wanted_list) in zip(sequences, found, wanted, strict=True):
        assert torch.equal(hits, wanted_hits)
        positions, features = (x.abs() >= ALPHA).nonzero(as_tuple=True)
        every = np.array(list(zip(features.tolist(), x[positions, features].tolist(), strict=True)), states.HIT)
        assert np.array_equal(listed, np.sort(every))
        assert np.array_equal(wanted_list, np.sort(every))
    assert kept == "nothing" or torch.equal(*kinds.values())
    size = sum(x.double().abs().sum(0) for x in sequences)
    sizes = {"sum": size, "squares_rest": want["squares"]}
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        if name in SUMS:
            assert ((got[name] - value).abs() <= 1e-13 * sizes.get(name, value)).all(), name
        elif not name.startswith("kurtosis"):
            assert torch.equal(got[name], value), name
        elif shift is not None:
            torch.testing.assert_close(got[name], value, rtol=1e-13 * (1 + shift) ** 4, atol=0, equal_nan=True)


def assert_same_residuals(path, sequences: list[torch.Tensor], kept: str = "magnitudes") -> None:
    kinds = {module: kept_of(sequences[0], kept) for module in (reference_states, path)}
    of_kind = lambda module, statistics, x: add_residual(module, statistics, x, kinds[module])  # noqa: E731
    want, wanted = added(reference_states, states.RESIDUAL, sequences, of_kind)
    got, found = added(path, states.RESIDUAL, sequences, of_kind)
    assert found == wanted
    if kept == "magnitudes":
        assert torch.equal(*kinds.values())
        assert torch.equal(kinds[path], torch.stack(sequences).abs().amax(0))
    for name, value in want.items():
        assert torch.equal(torch.nan_to_num(got[name], nan=-1), torch.nan_to_num(value, nan=-1)), name


@pairwise("shape dtype kept", SHAPES, DTYPES, ["magnitudes", "hits", "nothing"])
def test_states_are_those_of_the_reference(shape, dtype, kept):
    """Of two sequences, with no hits, some, and nothing but hits; and those of the residual stream."""
    for shift in (0, 1, 50):
        sequences = [(2 * random(*shape) + shift).to(dtype), (3 * random(*shape) - shift).to(dtype)]
        assert_same_states(cpu_states, sequences, kept, shift)
        assert_same_residuals(cpu_states, sequences, kept.replace("hits", "nothing"))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_states_do_not_depend_on_the_threads(threads):
    """Not even their sums, whose order the pieces have."""
    x, before = 3 * random(900, 600), torch.get_num_threads()

    def found():
        statistics = states.empty(states.STATISTICS, 600, x.device)
        hits, _ = add(cpu_states, statistics, x)
        residual = states.empty(states.RESIDUAL, 600, x.device)
        add_residual(cpu_states, residual, x)
        return [*statistics.values(), hits, *residual.values()]

    want = found()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            assert all(map(torch.equal, found(), want))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    """Of a transposed state, of every other feature, of every other token, and of one token that is all."""
    wide = (4 * random(40, 60)).to(dtype)
    for x in (wide.T, wide[:, ::2], wide[::2], wide[:, 7:50], wide[3].expand(9, 60)):
        assert_same_states(cpu_states, [x])
        assert_same_residuals(cpu_states, [x])


@given(
    arrays(
        "float32",
        st.tuples(st.integers(1, 6), st.integers(1, 40)),
        elements=st.one_of(st.sampled_from(HOSTILE), st.floats(-1e4, 1e4, width=32)),
    ),
    st.sampled_from(["magnitudes", "hits"]),
)
@settings(deadline=None, max_examples=300)
def test_hostile_states(numbers, kept):
    """Signed zeros, subnormals, ties and what is just alpha."""
    x = torch.from_numpy(numbers)
    for dtype in DTYPES:
        state = x.to(dtype)
        if state.isfinite().all():
            assert_same_states(cpu_states, [state], kept, None)
            assert_same_residuals(cpu_states, [state, -state])


@pairwise("place bad dtype", [(0, 0), (0, 8), (4, 3), (140, 8)], [torch.nan, torch.inf, -torch.inf], DTYPES)
def test_the_first_feature_that_is_not_finite(place, bad, dtype):
    x = random(141, 9).to(dtype)
    x[place] = bad
    x[100, 8] = torch.nan
    for path in (cpu_states, reference_states):
        with pytest.raises(states.NotFinite) as raised:
            add(path, states.empty(states.STATISTICS, 9, x.device), x)
        assert raised.value.feature == place[1]
        with pytest.raises(states.NotFinite) as raised:
            add_residual(path, states.empty(states.RESIDUAL, 9, x.device), x)
        assert raised.value.feature == place[1]


def test_ties_of_the_largest_entry():
    """The first feature's first position in a sequence; the later one in their order among sequences."""
    x = torch.zeros(200, 30)
    for position, feature, value in ((199, 4, -9.0), (150, 4, 9.0), (3, 7, 9.0), (0, 9, 9.0)):
        x[position, feature] = value
    for path in (cpu_states, reference_states):
        for table, adding in ((states.STATISTICS, add), (states.RESIDUAL, add_residual)):
            statistics = states.empty(table, 30, x.device)
            adding(path, statistics, x)
            assert statistics["largest"].tolist() == [9, 9, 4, 150, 150 * 7 % 101]
            adding(path, statistics, -x)
            assert statistics["largest"].tolist() == [9, 9, 4, 150, 150 * 7 % 101], "-9 comes before 9"
            later = torch.zeros_like(x)
            later[2, 20] = 9
            adding(path, statistics, later)
            assert statistics["largest"].tolist() == [9, 9, 20, 2, 14], "feature 20 comes after all others"


@pytest.mark.parametrize("dtype", DTYPES)
def test_medians_of_uneven_states(dtype):
    """Sorted, with a wide feature, of two values, of one, and where the sample meets what is rare alone."""
    x = random(300, 128)
    x[:, 5] *= 1e2
    period = max(1, 300 * 128 // 2048) | 1
    seldom = torch.ones(300 * 128)
    seldom[::period] = 30
    uneven = [x, x.sort(0).values, torch.where(x > 0.5, 1.0, 0.0), torch.ones(300, 128)]
    uneven += [state.view(300, 128) for state in (seldom, 1 / seldom)]
    for state in uneven:  # one by one, for a median of 0 makes the sum of ratios infinite
        assert_same_residuals(cpu_states, [state.to(dtype)])


def test_massive_activations_of_just_the_limits():
    x = torch.full((200, 20), 0.1)
    x[0, 3], x[7, 3], x[199, 19], x[8, 8] = 100.0, 100.00001, -101.0, 99.0
    x[7, 5], x[199, 6] = 100.0, -100.0  # just the limit, beside what is above it
    for path in (cpu_states, reference_states):
        statistics = states.empty(states.RESIDUAL, 20, x.device)
        assert np.flatnonzero(add_residual(path, statistics, x)).tolist() == [7, 199]
        assert statistics["massive"].nonzero()[:, 0].tolist() == [3, 19]
    assert_same_residuals(cpu_states, [x, 2 * x, 0.9 * x])
    x = torch.full((200, 20), 0.125)
    x[5, 2], x[6, 3] = 125, 124.99999  # of at least 1000 medians, and of less
    for path in (cpu_states, reference_states):
        statistics = states.empty(states.RESIDUAL, 20, x.device)
        assert np.flatnonzero(add_residual(path, statistics, x)).tolist() == [5]


def test_kurtosis_far_from_zero_and_of_a_constant():
    x = torch.randn(4000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shifted = x + 100
    means = torch.stack([(shifted**n).mean() for n in (1, 2, 3, 4)])
    want = scipy.stats.kurtosis(x, axis=None, fisher=False)
    assert reference_states.kurtosis(means).item() == pytest.approx(want, rel=1e-6)
    for path in (cpu_states, reference_states):
        constant = states.empty(states.STATISTICS, 8, x.device)
        add(path, constant, torch.full((5, 8), 3.7))
        assert constant["kurtosis_tensor"].tolist() == [1, 1]
        assert constant["kurtosis_token"].tolist() == [5, 4]
