"""Loss scaling: value_and_grad, scale_loss, unscaling, and how the scale changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from stablenum import ClipByNorm, ClipByValue, DynamicLossScale
from tests.jax.helpers import assert_same_bits, every_mode, make_grads, make_params, spoil


def _opt_state(loss_scale: Any, params: Any = None) -> Any:
    return stablenum_jax.guard(loss_scale=loss_scale).init(jnp.ones(2) if params is None else params)


def _maybe_jit(mode: str, fun: Any) -> Any:
    return fun if mode == "eager" else jax.jit(fun)


@every_mode
def test_value_and_grad_without_scaling_is_jaxs_own(mode: str) -> None:
    fun = lambda w: jnp.sum(jnp.sin(w) ** 3)  # noqa: E731
    w = jnp.linspace(-1, 1, 7)
    actual = _maybe_jit(mode, stablenum_jax.value_and_grad(fun, _opt_state(None)))(w)
    expected = _maybe_jit(mode, jax.value_and_grad(fun))(w)
    assert_same_bits(actual, expected)


@every_mode
def test_value_and_grad_scales_the_gradient_and_not_the_value(mode: str) -> None:
    run = _maybe_jit(mode, lambda s, w: stablenum_jax.value_and_grad(lambda w: (w**2).sum(), s)(w))
    loss, grads = run(_opt_state(8.0), jnp.asarray([1.0, 2.0]))
    assert loss == 5.0
    np.testing.assert_array_equal(grads, [16.0, 32.0])


def test_value_and_grad_with_aux_argnums_and_keywords(mode: str) -> None:
    def fun(w: Any, x: Any, *, power: int) -> Any:
        return (w**power * x).sum(), {"w": w}

    state = _opt_state(2.0)
    run = stablenum_jax.value_and_grad(fun, state, argnums=(0, 1), has_aux=True)
    (loss, aux), (dw, dx) = _maybe_jit(mode, lambda w, x: run(w, x, power=2))(jnp.ones(2), jnp.full(2, 3.0))
    assert loss == 6.0
    np.testing.assert_array_equal(aux["w"], [1.0, 1.0])
    np.testing.assert_array_equal(dw, [12.0, 12.0])
    np.testing.assert_array_equal(dx, [2.0, 2.0])


@every_mode
@pytest.mark.parametrize("scale", [2.0**10, 2.0**16, 2.0**20])
def test_a_float16_loss_can_be_scaled_beyond_float16(scale: float, mode: str) -> None:
    run = _maybe_jit(mode, lambda s, w: stablenum_jax.value_and_grad(lambda w: (w * w).sum(), s)(w))
    w = jnp.asarray([2.0**-8, 0.0], jnp.float16)
    loss, grads = run(_opt_state(scale, w), w)
    assert loss.dtype == grads.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(grads, np.float64), [2.0**-7 * scale, 0.0])


def test_a_float32_loss_with_float16_parameters(mode: str) -> None:
    run = _maybe_jit(
        mode, lambda s, w: stablenum_jax.value_and_grad(lambda w: 1e-7 * w.astype(jnp.float32).sum(), s)(w)
    )
    w = jnp.ones(2, jnp.float16)
    assert (jax.grad(lambda w: 1e-9 * w.astype(jnp.float32).sum())(w) == 0).all()  # why scaling is needed
    _, grads = run(_opt_state(2.0**16, w), w)
    np.testing.assert_allclose(np.asarray(grads, np.float32), 1e-7 * 2**16, rtol=1e-3)


def test_value_and_grad_rejects_an_integer_loss() -> None:
    with pytest.raises(TypeError, match="must be a floating-point scalar; got int32"):
        stablenum_jax.value_and_grad(lambda w: jnp.asarray(1), _opt_state(2.0))(jnp.ones(2))


@every_mode
def test_scale_loss_is_float32(mode: str) -> None:
    run = _maybe_jit(mode, stablenum_jax.scale_loss)
    scaled = run(jnp.asarray(60000.0, jnp.float16), _opt_state("dynamic"))
    assert scaled.dtype == jnp.float32
    assert scaled == 60000.0 * 65536
    assert run(3.0, _opt_state(None)) == 3.0


def test_loss_scale_reads_one_without_scaling() -> None:
    scale = stablenum_jax.loss_scale(_opt_state(None))
    assert (scale, scale.dtype, scale.shape) == (1.0, jnp.float32, ())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_scaled_and_unscaled_training_give_the_same_result(dtype: Any, stepper: Any) -> None:
    """Powers of two cost no precision: the bits are the same with a scale of 1024 and with none."""
    ends = []
    for scale in (None, 1024.0):
        tx = optax.chain(stablenum_jax.guard(loss_scale=scale), optax.adam(1e-2))
        params = make_params()
        opt_state = tx.init(params)
        for seed in range(4):
            grads = make_grads(seed, make_params(dtype), scale=0.1)
            grads = jax.tree.map(lambda g: g * (scale or 1.0), grads)  # noqa: B023
            assert jax.tree.leaves(grads)[0].dtype == dtype
            params, opt_state = stepper(tx)(params, opt_state, grads)
        ends.append(params)
        assert stablenum_jax.metrics(opt_state)["loss_scale"] == (scale or 1.0)
    if dtype == jnp.float32:
        assert_same_bits(*ends)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3), *ends)


def test_unscaling_does_not_flush_float16_gradients(stepper: Any) -> None:
    params = {"w": jnp.ones(2)}
    tx = optax.chain(stablenum_jax.guard(loss_scale=2.0**16), optax.sgd(2.0**20))
    grads = {"w": jnp.asarray([2.0**-10, 1.0], jnp.float16)}  # 2**-26 unscaled: zero in float16
    after, _ = stepper(tx)(params, tx.init(params), grads)
    np.testing.assert_allclose(after["w"], [1 - 2.0**-6, 1 - 2.0**4])


def test_without_scaling_gradients_keep_their_dtype() -> None:
    seen = []
    spy = optax.stateless(lambda updates, _: seen.append(updates["w"].dtype) or updates)
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    for settings, expected in (
        ({}, jnp.bfloat16),
        ({"clip": 1.0}, jnp.bfloat16),
        ({"loss_scale": 2.0}, jnp.float32),
    ):
        tx = optax.chain(stablenum_jax.guard(**settings), spy, optax.sgd(0.1))
        after, _ = stablenum_jax.step(tx, params, tx.init(params), params)
        assert seen[-1] == expected
        assert after["w"].dtype == jnp.bfloat16


@every_mode
def test_the_scale_follows_the_dynamic_rule(stepper: Any) -> None:
    rule = DynamicLossScale(init_scale=8.0, growth_interval=3)
    tx = optax.chain(stablenum_jax.guard(loss_scale=rule), optax.sgd(0.1))
    params = make_params()
    opt_state = tx.init(params)
    step, scales = stepper(tx), []
    for good in (True, False, True, True, True, True, False, False):
        grads = make_grads(0) if good else spoil(make_grads(0), np.inf)
        params, opt_state = step(params, opt_state, grads)
        scales.append(float(stablenum_jax.loss_scale(opt_state)))
    assert scales == [8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 4.0, 2.0]


def test_clip_by_norm_has_one_multiplier_per_tensor(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=ClipByNorm(1.0), loss_scale=2.0), optax.sgd(1.0))
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    grads = {"a": jnp.asarray([6.0, 8.0]), "b": jnp.asarray([0.6, 0.8])}
    after, opt_state = stepper(tx)(params, tx.init(params), grads)
    np.testing.assert_allclose(after["a"], [-0.6, -0.8], rtol=1e-5)
    np.testing.assert_allclose(after["b"], [-0.3, -0.4], rtol=1e-5)
    assert stablenum_jax.metrics(opt_state)["clip_coefficient"] == pytest.approx(0.2, rel=1e-5)


def test_clip_by_value_clamps_unscaled_elements(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=ClipByValue(0.5), loss_scale=4.0), optax.sgd(1.0))
    params = {"a": jnp.zeros(3)}
    after, _ = stepper(tx)(params, tx.init(params), {"a": jnp.asarray([4.0, -8.0, 1.0])})
    np.testing.assert_array_equal(after["a"], [-0.5, 0.5, -0.25])


def test_a_guard_that_changes_no_gradients_returns_the_same_objects() -> None:
    seen = []
    spy = optax.stateless(lambda updates, _: seen.append(updates) or updates)
    tx = optax.chain(stablenum_jax.guard(), spy)
    params, grads = make_params(), make_grads(0)

    def step(grads: Any) -> Any:
        after = stablenum_jax.step(tx, params, tx.init(params), grads)
        same = [a is b for a, b in zip(jax.tree.leaves(seen[-1]), jax.tree.leaves(grads), strict=True)]
        assert all(same)
        return after

    jax.jit(step)(grads)
    assert seen


SCALED = {
    "value_and_grad": lambda loss_fn, opt_state: stablenum_jax.value_and_grad(loss_fn, opt_state),
    "scale_loss": lambda loss_fn, opt_state: jax.value_and_grad(
        lambda w: stablenum_jax.scale_loss(loss_fn(w), opt_state)
    ),
    "loss_scale": lambda loss_fn, opt_state: jax.value_and_grad(
        lambda w: loss_fn(w) * stablenum_jax.loss_scale(opt_state)
    ),
    "guard_state": lambda loss_fn, opt_state: jax.value_and_grad(
        lambda w: loss_fn(w) * stablenum_jax.guard_state(opt_state).loss_scale.scale
    ),
}
FORMS = {
    "step": lambda: optax.chain(stablenum_jax.guard(loss_scale="dynamic"), optax.sgd(0.1)),
    "guard(inner)": lambda: stablenum_jax.guard(optax.sgd(0.1), loss_scale="dynamic"),
}


@pytest.fixture
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not read any loss scale yet."""
    monkeypatch.setattr("stablenum_jax._trees.scale_reads._WAS_READ", False)


