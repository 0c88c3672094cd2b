"""Callbacks for when the script has imported a package, so that the watcher itself imports no framework.

A script may set environment variables that a framework reads when it is imported, so the script has to import
the framework.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

__all__ = ["AfterImport"]


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds the named packages as Python does, and calls each one's callback once after it is loaded."""

    def __init__(self, callbacks: Mapping[str, Callable[[], None]]) -> None:
        self._callbacks = dict(callbacks)

    def install(self) -> None:
        """Install the finder before all others; for packages that are already loaded, call back now."""
        sys.meta_path.insert(0, self)
        for name in [name for name in self._callbacks if name in sys.modules]:
            self._callbacks.pop(name)()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec from the other finders, with a loader that calls back."""
        callback = self._callbacks.pop(fullname, None)
        if callback is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self._callbacks[fullname] = callback
            return spec
        spec.loader = _Loader(spec.loader, callback)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._inner, self._then = inner, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The package keeps its own loader (for resources and reloads), not this one.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._then()
