"""``precision`` in models: 8-bit layers, statistics that are written back, compiled modules, escalation."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stablenum_jax
from stablenum import EscalatePrecision
from stablenum_jax import precision
from stablenum_jax._trees.leaves import FP8_STATISTICS


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Dense(16, name="first")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dense(4, name="last")(nn.relu(x))


class Coder(nn.Module):
    def setup(self) -> None:
        self.encoder = nn.Dense(2)

    def encode(self, x):
        return self.encoder(x)


def test_linen_layers_in_8_bits_train_under_a_guard() -> None:
    policy = stablenum_jax.policy.get_policy("c=fp8", rules={"norm": "f32", "last": "c=bf16"})
    call = precision(Net(), policy)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    variables = call.init(jax.random.key(0), x)
    assert list(variables[FP8_STATISTICS]) == ["first"]
    statistics = variables.pop("batch_stats")

    def loss(variables, x):
        out, _ = call({**variables, "batch_stats": statistics}, x, mutable=["batch_stats"])
        assert out.dtype == jnp.bfloat16
        return (out.astype(jnp.float32) ** 2).mean()

    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    opt_state = tx.init(variables["params"])
    exact, grads = jax.value_and_grad(
        lambda p: (
            Net().apply({"params": p, "batch_stats": statistics}, x, mutable=["batch_stats"])[0] ** 2
        ).mean()
    )(variables["params"])

    @jax.jit
    def train(variables, opt_state, x):
        value, grads = stablenum_jax.value_and_grad(loss, opt_state)(variables, x)
        return *stablenum_jax.step(tx, variables, opt_state, grads, value=value), value, grads

    after, opt_state, value, ours = train(variables, opt_state, x)
    assert float(value) == pytest.approx(float(exact), rel=0.1)
    a, b = ours["params"]["first"]["kernel"], grads["first"]["kernel"]
    assert float(jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b)) > 0.95
    assert (after[FP8_STATISTICS]["first"]["fp8"].forward.scale != 1).all()
    held, opt_state, *_ = train(after, opt_state, x.at[0, 0].set(jnp.inf))
    for kept, before in zip(jax.tree.leaves(held), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(kept, before)

    del variables[FP8_STATISTICS]
    with pytest.raises(ValueError, match="states of 8-bit products"):
        call({**variables, "batch_stats": statistics}, x, mutable=["batch_stats"])


def test_linen_statistics_stay_wide_and_methods_can_be_named() -> None:
    call = precision(Net(), "p=f32,c=bf16,o=f32")
    x = jnp.ones((4, 16))
    variables = call.init(jax.random.key(0), x)
    out, after = call(variables, x, mutable=["batch_stats"])
    assert out.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after)} == {"float32"}
    coder = precision(Coder(), "p=f32,c=bf16,o=f32")
    encoder = coder.init(jax.random.key(0), x, method="encode")
    for method in ("encode", Coder.encode):
        out = coder(encoder, jnp.full_like(x, 1 + 2.0**-10), method=method)
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(out, coder(encoder, x, method=method))  # the input was rounded


class NnxNet(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(nnx.jit(lambda dense, x: dense(x))(self.dense, x)))


def test_nnx_writes_statistics_back_and_works_under_nnx_jit() -> None:
    model, plain = NnxNet(), NnxNet()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
    call = precision(model, stablenum_jax.policy.get_policy("p=f32,c=bf16,o=f32", rules={"norm": "f32"}))
    outputs = [call(x) for _ in range(2)]
    expected = [plain(x) for _ in range(2)]
    assert outputs[0].dtype == jnp.float32
    assert (outputs[0] != outputs[1]).any(), "dropout drew the same bits again"
    np.testing.assert_allclose(outputs[1], expected[1], atol=0.05)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=1e-2)
    assert model.norm.mean.dtype == jnp.float32
    assert type(model.dense) is nnx.Linear
    assert model.dense.kernel.dtype == jnp.float32


def test_equinox_under_filter_jit_and_vmap() -> None:
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    call = precision(model, stablenum_jax.policy.get_policy("p=f32,c=bf16,o=f32", rules={"layers.1": "f32"}))
    out = eqx.filter_jit(jax.vmap(call))(jnp.ones((3, 2)))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, jax.vmap(model)(jnp.ones((3, 2))), atol=0.05)


def test_8_bits_elsewhere_are_rejected() -> None:
    with pytest.raises(ValueError, match="of 16 bits and more in nnx and equinox"):
        precision(eqx.nn.Linear(2, 2, key=jax.random.key(0)), "c=fp8")(jnp.ones(2))
    with pytest.raises(ValueError, match="of 16 bits and more in nnx and equinox"):
        precision(NnxNet(), "c=fp8")(jnp.ones((1, 4)))
    with pytest.raises(TypeError, match="model must be a flax or equinox module"):
        precision(3, "c=bf16")


def test_an_escalation_reaches_the_modules() -> None:
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)
    tx = optax.chain(stablenum_jax.guard(escalate=EscalatePrecision(after=1, for_steps=2)), optax.sgd(0.1))
    policy = stablenum_jax.policy.as_policy("p=f32,c=f16,o=f32")

    def loss(arrays, x):
        return precision(eqx.combine(arrays, rest), policy)(x).sum() / 1e5

    @jax.jit
    def train(arrays, opt_state, x):
        value, grads = stablenum_jax.value_and_grad(loss, opt_state, policy=policy)(arrays, x)
        return *stablenum_jax.step(tx, arrays, opt_state, grads, value=value), value

    opt_state, seen = tx.init(arrays), []
    for size in (1.0, 1e5, 1e5, 1e5, 1.0):
        arrays, opt_state, value = train(arrays, opt_state, jnp.full(2, size))
        seen.append(bool(jnp.isfinite(value)))
    assert seen == [True, False, True, True, True]
    levels = [row["precision_level"] for row in stablenum_jax.history(opt_state)]
    assert levels == [0, 0, 1, 1, 0]


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4, name="dense")
        return dense(dense(x))


def test_one_layer_in_two_8_bit_products_is_rejected() -> None:
    x = jnp.ones((2, 4))
    call = precision(Twice(), "c=fp8")
    variables = call.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"only one 8-bit product in a call; dense computes two"):
        call(variables, x)
    call = precision(Twice(), stablenum_jax.policy.get_policy("c=fp8", rules={"dense": "bf16"}))
    assert call(call.init(jax.random.key(0), x), x).dtype == jnp.bfloat16


def test_8_bit_layers_inside_a_lifted_loop_are_named() -> None:
    x = jnp.ones((1, 2, 4))
    call = precision(nn.RNN(nn.SimpleCell(4)), "c=fp8")
    with pytest.raises(ValueError, match=r"nn\.RNN or nn\.scan"):
        call(call.init(jax.random.key(0), x), x)


def test_a_rule_that_matches_no_argument_of_a_function_is_rejected() -> None:
    params = {"norm": {"scale": jnp.ones(2)}}

    def fun(params, x):
        return params["norm"]["scale"] * x

    with pytest.raises(ValueError, match=r"patterns that match a module of the model; got '\*nrom\*'"):
        precision(fun, stablenum_jax.policy.get_policy("c=bf16", rules={"*nrom*": "f32"}))(
            params, jnp.ones(2)
        )
    call = precision(fun, stablenum_jax.policy.get_policy("c=bf16", rules={"norm": "f32"}))
    assert call(params, x=jnp.ones(2)).dtype == jnp.bfloat16
    linen = precision(lambda variables: fun(variables["params"], 1.0), call.args[1])
    assert linen({"params": params}).dtype == jnp.bfloat16
