"""Gradients of replicated parameters inside ``shard_map``, which JAX sums over devices by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from stablenum.diagnosis.checkup.course import OverDevices
from stablenum.diagnosis.watch.frames import transparent
from stablenum_jax._diagnosis.replay.source_lines import users_place
from stablenum_jax._trees.leaves import varying_axes

__all__ = ["DeviceSums"]

_COMBINING = ("psum", "pmean")


class DeviceSums:
    """Watches what a script does with gradients that are sums over devices."""

    def __init__(self) -> None:
        self.found: list[OverDevices] = []
        self._sums: dict[int, tuple[Any, frozenset[str]]] = {}  # id of a gradient -> itself, and the axes

    def install(self) -> None:
        """Watch from now on."""
        for name in _COMBINING:
            setattr(jax.lax, name, self._combining(name, getattr(jax.lax, name)))

    def note(self, loss: Any, gradients: Any, params: Any, others: Any) -> None:
        """Note the gradients of a loss that does, of parameters that do not vary over devices."""
        varying = varying_axes(loss)
        leaves = [g for g in jax.tree.leaves(gradients) if varying - varying_axes(g)]
        self._sums = {id(g): (g, varying - varying_axes(g)) for g in leaves}
        if leaves and _is_batched(others) and not _is_batched(params):
            self._found(varying - varying_axes(leaves[0]), "vmap")

    def _combining(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        @transparent
        def outer(x: Any, axis_name: Any, *args: Any, **kwargs: Any) -> Any:
            axes = set(axis_name) if isinstance(axis_name, (list, tuple)) else {axis_name}
            known = [self._sums[id(g)][1] for g in jax.tree.leaves(x) if id(g) in self._sums]
            if known and axes & known[0]:
                self._found(known[0] & axes, name)
            return inner(x, axis_name, *args, **kwargs)

        return outer

    def _found(self, axes: frozenset[str] | set[str], then: str) -> None:
        self.found.append(OverDevices(tuple(sorted(map(str, axes))), then, users_place()))


def _is_batched(tree: Any) -> bool:
    return any(type(x).__name__ == "BatchTracer" for x in jax.tree.leaves(tree))
