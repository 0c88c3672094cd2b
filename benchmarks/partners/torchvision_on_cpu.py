"""torchvision as PyPI has it for Linux, beside a torch for CPUs only: it can be imported all the same.

Lightning and fastai import torchvision. Its compiled part needs CUDA's libraries, and without that part the
import fails at the first operator that it wants to describe.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
from pathlib import Path
from typing import Any

__all__ = ["allow"]

_DEFINED: list[Any] = []  # the operator exists as long as its library does


class _DefineBefore:
    """Defines what is missing just before torchvision is imported, and finds no module itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and not _DEFINED and not _loads():
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DEFINED.append(library)


def _loads() -> bool:
    """Return whether torchvision's compiled part finds the libraries that it needs."""
    import torch  # noqa: F401  # whose own libraries it needs, too

    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    compiled = [] if spec is None or spec.origin is None else Path(spec.origin).parent.glob("_C*.so")
    try:
        for file in compiled:
            ctypes.CDLL(str(file))
    except OSError:
        return False
    return True


def allow() -> None:
    """Let torchvision be imported from now on. Where it can be anyway, nothing changes."""
    if not any(isinstance(finder, _DefineBefore) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DefineBefore())  # type: ignore[arg-type]
