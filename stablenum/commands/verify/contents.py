"""What a reader finds in a checkpoint: arrays and plain values by their paths, or why it was not read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["Contents", "Entry", "NotCheckedError", "Path", "Plain", "path_of"]

Path: TypeAlias = tuple[str, ...]
Plain: TypeAlias = "int | float | str | bool"
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
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]

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
    """

    format: str
    arrays: tuple[Entry, ...] = ()
    values: Mapping[Path, Plain] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    faults: Mapping[str, float] = field(default_factory=dict)


def path_of(name: str) -> Path:
    """Return the parts of a flat name, whichever way it was joined.

    Example:
        >>> path_of("optimizer.state.0.exp_avg"), path_of("['opt_state'][0].mu['w']")
        (('optimizer', 'state', '0', 'exp_avg'), ('opt_state', '0', 'mu', 'w'))
    """
    return tuple(re.findall(r"[^./\[\]'\"]+", name)) or (name,)
