"""Windows compared with NumPy and Python's ``statistics``."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum.rules.windows import (
    EMPTY,
    count,
    empty_window,
    mean_and_std,
    median,
    median_and_mad,
    push,
    quantile,
    without_outliers,
)
from tests.backends import BACKENDS, to_numpy
from tests.oracles import FLOAT32_MAX

SIZE = 12
EAGER = pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
ordinary = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
positive = st.floats(2.0**-20, 1e6, width=32)
LOWEST = float(np.nextafter(np.float32(EMPTY), np.float32(0.0)))
huge = st.sampled_from([1e30, 1e38, FLOAT32_MAX, -1e30, LOWEST])
values = st.lists(ordinary, min_size=1, max_size=2 * SIZE)
any_values = st.lists(ordinary | huge | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=2 * SIZE)


def filled(name: str, items: list[float]):
    """A window with the items pushed into it, its namespace, and the last ``SIZE`` finite items."""
    backend = BACKENDS[name]
    xp = backend.xp
    window, yes = empty_window(SIZE, xp=xp), backend.asarray(True, "bool")
    for item in items:
        window = push(window, backend.asarray(item), yes, xp=xp)
    kept = [float(np.float32(item)) for item in items if math.isfinite(item)][-SIZE:]
    return window, xp, kept


def number(array) -> float:
    return float(to_numpy(array))


@given(any_values)
@EAGER
def test_a_window_keeps_the_last_finite_values_in_order(name, items):
    window, xp, kept = filled(name, items[:SIZE] if name == "jax" else items)
    kept = [float(np.float32(x)) for x in (items[:SIZE] if name == "jax" else items) if math.isfinite(x)][
        -SIZE:
    ]
    held = to_numpy(window)
    assert held.dtype == np.float32
    assert np.isfinite(held).all(), "tools that look for inf look at states"
    assert held.tolist() == [EMPTY] * (SIZE - len(kept)) + kept
    assert int(to_numpy(count(window, xp=xp))) == len(kept)


@EAGER
@pytest.mark.parametrize("condition", [True, False])
def test_push_does_nothing_without_its_condition(name, condition):
    backend = BACKENDS[name]
    window = backend.asarray([EMPTY, 1.0, 2.0])
    after = push(window, backend.asarray(3.0), backend.asarray(condition, "bool"), xp=backend.xp)
    assert to_numpy(after).tolist() == ([1.0, 2.0, 3.0] if condition else [EMPTY, 1.0, 2.0])


@given(values, st.floats(0.001, 0.999))
def test_the_quantile_equals_numpys(items, q):
    window, xp, kept = filled("numpy", items)
    # float32 places the quantile between ranks to 1e-6 of the largest distance.
    slack = 3e-6 * (max(kept) - min(kept)) + 1e-6 * max(map(abs, kept))
    assert number(quantile(window, q, xp=xp)) == pytest.approx(np.percentile(kept, 100 * q), rel=0, abs=slack)


@given(values)
def test_median_and_mad_equal_those_of_statistics(items):
    window, xp, kept = filled("numpy", items)
    middle, mad = median_and_mad(window, xp=xp)
    expected = statistics.median(kept)
    slack = 1e-6 * max(map(abs, kept))
    assert number(middle) == number(median(window, xp=xp)) == pytest.approx(expected, rel=0, abs=slack)
    expected_mad = statistics.median(abs(item - expected) for item in kept)
    assert number(mad) == pytest.approx(expected_mad, rel=0, abs=2 * slack)


@given(values, st.sampled_from([0, 1]))
def test_mean_and_std_match_the_statistics_module(items, ddof):
    window, xp, kept = filled("numpy", items)
    mean, std = mean_and_std(window, ddof=ddof, xp=xp)
    slack = 3e-6 * max(map(abs, kept))
    assert number(mean) == pytest.approx(statistics.fmean(kept), rel=0, abs=slack)
    spread = statistics.stdev if ddof else statistics.pstdev
    expected = spread(kept) if len(kept) > ddof else 0.0
    assert number(std) == pytest.approx(expected, rel=1e-4, abs=slack)


@given(st.lists(positive | st.just(1e30), min_size=1, max_size=SIZE))
def test_values_above_100_medians_are_left_out(items):
    window, xp, kept = filled("numpy", items)
    bound = 100 * statistics.median(kept)
    left = to_numpy(without_outliers(window, xp=xp))
    clear = [item for item in kept if abs(item / bound - 1) > 1e-6]
    assert set(left[np.isfinite(left)].tolist()) >= {item for item in clear if item < bound}
    assert not set(left.tolist()) & {item for item in clear if item > bound}
    assert len(left) == SIZE


@EAGER
@pytest.mark.parametrize(
    "items",
    [
        [],
        [math.nan, math.inf, -math.inf],
        [FLOAT32_MAX] * SIZE,
        [FLOAT32_MAX, LOWEST] * 6,
        [FLOAT32_MAX, 0.0, LOWEST],
        [1e-30, 1e30],
        [0.0] * SIZE,
        [5.0],
    ],
)
def test_nothing_overflows_whatever_the_values(name, items):
    window, xp, kept = filled(name, items)
    with np.errstate(all="ignore"):
        mean, std = (number(x) for x in mean_and_std(window, xp=xp))
        middle, mad = (number(x) for x in median_and_mad(window, xp=xp))
        # Quantiles are taken of norms: the difference of two values of the same sign cannot overflow.
        sizes, _, _ = filled(name, list(map(abs, items)))
        points = [number(quantile(sizes, q, xp=xp)) for q in (0.01, 0.5, 0.99)]
    assert math.isfinite(mean)
    assert math.isfinite(std)
    if not kept:
        assert (mean, std) == (0.0, 0.0)
        assert middle == number(median(window, xp=xp)) == math.inf
        assert points == [math.inf] * 3
        return
    assert math.isfinite(middle)
    assert math.isfinite(mad)
    assert std >= 0
    assert mad >= 0
    sizes = [abs(item) for item in kept]
    assert all(min(sizes) <= point <= max(sizes) for point in points), points


def test_one_value_is_its_own_quantile_median_and_mean():
    window, xp, _ = filled("numpy", [5.0])
    assert [number(quantile(window, q, xp=xp)) for q in (0.01, 0.99)] == [5.0, 5.0]
    assert [number(x) for x in (*median_and_mad(window, xp=xp), *mean_and_std(window, ddof=1, xp=xp))] == [
        5.0,
        0.0,
        5.0,
        0.0,
    ]


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_the_mean_of_the_largest_numbers_is_finite_for_every_length(name):
    # Dividing first is not enough: at 371 of these lengths the rounded quotients add up to more than the
    # largest float32, and a moving mean that begins with inf ends as NaN.
    backend = BACKENDS[name]
    for n in range(2, 1025):
        window = backend.asarray([FLOAT32_MAX] * n)
        for sign in (1.0, -1.0):
            with np.errstate(all="ignore"):
                mean, std = (number(x) for x in mean_and_std(sign * window, xp=backend.xp))
            assert mean == pytest.approx(sign * FLOAT32_MAX, rel=1e-5)
            assert std <= 1e-5 * FLOAT32_MAX


@EAGER
def test_a_window_of_an_earlier_state_with_inf_in_empty_places_is_read_alike(name):
    backend = BACKENDS[name]
    items = [3.0, 1.0, 2.0, 7.0]
    marked, with_inf = (backend.asarray([mark] * 3 + items) for mark in (EMPTY, math.inf))
    for read in (count, median, mean_and_std, median_and_mad, lambda w, xp: quantile(w, 0.4, xp=xp)):
        assert read(marked, xp=backend.xp) == read(with_inf, xp=backend.xp)
