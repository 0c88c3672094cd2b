"""Parameters that one program keeps together and the other one keeps apart, gate by gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stablenum.diagnosis.diff.layouts import layouts
from stablenum.diagnosis.diff.origins import Origin
from stablenum.diagnosis.diff.parameter_uses import Use

__all__ = ["apart", "stacked", "with_twins"]

_COUNTS = (4, 3, 2, 6, 8)
# The parts of a recurrent layer's name that tell the weights of the input from those of the state.
_TWINS = {"ih": "hh", "hh": "ih", "i": "h", "h": "i"}


def apart(left: Sequence[Use], right: Sequence[Use]) -> dict[str, Origin]:
    """Return origins for parameters of the right side that are parts of one on the left, in the order of use.

    The weights come first, and their biases go where the weights went.
    """
    origins: dict[str, Origin] = {}
    weights: dict[str, list[Use]] = {}
    free = list(right)
    for whole in (u for u in left if len(u.shape) > 1):
        axis, parts = _parts(whole, free)
        if parts:
            origins.update(_split(whole, parts, axis))
            weights[whole.name] = parts
            free = [u for u in free if u not in parts]
    biases = [u for u in left if len(u.shape) == 1]
    for bias in biases:
        origins.update(_split(bias, _siblings(bias, left, weights, free), 0))
    return origins


def stacked(left: Sequence[Use], right: Sequence[Use]) -> dict[str, Origin]:
    """Return origins for parameters of the right side that hold those of all layers, one row each."""
    groups: dict[tuple[str, ...], list[Use]] = {}
    for use in left:
        groups.setdefault(tuple("#" if w.isdigit() else w for w in use.words), []).append(use)
    origins, taken = dict[str, Origin](), set[tuple[str, ...]]()
    for whole in right:
        fitting = [
            (whole.kind != rows[0].kind, -len(set(words) & set(whole.words)), key)
            for key, (words, rows) in enumerate(groups.items())
            if words not in taken and len(rows) > 1 and whole.shape[:1] == (len(rows),)
            and all(layouts(u.shape, whole.shape[1:], u.kind) for u in rows)
        ]  # fmt: skip
        if fitting:
            words, rows = list(groups.items())[min(fitting)[2]]
            taken.add(words)
            ways = layouts(rows[0].shape, whole.shape[1:], rows[0].kind)
            names = tuple(u.name for u in rows)
            origins[whole.name] = Origin(names, whole.shape, ways[0], stacked=True, others=tuple(ways[1:]))
    return origins


def _parts(whole: Use, free: Iterable[Use]) -> tuple[int, list[Use]]:
    """Return the first parameters that can make up the whole, and the axis along which they do."""
    for axis in (0, len(whole.shape) - 1):
        for count in _COUNTS:
            if whole.shape[axis] % count:
                continue
            piece = _piece(whole.shape, count, axis)
            fitting = [
                u
                for u in free
                if u.size * count == whole.size and u.kind == whole.kind and layouts(piece, u.shape, u.kind)
            ]
            if len(fitting) >= count:
                return axis, fitting[:count]
    return 0, []


def _piece(shape: Sequence[int], count: int, axis: int) -> tuple[int, ...]:
    return tuple(n // count if i == axis else n for i, n in enumerate(shape))


def _siblings(
    bias: Use, left: Sequence[Use], weights: dict[str, list[Use]], free: Sequence[Use]
) -> list[Use | None]:
    """Return the biases that stand beside the parts of the weight beside which this one stands."""
    mine = next((u for u in left if u.name in weights and _plain(u) == _plain(bias)), None)
    if mine is None:
        return []
    beside = weights[mine.name]
    return [
        next((u for u in free if u.words[-1:] == ("bias",) and _plain(u) == _plain(w)), None) for w in beside
    ]


def _plain(use: Use) -> tuple[str, ...]:
    return tuple(w for w in use.words if w not in ("weight", "bias"))


def _split(whole: Use, parts: Sequence[Use | None], axis: int) -> dict[str, Origin]:
    count, found = len(parts), dict[str, Origin]()
    for i, use in enumerate(parts):
        if use is None:
            continue
        piece = _piece(whole.shape, count, axis)
        ways = layouts(piece, use.shape, use.kind)
        if ways:
            found[use.name] = Origin(
                (whole.name,), use.shape, ways[0], part=(i, count, axis), others=tuple(ways[1:])
            )
    return found


def with_twins(origins: Mapping[str, Origin], left: Sequence[Use]) -> dict[str, Origin]:
    """Add each part of a bias that went nowhere to the same part of its twin.

    A recurrent layer of PyTorch has two biases for one sum.
    """
    origins = dict(origins)
    biases = [u for u in left if len(u.shape) == 1]
    went = {(o.names[0], o.part[0] if o.part else 0): name for name, o in origins.items()}
    for bias in biases:
        twin = next((u for u in biases if _is_twin(bias, u)), None)
        parts = [o.part for o in origins.values() if twin is not None and o.names[0] == twin.name]
        count = next((p[1] if p else 1 for p in parts), 0)
        for i in range(count):
            target = went.get((twin.name, i)) if twin else None
            if target is not None and (bias.name, i) not in went:
                known = origins[target]
                origins[target] = Origin(
                    (*known.names, bias.name), known.shape, known.axes, part=known.part, axis=None
                )
    return origins


def _is_twin(a: Use, b: Use) -> bool:
    if a is b or len(a.words) != len(b.words):
        return False
    unlike = [(x, y) for x, y in zip(a.words, b.words) if x != y]
    return len(unlike) == 1 and _TWINS.get(unlike[0][0]) == unlike[0][1]
