"""metrics, history, halting and resuming, the state dict."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import array_api_compat.numpy as xnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax
from stablenum import GuardConfig, NonFiniteError, Observation, decide, init_guard
from stablenum.guard.skip_log import SkipLogs
from stablenum.guard.statedict import StatisticsNotLoadedWarning, state_from_dict, state_to_dict
from tests.jax.helpers import (
    assert_same_bits,
    every_mode,
    make_grads,
    make_params,
    reason,
    spoil,
    without_guard,
)

KEYS = {
    "worst_rank",
    "precision_level",
    "applied",
    "reason",
    "grad_norm",
    "loss_scale",
    "clip_coefficient",
    "skipped_total",
    "skipped_in_a_row",
    "worst",
    "step",
    "loss",
}


def _run(settings: dict[str, Any], seeds: Any = (0,), **value: Any) -> tuple[Any, Any, Any]:
    tx = optax.chain(stablenum_jax.guard(**settings), optax.adam(1e-2))
    params = make_params()
    opt_state = tx.init(params)
    for seed in seeds:
        params, opt_state = stablenum_jax.step(tx, params, opt_state, make_grads(seed), **value)
    return tx, params, opt_state


def test_metrics_are_plain_values() -> None:
    _, _, opt_state = _run({"clip": 1.0, "loss_scale": 2.0}, value=jnp.asarray(0.5))
    seen = stablenum_jax.metrics(opt_state)
    assert set(seen) == KEYS
    types = {name: type(value) for name, value in seen.items()}
    assert types["applied"] is bool
    assert {types[name] for name in ("grad_norm", "loss_scale", "clip_coefficient", "loss")} == {float}
    assert {types[name] for name in ("skipped_total", "skipped_in_a_row", "step")} == {int}
    norm = float(optax.tree.norm(make_grads(0))) / 2
    assert seen["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert seen["clip_coefficient"] == pytest.approx(1 / norm, rel=1e-5)
    assert (seen["loss"], seen["loss_scale"], seen["step"]) == (0.5, 2.0, 0)


def test_metrics_before_the_first_step() -> None:
    _, _, opt_state = _run({"loss_scale": "dynamic"}, seeds=())
    seen = stablenum_jax.metrics(opt_state)
    assert (seen["applied"], seen["reason"].name, seen["worst"]) == (False, "NO_STEP_YET", (-1, None))
    assert math.isnan(seen["grad_norm"])
    traced = jax.jit(stablenum_jax.metrics)(opt_state)
    assert (traced["reason"], traced["applied"], traced["loss_scale"]) == (6, False, 65536.0)


@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_traced_metrics_equal_those_on_the_host(bad: float | None) -> None:
    tx, params, opt_state = _run({"clip": 1.0, "loss_scale": "dynamic"}, value=jnp.asarray(2.0))
    grads = make_grads(1) if bad is None else spoil(make_grads(1), bad)
    _, opt_state = stablenum_jax.step(tx, params, opt_state, grads, value=jnp.asarray(3.0))
    host, traced = stablenum_jax.metrics(opt_state), jax.jit(stablenum_jax.metrics)(opt_state)
    assert set(traced) == set(host) == KEYS
    host["worst"], host["worst_rank"] = host["worst"].index, -1
    for name, value in host.items():
        np.testing.assert_array_equal(np.asarray(traced[name]), np.asarray(value), err_msg=name)


def test_metrics_can_be_logged_inside_a_scan() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-2))
    params = make_params()

    def body(carry: Any, grads: Any) -> Any:
        carry = stablenum_jax.step(tx, *carry, grads)
        return carry, stablenum_jax.metrics(carry[1])

    grads = jax.tree.map(lambda *g: jnp.stack(g), make_grads(0), spoil(make_grads(1)), make_grads(2))
    (_, opt_state), log = jax.lax.scan(body, (params, tx.init(params)), grads)
    assert log["applied"].tolist() == [True, False, True]
    assert log["worst"][1] == 2
    assert [row["applied"] for row in stablenum_jax.history(opt_state)] == [True, False, True]


def test_history_holds_the_last_128_steps() -> None:
    tx, params, opt_state = _run({}, seeds=())
    step = jax.jit(lambda p, s, g: stablenum_jax.step(tx, p, s, g))
    for i in range(130):
        params, opt_state = step(params, opt_state, spoil(make_grads(0)) if i % 10 == 0 else make_grads(0))
    rows = stablenum_jax.history(opt_state)
    assert [row["step"] for row in rows] == list(range(2, 130))
    assert [row["step"] for row in rows if not row["applied"]] == list(range(10, 130, 10))


@pytest.mark.parametrize("settings", [{"on_nonfinite": "raise"}, {"max_skips_in_a_row": 1}])
def test_an_eager_step_raises_after_the_skipped_step(settings: dict[str, Any]) -> None:
    tx, params, opt_state = _run(settings)
    before = jax.tree.map(np.array, (params, without_guard(opt_state)))
    with pytest.raises(NonFiniteError, match="First bad parameter: out") as caught:
        stablenum_jax.step(tx, params, opt_state, spoil(make_grads(1)))
    assert_same_bits(jax.tree.map(np.asarray, (params, without_guard(opt_state))), before)
    remembered = caught.value.opt_state  # type: ignore[attr-defined]
    assert stablenum_jax.history(remembered)[-1]["reason"].name == "NAN_GRADIENT"
    assert caught.value.metrics["skipped_total"] == 1
    resumed = stablenum_jax.clear_halt(remembered)
    params, resumed = stablenum_jax.step(tx, params, resumed, make_grads(2))
    assert stablenum_jax.metrics(resumed)["applied"]
    assert stablenum_jax.metrics(resumed)["skipped_total"] == 1


def test_an_eager_wrapper_also_raises() -> None:
    tx = stablenum_jax.guard(optax.adam(1e-2), max_skips_in_a_row=2)
    params = make_params()
    _, opt_state = tx.update(spoil(make_grads(0)), tx.init(params), params)
    with pytest.raises(NonFiniteError, match="2 step"):
        tx.update(spoil(make_grads(0)), opt_state, params)


def test_under_jit_the_guard_halts_and_metrics_raise() -> None:
    tx, params, opt_state = _run({"max_skips_in_a_row": 2})
    step = jax.jit(lambda p, s, g: stablenum_jax.step(tx, p, s, g))
    for seed in range(2):
        _, opt_state = step(params, opt_state, spoil(make_grads(seed)))
    halted = opt_state
    after, opt_state = step(params, opt_state, make_grads(3))  # a good step after the halt
    assert_same_bits((after, opt_state), (params, halted))
    with pytest.raises(NonFiniteError, match=r"2 step\(s\) in a row"):
        stablenum_jax.metrics(opt_state)
    assert stablenum_jax.metrics(opt_state, raise_if_halted=False)["skipped_in_a_row"] == 2
    assert len(stablenum_jax.history(opt_state)) == 3
    opt_state = jax.jit(stablenum_jax.clear_halt)(opt_state)
    after, opt_state = step(params, opt_state, make_grads(3))
    assert stablenum_jax.metrics(opt_state)["applied"]


@every_mode
def test_a_skip_below_the_limit_does_not_raise(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(max_skips_in_a_row=3), optax.adam(1e-2))
    params = make_params()
    opt_state = tx.init(params)
    for i in range(8):
        grads = make_grads(i) if i % 3 == 2 else spoil(make_grads(i))
        params, opt_state = stepper(tx)(params, opt_state, grads)
    assert stablenum_jax.metrics(opt_state)["skipped_total"] == 6


def test_the_state_dict_is_strict_json_and_round_trips() -> None:
    tx, params, opt_state = _run({"clip": 1.0, "loss_scale": "dynamic"})
    _, opt_state = stablenum_jax.step(tx, params, opt_state, spoil(make_grads(1), np.inf))
    text = json.dumps(stablenum_jax.guard_state_dict(opt_state), allow_nan=False)
    fresh = tx.init(params)
    loaded = stablenum_jax.load_guard_state_dict(fresh, json.loads(text))
    assert_same_bits(stablenum_jax.guard_state(loaded), stablenum_jax.guard_state(opt_state))
    assert_same_bits(without_guard(loaded), without_guard(fresh))
    assert reason(loaded) == "INF_GRADIENT"


def test_a_state_continues_in_numpy_with_the_same_decisions() -> None:
    config = GuardConfig(clip=1.0, loss_scale=stablenum.DynamicLossScale(growth_interval=2))
    tx = optax.chain(stablenum_jax.guard(config=config), optax.sgd(0.1))
    params = make_params()
    opt_state = tx.init(params)
    for seed in range(3):
        params, opt_state = stablenum_jax.step(tx, params, opt_state, make_grads(seed))
    like = init_guard(config, 3, xp=xnp)
    state = state_from_dict(stablenum_jax.guard_state_dict(opt_state), like, xp=xnp)
    for seed in range(3, 8):
        grads = spoil(make_grads(seed), np.inf) if seed == 5 else make_grads(seed)
        params, opt_state = stablenum_jax.step(tx, params, opt_state, grads)
        norms = np.asarray([np.linalg.norm(np.ravel(g)) for g in jax.tree.leaves(grads)], np.float32)
        decision, state = decide(config, state, Observation(norms=norms), xp=xnp)
        seen = stablenum_jax.metrics(opt_state)
        assert (int(decision.reason), int(decision.worst)) == (seen["reason"], seen["worst"].index)
        np.testing.assert_allclose(seen["grad_norm"], decision.grad_norm, rtol=1e-6)
        assert float(state.loss_scale.scale) == float(stablenum_jax.loss_scale(opt_state))
    back = stablenum_jax.load_guard_state_dict(opt_state, state_to_dict(state))
    assert stablenum_jax.guard_state(back).step == 8


def test_names_translate_recorded_parameters() -> None:
    """Torch orders parameters by module, JAX by sorted key."""
    tx, params, opt_state = _run({})
    _, opt_state = stablenum_jax.step(tx, params, opt_state, spoil(make_grads(1)))
    plain = stablenum_jax.guard_state_dict(opt_state)
    assert plain["names"] == ["dense.b", "dense.w", "out"]
    plain["names"] = ["out", "dense.w", "dense.b"]
    loaded = stablenum_jax.load_guard_state_dict(opt_state, plain)
    assert stablenum_jax.metrics(loaded)["worst"] == (0, "dense.b")


def test_loading_a_wrong_dict_names_the_field() -> None:
    _, _, opt_state = _run({"loss_scale": "dynamic"})
    plain = stablenum_jax.guard_state_dict(opt_state)
    for path, value in ((("version",), 7), (("state", "step"), "many"), (("state", "loss_scale"), [])):
        wrong = json.loads(json.dumps(plain))
        part = wrong
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        with pytest.raises(ValueError, match=r"guard state|" + r"\.".join(path)):
            stablenum_jax.load_guard_state_dict(opt_state, wrong)


def test_a_rule_without_saved_statistics_keeps_its_own() -> None:
    _, _, opt_state = _run({"loss_scale": "dynamic"})
    plain = stablenum_jax.guard_state_dict(opt_state)
    other = _run({"clip": [1.0, stablenum.AutoClip(window=4)]})[2]
    with pytest.warns(StatisticsNotLoadedWarning, match="AutoClip"):
        loaded = stablenum_jax.load_guard_state_dict(other, plain)
    before, after = stablenum_jax.guard_state(other), stablenum_jax.guard_state(loaded)
    assert_same_bits(after.clip, before.clip)
    assert after.step == stablenum_jax.guard_state(opt_state).step


def test_stacked_and_traced_states_are_rejected_with_a_clear_message() -> None:
    tx, params, _ = _run({})
    stacked = jax.vmap(tx.init)(jax.tree.map(lambda x: jnp.stack([x, x]), params))
    with pytest.raises(ValueError, match=r"stacked to shape \(2,\)"):
        stablenum_jax.metrics(stacked)
    with pytest.raises(ValueError, match="concrete"):
        jax.jit(stablenum_jax.history)(tx.init(params))


def test_metrics_log_a_run_of_skips_of_a_jitted_step(caplog, monkeypatch):
    monkeypatch.setattr("stablenum_jax._step.readout._skips", defaultdict(SkipLogs))
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    opt_state = tx.init(params)
    step = jax.jit(lambda params, opt_state, grads: stablenum_jax.step(tx, params, opt_state, grads))
    for i in range(1, 41):
        params, opt_state = step(params, opt_state, {"w": jnp.asarray([1.0, jnp.nan])})
        if i % 10 == 0:
            stablenum_jax.metrics(opt_state)
    messages = [record.getMessage() for record in caplog.records if record.name == "stablenum"]
    assert [message.split()[0] for message in messages] == ["10", "30"]
    assert all("First bad parameter: w " in message for message in messages)
