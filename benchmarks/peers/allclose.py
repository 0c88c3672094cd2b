"""``allclose`` module by module, as tutorials on porting a model do it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, permutations
from typing import Any

import numpy as np

from benchmarks.peers.answers import Answer
from benchmarks.peers.runs import Run

__all__ = ["allclose", "matched_modules"]


def allclose(left: Run, right: Run, weights: Any, *, rtol: float = 1e-5, atol: float = 1e-8) -> Answer:
    """Compare outputs of modules, the loss, gradients and new parameters, in this order.

    Args:
        weights: the ``WeightMap`` of the pair, which also says which modules correspond.
    """

    def differ(a: Any, b: Any) -> bool:
        return not np.allclose(b, a, rtol=rtol, atol=atol)

    pairs = matched_modules(left, right, weights)
    for module in left.outputs:
        if module in pairs and _parts(left.outputs[module], right.outputs[pairs[module]], differ):
            return Answer(True, "forward", module, pairs[module])
    if differ(left.loss, right.loss):
        return Answer(True, "forward")
    for module, mine in left.cotangents.items():
        other = pairs.get(module)
        if other is None or not _one_to_one(left.outputs[module], right.outputs[other]):
            continue
        if _parts(mine, right.cotangents.get(other, {}), differ):
            return Answer(True, "backward", module, other)
    for phase, of in (("backward", "gradients"), ("update", "updated")):
        mine, theirs = getattr(left, of), getattr(right, of)
        for name in reversed(theirs):
            source = weights.origins.get(name)
            if source is None or not source.invertible or not set(source.names) <= set(mine):
                continue
            if differ(source.of(mine), theirs[name]):
                return Answer(True, phase, *(_owner(n) for n in (source.names[0], name)))
    return Answer(False)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0].removeprefix("params.")


Parts = Mapping[int, Sequence[np.ndarray]]


def _parts(left: Parts, right: Parts, differ: Any) -> bool:
    """Whether something that a module returns has no counterpart of its size that is close in any layout."""
    for parts in left.values():
        mine = _stacked(parts)
        theirs = [x for x in map(_stacked, right.values()) if x is not None and x.size == np.size(mine)]
        laid = [] if mine is None else [y for x in theirs for y in _layouts(x, mine.shape)]
        # The gradients of several calls come up in their order under vmap, and else in the reverse one.
        ways = [mine, mine[::-1]] if mine is not None and len(parts) > 1 else [mine]
        if laid and all(differ(x, y) for x in ways for y in laid):
            return True
    return False


def _one_to_one(left: Parts, right: Parts) -> bool:
    """Whether all that a module returns has a counterpart of its size: a recurrent layer is not its cell."""
    sizes = [sum(x.size for x in parts) for parts in right.values()]
    return all(sum(x.size for x in parts) in sizes for parts in left.values())


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray | None:
    if not parts or len({p.shape for p in parts}) > 1:
        return None
    return parts[0] if len(parts) == 1 else np.stack(parts)


def _layouts(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The layouts of an array that have a shape: with its axes in another order, or else with neighbouring
    axes put together or split."""
    orders = _orders(x.shape, shape)
    ends = [set(accumulate(sizes, int.__mul__)) for sizes in (x.shape, shape)]
    if not orders and (ends[0] <= ends[1] or ends[1] <= ends[0]):
        x, orders = x.reshape(shape), _orders(shape, shape)  # axes of one size may still be exchanged
    yield from (x.transpose(axes) for axes in orders)


def _orders(given: tuple[int, ...], wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [axes for axes in permutations(range(len(given))) if tuple(given[i] for i in axes) == wanted]


def matched_modules(left: Run, right: Run, weights: Any) -> dict[str, str]:
    """Which module of the right side belongs to which of the left one.

    Modules correspond if they have the same weights, all of them, or else the same name. Of several around
    the same weights, the innermost come first.
    """
    own = {name: [(name, name, x.size)] for name, x in left.gradients.items()}
    taken = {
        name: [(p.name, str(p), np.size(p.of(left.gradients))) for p in source.pieces if p.name in own]
        for name, source in weights.origins.items()
    }
    mine, theirs = _by_weights(left.outputs, own), _by_weights(right.outputs, taken)
    found = {}
    for key, modules in mine.items():
        found.update(zip(modules, theirs.get(key, ()), strict=False))
    rest = {_plain(module): module for module in right.outputs if module not in found.values()}
    for module in left.outputs:
        if module not in found and _plain(module) in rest:
            found[module] = rest[_plain(module)]
    return found


Pieces = Mapping[str, Sequence[tuple[str, str, int]]]  # of each parameter: left parameter, part of it, size


def _by_weights(modules: Mapping[str, Any], pieces: Pieces) -> dict[tuple[frozenset[str], int], list[str]]:
    """The modules by the left parameters that are in them and how much of these."""
    found: dict[tuple[frozenset[str], int], list[str]] = {}
    for module in sorted(modules, key=lambda path: -len(path)):
        prefix = f"{module}." if module else ""
        inside = {
            piece
            for name, parts in pieces.items()
            for piece in parts
            if name.removeprefix("params.").startswith(prefix)
        }
        if inside:
            key = frozenset(name for name, *_ in inside), sum(size for *_, size in inside)
            found.setdefault(key, []).append(module)
    return found


def _plain(path: str) -> str:
    return path.lower().replace("_", ".")
