"""What ``exact_norms`` costs: a whole guarded AdamW step with exact norms, compared with one without.

The two steps take turns, and the ratio is the median over the rounds. On one device the setting costs reading
the gradients twice, once for the largest element and once for the sums, and about 50 integer operations per
element. The results must agree, and the recorded norm must be the true one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch

import stablenum_jax
import stablenum_torch
from benchmarks.jax_step import Compiled, make_gradients
from benchmarks.steps.errors import BenchmarkError
from benchmarks.timing import interleaved

__all__ = ["run"]

SIZES = {"1 M in 12 tensors": [(290, 290)] * 12, "19 M in 12 tensors": [(1260, 1260)] * 12}
ROUNDS, LR = 25, 1e-4


def run(rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """For each framework and size: the milliseconds of each step, and their ratio."""
    return {
        framework: {size: measure(shapes, rounds) for size, shapes in SIZES.items()}
        for framework, measure in MEASURE.items()
    }


def _jax(shapes: list[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    grads = make_gradients(shapes)
    variants = {name: _compiled(grads, shapes, exact_norms=name == "exact") for name in ("plain", "exact")}
    times = interleaved(variants, rounds=rounds)
    true = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in grads.values()))
    for name, variant in variants.items():
        found = stablenum_jax.metrics(variant.state)["grad_norm"]
        if abs(found / true - 1) > (2.0**-23 if name == "exact" else 1e-4):
            raise BenchmarkError(f"{name}: the norm was {found}; it should be {true}")
    return {
        "times": {name: one.as_dict() for name, one in times.items()},
        "ratio": round(times["exact"].median_ratio_to(times["plain"]), 3),
        "extra ns per element": round(
            times["exact"].median_above(times["plain"]) * 1e6 / sum(np.prod(s) for s in shapes), 2
        ),
        "temp_bytes": {name: variant.temp_bytes for name, variant in variants.items()},
    }


def _compiled(grads: Any, shapes: list[tuple[int, ...]], *, exact_norms: bool) -> Compiled:
    tx = optax.chain(stablenum_jax.guard(clip=1.0, exact_norms=exact_norms), optax.adamw(LR))
    loss = jnp.asarray(2.0)

    def step(params: Any, state: Any, grads: Any) -> Any:
        return stablenum_jax.step(tx, params, state, grads, value=loss)

    return Compiled(tx, step, grads, shapes)


def _torch(shapes: list[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator) for shape in shapes]
    guards = {name: _guarded(grads, exact_norms=name == "exact") for name in ("plain", "exact")}
    times = interleaved({name: opt.step for name, opt in guards.items()}, rounds=rounds)
    true = float(torch.stack([g.double().square().sum() for g in grads]).sum().sqrt())
    for name, opt in guards.items():
        found = opt.last["grad_norm"]
        if abs(found / true - 1) > (2.0**-23 if name == "exact" else 1e-4):
            raise BenchmarkError(f"{name}: the norm was {found}; it should be {true}")
    return {
        "times": {name: one.as_dict() for name, one in times.items()},
        "ratio": round(times["exact"].median_ratio_to(times["plain"]), 3),
        "extra ns per element": round(
            times["exact"].median_above(times["plain"]) * 1e6 / sum(np.prod(s) for s in shapes), 2
        ),
    }


def _guarded(grads: list[torch.Tensor], *, exact_norms: bool) -> stablenum_torch.GuardedOptimizer:
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    inner = torch.optim.AdamW(params, lr=LR, fused=True)
    opt = stablenum_torch.wrap(inner, exact_norms=exact_norms)  # a clip would change the gradients
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    return opt


MEASURE: Mapping[str, Callable[[list[tuple[int, ...]], int], dict[str, Any]]] = MappingProxyType(
    {"PyTorch, adamw fused": _torch, "JAX, step, adamw": _jax}
)
