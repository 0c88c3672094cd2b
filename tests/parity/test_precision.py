"""The same policy gives the same dtypes at the same places in torch, flax linen, nnx and equinox."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import stablenum
import stablenum_jax
import stablenum_torch
from tests.parity.precision_models import (
    LENGTH,
    SEEN,
    WORDS,
    EqxTransformer,
    LinenTransformer,
    NnxTransformer,
    TorchTransformer,
)

TOKENS = np.arange(2 * LENGTH).reshape(2, LENGTH) % WORDS

POLICIES = {
    "float32": stablenum.Policy(),
    "bfloat16": stablenum.Policy.parse("bf16"),
    "mixed": stablenum.Policy.parse("p=f32,c=bf16,o=f32"),
    "float16": stablenum.Policy.parse("p=f32,c=f16"),
    "islands": stablenum.Policy.parse("p=f32,c=bf16,o=f32", rules={"*norm*": "f32", "*mlp*": "c=f16"}),
    "an island's output": stablenum.Policy.parse(
        "p=f32,c=bf16", rules={"*norm*": "c=f32,o=bf16", "*attn*": "f32", "head": "params=bf16,compute=f32"}
    ),
}


def name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def of_torch(policy) -> tuple[str, set[str], set[str]]:
    model = TorchTransformer()
    stablenum_torch.precision(model, policy)
    out = model(torch.from_numpy(TOKENS))
    out.float().sum().backward()
    params = list(model.parameters())
    return name(out.dtype), {name(p.dtype) for p in params}, {name(p.grad.dtype) for p in params}


def dtypes(tree) -> set[str]:
    found = [leaf.dtype for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return {name(dtype) for dtype in found if jnp.issubdtype(dtype, jnp.inexact)}


def of_linen(policy) -> tuple[str, set[str], set[str]]:
    call = stablenum_jax.precision(LinenTransformer(), policy)
    variables = jax.eval_shape(call.init, jax.random.key(0), TOKENS)
    SEEN.clear()

    def total(variables):
        out = call(variables, TOKENS)
        return out.astype(jnp.float32).sum(), out

    grads, out = jax.eval_shape(jax.grad(total, has_aux=True), variables)
    return name(out.dtype), dtypes(variables), dtypes(grads)


def of_nnx(policy) -> tuple[str, set[str], set[str]]:
    model = stablenum_jax.as_policy(policy).cast_to_param(NnxTransformer())

    def total(model):
        out = stablenum_jax.precision(model, policy)(TOKENS)
        return out.astype(jnp.float32).sum(), out

    grads, out = nnx.eval_shape(nnx.grad(total, has_aux=True), model)
    return name(out.dtype), dtypes(nnx.state(model, nnx.Param)), dtypes(grads)


def of_equinox(policy) -> tuple[str, set[str], set[str]]:
    model = stablenum_jax.as_policy(policy).cast_to_param(EqxTransformer())

    def total(model):
        out = stablenum_jax.precision(model, policy)(TOKENS)
        return out.astype(jnp.float32).sum(), out

    grads, out = eqx.filter_eval_shape(eqx.filter_grad(total, has_aux=True), model)
    return name(out.dtype), dtypes(model), dtypes(grads)


def seen_by(run, policy):
    SEEN.clear()
    found = run(policy)
    return found, dict(SEEN)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_the_same_dtypes_at_the_same_places(policy: stablenum.Policy) -> None:
    kinds, places = seen_by(of_torch, policy)
    assert len(places) > 20
    for run in (of_linen, of_nnx, of_equinox):
        # What a linen list of modules is called: blocks_0.
        found, dtypes_there = seen_by(run, policy)
        assert dtypes_there == places, run.__name__
        assert found == kinds, run.__name__


def test_what_the_islands_are() -> None:
    _, places = seen_by(of_torch, POLICIES["islands"])
    assert places["embed"] == places["blocks.0.attn.out"] == "bfloat16"
    assert places["blocks.1.norm1"] == places["norm"] == "float32"
    assert places["head"] == "bfloat16"  # float32 is what comes out of the whole
    assert places["blocks.0.mlp.up"] == "float16"


def test_a_rule_about_nothing_is_refused() -> None:
    policy = stablenum.Policy(rules={"*conv*": "f32"})
    for run in (of_torch, of_linen, of_nnx, of_equinox):
        with pytest.raises(ValueError, match="patterns that match a module of the model"):
            run(policy)
