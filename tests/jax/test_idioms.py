"""Other programs' settings and optimizers: JAX's debug and strict modes, 8-bit leaves, unusual optimizers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax as sj
from tests.jax.helpers import assert_same_bits, reason, without_guard
from tests.selection import REPEATS, slow_but_for

PARAMS = {"b": jnp.ones(2), "w": jnp.ones((2, 2))}
RULES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "clip": {"clip": 1.0},
    "units": {"clip": stablenum.AdaptiveGradClip()},
    "updates": {"clip": stablenum.ClipUpdateRMS(1.0, per_lr=False)},
    "spike": {"spike": stablenum.SpikeGuard()},
    "loss scale": {"loss_scale": "dynamic"},
}


@pytest.mark.parametrize(
    ("rules", "value"),
    slow_but_for(
        [("spike", 1.0), ("updates", None), ("units", None)],
        itertools.product(RULES, [None, 1.0]),
    ),
)
def test_a_sound_step_passes_under_debug_nans(rules: str, value: Any) -> None:
    with jax.debug_nans(True):
        tx = optax.chain(sj.guard(**RULES[rules]), optax.adam(0.1))
        params, opt_state = PARAMS, tx.init(PARAMS)
        for _ in range(2):
            params, opt_state = sj.step(tx, params, opt_state, PARAMS, value=value)
        opt_state = sj.load_guard_state_dict(opt_state, sj.guard_state_dict(opt_state))
        seen = sj.metrics(opt_state)
    assert seen["applied"]
    np.testing.assert_equal(seen["loss"], np.nan if value is None else value)


WATCHING = ["SpikeGuard", "MeanStdSpikeGuard", "AutoClip", "ZClip"]


# Each rule, and both modes twice.
@pytest.mark.parametrize(
    ("mode", "rule"),
    slow_but_for(
        zip(["step", "jit", "jit", "step"], WATCHING, strict=True),
        itertools.product(["step", "jit"], WATCHING),
    ),
)
def test_sound_steps_pass_under_debug_infs(mode: str, rule: str) -> None:
    made = getattr(stablenum, rule)()
    with jax.debug_infs(True):
        guard = sj.guard(spike=made) if "Spike" in rule else sj.guard(clip=made)
        tx = optax.chain(guard, optax.adam(0.1))
        step = functools.partial(sj.step, tx)
        step = jax.jit(step) if mode == "jit" else step
        params, opt_state = PARAMS, tx.init(PARAMS)
        for _ in range(3):
            params, opt_state = step(params, opt_state, PARAMS, value=1.0)
    assert sj.metrics(opt_state)["applied"]


def test_the_traced_loss_that_was_not_given_is_nan() -> None:
    tx = optax.chain(sj.guard(), optax.sgd(0.1))
    opt_state = sj.step(tx, PARAMS, tx.init(PARAMS), PARAMS)[1]
    assert np.isnan(jax.jit(sj.metrics)(opt_state)["loss"])
    assert np.isnan(sj.history(opt_state)[0]["loss"])


@pytest.mark.parametrize("debug", [True, False])
def test_metrics_in_a_trace_pass_under_debug_nans(debug: bool) -> None:
    tx = optax.chain(sj.guard(), optax.sgd(0.1))

    def train(carry: Any, _: None) -> Any:
        params, before = carry
        params, opt_state = sj.step(tx, params, before, PARAMS)
        return (params, opt_state), (sj.metrics(before), sj.metrics(opt_state))

    with jax.debug_nans(debug):
        (_, opt_state), (before, seen) = jax.lax.scan(train, (PARAMS, tx.init(PARAMS)), None, length=2)
    unknown = np.finfo(np.float32).min if debug else np.nan
    np.testing.assert_equal(np.asarray(seen["loss"]), unknown)
    np.testing.assert_equal(np.asarray(before["grad_norm"]), [unknown, np.sqrt(np.float32(6.0))])
    assert np.isnan(sj.metrics(opt_state)["loss"])


@pytest.mark.sampled
@pytest.mark.parametrize("value", [-1e300, np.float32(-3.4028235e38), np.float64(1e300), np.asarray(-1e39)])
@pytest.mark.parametrize("jit", [False, True])
def test_a_loss_beyond_float32_is_a_loss_that_was_given(value: Any, jit: bool) -> None:
    def by_loss(updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda g: jnp.where(jnp.isfinite(value), -g, jnp.nan), updates), state

    tx = optax.chain(
        sj.guard(), optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), by_loss)
    )
    take = functools.partial(sj.step, tx, value=value)
    after, opt_state = (jax.jit(take) if jit else take)(PARAMS, tx.init(PARAMS), PARAMS)
    for seen in (sj.metrics(opt_state), jax.jit(sj.metrics)(opt_state), sj.history(opt_state)[0]):
        np.testing.assert_allclose(seen["loss"], np.copysign(3.4028235e38, value), rtol=1e-6)
    np.testing.assert_array_equal(after["w"], 0.0)


@pytest.mark.parametrize(
    ("rules", "dtype"),
    slow_but_for(
        [("units", jnp.bfloat16), ("loss scale", jnp.float16), ("nothing", jnp.bfloat16)],
        itertools.product(RULES, [jnp.bfloat16, jnp.float16]),
    ),
)
def test_a_step_under_strict_promotion(rules: str, dtype: Any) -> None:
    params = {**PARAMS, "w": PARAMS["w"].astype(dtype)}
    with jax.numpy_dtype_promotion("strict"):
        tx = optax.chain(sj.guard(**RULES[rules]), optax.sgd(0.1))
        opt_state = tx.init(params)
        scaled = sj.scale_loss(jnp.ones((), dtype), opt_state)
        after, opt_state = sj.step(tx, params, opt_state, params, value=jnp.ones((), dtype))
    assert after["w"].dtype == dtype
    assert scaled == sj.loss_scale(tx.init(params))
    assert sj.metrics(opt_state)["applied"]


@pytest.mark.parametrize(
    ("rules", "dtype"),
    slow_but_for(
        [("clip", jnp.float8_e4m3fn), ("loss scale", jnp.float8_e5m2), ("spike", jnp.float8_e4m3fn)],
        itertools.product(RULES, [jnp.float8_e4m3fn, jnp.float8_e5m2]),
    ),
)
def test_leaves_of_8_bits(rules: str, dtype: Any) -> None:
    params = {**PARAMS, "w": PARAMS["w"].astype(dtype)}
    tx = optax.chain(sj.guard(**RULES[rules]), optax.sgd(0.5))
    after, opt_state = sj.step(tx, params, tx.init(params), params)
    assert after["w"].dtype == dtype
    assert sj.metrics(opt_state)["applied"]
    bad = {**params, "w": jnp.full((2, 2), jnp.nan).astype(dtype)}
    kept, opt_state = sj.step(tx, after, opt_state, bad)
    assert_same_bits(kept, after)
    assert sj.metrics(opt_state)["worst"] == (1, "w")


FLOAT8 = [jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize(
    ("dtype", "mode"),
    slow_but_for(zip(FLOAT8, ["eager", "jit"], strict=True), itertools.product(FLOAT8, ["eager", "jit"])),
)
def test_updates_of_8_bits_can_be_added_under_a_loss_scale(dtype: Any, mode: str) -> None:
    params = {**PARAMS, "w": jnp.full((2, 2), 2.0).astype(dtype)}
    tx = sj.guard(optax.sgd(1.0), loss_scale=8.0)

    def step(grads: Any) -> Any:
        updates, opt_state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), updates, opt_state

    step = jax.jit(step) if mode == "jit" else step
    grads = jax.tree.map(lambda x: jnp.full_like(x, 4.0), params)
    after, updates, _ = step(grads)
    assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, params)
    assert (after["w"].astype(jnp.float32) == 1.5).all()
    kept, updates, opt_state = step({**grads, "w": jnp.full((2, 2), jnp.nan).astype(dtype)})
    assert updates["w"].dtype == dtype
    assert not sj.metrics(opt_state)["applied"]
    assert_same_bits(kept, params)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["step", "guard"])
@pytest.mark.parametrize("rule", [1.0, stablenum.AdaGC(), stablenum.AdaptiveGradClip(clipping=10.0)])
def test_lookahead_whose_updates_have_another_structure_than_the_gradients(form: str, rule: Any) -> None:
    inner = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    chained = optax.chain(sj.guard(clip=rule), inner)
    tx = chained if form == "step" else sj.guard(inner, clip=rule)
    params = optax.LookaheadParams.init_synced(PARAMS)
    expected, state = params, inner.init(params)
    opt_state = tx.init(params)
    small = jax.tree.map(lambda x: 0.1 * x, PARAMS)

    @jax.jit
    def train(params: Any, opt_state: Any, grads: Any) -> Any:
        if form == "step":
            return sj.step(tx, params, opt_state, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(3):
        params, opt_state = train(params, opt_state, small)
        updates, state = inner.update(small, state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)
    bad = {**small, "w": small["w"] * jnp.nan}
    kept, after = train(params, opt_state, bad)
    assert_same_bits((kept, without_guard(after)), (params, without_guard(opt_state)))
    assert sj.metrics(after)["worst"] == (1, "w")


def _refusing(updates: Any, state: Any, params: Any = None, *, rate: float = 1.0) -> Any:
    return jax.tree.map(lambda g: -rate * g, updates), state


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2), marks=REPEATS),
        optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), _refusing),
    ],
    ids=["sam", "own"],
)
def test_the_loss_is_not_passed_to_an_optimizer_that_does_not_take_it(inner: Any) -> None:
    updates, _ = inner.update(PARAMS, inner.init(PARAMS), PARAMS)
    expected = optax.apply_updates(PARAMS, updates)
    tx = optax.chain(sj.guard(), inner)
    after, opt_state = sj.step(tx, PARAMS, tx.init(PARAMS), PARAMS, value=jnp.asarray(2.0))
    assert_same_bits(after, expected)
    assert sj.metrics(opt_state)["loss"] == 2.0
    wrapped = sj.chain(sj.guard(), inner, optax.polyak_sgd())  # one that takes it beside one that does not
    _, opt_state = wrapped.update(PARAMS, wrapped.init(PARAMS), PARAMS, value=jnp.asarray(2.0))
    assert reason(opt_state) == "OK"
    with pytest.raises(TypeError, match="unexpected keyword argument 'loss'"):
        sj.step(tx, PARAMS, tx.init(PARAMS), PARAMS, loss=jnp.asarray(2.0))


def test_arguments_in_another_order_are_named() -> None:
    tx = optax.chain(sj.guard(), optax.sgd(0.1))
    opt_state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"got it as grads\. step takes \(tx, params, opt_state, grads\)"):
        sj.step(tx, PARAMS, PARAMS, opt_state)
    with pytest.raises(ValueError, match=r"got it as params\. step takes"):
        sj.step(tx, opt_state, PARAMS, PARAMS)
    with pytest.raises(ValueError, match=r"grads\['b'\] must be None, as params\['b'\] is"):
        sj.step(tx, {**PARAMS, "b": None}, opt_state, PARAMS)  # a frozen parameter, in the order of optax
    model = {**PARAMS, "f": jnp.tanh}
    with pytest.raises(ValueError, match=r"grads\['f'\] is .*unlike tx\.update"):
        sj.step(tx, {**PARAMS, "f": None}, opt_state, model)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_no_order_of_the_arguments_but_one_passes_as_another(order: tuple[int, ...]) -> None:
    tx = optax.chain(sj.guard(), optax.sgd(0.5))
    given = PARAMS, tx.init(PARAMS), jax.tree.map(lambda x: 3 * x, PARAMS)
    names = ("params", "opt_state", "grads")
    after, _ = sj.step(tx, **{names[i]: given[i] for i in order})
    np.testing.assert_array_equal(after["w"], -0.5)
    mixed = [given[i] for i in order]
    if order[1] != 1:
        with pytest.raises(ValueError, match=r"opt_state must be the state of tx; got it as .*step takes"):
            sj.step(tx, *mixed)
    elif order[0] == 2:  # nothing tells gradients from parameters, as the docstring says
        after, _ = sj.step(tx, *mixed)
        np.testing.assert_array_equal(after["w"], 2.5)


@pytest.mark.sampled
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("use", ["plain update", "placement", "load"])
def test_a_warning_points_at_the_line_of_the_user(use: str, jit: bool) -> None:
    def act() -> Any:
        if use == "load":
            saved = sj.guard_state_dict(sj.guard().init(PARAMS))
            return sj.load_guard_state_dict(sj.guard(clip=stablenum.ZClip()).init(PARAMS), saved)
        parts = [sj.guard(), optax.scale(0.5)][:: -1 if use == "placement" else 1]
        tx = optax.chain(*parts)
        if use == "placement":
            return sj.step(tx, PARAMS, tx.init(PARAMS), PARAMS)
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS)

    with pytest.warns(UserWarning, match="guard|statistics") as caught:
        (jax.jit(act) if jit and use != "load" else act)()
    assert {w.filename for w in caught} == {__file__}
