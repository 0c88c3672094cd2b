"""Kahan, stochastic rounding and master weights: small updates are not lost, and skips change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from stablenum.precision.rounding import compensated_value, kahan_add
from stablenum_jax import kahan, master_weights, stochastic_rounding
from stablenum_jax._precision.compensated import KahanState
from tests.jax.digits import accuracy, digits, mlp, predict
from tests.jax.helpers import assert_same_bits, make_grads, make_params, spoil, without_guard
from tests.selection import only

Make = Callable[[Any], Any]
REMEDIES: dict[str, Make] = {
    "kahan": lambda tx: optax.chain(tx, kahan()),
    "stochastic": lambda tx: optax.chain(tx, stochastic_rounding()),
    "master": master_weights,
}


def after(tx: Any, w: Any, n: int) -> Any:
    """``w`` after ``n`` steps of a constant gradient in one scan, plus Kahan's compensation."""

    def one(carry, _):
        w, state = carry
        updates, state = tx.update(jnp.ones_like(w), state, w)
        return (optax.apply_updates(w, updates), state), None

    (w, state), _ = jax.jit(lambda w: jax.lax.scan(one, (w, tx.init(w)), None, length=n))(w)
    assert w.dtype == jnp.bfloat16
    kept = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == w.shape and leaf.dtype == jnp.int16]
    whole = compensated_value(w, kept[0], xp=jnp) if kept else w
    return np.asarray(w, np.float64), np.asarray(whole, np.float64)


def test_a_thousand_small_updates_are_not_lost() -> None:
    """1000 x -1e-4 on a bfloat16 weight of 1.0: no change without a remedy, 0.1 with each.

    In bfloat16, 0.8984 is the nearest number to 0.9; with Kahan, the compensation holds the difference.
    """
    one, many = jnp.ones(4, jnp.bfloat16), jnp.ones(10_000, jnp.bfloat16)
    sgd = optax.sgd(1e-4)
    assert (after(sgd, one, 1000)[0] == 1.0).all()
    w, whole = after(REMEDIES["kahan"](sgd), one, 1000)
    assert 1.0 - w == pytest.approx(0.1, rel=0.02)
    assert set(w) == {0.8984375}
    # The updates themselves are in bfloat16, in which 1e-4 is 1.0014e-4.
    assert whole == pytest.approx(1.0 - 1000 * float(jnp.bfloat16(1e-4)), rel=1e-4)
    assert 1.0 - after(REMEDIES["stochastic"](sgd), many, 1000)[0].mean() == pytest.approx(0.1, rel=0.02)
    assert 1.0 - after(REMEDIES["master"](sgd), one, 1000)[0] == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_pass_through(name: str, bad: float) -> None:
    tx = REMEDIES[name](optax.sgd(1.0))
    w = jnp.asarray([1.0, 1.0, np.inf, 2.0], jnp.bfloat16)
    state = tx.init(w)
    updates, state = tx.update(jnp.asarray([-bad, 0.5, 1.0, 0.0], jnp.bfloat16), state, w)
    moved = np.asarray(optax.apply_updates(w, updates), np.float32)
    np.testing.assert_array_equal(moved, np.float32([bad, 0.5, np.inf, 2.0]))
    if name == "kahan":
        assert np.isfinite(np.asarray(state[1].compensation, np.float32)).all()


@pytest.mark.sampled
@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize("form", ["step", "wrapper"])
def test_a_skipped_step_changes_no_state(name: str, form: str, mode: str) -> None:
    inner = REMEDIES[name](optax.adam(1e-2))
    params = make_params(jnp.bfloat16)
    if form == "step":
        tx = optax.chain(stablenum_jax.guard(clip=1.0), inner)
        run = lambda p, s, g: stablenum_jax.step(tx, p, s, g)  # noqa: E731
    else:
        tx = stablenum_jax.guard(inner, clip=1.0)

        def run(p, s, g):
            updates, s = tx.update(g, s, p)
            return optax.apply_updates(p, updates), s

    run = jax.jit(run) if mode == "jit" else run
    params, state = run(params, tx.init(params), make_grads(1, params))
    held = run(params, state, spoil(make_grads(2, params)))
    assert_same_bits(held[0], params)
    assert_same_bits(without_guard(held[1]), without_guard(state))


