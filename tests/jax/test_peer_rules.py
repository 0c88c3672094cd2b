"""Where a peer's rule is right, ours gives the same result; where it breaks, ours keeps working."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax as sj
from tests.jax.helpers import all_finite, assert_same_bits, make_grads, make_params, spoil
from tests.jax.rules import injected
from tests.selection import only


def _updates_of(peer: Any, grads: Any, params: Any) -> Any:
    return jax.jit(lambda: peer.update(grads, peer.init(params), params)[0])()


def _ours(clip: Any, grads: Any, params: Any, stepper: Any) -> Any:
    """The clipped gradients: what SGD with learning rate 1 subtracts from parameters of zeros."""
    tx = sj.guard(optax.sgd(1.0), clip=clip)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    stepped, _ = stepper(optax.chain(sj.guard(clip=clip), optax.sgd(1.0)))(params, tx.init(params), grads)
    jax.tree.map(
        lambda p, u, s: np.testing.assert_allclose(s, p + u, rtol=1e-5, atol=1e-6), params, updates, stepped
    )
    return jax.tree.map(lambda u: -u, updates)


# Every rank that optax supports, with shapes that it does or does not squeeze to vectors and scalars.
SHAPES = [
    (),
    (1,),
    (7,),
    (1, 7),
    (7, 1),
    (1, 1),
    (6, 4),
    (5, 3, 2),
    (1, 3, 2),
    (5, 1, 2),
    (5, 3, 1),
    (1, 5, 1),
    (3, 3, 2, 4),
    (1, 1, 2, 4),
    (1, 1, 1, 4),
    (3, 3, 1, 1),
    (3, 3, 4, 1),
    (2, 3, 2, 3, 4),
    (1, 2, 1, 1, 3),
    (1, 1, 1, 1, 3),
]


# Eager calls compile every operation for each shape.
@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "jit"])
@pytest.mark.parametrize("size", only([1.0], [1e-3, 1.0, 1e3]))
def test_adaptive_grad_clip_equals_optaxs_for_every_shape(size: float, stepper: Any) -> None:
    rng = np.random.default_rng(2)
    params = {str(s): jnp.asarray(rng.standard_normal(s) * 0.3, jnp.float32) for s in SHAPES}
    params["zeros"] = jnp.zeros((4, 3))  # eps is the lower bound of its norm
    grads = {
        name: jnp.asarray(
            size * rng.standard_normal(p.shape) * 10 ** rng.uniform(-3, 0, p.shape), jnp.float32
        )
        for name, p in params.items()
    }
    grads["zeros"] = grads["zeros"].at[:, 0].set(0.0)
    expected = _updates_of(optax.adaptive_grad_clip(0.02, 1e-3), grads, params)
    actual = _ours(stablenum.AdaptiveGradClip(clipping=0.02, eps=1e-3), grads, params, stepper)
    for name in params:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-6, atol=0, err_msg=name)
    clipped = {name for name in params if (np.asarray(expected[name]) != np.asarray(grads[name])).any()}
    assert (len(clipped) == len(params)) == (size == 1e3)
    assert clipped


@pytest.mark.parametrize("max_norm", only([1.0], [1e-2, 1.0, 1e3]))
def test_clip_by_global_norm_equals_optaxs(max_norm: float, stepper: Any) -> None:
    """Gradients of norm 100 and more: ours divides by norm + 1e-6, as torch does."""
    params, grads = make_params(), make_grads(0, scale=100.0)
    expected = _updates_of(optax.clip_by_global_norm(max_norm), grads, params)
    actual = _ours(max_norm, grads, params, stepper)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, expected)


@pytest.mark.parametrize("max_rms", only([0.5], [1e-3, 0.5, 100.0]))
def test_clip_update_rms_equals_clip_by_block_rms_after_the_optimizer(max_rms: float, stepper: Any) -> None:
    params = make_params()
    peer = optax.chain(optax.scale_by_adam(), optax.clip_by_block_rms(max_rms))
    tx = sj.guard(optax.scale_by_adam(), clip=stablenum.ClipUpdateRMS(max_rms, per_lr=False))
    state, opt_state = peer.init(params), tx.init(params)
    update = jax.jit(tx.update)
    for seed in range(3):
        grads = make_grads(seed)
        expected, state = peer.update(grads, state, params)
        actual, opt_state = update(grads, opt_state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, expected)


def test_clip_update_rms_per_learning_rate_equals_clip_by_block_rms_before_it(stepper: Any) -> None:
    params = make_params()
    peer = optax.chain(optax.scale_by_adam(), optax.clip_by_block_rms(0.7), optax.scale(-1e-2))
    tx = optax.chain(sj.guard(clip=stablenum.ClipUpdateRMS(0.7)), injected(optax.adam, 1e-2))
    expected, after = params, params
    state, opt_state = peer.init(params), tx.init(params)
    for seed in range(3):
        updates, state = peer.update(make_grads(seed), state, expected)
        expected = optax.apply_updates(expected, updates)
        after, opt_state = stepper(tx)(after, opt_state, make_grads(seed))
    # One unit in the last place of a parameter of about 1.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1.2e-7), after, expected)


def test_trap_adaptive_grad_clip_of_1e20_zeroes_and_of_inf_makes_nan(stepper: Any) -> None:
    params = make_params()
    peer = optax.adaptive_grad_clip(0.01)
    big = make_grads(0, scale=1e20)
    assert not np.asarray(_updates_of(peer, big, params)["out"]).any()  # its norm is inf
    assert not all_finite(_updates_of(peer, spoil(big, np.inf), params))

    actual = _ours(stablenum.AdaptiveGradClip(), big, params, stepper)
    limit = 0.01 * float(optax.tree.norm(params["out"]))
    np.testing.assert_allclose(optax.tree.norm(actual["out"]), limit, rtol=1e-5)
    tx = optax.chain(sj.guard(clip=stablenum.AdaptiveGradClip()), optax.sgd(1.0))
    after, _ = stepper(tx)(params, tx.init(params), spoil(big, np.inf))
    assert_same_bits(after, params)
