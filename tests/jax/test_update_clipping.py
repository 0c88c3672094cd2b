"""Clipping the optimizer's update by its RMS."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stablenum
import stablenum_jax as sj
from stablenum_jax._step.clip_update import clip_updates, injected_learning_rate
from tests.jax.helpers import (
    assert_same_bits,
    every_mode,
    make_grads,
    make_params,
    run_on_four_devices,
    spoil,
    without_guard,
)
from tests.jax.rules import injected
from tests.selection import REPEATS, only

RULE = stablenum.ClipUpdateRMS(0.5, per_lr=False)
PER_LR = stablenum.ClipUpdateRMS(0.5)


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_the_update_is_limited_to_max_rms_learning_rates(stepper: Any) -> None:
    tx, params = optax.chain(sj.guard(clip=PER_LR), injected(optax.adam, 1e-2)), make_params()
    after, _ = stepper(tx)(params, tx.init(params), make_grads(0))
    for path in (("dense", "w"), ("out",)):
        a, b = (functools.reduce(lambda t, k: t[k], path, tree) for tree in (after, params))
        assert _rms(a - b) == pytest.approx(0.5e-2, rel=1e-4)  # Adam's first update is one learning rate


def test_the_learning_rate_is_the_current_steps(stepper: Any) -> None:
    """It is read from the new state: with a schedule, the old one still holds the previous step's rate."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda count: 0.1 * 0.5**count)
    tx = optax.chain(sj.guard(clip=PER_LR), optimizer)
    params, grads = {"w": jnp.zeros(4)}, {"w": jnp.full(4, 3.0)}
    opt_state = tx.init(params)
    for i in range(3):
        after, opt_state = stepper(tx)(params, opt_state, grads)
        assert _rms(after["w"] - params["w"]) == pytest.approx(0.5 * 0.1 * 0.5**i, rel=1e-5)


@pytest.mark.parametrize("form", ["chain", "guard(inner)"])
def test_where_nothing_is_clipped_nothing_changes(form: str, mode: str) -> None:
    """Updates and state are the same bit for bit."""
    ends = []
    for clip in (None, stablenum.ClipUpdateRMS(100.0)):
        guard = functools.partial(sj.guard, clip=clip)
        optimizer = injected(optax.adamw)
        tx = guard(optimizer) if form == "guard(inner)" else sj.chain(guard(), optimizer)
        update, params = (tx.update if mode == "eager" else jax.jit(tx.update)), make_params()
        opt_state = tx.init(params)
        for seed in range(4):
            updates, opt_state = update(make_grads(seed), opt_state, params)
        ends.append((updates, opt_state[1]))
    assert_same_bits(*ends)


@pytest.mark.parametrize(
    "optimizer", [pytest.param(optax.adamw(1e-2), marks=REPEATS), optax.sgd(0.1, momentum=0.9)]
)
def test_where_nothing_is_clipped_a_step_is_the_same(optimizer: Any) -> None:
    """Run op by op, the step is the same bit for bit.

    When the step is compiled, XLA may or may not round the product before the sum.
    """
    for jitted in (False, True):
        ends = []
        for clip in (None, stablenum.ClipUpdateRMS(100.0, per_lr=False)):
            tx, params = optax.chain(sj.guard(clip=clip), optimizer), make_params()
            step, opt_state = functools.partial(sj.step, tx), tx.init(params)
            step = jax.jit(step) if jitted else step
            with contextlib.nullcontext() if jitted else jax.disable_jit():
                for seed in range(2):
                    params, opt_state = step(params, opt_state, make_grads(seed))
            ends.append((params, opt_state[1]))
        if jitted:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), *ends)
        else:
            assert_same_bits(*ends)


@pytest.mark.parametrize("size", [5e37, 1e30, 1e19, 1.0, 1e-30, 0.0, np.inf, np.nan])
def test_updates_of_any_size(size: float) -> None:
    updates = {"w": jnp.asarray([3.0, -4.0]) * size, "n": jnp.arange(2), "empty": jnp.zeros((0, 2))}
    after = clip_updates(RULE, updates, ())
    factor = min(1.0, 0.5 / (12.5**0.5 * size)) if np.isfinite(size) and size > 0 else 1.0
    np.testing.assert_allclose(after["w"], np.asarray(updates["w"], float) * factor, rtol=1e-6)
    assert_same_bits(after["n"], updates["n"])
    assert after["empty"].shape == (0, 2)