@pytest.mark.parametrize("name", only(["kahan"], REMEDIES))
def test_the_state_can_be_carried_through_a_scan_and_donated(name: str) -> None:
    tx = optax.chain(stablenum_jax.guard(loss_scale="dynamic"), REMEDIES[name](optax.adam(1e-3)))
    params = make_params(jnp.bfloat16)
    grads = jax.tree.map(lambda *g: jnp.stack(g), *[make_grads(i, params) for i in range(4)])

    def one(carry, g):
        return stablenum_jax.step(tx, *carry, g), None

    run = jax.jit(lambda p, s: jax.lax.scan(one, (p, s), grads)[0], donate_argnums=(0, 1))
    state = tx.init(params)
    shapes = jax.eval_shape(lambda x: x, (params, state))
    moved = run(params, state)
    assert jax.tree.map(lambda a, b: a.dtype == b.dtype, moved, shapes)
    assert stablenum_jax.metrics(moved[1])["step"] == 3
    assert {leaf.dtype.name for leaf in jax.tree.leaves(moved[0])} == {"bfloat16"}


def test_leaves_of_other_kinds_pass_through() -> None:
    params = {"w": jnp.ones(2, jnp.bfloat16), "f": jnp.ones(2), "none": None, "n": jnp.arange(2)}
    grads = {
        "w": jnp.ones(2, jnp.bfloat16),
        "f": jnp.full(2, 0.5),
        "none": None,
        "n": np.zeros(2, jax.dtypes.float0),
    }
    for tx in (kahan(), stochastic_rounding(0), master_weights(optax.identity())):
        updates, state = tx.update(grads, tx.init(params), params)
        moved = stablenum_jax._step.training._add(params, updates)
        assert (moved["w"] == 2).all()
        assert (moved["f"] == 1.5).all()
        assert moved["n"] is params["n"]
        assert moved["none"] is None
        assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


def test_kahan_compensates_for_an_update_that_nearly_cancels_the_weight() -> None:
    tx = kahan()
    w = jnp.asarray([1.0], jnp.bfloat16)
    updates, state = tx.update(jnp.asarray([-1.0 + 2.0**-20]), tx.init(w), w)
    landed = compensated_value(optax.apply_updates(w, updates), state.compensation, xp=jnp)
    assert landed[0] == 2.0**-20


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_kahan_update_gives_the_new_weight_exactly(dtype: Any) -> None:
    """The update is a float32 difference: added to a weight of any size it gives exactly the new weight.

    So weight and compensation follow the float64 sum, even where an update cancels or outweighs the weight.
    """
    rng, n = np.random.default_rng(11), 200_000
    least, most = (-14, 13) if dtype == jnp.float16 else (-60, 60)
    tx, w = kahan(), jnp.asarray(rng.normal(size=n) * 2.0 ** rng.integers(least, most, n)).astype(dtype)
    state, update = tx.init(w), jax.jit(tx.update)
    for _ in range(3):
        before = np.asarray(compensated_value(w, state.compensation, xp=jnp), np.float64)
        size = np.where(rng.random(n) < 0.5, -1.0, 0.0) + rng.normal(size=n) * 2.0 ** rng.integers(-30, 3, n)
        u = (np.asarray(w, np.float64) * size).clip(-6e4, 6e4).astype(np.float32)
        moved, _ = jax.jit(lambda *a: kahan_add(*a, xp=jnp))(w, state.compensation, jnp.asarray(u))
        steps, state = update(jnp.asarray(u), state, w)
        w = optax.apply_updates(w, steps)
        if dtype != jnp.float32:  # whose last bit may go into the compensation
            np.testing.assert_array_equal(w, moved)
        exact = before + u
        whole = np.asarray(compensated_value(w, state.compensation, xp=jnp), np.float64)
        inside = np.abs(exact) <= float(jnp.finfo(dtype).max)
        error = np.abs(whole - exact) / np.maximum(np.maximum(np.abs(before), np.abs(u)), 2.0**-14)
        assert error[inside].max() <= 2.0**-22


