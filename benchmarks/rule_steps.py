"""A whole guarded AdamW step with each rule, PyTorch and JAX on a CPU, against the bare step.

What a rule needs besides the norms shows here: AdaptiveGradClip reads the weights and multiplies by unit,
rules with a factor a tensor multiply the gradients (torch's fused kernels take one factor for all),
ClipUpdateRMS looks at the update, two loss-scale rules look at elements.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
import torch

import stablenum_jax
import stablenum_torch
from benchmarks.jax_step import Compiled, guarded_step, make_gradients, optax_step
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

# The thresholds let most steps pass, as in a training that goes well: what is timed is the watching.
CONFIGS = {
    "no rule": GuardConfig(),
    "ClipByGlobalNorm": GuardConfig(clip=ClipByGlobalNorm(1e3)),
    "ClipByNorm": GuardConfig(clip=ClipByNorm(1e3)),
    "AdaptiveGradClip": GuardConfig(clip=AdaptiveGradClip(clipping=10.0)),
    "AutoClip": GuardConfig(clip=AutoClip(quantile=0.9)),
    "ZClip": GuardConfig(clip=ZClip(max_norm=None)),
    "AdaGC": GuardConfig(clip=AdaGC(max_norm=1e3)),
    "ClipUpdateRMS": GuardConfig(clip=ClipUpdateRMS(1.0)),
    "SpikeGuard": GuardConfig(spike=SpikeGuard()),
    "LogMaxLossScale": GuardConfig(loss_scale=LogMaxLossScale()),
    "UnderflowAwareLossScale": GuardConfig(loss_scale=UnderflowAwareLossScale()),
}
SHAPES = [(175, 1000)] * 108
SIZE = "19 M in 108 tensors"
LR = 1e-4


def run(rounds: int = 15) -> dict[str, dict[str, Any]]:
    """Framework -> size, milliseconds of each variant, and its ratio to the bare step."""
    return {"PyTorch, fused AdamW": _torch(rounds), "JAX, step, adamw": _jax(rounds)}


def _report(times: dict[str, Any], temp: dict[str, int] | None = None) -> dict[str, Any]:
    bare = times["bare"].median
    return {
        "size": SIZE,
        "times": {name: t.as_dict() for name, t in times.items()},
        "ratio to bare": {name: round(t.median / bare, 3) for name, t in times.items()},
    } | ({} if temp is None else {"temp_bytes": temp})


def _torch(rounds: int) -> dict[str, Any]:
    bare = Variant(SHAPES, lr=LR)
    variants = {name: Variant(SHAPES, lr=LR) for name in CONFIGS}
    steps = {
        name: stablenum_torch.wrap(variant.optimizer, CONFIGS[name]) for name, variant in variants.items()
    }

    def prepare() -> None:
        bare.put_gradients(1.0)
        for name, variant in variants.items():
            variant.put_gradients(steps[name].loss_scale)

    timed = {"bare": bare.optimizer.step} | {name: step.step for name, step in steps.items()}
    times = interleaved(timed, rounds=rounds, prepare=prepare)
    for name, step in steps.items():
        assert step.last["applied"], name
        if name != "ClipUpdateRMS":  # nothing was clipped, so all go the bare optimizer's way
            for ours, theirs in zip(variants[name].params, bare.params, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    return _report(times)


def _jax(rounds: int) -> dict[str, Any]:
    grads = make_gradients(SHAPES)
    adamw = optax.inject_hyperparams(optax.adamw)(LR)
    variants = {"bare": Compiled(adamw, optax_step(adamw), grads, SHAPES)}
    for name, config in CONFIGS.items():
        tx = optax.chain(stablenum_jax.guard(config=config), adamw)
        scale = stablenum_jax.loss_scale(tx.init({"w": jax.numpy.zeros(1)}))
        scaled = {key: g * scale for key, g in grads.items()}
        variants[name] = Compiled(tx, guarded_step(tx), scaled, SHAPES)
    times = interleaved(variants, rounds=rounds)
    for name in CONFIGS:
        assert stablenum_jax.metrics(variants[name].state)["applied"], name
    return _report(times, {name: variant.temp_bytes for name, variant in variants.items()})
