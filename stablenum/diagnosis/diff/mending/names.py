"""What the names in a program's functions hold while it runs: arrays, numbers, or something else."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

__all__ = ["Held", "Names", "names_seen"]

# What a name holds is looked up so often at one line: later it is nearly always the same. Chosen.
_MOST_LOOKS = 2


class Held(NamedTuple):
    """What a name holds.

    Attributes:
        kind: "array", "number" or "other"; "" if it holds several of these.
        shape: that of an array; None for anything else, and if it holds arrays of several shapes.
        logical: whether it is an array of truth values.
    """

    kind: str = ""
    shape: tuple[int, ...] | None = None
    logical: bool = False

    def like(self, other: Held) -> bool:
        """Return whether one may stand where the other does, as far as that is known.

        Example:
            >>> Held("array", (2, 3)).like(Held("array", (3, 2)))
            False
            >>> Held("array", (2, 3)).like(Held())
            True
        """
        if not (self.kind and other.kind):
            return True
        return self.kind == other.kind and (None in (self.shape, other.shape) or self.shape == other.shape)


# (file, function) -> name -> what it holds. The file is a real path.
Names = Mapping[tuple[str, str], Mapping[str, Held]]


@contextmanager
def names_seen(files: Collection[str]) -> Iterator[Names]:
    """Watch the functions of some files while they run in this thread; what is found grows meanwhile."""
    found = dict[tuple[str, str], dict[str, Held]]()
    looks, real, before = Counter[tuple[CodeType, int]](), dict[str, str](), sys.gettrace()

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if name not in real:
            real[name] = os.path.realpath(name)
        return look if real[name] in files else None

    def look(frame: FrameType, event: str, argument: object) -> Any:
        at = frame.f_code, frame.f_lineno
        looks[at] += 1
        if looks[at] <= _MOST_LOOKS:
            names = found.setdefault((real[frame.f_code.co_filename], frame.f_code.co_name), {})
            for name, data in frame.f_locals.items():
                names[name] = _either(names.get(name), _held(data))
        return look

    sys.settrace(enter)
    try:
        yield found
    finally:
        sys.settrace(before)


def _held(data: object) -> Held:
    try:
        shape, dtype = getattr(data, "shape", None), getattr(data, "dtype", None)
    except Exception:  # noqa: BLE001  a parameter without a shape yet, or whatever a property raises
        return Held("other")
    if isinstance(shape, tuple) and dtype is not None:
        return Held("array", tuple(shape), str(dtype).endswith("bool"))
    return Held("number" if isinstance(data, int | float) and not isinstance(data, bool) else "other")


def _either(one: Held | None, other: Held) -> Held:
    if one is None or one == other:
        return other
    if one.kind != other.kind:
        return Held()
    return Held(one.kind, None, one.logical and other.logical)
