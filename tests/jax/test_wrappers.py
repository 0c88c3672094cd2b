"""The guard inside and around optax's own wrappers."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from stablenum import DynamicLossScale
from stablenum_jax import GuardPlacementWarning, NotATrueSkipWarning
from stablenum_jax._trees.state import replace_guard
from stablenum_jax.typing import GuardOptState
from tests.jax.helpers import (
    all_finite,
    assert_same_bits,
    make_grads,
    make_params,
    reason,
    spoil,
    without_guard,
)
from tests.selection import only, slow_but_for

guard = stablenum_jax.guard


def _accumulate(tx: Any, k: int = 3) -> Any:
    return optax.MultiSteps(tx, k).gradient_transformation()


def _weights_only(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


def _injected(learning_rate: float) -> Any:
    return optax.chain(guard(clip=1.0), optax.adam(learning_rate))


AROUND_AND_INSIDE = {
    "guard outside MultiSteps": lambda: optax.chain(guard(clip=1.0), _accumulate(optax.adam(1e-2))),
    "guard inside MultiSteps": lambda: _accumulate(optax.chain(guard(clip=1.0), optax.adam(1e-2))),
    "wrapper inside MultiSteps": lambda: _accumulate(guard(optax.adam(1e-2), clip=1.0)),
    "guard outside masked": lambda: optax.chain(guard(), optax.masked(optax.adam(1e-2), _weights_only)),
    "guard inside masked": lambda: optax.masked(optax.chain(guard(), optax.adam(1e-2)), _weights_only),
    "guard outside inject": lambda: optax.chain(
        guard(), optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    ),
    "guard inside inject": lambda: optax.inject_hyperparams(_injected)(learning_rate=1e-2),
    "guard inside inject, scheduled": lambda: optax.inject_hyperparams(_injected)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 5)
    ),
    "guard outside partition": lambda: optax.chain(
        guard(), optax.partition({"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2)}, _labels)
    ),
    "guard inside partition": lambda: optax.partition(
        {"matrix": optax.sgd(1e-2), "vector": optax.chain(guard(), optax.adam(1e-2))}, _labels
    ),
    "guard inside named_chain": lambda: optax.named_chain(("guard", guard()), ("adam", optax.adam(1e-2))),
    "guard inside apply_if_finite": lambda: optax.apply_if_finite(optax.chain(guard(), optax.adam(1e-2)), 2),
    "guard inside ema of updates": lambda: optax.chain(guard(), optax.adam(1e-2), optax.ema(0.9)),
    "chain": lambda: stablenum_jax.chain(guard(), optax.adam(1e-2)),
    "wrapper form": lambda: guard(optax.adam(1e-2)),
    "schedule free": lambda: optax.chain(guard(), optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2)),
    "prodigy": lambda: optax.chain(guard(), optax.contrib.prodigy()),
}


@functools.cache
def _built(case: str) -> Any:
    """The optimizer and its step, eager and compiled, built once for all tests here."""
    tx = AROUND_AND_INSIDE[case]()
    step = functools.partial(stablenum_jax.step, tx)
    return tx, {"eager": step, "jit": jax.jit(step)}


# One of each pair of like nestings; both tests below share what they compile.
_ALWAYS = (
    "guard inside MultiSteps",
    "guard inside inject, scheduled",
    "guard outside partition",
    "chain",
    "wrapper form",
)
# An eager step runs the same code, compiled by the adapter itself, so a few cases are enough.
_EAGER = (
    "guard outside MultiSteps",
    "guard inside MultiSteps",
    "guard inside masked",
    "guard inside inject",
    "chain",
)
_CASES = [(case, "jit") for case in AROUND_AND_INSIDE] + [(case, "eager") for case in _EAGER]


@pytest.mark.parametrize(
    ("case", "how"),
    slow_but_for([*((case, "jit") for case in _ALWAYS), ("guard inside inject", "eager")], _CASES),
)
def test_bad_steps_change_nothing(case: str, how: str) -> None:
    """A run with bad steps ends bit for bit as the run without them, whatever the nesting."""
    ends = []
    tx, steps = _built(case)
    step = steps[how]
    for bad_steps in ({1, 2, 5, 6}, set()):
        params = make_params()
        opt_state = tx.init(params)
        structure = jax.tree.structure(opt_state)
        for i in range(11):
            if i not in {1, 2, 5, 6}:
                params, opt_state = step(params, opt_state, make_grads(i))
            elif i in bad_steps:
                before = params, without_guard(opt_state)
                params, opt_state = step(
                    params, opt_state, spoil(make_grads(i), np.inf if i == 2 else np.nan)
                )
                assert_same_bits((params, without_guard(opt_state)), before)
        assert jax.tree.structure(opt_state) == structure
        assert stablenum_jax.metrics(opt_state)["skipped_total"] == len(bad_steps)
        ends.append((params, without_guard(opt_state)))
        assert (params["out"] != make_params()["out"]).any() or "masked" in case
    assert_same_bits(*ends)


@pytest.mark.parametrize("case", only(_ALWAYS, AROUND_AND_INSIDE))
def test_a_good_step_equals_that_of_the_plain_loop(case: str) -> None:
    """With nothing to clip, ``step`` does what ``tx.update`` and ``apply_updates`` do."""
    tx, steps = _built(case)
    params = make_params()
    opt_state = tx.init(params)
    step, update = steps["jit"], jax.jit(tx.update)
    for i in range(4):
        params, opt_state = step(params, opt_state, make_grads(i, scale=1e-3))
    expected, state = make_params(), tx.init(make_params())
    for i in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plain loop with a chain-form guard
            updates, state = update(make_grads(i, scale=1e-3), state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), params, expected)


def test_multisteps_accumulates_unscaled_gradients_while_the_scale_changes(stepper: Any) -> None:
    rule = DynamicLossScale(init_scale=1024.0, growth_interval=1)
    tx = _accumulate(optax.chain(guard(loss_scale=rule), optax.sgd(1.0)), 4)
    params = {"w": jnp.zeros(3)}
    opt_state = tx.init(params)
    step = stepper(tx)
    scales = []
    for i in range(5):
        scale = stablenum_jax.loss_scale(opt_state)
        scales.append(float(scale))
        raw = jnp.asarray([1.0, 2.0, np.inf if i == 1 else 3.0])
        params, opt_state = step(params, opt_state, {"w": raw * scale}, value=jnp.asarray(0.5))
    # The bad micro-step halved the scale in the middle of the accumulation.
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    np.testing.assert_allclose(params["w"], [-1.0, -2.0, -3.0], rtol=1e-6)
    assert stablenum_jax.loss_scale(opt_state) == 1024.0  # one applied step, one growth
    rows = stablenum_jax.history(opt_state)
    assert [row["reason"].name for row in rows] == ["INF_GRADIENT", "OK"]
    assert rows[1]["grad_norm"] == pytest.approx(14**0.5, rel=1e-6)
    assert rows[1]["loss"] == 0.5


def test_multisteps_keeps_float16_micro_gradients_in_float32(stepper: Any) -> None:
    tx = _accumulate(optax.chain(guard(loss_scale=2.0**16), optax.sgd(1.0)), 2)
    params = {"w": jnp.zeros(2)}
    opt_state = tx.init(params)
    tiny = {"w": jnp.asarray([1e-8 * 2**16, 1e-3], jnp.float16)}
    for _ in range(2):
        params, opt_state = stepper(tx)(params, opt_state, tiny)
    np.testing.assert_allclose(params["w"][0], -1e-8, rtol=1e-3)


def test_multisteps_skips_when_only_the_sum_overflows(stepper: Any) -> None:
    tx = optax.MultiSteps(
        optax.chain(guard(), optax.adam(1e-2)), 2, use_grad_mean=False
    ).gradient_transformation()
    params = {"w": jnp.ones(2)}
    opt_state = tx.init(params)
    step = stepper(tx)
    params_1, state_1 = step(params, opt_state, {"w": jnp.full(2, 3e38)})
    assert_same_bits(params_1, params)
    params_2, state_2 = step(params_1, state_1, {"w": jnp.full(2, 3e38)})
    assert_same_bits(params_2, params)
    assert reason(state_2) == "INF_GRADIENT"
    assert_same_bits(without_guard(state_2), without_guard(opt_state))  # the window is dropped
    for gradient in (3e38, -3e38):  # and the next one, whose sum is finite, is applied
        params_2, state_2 = step(params_2, state_2, {"w": jnp.full(2, gradient)})
    assert all_finite((params_2, without_guard(state_2)))
    assert stablenum_jax.metrics(state_2)["applied"]


def test_a_halt_inside_multisteps_skips_all_later_steps() -> None:
    tx = _accumulate(optax.chain(guard(max_skips_in_a_row=2), optax.adam(1e-2)), 2)
    params = make_params()
    step = jax.jit(lambda p, s, g: stablenum_jax.step(tx, p, s, g))
    after, opt_state = params, tx.init(params)
    for seed in range(2):
        after, opt_state = step(after, opt_state, spoil(make_grads(seed)))
    halted = opt_state
    for seed in range(3):
        after, opt_state = step(after, opt_state, make_grads(seed))
    assert_same_bits((after, opt_state), (params, halted))


def test_a_masked_guard_checks_the_leaves_it_does_not_see(stepper: Any) -> None:
    tx = optax.chain(optax.masked(guard(clip=1.0), _weights_only), optax.adam(1e-2))
    params = make_params()
    opt_state = tx.init(params)
    assert stablenum_jax.guard_state_dict(opt_state)["names"] == ["dense.w"]
    after, state_after = stepper(tx)(params, opt_state, spoil(make_grads(0)))  # "out" is masked
    assert_same_bits(after, params)
    assert reason(state_after) == "FOUND_INF"
    assert_same_bits(without_guard(state_after), without_guard(opt_state))


def test_a_masked_guard_clips_only_its_own_leaves(stepper: Any) -> None:
    tx = optax.chain(optax.masked(guard(clip=1.0), _weights_only), optax.sgd(1.0))
    params = jax.tree.map(jnp.zeros_like, make_params())
    grads = make_grads(0, scale=10.0)
    after, opt_state = stepper(tx)(params, tx.init(params), grads)
    assert_same_bits(after["out"], -grads["out"])
    assert float(jnp.linalg.norm(after["dense"]["w"])) == pytest.approx(1.0, rel=1e-5)
    assert stablenum_jax.metrics(opt_state)["worst"] == (0, "dense.w")


def test_injected_hyperparameters_can_be_changed(stepper: Any) -> None:
    tx = optax.inject_hyperparams(_injected)(learning_rate=1e-2)
    params = make_params()
    opt_state = tx.init(params)
    opt_state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    after, _ = stepper(tx)(params, opt_state, make_grads(0))
    np.testing.assert_array_equal(after["out"], params["out"])


@pytest.mark.parametrize("mode", only(["jit"], ["eager", "jit"]))
def test_multisteps_does_not_warn_about_placement_but_a_jitted_update_does(stepper: Any) -> None:
    params = make_params()
    tx = _accumulate(optax.chain(guard(), optax.adam(1e-2)))
    stepper(tx)(params, tx.init(params), make_grads(0))  # warnings are errors here
    inner = optax.chain(guard(), optax.adam(1e-2))
    jitted = optax.GradientTransformation(inner.init, jax.jit(inner.update))
    with pytest.warns(GuardPlacementWarning, match=r"instead of tx\.update"):
        after, _ = stepper(jitted)(params, jitted.init(params), spoil(make_grads(0)))
    assert_same_bits(after, params)


def test_a_deferred_guard_that_sees_nonfinite_values_undoes_the_whole_step(stepper: Any) -> None:
    """Finite gradients that a transformation before the guard turns into inf."""
    blow_up = optax.stateless(lambda updates, _: jax.tree.map(lambda g: g * 1e38 * 1e10, updates))
    tx = optax.chain(blow_up, guard(), optax.adam(1e-2))
    params = make_params()
    opt_state = tx.init(params)
    with pytest.warns(GuardPlacementWarning):
        after, state_after = stepper(tx)(params, opt_state, make_grads(0))
    assert_same_bits(after, params)
    assert_same_bits(without_guard(state_after), without_guard(opt_state))
    assert stablenum_jax.metrics(state_after)["skipped_total"] == 1


def test_the_state_holds_arrays_only() -> None:
    opt_state = guard(optax.adam(1e-2), clip=[1.0], loss_scale="dynamic").init(make_params())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(opt_state))
    assert isinstance(opt_state[0], GuardOptState)
    assert jax.tree.structure(replace_guard(opt_state, opt_state[0])) == jax.tree.structure(opt_state)


def test_linesearch_gets_its_extra_arguments(stepper: Any, mode: str) -> None:
    fun = lambda w: jnp.sum((w - 3.0) ** 2)  # noqa: E731
    tx = optax.chain(guard(), optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5)))
    params = jnp.zeros(3)
    opt_state = tx.init(params)

    def step(params: Any, opt_state: Any) -> Any:
        value, grads = jax.value_and_grad(fun)(params)
        return stablenum_jax.step(tx, params, opt_state, grads, value=value, grad=grads, value_fn=fun)

    step = step if mode == "eager" else jax.jit(step)
    for _ in range(4):
        params, opt_state = step(params, opt_state)
    np.testing.assert_allclose(params, 3.0, atol=1e-3)


PLAIN_INSIDE = {
    "guard(inner)": lambda: guard(optax.adam(1e-2)),
    "chain": lambda: stablenum_jax.chain(guard(), optax.adam(1e-2)),
    "optax.chain": lambda: optax.chain(guard(), optax.adam(1e-2)),
}


@pytest.mark.parametrize("form", PLAIN_INSIDE)
def test_plain_update_of_multisteps_around_a_guard_warns_once(form: str, updater: Any) -> None:
    """One NaN stays in the accumulator, and every later window is skipped."""
    tx, params = _accumulate(PLAIN_INSIDE[form](), 2), make_params()
    opt_state, step = tx.init(params), updater(tx)
    with pytest.warns(NotATrueSkipWarning, match=r"guard\(optax\.MultiSteps\(optimizer, k\)\)") as caught:
        params, opt_state = step(params, opt_state, spoil(make_grads(0)))
    assert len(caught) == 1
    jax.jit(lambda *args: tx.update(*args))(make_grads(1), opt_state, params)  # traced again: no warning


def test_no_warning_where_multisteps_keeps_bad_gradients_out(updater: Any, stepper: Any) -> None:
    params, k = make_params(), 2
    itself = optax.MultiSteps(guard(optax.adam(1e-2)), k, should_skip_update_fn=optax.skip_not_finite)
    for tx in (itself.gradient_transformation(), guard(_accumulate(optax.adam(1e-2), k))):
        updater(tx)(params, tx.init(params), spoil(make_grads(0)))  # warnings are errors here
    tx = _accumulate(guard(optax.adam(1e-2)), k)
    stepper(tx)(params, tx.init(params), spoil(make_grads(0)))
