"""What a program does with each axis of a parameter: whether the product that reads it sums over the axis.

A square matrix can be carried over in two ways, which its shape does not tell apart. What the program does
with it does: the axis over which one program sums is the axis over which the other one sums. Between the
parameter and the product there may be transpositions, reshapes, slices and casts. They are not followed one
by one: the entries of a parameter are all different, or are made so, and where they lie in what the product
reads says which axis became which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stablenum.diagnosis.diff.sides.sides import Side, host
from stablenum.diagnosis.diff.weights.parameter_functions import ENTRY_BY_ENTRY, ParameterFunctions
from stablenum.diagnosis.diff.weights.parameter_uses import hands_on
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Roles", "apart", "roles_of"]

# For each axis of a parameter, its roles in a product; an axis may be split into two. Empty if not known.
Roles: TypeAlias = "tuple[frozenset[str], ...]"

# Entries are numbered below this, so that no function of them overflows; any number below 1 would do.
_LARGEST = 0.5
# Operations with a parameter alone, one after another, after which it is still followed, such as those of a
# weight that is rounded or normalised. Chosen, not measured.
_MOST_STEPS = 8
_INNER = ("summed", "window")


@dataclass(frozen=True, slots=True)
class _Read:
    """A parameter that is read by a product, as the value ``value``."""

    name: str
    value: int
    roles: tuple[str, ...]


def roles_of(side: Side, names: Collection[str]) -> dict[str, Roles]:
    """Return the roles of the axes of parameters in the first product that reads each.

    Args:
        side: the program.
        names: of the parameters.
    """
    found = _Search(side)
    reads = {name: read for name in names for read in found.read(name)}
    if not reads:
        return {}
    arrays = {**side.program.parameters(), **(side.weights or {})}
    codes = _Codes({name: arrays[name] for name in reads})
    wanted = {r.value: r for r in reads.values()}
    kept = {v: codes.array(name) for v, name in found.kept.items()}
    roles = _played(side, codes, wanted, kept)
    if roles is None:
        roles = _played(side, codes, wanted, {}, replacing=False)
    return roles or {}


def _played(
    side: Side, codes: _Codes, wanted: Mapping[int, _Read], kept: Mapping[int, Any], *, replacing: bool = True
) -> dict[str, Roles] | None:
    """Evaluate a program once, and return the roles; None if it cannot run with other parameters, because the
    sizes of what it computes depend on them."""
    roles = dict[str, Roles]()

    def visit(index: int, data: Any) -> None:
        if index in wanted:
            roles[wanted[index].name] = codes.roles(wanted[index], np.asarray(host(data)))

    weights = {**(side.weights or {}), **(codes.given if replacing else {})}
    try:
        with np.errstate(all="ignore"):
            side.program.play(visit, weights=weights, replace=kept, steps=side.steps)
    except Exception:  # noqa: BLE001 - it ran with its own
        return None
    return {name: r for name, r in roles.items() if r}


class _Search:
    """Follows parameters to the products that read them.

    Attributes:
        kept: value -> the parameter that it is an entrywise function of, such as a moving average.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self.kept: dict[int, str] = {}
        self._parameters = {
            v.name: v.id for v in reversed(side.trace.values) if v.role == "parameter" and v.producer is None
        }
        self._readers: dict[int, list[Step]] = {}
        for step in side.trace.steps:
            if step.phase == "forward":
                for value in step.inputs:
                    self._readers.setdefault(value, []).append(step)
        self._functions = ParameterFunctions(side)

    def read(self, name: str) -> Iterator[_Read]:
        """Yield the first product that reads a parameter, or, if none does, what is computed from parameters
        alone."""
        todo: list[tuple[int, bool, tuple[int, ...]]] = []
        if name in self._parameters:
            todo.append((self._parameters[name], True, ()))
        seen, found = set[int](), list[tuple[int, int, _Read, tuple[int, ...]]]()
        while todo:
            value, whole, on_the_way = todo.pop()
            for step in self._readers.get(value, ()):
                if step.index in seen:
                    continue
                seen.add(step.index)
                if step.roles:
                    read = _Read(name, value, step.roles[step.inputs.index(value)])
                    found.append((len(on_the_way), step.index, read, on_the_way))
                elif hands_on(step):
                    same = whole and step.operation in ENTRY_BY_ENTRY
                    todo += [(o, same, on_the_way) for o in step.outputs]
                elif whole and len(on_the_way) < _MOST_STEPS and self._functions.has(step, value):
                    todo.append((step.outputs[0], True, (*on_the_way, step.outputs[0])))
        for _, _, read, on_the_way in sorted(found, key=lambda f: f[:2])[:1]:
            self.kept.update(dict.fromkeys(on_the_way, name))
            yield read


