"""The tensors of a model, captured and put back in place: parameters and buffers, saved or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stablenum_torch._devices.groups import data_parallel
from stablenum_torch._devices.ranks import is_dtensor, local_part
from stablenum_torch._recovery.trees import brought_back, copied_tree

__all__ = ["ModulePart", "inside", "tensors_of", "write"]


def inside(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and ``DistributedDataParallel``, which has its own names."""
    copied = data_parallel(model)
    model = model if copied is None else copied.module
    return getattr(model, "_orig_mod", model)  # torch.compile(model) has no public way to it


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return each parameter and buffer with memory once, by the first of its names.

    Buffers that are not saved count too, because the next forward pass may depend on them.
    """
    _reshard(model)
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: t for name, t in found.items() if not nn.parameter.is_lazy(t) and not t.is_meta}


def _reshard(model: nn.Module) -> None:
    """Free the whole parameters that a forward pass without a backward pass leaves in an FSDP2 model."""
    module = sys.modules.get("torch.distributed.fsdp")  # whoever has such a model has imported it
    if module is not None:
        for part in model.modules():
            if isinstance(part, module.FSDPModule):
                part.reshard()


@torch.no_grad()
def write(into: Tensor, values: Tensor) -> None:
    """Copy ``values``, this rank's part, into a tensor; its memory stays the same."""
    part = local_part(into).detach()
    if part.layout is torch.strided:
        # Elements that share memory, as in an expanded tensor, cannot be written one by one.
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in part.stride())
        part, values = part[once], values[once]
    part.copy_(values)


class ModulePart:
    """A model, as a part of the state of a run.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = inside(model)

    def capture(self, copied: Callable[[Tensor], Tensor], *, moved: Callable[[Tensor], Tensor]) -> Any:
        """Return plain values and copies.

        Args:
            copied: copies a tensor.
            moved: copies a tensor that only the optimizer's step changes.
        """
        tensors = {
            name: (moved if isinstance(t, nn.Parameter) else copied)(local_part(t))
            for name, t in tensors_of(self.model).items()
        }
        more = {name: m.get_extra_state() for name, m in self._with_more()}
        return {"tensors": tensors, "more": copied_tree(more, copied)}

    def check(self, kept: Mapping[str, Any]) -> None:
        """Check that the model can take what :meth:`capture` returned. A buffer may have another shape.

        Raises:
            RuntimeError: it cannot; it is another model.
        """
        now = tensors_of(self.model)
        for name, values in kept["tensors"].items():
            tensor = now.get(name)
            may_be_replaced = tensor is not None and not isinstance(tensor, nn.Parameter)
            if not _fits(tensor, values) and not (may_be_replaced and not is_dtensor(tensor)):
                raise RuntimeError(
                    f"model must have the same parameters as when the snapshot was taken; {name} was "
                    f"{_shown(values)} then, and is {_shown(tensor)} now."
                )

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Put back what :meth:`capture` returned, and :meth:`check` has checked."""
        now = tensors_of(self.model)
        for name, values in kept["tensors"].items():
            tensor = now[name]
            if _fits(tensor, values):
                write(tensor, values)
            else:  # the model has replaced the buffer by one of another shape
                owner, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(owner), leaf, values.to(tensor.device, copy=True))
        for name, module in self._with_more():
            if name in kept["more"]:
                module.set_extra_state(brought_back(kept["more"][name], module.get_extra_state()))

    def _with_more(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that have a state of their own."""
        plain = nn.Module.get_extra_state
        return [(n, m) for n, m in self.model.named_modules() if type(m).get_extra_state is not plain]


def _fits(tensor: Tensor | None, values: Tensor) -> bool:
    return tensor is not None and local_part(tensor).shape == values.shape and tensor.dtype == values.dtype


def _shown(tensor: Tensor | None) -> str:
    return "not there" if tensor is None else f"{tensor.dtype} {tuple(local_part(tensor).shape)}"
