"""What stands for arrays, numbers and dtypes of NumPy in a pickle.

A dtype of NumPy takes any state from a pickle: one whose fields are objects makes addresses of the bytes of
the file. So dtypes are made from their descriptions, and only such as hold no objects.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from stablenum.commands.verify.formats.restricted_pickles import Built, Function, text_of
from stablenum.commands.verify.leaves import Holder

__all__ = ["numpy_stand_in"]

_OBJECTS = re.compile(r"\|?O\d?")
_PLAIN = re.compile(r"[|<>=]?([biufcVSU]\d{1,9}|[mM]8)")
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
# Records have tens of fields. Chosen, not measured.
_MOST_FIELDS = 200
# NumPy's own limit.
_MOST_DIMENSIONS = 64


class _Dtype(Built):
    """What stands for a dtype: None for one of objects. Fields may share theirs, so they are counted."""

    __slots__ = ("_is_complete", "dtype", "fields")

    def __init__(self, text: str) -> None:
        objects = _OBJECTS.fullmatch(text)
        if not objects and not _PLAIN.fullmatch(text):
            raise TypeError(f"there is no dtype {text!r:.40}")
        self.dtype = None if objects else np.dtype(text)
        self.fields = 1
        self._is_complete = False

    def take(self, state: Any) -> None:
        """Take a state of NumPy: version, byte order, subarray, names, fields, size, alignment, flags."""
        if self._is_complete:
            raise TypeError("a dtype has one state")
        self._is_complete = True
        _, order, sub, names, fields, size = state[:6]
        if self.dtype is None:
            return
        if sub is not None:
            base, shape = sub
            self.fields = _fields([base])
            self.dtype = np.dtype((_plain(base), _shape(shape)))
        elif names is not None:
            self.fields = _fields([fields[name][0] for name in names])
            self.dtype = np.dtype(
                {
                    "names": [text_of(name) for name in names],
                    "formats": [_plain(fields[name][0]) for name in names],
                    "offsets": [fields[name][1] for name in names],
                    "itemsize": size,
                }
            )
        elif order in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(order)


class _Array(Holder, Built):
    """What stands for an array: its values, or the objects in it."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(None, {})

    def take(self, state: Any) -> None:
        """Take a state of NumPy: version, shape, dtype, order, data."""
        shape, dtype, by_columns, data = state[-4:]
        self.value = (
            data if _holds_objects(dtype, data) else _values(shape, dtype, data, by_columns=by_columns)
        )


def _holds_objects(dtype: Any, data: Any) -> bool:
    return isinstance(dtype, _Dtype) and dtype.dtype is None and isinstance(data, list)


def _fields(parts: list[Any]) -> int:
    """Return how many fields dtypes have together, those in one another among them.

    Raises:
        TypeError: they are too many.
    """
    found = 1 + sum(part.fields for part in parts if isinstance(part, _Dtype))
    if found > _MOST_FIELDS:
        raise TypeError(f"a dtype has more than {_MOST_FIELDS:,} fields")
    return found


def _plain(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, _Dtype) or dtype.dtype is None:
        raise TypeError("a dtype without objects is needed")
    return dtype.dtype


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or len(shape) > _MOST_DIMENSIONS:
        raise TypeError("a shape is needed")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise TypeError("a shape is of numbers that are not negative")
    return shape


def _values(shape: Any, dtype: Any, data: Any, *, by_columns: Any = False) -> Any:
    """Return an array of these bytes."""
    kind, sizes = _plain(dtype), _shape(shape)
    if not isinstance(data, bytes) or kind.itemsize == 0 or math.prod(sizes) * kind.itemsize != len(data):
        raise TypeError("the bytes of an array do not make up its shape")
    return np.ndarray(sizes, kind, buffer=data, order="F" if by_columns else "C")


def _scalar(dtype: Any, data: Any = None) -> Any:
    return Holder(data, {}) if isinstance(dtype, _Dtype) and dtype.dtype is None else _values((), dtype, data)


def _reconstructed(_: Any, shape: Any, *__: Any) -> _Array:
    """Return an array that gets its shape later, as NumPy writes it."""
    if shape != (0,):
        raise TypeError("an array that is made has no elements at first")
    return _Array()


def numpy_stand_in(module: str, name: str) -> Function | None:
    """Return what stands for a name of NumPy; None if nothing does."""
    if (module, name) == ("numpy", "dtype"):
        return Function(lambda text, *_: _Dtype(text_of(text)))
    if (module, name) == ("numpy", "ndarray"):
        return Function(lambda *_: _Array())
    if module in _MODULES and name in ("_reconstruct", "scalar"):
        return Function(_scalar if name == "scalar" else _reconstructed)
    return None