def test_an_update_from_one_end_of_the_range_to_the_other_stays_finite() -> None:
    w = jnp.asarray([1.6e38, -3e36], jnp.bfloat16)
    for tx in (kahan(), stochastic_rounding(0), master_weights(optax.identity())):
        updates, _ = tx.update(jnp.asarray([-3.4e38, 3.4e38]), tx.init(w), w)
        moved = np.asarray(optax.apply_updates(w, updates), np.float64)
        np.testing.assert_allclose(moved, [-1.8e38, 3.37e38], rtol=0.02)


@pytest.mark.parametrize("name", ["kahan", "stochastic"])
def test_a_sum_beyond_float32_saturates(name: str) -> None:
    top = float(jnp.finfo(jnp.bfloat16).max)
    tx, w = REMEDIES[name](optax.identity()), jnp.asarray([3e38, -3e38, top], jnp.bfloat16)
    state = tx.init(w)
    for _ in range(2):
        updates, state = tx.update(jnp.asarray([3e38, -3e38, 1.0]), state, w)
        assert np.isfinite(np.asarray(updates)).all()
        w = optax.apply_updates(w, updates)
        np.testing.assert_array_equal(np.asarray(w, np.float64), [top, -top, top])


def test_a_compensation_of_another_dtype_is_rejected_by_name() -> None:
    w = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match="c must be int16 for bfloat16 weights"):
        kahan().update(w, KahanState(jnp.zeros_like(w)), w)


def test_master_weights_follow_parameters_that_were_changed() -> None:
    tx = master_weights(optax.sgd(1e-4))
    w = jnp.ones(2, jnp.bfloat16)
    _, state = tx.update(jnp.ones_like(w), tx.init(w), w)
    loaded = jnp.asarray([1.0, 3.0], jnp.bfloat16)
    _, state = tx.update(jnp.ones_like(w), state, loaded)
    np.testing.assert_allclose(state.master, [0.9998, 2.9999], rtol=1e-6)


def test_stochastic_rounding_is_determined_by_the_seed() -> None:
    w = jnp.ones(1000, jnp.bfloat16)
    first, again = (after(REMEDIES["stochastic"](optax.sgd(1e-3)), w, 2)[0] for _ in range(2))
    other = after(optax.chain(optax.sgd(1e-3), stochastic_rounding(4)), w, 2)[0]
    assert (first == again).all()
    assert (first != other).any()


def test_wrong_use_is_named() -> None:
    with pytest.raises(ValueError, match="seed must be a whole number"):
        stochastic_rounding(-1)
    with pytest.raises(ValueError, match="got a float16 one"):
        stochastic_rounding(0).init(jnp.ones(1, jnp.float16))
    for tx in (kahan(), stochastic_rounding(0), master_weights(optax.sgd(1.0))):
        with pytest.raises(ValueError, match="params must be given to the update of"):
            tx.update(jnp.ones(1), tx.init(jnp.ones(1)))


def train_digits(remedy: Make, dtype: Any) -> float:
    """Accuracy after training with parameters, computation and optimizer in ``dtype``."""
    x, y = digits("train")
    tx, params = remedy(optax.adam(optax.cosine_decay_schedule(1e-3, 600))), mlp(seed=0, dtype=dtype)

    def loss(params, x, y):
        logits = predict(params, x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def one(carry, batch):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, *batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    order = np.concatenate([np.random.default_rng(i).permutation(len(x))[:1280] for i in range(30)])
    batches = x[order].reshape(-1, 64, 64), y[order].reshape(-1, 64)
    (params, _), _ = jax.jit(lambda c: jax.lax.scan(one, c, batches))((params, tx.init(params)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    return accuracy(params)


@pytest.mark.slow
def test_digits_in_pure_bfloat16() -> None:
    found = {
        "float32": train_digits(lambda tx: tx, jnp.float32),
        "bfloat16": train_digits(lambda tx: tx, jnp.bfloat16),
    } | {name: train_digits(remedy, jnp.bfloat16) for name, remedy in REMEDIES.items()}
    assert found["bfloat16"] < found["float32"]
    for name in REMEDIES:
        assert abs(found[name] - found["float32"]) <= 0.005, found
