"""``python -m tests.jax.exact_layouts [few]``: the same gradients on one to eight devices, in many layouts.

It prints, as JSON, the bits that each layout recorded, for ``test_exact_norms.py``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum
import stablenum_jax

# name -> how the step runs, sizes of the mesh, and where a matrix and a vector lie
LAYOUTS: dict[str, tuple[str, tuple[int, ...], Any, Any]] = {
    "one device": ("jit", (1, 1), (), ()),
    "jit, rows over 2": ("jit", (2, 1), ("a",), ("a",)),
    "jit, rows over 8": ("jit", (8, 1), ("a",), ("a",)),
    "jit, columns over 8": ("jit", (8, 1), (None, "a"), ("a",)),
    "jit, 2-D": ("jit", (4, 2), ("a", "b"), ("b",)),
    "explicit, 2-D": ("explicit", (2, 4), ("b", "a"), ("a",)),
    "shard_map, rows over 4": ("shard_map", (4, 1), ("a",), ("a",)),
    "shard_map, columns over 4": ("shard_map", (4, 1), (None, "a"), ()),
    "shard_map, 2-D": ("shard_map", (4, 2), ("a", "b"), ("b",)),
    "shard_map, copies": ("shard_map", (8, 1), (), ()),
}
SOME = ("one device", "jit, 2-D", "shard_map, 2-D")
# One of each kind of program; whatever the rules, they differ in how XLA or the user divides them.
FEW = (*SOME, "explicit, 2-D")


def gradients() -> dict[str, Any]:
    """Gradients of several formats and sizes."""
    rng = np.random.default_rng(5)
    made = {"w": rng.standard_normal((64, 32)), "b": np.full(8, 3**-0.5)}
    made["v"] = rng.standard_normal((8, 8)) * np.exp(2 * rng.standard_normal((8, 8)))
    return {
        name: jnp.asarray(part, jnp.bfloat16 if name == "v" else jnp.float32) for name, part in made.items()
    }


def record(layout: str, **rules: Any) -> dict[str, Any]:
    """What one step records."""
    kind, sizes, matrix, vector = LAYOUTS[layout]
    axis_type = jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=(axis_type,) * 2, devices=devices)
    axes = ("a", "b") if kind == "shard_map" else None
    tx = optax.chain(stablenum_jax.guard(axis_name=axes, **rules), optax.sgd(0.1))
    grads = gradients()
    params = jax.tree.map(jnp.zeros_like, grads)
    specs = jax.tree.map(lambda x: jax.P(*(matrix if x.ndim == 2 else vector)), grads)
    grads, params = (
        jax.device_put(tree, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))
        for tree in (grads, params)
    )

    def step(params: Any, state: Any, grads: Any) -> Any:
        return stablenum_jax.step(tx, params, state, grads)[1]

    if kind == "shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=(specs, jax.P(), specs), out_specs=jax.P())
    with jax.set_mesh(mesh):
        state = jax.jit(step)(params, tx.init(params), grads)
    guard = stablenum_jax.guard_state(state)
    kept = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(guard.clip))
    last = stablenum_jax.metrics(state)
    return {
        "norm": last["grad_norm"].hex(),
        "coefficient": last["clip_coefficient"].hex(),
        "reason": last["reason"].name,
        "state": hashlib.sha256(kept).hexdigest(),
    }


def main(few: str = "") -> None:
    """Print what all layouts recorded, or a few."""
    by_norm = {"clip": (stablenum.AdaGC(max_norm=0.5, warmup_steps=1), 1.0)}
    layouts, some = (FEW, ("one device", "shard_map, 2-D")) if few else (LAYOUTS, SOME)
    found = {
        "exact": {name: record(name, clip=1.0, exact_norms=True) for name in layouts},
        "single norms": {name: record(name, **by_norm, exact_norms=True) for name in some},
        "rounded": {name: record(name, clip=1.0) for name in some},
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
