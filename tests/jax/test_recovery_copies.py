"""Copies of arrays: what they give back, with donated buffers, and that no step is compiled again."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from stablenum.typing import Response
from stablenum_jax._recovery import copies
from stablenum_jax._recovery.copies import Copy, copies_of
from stablenum_jax._recovery.generators import ProcessGenerators
from stablenum_jax._recovery.states import flattened, put_back, replaced
from tests.jax.recovering import POLICY, donating_step, once, put, run, same, train_step


def _copy_of(leaf: Any) -> Copy:
    (copy,) = copies_of([leaf])
    return copy


def _on_one_device() -> jax.Array:
    return jax.device_put(jnp.arange(3.0), SingleDeviceSharding(jax.devices()[0]))


def _on_a_mesh() -> jax.Array:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("data")))


def _in_host_memory() -> jax.Array:
    return jax.device_put(jnp.arange(3.0), SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


LEAVES = {
    "float32": lambda: jnp.asarray([1.5, -0.0, jnp.nan]),
    "bfloat16": lambda: jnp.ones((2, 2), jnp.bfloat16),
    "float8": lambda: jnp.ones(3, jnp.float8_e4m3fn),
    "int4": lambda: jnp.asarray([1, -2], jnp.int4),
    "complex": lambda: jnp.asarray([1 + 2j]),
    "bool": lambda: jnp.asarray(True),
    "empty": lambda: jnp.zeros((0, 3)),
    "weak scalar": lambda: jnp.asarray(2.5),
    "weak array": lambda: jnp.broadcast_to(jnp.asarray(2.5), (3,)),
    "typed key": lambda: jax.random.split(jax.random.key(3), 2),
    "raw key": lambda: jax.random.PRNGKey(3),
    "committed": _on_one_device,
    "on a mesh": _on_a_mesh,
    "in host memory": _in_host_memory,
}


@pytest.mark.parametrize("has_host_memory", [True, False])
@pytest.mark.parametrize("kind", LEAVES)
def test_an_array_comes_back_as_it_was(
    kind: str, has_host_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_host_memory:
        monkeypatch.setattr(copies, "_has_host_memory", lambda array: False)
    leaf, original = LEAVES[kind](), LEAVES[kind]()
    copy = _copy_of(leaf)
    leaf.delete()  # as donation does
    for _ in range(2):
        back = copy.again()
        assert (back.dtype, back.committed) == (original.dtype, original.committed)
        assert back.sharding == original.sharding
        assert same(back, original)
        back.delete()


def test_other_leaves_come_back_as_they_were() -> None:
    array = np.arange(3.0)
    copy = _copy_of(array)
    array += 1
    once_more = copy.again()
    once_more += 1
    assert copy.again().tolist() == [0.0, 1.0, 2.0]
    assert _copy_of("text").again() == "text"
    assert _copy_of(jnp.tanh).again() is jnp.tanh


def test_a_copy_of_a_large_donated_array_is_whole() -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(2_000_000)
    kept = []
    for _ in range(5):
        kept.append(_copy_of(x))
        x = add(x)
    ends = [(float(back.min()), float(back.max())) for back in (copy.again() for copy in kept)]
    assert ends == [(float(n), float(n)) for n in range(5)]
    # A step may be given what came back, and write over it.
    add(kept[0].again())
    assert float(kept[0].again().max()) == 0.0


@pytest.mark.parametrize("step", [train_step, donating_step])
def test_snapshots_rewinds_and_easings_compile_nothing(step: Any) -> None:
    run(25, step=step)
    compiled = step._cache_size()
    policy = dataclasses.replace(POLICY, responses=(Response(rate=0.5, clip=1.0, steps=5),))
    recovery = run(step=step, policy=policy, hurt=once(33, put(("params", "last"), float("nan"))))
    assert len(recovery.events) == 1
    assert step._cache_size() == compiled == 1


@pytest.mark.parametrize("has_host_memory", [True, False])
def test_a_copy_does_not_wait_for_the_step(has_host_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_host_memory:
        monkeypatch.setattr(copies, "_has_host_memory", lambda array: False)

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), x)

    x = jnp.eye(400)
    done = _copy_of(step(x)).again()  # now all of it is compiled
    result = step(x)
    copy = _copy_of(result)
    assert not result.is_ready()
    assert same(copy.again(), done)


# --- states ------------------------------------------------------------------------------------


def test_objects_of_nnx_are_put_back_in_place() -> None:
    from flax import nnx

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = {"model": model, "more": [jnp.ones(2), None], "again": model, "rngs": nnx.Rngs(1)}
    kernel, key = np.asarray(model.kernel[...]), state["rngs"].default.count[...]
    leaves, structure = flattened(state)
    held = copies_of(leaves)
    model.kernel[...] = model.kernel[...] + 1
    state["rngs"]()
    after = put_back({**state, "more": [jnp.zeros(2), None]}, [copy.again() for copy in held], structure)
    assert after["model"] is after["again"] is model
    assert after["rngs"] is state["rngs"]
    np.testing.assert_array_equal(model.kernel[...], kernel)
    assert state["rngs"].default.count[...] == key
    assert after["more"][0].tolist() == [1.0, 1.0]
    assert after["more"][1] is None


def test_nodes_in_objects_of_nnx_are_replaced_in_place() -> None:
    from flax import nnx

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = replaced((model, {"a": 1.0}), lambda leaf: leaf * 0 + 5, lambda leaf: hasattr(leaf, "ndim"))
    assert state[0] is model
    assert float(model.kernel[...].min()) == 5.0
    assert state[1] == {"a": 1.0}


def test_generators_of_the_process_are_put_back() -> None:
    generators = ProcessGenerators()
    states = generators.read()
    drawn = random.random(), np.random.rand()
    generators.write(states)
    assert (random.random(), np.random.rand()) == drawn


def test_generators_of_torch_are_put_back_where_it_is_loaded() -> None:
    torch = pytest.importorskip("torch")
    generators = ProcessGenerators()
    states = generators.read()
    drawn = torch.rand(3)
    generators.write(states)
    assert torch.equal(torch.rand(3), drawn)
