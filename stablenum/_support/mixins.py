"""Methods for a single object of somebody else's class: its class becomes a subclass of the one it had."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

__all__ = ["Mixin", "mix_in"]

T = TypeVar("T")


class Mixin:
    """Methods in front of those of an object's own class. No attributes are added to the object.

    The subclass has the name of the object's class, which may be written to files and logs, but it cannot be
    found by that name. Copies and pickles are therefore made as those of the object's class, and mixed again.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        mixin, plain = type(self).__bases__
        made: Any = super().__reduce_ex__(protocol)
        make, args, *rest = made
        make, *args = (plain if part is type(self) else part for part in (make, *args))
        return _made, (mixin, make, *args), *rest


def mix_in(mixin: type[Mixin], value: T) -> T:
    """Put a mixin in front of an object's class, and return the object.

    Raises:
        TypeError: the object has no ``__dict__``, but only ``__slots__``: Python then fixes its class.

    Example:
        >>> class Loud(Mixin):
        ...     def pop(self):
        ...         return f"{super().pop()}!"
        >>> class Box(list):
        ...     pass
        >>> mix_in(Loud, Box("ab")).pop()
        'b!'
    """
    if not hasattr(value, "__dict__"):
        raise TypeError(
            f"{type(value).__name__} must have a __dict__; got a class of __slots__, whose objects cannot be "
            "extended. Leave __slots__ out."
        )
    value.__class__ = _mixed(mixin, type(value))  # type: ignore[arg-type]  # mypy: classes are not hashable
    return value


@functools.cache
def _mixed(mixin: type[Mixin], cls: type) -> Any:
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (mixin, cls), same)


def _made(mixin: type[Mixin], make: Any, *args: Any) -> Any:
    """Return what a copy or a pickle begins with."""
    return mix_in(mixin, make(*args))
