"""Random streams: whatever the gradients, no state or parameter ever becomes non-finite."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

import stablenum
import stablenum_jax
from tests.jax.helpers import all_finite, assert_same_bits, without_guard

RULE = stablenum.DynamicLossScale(growth_interval=2, max_scale=2.0**30)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "clip and scale": {"clip": 1.0, "loss_scale": RULE},
    "all rules": {
        "clip": [stablenum.ClipByNorm(2.0), 1.0, stablenum.ClipByValue(0.5)],
        "loss_scale": RULE,
    },
}
SHAPES = {"a": (2, 2), "b": (3,)}
# Huge, but Adam's g^2 stays in range even where nothing is clipped.
HUGE = {"default": 1e15}

_KINDS = st.sampled_from(["ordinary", "zero", "tiny", "huge", "nan", "inf", "-inf"])
_STREAM = st.lists(
    st.tuples(_KINDS, _KINDS, st.sampled_from([None, 1.0, 1e30, np.nan, np.inf])), min_size=1, max_size=12
)


def _leaf(kind: str, shape: tuple[int, ...], seed: int, huge: float) -> Any:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if kind in ("nan", "inf", "-inf"):
        x.flat[seed % x.size] = float(kind)
        return x
    return x * np.float32({"ordinary": 1.0, "zero": 0.0, "tiny": 1e-30, "huge": huge}[kind])


@functools.cache
def _step(name: str, form: str) -> tuple[Any, Any]:
    optimizer = optax.adamw(1e-2)
    if form == "step":
        tx = optax.chain(stablenum_jax.guard(**SETTINGS[name]), optimizer)
        return tx, jax.jit(lambda p, s, g, v: stablenum_jax.step(tx, p, s, g, value=v))
    tx = stablenum_jax.guard(optimizer, **SETTINGS[name])

    def step(params: Any, opt_state: Any, grads: Any, value: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    return tx, jax.jit(step)


# Each example has up to 12 steps.
@settings(max_examples=max(1, settings().max_examples * 2 // 5))
@given(stream=_STREAM, name=st.sampled_from(sorted(SETTINGS)), form=st.sampled_from(["step", "wrapper"]))
def test_nothing_kept_becomes_nonfinite(stream: Any, name: str, form: str) -> None:
    tx, step = _step(name, form)
    params = {key: jnp.ones(shape) for key, shape in SHAPES.items()}
    opt_state = tx.init(params)
    skipped = 0
    for i, (a, b, loss) in enumerate(stream):
        grads = {
            key: jnp.asarray(_leaf(kind, SHAPES[key], i, HUGE.get(name, 1e30)))
            for key, kind in (("a", a), ("b", b))
        }
        before = params, without_guard(opt_state)
        value = jnp.float32(0.0 if loss is None else loss)
        params, opt_state = step(params, opt_state, grads, value)
        good = all_finite(grads) and bool(np.isfinite(value))
        skipped += not good
        if not good:
            assert_same_bits((params, without_guard(opt_state)), before)
        guard = stablenum_jax.guard_state(opt_state)
        assert all_finite((params, without_guard(opt_state), guard.loss_scale, guard.clip))
        assert 1.0 <= float(guard.loss_scale.scale) <= 2.0**30
        assert (int(guard.step), int(guard.skipped_total)) == (i + 1, skipped)


@given(stream=_STREAM)
def test_a_stream_ends_as_the_stream_of_its_good_steps(stream: Any) -> None:
    tx, step = _step("default", "step")
    ends = []
    for only_good in (False, True):
        params = {key: jnp.ones(shape) for key, shape in SHAPES.items()}
        opt_state = tx.init(params)
        for i, (a, b, _) in enumerate(stream):
            if only_good and {a, b} & {"nan", "inf", "-inf"}:
                continue
            leaves = {"a": _leaf(a, SHAPES["a"], i, 1e15), "b": _leaf(b, SHAPES["b"], i, 1e15)}
            params, opt_state = step(params, opt_state, jax.tree.map(jnp.asarray, leaves), jnp.float32(0.0))
        ends.append((params, without_guard(opt_state)))
    assert_same_bits(*ends)
