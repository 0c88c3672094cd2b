"""Gradients, weights and states that XLA knows to be constants: it may reorder products of constants."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax
from tests.jax.helpers import leaf_and_unit_norms, leaf_norms

CONSTANTS = [0.0, 1e-40, 1e-30, 1.0, 1e20, 3e38]
SIZES = [1e-30, 1e-12, 1.0, 3e20]  # of the other leaf, which decides whether norms are measured again


@pytest.mark.parametrize("size", SIZES)
def test_norms_beside_constant_leaves(size: float) -> None:
    x = jnp.full(4, size)
    known = [jnp.full((2, 3), value, jnp.float32) for value in CONSTANTS]
    expected = [np.linalg.norm(np.full(4, x[0], np.float64))]
    expected += [np.linalg.norm(np.asarray(leaf, np.float64)) for leaf in known]
    expected = [min(norm, float(np.finfo(np.float32).max)) for norm in expected]
    floor = 1e-23 if size >= 1.0 else 0.0  # documented: such a norm may be 0 beside ordinary ones

    def whole(x: jax.Array) -> jax.Array:
        return leaf_norms([x, *known])

    def by_unit(x: jax.Array) -> Any:
        leaves = [x.reshape(2, 2), *known]
        return leaf_and_unit_norms(leaves, leaves, [(0, 1)] * len(leaves))

    norms, units = jax.jit(by_unit)(x)
    for found in (jax.jit(whole)(x), norms, jnp.concatenate(units.norms), jnp.concatenate(units.weights)):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=max(floor, 1.2e-38))


@pytest.mark.sampled
@pytest.mark.parametrize("clip", [1e-3, stablenum.AdaptiveGradClip()], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_step_with_a_frozen_parameter_is_taken_as_without_jit(clip: Any, size: float) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=clip), optax.sgd(1.0))

    def train(x: jax.Array) -> Any:
        params = {"frozen": jnp.zeros((3, 2)), "w": jnp.zeros((2, 2))}  # constants, as is the state
        opt_state = tx.init(params)
        grads = {"frozen": jnp.zeros((3, 2)), "w": x}
        return stablenum_jax.step(tx, params, opt_state, grads)

    x = jnp.full((2, 2), size)
    params, opt_state = jax.jit(train)(x)
    with jax.disable_jit():
        expected, expected_state = train(x)
    assert stablenum_jax.metrics(opt_state)["applied"]
    assert stablenum_jax.metrics(opt_state)["reason"] is stablenum_jax.metrics(expected_state)["reason"]
    np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-5)


@pytest.mark.parametrize("slope", [1e-30, 1e30])
def test_a_gradient_that_is_one_constant(slope: float) -> None:
    """A linear loss has the same gradient everywhere, so XLA knows all norms."""
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(1.0))
    params = {"v": jnp.ones(2), "w": jnp.ones(2)}

    @jax.jit
    def train(params: Any, opt_state: Any) -> Any:
        loss, grads = stablenum_jax.value_and_grad(lambda p: ((p["v"] + p["w"]) * slope).sum(), opt_state)(
            params
        )
        return stablenum_jax.step(tx, params, opt_state, grads, value=loss)

    _, opt_state = train(params, tx.init(params))
    seen = stablenum_jax.metrics(opt_state)
    assert seen["applied"]
    assert seen["grad_norm"] == pytest.approx(2 * slope, rel=1e-5)
