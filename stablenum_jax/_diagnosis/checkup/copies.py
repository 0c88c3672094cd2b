"""Trees of the same shapes as the trained parameters: averages and target networks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from stablenum.diagnosis.checkup.course import Copy
from stablenum_jax._trees.leaves import is_floating

__all__ = ["Copies"]

Key = tuple[str, ...]

# An average is nearer to the parameters than so much of their size; moments of gradients are not. Chosen.
_NEAR = 0.5


class Copies:
    """Compares such trees among a step's arguments with what they were when the training began."""

    def __init__(self) -> None:
        self._first: dict[Key, Any] = {}
        self.found: tuple[Copy, ...] = ()

    def look(
        self, fun: Callable[..., Any], arguments: Any, trained: Mapping[str, int], buffers: Sequence[bool]
    ) -> None:
        """Compare the copies among the arguments of a measured step.

        Args:
            fun: the step.
            arguments: its positional and named arguments.
            trained: the position, among the leaves, of each parameter that is trained.
            buffers: for each leaf, whether it is a running statistic.
        """
        leaves = {
            _named(path, fun): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(arguments)
            if is_floating(leaf)
        }
        keys = [_named(path, fun) for path, _ in jax.tree_util.tree_leaves_with_path(arguments)]
        own = [keys[i] for i in trained.values()]
        statistics = [key for key, buffer in zip(keys, buffers, strict=True) if buffer and key in leaves]
        if not own:
            return
        self._first = self._first or leaves
        if self._first.keys() != leaves.keys():
            return
        moved = {key for key in leaves if not np.array_equal(leaves[key], self._first[key])}
        still = [
            ".".join(key)
            for key in statistics
            if key not in moved and any(_differ_once(key, k) and k in moved for k in statistics)
        ]
        base = _common(own)
        found = []
        for prefix, members in _alike(own, base, leaves).items():
            far = _distance([(leaves[k], leaves[m]) for k, m in members.items()])
            follows = any(m in moved for m in members.values())
            if follows and far > _NEAR:
                continue
            equal = all(np.array_equal(self._first[k], self._first[m]) for k, m in members.items())
            copy = Copy(".".join(prefix), ".".join(base), equal, follows, tuple(still), runs=True)
            found.append(copy)
        self.found = tuple(found)


def _named(path: Any, fun: Callable[..., Any]) -> Key:
    """Return the parts of a path into the arguments, which begins with the name of a parameter of ``fun``."""
    parts = [_part(entry) for entry in path]
    if parts[0] != "0":
        return tuple(parts[1:])
    try:
        names = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        names = []
    number = int(parts[1])
    return (names[number] if number < len(names) else parts[1], *parts[2:])


def _part(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))))


def _common(keys: Sequence[Key]) -> Key:
    """Return the parts with which all keys begin; of a single key all but the last."""
    first, last = min(keys), max(keys)
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first) - 1)
    return first[: max(n, 1)] if len(keys) > 1 else first[: max(1, len(first) - 1)]


def _alike(own: Sequence[Key], base: Key, leaves: Mapping[Key, Any]) -> dict[Key, dict[Key, Key]]:
    """Return the prefixes under which all parameters have a counterpart of their shape, with these."""
    found: dict[Key, dict[Key, Key]] = {}
    for key in own:
        rest = key[len(base) :]
        for other in leaves:
            fits = len(other) > len(rest) and (not rest or other[-len(rest) :] == rest)
            if fits and other not in own and leaves[other].shape == leaves[key].shape:
                found.setdefault(other[: len(other) - len(rest)], {})[key] = other
    return {prefix: members for prefix, members in found.items() if len(members) == len(own)}


def _distance(pairs: Sequence[tuple[Any, Any]]) -> float:
    wide = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]
    size = sum(float(np.sum(np.abs(a) ** 2)) for a, _ in wide)
    apart = sum(float(np.sum(np.abs(a - b) ** 2)) for a, b in wide)
    return (apart / size) ** 0.5 if size else 0.0


def _differ_once(one: Key, other: Key) -> bool:
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1
