"""Checked by mypy, not run: the settings and the results of the public functions are typed.

Each ``type: ignore`` marks a wrong use that must be an error; mypy reports one that is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, assert_type

import optax
import torch

import stablenum
import stablenum_jax
import stablenum_torch


def settings(optimizer: torch.optim.Optimizer) -> None:
    stablenum_torch.wrap(optimizer, clip=1.0, loss_scale="dynamic", spike="skip", max_skips_in_a_row=3)
    stablenum_torch.wrap(optimizer, clip=(stablenum.AdaGC(), 1.0), loss_scale=stablenum.LogMaxLossScale())
    stablenum_torch.wrap(optimizer, loss_scale=stablenum_jax.policy.StaticLossScale(8.0))
    stablenum_jax.guard(clip=stablenum.ZClip(), on_nonfinite="raise", escalate=stablenum.EscalatePrecision())

    stablenum_torch.wrap(optimizer, log="run.jsonl", check_replicas_every=100)
    stablenum_jax.RunLog(Path("run.jsonl"))

    stablenum_torch.wrap(optimizer, log=1)  # type: ignore[arg-type]
    stablenum_torch.wrap(optimizer, clipp=1.0)  # type: ignore[call-arg]
    stablenum_torch.wrap(optimizer, loss_scale="dynamc")  # type: ignore[arg-type]
    stablenum_jax.guard(check_replicas_every=100)  # type: ignore[call-arg]
    stablenum_jax.guard(max_skips=3)  # type: ignore[call-arg]
    stablenum_jax.guard(on_nonfinite="stop")  # type: ignore[arg-type]


def results(optimizer: stablenum_torch.GuardedOptimizer, opt_state: object) -> None:
    assert_type(optimizer.last["skipped_total"], int)
    assert_type(stablenum_jax.metrics(opt_state)["reason"], stablenum.Reason)
    assert_type(optimizer.history()[-1]["grad_norm"], float)
    assert_type(stablenum_jax.history(opt_state)[-1]["applied"], bool)
    optimizer.last["skiped_total"]  # type: ignore[typeddict-item]


class Weights(NamedTuple):
    w: float


class State(NamedTuple):
    steps_taken: int


def loss_of(weights: Weights, batch: list[float], *, scale: float = 1.0) -> float:
    return weights.w * batch[0] * scale


def steps(weights: Weights, state: State, batch: list[float]) -> None:
    gradients_of = stablenum_jax.value_and_grad(loss_of, state)
    assert_type(gradients_of(weights, batch, scale=2.0), tuple[float, Any])
    gradients_of(weights)  # type: ignore[call-arg]
    gradients_of(weights, "batch")  # type: ignore[arg-type]
    gradients_of(weights, batch, scal=2.0)  # type: ignore[call-arg]

    _, grads = gradients_of(weights, batch)
    assert_type(stablenum_jax.step(optax.sgd(0.1), weights, state, grads), tuple[Weights, State])
