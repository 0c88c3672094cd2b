"""jit, scan, vmap and lowering; what a compiled step costs in memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax
from tests.jax.helpers import assert_same_bits, make_grads, make_params, spoil
from tests.selection import REPEATS


def _optimizer() -> Any:
    return optax.chain(stablenum_jax.guard(clip=1.0, loss_scale="dynamic"), optax.adamw(1e-2))


def test_the_step_runs_inside_a_scan() -> None:
    tx, params = _optimizer(), make_params()
    grads = [make_grads(0), spoil(make_grads(1)), make_grads(2), spoil(make_grads(3), np.inf), make_grads(4)]
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    step = functools.partial(stablenum_jax.step, tx)

    @jax.jit
    def scan(params: Any, opt_state: Any) -> Any:
        carry, _ = jax.lax.scan(lambda c, g: (step(*c, g), None), (params, opt_state), stacked)
        return carry

    scanned = scan(params, tx.init(params))
    looped = params, tx.init(params)
    for g in grads:
        looped = jax.jit(step)(*looped, g)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), scanned, looped)
    assert stablenum_jax.metrics(scanned[1])["skipped_total"] == 2


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("grad_dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_structure_dtypes_and_weak_types_are_fixed(dtype: Any, grad_dtype: Any) -> None:
    tx, params, grads = _optimizer(), make_params(dtype), make_grads(0, make_params(grad_dtype))
    opt_state = tx.init(params)
    after = jax.eval_shape(functools.partial(stablenum_jax.step, tx), params, opt_state, grads)
    seen = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)  # noqa: E731
    assert seen(after) == seen((params, opt_state))


def test_weakly_typed_parameters_can_be_scanned() -> None:
    tx = _optimizer()
    carry, _ = jax.lax.scan(
        lambda c, g: (stablenum_jax.step(tx, *c, g), None), (1.0, tx.init(1.0)), jnp.asarray([1.0, jnp.nan])
    )
    assert np.isfinite(carry[0])


def test_a_second_eager_step_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tx, params = _optimizer(), make_params()
    opt_state = tx.init(params)
    for seed in range(2):
        grads = make_grads(seed)
        caplog.clear()
        with jax.log_compiles():
            params, opt_state = stablenum_jax.step(tx, params, opt_state, grads)
        compiled = [record for record in caplog.records if "Compiling" in record.getMessage()]
        assert bool(compiled) == (seed == 0)


def test_without_jit_at_all() -> None:
    tx, params = _optimizer(), make_params()
    with jax.disable_jit():
        after, opt_state = stablenum_jax.step(tx, params, tx.init(params), spoil(make_grads(0)))
        assert_same_bits(after, params)
        after, opt_state = stablenum_jax.step(tx, params, opt_state, make_grads(0))
    assert (after["out"] != params["out"]).any()
    assert stablenum_jax.metrics(opt_state)["skipped_total"] == 1


def test_no_tracer_leaks() -> None:
    tx, params = optax.MultiSteps(_optimizer(), 2).gradient_transformation(), make_params()
    with jax.checking_leaks():
        _, opt_state = jax.jit(functools.partial(stablenum_jax.step, tx))(
            params, tx.init(params), make_grads(0)
        )
    assert stablenum_jax.guard_state(opt_state).step == 0


@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm"])
@pytest.mark.parametrize("form", ["step", "chain", "MultiSteps"])
def test_lowers_for_accelerators_without_a_host_callback(platform: str, form: str) -> None:
    tx, params, grads = _optimizer(), make_params(jnp.bfloat16), make_grads(0, make_params(jnp.bfloat16))
    if form == "MultiSteps":
        tx = optax.MultiSteps(tx, 4).gradient_transformation()
    step = functools.partial(stablenum_jax.step, tx)
    if form == "chain":
        tx = stablenum_jax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-2))
        step = lambda params, state, grads: tx.update(grads, state, params)  # noqa: E731
    traced = jax.jit(step).trace(params, tx.init(params), grads)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.case" in text or "stablehlo.if" in text
    assert "callback" not in text
    assert "infeed" not in text


def _bare_step(tx: Any, params: Any, opt_state: Any, grads: Any) -> Any:
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _temp_bytes(step: Any, tx: Any, size: int = 256, n: int = 4) -> int:
    params = {f"w{i}": jnp.ones((size, size)) for i in range(n)}
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), params).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip": 1.0},
        {"clip": 1.0, "loss_scale": "dynamic", "max_skips_in_a_row": 9},
        {"clip": [stablenum.ClipByNorm(1.0), stablenum.ClipByValue(0.1)]},
        pytest.param(
            {"clip": [stablenum.AdaGC(), stablenum.AutoClip(), stablenum.ZClip()], "spike": "skip"},
            marks=REPEATS,
        ),
        {"clip": stablenum.AdaptiveGradClip()},
        pytest.param({"loss_scale": stablenum.LogMaxLossScale()}, marks=REPEATS),
        {"loss_scale": stablenum.UnderflowAwareLossScale()},
    ],
    ids=["default", "clip", "clip and scale", "per tensor and value", "statistics", "units", "amax", "tiny"],
)
@pytest.mark.parametrize(
    "optimizer", [optax.adamw, functools.partial(optax.sgd, momentum=0.9)], ids=["adamw", "momentum"]
)
def test_a_guarded_step_needs_no_more_temporary_memory(settings: Any, optimizer: Any) -> None:
    """Except for scalars per tensor and unit, all buffers are reused, as in the bare step."""
    bare_tx = optimizer(1e-3)
    bare = _temp_bytes(functools.partial(_bare_step, bare_tx), bare_tx)
    tx = optax.chain(stablenum_jax.guard(**settings), optimizer(1e-3))
    guarded = _temp_bytes(functools.partial(stablenum_jax.step, tx), tx)
    one_tensor, units = 256 * 256 * 4, 4 * 256
    assert bare < one_tensor
    assert guarded - bare < 10 * 4 * units < one_tensor


def test_clipping_the_update_keeps_one_copy_of_it() -> None:
    tx = optax.chain(stablenum_jax.guard(clip=stablenum.ClipUpdateRMS(1.0, per_lr=False)), optax.adamw(1e-3))
    one_tensor = 256 * 256 * 4
    assert _temp_bytes(functools.partial(stablenum_jax.step, tx), tx) < 4.5 * one_tensor


def test_the_memory_test_can_fail() -> None:
    """optax's own clip keeps a whole copy of the updates."""
    peer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    assert _temp_bytes(functools.partial(_bare_step, peer), peer) >= 4 * 256 * 256 * 4
