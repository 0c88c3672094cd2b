"""What a guard keeps in the optimizer's state, packed into few arrays and unpacked again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stablenum
from stablenum_jax.typing import GuardOptState

CONFIGS = {
    "nothing": stablenum.GuardConfig(),
    "everything": stablenum.GuardConfig(
        clip=(stablenum.ClipByGlobalNorm(1.0), stablenum.ZClip()),
        loss_scale=stablenum.LogMaxLossScale(),
        spike="skip",
    ),
}


def numbered(config: stablenum.GuardConfig, shape: tuple[int, ...] = ()) -> stablenum.GuardState:
    """A state in which no two numbers are the same."""
    leaves, structure = jax.tree.flatten(stablenum.init_guard(config, 3, xp=jnp))
    found, first = [], 1
    for leaf in leaves:
        count = int(np.prod(shape + leaf.shape))
        found.append(jnp.arange(first, first + count).reshape(shape + leaf.shape).astype(leaf.dtype))
        first += count
    return jax.tree.unflatten(structure, found)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("how", ["eager", "jit", "numpy"])
def test_what_is_packed_is_unpacked(name: str, shape: tuple[int, ...], how: str) -> None:
    guard = numbered(CONFIGS[name], shape)
    names_id, bad = jnp.full(shape, -7, jnp.int32), jnp.zeros((*shape, 3), bool)

    state: Any = (jax.jit(GuardOptState.of) if how == "jit" else GuardOptState.of)(guard, names_id, bad)
    if how == "numpy":
        state = jax.tree.map(np.asarray, state)

    assert state.runs == shape
    assert (np.asarray(state.names_id) == -7).all()
    assert jax.tree.structure(state.guard) == jax.tree.structure(guard)
    jax.tree.map(np.testing.assert_array_equal, state.guard, guard)
    jax.tree.map(np.testing.assert_array_equal, state.with_guard(guard), state)


def test_the_shapes_of_a_state_have_the_shapes_of_its_parts() -> None:
    guard = numbered(CONFIGS["everything"])

    state = jax.eval_shape(GuardOptState.of, guard, jnp.int32(1), jnp.zeros(3, bool))

    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state.guard, guard))
    assert shapes[0] == shapes[1]
