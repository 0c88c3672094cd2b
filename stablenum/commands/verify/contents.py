"""What a reader finds in a checkpoint: arrays and plain values by their paths, or why it was not read."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

__all__ = ["Contents", "Entry", "Gathered", "NotCheckedError", "Path", "Plain", "bounded", "path_of"]

# Three times as deep as the states of large models. Chosen, not measured.
_DEEPEST = 32

Path: TypeAlias = tuple[str, ...]
Plain: TypeAlias = "complex | int | float | str | bool"
Array: TypeAlias = Any


class NotCheckedError(Exception):
    """A file or folder of which nothing can be said.

    Attributes:
        word: "unreadable", "corrupt" or "unknown".
    """

    def __init__(self, word: str, why: str) -> None:
        super().__init__(why)
        self.word = word


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One array of a checkpoint.

    Attributes:
        path: where it is: keys of dicts, fields, positions in lists.
        dtype: the name that NumPy, torch and JAX share.
        shape: its shape.
        read: returns the array, of NumPy, with a dtype of NumPy or of ml_dtypes. Large arrays are read when
            they are measured, one after another.
        size: the number of elements that :attr:`read` returns: elements that stand for several are read once.
        source: equal for entries that hold the same elements; None where that is not known.
        blocks: returns the elements in order, in one-dimensional arrays; None if they are read at once.
        columns: whether in that order the first index changes fastest, and not the last.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]
    size: int = -1
    source: Hashable = None
    blocks: Callable[[], Iterator[Array]] | None = None
    columns: bool = False

    def __post_init__(self) -> None:
        if self.size < 0:
            object.__setattr__(self, "size", math.prod(self.shape))

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """One checkpoint.

    Attributes:
        format: what it is, in words.
        arrays: its arrays, in the order in which they were saved.
        values: its plain values, by path.
        notes: what was not read, and why.
        faults: fields of a guard's state that must be finite and are not, by name.
        stored: the bytes of its files.
        finish: called after the arrays have been read: it reads all else, so that no checksum is passed over.
        close: called when nothing more is read.
    """

    format: str
    arrays: tuple[Entry, ...] = ()
    values: Mapping[Path, Plain] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    faults: Mapping[str, float] = field(default_factory=dict)
    stored: int = 0
    finish: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


@dataclass(slots=True)
class Gathered:
    """What a reader has found so far; what prints alike, as the keys 1 and "1", stays apart."""

    arrays: list[Entry] = field(default_factory=list)
    values: dict[Path, Plain] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _seen: dict[Path, int] = field(default_factory=dict)

    def add(self, found: Entry | tuple[Path, Plain]) -> None:
        """Add an array, or the path of a value and the value."""
        path = found.path if isinstance(found, Entry) else found[0]
        number = self._seen[path] = self._seen.get(path, 0) + 1
        while number > 1 and (path := (*path[:-1], f"{path[-1]} ({number})")) in self._seen:
            number = self._seen[path] = self._seen[path] + 1
        self._seen.setdefault(path, 1)
        if isinstance(found, Entry):
            self.arrays.append(replace(found, path=path))
        else:
            self.values[path] = found[1]


@functools.lru_cache(maxsize=2**14)  # the keys of a state are few, and come again in every part of it
def path_of(name: str) -> Path:
    """Return the parts of a flat name, whichever way it was joined.

    Example:
        >>> path_of("optimizer.state.0.exp_avg"), path_of("['opt_state'][0].mu['w']")
        (('optimizer', 'state', '0', 'exp_avg'), ('opt_state', '0', 'mu', 'w'))
    """
    parts = re.findall(r"[^./\[\]'\"]+", name)
    return bounded(tuple(parts)) or (name,)


def bounded(path: Path) -> Path:
    """Return a path in which all that is very deep is one part, so that no name is work for itself."""
    return path if len(path) <= _DEEPEST else (*path[: _DEEPEST - 1], ".".join(path[_DEEPEST - 1 :]))