def test_updates_of_other_dtypes() -> None:
    for dtype in (jnp.float16, jnp.bfloat16, jnp.complex64):
        after = clip_updates(RULE, {"w": jnp.asarray([30.0, 40.0], dtype)}, ())["w"]
        assert after.dtype == dtype
        np.testing.assert_allclose(abs(after.astype(jnp.complex64)), [0.424264, 0.565685], rtol=1e-2)
    with jax.enable_x64(True):
        after = clip_updates(RULE, {"w": jnp.asarray([1e30, 1e30]), "x": jnp.full(2, 1e-200)}, ())
        np.testing.assert_allclose(after["w"], [0.5, 0.5], rtol=1e-6)
        np.testing.assert_array_equal(after["x"], [1e-200, 1e-200])


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(3e38, "float32"), (3e38, "bfloat16"), (1e39, "float64"), (1e200, "float64"), (1e307, "float64")],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_the_largest_updates_are_neither_zeroed_nor_too_long(size: float, dtype: str, jitted: bool) -> None:
    with jax.enable_x64(dtype == "float64"):
        updates = {"w": jnp.full(100, size, dtype), "x": jnp.full(3, 3.0)}

        def change(updates: Any) -> Any:
            return clip_updates(RULE, updates, ())

        after = jax.jit(change)(updates) if jitted else change(updates)
        assert after["w"].dtype == dtype
        np.testing.assert_allclose(after["w"].astype(float), np.full(100, 0.5), rtol=1e-2)
        np.testing.assert_allclose(after["x"], np.full(3, 0.5), rtol=1e-6)


def test_no_updates_at_all() -> None:
    assert clip_updates(RULE, {"n": jnp.arange(2), "none": None}, ())["none"] is None


def test_the_rate_is_found_in_both_forms_of_optaxs_state_and_in_wrapped_variables() -> None:
    params, counter = {"w": jnp.zeros(2)}, jnp.zeros((), jnp.int32)
    new = injected(optax.adam, 0.25).init(params)
    old = optax.InjectHyperparamsState(counter, {"learning_rate": jnp.float32(0.25)}, ())
    nested = optax.InjectHyperparamsState(counter, {"b1": jnp.float32(0.9)}, (old,))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    wrapped = nnx.Optimizer(model, injected(optax.adam, 0.25), wrt=nnx.Param).opt_state
    for state in (new, old, nested, (optax.EmptyState(), old), wrapped):
        rate = injected_learning_rate(state)
        assert (rate, rate.dtype, rate.shape) == (0.25, jnp.float32, ())


@pytest.mark.parametrize(("size", "n"), [(1e37, 10_000), (3e37, 5_000), (1e19, 1), (1e-12, 7)])
def test_an_update_of_any_size_is_limited_to_its_root_mean_square(size: float, n: int) -> None:
    """The sum of squares of 10,000 elements of 1e37 overflows even after a shift by 2**64."""
    (clipped,) = jax.tree.leaves(clip_updates(RULE, {"w": jnp.full(n, size, jnp.float32)}, ()))
    limit = RULE.max_rms
    # XLA's float32 sum of equal squares is off by up to 1e-4 here.
    np.testing.assert_allclose(clipped, np.full(n, min(size, limit), np.float32), rtol=1e-3)


@pytest.mark.parametrize("size", [3e38, 1e30, 1.0, 1e-30, 0.0, np.inf, np.nan])
def test_over_a_mesh_axis_the_factor_is_that_of_the_whole_tensor(size: float) -> None:
    whole = jnp.asarray([[3.0, -4.0, 0.5], [0.0, 0.1, size]])
    expected = clip_updates(RULE, {"w": whole}, ())["w"]
    clip = functools.partial(clip_updates, RULE, opt_state=(), axis_name="i")
    after = jax.jit(jax.vmap(lambda shard: clip({"w": shard})["w"], axis_name="i"))(whole)
    np.testing.assert_allclose(after, expected, rtol=1e-6)
    two_axes = jax.vmap(
        jax.vmap(lambda x: clip({"w": x}, axis_name=("i", "j"))["w"], axis_name="j"), axis_name="i"
    )
    np.testing.assert_allclose(jax.jit(two_axes)(whole), expected, rtol=1e-6)


