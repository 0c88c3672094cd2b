"""The data of every loop, and the values that make one batch bad.

The model that each framework builds: ``h = BatchNorm(Dense(x))``, ``u = Dense(z)`` without a bias,
``u / rms(u)`` without an epsilon, and ``prediction = Dense(relu(h) + u / rms(u))``; the loss is the mean
squared error, in float32. With ``FP16_OVERFLOW`` the three dense layers compute in float16.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks.partners.outcome import Fault
from stablenum import DynamicLossScale, GuardConfig, SpikeGuard

__all__ = ["BAD", "FEATURES", "HIDDEN", "ROWS", "SAVED_AFTER", "STEPS", "Batch", "batches", "guard_config"]

Array: TypeAlias = np.ndarray[Any, Any]

STEPS, BAD, SAVED_AFTER = 12, 5, 8  # steps and batches are counted from 0
ROWS, FEATURES, HIDDEN = 16, 4, 8


class Batch(NamedTuple):
    """x, z: (16, 4) float32; y: (16, 1) float32."""

    x: Array
    z: Array
    y: Array


def batches(fault: Fault | None) -> list[Batch]:
    """Return the batches of a run: 12, of which number 5 is bad if there is a fault."""
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((2 * FEATURES, 1))
    made = []
    for _ in range(STEPS):
        x, z = rng.standard_normal((2, ROWS, FEATURES))
        y = np.tanh(np.concatenate([x, z], 1) @ mix)
        made.append(Batch(*(part.astype(np.float32) for part in (x, z, y))))
    if fault is not None:
        made[BAD] = _spoiled(made[BAD], fault)
    return made


def _spoiled(batch: Batch, fault: Fault) -> Batch:
    x, z, y = (part.copy() for part in batch)
    if fault is Fault.NAN_BATCH:
        x[0, 0] = np.nan
    elif fault is Fault.INF_GRADIENT:
        z[0] *= 1e-18  # u / rms(u) and the loss stay ordinary; the derivative of 1 / sqrt(u^2) is about 1e54
    elif fault is Fault.LOSS_SPIKE:
        y *= 1e4
    elif fault is Fault.FP16_OVERFLOW:
        x[0] *= 1e6  # beyond 65504
    else:
        x[0] *= 1e25  # finite, but the variance of the batch is not
    return Batch(x, z, y)


def guard_config(fault: Fault | None) -> GuardConfig:
    """Return the guard's settings: skips spikes too, and scales the loss in float16.

    A spike rule usually wants 64 steps before it judges; these runs have 12.
    """
    scale = DynamicLossScale(init_scale=1024.0) if fault is Fault.FP16_OVERFLOW else None
    return GuardConfig(spike=SpikeGuard(min_samples=4, threshold=50.0), loss_scale=scale)
