"""Norms of gradients of any size, dtype and shape, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stablenum_jax._step.measure.norms import saturating_float32
from stablenum_jax._trees.leaves import guarded_leaves, is_measurable
from tests.jax.helpers import leaf_norms
from tests.selection import only

Norms = Callable[..., Any]

FLOAT32_MAX = float(np.finfo(np.float32).max)


@pytest.fixture
def norms(mode: str) -> Callable[..., Any]:
    return leaf_norms if mode == "eager" else jax.jit(leaf_norms)


def _true_norm(x: Any) -> float:
    wide = np.abs(np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)).ravel()
    largest = wide.max(initial=0.0)
    if largest == 0 or not np.isfinite(largest):
        return float(largest) if not np.isnan(wide).any() else float("nan")
    return float(largest * np.sqrt(((wide / largest) ** 2).sum()))


CASES = {
    "ordinary": (1.0, np.float32),
    "1e20: squares overflow": (1e20, np.float32),
    "1e-30: squares flush": (1e-30, np.float32),
    "near the top": (1e38, np.float32),
    "near the bottom": (1e-35, np.float32),
    "float16 of 6e4": (6e4 / 4, np.float16),
    "bfloat16": (1e30, ml_dtypes.bfloat16),
    "complex": (1e25, np.complex64),
}


@pytest.mark.parametrize("case", CASES)
def test_the_norm_of_finite_gradients_of_any_size_is_correct(case: str, norms: Norms) -> None:
    size, dtype = CASES[case]
    x = size * np.clip(np.random.default_rng(0).standard_normal((5, 7)), -3, 3)
    x = (x + 1j * x[::-1] if dtype == np.complex64 else x).astype(dtype)
    seen = np.asarray(norms([jnp.asarray(x)]))
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen, [min(_true_norm(x), FLOAT32_MAX)], rtol=1e-6)


def test_a_norm_beyond_float32_saturates(norms: Norms) -> None:
    x = jnp.full((1000,), 1e38)
    np.testing.assert_array_equal(norms([x]), np.asarray([FLOAT32_MAX], np.float32))


def test_half_precision_is_summed_in_float32(norms: Norms) -> None:
    leaves = [jnp.full((16,), 6e4, jnp.float16), jnp.full((2**20,), 0.01, jnp.bfloat16)]
    expected = [_true_norm(np.asarray(leaf)) for leaf in leaves]
    np.testing.assert_allclose(norms(leaves), expected, rtol=1e-6)


@pytest.mark.parametrize("n", only([300], [300, 1000]))  # bfloat16 itself counts up to 256
def test_hundreds_of_bfloat16_leaves(n: int) -> None:
    seen = jax.jit(leaf_norms)([jnp.ones((1,), jnp.bfloat16)] * n)
    assert float(jnp.sqrt((seen**2).sum())) == pytest.approx(n**0.5, rel=1e-6)


def test_norms_of_large_leaves_are_accurate(norms: Norms) -> None:
    x = np.random.default_rng(0).standard_normal(2**25, dtype=np.float32) + 1
    expected = np.sqrt(np.sum(np.square(x, dtype=np.float64)))
    np.testing.assert_allclose(norms([jnp.asarray(x)]), [expected], rtol=1e-6)
    # The rescued norm too: the second read sums as accurately as the first.
    big = x * np.float32(1e20)
    np.testing.assert_allclose(norms([jnp.asarray(big)]), [expected * float(np.float32(1e20))], rtol=1e-6)


def test_ones_do_not_stop_counting_at_two_to_the_24(norms: Norms) -> None:
    np.testing.assert_allclose(norms([jnp.ones(2**25)]), [2**12.5], rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, np.nan], np.nan),
        ([np.inf, 1.0], np.inf),
        ([-np.inf, 1.0], np.inf),
        ([np.inf, np.nan], np.nan),
        ([np.nan, np.inf], np.nan),
        ([0.0, -0.0], 0.0),
        ([], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64", "float8_e5m2"])
def test_nonfinite_zero_and_empty(values: list[float], expected: float, dtype: str, norms: Norms) -> None:
    leaf = jnp.asarray(values, jnp.float32).astype(dtype)
    seen = norms([jnp.ones(3), leaf, jnp.full((2,), 3e30)])
    np.testing.assert_allclose(seen, [3**0.5, expected, 3e30 * 2**0.5], rtol=1e-6)


def test_an_imaginary_nan_or_inf_is_seen(norms: Norms) -> None:
    leaves = [jnp.asarray([z], jnp.complex64) for z in (complex(1, np.nan), complex(1, np.inf), 3 + 4j)]
    np.testing.assert_allclose(norms(leaves), [np.nan, np.inf, 5.0])


def test_missing_gradients_and_empty_trees_have_norm_zero(norms: Norms) -> None:
    assert norms([]).shape == (0,)
    np.testing.assert_array_equal(norms([None, jnp.ones(4), None]), [0.0, 2.0, 0.0])
    np.testing.assert_array_equal(norms([jnp.zeros((0, 3))]), [0.0])


def test_all_zero_gradients_have_norm_zero(norms: Norms) -> None:
    np.testing.assert_array_equal(norms([jnp.zeros(4), jnp.zeros((2, 2))]), [0.0, 0.0])


def test_one_tiny_leaf_does_not_affect_the_norms_of_large_ones(norms: Norms) -> None:
    seen = norms([jnp.full((4,), 1e-30), jnp.ones(4)])
    assert float(seen[1]) == 2.0
    assert np.isfinite(np.asarray(seen)).all()


def test_float64_gradients_do_not_overflow_in_float32(norms: Norms) -> None:
    with jax.enable_x64(True):
        leaves = [jnp.full((4,), 1e60), jnp.full((4,), 1e-60), jnp.full((4,), 1e300), jnp.ones(4)]
        assert leaves[0].dtype == jnp.float64
        np.testing.assert_allclose(norms(leaves), [FLOAT32_MAX, 0.0, FLOAT32_MAX, 2.0], rtol=1e-6)
        np.testing.assert_array_equal(norms([jnp.asarray([1e60, jnp.inf])]), [np.inf])


_jitted_norms = jax.jit(leaf_norms)


@given(hnp.arrays(np.float32, (2, 3), elements=st.floats(width=32, allow_subnormal=False)))
def test_any_float32_array(x: np.ndarray[Any, Any]) -> None:
    seen, expected = float(_jitted_norms([jnp.asarray(x)])[0]), min(_true_norm(x), FLOAT32_MAX)
    if np.isfinite(x).all():
        # A result below float32's smallest normal number may be flushed to zero.
        assert seen == pytest.approx(expected, rel=1e-6, abs=1.2e-38)
    else:
        assert np.isnan(seen) if np.isnan(x).any() else np.isinf(seen)


@pytest.mark.parametrize("value", [1.5, -2.0, np.nan, np.inf, -np.inf, 0.0])
def test_saturating_float32_changes_no_float32(value: float) -> None:
    np.testing.assert_array_equal(saturating_float32(jnp.float32(value)), np.float32(value))


def test_saturating_float32_of_float64() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray([1e60, -1e60, np.inf, -np.inf, np.nan, 1.0])
        expected = np.asarray([FLOAT32_MAX, -FLOAT32_MAX, np.inf, -np.inf, np.nan, 1.0], np.float32)
        np.testing.assert_array_equal(saturating_float32(x), expected)


def test_integers_keys_and_float0_are_not_measured() -> None:
    tree = {
        "key": jax.random.key(0),
        "int": jnp.arange(3),
        "bool": jnp.asarray([True]),
        "float0": np.zeros(3, jax.dtypes.float0),
        "_overwrite_with_gradient": {"scale": jnp.ones(1)},
        "w": jnp.ones(2),
        "half": jnp.ones(2, jnp.float16),
        "number": 1.0,
    }
    seen = {
        jax.tree_util.keystr(path, simple=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_measurable(path, leaf)
    }
    assert seen == {"w", "half", "number"}


def test_gradient_leaves_have_the_order_of_the_parameters() -> None:
    params = {"a": jnp.ones(2), "b": jnp.ones(2), "n": jnp.arange(2)}
    leaves = guarded_leaves({"a": None, "b": jnp.zeros(2), "n": None}, params)
    assert [jax.tree_util.keystr(path, simple=True) for path in leaves] == ["a", "b"]
    assert [leaf is None for leaf in leaves.values()] == [True, False]
    assert len(guarded_leaves({"a": jnp.ones(2)}, None)) == 1
