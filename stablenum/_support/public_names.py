"""The public names of a package: how they appear from outside, and what ``dir()`` shows."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["imported_later", "present"]


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
        value = namespace.get(name)  # None: it is imported later
        if isinstance(value, type):
            # Annotations are strings that are evaluated in the class's module, so they are evaluated before
            # the module changes.
            vars(value).get("__annotations__", {}).update(inspect.get_annotations(value, eval_str=True))
            value.__module__ = package
    return lambda: public


def imported_later(namespace: dict[str, Any], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a function for a package's ``__getattr__``, which imports a name when it is first used.

    So the package is imported faster by all who do not need the name.

    Args:
        namespace: ``globals()`` of the package.
        modules: for each name, the module that has it.

    Example:
        >>> face = {"__name__": "package"}
        >>> imported_later(face, {"dumps": "json"})("dumps")([1])
        '[1]'
    """

    def import_now(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        namespace[name] = found = getattr(importlib.import_module(modules[name]), name)
        return found

    return import_now
