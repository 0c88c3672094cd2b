"""Casts of every kind of tree: the structure stays, and only floating-point arrays change."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import flax.core
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import stablenum_jax
from stablenum_jax._precision.casts import cast_floating
from stablenum_jax._trees.leaves import FP8_STATISTICS
from stablenum_jax.policy import get_policy


class Pair(NamedTuple):
    w: Any
    n: Any


@flax.struct.dataclass
class Struct:
    w: Any
    n: int = flax.struct.field(pytree_node=False, default=3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    name: str = dataclasses.field(metadata={"static": True}, default="a")


def weights() -> jax.Array:
    # Numbers that both float16 and bfloat16 represent, so that a round trip is exact.
    return jnp.asarray([1.0, -0.5, 3.0, 0.0])


def trees() -> dict[str, Any]:
    params = {"dense": {"kernel": weights(), "bias": weights()}}
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return {
        "dict": params,
        "ordered": collections.OrderedDict(b=weights(), a=weights()),
        "frozen": flax.core.freeze(params),
        "named tuple": Pair(weights(), 3),
        "struct": Struct(weights()),
        "dataclass": Registered(weights()),
        "list": [weights(), (weights(), None), jnp.arange(3)],
        "equinox": eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)),
        "optax": optax.chain(stablenum_jax.guard(), optax.adamw(1e-3)).init(params),
        "nnx state": nnx.state(model),
        "train state": TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3)),
        "empty": {},
        "none": None,
    }


@pytest.mark.parametrize("kind", list(trees()))
def test_structures_stay_and_casts_round_trip(kind: str) -> None:
    tree = trees()[kind]
    policy = get_policy("p=f32,c=bf16")
    there = policy.cast_to_compute(tree)
    assert jax.tree.structure(there) == jax.tree.structure(tree)
    back = policy.cast_to_param(there)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for before, during, after in zip(*map(jax.tree.leaves, (tree, there, back)), strict=True):
        if not hasattr(before, "dtype") or not jnp.issubdtype(before.dtype, jnp.floating):
            assert during is before
            continue
        assert during.dtype == jnp.bfloat16
        assert after.dtype == before.dtype
        np.testing.assert_allclose(after, before, rtol=2**-8)
        if kind in ("dict", "ordered", "frozen", "named tuple", "struct", "dataclass", "list"):
            np.testing.assert_array_equal(after, before)


def test_leaves_that_are_not_floating_point_arrays_are_unchanged() -> None:
    tree = {
        "key": jax.random.key(0),
        "raw key": jax.random.PRNGKey(0),
        "bool": jnp.asarray([True]),
        "int": jnp.arange(2),
        "complex": jnp.ones(1, jnp.complex64),
        "eight": jnp.ones(1, jnp.float8_e4m3fn),
        "float0": np.zeros(2, jax.dtypes.float0),
        "python": 1.5,
        "words": "abc",
        "thing": object(),
        "numpy ints": np.arange(2),
    }
    for name, leaf in cast_floating(tree, jnp.float16).items():
        assert leaf is tree[name], name


def test_numpy_arrays_stay_numpy_and_shapes_can_be_cast() -> None:
    tree = {
        "a": np.asarray([1e6, 1.0]),
        "s": np.float32(2.0),
        "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    cast = cast_floating(tree, jnp.float16)
    assert isinstance(cast["a"], np.ndarray)
    assert cast["a"].tolist() == [np.inf, 1.0]
    assert cast["s"].dtype == np.float16
    assert cast["shape"] == jax.ShapeDtypeStruct((2,), jnp.float16)


def test_statistics_of_8_bit_layers_are_not_cast() -> None:
    tree = {"params": {"w": jnp.ones(2)}, FP8_STATISTICS: {"scale": jnp.ones(1)}}
    cast = get_policy("c=bf16").cast_to_compute(tree)
    assert cast["params"]["w"].dtype == jnp.bfloat16
    assert cast[FP8_STATISTICS]["scale"] is tree[FP8_STATISTICS]["scale"]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="norm")(nn.Dense(4, name="dense")(x))
        return nn.BatchNorm(use_running_average=False, name="batch")(x)


def test_rules_by_path_in_linen_nnx_and_equinox() -> None:
    policy = get_policy("c=bf16", rules={"*norm*": "f32", "layers.1": "c=f16"})
    variables = Net().init(jax.random.key(0), jnp.ones((2, 4)))
    cast = policy.cast_to_compute(variables)
    assert cast["params"]["dense"]["kernel"].dtype == jnp.bfloat16
    assert cast["params"]["norm"]["scale"].dtype == jnp.float32

    mlp = policy.cast_to_compute(eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0)))
    assert [layer.weight.dtype.name for layer in mlp.layers] == ["bfloat16", "float16", "bfloat16"]

    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
            self.a = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.b = self.a

    tied = Tied()
    made = policy.cast_to_compute(tied)
    assert made.a is made.b
    assert (made.a.kernel.dtype, made.norm.scale.dtype) == (jnp.bfloat16, jnp.float32)
    assert tied.a.kernel.dtype == jnp.float32
    state = policy.cast_to_compute(nnx.state(tied))
    assert (state["a"]["kernel"].dtype, state["norm"]["scale"].dtype) == (jnp.bfloat16, jnp.float32)


def test_casts_under_jit_and_their_gradients() -> None:
    policy = get_policy("p=f32,c=bf16,o=f32")
    params = {"w": jnp.full((3,), 1.0 + 2.0**-12)}

    @jax.jit
    @jax.grad
    def loss(params):
        wide = policy.cast_to_compute(params)
        return policy.cast_to_output((wide["w"] ** 2).sum())

    grads = loss(params)
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], np.full(3, 2.0))
