"""The path of a running module, found without hooks: the stack shows which modules run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["ModulePaths"]


class ModulePaths:
    """Paths that start at the model, or at the outermost running module if there is no model.

    Args:
        model: the user's model, if it is known.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._roots: dict[int, dict[int, str]] = {}
        self._model = model
        if model is not None:
            self._of(model)

    def path(self, running: Sequence[nn.Module]) -> str:
        """Return the path of the innermost module of ``running`` (outermost first); "" for a root."""
        if not running:
            return ""
        for root in (self._model, *running):
            if root is None:
                continue
            found = self._of(root).get(id(running[-1]))
            if found is not None:
                return found
        return type(running[-1]).__name__

    def _of(self, root: nn.Module) -> dict[int, str]:
        known = self._roots.get(id(root))
        if known is None:
            # A compiled module wraps the user's module, which is the one that runs and is named here.
            named = [(name, m) for name, m in root.named_modules(remove_duplicate=True)]
            known = {id(m): ".".join(p for p in name.split(".") if p != "_orig_mod") for name, m in named}
            self._roots[id(root)] = known
        return known
