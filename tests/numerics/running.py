"""A function of either adapter, eager or compiled: values and gradients as float64 NumPy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import stablenum_jax.numerics
import stablenum_torch.numerics

BACKENDS = ("torch", "torch-compiled", "jax", "jax-jit")
Results = tuple[np.ndarray, list[np.ndarray]]


def call(
    backend: str,
    function: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    dtype: str,
    weights: np.ndarray | None = None,
) -> Results:
    """``function`` of the arrays, and the gradient of its sum (with ``weights``) in each of them."""
    run = _torch if backend.startswith("torch") else _jax
    return run(function, arrays, dtype, weights, compiled=backend in ("torch-compiled", "jax-jit"))


def ours(backend: str, name: str, **options: Any) -> Callable[..., Any]:
    """The adapter's function, with options in JAX's spelling."""
    if backend.startswith("jax"):
        return functools.partial(getattr(stablenum_jax.numerics, name), **options)
    spelled = {{"axis": "dim", "keepdims": "keepdim"}.get(key, key): value for key, value in options.items()}
    if "mask" in spelled:
        spelled["mask"] = torch.from_numpy(np.asarray(spelled["mask"]))
    return functools.partial(getattr(stablenum_torch.numerics, name), **spelled)


def _torch(function: Any, arrays: Any, dtype: str, weights: Any, *, compiled: bool) -> Results:
    tensors = [torch.from_numpy(np.array(a)).to(getattr(torch, dtype)).requires_grad_() for a in arrays]

    def run(*values: torch.Tensor) -> torch.Tensor:
        return function(*values)

    if compiled:
        torch.compiler.reset()  # each function is compiled from nothing, not counted as a recompilation
        run = torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager")
    result = run(*tensors)
    assert result.dtype == tensors[0].dtype
    cotangent = torch.ones_like(result) if weights is None else torch.from_numpy(weights).to(result.dtype)
    slopes = torch.autograd.grad(result, tensors, cotangent)
    return result.detach().double().numpy(), [s.double().numpy() for s in slopes]


def _jax(function: Any, arrays: Any, dtype: str, weights: Any, *, compiled: bool) -> Results:
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        values = [jnp.asarray(_in(a, dtype)) for a in arrays]

        def both(*inputs: Any) -> Any:
            result, pull = jax.vjp(function, *inputs)
            assert result.dtype == inputs[0].dtype
            return result, pull(
                jnp.ones_like(result) if weights is None else jnp.asarray(_in(weights, dtype))
            )

        result, slopes = (jax.jit(both) if compiled else both)(*values)
        return np.asarray(result).astype(np.float64), [np.asarray(s).astype(np.float64) for s in slopes]


def curvatures(
    backend: str, function: Callable[..., Any], arrays: Sequence[np.ndarray], dtype: str
) -> list[np.ndarray]:
    """All second derivatives: the gradient of each gradient's sum with respect to every array."""
    if backend == "torch":
        tensors = [torch.from_numpy(np.array(a)).to(getattr(torch, dtype)).requires_grad_() for a in arrays]
        slopes = torch.autograd.grad(function(*tensors).sum(), tensors, create_graph=True)
        found = []
        for slope in slopes:
            known = slope.requires_grad  # the gradient of a linear function is a constant
            again = torch.autograd.grad(slope.sum(), tensors, retain_graph=True, materialize_grads=True)
            found += again if known else [torch.zeros_like(t) for t in tensors]
        return [c.double().numpy() for c in found]
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        values = [jnp.asarray(_in(a, dtype)) for a in arrays]
        places = tuple(range(len(values)))

        def total(*inputs: Any) -> Any:
            return function(*inputs).sum()

        def all_of_them(*inputs: Any) -> Any:
            slopes = [lambda *a, i=i: jax.grad(total, argnums=i)(*a).sum() for i in places]
            return [c for slope in slopes for c in jax.grad(slope, argnums=places)(*inputs)]

        return [np.asarray(c).astype(np.float64) for c in jax.jit(all_of_them)(*values)]


def _in(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(array).astype(jnp.dtype(dtype))
