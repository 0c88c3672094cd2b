"""Two ways of computing one program within a framework: formats, kernels and compilers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import stablenum_jax
import stablenum_torch
from tests.pairs.real.formulas import X, Y, start
from tests.pairs.real.layers import Pair, drawn, named

HEADS = drawn(3, 3, 2, 4, 8)  # query, key and value: batch, heads, length, width


def torch_model(*, compute: torch.dtype | None = None, compiled: bool = False) -> Any:
    """Return two linear layers and a norm, in autocast or compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    run: Any = torch.compile(model, backend="aot_eager") if compiled else model
    x, y = torch.from_numpy(X), torch.from_numpy(Y)

    def loss_fn(x: Any, y: Any) -> Any:
        return (run(x).float() - y).square().mean()

    return stablenum_torch.program(loss_fn, x, y, model=model, compute=compute)


def jax_model(*, compute: Any = None, jit: bool = False) -> Any:
    """Return the same in JAX."""

    def loss_fn(p: dict[str, Any], x: Any, y: Any) -> Any:
        h = jax.nn.standardize(x @ p["hidden"] + p["bias"], epsilon=1e-5) * p["scale"] + p["shift"]
        out = jnp.tanh(h) @ p["out"] + p["out_bias"]
        return jnp.square(out.astype(jnp.float32) - y.astype(jnp.float32)).mean()

    params = {name: jnp.asarray(x, jnp.float32) for name, x in start().items()}
    run = jax.jit(loss_fn) if jit else loss_fn
    return stablenum_jax.program(run, params, jnp.asarray(X), jnp.asarray(Y), compute=compute)


def torch_attention(backend: SDPBackend, *, causal: bool = True) -> Any:
    """Return scaled_dot_product_attention by one of its implementations."""
    query, key, value = (torch.tensor(x, requires_grad=True) for x in HEADS)

    def loss_fn(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return (out * torch.from_numpy(drawn(*out.shape))).square().mean()

    return stablenum_torch.program(loss_fn, query, key, value)


def jax_attention(*, by_hand: bool) -> Any:
    """Return dot_product_attention by XLA, or written out."""
    inputs = {name: jnp.asarray(x).swapaxes(1, 2) for name, x in zip("qkv", HEADS, strict=True)}

    def written(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        scores = jnp.where(np.tril(np.ones((4, 4), bool)), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    def given(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    def loss_fn(p: dict[str, Any]) -> Any:
        out = (written if by_hand else given)(p["q"], p["k"], p["v"]).swapaxes(1, 2)
        return jnp.square(out * drawn(*out.shape)).mean()

    return stablenum_jax.program(loss_fn, inputs)


PAIRS: dict[str, Pair] = {
    "autocast": Pair(torch_model, lambda: torch_model(compute=torch.bfloat16)),
    "torch.compile": Pair(torch_model, lambda: torch_model(compiled=True)),
    "attention, math and flash": Pair(
        lambda: torch_attention(SDPBackend.MATH), lambda: torch_attention(SDPBackend.FLASH_ATTENTION)
    ),
    "compute": Pair(jax_model, lambda: jax_model(compute=jnp.bfloat16)),
    "jit": Pair(jax_model, lambda: jax_model(jit=True)),
    "dot_product_attention": Pair(lambda: jax_attention(by_hand=True), lambda: jax_attention(by_hand=False)),
    "torch and jax attention": Pair(
        lambda: torch_attention(SDPBackend.MATH),
        lambda: jax_attention(by_hand=False),
        shortfall="the query is given the name of the key",
    ),
    "torch and jax attention, weights given": Pair(
        lambda: torch_attention(SDPBackend.MATH),
        lambda: jax_attention(by_hand=False),
        weights=lambda left: {named(name): left[name].swapaxes(1, 2) for name in "qkv"},
    ),
}
