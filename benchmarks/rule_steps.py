"""A whole guarded AdamW step with each rule, in PyTorch and JAX on a CPU, compared with the bare step.

This includes the cost of what a rule needs besides the norms: AdaptiveGradClip reads the weights and
multiplies each unit, rules with one factor per tensor multiply the gradients (torch's fused kernels take a
single factor), ClipUpdateRMS reads the update, and two loss-scale rules read elements. A rule that clips is
timed twice: with thresholds that clip no step and with thresholds that clip every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch

import stablenum_jax
import stablenum_torch
from benchmarks.jax_step import Compiled, make_gradients, optax_step
from benchmarks.timing import interleaved
from benchmarks.torch_step import Variant
from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipUpdateRMS,
    GuardConfig,
    LogMaxLossScale,
    SpikeGuard,
    UnderflowAwareLossScale,
    ZClip,
)

__all__ = ["run"]

# The warm-up steps of rules that have a warm-up, which is over when the timing begins.
WARM = 4
PASSING = {
    "no rule": GuardConfig(),
    "ClipByGlobalNorm": GuardConfig(clip=ClipByGlobalNorm(1e3)),
    "ClipByNorm": GuardConfig(clip=ClipByNorm(1e3)),
    "AdaptiveGradClip": GuardConfig(clip=AdaptiveGradClip(clipping=10.0)),
    "AutoClip": GuardConfig(clip=AutoClip(quantile=0.9)),
    "ZClip": GuardConfig(clip=ZClip(max_norm=None, warmup_steps=WARM)),
    "AdaGC": GuardConfig(clip=AdaGC(max_norm=1e3, warmup_steps=WARM)),
    "ClipUpdateRMS": GuardConfig(clip=ClipUpdateRMS(1e3)),
    "SpikeGuard": GuardConfig(spike=SpikeGuard()),
    # The scale is fixed at 1, because gradients are scaled in the backward pass, which is not timed here.
    "LogMaxLossScale": GuardConfig(loss_scale=LogMaxLossScale(init_scale=1.0, max_scale=1.0)),
    "UnderflowAwareLossScale": GuardConfig(loss_scale=UnderflowAwareLossScale(init_scale=1.0, max_scale=1.0)),
}
CLIPPING = {
    "ClipByGlobalNorm, clipping": GuardConfig(clip=ClipByGlobalNorm(1e-3)),
    "ClipByNorm, clipping": GuardConfig(clip=ClipByNorm(1e-3)),
    "AdaptiveGradClip, clipping": GuardConfig(clip=AdaptiveGradClip(clipping=1e-4)),
    "AdaGC, clipping": GuardConfig(clip=AdaGC(max_norm=1e3, warmup_steps=WARM, clip_ratio=0.5)),
    "ClipUpdateRMS, clipping": GuardConfig(clip=ClipUpdateRMS(1e-3)),
}
CONFIGS = PASSING | CLIPPING
SHAPES = [(175, 1000)] * 108
SIZE = "19 M in 108 tensors"
LR = 1e-4
WARMUP = WARM + 4  # steps that are not timed


def run(rounds: int = 15) -> dict[str, dict[str, Any]]:
    """For each framework, the size, the milliseconds of each variant, and their ratio to the bare step."""
    return {"PyTorch, fused AdamW": _torch(rounds), "JAX, step, adamw": _jax(rounds)}


def _report(times: dict[str, Any], temp: dict[str, int] | None = None) -> dict[str, Any]:
    bare = times["bare"].median
    return {
        "size": SIZE,
        "times": {name: t.as_dict() for name, t in times.items()},
        "ratio to bare": {name: round(t.median / bare, 3) for name, t in times.items()},
    } | ({} if temp is None else {"temp_bytes": temp})


def _check(name: str, last: dict[str, Any]) -> None:
    """Check that the step was applied, and clipped if and only if the row's name says so."""
    if not last["applied"]:
        raise RuntimeError(f"{name}: the step was skipped ({last['reason'].name})")
    clipped = last["clip_coefficient"] < 1 - 1e-5  # AutoClip at equal norms: n / (n + 1e-6)
    if name.startswith("ClipUpdateRMS"):  # acts after the decision
        clipped = name in CLIPPING
    if clipped != (name in CLIPPING):
        raise RuntimeError(f"{name}: the clip coefficient was {last['clip_coefficient']}")


def _torch(rounds: int) -> dict[str, Any]:
    bare = Variant(SHAPES, lr=LR)
    variants = {name: Variant(SHAPES, lr=LR) for name in CONFIGS}
    steps = {
        name: stablenum_torch.wrap(variant.optimizer, CONFIGS[name]) for name, variant in variants.items()
    }
    loss = torch.tensor(2.0)

    def prepare(name: str) -> None:
        """Restore only the next variant's gradients, because restoring all of them would take too long."""
        if name == "bare":
            bare.put_gradients(1.0)
        else:
            variants[name].put_gradients(1.0)
            steps[name].scale(loss)  # records the loss; the gradients are written directly

    timed = {"bare": bare.optimizer.step} | {name: step.step for name, step in steps.items()}
    times = interleaved(timed, rounds=rounds, warmup=WARMUP, prepare=prepare)
    for name, step in steps.items():
        _check(name, step.last)
        if name in PASSING:
            for ours, theirs in zip(variants[name].params, bare.params, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    return _report(times)


def _jax_step(tx: optax.GradientTransformation) -> Callable[..., Any]:
    loss = jnp.asarray(2.0)

    def step(params: Any, state: Any, grads: Any) -> Any:
        return stablenum_jax.step(tx, params, state, grads, value=loss)

    return step


def _jax(rounds: int) -> dict[str, Any]:
    grads, adamw = make_gradients(SHAPES), optax.inject_hyperparams(optax.adamw)(LR)
    variants = {"bare": Compiled(adamw, optax_step(adamw), grads, SHAPES)}
    for name, config in CONFIGS.items():
        tx = optax.chain(stablenum_jax.guard(config=config), adamw)

        variants[name] = Compiled(tx, _jax_step(tx), grads, SHAPES)
    times = interleaved(variants, rounds=rounds, warmup=WARMUP)
    for name in CONFIGS:
        _check(name, stablenum_jax.metrics(variants[name].state))
        if name in PASSING:
            for key, value in variants[name].params.items():
                np.testing.assert_allclose(value, variants["bare"].params[key], rtol=1e-4, atol=1e-6)
    return _report(times, {name: variant.temp_bytes for name, variant in variants.items()})
