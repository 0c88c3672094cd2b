"""A row in JAX, with the interface that ``measure`` uses, on JAX's default device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.steps import jax_counts
from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.jax_variants import JaxProblem, build
from benchmarks.steps.rows import Row
from benchmarks.timing import host_timer

__all__ = ["JaxBench"]


class JaxBench:
    """Implements ``measure.Bench``."""

    def __init__(self, row: Row, device: str, turn: int) -> None:
        self.device = jax.default_backend()
        if device == "cuda" and self.device != "gpu":
            raise BenchmarkError(
                f"{row.name}: JAX runs on {self.device!r}. Install its build for CUDA: "
                "`python -m pip install 'jax[cuda12]'`."
            )
        self.row, self.timer = row, host_timer  # a step waits for its results
        self.problem = JaxProblem(row)
        self.norm, self.raw = self.problem.norm, list(self.problem.raw.values())
        self.variants = build(self.problem, turn)

    def put(self, name: str) -> None:
        self.variants[name].put()

    def start(self) -> list[jax.Array]:
        return list(self.problem.start.values())

    def parameters(self, name: str) -> list[jax.Array]:
        return list(self.variants[name].carry[0].values())

    def numbers(self, array: jax.Array) -> np.ndarray:
        return np.asarray(array.astype(jnp.float32), np.float64)

    def square_apart(self, one: jax.Array, other: jax.Array) -> float:
        return float(jnp.square(one.astype(jnp.float32) - other.astype(jnp.float32)).sum())

    def count(self, name: str) -> dict[str, Any]:
        return jax_counts.count(self.variants[name])

    def skip(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        variant = self.variants[name]
        variant.put()
        grads = dict(self.problem.grads)
        last = list(grads)[-1]
        grads[last] = grads[last].reshape(-1).at[-1].set(jnp.inf).reshape(self.row.shape)
        before = self._ends(variant.carry)
        variant.step_on(grads)
        return before, self._ends(variant.carry)

    def _ends(self, carry: tuple[Any, ...]) -> list[np.ndarray]:
        """The first and the last parameter, and the first and the last tensor of each optimizer moment."""
        alike = [leaf for leaf in jax.tree.leaves(carry[:2]) if leaf.shape == self.row.shape]
        ends = alike[:: self.row.tensors] + alike[self.row.tensors - 1 :: self.row.tensors]
        return [self.numbers(leaf) for leaf in ends]
