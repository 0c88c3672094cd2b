"""The entries of an array of NumPy: of a structured one, each field is an array of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stablenum.commands.verify.contents import Entry, Path

__all__ = ["entries_of", "fields_of"]


def entries_of(path: Path, values: Any, notes: list[str]) -> Iterator[Entry]:
    """Yield the entries of an array that is there.

    Args:
        path: where it is.
        values: the array.
        notes: gets a sentence where what it holds is not known.
    """
    return fields_of(path, values.shape, values.dtype, lambda: values, notes)


def fields_of(
    path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], read: Callable[[], Any], notes: list[str]
) -> Iterator[Entry]:
    """Yield the entries of an array that ``read`` returns."""
    if dtype.names is not None and dtype.fields is not None:
        for name in dtype.names:
            yield from fields_of((*path, name), shape, dtype.fields[name][0], _field(read, name), notes)
    elif dtype.subdtype is not None:
        base, more = dtype.subdtype
        yield from fields_of(path, (*shape, *more), base, read, notes)
    elif dtype.kind in "OV":
        notes.append(f"{'.'.join(path)} is of {dtype}, which was not looked at")
    elif dtype.kind in "biufc":
        yield Entry(path=path, dtype=dtype.name, shape=shape, read=read)


def _field(read: Callable[[], Any], name: str) -> Callable[[], Any]:
    return lambda: read()[name]
