"""Trees, gradients and bitwise comparisons for the tests of the JAX adapter."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stablenum_jax
from stablenum.norms.wide import Wide, recorded
from stablenum.rules.clipping import Units
from stablenum_jax._step.measure import norms as measured_norms
from stablenum_jax._step.measure import units as measured_units
from stablenum_jax.typing import GuardOptState

every_mode = pytest.mark.parametrize("mode", ["eager", "jit"])


def make_params(dtype: Any = np.float32) -> dict[str, Any]:
    """Two layers; one weight is -0.0, which a skip that adds +0.0 would change."""
    rng = np.random.default_rng(7)
    w = rng.standard_normal((3, 4)).astype(np.float32)
    w[0, 0] = -0.0
    return {
        "dense": {"b": jnp.zeros(4, dtype), "w": jnp.asarray(w, dtype)},
        "out": jnp.asarray(rng.standard_normal(4).astype(np.float32), dtype),
    }


def make_grads(seed: int, params: Any = None, scale: float = 1.0) -> Any:
    """Finite random gradients."""
    rng = np.random.default_rng(seed)
    params = make_params() if params is None else params
    return jax.tree.map(
        lambda p: jnp.asarray((scale * rng.standard_normal(p.shape)).astype(np.float32), p.dtype), params
    )


def spoil(grads: Any, value: float = np.nan) -> Any:
    """The gradients with one bad element, in ``out``."""
    return {**grads, "out": grads["out"].at[1].set(value)}


def bits(x: Any) -> np.ndarray[Any, Any]:
    """The array's bytes: they distinguish -0.0 from 0.0, and a NaN equals itself."""
    array = np.ascontiguousarray(np.asarray(x))
    return array.reshape(-1).view(np.uint8)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """The same structure, shapes, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype, name
        assert jnp.shape(a) == jnp.shape(b), name
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=name)


def without_guard(opt_state: Any) -> Any:
    """The optimizer's state without the guard's own."""
    is_guard = lambda node: isinstance(node, GuardOptState)  # noqa: E731
    return jax.tree.map(lambda node: None if is_guard(node) else node, opt_state, is_leaf=is_guard)


def all_finite(tree: Any) -> bool:
    """Whether every floating-point leaf is finite."""
    return all(
        bool(jnp.isfinite(leaf).all())
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)
    )


def reason(opt_state: Any) -> str:
    """The name of the last step's reason."""
    return str(stablenum_jax.metrics(opt_state, raise_if_halted=False)["reason"].name)


def run_on_four_devices(code: str) -> None:
    """Run a script in a process with four CPU devices; it must succeed."""
    flags = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'\n"
    done = subprocess.run(
        [sys.executable, "-c", flags + code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


def leaf_norms(leaves: Any) -> Any:
    """The measured norms as float32; those beyond its range saturate."""
    return recorded(measured_norms.leaf_norms(leaves), xp=jnp)


def leaf_and_unit_norms(leaves: Any, weights: Any, axes: Any) -> Any:
    """The measured norms, and those of units, as float32; those beyond its range saturate."""
    norms, units = measured_units.leaf_and_unit_norms(leaves, weights, axes)
    parts = zip(units.norms, units.exponents, strict=True)
    of_units = tuple(recorded(Wide(*part), xp=jnp) for part in parts)
    return recorded(norms, xp=jnp), Units(of_units, units.weights)
