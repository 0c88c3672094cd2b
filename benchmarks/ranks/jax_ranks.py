"""JAX: ranks are devices of one process, over which XLA shards; ``python -m benchmarks.ranks.jax_ranks``.

The peer is optax's ``apply_if_finite`` around ``clip_by_global_norm``, partitioned by XLA as ours is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.steps.errors import BenchmarkError, WrongResultError
from benchmarks.steps.hlo import ordinary_step
from benchmarks.timing import interleaved

__all__ = ["NAMES", "TENSORS", "measure"]

ELEMENTS, TENSORS = 9260, 108  # 1.0 M on each device
MAX_NORM = 1.0
NAMES = ("bare", "apply_if_finite + clip", "stablenum")


def measure(world: int, rounds: int) -> dict[str, Any]:
    """``samples`` and ``counts``, by variant, on a mesh of ``world`` devices.

    Raises:
        BenchmarkError: the process failed.
    """
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={world}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "benchmarks.ranks.jax_ranks", str(world), str(rounds)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{world} devices failed; the error is above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _in_this_process(world: int, rounds: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import stablenum_jax

    if jax.device_count() != world:
        raise BenchmarkError(f"{world} devices were asked for; JAX has {jax.device_count()}.")
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()), ("ranks",)), PartitionSpec("ranks"))
    draw = np.random.default_rng(0)

    def tree(fill: Callable[[], np.ndarray]) -> dict[str, jax.Array]:
        return {f"w{i:03d}": jax.device_put(fill(), sharding) for i in range(TENSORS)}

    shape = (ELEMENTS * world,)
    grads = tree(lambda: draw.standard_normal(shape, np.float32) * 1e-2)
    clipped = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(1e-4))
    optimizers = {
        "bare": optax.adamw(1e-4),
        NAMES[1]: optax.apply_if_finite(clipped, max_consecutive_errors=5),
        "stablenum": optax.chain(stablenum_jax.guard(clip=MAX_NORM), optax.adamw(1e-4)),
    }
    programs, carried, counts = {}, {}, {}
    for name, tx in optimizers.items():

        def step(carry: Any, grads: Any, tx: Any = tx, ours: bool = name == "stablenum") -> Any:
            params, state = carry
            if ours:
                return stablenum_jax.step(tx, params, state, grads)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = tree(lambda: np.ones(shape, np.float32))
        carried[name] = (params, tx.init(params))  # zeros like the parameters are sharded like them
        programs[name] = jax.jit(step, donate_argnums=0).lower(carried[name], grads).compile()
        work = ordinary_step(programs[name].as_text(), "grads[", gradient_bytes=4 * ELEMENTS * TENSORS)
        counts[name] = {"collectives": work.collectives, "bytes": work.sent}

    def run(name: str) -> None:
        carried[name] = jax.block_until_ready(programs[name](carried[name], grads))

    for name in NAMES:
        run(name)
    ours, theirs = (carried[name][0]["w000"] for name in ("stablenum", NAMES[1]))
    if not bool(jnp.allclose(ours, theirs, rtol=1e-5, atol=1e-7)) or bool((ours == 1).any()):
        raise WrongResultError("devices: the guarded step and optax's differ")
    times = interleaved({name: lambda name=name: run(name) for name in NAMES}, rounds=rounds)
    return {"samples": {name: t.samples for name, t in times.items()}, "counts": counts}


if __name__ == "__main__":
    print(json.dumps(_in_this_process(int(sys.argv[1]), int(sys.argv[2]))))
