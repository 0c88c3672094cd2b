"""``python -m tests.jax.mesh_layouts``: one training on eight devices in every layout, with every fault.

It prints, as JSON, what each layout recorded and where its parameters ended, for ``test_meshes.py``, which
compares that with one process on the gathered gradients.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

EXAMPLES, DEVICES, GOOD_STEPS = 16, 8, 6
SHAPES = {"b": (8,), "e": (0, 4), "o": (3,), "v": (8, 8), "w": (16, 8)}
BAD_ROW = 5  # of "v"


def settings() -> dict[str, Any]:
    import stablenum

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

    def __init__(self, name: str, *, exact_norms: bool = False) -> None:
        import jax
        import optax

        import stablenum_jax

        self.kind, sizes, self.places = LAYOUTS[name]
        self.names, self.axes = names_of(name), tuple(sizes)
        kind = jax.sharding.AxisType.Explicit if self.kind == "explicit" else jax.sharding.AxisType.Auto
        self.mesh = jax.make_mesh(tuple(sizes.values()), self.axes, axis_types=(kind,) * len(sizes))
        self.joins = self.kind in {"shard_map", "pmap", "scan"}
        guard = stablenum_jax.guard(
            **settings(), exact_norms=exact_norms, axis_name=self.axes if self.joins else None
        )
        self.tx = optax.chain(guard, optax.sgd(0.1, momentum=0.9))
        self.step = {"explicit": self._jit, "scan": self._shard_map}.get(
            self.kind, getattr(self, f"_{self.kind}", None)
        )()

    def spec(self, path: Any) -> Any:
        from jax.sharding import PartitionSpec

        names = [getattr(key, "key", None) for key in path]
        return PartitionSpec(*next((self.places[name] for name in names if name in SHAPES), ()))

    def specs(self, tree: Any) -> Any:
        import jax

        return jax.tree_util.tree_map_with_path(lambda path, _: self.spec(path), tree)

    def first(self) -> tuple[Any, Any]:
        """The parameters and the state before the first step."""
        import jax
        import jax.numpy as jnp

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
        import jax

        made = {name: made[name] for name in (*self.names, "loss")}
        if self.kind == "pmap":
            return jax.tree.map(lambda x: x.reshape(DEVICES, EXAMPLES // DEVICES, *x.shape[1:]), made)
        by_device = jax.sharding.PartitionSpec(self.axes)
        return jax.device_put(made, jax.NamedSharding(self.mesh, by_device))

    def _update(self, params: Any, state: Any, grads: Any, loss: Any) -> Any:
        import stablenum_jax

        return stablenum_jax.step(self.tx, params, state, grads, value=loss)

    def _jit(self) -> Any:
        import jax
        import jax.numpy as jnp

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
        import jax
        import jax.numpy as jnp

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
        import jax
        from jax.sharding import PartitionSpec

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
        import jax

        return jax.pmap(self._local, axis_name="d")


def _mean(x: Any) -> Any:
    """The mean over the examples; the sum of huge ones would overflow."""
    return (x / x.shape[0]).sum(axis=0)


def replicas_agree(tree: Any) -> bool:
    """Whether all devices that hold the same part of an array hold the same bits."""
    import jax

    for leaf in jax.tree.leaves(tree):
        parts: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            if parts.setdefault(str(shard.index), data) != data:
                return False
    return True


def states_agree(stacked: Any) -> bool:
    """Whether the guard's states of all devices, stacked by pmap, are the same."""
    import jax

    return all(
        len({np.asarray(one).tobytes() for one in np.asarray(leaf)}) == 1 for leaf in jax.tree.leaves(stacked)
    )


def gathered(params: Any) -> dict[str, Any]:
    """The whole parameters; under pmap they are stacked by device."""
    return {
        name: np.asarray(part, np.float64).reshape(SHAPES[name]).tolist() for name, part in params.items()
    }


