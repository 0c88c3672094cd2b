"""Escalation gets past a bad stretch in float16, with the same levels as the NumPy specification."""

from __future__ import annotations

import array_api_compat.numpy as xp
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax
from stablenum import EscalatePrecision
from stablenum_jax._precision.escalate import current_policy, ladder_of
from stablenum_jax.policy import as_policy

STEPS, STRETCH = 120, slice(20, 70)


def loss(params, batch):
    """The loss of a line fitted to points; a large ``boost`` overflows float16 in between and cancels out."""
    x, y, boost = batch
    predicted = (x * boost) @ params["w"] / boost + params["b"]
    return jnp.mean((predicted.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


def batches():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, 16, 3)).astype(np.float32)
    boost = np.ones(STEPS, np.float32)
    boost[STRETCH] = 1e5  # overflows float16, has no effect in float32
    return x, (x @ np.float32([1.0, -2.0, 0.5]) + 0.25).astype(np.float32), boost


def train(policy, **settings):
    """The final loss in float32, the losses, and the guard's history."""
    tx = optax.chain(stablenum_jax.guard(**settings), optax.sgd(0.1))
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}

    def one(carry, batch):
        params, opt_state = carry
        value, grads = stablenum_jax.value_and_grad(loss, opt_state, policy=policy)(params, batch)
        assert jax.tree.map(lambda g: g.dtype.name, grads) == {"w": "float32", "b": "float32"}
        return stablenum_jax.step(tx, params, opt_state, grads, value=value), value

    start = (params, tx.init(params))
    (params, opt_state), _ = jax.jit(lambda c: jax.lax.scan(one, c, batches()))(start)
    final = np.mean([loss(params, [part[i] for part in batches()]) for i in range(3)])
    return float(final), stablenum_jax.history(opt_state)


def test_training_through_a_bad_stretch_ends_as_well_as_in_float32() -> None:
    rule = EscalatePrecision(after=3, for_steps=10)
    full, _ = train("float32")
    escalated, rows = train("c=f16", escalate=rule)
    stuck, held = train("c=f16")
    assert escalated < 1.5 * full + 1e-5
    assert sum(row["applied"] for row in held) == STEPS - 50
    # Each visit to float16 within the stretch costs three steps.
    assert sum(row["applied"] for row in rows) >= STEPS - 15
    assert stuck < 1.0

    config = stablenum.GuardConfig(escalate=rule)
    state, levels = stablenum.init_guard(config, 2, xp=xp), []
    for i in range(STEPS):
        level = int(state.escalation.level)
        levels.append(level)
        bad = level == 0 and STRETCH.start <= i < STRETCH.stop
        norms = np.full(2, np.nan if bad else 1.0, np.float32)
        _, state = stablenum.decide(config, state, stablenum.Observation(norms=norms), xp=xp)
    assert [row["precision_level"] for row in rows] == levels
    assert {0, 1} == set(levels)
    assert levels[-1] == 0


def test_without_an_escalation_a_policy_only_casts() -> None:
    seen = []

    def fun(params, x):
        seen.append((params["norm"]["w"].dtype, params["w"].dtype, x["x"].dtype, x["i"].dtype))
        return (params["w"] * x["x"] * params["norm"]["w"]).sum(), params["w"]

    params = {"w": jnp.ones(2), "norm": {"w": jnp.ones(2)}}
    opt_state = optax.chain(stablenum_jax.guard(loss_scale=2.0**20), optax.sgd(1.0)).init(params)
    policy = stablenum_jax.policy.get_policy("c=bf16", rules={"norm": "f32"})
    run = stablenum_jax.value_and_grad(fun, opt_state, has_aux=True, policy=policy)
    (value, aux), grads = run(params, {"x": jnp.ones(2), "i": jnp.arange(2)})
    assert [dtype.name for dtype in seen[0]] == ["float32", "bfloat16", "bfloat16", "int32"]
    assert (value.dtype, aux.dtype) == (jnp.float32, jnp.bfloat16)
    assert (grads["w"] == 2.0**20).all()
    assert grads["w"].dtype == jnp.float32
    for same in (jmp.get_policy("c=bf16"), "c=bf16", stablenum.Policy(compute="bf16")):
        stablenum_jax.value_and_grad(fun, opt_state, has_aux=True, policy=same)(
            params, {"x": jnp.ones(2), "i": jnp.arange(2)}
        )
        assert seen[-1][0] == jnp.bfloat16


def test_levels_by_policy() -> None:
    assert ladder_of(as_policy("c=f16"), None) == ("float16", "float32")
    assert ladder_of(as_policy("bf16"), None) == ("bfloat16", "float32")
    assert ladder_of(as_policy("c=fp8"), None) == ("float8_e4m3fn", "bfloat16", "float32")
    assert ladder_of(as_policy("c=f16"), ("f16", "f32", "f64")) == ("float16", "float32", "float64")
    assert ladder_of(as_policy("f32"), None) == ("float32",)
    with pytest.raises(ValueError, match="begin with the policy's own"):
        ladder_of(as_policy("c=bf16"), ("f16", "f32"))


def test_an_escalation_without_a_policy_to_widen_is_rejected() -> None:
    tx = optax.chain(stablenum_jax.guard(escalate=EscalatePrecision()), optax.sgd(0.1))
    opt_state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match="policy must be given if the guard has an EscalatePrecision"):
        stablenum_jax.value_and_grad(jnp.sum, opt_state)
    value, _ = stablenum_jax.value_and_grad(jnp.sum, opt_state, policy="p=f32,c=f16")(jnp.ones(2))
    assert value == 2


def test_islands_keep_their_format() -> None:
    policy = stablenum_jax.policy.get_policy("c=f16", rules={"norm": "f32", "mlp": "c=fp8,o=bf16"})
    assert current_policy(policy) is policy
    with stablenum_jax._precision.escalate.computing_in("bfloat16"):
        now = current_policy(policy)
    assert (now.core.compute, now.at("norm").core.compute) == ("bfloat16", "float32")
    assert (now.at("mlp").core.compute, now.core.output) == ("bfloat16", "bfloat16")
