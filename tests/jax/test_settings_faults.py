"""Settings of ``inject_hyperparams`` that are not finite are skipped, with a reason of their own."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from stablenum import Reason

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(2)}
GRADS = {"w": jnp.full(3, 0.5), "b": jnp.ones(2)}


def _inject(**settings):
    return optax.inject_hyperparams(optax.adamw)(**{"learning_rate": 0.1, "weight_decay": 0.01} | settings)


FORMS = {
    "in a chain": lambda: optax.chain(stablenum_jax.guard(loss_scale=8.0), _inject()),
    "around": lambda: stablenum_jax.guard(_inject(), loss_scale=8.0),
    "under another": lambda: optax.chain(
        stablenum_jax.guard(loss_scale=8.0),
        optax.inject_hyperparams(lambda scale: optax.chain(_inject(), optax.scale(scale)))(scale=1.0),
    ),
}


def _with(opt_state, name, value):
    def put(path, leaf):
        return jnp.asarray(value, leaf.dtype) if jax.tree_util.keystr(path).endswith(f"[{name!r}]") else leaf

    return jax.tree_util.tree_map_with_path(put, opt_state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "b1", "eps"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_setting_that_is_not_finite_is_skipped(form, name, bad):
    tx = FORMS[form]()
    step = jax.jit(lambda params, state: stablenum_jax.step(tx, params, state, GRADS))
    params, state = step(PARAMS, tx.init(PARAMS))
    sound = next(
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if jax.tree_util.keystr(path).endswith(f"[{name!r}]")
    )
    after, state = step(params, _with(state, name, bad))
    last = stablenum_jax.metrics(state)
    assert (last["reason"], last["loss_scale"]) == (Reason.NONFINITE_SETTING, 8.0)
    assert all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(params)))
    moved, state = step(after, _with(state, name, sound))
    assert stablenum_jax.metrics(state)["applied"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(moved))


def test_a_bound_may_be_infinite():
    inner = optax.inject_hyperparams(lambda bound: optax.chain(optax.clip(bound), optax.sgd(0.1)))
    tx = optax.chain(stablenum_jax.guard(), inner(bound=jnp.inf))
    _, state = stablenum_jax.step(tx, PARAMS, tx.init(PARAMS), GRADS)
    assert stablenum_jax.metrics(state)["applied"]
