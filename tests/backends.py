"""The array namespaces that the core runs on, eager and compiled, behind one small interface."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy
import array_api_compat.torch
import jax
import jax.numpy as jnp
import numpy as np
import torch

from stablenum import Decision, GuardConfig, GuardState, Observation, decide, init_guard
from stablenum.arrays import map_leaves
from stablenum.rules.clipping import Units

Decide = Callable[[GuardState, Observation], tuple[Decision, GuardState]]


@dataclass(frozen=True)
class Backend:
    """One way to run the core.

    ``prepare(config)`` gives ``decide`` for that config, compiled where the backend compiles.
    """

    name: str
    xp: Any
    prepare: Callable[[GuardConfig], Decide]

    def asarray(self, value: Any, dtype: str = "float32") -> Any:
        """``value`` as an array of this backend."""
        # By way of NumPy, which rounds to float32 without a warning on overflow.
        with np.errstate(over="ignore"):
            host = np.asarray(value).astype(dtype)
        return self.xp.asarray(host.tolist(), dtype=getattr(self.xp, dtype))

    def observe(
        self,
        norms: Sequence[float],
        loss: float | None = None,
        found_inf: bool | None = None,
        *,
        units: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]] | None = None,
        amax: float | None = None,
        tiny: float | None = None,
    ) -> Observation:
        """An observation from plain numbers; ``units``: norms and weights, a list of units per parameter."""
        return Observation(
            norms=self.asarray(norms),
            loss=None if loss is None else self.asarray(loss),
            found_inf=None if found_inf is None else self.asarray(found_inf, "bool"),
            units=None
            if units is None
            else Units(*(tuple(self.asarray(part) for part in side) for side in units)),
            amax=None if amax is None else self.asarray(amax),
            tiny=None if tiny is None else self.asarray(tiny),
        )

    def init(self, config: GuardConfig, n_tensors: int) -> GuardState:
        """The state before the first step."""
        return init_guard(config, n_tensors, xp=self.xp)

    def run(
        self, config: GuardConfig, observations: Sequence[Observation], state: GuardState | None = None
    ) -> tuple[list[Decision], GuardState]:
        """Decide on each observation in turn; return the decisions (as NumPy) and the last state."""
        if state is None:
            state = self.init(config, observations[0].norms.shape[0])
        run, decisions = self.prepare(config), []
        for observation in observations:
            decision, state = run(state, observation)
            decisions.append(to_numpy(decision))
        return decisions, state


def to_numpy(tree: Any) -> Any:
    """Nested tuples of arrays as the same tuples of NumPy arrays."""
    if isinstance(tree, tuple):
        leaves = [to_numpy(leaf) for leaf in tree]
        return type(tree)(*leaves) if hasattr(tree, "_fields") else tuple(leaves)
    return tree.detach().cpu().numpy() if isinstance(tree, torch.Tensor) else np.asarray(tree)


def leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of nested (named) tuples with their paths."""
    if not isinstance(tree, tuple):
        return [(path, tree)]
    names = getattr(tree, "_fields", range(len(tree)))
    return [leaf for name, part in zip(names, tree) for leaf in leaves(part, f"{path}.{name}")]


def assert_bit_equal(one: Any, other: Any) -> None:
    """Same structure, dtypes, shapes and bits (NaN equals NaN)."""
    for (path, a), (_, b) in zip(leaves(to_numpy(one)), leaves(to_numpy(other)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes() or np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), (path, a, b)


def _numpy(config: GuardConfig) -> Decide:
    # The rules compute with inf and NaN and select afterwards; only NumPy warns about it.
    return np.errstate(all="ignore")(functools.partial(decide, config, xp=array_api_compat.numpy))


def _eager(xp: Any) -> Callable[[GuardConfig], Decide]:
    return lambda config: functools.partial(decide, config, xp=xp)


@functools.cache
def _jitted(config: GuardConfig) -> Decide:
    return jax.jit(functools.partial(decide, config, xp=jnp))


def torch_compiled(config: GuardConfig, *, backend: str = "aot_eager") -> Decide:
    """``decide`` as one graph; raises where it would break or wait for the host."""

    def run(state: GuardState, observation: Observation) -> tuple[Decision, GuardState]:
        return decide(config, state, observation, xp=array_api_compat.torch)

    # Dynamo limits the recompilations of one code object: each compiled function gets its own.
    run.__code__ = run.__code__.replace(co_name=f"decide_{backend}")
    return torch.compile(run, fullgraph=True, dynamic=False, backend=backend)


@functools.cache
def _torch_compiled(config: GuardConfig) -> Decide:
    @functools.cache
    def compiled(*signature: Any) -> Decide:
        return torch_compiled(config)

    def run(state: GuardState, observation: Observation) -> tuple[Decision, GuardState]:
        signature = (map_leaves(lambda part: part if part is None else part.shape, observation),)
        return compiled(*signature)(state, observation)

    return run


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("numpy", array_api_compat.numpy, _numpy),
        Backend("torch", array_api_compat.torch, _eager(array_api_compat.torch)),
        Backend("torch-compiled", array_api_compat.torch, _torch_compiled),
        Backend("jax", jnp, _eager(jnp)),
        Backend("jax-jit", jnp, _jitted),
    )
}
