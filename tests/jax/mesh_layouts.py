"""One training on eight devices in every layout, and the faults of its gradients and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import stablenum
import stablenum_jax

EXAMPLES, DEVICES, GOOD_STEPS = 16, 8, 6
SHAPES = {"b": (8,), "e": (0, 4), "o": (3,), "v": (8, 8), "w": (16, 8)}
BAD_ROW = 5  # of "v"


def settings() -> dict[str, Any]:
    return {"clip": 1.0, "spike": stablenum.SpikeGuard(watch="loss", min_samples=4)}


def start() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def batch(step: int) -> dict[str, Any]:
    """The gradient and the loss of each example."""
    rng = np.random.default_rng(100 + step)
    made = {name: rng.standard_normal((EXAMPLES, *shape)) for name, shape in SHAPES.items()}
    made["loss"] = 2 + 0.1 * rng.standard_normal(EXAMPLES)
    return {name: part.astype(np.float32) for name, part in made.items()}


def _healthy(made: Any) -> None:
    pass


def _inf_on_one(made: Any) -> None:
    made["v"][6, BAD_ROW, 2] = np.inf


def _nan_loss_on_one(made: Any) -> None:
    made["loss"][6] = np.nan


def _spike_on_one(made: Any) -> None:
    made["loss"][7] = 1e6


def _two_at_once(made: Any) -> None:
    made["v"][6, BAD_ROW, 2] = np.inf
    made["loss"][[10, 13]] = np.nan


def _huge_finite(made: Any) -> None:
    made["w"][6, 3] = 3e38


def _zeros_on_one(made: Any) -> None:
    for name in SHAPES:
        made[name][6:8] = 0
    made["w"][:, 6:8], made["v"][:, 3], made["b"][:, 3] = 0, 0, 0


FAULTS: dict[str, Callable[[Any], None]] = {
    "healthy": _healthy,
    "inf on one device": _inf_on_one,
    "NaN loss on one device": _nan_loss_on_one,
    "loss spike on one device": _spike_on_one,
    "two devices at once": _two_at_once,
    "huge finite": _huge_finite,
    "zeros on one device": _zeros_on_one,
}


def spoiled(fault: str) -> dict[str, Any]:
    """The batch with the fault."""
    made = batch(GOOD_STEPS)
    FAULTS[fault](made)
    return made


# Where the parameters of a layout lie: the mesh axis of each dimension, None for a whole one.
COPIED: dict[str, tuple[Any, ...]] = dict.fromkeys(SHAPES, ())
ROWS = COPIED | {"b": ("d",), "v": ("d",), "w": ("d",)}
GRID = COPIED | {"b": ("a",), "v": ("b", "a"), "w": ("a", "b")}
WHOLE, LINE, SQUARE = ("d",), {"d": 8}, {"a": 4, "b": 2}
# name -> kind of program, sizes of the mesh, where the parameters lie, names of the parameters
LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, tuple[Any, ...]]]] = {
    "jit, data": ("jit", LINE, COPIED),
    "jit, FSDP": ("jit", LINE, ROWS),
    "jit, 2-D": ("jit", SQUARE, GRID),
    "explicit, FSDP": ("explicit", LINE, ROWS),
    "shard_map, data": ("shard_map", LINE, COPIED),
    "shard_map, FSDP": ("shard_map", LINE, ROWS),
    "shard_map, 2-D": ("shard_map", SQUARE, GRID),
    "pmap": ("pmap", LINE, ROWS),
    "scan over micro-batches": ("scan", LINE, ROWS),
}


def names_of(layout: str) -> list[str]:
    """The parameters of a layout: under pmap, copies of one are not known to be copies."""
    return [name for name in SHAPES if layout != "pmap" or name != "o"]


class Layout:
    """One way to place the training on the devices; ``step`` runs one step of it."""

    def __init__(self, name: str) -> None:
        self.kind, sizes, self.places = LAYOUTS[name]
        self.names, self.axes = names_of(name), tuple(sizes)
        kind = jax.sharding.AxisType.Explicit if self.kind == "explicit" else jax.sharding.AxisType.Auto
        self.mesh = jax.make_mesh(tuple(sizes.values()), self.axes, axis_types=(kind,) * len(sizes))
        self.joins = self.kind in {"shard_map", "pmap", "scan"}
        guard = stablenum_jax.guard(**settings(), axis_name=self.axes if self.joins else None)
        self.tx = optax.chain(guard, optax.sgd(0.1, momentum=0.9))
        programs = {"shard_map": self._shard_map, "scan": self._shard_map, "pmap": self._pmap}
        self.step = programs.get(self.kind, self._jit)()

    def spec(self, path: Any) -> Any:
        names = [getattr(key, "key", None) for key in path]
        return PartitionSpec(*next((self.places[name] for name in names if name in SHAPES), ()))

    def specs(self, tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: self.spec(path), tree)

    def first(self) -> tuple[Any, Any]:
        """The parameters and the state before the first step."""
        params = {name: jnp.asarray(part) for name, part in start().items() if name in self.names}
        if self.kind == "pmap":
            shards = {
                name: part.reshape(DEVICES, part.shape[0] // DEVICES, *part.shape[1:])
                for name, part in params.items()
            }
            return shards, jax.vmap(self.tx.init)(shards)
        tree = (params, self.tx.init(params))
        return jax.device_put(
            tree, jax.tree.map(lambda spec: jax.NamedSharding(self.mesh, spec), self.specs(tree))
        )

    def examples(self, made: Any) -> Any:
        """A batch on the devices."""
        made = {name: made[name] for name in (*self.names, "loss")}
        if self.kind == "pmap":
            return jax.tree.map(lambda x: x.reshape(DEVICES, EXAMPLES // DEVICES, *x.shape[1:]), made)
        by_device = jax.sharding.PartitionSpec(self.axes)
        return jax.device_put(made, jax.NamedSharding(self.mesh, by_device))

    def _update(self, params: Any, state: Any, grads: Any, loss: Any) -> Any:
        return stablenum_jax.step(self.tx, params, state, grads, value=loss)

    def _jit(self) -> Any:
        def step(params: Any, state: Any, made: Any) -> Any:
            grads = {name: _mean(made[name]) for name in self.names}
            if self.kind == "explicit":
                grads = jax.tree.map(jax.sharding.reshard, grads, self.specs(grads))
            else:
                grads = jax.lax.with_sharding_constraint(
                    grads, jax.tree.map(lambda spec: jax.NamedSharding(self.mesh, spec), self.specs(grads))
                )
            return self._update(params, state, grads, jnp.mean(made["loss"]))

        jitted = jax.jit(step)

        def on_mesh(*args: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return jitted(*args)

        return on_mesh if self.kind == "explicit" else jitted

    def _local(self, params: Any, state: Any, made: Any) -> Any:
        """One step of a device: the gradients of its examples are averaged over all and then cut."""

        def cut(name: str, whole: Any) -> Any:
            for dim, axis in enumerate(self.places[name]):
                size = whole.shape[dim] // jax.lax.psum(1, axis)
                at = jax.lax.axis_index(axis) * size
                whole = jax.lax.dynamic_slice_in_dim(whole, at, size, dim)
            return whole

        if self.kind == "scan":
            zero = jax.tree.map(lambda x: jnp.zeros_like(x[0]), made)
            count = made["loss"].shape[0]
            local, _ = jax.lax.scan(
                lambda sums, one: (jax.tree.map(lambda s, x: s + x / count, sums, one), None), zero, made
            )
        else:
            local = jax.tree.map(_mean, made)
        grads = {name: cut(name, jax.lax.pmean(local[name], self.axes)) for name in self.names}
        return self._update(params, state, grads, local["loss"])

    def _shard_map(self) -> Any:
        specs = self.specs(jax.eval_shape(self.first))
        return jax.jit(
            jax.shard_map(
                self._local,
                mesh=self.mesh,
                in_specs=(*specs, PartitionSpec(self.axes)),
                out_specs=specs,
            )
        )

    def _pmap(self) -> Any:
        return jax.pmap(self._local, axis_name="d")


def _mean(x: Any) -> Any:
    """The mean over the examples; the sum of huge ones would overflow."""
    return (x / x.shape[0]).sum(axis=0)
