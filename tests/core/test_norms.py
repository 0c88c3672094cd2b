"""Combining norms, compared with 50-digit arithmetic."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum.arrays import combine_norms
from tests.backends import BACKENDS, to_numpy
from tests.oracles import FLOAT32_MAX, global_norm

NORMS = st.floats(min_value=0.0, max_value=FLOAT32_MAX, width=32, allow_subnormal=False)


def combined(backend, parts):
    with np.errstate(over="ignore"):
        return float(to_numpy(combine_norms(backend.asarray(parts), xp=backend.xp)))


@pytest.mark.parametrize(
    "parts",
    [
        [3.0, 4.0],
        [3e20, 4e20],  # the sum of squares is inf in float32
        [3e-30, 4e-30],  # and 0 here
        [1e-30, 1e20],
        [0.0, 0.0],
        [0.0],
        [7.0],
        [1.0] * 1000,
        [2.0**-126] * 5,
        [3e38, 0.0, 0.0, 0.0],  # its reciprocal is subnormal: zero under XLA
    ],
)
def test_ordinary_huge_and_tiny_norms(backend, parts):
    assert combined(backend, parts) == pytest.approx(global_norm(parts), rel=1e-6, abs=0)


def test_no_parts_give_zero(backend):
    assert combined(backend, []) == 0.0


@pytest.mark.parametrize("n", [1, 3])
def test_zeros_that_are_known_when_it_compiles(n):
    """This happens if no parameter has an element.

    XLA folds such zeros through the root, which once gave NaN.
    """
    assert float(jax.jit(lambda: combine_norms(jnp.zeros((n,)), xp=jnp))()) == 0.0


def test_a_result_beyond_float32_saturates(backend):
    assert combined(backend, [FLOAT32_MAX] * 4) == FLOAT32_MAX


@pytest.mark.parametrize("parts", [[math.inf, 1.0], [1.0, math.inf], [math.inf] * 3])
def test_inf_gives_inf(backend, parts):
    assert combined(backend, parts) == math.inf


@pytest.mark.parametrize(
    "parts", [[math.nan, 1.0], [math.inf, math.nan], [math.nan, math.inf], [0.0, math.nan]]
)
def test_nan_gives_nan(backend, parts):
    assert math.isnan(combined(backend, parts))


@given(st.lists(NORMS, min_size=4, max_size=4))
def test_any_norms_against_the_oracle(parts):
    expected = min(global_norm(parts), FLOAT32_MAX)
    for backend in BACKENDS.values():
        assert combined(backend, parts) == pytest.approx(expected, rel=1e-6, abs=0), backend.name
