"""Pickles of dataclasses with slots, which load although fields have been added to the class since."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["pickled_by_name"]

C = TypeVar("C", bound=type)


def pickled_by_name(earlier: Sequence[str] = ()) -> Callable[[C], C]:
    """Return a decorator for a dataclass with slots, whose pickles then hold the fields by name.

    Fields that a pickle does not have get their defaults, and those that the class no longer has are left
    out. Pickles of earlier versions are lists of values without names, as ``dataclasses`` writes them.

    Args:
        earlier: the fields in the order of such a list, if fields were added between others or removed since.
            A list of another length is taken to be in the present order, without the last fields.

    Example:
        >>> @pickled_by_name()
        ... @dataclasses.dataclass(slots=True)
        ... class Point:
        ...     x: float
        ...     y: float = 0.0
        >>> point = Point.__new__(Point)
        >>> point.__setstate__([3.0])
        >>> point
        Point(x=3.0, y=0.0)
    """

    def decorate(cls: C) -> C:
        # Set after the class is made, because some versions of Python 3.11 replace them in a frozen class.
        made: Any = cls
        made.__getstate__ = _fields_of
        made.__setstate__ = lambda self, state: _restore(self, _named(self, state, earlier))
        return cls

    return decorate


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _named(value: Any, state: Any, earlier: Sequence[str]) -> Mapping[str, Any]:
    """Return the pickled values by the names of their fields."""
    if isinstance(state, Mapping):
        return state
    present = [field.name for field in dataclasses.fields(value)]
    return dict(zip(earlier if len(state) == len(earlier) else present, state, strict=False))


def _restore(value: Any, known: Mapping[str, Any]) -> None:
    for field in dataclasses.fields(value):
        if field.name in known:
            found = known[field.name]
        elif field.default is not dataclasses.MISSING:
            found = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found = field.default_factory()
        else:
            raise pickle.UnpicklingError(
                f"the pickle of a {type(value).__name__} must have the field {field.name!r}; it has "
                f"{', '.join(map(repr, known)) or 'none'}. Load it with the version that wrote it."
            )
        object.__setattr__(value, field.name, found)
