"""Clip rules one behind another, decided by four devices. ``test_joined_rules.py`` runs this with them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import stablenum
import stablenum_jax

STEPS = 4
SPECS = {"copied": P(), "rows": P("devices"), "vector": P("devices")}
RULES: dict[str, tuple[Any, ...]] = {
    "ClipByNorm, then the joint norm": (stablenum.ClipByNorm(1.0), stablenum.ClipByGlobalNorm(0.5)),
    "AdaGC, then the joint norm": (
        stablenum.AdaGC(max_norm=0.5, warmup_steps=1),
        stablenum.ClipByGlobalNorm(0.3),
    ),
    "ClipByNorm, then ZClip": (stablenum.ClipByNorm(1.0), stablenum.ZClip(warmup_steps=2)),
    "three rules": (2.0, stablenum.ClipByNorm(1.0), stablenum.ClipByGlobalNorm(0.5)),
}


def gradients(step: int) -> dict[str, jax.Array]:
    """Gradients of which each device has another part, of another size."""
    rng = np.random.default_rng(step)
    sizes = 10.0 ** np.arange(4)
    made = {
        "copied": rng.normal(size=(3, 2)),
        "rows": rng.normal(size=(8, 5)) * np.repeat(sizes, 2)[:, None],
        "vector": rng.normal(size=(4,)) / sizes,
    }
    return {name: jnp.asarray(g * 3.0**step, jnp.float32) for name, g in made.items()}


def trained(rules: tuple[Any, ...], **over: Any) -> list[dict[str, np.ndarray]]:
    """What each step subtracts from the parameters: in one process, or with ``mesh=`` on its devices."""
    mesh = over.pop("mesh", None)
    guard = stablenum_jax.guard(clip=rules, axis_name=None if mesh is None else "devices")
    tx = optax.chain(guard, optax.sgd(1.0))
    params = jax.tree.map(jnp.zeros_like, gradients(0))
    state, found = tx.init(params), []

    def step(params: Any, state: Any, grads: Any) -> Any:
        return stablenum_jax.step(tx, params, state, grads)

    if mesh is not None:
        specs = jax.tree.map(lambda _: P(), state)
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(SPECS, specs, SPECS), out_specs=(SPECS, specs), **over
        )
    step = jax.jit(step)
    for i in range(STEPS):
        after, state = step(params, state, gradients(i))
        found.append({name: np.asarray(params[name] - after[name]) for name in params})
        params = after
    return found


@pytest.mark.parametrize("rules", RULES)
def test_all_devices_clip_as_one_process_with_the_whole_gradients(rules: str) -> None:
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    alone, together = trained(RULES[rules]), trained(RULES[rules], mesh=mesh)
    for one, other in zip(alone, together, strict=True):
        for name, expected in one.items():
            np.testing.assert_allclose(other[name], expected, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("rules", RULES)
def test_the_rules_matter(rules: str) -> None:
    """Otherwise the test above could not fail."""
    first = trained(RULES[rules])[-1]
    without = trained(RULES[rules][:-1])[-1]
    assert not np.allclose(first["rows"], without["rows"], rtol=1e-2) or rules == "ClipByNorm, then ZClip"


@pytest.mark.parametrize("rules", RULES)
def test_a_leaf_of_which_each_device_has_a_parameter_of_its_own_has_one_factor(rules: str) -> None:
    """As in the stages of a pipeline: no device clips its part by its own norm."""
    guard = stablenum_jax.guard(clip=RULES[rules], axis_name="devices")
    tx = optax.chain(guard, optax.sgd(1.0))

    def factor(grad: jax.Array) -> jax.Array:
        params = {"stage": jnp.zeros_like(grad)}
        state = tx.init(params)
        for _ in range(2):
            before = params["stage"]
            params, state = stablenum_jax.step(tx, params, state, {"stage": grad})
        return (before - params["stage"]) / grad

    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    by_device = P("devices")
    mapped = jax.shard_map(factor, mesh=mesh, in_specs=by_device, out_specs=by_device, check_vma=False)
    factors = np.asarray(jax.jit(mapped)(10.0 ** jnp.arange(4.0)))
    np.testing.assert_allclose(factors, factors[0], rtol=1e-6)
    assert factors[0] < 0.1
