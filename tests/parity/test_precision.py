"""The same policy gives the same dtypes at the same places in torch, flax linen, nnx and equinox."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum_jax._precision.escalate import computing_in
from tests.parity.precision_models import (
    LENGTH,
    SEEN,
    WORDS,
    EqxTransformer,
    LinenNormed,
    LinenTransformer,
    NnxNormed,
    NnxTransformer,
    TorchNormed,
    TorchTransformer,
)
from tests.selection import REPEATS

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
    cast = stablenum_jax.policy.as_policy(policy).cast_to_param
    model = nnx.eval_shape(lambda: cast(NnxTransformer()))

    def total(model):
        out = stablenum_jax.precision(model, policy)(TOKENS)
        return out.astype(jnp.float32).sum(), out

    grads, out = nnx.eval_shape(nnx.grad(total, has_aux=True), model)
    return name(out.dtype), dtypes(nnx.state(model, nnx.Param)), dtypes(grads)


def of_equinox(policy) -> tuple[str, set[str], set[str]]:
    cast = stablenum_jax.policy.as_policy(policy).cast_to_param
    model = eqx.filter_eval_shape(lambda: cast(EqxTransformer()))

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
        # A linen list of modules names them blocks_0, blocks_1, ...
        found, dtypes_there = seen_by(run, policy)
        assert dtypes_there == places, run.__name__
        assert found == kinds, run.__name__


def test_the_islands_policy_computes_in_these_dtypes() -> None:
    _, places = seen_by(of_torch, POLICIES["islands"])
    assert places["embed"] == places["blocks.0.attn.out"] == "bfloat16"
    assert places["blocks.1.norm1"] == places["norm"] == "float32"
    assert places["head"] == "bfloat16"  # only the whole model's output is float32
    assert places["blocks.0.mlp.up"] == "float16"


def test_a_rule_that_matches_nothing_is_rejected() -> None:
    policy = stablenum.Policy(rules={"*conv*": "f32"})
    for run in (of_torch, of_linen, of_nnx, of_equinox):
        with pytest.raises(ValueError, match="patterns that match a module of the model"):
            run(policy)


X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
NORMED = {
    "float32": stablenum.Policy(),
    "mixed": stablenum.Policy.parse("p=f32,c=bf16,o=f32"),
    "float16": stablenum.Policy.parse("p=f32,c=f16"),
    "narrow": stablenum.Policy.parse("bf16"),
    "island": stablenum.Policy.parse("p=f32,c=bf16", rules={"norm": "c=f32,o=bf16"}),
}


def normed_in_torch(policy) -> tuple[str, set[str], set[str]]:
    model = TorchNormed()
    stablenum_torch.precision(model, policy)
    out = model(torch.from_numpy(X))
    assert model.norm.running_var.min() < 1
    kept = {model.norm.running_mean.dtype, model.norm.running_var.dtype}
    return name(out.dtype), {name(p.dtype) for p in model.parameters()}, {name(dtype) for dtype in kept}


def normed_in_linen(policy) -> tuple[str, set[str], set[str]]:
    call = stablenum_jax.precision(LinenNormed(), policy)
    variables = call.init(jax.random.key(0), X)
    out, after = call(variables, X, mutable=["batch_stats"])
    assert after["batch_stats"]["norm"]["var"].min() < 1
    return name(out.dtype), dtypes(variables["params"]), dtypes(after)


def normed_in_nnx(policy) -> tuple[str, set[str], set[str]]:
    model = NnxNormed()
    # The casts apply to a whole tree: on a whole model they would cast the statistics too.
    nnx.update(model, stablenum_jax.policy.as_policy(policy).cast_to_param(nnx.state(model, nnx.Param)))
    out = stablenum_jax.precision(model, policy)(X)
    assert model.norm.var[...].min() < 1
    return name(out.dtype), dtypes(nnx.state(model, nnx.Param)), dtypes(nnx.state(model, nnx.BatchStat))


@pytest.mark.parametrize("policy", NORMED.values(), ids=list(NORMED))
def test_a_batch_norm_outputs_the_same_dtypes_and_keeps_its_statistics(policy: stablenum.Policy) -> None:
    found, places = seen_by(normed_in_torch, policy)
    assert set(places) == {"up", "norm", "head"}
    assert found[2] == {"float32"}
    for run in (normed_in_linen, normed_in_nnx):
        assert seen_by(run, policy) == (found, places), run.__name__


LADDERS = {
    "mixed": (POLICIES["mixed"], ("bfloat16", "float32")),
    "float16": (POLICIES["float16"], ("float16", "float32")),
    "islands": (POLICIES["islands"], ("bfloat16", "float32")),
    "an island's output": (POLICIES["an island's output"], ("bfloat16", "float32")),
    "float64": (POLICIES["float16"], ("float16", "bfloat16", "float32")),
}


@pytest.mark.parametrize(
    ("policy", "ladder"),
    [
        pytest.param(*row, id=name, marks=[] if name == "float16" else REPEATS)
        for name, row in LADDERS.items()
    ],
)
def test_an_escalation_widens_the_same_places(policy: stablenum.Policy, ladder: tuple[str, ...]) -> None:
    """After repeated skips, every place computes in the same dtype in both frameworks, at every level."""
    rule = stablenum.EscalatePrecision(after=1, for_steps=1, formats=ladder)
    model = TorchTransformer()
    handle = stablenum_torch.precision(model, policy)
    opt = stablenum_torch.wrap(torch.optim.SGD(model.parameters(), lr=0.1), escalate=rule)
    variables = stablenum_jax.precision(LinenTransformer(), policy).init(jax.random.key(0), TOKENS)
    tx = stablenum_jax.chain(stablenum_jax.guard(escalate=rule), optax.sgd(0.1))
    state = tx.init(variables)
    seen = []
    for level in range(len(ladder)):
        SEEN.clear()
        with opt.autocast(policy=handle):
            loss = model(torch.from_numpy(TOKENS)).float().sum()
        places = dict(SEEN)
        assert opt.history()[-1]["precision_level"] == level - 1 if level else not opt.history()
        assert int(stablenum_jax.guard_state(state).escalation.level) == level
        with computing_in(ladder[level] if level else None):
            for run in (of_linen, of_nnx, of_equinox):
                assert seen_by(run, policy)[1] == places, run.__name__
        seen.append(places)
        opt.zero_grad()
        opt.backward(loss * torch.inf)
        opt.step()
        bad = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.inf), variables)
        _, state = stablenum_jax.step(tx, variables, state, bad)
    assert len({str(places) for places in seen}) == len(ladder)
    assert set(seen[-1].values()) == {ladder[-1]}
