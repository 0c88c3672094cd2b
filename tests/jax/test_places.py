"""On a mesh a guarded step is compiled once, and what is restored is committed as what it replaces."""

from __future__ import annotations

import pytest

from tests.jax.helpers import run_on_four_devices
from tests.selection import only

COMPILED_ONCE = """
import functools
import jax, jax.numpy as jnp, optax, stablenum, stablenum_jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

compiled = []
def note(event, duration, **_):
    compiled.append(event.endswith("backend_compile_duration"))
jax.monitoring.register_event_duration_secs_listener(note)

def compilations(tx, step, params):
    grads, state = jax.tree.map(lambda x: 0.1 * x, params), tx.init(params)
    jax.block_until_ready((grads, state))
    compiled.clear()
    jitted = jax.jit(step)
    for _ in range(3):
        params, state = jitted(params, state, grads)
    return sum(compiled)

def plain(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state
    return step

def guarded(tx):
    return functools.partial(stablenum_jax.step, tx)

rules = dict(clip=[stablenum.AdaGC(), 1.0], loss_scale="dynamic", spike="skip")

def compiled_once(kind):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    params = {
        name: jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))
        for name, shape, spec in (("w", (8, 4), P("a", "b")), ("b", (4,), P()))
    }
    sgd = optax.chain(stablenum_jax.guard(**rules), optax.sgd(0.1))
    assert compilations(optax.sgd(0.1), plain(optax.sgd(0.1)), params) == 1
    assert compilations(sgd, guarded(sgd), params) == 1, kind
    # optax leaves the count of AdamW uncommitted, so that only the guard's own chain can place it.
    assert compilations(optax.adamw(0.1), plain(optax.adamw(0.1)), params) == 2
    for tx in (
        stablenum_jax.guard(optax.adamw(0.1), **rules),
        stablenum_jax.chain(stablenum_jax.guard(**rules), optax.adamw(0.1)),
    ):
        assert compilations(tx, guarded(tx), params) == 1, kind
    return params

# Without a mesh, or with two, nothing is committed; under jit, nothing is known.
params = compiled_once({kind})
tx = optax.chain(stablenum_jax.guard(**rules), optax.sgd(0.1))
other = jax.make_mesh((4,), ("c",), axis_types=(AxisType.Auto,))
two = {**params, "c": jax.device_put(jnp.ones(4), NamedSharding(other, P("c")))}
alone = jax.device_put({"w": jnp.ones(4)}, jax.devices()[1])
for made in (tx.init({"w": jnp.ones(4)}), tx.init(two), tx.init(alone)):
    assert not any(x.committed for x in jax.tree.leaves(made))
jax.eval_shape(tx.init, params)
jax.jit(tx.init)(params)
"""

PLACED_LIKE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from stablenum_jax._trees.places import placed_like

mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
on_mesh = [NamedSharding(mesh, P("a")), NamedSharding(mesh, P())]
with jax.default_device(jax.devices()[2]):
    elsewhere = jnp.arange(4.0)
kinds = [jnp.arange(4.0), elsewhere, jax.device_put(jnp.arange(4.0), jax.devices()[1])]
kinds += [jax.device_put(jnp.arange(4.0), sharding) for sharding in on_mesh]
for keyed in (False, True):
    arrays = [jax.vmap(jax.random.key)(x.astype(int)) if keyed else x for x in kinds]
    for like in arrays:
        for new in arrays:
            found = placed_like(new, like)
            assert found.committed == like.committed, (new, like)
            assert found.sharding.is_equivalent_to(like.sharding, 1), (found.sharding, like.sharding)
            assert found.dtype == new.dtype
            data = [jax.random.key_data(x) if keyed else x for x in (found, new)]
            np.testing.assert_array_equal(*map(np.asarray, data))
"""


# An explicit mesh is in the types too, so that a mistake shows more easily than on one that is not.
@pytest.mark.parametrize("kind", only(["AxisType.Auto"], ["AxisType.Auto", "AxisType.Explicit"]))
def test_a_step_on_a_mesh_is_compiled_once(kind: str) -> None:
    run_on_four_devices(COMPILED_ONCE.replace("{kind}", kind))


def test_an_array_is_placed_and_committed_like_another() -> None:
    run_on_four_devices(PLACED_LIKE)
