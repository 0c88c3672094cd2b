"""Modules that are imported before they are asked for, and seem not to be."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

__all__ = ["Ready"]


@dataclass(frozen=True, slots=True)
class _Group:
    """What was first imported with a package, and the packages that were imported with it before."""

    name: str
    needs: Sequence[str]
    modules: Mapping[str, ModuleType]

    def put_back(self, name: str) -> None:
        """Put back what an import of this module loads: the whole group, or another package that it needs."""
        root = name.partition(".")[0]
        whole = root == self.name.partition(".")[0]
        if whole:
            for needed in self.needs:
                importlib.import_module(needed)
        for key, module in self.modules.items():
            if whole or key.partition(".")[0] == root:
                sys.modules.setdefault(key, module)


class Ready(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that were imported and then taken out of ``sys.modules``.

    The first import of one puts its modules back, as an import in a new interpreter would load them. For
    others, such as finders that wait for an import, it is an ordinary import with a spec and a loader.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def load(self, packages: Mapping[str, Sequence[str]]) -> None:
        """Import and hide packages; each is given with those before it that it needs."""
        for name, needs in packages.items():
            before = set(sys.modules)
            importlib.import_module(name)
            found = {key: module for key, module in sys.modules.items() if key not in before}
            self._groups.append(_Group(name, needs, found))
        for group in self._groups:
            for key in group.modules:
                sys.modules.pop(key, None)

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a module that is ready."""
        module = self._module(fullname)
        if module is None:
            return None
        self._specs[fullname] = module.__spec__
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=getattr(module, "__file__", None), is_package=hasattr(module, "__path__")
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Return the module as it was imported."""
        return self._module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Put it back with those that were imported with it; its body has run already."""
        name = module.__spec__.name if module.__spec__ is not None else module.__name__
        module.__spec__ = self._specs[name]
        next(g for g in self._groups if name in g.modules).put_back(name)
        if name == "numpy":
            module.random.seed()  # of each process its own

    def _module(self, name: str) -> ModuleType | None:
        return next((g.modules[name] for g in self._groups if name in g.modules), None)
