"""The public names of a package: how they appear from outside, and what ``dir()`` shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["present"]


def present(namespace: dict[str, Any]) -> Callable[[], list[str]]:
    """Let the public classes of a package carry its name, and return the package's ``__dir__``.

    The files of a package are private and may move: pickles, messages and documentation then name a class by
    the package that it is imported from. What looks for the source of a class by its module, as
    ``inspect.getsource`` does before Python 3.13, does not find it; methods and functions are found.

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
            # Annotations are text that is looked up in the class's module, so they are looked up first.
            vars(value).get("__annotations__", {}).update(inspect.get_annotations(value, eval_str=True))
            value.__module__ = package
    return lambda: public
