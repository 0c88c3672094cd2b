"""Norms of units, and the adaptive clip that compares them with the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax as sj
from stablenum.reference.guarded import unit_norms as true_unit_norms
from tests.jax.helpers import every_mode, leaf_and_unit_norms, make_grads, make_params

FLOAT32_MAX = float(np.finfo(np.float32).max)
COLUMNS = (0,)


@pytest.fixture
def norms(mode: str) -> Callable[..., Any]:
    return leaf_and_unit_norms if mode == "eager" else jax.jit(leaf_and_unit_norms, static_argnums=2)


def _matrix(size: float, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    x = np.clip(np.random.default_rng(0).standard_normal((5, 7)), -3, 3) * size
    return (x + 1j * x[::-1] if np.issubdtype(dtype, np.complexfloating) else x).astype(dtype)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1.0, np.float32), (1e20, np.float32), (1e-25, np.float32), (1e37, np.float32), (1e25, np.complex64)],
)
def test_the_norms_of_units_of_any_size_are_correct(size: float, dtype: Any, norms: Any) -> None:
    x, weights = _matrix(size, dtype), _matrix(1.0)
    seen, units = norms([jnp.asarray(x)], [jnp.asarray(weights)], (COLUMNS,))
    np.testing.assert_allclose(units.norms[0], true_unit_norms(x, COLUMNS), rtol=1e-6)
    np.testing.assert_allclose(units.weights[0], true_unit_norms(weights, COLUMNS), rtol=1e-6)
    whole = np.sqrt((np.abs(x).astype(np.float64) ** 2).sum())
    np.testing.assert_allclose(seen, [min(whole, FLOAT32_MAX)], rtol=1e-6)


def test_a_large_unit_does_not_hide_a_small_one(norms: Any) -> None:
    x = np.asarray([[3e25, 3.0, 0.0], [4e25, 4.0, 0.0]], np.float32)
    seen, units = norms([jnp.asarray(x), None], [jnp.asarray(x), jnp.ones(3)], (COLUMNS, (0,)))
    np.testing.assert_allclose(units.norms[0], [5e25, 5.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(units.weights[0], [5e25, 5.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(seen, [5e25, 0.0], rtol=1e-6)
    assert [part.shape for part in units.norms] == [part.shape for part in units.weights] == [(3,), (0,)]


def test_weights_whose_squares_overflow_have_a_correct_norm(norms: Any) -> None:
    weights = np.full((2, 3), 1e30, np.float32)
    _, units = norms([jnp.ones((2, 3))], [jnp.asarray(weights)], (COLUMNS,))
    np.testing.assert_allclose(units.weights[0], [2**0.5 * 1e30] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, np.nan], np.nan),
        ([np.inf, 1.0], np.inf),
        ([-np.inf, np.nan], np.nan),
        ([0.0, -0.0], 0.0),
    ],
)
def test_nonfinite_and_zero_units(values: list[float], expected: float, norms: Any) -> None:
    x = jnp.asarray([[values[0], 3.0], [values[1], 4.0]], jnp.float32)
    seen, units = norms([x, jnp.ones(4)], [jnp.ones((2, 2)), jnp.ones(4)], (COLUMNS, None))
    np.testing.assert_allclose(units.norms[0], [expected, 5.0], rtol=1e-6)
    np.testing.assert_allclose(seen, [5.0 if expected == 0 else expected, 2.0], rtol=1e-6)
    assert units.norms[1].shape == (0,)


def test_scalars_vectors_and_empty_leaves(norms: Any) -> None:
    leaves = [jnp.float32(-3.0), jnp.asarray([3.0, 4.0], jnp.float16), jnp.zeros((0, 3)), jnp.zeros((2, 0))]
    seen, units = norms(leaves, leaves, ((), (0,), (0,), None))
    np.testing.assert_array_equal(seen, [3.0, 5.0, 0.0, 0.0])
    assert [part.tolist() for part in units.norms] == [[3.0], [5.0], [], []]
    empty, none = norms([], [], ())
    assert empty.shape == (0,)
    assert none.norms == ()


def test_float64_units_saturate() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray([[1e200, 1.0], [1e200, 1e-200]])
        seen, units = leaf_and_unit_norms([x], [x], (COLUMNS,))
        np.testing.assert_allclose(units.norms[0], [FLOAT32_MAX, 1.0], rtol=1e-6)
        np.testing.assert_allclose(seen, [FLOAT32_MAX], rtol=1e-6)


# ------------------------------------------------------------------------------------- the rule in the guard


def _agc(**settings: Any) -> Any:
    return optax.chain(sj.guard(clip=stablenum.AdaptiveGradClip(**settings)), optax.sgd(1.0))


def test_a_pattern_that_matches_nothing_is_an_error_at_init() -> None:
    tx = _agc(exclude=("dense.*", "head.*"))
    with pytest.raises(ValueError, match=r"'head\.\*'.*dense\.b, dense\.w, out"):
        tx.init(make_params())


def test_excluded_parameters_are_not_clipped(stepper: Any) -> None:
    tx, params, grads = _agc(exclude="dense.*"), make_params(), make_grads(0)
    after, _ = stepper(tx)(params, tx.init(params), grads)
    for name in ("b", "w"):
        np.testing.assert_array_equal(after["dense"][name], params["dense"][name] - grads["dense"][name])
    moved = params["out"] - after["out"]
    np.testing.assert_allclose(optax.tree.norm(moved), 0.01 * optax.tree.norm(params["out"]), rtol=1e-5)


@pytest.mark.parametrize("form", ["chain form", "chain", "guard(inner)"])
def test_missing_parameters_are_an_error(form: str) -> None:
    params, grads = make_params(), make_grads(0)
    tx = {
        "chain form": _agc(),
        "chain": sj.chain(sj.guard(clip=stablenum.AdaptiveGradClip()), optax.sgd(1.0)),
        "guard(inner)": sj.guard(optax.sgd(1.0), clip=stablenum.AdaptiveGradClip()),
    }[form]
    with pytest.raises(ValueError, match=r"params must be given for AdaptiveGradClip.*got None"):
        tx.update(grads, tx.init(params))


def test_parameters_of_other_shapes_are_an_error() -> None:
    tx, params, grads = _agc(), make_params(), make_grads(0)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"grads\['out'\] has no parameter of its shape \(2,\)"):
        tx.update({**grads, "out": jnp.ones(2)}, state, params)
    with pytest.raises(ValueError, match=r"grads\['more'\] has no parameter"):
        tx.update({**grads, "more": jnp.ones(2)}, state, params)


@pytest.mark.parametrize("checked", [True, False])
def test_units_over_a_mesh_axis_must_be_whole(checked: bool) -> None:
    """One device is enough: the types of the arrays say what is sharded."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"sharded": jnp.ones((2, 3)), "whole": jnp.ones((2, 3))}
    grads = jax.tree.map(lambda p: 5 * p, params)
    specs = {"sharded": jax.P("data"), "whole": jax.P()}

    def run(exclude: Any) -> Any:
        rule = stablenum.AdaptiveGradClip(exclude=exclude)
        tx = optax.chain(sj.guard(clip=(rule, 1e6), axis_name="data"), optax.sgd(1.0))
        step = jax.shard_map(
            lambda p, s, g: sj.step(tx, p, s, g),
            mesh=mesh,
            in_specs=(specs, jax.P(), specs),
            out_specs=(specs, jax.P()),
            check_vma=checked,
        )
        return jax.jit(step)(params, tx.init(params), grads)[0]

    with pytest.raises(
        ValueError,
        match=r"specs must be given with AdaptiveGradClip.*'data'.*'sharded'.*guard\(specs=\.\.\.\)",
    ):
        run(())
    if not checked:
        with pytest.raises(ValueError, match="'whole' is not known to be the same on all devices"):
            run(("sharded",))
        return
    after = run(("sharded",))
    tx = _agc()
    expected, _ = sj.step(tx, params, tx.init(params), grads)
    np.testing.assert_allclose(after["whole"], expected["whole"], rtol=1e-6)
    np.testing.assert_allclose(after["sharded"], params["sharded"] - grads["sharded"], rtol=1e-6)


@every_mode
def test_the_rule_also_clips_under_plain_update(mode: str) -> None:
    tx, params, grads = _agc(), make_params(), make_grads(0)
    update = tx.update if mode == "eager" else jax.jit(tx.update)
    with pytest.warns(sj.NotATrueSkipWarning):
        updates, _ = update(grads, tx.init(params), params)
    expected, _ = optax.adaptive_grad_clip(0.01).update(grads, optax.EmptyState(), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(-a, b, rtol=1e-5), updates, expected)


def test_missing_gradients_have_no_units(stepper: Any) -> None:
    tx, params = _agc(), make_params()
    grads = {**make_grads(0), "out": None}
    after, opt_state = stepper(tx)(params, tx.init(params), grads)
    np.testing.assert_array_equal(after["out"], params["out"])
    assert sj.metrics(opt_state)["reason"].name == "CLIPPED"
