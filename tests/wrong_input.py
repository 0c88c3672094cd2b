"""Input that is well formed and wrong, and damaged bytes: for every reader of files."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import sys
from typing import Any

__all__ = ["damaged", "mutated", "repickled", "wrong_value"]

_NUMBERS = (
    0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, -(10**400), 0.5, -0.0, 1e308, -1e308, 5e-324,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
_TEXTS = (
    "",
    "nan",
    "inf",
    "-1",
    "1e999",
    "\ud800",
    "\x00",
    "w\nx: good\x1b[2J",
    "../x",
    "/dev/zero",
    "a." * 300,
    "x" * 5000,
)


def wrong_value(draw: random.Random, depth: int = 3) -> Any:
    """A value of JSON of any type."""
    kind = draw.randrange(8 if depth else 5)
    if kind < 2:
        return draw.choice(_NUMBERS)
    if kind == 2:
        return draw.choice(_TEXTS)
    if kind < 5:
        return draw.choice((None, True, False, [], {}))
    if kind == 5:
        return [wrong_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {draw.choice(_TEXTS): wrong_value(draw, depth - 1) for _ in range(draw.randrange(4))}
    value: Any = wrong_value(draw, depth - 1)
    for _ in range(draw.choice((1, 20, 100, 250))):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def mutated(draw: random.Random, plain: Any, changes: int = 1) -> Any:
    """JSON in which some values are others, some keys are missing, doubled or called otherwise."""
    whole = [copy.deepcopy(plain)]
    for _ in range(changes):
        owner, key = draw.choice(_places(whole))
        what = draw.randrange(4)
        if what < 2 or owner is whole:
            owner[key] = wrong_value(draw)
        elif what == 2:
            del owner[key]
        elif isinstance(owner, dict):
            owner[draw.choice((*_TEXTS, *map(str, owner)))] = owner.pop(key)
        else:
            owner.append(owner[key])
    return whole[0]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Each list and dict in a tree with each of its keys."""
    found, waiting = [], [tree]
    while waiting:
        owner = waiting.pop()
        keys = range(len(owner)) if isinstance(owner, list) else list(owner)
        found += [(owner, key) for key in keys]
        waiting += [owner[key] for key in keys if isinstance(owner[key], (dict, list))]
    return found


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Bytes of which some are others, missing or there twice."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 30))):
        at = draw.randrange(len(found) + 1)
        what = draw.randrange(4)
        if what == 0 and at < len(found):
            found[at] = draw.randrange(256)
        elif what == 1:
            found[at : at + draw.randrange(64)] = b""
        elif what == 2:
            found[at:at] = found[max(0, at - draw.randrange(64)) : at]
        else:
            found[at:at] = draw.randbytes(draw.randrange(16))
    return bytes(found[: draw.randrange(len(found) + 1)] if draw.random() < 0.1 else found)


class _Changed(pickle._Pickler):  # type: ignore[name-defined]  # the one in Python, of which parts can be changed
    def __init__(self, file: io.BytesIO, draw: random.Random, share: float) -> None:
        super().__init__(file, 2)
        self._draw, self._share = draw, share

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if (
            isinstance(obj, (int, float, str, tuple, list, dict, type(None)))
            and self._draw.random() < self._share
        ):
            with_odd = self._draw.choice(
                (wrong_value(self._draw), (), {1, 2}, b"x", 1j, frozenset(), tuple, len)
            )
            super().save(with_odd, save_persistent_id)
        else:
            super().save(obj, save_persistent_id)


def repickled(draw: random.Random, value: Any) -> bytes:
    """A sound pickle of a value in which some parts are others."""
    file, limit = io.BytesIO(), sys.getrecursionlimit()
    sys.setrecursionlimit(10 * limit)  # some parts are nested hundreds of times
    try:
        _Changed(file, draw, draw.choice((0.01, 0.05, 0.3))).dump(value)
    finally:
        sys.setrecursionlimit(limit)
    return file.getvalue()
