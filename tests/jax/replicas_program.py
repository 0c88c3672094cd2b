"""What comparing the copies on eight devices found, or on the four of two processes, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stablenum
import stablenum_jax
from stablenum_jax import check_replicas

TX = optax.chain(stablenum_jax.guard(), optax.adamw(1e-2))
SIZES = {"w": (6, 8), "b": (8,)}


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


def found(*trees: Any) -> dict | int:
    """What the error says, or how many arrays were compared."""
    try:
        return check_replicas(*trees)
    except stablenum.ReplicasPartedError as error:
        return {"parted": error.parted, "step": error.step, "text": str(error)}


def changed(array: jax.Array, device: int, change: Any) -> jax.Array:
    """The array with ``change`` made on one device alone, to a flat NumPy array, in place."""
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            change(data.reshape(-1))
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def flipped(array: jax.Array, device: int, bit: int, place: int = 0) -> jax.Array:
    def flip(flat: np.ndarray) -> None:
        words = flat.view(f"u{flat.dtype.itemsize}")
        words[place] ^= words.dtype.type(1 << bit)

    return changed(array, device, flip)


def start() -> tuple[Any, Any]:
    """Parameters and state that are whole on each device, after one step."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape).astype("float32") for name, shape in SIZES.items()}
    params = jax.device_put(drawn, NamedSharding(mesh(), P()))
    return step(params, jax.jit(TX.init)(params), 0)


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2)


@jax.jit
def _step(params: Any, opt_state: Any, x: jax.Array) -> Any:
    return stablenum_jax.step(TX, params, opt_state, jax.grad(loss)(params, x))


def step(params: Any, opt_state: Any, seed: int) -> Any:
    """A data-parallel step: a part of the batch is on each device."""
    x = np.random.default_rng(seed).standard_normal((16, 6)).astype("float32")
    return _step(params, opt_state, jax.device_put(x, NamedSharding(mesh(), P(("x", "y")))))


# --- the cases -------------------------------------------------------------------------------------


def flips() -> list:
    params, opt_state = start()
    adam = opt_state[1][0]
    seen = []
    for bit in range(32):
        device, place = bit % 8, (7 * bit) % 48
        bad = {**params, "w": flipped(params["w"], device, bit, place)}
        seen.append(["w", bit, device, found(bad, opt_state)])
        for moment in ("mu", "nu"):
            tree = getattr(adam, moment)
            worse = adam._replace(**{moment: {**tree, "w": flipped(tree["w"], device, bit, place)}})
            state = (opt_state[0], (worse, *opt_state[1][1:]))
            seen.append([f"opt_state[1][0].{moment}['w']", bit, device, found(params, state)])
    return seen


def healthy() -> dict:
    params, opt_state = start()
    seen = []
    for seed in range(1, 1000):
        params, opt_state = step(params, opt_state, seed)
        if seed % 25 == 0:
            seen.append(found(params, opt_state))
    applied = stablenum_jax.metrics(opt_state)
    return {"found": seen, "last": applied["step"], "skipped": applied["skipped_total"]}


def before_steps() -> dict | int:
    """A bit that is flipped before steps stays on its device."""
    params, opt_state = start()
    params = {**params, "w": flipped(params["w"], 6, 12, 3)}
    for seed in range(1, 4):
        params, opt_state = step(params, opt_state, seed)
    return found(params, opt_state)


def other_seeds() -> dict | int:
    """In ``shard_map`` each device draws its own numbers, although the result is said to be the same."""

    def init(key: jax.Array) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index("x") * 2 + jax.lax.axis_index("y"))
        return {name: jax.random.normal(key, shape) for name, shape in SIZES.items()}

    over = {"mesh": mesh(), "in_specs": (P(),), "out_specs": P(), "check_vma": False}
    return found(jax.jit(jax.shard_map(init, **over))(jax.random.key(0)))