def _loss(w: Any) -> Any:
    return jnp.sum((w - 3.0) ** 2)


@every_mode
@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_nobody_scaled_warn_once(form: str, mode: str, nothing_read: None) -> None:
    tx, w = FORMS[form](), jnp.ones(2)

    def train_step(w: Any, opt_state: Any) -> Any:
        grads = jax.grad(_loss)(w)
        if form == "step":
            return stablenum_jax.step(tx, w, opt_state, grads)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    step = _maybe_jit(mode, train_step)
    with pytest.warns(UserWarning, match=r"stablenum_jax\.value_and_grad\(loss_fn, opt_state\)") as caught:
        after, opt_state = step(w, tx.init(w))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    np.testing.assert_allclose(after, w, rtol=1e-4)  # 65536 times too small
    step(after, opt_state)  # warnings are errors here
    _maybe_jit(mode, lambda *args: train_step(*args))(after, opt_state)


@every_mode
@pytest.mark.parametrize("how", SCALED)
def test_scaled_gradients_do_not_warn(how: str, mode: str, nothing_read: None) -> None:
    """The gradients come from another jit than the step, and that is traced again with a restored state."""
    tx, w = FORMS["step"](), jnp.ones(2)
    opt_state = tx.init(w)
    gradient = _maybe_jit(mode, lambda w, opt_state: SCALED[how](_loss, opt_state)(w)[1])
    for _ in range(2):
        step = _maybe_jit(mode, lambda w, opt_state, grads: stablenum_jax.step(tx, w, opt_state, grads))
        w, opt_state = step(w, opt_state, gradient(w, opt_state))
        plain = stablenum_jax.guard_state_dict(opt_state)
        opt_state = stablenum_jax.load_guard_state_dict(tx.init(w), plain)
    np.testing.assert_allclose(w, 3.0 - 2.0 * 0.8**2, rtol=1e-5)


