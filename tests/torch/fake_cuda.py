"""Fake tensors that claim to be on a GPU but hold no data.

They show, without a GPU, what a step would do on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_END = 2**62


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made here may be on ``CUDA``."""
    with FakeTensorMode(), _FusedSGD(), _Indexing():
        yield


class _FusedSGD(TorchDispatchMode):
    """torch has no fake implementation of this operation; it writes in place and returns nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused_sgd = torch.ops.aten._fused_sgd_
        if func in (fused_sgd.default, fused_sgd.tensor_lr):
            return None
        return func(*args, **(kwargs or {}))


class _Indexing(TorchFunctionMode):
    """Indexes and copies by operations: for Python's own, a CPU build of torch cannot set the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return _indexed(*args)
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if part is None:
            tensor = torch.ops.aten.unsqueeze(tensor, dim)
            dim += 1
        elif isinstance(part, int):
            tensor = torch.ops.aten.select(tensor, dim, part)
        elif isinstance(part, slice):
            stop = _END if part.stop is None else part.stop
            tensor = torch.ops.aten.slice(tensor, dim, part.start or 0, stop, part.step or 1)
            dim += 1
        else:
            # A tensor or a list as an index is a copy from the host or a wait.
            raise AssertionError(f"indexed by {part!r}")
    return tensor


class Operations(TorchDispatchMode):
    """Notes every operation: ``seen`` has its name, its tensors' devices, and whether memory is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, frozenset[str], bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        devices = {t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
        self.seen.append((str(func), frozenset(devices), bool(kwargs.get("pin_memory"))))
        return out

    def off_the_device(self) -> list[str]:
        """Operations with a tensor on the host: copies to or from it, which a CUDA graph cannot contain."""
        return [name for name, devices, pinned in self.seen if pinned or devices - {"cuda"}]
