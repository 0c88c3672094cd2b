"""Every rule through the adapter: against the reference, skipping truly, scanned, vmapped, donated."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stablenum
import stablenum_jax as sj
from stablenum.reference.guarded import SGD, Guarded
from tests.jax.helpers import assert_same_bits, make_grads, make_params, reason, without_guard
from tests.jax.rules import LEARNING_RATE, RULES, injected, start, stream
from tests.selection import only, slow_but_for

STEPS = 150
# Rules whose states together hold every kind of array: tests of the state alone always run on these. All
# rules together compile for seconds; in every run, only the comparison with the reference has them.
HOLD_ALL = ("AutoClip", "AdaGC")
each_state = pytest.mark.parametrize("rule", only(HOLD_ALL, RULES))
# Compared with the reference in every run: "all" has most of the other rules, random streams have the rest.
COMPARED = ("AutoClip", "ZClip", "AdaGC", "UnderflowAwareLossScale", "hysteresis", "all")


@functools.cache
def _reference(rule: str) -> tuple[list[Any], list[dict[str, Any]], dict[str, Any]]:
    """The gradients passed in (times the loss scale), the record of each step, and the final parameters."""
    train = Guarded(start(), SGD(lr=LEARNING_RATE), **RULES[rule])
    handed, seen = [], []
    for grads, loss in stream(STEPS):
        scaled = {name: g * np.float32(train.loss_scale) for name, g in grads.items()}
        handed.append((scaled, np.float32(loss)))
        seen.append(train.step(scaled, loss))
    return handed, seen, dict(train.params)


@functools.cache
def _step(form: str, rule: str) -> tuple[Any, Any]:
    """An optimizer, and ``(params, opt_state, grads, loss) -> (params, opt_state)``."""
    if form == "step":
        tx = optax.chain(sj.guard(**RULES[rule]), injected())
        return tx, lambda p, s, g, loss: sj.step(tx, p, s, g, value=loss)
    tx = sj.guard(injected(), **RULES[rule])

    def step(params: Any, opt_state: Any, grads: Any, loss: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return tx, step


@functools.cache
def _jitted(form: str, rule: str) -> Any:
    """The step, compiled once for all tests."""
    return jax.jit(_step(form, rule)[1])


@pytest.mark.parametrize(
    ("rule", "form"),
    slow_but_for(
        [*((rule, "step") for rule in COMPARED), ("AutoClip", "guard(inner)")],
        itertools.product(RULES, ["step", "guard(inner)"]),
    ),
)
def test_the_rule_decides_as_in_the_reference(rule: str, form: str) -> None:
    handed, expected, end = _reference(rule)
    tx, one, metrics = _step(form, rule)[0], _jitted(form, rule), jax.jit(sj.metrics)
    params = jax.tree.map(jnp.asarray, start())
    opt_state, seen = tx.init(params), []
    for grads, loss in handed:
        params, opt_state = one(params, opt_state, grads, loss)
        seen.append(metrics(opt_state))
    seen = jax.device_get(seen)
    for key in ("reason", "skipped_total", "loss_scale"):
        assert [m[key].item() for m in seen] == [m[key] for m in expected], key
    assert [m["worst"].item() for m in seen] == [m["worst"].index for m in expected]
    for key in ("grad_norm", "clip_coefficient"):
        actual = [m[key].item() for m in seen]
        np.testing.assert_allclose(actual, [m[key] for m in expected], rtol=1e-5, err_msg=key)
    for name, value in end.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("rule", RULES)
def test_the_stream_makes_the_rule_act(rule: str) -> None:
    """If the rule did not act, agreement on the stream would prove nothing."""
    _, seen, end = _reference(rule)
    names = {m["reason"].name for m in seen}
    assert {"NAN_GRADIENT", "INF_GRADIENT"} <= names
    if rule in ("ClipUpdateRMS", "all"):
        train = Guarded(start(), SGD(lr=LEARNING_RATE))
        for grads, loss in stream(STEPS):
            train.step(grads, loss)
        assert any((train.params[name] != end[name]).any() for name in end)  # type: ignore[call-overload]
    elif "SpikeGuard" in rule:
        assert names & {"SPIKE_LOSS", "SPIKE_GRAD_NORM", "SPIKE_CLIPPED"}
    elif "clip" in RULES[rule]:
        assert sum(m["reason"].name == "CLIPPED" for m in seen) > 5
    else:
        assert len({m["loss_scale"] for m in seen}) > 2


def _after(rule: str, optimizer: Any, n: int = 3) -> tuple[Any, Any, Any]:
    """A compiled step, and parameters and state after ``n`` good ones."""
    tx = optax.chain(sj.guard(**_without_patterns(rule)), injected(optimizer))
    step = jax.jit(functools.partial(sj.step, tx))
    params = make_params()
    opt_state = tx.init(params)
    for seed in range(n):
        params, opt_state = step(params, opt_state, make_grads(seed), value=2.0 + 0.01 * seed)
    return step, params, opt_state


def _without_patterns(rule: str) -> dict[str, Any]:
    return (
        {"clip": stablenum.AdaptiveGradClip(exclude="*.w")} if rule.endswith("without some") else RULES[rule]
    )


@pytest.mark.parametrize("rule", only((*HOLD_ALL, "UnderflowAwareLossScale"), RULES))
def test_a_bad_step_changes_neither_parameters_nor_optimizer_nor_statistics(rule: str) -> None:
    step, params, opt_state = _after(rule, optax.adam)
    for bad in ("gradient", "loss"):
        grads, loss = make_grads(7), jnp.asarray(np.nan if bad == "loss" else 2.0)
        if bad == "gradient":
            grads["dense"]["w"] = grads["dense"]["w"].at[0, 0].set(-jnp.inf)
        after, state_after = step(params, opt_state, grads, value=loss)
        assert_same_bits(after, params)
        assert_same_bits(without_guard(state_after), without_guard(opt_state))
        was, now = sj.guard_state(opt_state), sj.guard_state(state_after)
        assert_same_bits((now.clip, now.spike), (was.clip, was.spike))
        assert now.skipped_total == 1


@pytest.mark.parametrize(
    "rule", only(["SpikeGuard skip", "MeanStdSpikeGuard"], ["SpikeGuard skip", "MeanStdSpikeGuard", "all"])
)
def test_a_spike_skips_truly(rule: str) -> None:
    step, params, opt_state = _after(rule, optax.adamw, n=20)
    for signal in ("loss", "grad_norm"):
        scale = float(sj.loss_scale(opt_state)) * (1e6 if signal == "grad_norm" else 1.0)
        loss = jnp.asarray(1e6 if signal == "loss" else 2.0)
        after, state_after = step(params, opt_state, make_grads(7, scale=scale), value=loss)
        assert reason(state_after) == f"SPIKE_{signal.upper()}"
        assert_same_bits(after, params)
        assert_same_bits(without_guard(state_after), without_guard(opt_state))


@each_state
def test_a_scan_equals_the_loop(rule: str) -> None:
    steps = stream(24)
    grads = jax.tree.map(lambda *g: jnp.stack(g), *[g for g, _ in steps])
    losses = jnp.asarray([loss for _, loss in steps])
    tx, step = _step("step", rule)
    params = jax.tree.map(jnp.asarray, start())

    @jax.jit
    def scan(params: Any, opt_state: Any) -> Any:
        body = lambda carry, x: (step(*carry, *x), None)  # noqa: E731
        return jax.lax.scan(body, (params, opt_state), (grads, losses))[0]

    scanned = scan(params, tx.init(params))
    looped, one = (params, tx.init(params)), _jitted("step", rule)
    for g, loss in steps:
        looped = one(*looped, g, jnp.float32(loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), scanned, looped)
    assert sj.metrics(scanned[1])["skipped_total"] >= 2


@pytest.mark.parametrize(
    "rule",
    only(["AdaGC"], ["AdaptiveGradClip", "AdaGC", "LogMaxLossScale", "SpikeGuard skip"]),
)
def test_under_vmap_each_run_has_its_own_statistics(rule: str) -> None:
    tx, step = _step("step", rule)
    one, many = _jitted("step", rule), jax.jit(jax.vmap(step))
    params = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), jax.tree.map(jnp.asarray, start()))
    pick = lambda tree, i: jax.tree.map(lambda x: x[i], tree)  # noqa: E731
    runs = params, jax.vmap(tx.init)(params)
    alone = [(pick(params, i), tx.init(pick(params, i))) for i in range(2)]
    steps = stream(12)
    for (first, loss), (second, _) in zip(steps, steps[::-1], strict=True):
        grads = jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second)
        runs = many(*runs, grads, jnp.full(2, loss))
        alone = [one(*run, pick(grads, i), jnp.float32(loss)) for i, run in enumerate(alone)]
    for i, run in enumerate(alone):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), pick(runs, i), run)


@each_state
def test_all_buffers_can_be_donated(rule: str) -> None:
    tx = optax.chain(sj.guard(**_without_patterns(rule)), injected(optax.adam))
    step = jax.jit(functools.partial(sj.step, tx), donate_argnums=(0, 1))
    params = make_params()
    opt_state = tx.init(params)
    for seed in range(3):
        params, opt_state = step(params, opt_state, make_grads(seed), value=jnp.float32(1.0))
    saved = sj.guard_state_dict(opt_state)
    opt_state = sj.load_guard_state_dict(sj.clear_halt(opt_state), saved)
    assert sj.guard_state_dict(opt_state) == saved
    params, opt_state = step(params, opt_state, make_grads(3), value=jnp.float32(1.0))
    assert [row["step"] for row in sj.history(opt_state)] == [0, 1, 2, 3]


@each_state
def test_lowers_for_accelerators_without_a_host_callback(rule: str) -> None:
    tx, step = _step("step", rule)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), start())
    traced = jax.jit(step).trace(params, tx.init(params), params, jnp.float32(1.0))
    for platform in ("tpu", "cuda", "rocm"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.case" in text or "stablehlo.if" in text
        assert "callback" not in text
        assert "infeed" not in text


class _Model(nnx.Module):
    def __init__(self) -> None:
        self.first, self.last = (nnx.Linear(a, b, rngs=nnx.Rngs(a)) for a, b in ((3, 4), (4, 1)))

    def __call__(self, x: Any) -> Any:
        return self.last(jnp.tanh(self.first(x)))


@pytest.mark.parametrize(
    "rule",
    only(["UnderflowAwareLossScale"], ["all", "UnderflowAwareLossScale", "AdaGC", "SpikeGuard skip"]),
)
def test_an_nnx_optimizer_keeps_the_statistics(rule: str) -> None:
    """nnx wraps each array of the state in a variable, and leaves empty tuples unchanged."""
    model = _Model()
    optimizer = nnx.Optimizer(model, sj.guard(injected(optax.adam), **RULES[rule]), wrt=nnx.Param)

    @nnx.jit
    def train(model: Any, optimizer: Any, x: Any) -> None:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads, value=loss)

    for i in range(4):
        train(model, optimizer, jnp.full((2, 3), np.nan if i == 2 else 1.0 + i))
    plain = sj.guard_state(optimizer)
    assert (plain.step, plain.skipped_total) == (4, 1)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(plain))
    saved = sj.guard_state_dict(optimizer)
    optimizer.opt_state = nnx.data(sj.load_guard_state_dict(sj.clear_halt(optimizer.opt_state), saved))
    assert sj.guard_state_dict(optimizer) == saved
    train(model, optimizer, jnp.ones((2, 3)))
    assert sj.metrics(optimizer)["applied"]
    assert len(sj.history(optimizer)) == 5
