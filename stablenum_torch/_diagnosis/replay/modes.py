"""The modes that a replay sets, of torch and of warnings: restored even where a context was not left."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import _get_dispatch_stack_at, _len_torch_dispatch_stack

__all__ = ["Modes"]


class Modes:
    """The modes at the time when the object is made."""

    def __init__(self) -> None:
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._functions, self._dispatches = torch._C._len_torch_function_stack(), _len_torch_dispatch_stack()
        self._warnings = warnings.filters, warnings.showwarning
        self._autocast = _autocast()
        compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
        self._stance = getattr(compiler, "_stance", None)

    def restore(self) -> None:
        """Restore the modes that differ."""
        while torch._C._len_torch_function_stack() > self._functions:
            torch._C._pop_torch_function_stack()
        while _len_torch_dispatch_stack() > self._dispatches:
            _get_dispatch_stack_at(_len_torch_dispatch_stack() - 1).__exit__(None, None, None)
        if warnings.filters is not self._warnings[0]:
            warnings.filters, warnings.showwarning = self._warnings
            getattr(warnings, "_filters_mutated", lambda: None)()
        compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
        if self._stance is not None and getattr(compiler, "_stance", None) is not self._stance:
            compiler._set_stance(self._stance)
        for kind, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._grad)


def _autocast() -> dict[str, tuple[bool, torch.dtype]]:
    return {k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")}