def record(layout: str, *, exact_norms: bool = False) -> dict[str, Any]:
    """What a layout recorded of each fault, by fault."""
    import jax

    import stablenum_jax

    made = Layout(layout, exact_norms=exact_norms)
    before, found = made.first(), {}
    for i in range(GOOD_STEPS):
        before = made.step(*before, made.examples(batch(i)))
    for fault in FAULTS:
        after = made.step(*before, made.examples(spoiled(fault)))
        state = after[1] if made.kind != "pmap" else jax.tree.map(lambda x: x[0], after[1])
        last = stablenum_jax.metrics(state)
        same = [
            np.asarray(a).tobytes() == np.asarray(b).tobytes()
            for a, b in zip(jax.tree.leaves(after[0]), jax.tree.leaves(before[0]), strict=True)
        ]
        alike = replicas_agree(after) if made.kind != "pmap" else states_agree(after[1][0])
        again = made.step(*after, made.examples(batch(GOOD_STEPS + 1)))
        found[fault] = {
            "applied": last["applied"],
            "reason": last["reason"].name,
            "grad_norm": last["grad_norm"],
            "loss": last["loss"],
            "worst": last["worst"].name,
            "worst_rank": last["worst_rank"],
            "unchanged": all(same),
            "replicas agree": alike,
            "params": gathered(again[0]),
        }
    return found


COLLECTIVE = re.compile(r"= (\(?[a-z0-9]+\[.*?) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(")
HOST = re.compile(r"custom-call\(.*callback|infeed\(|outfeed\(|send\(|recv\(")


def collectives(layout: str, **rules: Any) -> dict[str, Any]:
    """The collectives of a guarded step whose gradients come in as they lie, and whether it asks the host."""
    import jax
    import optax
    from jax.sharding import PartitionSpec

    import stablenum_jax

    made = Layout(layout)
    made.tx = optax.chain(
        stablenum_jax.guard(**rules, axis_name=made.axes if made.joins else None), optax.sgd(0.1)
    )
    params, state = made.first()
    if made.kind == "jit":
        program = jax.jit(made._update).lower(params, state, params, np.float32(1.0))
    elif made.kind == "pmap":
        program = jax.pmap(made._update, axis_name="d").lower(params, state, params, np.ones(DEVICES))
    else:
        specs, by_device = made.specs((params, state)), PartitionSpec(made.axes)

        def update(params: Any, state: Any, grads: Any, losses: Any) -> Any:
            return made._update(params, state, grads, losses[0])

        mapped = jax.shard_map(
            update, mesh=made.mesh, in_specs=(*specs, specs[0], by_device), out_specs=specs
        )
        program = jax.jit(mapped).lower(params, state, params, np.ones(DEVICES, np.float32))
    text = program.compile().as_text()
    found = [match.groups() for line in text.splitlines() if (match := COLLECTIVE.search(line))]
    return {"collectives": found, "asks the host": bool(HOST.search(text))}


def main() -> None:
    """Print everything."""
    import stablenum

    rules = {
        "clip": {"clip": 1.0},
        "per tensor": {"clip": stablenum.ClipByNorm(1.0)},
        "exact": {"clip": 1.0, "exact_norms": True},
        "two rules": {"clip": (stablenum.AutoClip(), 1.0)},
        "update": {"clip": (1.0, stablenum.ClipUpdateRMS(1.0, per_lr=False))},
        "elements": {"loss_scale": stablenum.UnderflowAwareLossScale()},
    }
    joined = [("shard_map, FSDP", name) for name in rules] + [("shard_map, 2-D", "clip"), ("pmap", "clip")]
    by_xla = [("jit, FSDP", "clip"), ("jit, 2-D", "clip"), ("jit, data", "clip")]
    found = {
        "records": {layout: record(layout) for layout in LAYOUTS},
        "programs": {
            f"{layout}: {name}": collectives(layout, **rules[name]) for layout, name in joined + by_xla
        },
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
