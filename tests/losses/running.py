"""One loss, run in every way: the value of each item, and the gradient of their sum."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum_jax.losses
import stablenum_torch.losses
from stablenum.formats import FORMATS
from tests.selection import REPEATS, slow_unless

FORMAT_NAMES = ("float64", "float32", "bfloat16", "float16")
ROUTES = ("torch", "torch compiled", "jax jit")
# For edges, whose results do not change when PyTorch compiles.
ROUTES_AT_EDGES = ["torch", "jax jit", pytest.param("torch compiled", marks=REPEATS)]

# The formats in which each way is tested: compiling takes a second each time, whatever the format.
# (JAX without jit compiles every operation by itself; one test does that, and always compiles in torch too.)
# The slow cases that add least are left to `make test-all`.
EVERY_RUN = [(route, f) for route in ("torch", "jax jit") for f in FORMAT_NAMES] + [
    ("torch compiled", "float32")
]
RUNS = slow_unless(lambda route, form: route == "torch" or (route, form) == ("jax jit", "float32"), EVERY_RUN)

_DIM = {"axis": "dim"}


def rounded(values: Any, form: str) -> np.ndarray:
    """The numbers rounded to the format, in float64."""
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        return exact.astype(jnp.dtype(form)).astype(np.float64)


def run(
    route: str,
    name: str,
    arrays: Sequence[Any],
    form: str = "float32",
    *,
    wrt: Sequence[int] = (0,),
    **options: Any,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The loss ``name`` of ``arrays`` (floating ones in ``form``), and the gradients of those in ``wrt``."""
    options.setdefault("reduction", "none")
    if name == "cosine_similarity":
        options.pop("reduction")
    return (_torch if route.startswith("torch") else _jax)(route, name, arrays, form, wrt, options)


def _torch(route: str, name: str, arrays: Any, form: str, wrt: Any, options: Any) -> Any:
    torch._dynamo.reset()
    function = getattr(stablenum_torch.losses, name)
    options = {_DIM.get(k, k): _tensor(v, form) for k, v in options.items()}
    tensors = [_tensor(a, form) for a in arrays]
    for i in wrt:
        tensors[i] = tensors[i].requires_grad_()

    def items(*given: torch.Tensor) -> torch.Tensor:
        return function(*given, **options)

    if route == "torch compiled":
        items = torch.compile(items, fullgraph=True, backend="aot_eager", dynamic=False)
    value = items(*tensors)
    assert value.dtype == tensors[0].dtype
    grads = torch.autograd.grad(value.sum(), [tensors[i] for i in wrt])
    return _out(value), [_out(g) for g in grads]


def _tensor(value: Any, form: str) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return torch.tensor(value, dtype=getattr(torch, form)) if value.dtype.kind == "f" else torch.tensor(value)


def _out(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _jax(route: str, name: str, arrays: Any, form: str, wrt: Any, options: Any) -> Any:
    with jax.enable_x64(True) if form == "float64" else contextlib.nullcontext():
        given = [_array(a, form) for a in arrays]
        options = {k: _array(v, form) for k, v in options.items()}

        def total(*given: Any) -> Any:
            value = getattr(stablenum_jax.losses, name)(*given, **options)
            assert value.dtype == given[0].dtype
            return jnp.sum(value), value

        function = jax.value_and_grad(total, argnums=tuple(wrt), has_aux=True)
        (_, value), grads = (jax.jit(function) if route == "jax jit" else function)(*given)
        return np.asarray(value, np.float64), [np.asarray(g, np.float64) for g in grads]


def _array(value: Any, form: str) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "f":
        return jnp.asarray(value.astype(jnp.dtype(form)))
    return jnp.asarray(value.astype(np.int32) if value.dtype.kind == "i" else value)


def close(got: Any, exact: Any, form: str, *, ulps: float, scale: Any = 0.0, what: str = "") -> float:
    """Assert that each number is within ``ulps`` of the exact one; the worst distance.

    An ulp is that of the exact number, or of ``scale`` where it is larger: the size of what cancels in it.
    Numbers beyond the format's range must be infinite, and below its normal range one step may be lost.
    """
    facts = FORMATS[form]
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    assert got.shape == exact.shape, (what, got.shape, exact.shape)
    scale = np.broadcast_to(np.asarray(scale, np.float64), exact.shape)
    worst = 0.0
    for g, e, s, i in zip(got.flat, exact.flat, scale.flat, range(got.size)):
        if np.isnan(e) or np.isinf(e):
            assert g == e or (np.isnan(g) and np.isnan(e)), (what, form, i, g, e)
            continue
        if abs(e) > facts.max * (1 - facts.eps * ulps):
            assert abs(g) >= facts.max * (1 - 2 * facts.eps * ulps), (what, form, i, g, e)
            assert np.sign(g) == np.sign(e)
            continue
        unit = facts.eps * max(abs(e), s)
        if abs(e) < 2 * facts.smallest_normal:
            unit = max(unit, 2 * facts.smallest_normal)
        off = abs(g - e) / unit
        assert off <= ulps, (what, form, i, g, e, off)
        worst = max(worst, off)
    return worst
