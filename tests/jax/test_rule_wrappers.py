"""Rules under optax's wrappers: what they see there, and that a skipped step leaves no trace."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax as sj
from tests.jax.helpers import assert_same_bits, make_grads, make_params, reason, spoil, without_guard
from tests.jax.rules import injected
from tests.selection import only, slow_but_for

SETTINGS: dict[str, Any] = {
    "clip": (
        stablenum.AdaptiveGradClip(clipping=0.2),
        stablenum.AdaGC(warmup_steps=3),
        stablenum.ZClip(warmup_steps=2, max_norm=None),
        stablenum.AutoClip(quantile=0.5, window=4),
        stablenum.ClipUpdateRMS(0.5, per_lr=False),
    ),
    "spike": stablenum.SpikeGuard(window=8, min_samples=4),
}
guard = functools.partial(sj.guard, **SETTINGS)


def _accumulate(tx: Any, k: int = 2) -> Any:
    return optax.MultiSteps(tx, k).gradient_transformation()


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


def _weights_only(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


CASES = {
    "step": lambda: optax.chain(guard(), optax.adam(1e-2)),
    "wrapper form": lambda: guard(optax.adam(1e-2)),
    "outside MultiSteps": lambda: optax.chain(guard(), _accumulate(optax.adam(1e-2))),
    "inside MultiSteps": lambda: _accumulate(optax.chain(guard(), optax.adam(1e-2))),
    "wrapper inside MultiSteps": lambda: _accumulate(guard(optax.adam(1e-2))),
    "outside masked": lambda: optax.chain(guard(), optax.masked(optax.adam(1e-2), _weights_only)),
    "inside masked": lambda: optax.masked(optax.chain(guard(), optax.adam(1e-2)), _weights_only),
    "inside partition": lambda: optax.partition(
        {"matrix": optax.sgd(1e-2), "vector": optax.chain(guard(), optax.adam(1e-2))}, _labels
    ),
    "outside inject": lambda: optax.chain(guard(), injected(optax.adam)),
    "inside inject": lambda: injected(lambda learning_rate: optax.chain(guard(), optax.adam(learning_rate))),
}


# Outside a wrapper the guard sees the same as without one; test_wrappers.py has more nestings of a guard.
ALWAYS = ("wrapper form", "inside MultiSteps", "inside masked")


@pytest.mark.parametrize("case", only(ALWAYS, CASES))
def test_bad_steps_change_nothing_whatever_the_nesting(case: str) -> None:
    tx, ends = CASES[case](), []
    step = jax.jit(functools.partial(sj.step, tx))
    for bad_steps in ({1, 2, 5, 6}, set()):
        params = make_params()
        opt_state = tx.init(params)
        structure = jax.tree.structure(opt_state)
        for i in range(11):
            if i not in {1, 2, 5, 6}:
                params, opt_state = step(params, opt_state, make_grads(i))
            elif i in bad_steps:
                grads = spoil(make_grads(i), np.inf if i == 2 else np.nan)
                params, opt_state = step(params, opt_state, grads)
        assert jax.tree.structure(opt_state) == structure
        assert sj.metrics(opt_state)["skipped_total"] == len(bad_steps)
        state = sj.guard_state(opt_state)
        ends.append((params, without_guard(opt_state), state.clip, state.spike))
    assert_same_bits(*ends)


@pytest.mark.parametrize(
    ("form", "rule"),
    slow_but_for(
        [("chain form", SETTINGS["clip"][3]), ("wrapper", SETTINGS["clip"][0])],
        itertools.product(["chain form", "wrapper"], SETTINGS["clip"][:4]),
    ),
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_inside_multisteps_the_rule_sees_the_mean(form: str, rule: Any) -> None:
    """The result is the same as passing the means one by one."""
    guarded = sj.guard(optax.sgd(0.1), clip=rule)
    if form == "chain form":
        guarded = optax.chain(sj.guard(clip=rule), optax.sgd(0.1))
    micro, mean = _accumulate(guarded), optax.chain(sj.guard(clip=rule), optax.sgd(0.1))
    ends = [(make_params(), tx.init(make_params())) for tx in (micro, mean)]
    steps = [jax.jit(functools.partial(sj.step, tx)) for tx in (micro, mean)]
    for i in range(6):
        pair = make_grads(2 * i), make_grads(2 * i + 1)
        for grads in pair:
            ends[0] = steps[0](*ends[0], grads)
        ends[1] = steps[1](*ends[1], jax.tree.map(lambda a, b: (a + b) / 2, *pair))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ends[0][0], ends[1][0])
    of_micro, of_mean = (sj.history(opt_state) for _, opt_state in ends)
    assert [row["reason"] for row in of_micro] == [row["reason"] for row in of_mean]
    for key in ("grad_norm", "clip_coefficient"):
        np.testing.assert_allclose([row[key] for row in of_micro], [row[key] for row in of_mean], rtol=1e-5)


@pytest.mark.parametrize("form", only(["wrapper"], ["chain form", "wrapper"]))
def test_noisy_micro_batches_are_not_taken_for_spikes(form: str) -> None:
    """Each norm is 1000 times that of their mean; a step whose mean is a spike is skipped."""
    rule = stablenum.SpikeGuard(window=8, min_samples=4)
    guarded = sj.guard(optax.sgd(0.1), spike=rule)
    if form == "chain form":
        guarded = optax.chain(sj.guard(spike=rule), optax.sgd(0.1))
    tx = _accumulate(guarded)
    step = jax.jit(functools.partial(sj.step, tx))
    params = {"w": jnp.zeros(4)}
    opt_state = tx.init(params)
    for i in range(8):
        for sign in (1.0, -1.0):
            grads = {"w": jnp.full(4, 1.0 + 0.01 * i + sign * 1000.0)}
            params, opt_state = step(params, opt_state, grads, value=jnp.float32(1.0))
    seen = sj.metrics(opt_state)
    assert (seen["step"], seen["skipped_total"], seen["reason"].name) == (7, 0, "OK")
    before = params, without_guard(opt_state)
    for _ in range(2):
        params, opt_state = step(params, opt_state, {"w": jnp.full(4, 50.0)}, value=jnp.float32(1.0))
    assert reason(opt_state) == "SPIKE_GRAD_NORM"
    assert_same_bits(params, before[0])
    params, opt_state = step(params, opt_state, {"w": jnp.full(4, 1.0)}, value=jnp.float32(1.0))
    params, opt_state = step(params, opt_state, {"w": jnp.full(4, 1.0)}, value=jnp.float32(1.0))
    assert sj.metrics(opt_state)["applied"]


@pytest.mark.parametrize("form", only(["chain form"], ["chain form", "wrapper", "before another"]))
def test_inside_multisteps_the_loss_of_a_micro_batch_is_not_used_as_the_steps(form: str) -> None:
    """Whichever micro-batch it is from, a loss is neither judged nor remembered; a NaN is still skipped."""
    rule = stablenum.SpikeGuard(window=8, min_samples=4)
    tx = _accumulate(
        {
            "chain form": lambda: optax.chain(sj.guard(spike=rule), optax.sgd(0.1)),
            "wrapper": lambda: sj.guard(optax.sgd(0.1), spike=rule),
            "before another": lambda: optax.chain(optax.scale(2.0), sj.guard(spike=rule), optax.sgd(0.1)),
        }[form]()
    )
    step = jax.jit(functools.partial(sj.step, tx))
    for which in (0, 1):
        _one_loss_stands_out(tx, step, which)


def _one_loss_stands_out(tx: Any, step: Any, which: int) -> None:
    params = {"w": jnp.ones(3)}
    opt_state = tx.init(params)
    for i in range(8):
        for micro in range(2):
            loss = 100.0 if (i, micro) == (6, which) else 1.0 + 0.01 * (i % 3)
            params, opt_state = step(params, opt_state, {"w": jnp.ones(3)}, value=jnp.float32(loss))
        assert reason(opt_state) == "OK"
    spike = sj.guard_state(opt_state).spike
    assert np.isinf(spike.loss).all()
    assert np.isfinite(spike.grad_norm).all()
    assert np.isnan([row["loss"] for row in sj.history(opt_state)]).all()
    after, opt_state = step(params, opt_state, {"w": jnp.ones(3)}, value=jnp.float32(jnp.nan))
    assert reason(opt_state) == "NONFINITE_LOSS"
    assert_same_bits(after, params)


@pytest.mark.parametrize(
    "case",
    only(
        ["outside MultiSteps", "wrapper"], ["outside MultiSteps", "behind another", "plain update", "wrapper"]
    ),
)
def test_elsewhere_the_spike_rule_sees_the_loss(case: str) -> None:
    guard = functools.partial(sj.guard, spike=stablenum.SpikeGuard(window=8, min_samples=4))
    tx = {
        "outside MultiSteps": lambda: optax.chain(guard(), _accumulate(optax.sgd(0.1))),
        "behind another": lambda: optax.chain(optax.scale(2.0), guard(), optax.sgd(0.1)),
        "plain update": lambda: optax.chain(guard(), optax.sgd(0.1)),
        "wrapper": lambda: optax.chain(optax.scale(2.0), guard(optax.sgd(0.1))),
    }[case]()

    def plain(params: Any, opt_state: Any, grads: Any, value: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(plain if case == "plain update" else functools.partial(sj.step, tx))
    params = {"w": jnp.ones(3)}
    opt_state = tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the placement and plain tx.update
        for loss in (1.0, 1.01, 1.02, 1.0, 1.01, 100.0):
            params, opt_state = step(params, opt_state, {"w": jnp.ones(3)}, value=jnp.float32(loss))
    assert reason(opt_state) == "SPIKE_LOSS"
    assert sj.history(opt_state)[-1]["loss"] == 100.0
    np.testing.assert_allclose(sj.guard_state(opt_state).spike.loss[-5:], [1.0, 1.01, 1.02, 1.0, 1.01])


def test_the_rule_sees_the_weights_that_a_wrapper_changed() -> None:
    """If a wrapper passes on other parameters, the guard measures those itself."""
    rule = stablenum.AdaptiveGradClip(clipping=0.1)
    inner = optax.chain(sj.guard(clip=rule), optax.sgd(1.0))

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return inner.update(grads, state, jax.tree.map(lambda p: 2.0 * p, params))

    tx, params = optax.GradientTransformation(inner.init, update), make_params()
    grads = make_grads(0)
    after, opt_state = jax.jit(functools.partial(sj.step, tx))(params, tx.init(params), grads)
    moved = optax.tree.norm(params["out"] - after["out"])
    np.testing.assert_allclose(moved, 0.2 * optax.tree.norm(params["out"]), rtol=1e-5)
    skipped, opt_state = jax.jit(functools.partial(sj.step, tx))(after, opt_state, spoil(grads))
    assert_same_bits(skipped, after)
    assert sj.metrics(opt_state)["skipped_total"] == 1