SHARDED = """
import functools
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, PartitionSpec as P
import stablenum, stablenum_jax as sj

mesh = Mesh(np.array(jax.devices()), ("x",))
assert len(jax.devices()) == 4
params = {"a": jnp.zeros((4, 2)), "w": jnp.zeros(8)}
grads = {"a": jnp.full((4, 2), 0.1), "w": jnp.asarray([10.0, 10.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])}
rms = np.sqrt(25.0075)
for form in ("step", "guard(inner)"):
    for per_lr in (False, True):
        rule = stablenum.ClipUpdateRMS(1.0, per_lr=per_lr)
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        wrapped = form == "guard(inner)"
        guard = functools.partial(sj.guard, axis_name="x", clip=rule)
        tx = guard(optimizer) if wrapped else optax.chain(guard(), optimizer)

        def run(params, state, grads):
            if not wrapped:
                return sj.step(tx, params, state, grads)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        sharded = jax.jit(jax.shard_map(
            run, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=(P("x"), P())
        ))
        after, state = sharded(params, tx.init(params), grads)
        limit = 0.5 if per_lr else 1.0  # the update's RMS is 0.5 rms, above both
        expected = -np.asarray(grads["w"]) / rms * limit
        np.testing.assert_allclose(after["w"], expected, rtol=1e-6)
        np.testing.assert_allclose(after["a"], -0.5 * grads["a"], rtol=1e-6)
        bad = {**grads, "w": grads["w"].at[5].set(jnp.nan)}
        again, state = sharded(after, state, bad)
        assert all((again[k] == after[k]).all() for k in params)
        assert sj.metrics(state)["skipped_total"] == 1
"""


@pytest.mark.slow(reason="starts a process with four devices; a mesh axis is tested above")
def test_sharding_over_four_devices_does_not_change_how_the_update_is_clipped() -> None:
    code = "os.environ['JAX_PLATFORMS'] = 'cpu'\n" + SHARDED
    run_on_four_devices(code)


@every_mode
@pytest.mark.parametrize("case", ["none", "two"])
def test_without_exactly_one_rate_the_error_names_both_remedies(case: str, mode: str) -> None:
    optimizer = {
        "none": optax.adam(1e-3),
        "two": optax.partition(
            {"a": injected(optax.adam), "b": injected(optax.sgd)},
            lambda tree: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", tree),
        ),
    }[case]
    params, grads = make_params(), make_grads(0)
    for form in ("step", "guard(inner)"):
        if form == "step":
            tx = optax.chain(sj.guard(clip=PER_LR), optimizer)
            call = functools.partial(sj.step, tx, params, tx.init(params))
        else:
            tx = sj.guard(optimizer, clip=PER_LR)
            call = functools.partial(tx.update, state=tx.init(params), params=params)
        message = r"got 0 of them.*inject_hyperparams.*per_lr=False" if case == "none" else "got 2 of them"
        with pytest.raises(ValueError, match=message):
            (call if mode == "eager" else jax.jit(call))(grads)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", tree)


def _partition(learning_rate: Any) -> Any:
    return optax.partition({"a": optax.sgd(learning_rate), "b": optax.adam(learning_rate / 10)}, _labels)


