"""The public names of a package: how they appear from outside, and what ``dir()`` shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["present"]


def present(namespace: dict[str, Any]) -> Callable[[], list[str]]:
    """Set ``__module__`` of a package's public classes to the package, and return the package's ``__dir__``.

    The files of a package are private and may move, so pickles, messages and documentation name a class by
    the package from which it is imported. Tools that look up the source of a class by its module, as
    ``inspect.getsource`` does before Python 3.13, do not find the source; that of methods and functions is
    found.

    Args:
        namespace: ``globals()`` of the package, with its ``__all__``.

    Returns:
        A function for the package's ``__dir__``, which lists the public names and nothing else.

    Example:
        >>> class Rule:
        ...     pass
        >>> face = {"__name__": "package", "__all__": ["Rule"], "Rule": Rule, "json": None}
        >>> present(face)(), Rule.__module__
        (['Rule'], 'package')
    """
    package, public = namespace["__name__"], sorted(namespace["__all__"])
    for name in public:
        value = namespace[name]
        if isinstance(value, type):
            # Annotations are strings that are evaluated in the class's module, so they are evaluated before
            # the module changes.
            vars(value).get("__annotations__", {}).update(inspect.get_annotations(value, eval_str=True))
            value.__module__ = package
    return lambda: public
