"""The two big losses, forward and backward, compared with the framework's own: CPU time and peak memory.

The losses are the cross-entropy of (8192, 32000) float32 logits with integer targets, and the binary
cross-entropy of 4 million logits. Before each measurement, value and gradient are checked against the peer's.
Peak memory in torch is the largest number of bytes that the step has allocated at one time, according to the
profiler; in JAX it is the size of the compiled program's temporaries and output.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.nn import functional

import stablenum_jax.losses
import stablenum_torch.losses
from benchmarks.timing import interleaved

__all__ = ["run"]

ROWS, CLASSES = 8192, 32000
ITEMS = 4_000_000
Step = Callable[[], Any]


def run(*, rows: int = ROWS, classes: int = CLASSES, items: int = ITEMS, rounds: int = 9) -> dict[str, Any]:
    """One entry per loss and framework: times, ratio to the peer, peak bytes of both."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, classes), dtype=np.float32)
    targets = rng.integers(0, classes, rows)
    z = 3.0 * rng.standard_normal(items, dtype=np.float32)
    y = (rng.random(items) > 0.5).astype(np.float32)
    many = 5 * rounds
    report = {}
    # The small losses come first, because after arrays of a gigabyte the allocator behaves differently.
    report["torch binary_cross_entropy"] = _torch(
        torch.from_numpy(z),
        torch.from_numpy(y),
        functional.binary_cross_entropy_with_logits,
        stablenum_torch.losses.binary_cross_entropy,
        many,
    )
    report["jax binary_cross_entropy"] = _jax(
        jnp.asarray(z),
        jnp.asarray(y),
        lambda x, t: jnp.mean(optax.sigmoid_binary_cross_entropy(x, t)),
        stablenum_jax.losses.binary_cross_entropy,
        many,
    )
    report["torch cross_entropy"] = _torch(
        torch.from_numpy(logits),
        torch.from_numpy(targets),
        functional.cross_entropy,
        stablenum_torch.losses.cross_entropy,
        rounds,
    )
    report["jax cross_entropy"] = _jax(
        jnp.asarray(logits),
        jnp.asarray(targets),
        lambda x, t: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x, t)),
        stablenum_jax.losses.cross_entropy,
        rounds,
    )
    return report


def _row(size: tuple[int, ...], steps: dict[str, Step], peaks: dict[str, int], rounds: int) -> dict[str, Any]:
    times = interleaved(steps, rounds=rounds)
    peer, ours = steps
    return {
        "size": str(size),
        "times": {name: t.as_dict() for name, t in times.items()},
        "ratio": round(times[ours].median / times[peer].median, 3),
        "peak_bytes": peaks,
    }


def _torch(x: torch.Tensor, t: torch.Tensor, peer: Any, ours: Any, rounds: int) -> dict[str, Any]:
    x = x.clone().requires_grad_()

    def step(loss: Any) -> tuple[torch.Tensor, torch.Tensor]:
        value = loss(x, t)
        (grad,) = torch.autograd.grad(value, x)
        return value.detach(), grad

    names = {f"torch.nn.functional.{peer.__name__}": peer, "stablenum_torch": ours}
    peaks = {name: _peak_bytes(functools.partial(step, loss)) for name, loss in names.items()}
    (value, grad), (other, other_grad) = (step(loss) for loss in names.values())
    torch.testing.assert_close(other, value, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(other_grad, grad, rtol=1e-4, atol=2e-7 / len(x))
    del grad, other_grad
    steps: dict[str, Step] = {name: functools.partial(step, loss) for name, loss in names.items()}
    return _row(tuple(x.shape), steps, peaks, rounds)


def _peak_bytes(step: Step) -> int:
    """The largest number of bytes that torch's allocator has allocated at one time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def _jax(x: jax.Array, t: jax.Array, peer: Any, ours: Any, rounds: int) -> dict[str, Any]:
    names = {"optax": peer, "stablenum_jax": ours}
    compiled = {name: jax.jit(jax.value_and_grad(loss)).lower(x, t).compile() for name, loss in names.items()}
    peaks = {}
    for name, program in compiled.items():
        memory = program.memory_analysis()
        peaks[name] = memory.temp_size_in_bytes + memory.output_size_in_bytes
    (value, grad), (other, other_grad) = (program(x, t) for program in compiled.values())
    np.testing.assert_allclose(other, value, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(other_grad, grad, rtol=1e-4, atol=2e-7 / len(x))
    del grad, other_grad
    steps: dict[str, Step] = {
        name: lambda program=program: jax.block_until_ready(program(x, t))
        for name, program in compiled.items()
    }
    return _row(tuple(x.shape), steps, peaks, rounds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(), indent=2))