PARTIAL = {
    "partition": lambda: optax.chain(
        sj.guard(clip=PER_LR), optax.partition({"a": injected(optax.adam), "b": optax.sgd(10.0)}, _labels)
    ),
    "masked": lambda: optax.chain(
        sj.guard(clip=PER_LR),
        optax.masked(injected(optax.adam), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    ),
    "guard inside masked": lambda: optax.masked(
        optax.chain(sj.guard(clip=PER_LR), injected(optax.adam)), {"dense": True, "out": False}
    ),
    "inside MultiSteps": lambda: optax.MultiSteps(PARTIAL["partition"](), 2).gradient_transformation(),
    "guard(inner)": lambda: sj.guard(
        optax.partition({"a": injected(optax.adam), "b": optax.sgd(10.0)}, _labels), clip=PER_LR
    ),
}


@pytest.mark.parametrize("case", PARTIAL)
def test_a_rate_of_some_parameters_is_not_used_for_all(case: str, stepper: Any) -> None:
    tx, params = PARTIAL[case](), make_params()
    message = r"got one below optax\.partition or optax\.masked.*inject_hyperparams.*per_lr=False"
    with pytest.raises(ValueError, match=message):
        stepper(tx)(params, tx.init(params), make_grads(0))


@pytest.mark.parametrize(
    "way", only(["per_lr=False"], ["inject around partition", "per_lr=False", "a mask beside it"])
)
def test_both_remedies_for_a_rate_of_some_parameters_work(way: str, stepper: Any) -> None:
    optimizer, clip = {
        "inject around partition": (injected(_partition, 0.1), PER_LR),
        "per_lr=False": (_partition(0.1), stablenum.ClipUpdateRMS(0.05, per_lr=False)),
        "a mask beside it": (
            optax.chain(
                optax.masked(optax.add_decayed_weights(0.1), {"dense": True, "out": False}),
                injected(optax.sgd, 0.1),
            ),
            PER_LR,
        ),
    }[way]
    tx, params = optax.chain(sj.guard(clip=clip), optimizer), make_params()
    after, _ = stepper(tx)(params, tx.init(params), make_grads(0, scale=100.0))
    assert _rms(after["dense"]["w"] - params["dense"]["w"]) == pytest.approx(0.05, rel=1e-4)


@every_mode
def test_plain_update_raises_instead_of_silently_doing_nothing(mode: str) -> None:
    tx, params = optax.chain(sj.guard(clip=RULE), optax.sgd(1.0)), make_params()
    update = tx.update if mode == "eager" else jax.jit(tx.update)
    with pytest.raises(ValueError, match=r"ClipUpdateRMS.*plain tx\.update.*stablenum_jax\.step"):
        update(make_grads(0), tx.init(params), params)


@pytest.mark.parametrize("where", only(["inside"], ["inside", "outside", "chain inside"]))
def test_multisteps_updates_are_clipped_once(where: str, stepper: Any) -> None:
    guard = sj.guard(clip=PER_LR)
    optimizer = injected(optax.sgd, 0.1)
    tx = {
        "inside": lambda: optax.MultiSteps(optax.chain(guard, optimizer), 2).gradient_transformation(),
        "chain inside": lambda: optax.MultiSteps(sj.chain(guard, optimizer), 2).gradient_transformation(),
        "outside": lambda: optax.chain(guard, optax.MultiSteps(optimizer, 2).gradient_transformation()),
    }[where]()
    params = make_params()
    opt_state, step = tx.init(params), stepper(tx)
    for seed, bad in ((0, False), (1, True), (2, False)):
        grads = make_grads(seed, scale=10.0)
        before = params, without_guard(opt_state)
        params, opt_state = step(params, opt_state, spoil(grads) if bad else grads)
        if seed < 2:
            np.testing.assert_array_equal(params["out"], make_params()["out"])
        if bad:
            assert_same_bits((params, without_guard(opt_state)), before)
    moved = params["out"] - make_params()["out"]
    assert _rms(moved) == pytest.approx(0.05, rel=1e-4)


def test_chain_inside_multisteps_clips_under_plain_update(mode: str) -> None:
    tx = optax.MultiSteps(sj.guard(injected(optax.sgd, 0.1), clip=PER_LR), 2).gradient_transformation()
    params = make_params()
    update, opt_state = (tx.update if mode == "eager" else jax.jit(tx.update)), tx.init(params)
    with pytest.warns(sj.NotATrueSkipWarning, match="inside optax.MultiSteps"):
        _, opt_state = update(make_grads(0, scale=10.0), opt_state, params)
    updates, opt_state = update(make_grads(1, scale=10.0), opt_state, params)
    assert _rms(updates["out"]) == pytest.approx(0.05, rel=1e-4)
