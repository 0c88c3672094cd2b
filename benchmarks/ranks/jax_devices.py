"""``python -m benchmarks.ranks.jax_devices RANKS ROUNDS TURN``: the process that ``jax_ranks`` starts."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stablenum_jax
from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.hlo import ordinary_step
from benchmarks.steps.jax_variants import multiplied
from benchmarks.steps.reference import CLIP_AT, FACTORS, check_clipped_alike, check_decided
from benchmarks.timing import interleaved

__all__ = ["NAMES", "TENSORS"]

ELEMENTS, TENSORS = 9260, 108  # 1.0 M on each device
NAMES = ("bare", "apply_if_finite + clip", "stablenum")


class _Devices:
    """The variants, compiled, on sharded parameters and gradients."""

    def __init__(self, world: int) -> None:
        if jax.device_count() != world:
            raise BenchmarkError(f"{world} devices were requested; JAX has {jax.device_count()}.")
        self._sharding = NamedSharding(Mesh(np.asarray(jax.devices()), ("ranks",)), PartitionSpec("ranks"))
        self._draw, self._shape = np.random.default_rng(0), (ELEMENTS * world,)
        self._raw = self._tree(1e-2)
        self._grads = self._tree(0.0)
        raw = np.concatenate([*map(np.asarray, self._raw.values())])
        self._norm = float(np.linalg.norm(raw.astype(np.float64)))
        adamw = optax.adamw(1e-2)
        clipped = optax.chain(optax.clip_by_global_norm(CLIP_AT * self._norm), adamw)
        guarded = optax.chain(stablenum_jax.guard(clip=CLIP_AT * self._norm), adamw)
        optimizers = (adamw, optax.apply_if_finite(clipped, max_consecutive_errors=5), guarded)

        def by_optax(tx: Any, carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def by_us(tx: Any, carry: Any, grads: Any) -> Any:
            return stablenum_jax.step(tx, *carry, grads)

        self.carried, self._programs, self.counts = {}, {}, {}
        self._steps = dict.fromkeys(NAMES, 0)
        for name, tx, how in zip(NAMES, optimizers, (by_optax, by_optax, by_us), strict=True):
            params = self._tree(0.0)
            self.carried[name] = (params, tx.init(params))  # zeros like the parameters are sharded like them
            jitted = jax.jit(functools.partial(how, tx), donate_argnums=0)
            program = jitted.lower(self.carried[name], self._grads).compile()
            work = ordinary_step(program.as_text(), "grads[", gradient_bytes=4 * ELEMENTS * TENSORS)
            self._programs[name] = program
            self.counts[name] = {"collectives": work.collectives, "bytes": work.sent}

    def _tree(self, size: float) -> dict[str, Any]:
        drawn = (self._draw.standard_normal(self._shape, "float32") * size for _ in range(TENSORS))
        return {f"w{i:03d}": jax.device_put(array, self._sharding) for i, array in enumerate(drawn)}

    def put(self, name: str) -> None:
        """Write the gradients for the variant's next step."""
        factor = FACTORS[self._steps[name] % len(FACTORS)]
        self._steps[name] += 1
        self._grads = jax.block_until_ready(multiplied(self._grads, self._raw, factor))

    def step(self, name: str) -> None:
        """Run one step and wait for its results."""
        self.carried[name] = jax.block_until_ready(self._programs[name](self.carried[name], self._grads))

    def check(self) -> None:
        """Check the computed parameters, and that clipping used the norm over all devices.

        Raises:
            WrongResultError: a variant did not compute what its name says.
        """
        ends = [np.concatenate([*map(np.asarray, self.carried[name][0].values())]) for name in NAMES]
        check_clipped_alike("devices", *ends)  # from parameters of 0
        last, steps = stablenum_jax.metrics(self.carried["stablenum"][1]), self._steps["stablenum"]
        check_decided("devices", last, norm=self._norm, steps=steps, clipped=True, scale=1.0)


def _in_this_process(world: int, rounds: int, turn: int) -> dict[str, Any]:
    devices = _Devices(world)
    steps = {name: functools.partial(devices.step, name) for name in NAMES}
    times = interleaved(steps, rounds=rounds, prepare=devices.put, seed=turn)
    devices.check()
    return {"samples": {name: t.samples for name, t in times.items()}, "counts": devices.counts}


if __name__ == "__main__":
    print(json.dumps(_in_this_process(*map(int, sys.argv[1:]))))