def forgotten_mean() -> dict | int:
    """In ``shard_map`` without ``pmean``, each device steps with the gradient of its own batch."""

    def local(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params, _ = start()
    over = {"mesh": mesh(), "in_specs": (P(), P(("x", "y"))), "out_specs": P(), "check_vma": False}
    x = np.random.default_rng(1).standard_normal((16, 6)).astype("float32")
    return found(jax.jit(jax.shard_map(local, **over))(params, x))


def taken_twice() -> dict | int:
    params, opt_state = start()
    after, opt_state = step(params, opt_state, 1)
    again, _ = step(after, opt_state, 1)
    twice = np.asarray(again["b"])
    after["b"] = changed(after["b"], 2, lambda flat: np.copyto(flat, twice))
    return found(after, opt_state)


def special_values() -> dict:
    def on_all(value: Any) -> jax.Array:
        return jax.device_put(np.full(3, value, np.float32), NamedSharding(mesh(), P()))

    zeros, nans = on_all(0.0), on_all(np.nan)
    return {
        "zeros": found(zeros),
        "negative zero": found(changed(zeros, 1, lambda flat: flat.fill(-0.0))),
        "nan": found(nans),
        "payload": found(flipped(nans, 1, 0)),
    }


def shards() -> dict:
    """Two copies of each of four parts, along y, and four copies of each of two, along x."""
    seen = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        place = NamedSharding(mesh(kind), P("x"))
        w = jax.device_put(np.arange(16, dtype=np.float32), place)
        both = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh(kind), P("x", "y")))
        seen[str(kind)] = [found({"w": w, "both": both}), found({"w": flipped(w, 5, 1), "both": both})]
        along_y = jax.device_put(np.ones((3, 4), np.float32), NamedSharding(mesh(kind), P(None, "y")))
        seen[str(kind)].append(found({"v": flipped(along_y, 5, 1)}))
    return seen


def kinds() -> dict:
    """Arrays of other dtypes, keys, integers and arrays on one device, in one tree."""
    put = lambda x: jax.device_put(x, NamedSharding(mesh(), P()))  # noqa: E731
    tree = {
        "bfloat16": put(jnp.ones(5, jnp.bfloat16)),
        "bool": put(jnp.ones(5, bool)),
        "complex64": put(jnp.ones(5, jnp.complex64)),
        "int8": put(jnp.ones((), jnp.int8)),
    }
    more = {"key": put(jax.random.key(3)), "empty": put(jnp.ones(0)), "one device": jnp.ones(3), "plain": 3}
    seen = {"healthy": found(tree | more)}
    for name, array in tree.items():
        bad = tree | more | {name: changed(array, 4, lambda flat: flat.__setitem__(0, 0))}
        seen[name] = found(bad)
    return seen


def elsewhere() -> dict:
    """Arrays in the host's memory, and arrays on another mesh than the one that is set."""
    host = jax.device_put(jnp.ones(3), NamedSharding(mesh(), P(), memory_kind="pinned_host"))
    w = jax.device_put(jnp.ones(3), NamedSharding(mesh(), P()))
    with jax.set_mesh(jax.make_mesh((8,), ("d",))):
        other = found([w, flipped(w, 3, 3)])
    return {"host": found([host, w]), "other mesh": other}


CASES = {
    "flips": flips,
    "healthy": healthy,
    "before steps": before_steps,
    "other seeds": other_seeds,
    "forgotten mean": forgotten_mean,
    "taken twice": taken_twice,
    "special values": special_values,
    "shards": shards,
    "kinds": kinds,
    "elsewhere": elsewhere,
}


def of_two_processes() -> dict:
    """Device ids of another process are named, too."""
    over = jax.make_mesh((4,), ("x",))
    w = jax.make_array_from_callback((3,), NamedSharding(over, P()), lambda _: np.float32([1, 2, 3]))
    bad = over.devices.flat[3]
    seen = {"healthy": found({"w": w}), "flipped": found({"w": flipped(w, bad.id, 3)}), "device": bad.id}
    return seen | {"devices": jax.device_count(), "own": jax.local_device_count()}


def main(rank: str = "", port: str = "") -> None:
    if not rank:
        jax.config.update("jax_num_cpu_devices", 8)
        result = {name: case() for name, case in CASES.items()}
    else:
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
        result = of_two_processes()
    sys.stdout.write("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
