"""Kills processes that save checkpoints of JAX in a loop, and looks at what they leave.

Run as ``FOLDER FORMAT TIMES SEED``.
This process forks, and so never starts the threads of JAX: each child has a JAX of its own, verifies what the
killed one before it has left, and saves on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum_jax

__all__ = ["state_of"]


def state_of(step: int) -> dict[str, Any]:
    """A state that follows from its step."""
    params = {"w": jnp.full((64, 64), step, jnp.float32), "narrow": jnp.full(64, step % 200, jnp.bfloat16)}
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-3))
    return {"params": params, "opt_state": tx.init(params), "step": step, "key": jax.random.key(step)}


def same(left: Any, right: Any) -> bool:
    def bits(x: Any) -> Any:
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x).tobytes()

    leaves, others = jax.tree.leaves(left), jax.tree.leaves(right)
    return len(leaves) == len(others) and all(bits(a) == bits(b) for a, b in zip(leaves, others, strict=True))


def save_on(folder: Path, kind: str, least: int, pipe: int) -> None:
    """Verify what is there, tell its step, and save in a loop, telling how long each save took."""
    checkpoints = stablenum_jax.Checkpoints(folder, format=kind, keep=2)
    step = -1
    if least >= 0:
        step, state = checkpoints.load(state_of(0))
        assert step == checkpoints.steps()[-1]
        assert step >= least, (step, least)
        assert same(state, state_of(step)), step
    os.write(pipe, f"verified {step}\n".encode())
    while True:
        step, start = step + 1, time.perf_counter()
        checkpoints.save(step, state_of(step))
        os.write(pipe, f"{step} {time.perf_counter() - start}\n".encode())


def started(folder: Path, kind: str, least: int) -> tuple[int, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            save_on(folder, kind, least, writing)
        except BaseException:  # noqa: BLE001 - told, and seen by the parent as an end of the pipe
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    return child, os.fdopen(reading, "r")


def main(folder: str, kind: str, times: str, seed: str) -> None:
    place, draw, where = Path(folder), random.Random(int(seed)), Counter[str]()
    saved = -1
    for _ in range(int(times)):
        child, pipe = started(place, kind, saved)
        assert pipe.readline().startswith("verified"), "what the last one left was not good"
        took = [float(pipe.readline().split()[1]) for _ in range(2)][-1]  # the first one compiles
        time.sleep(draw.uniform(0.0, 1.5 * took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines = pipe.read().splitlines()
        saved = int(lines[-1].split()[0]) if lines else saved + 2
        where["writing" if [*place.glob(".step-*")] else "between"] += 1
    child, pipe = started(place, kind, saved)
    assert pipe.readline().startswith("verified"), "what the last one left was not good"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    sys.stdout.write(json.dumps(where))


if __name__ == "__main__":
    main(*sys.argv[1:])
