"""Leaves that are sharded differently, inside shard_map and on meshes with explicit axes."""

from __future__ import annotations

import pytest

from tests.jax.helpers import run_on_four_devices
from tests.selection import only

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax, stablenum, stablenum_jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
"""


@pytest.mark.parametrize(
    "rules", only(["{'loss_scale': scale}"], ["{}", "{'loss_scale': scale}"]), ids=["no rule", "loss scale"]
)
def test_leaves_that_do_not_vary_over_the_axis_count_once(rules: str) -> None:
    run_on_four_devices(
        SCRIPT
        + """
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
spec = {"both": P(("x", "y")), "x": P("x"), "copied": P()}
params = {name: jnp.ones(n) for name, n in (("both", 4), ("x", 4), ("copied", 7))}
grads = {"both": jnp.ones(4), "x": jnp.ones(4), "copied": jnp.full(7, 2.0)}
scale = stablenum.UnderflowAwareLossScale(init_scale=1.0)
for checked, norm in ((True, 6.0), (False, (4 + 2 * 4 + 4 * 28) ** 0.5)):
    tx = optax.chain(stablenum_jax.guard(axis_name=("x", "y"), **RULES), optax.sgd(0.1))
    step = jax.shard_map(
        lambda p, s, g: stablenum_jax.step(tx, p, s, g),
        mesh=mesh, in_specs=(spec, P(), spec), out_specs=(spec, P()), check_vma=checked,
    )
    _, opt_state = jax.jit(step)(params, tx.init(params), grads)
    np.testing.assert_allclose(stablenum_jax.metrics(opt_state)["grad_norm"], norm, rtol=1e-6)
""".replace("RULES", rules)
    )


SOME = 'P("d", None), P("d", "e")'
ALL = f'{SOME}, P(None, "d"), P(None, ("d", "e")), P(None, None)'


@pytest.mark.parametrize("specs", only([SOME], [SOME, ALL]), ids=["two", "all"])
def test_units_are_clipped_alike_however_gradients_are_sharded(specs: str) -> None:
    run_on_four_devices(
        SCRIPT
        + """
mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
tx = optax.chain(stablenum_jax.guard(clip=stablenum.AdaptiveGradClip()), optax.sgd(0.1))
step = jax.jit(lambda p, s, g: stablenum_jax.step(tx, p, s, g))
plain = {"w": jnp.ones((4, 8))}
for size in (1.0, 1e25):
    grads = {"w": size * jnp.arange(1.0, 33.0).reshape(4, 8)}
    expected, _ = step(plain, tx.init(plain), grads)
    with jax.set_mesh(mesh):
        for spec in (SPECS):
            place = lambda tree: jax.device_put(tree, NamedSharding(mesh, spec))
            params = place(plain)
            after, _ = step(params, tx.init(params), place(grads))
            np.testing.assert_allclose(after["w"], expected["w"], rtol=1e-6)
""".replace("SPECS", specs)
    )