class _Codes:
    """Parameters whose entries are all different, so that an entry tells where it lay: their own arrays if
    that is so, else numbers.

    Attributes:
        given: what takes the place of parameters.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.given, self._sorted = dict[str, np.ndarray](), dict[str, tuple[np.ndarray, np.ndarray]]()
        self._shapes = {name: np.shape(x) for name, x in arrays.items()}
        count, unit = 0, _LARGEST / max(sum(np.size(x) for x in arrays.values()), 1)
        for name, own in arrays.items():
            x: Any = np.asarray(own, np.float64)
            if np.unique(x).size < x.size or not np.isfinite(x).all():
                x = self.given[name] = (np.arange(1, x.size + 1) + count).reshape(x.shape) * unit
            count += x.size
            order = np.argsort(x, axis=None)
            self._sorted[name] = x.reshape(-1)[order], order

    def array(self, name: str) -> np.ndarray:
        """Return the array of a parameter."""
        values, order = self._sorted[name]
        found = np.empty_like(values)
        found[order] = values
        return found.reshape(self._shapes[name])

    def roles(self, read: _Read, x: np.ndarray) -> Roles:
        """Return the roles of a parameter's axes, given what is read; none if it is not found there."""
        shape, (values, order) = self._shapes[read.name], self._sorted[read.name]
        near = np.minimum(np.searchsorted(values, x), values.size - 1)
        inside = values[near] == x
        if not inside.any() or x.ndim != len(read.roles):
            return ()
        places = np.unravel_index(order[near], shape)
        base = np.unravel_index(int(np.argmax(inside)), x.shape)
        found: list[set[str]] = [set() for _ in shape]
        for axis, role in enumerate(read.roles):
            line: Any = (*base[:axis], slice(None), *base[axis + 1 :])
            for roles, at in zip(found, places, strict=True):
                if (at[line][inside[line]] != at[base]).any():
                    roles.add(role)
        return tuple(frozenset(roles) for roles in found)


def apart(
    left: Roles, right: Roles, way: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]
) -> tuple[int, int] | None:
    """Return how many axes are summed over on one side only if a parameter is carried over in one way, and
    how many have other roles, such as those of a window; None if that is not known.

    Args:
        left, right: the roles.
        way: the permutation of the left axes, before the reshape.
        shapes: of the left and the right parameter.
    """
    given, wanted = shapes
    if len(left) != len(given) or len(right) != len(wanted) or len(way) != len(given):
        return None
    pairs = []
    for (begin, end), i in zip(_spans([given[i] for i in way]), way, strict=True):
        met = [
            right[j] for j, (first, last) in enumerate(_spans(wanted)) if max(begin, first) < min(end, last)
        ]
        there = frozenset[str]().union(*met)
        if left[i] and there:
            pairs.append((left[i], there))
    return sum(_inner(a) != _inner(b) for a, b in pairs), sum(a != b for a, b in pairs)


def _spans(shape: Sequence[int]) -> list[tuple[float, float]]:
    """Return where each axis begins and ends, on a scale on which sizes add up."""
    # Rounded, since logarithms of one product may differ in their last digits.
    ends = np.concatenate([[0.0], np.cumsum(np.log(np.maximum(shape, 1)))]).round(9)
    return list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))


def _inner(roles: frozenset[str]) -> set[bool]:
    """Return whether an axis is summed over, perhaps in part."""
    return {role.startswith(_INNER) for role in roles}