@pytest.mark.parametrize("loss_scale", [None, 128.0])
def test_no_scale_and_a_fixed_one_do_not_warn(loss_scale: Any, stepper: Any, nothing_read: None) -> None:
    """A fixed scale is known to the caller, who need not read it."""
    tx, w = optax.chain(stablenum_jax.guard(loss_scale=loss_scale), optax.sgd(0.1)), jnp.ones(2)
    after, _ = stepper(tx)(w, tx.init(w), (loss_scale or 1.0) * jax.grad(_loss)(w))
    np.testing.assert_allclose(after, 1.4, rtol=1e-5)


@pytest.mark.parametrize("policy", [None, "p=f32,c=f16"])
@pytest.mark.parametrize(
    "formats", ["x", "float16", ("float32", "float16"), ("f8", "f99"), 3, ("float16", "float32")]
)
def test_formats_are_checked_whether_they_are_used_or_not(policy, formats):
    opt_state = stablenum_jax.guard().init(jnp.ones(2))
    if policy is not None and formats == ("float16", "float32"):
        stablenum_jax.value_and_grad(jnp.sum, opt_state, policy=policy, formats=formats)
        return
    with pytest.raises(ValueError, match=r"formats must be|format must be|None without a policy"):
        stablenum_jax.value_and_grad(jnp.sum, opt_state, policy=policy, formats=formats)
