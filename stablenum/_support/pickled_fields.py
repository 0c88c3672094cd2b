"""Pickles of dataclasses with slots, which load although fields have been added to the class since."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["pickled_by_name"]

C = TypeVar("C", bound=type)


def pickled_by_name(cls: C) -> C:
    """Make the pickles of a dataclass with slots hold the fields by name.

    Fields that a pickle does not have get their defaults, and those that the class no longer has are left
    out.

    Example:
        >>> @pickled_by_name
        ... @dataclasses.dataclass(slots=True)
        ... class Point:
        ...     x: float
        ...     y: float = 0.0
        >>> point = Point.__new__(Point)
        >>> point.__setstate__({"x": 3.0})
        >>> point
        Point(x=3.0, y=0.0)
    """
    # Set after the class is made, because some versions of Python 3.11 replace them in a frozen class.
    made: Any = cls
    made.__getstate__ = _fields_of
    made.__setstate__ = _restore
    return cls


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _restore(value: Any, state: Mapping[str, Any] | Sequence[Any]) -> None:
    # A pickle from before the class held its fields by name has their values, in the order of the fields.
    names = [field.name for field in dataclasses.fields(value)]
    known = state if isinstance(state, Mapping) else dict(zip(names, state, strict=False))
    for field in dataclasses.fields(value):
        make = field.default_factory
        found = known.get(field.name, field.default if make is dataclasses.MISSING else make())
        if found is dataclasses.MISSING:
            raise pickle.UnpicklingError(
                f"the pickle of a {type(value).__name__} must have the field {field.name!r}; it has "
                f"{', '.join(map(repr, known)) or 'none'}. Load it with the version that wrote it."
            )
        object.__setattr__(value, field.name, found)
