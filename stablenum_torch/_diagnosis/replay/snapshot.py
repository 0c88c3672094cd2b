"""Restore everything that a replay changes, bit for bit.

Memory is copied when it is first written, so parameters that are never written cost nothing. Modules,
optimizers, schedulers and scalers are kept as shallow copies of their attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stablenum.arrays import leaves
from stablenum.guard.decide import GuardState
from stablenum_torch._devices.generators import rng_state, set_rng_state
from stablenum_torch._devices.waits import HaltWatch
from stablenum_torch._diagnosis.replay.modes import Modes
from stablenum_torch._diagnosis.replay.tensor_memory import is_freed, view_key
from stablenum_torch._step.guard import Guard
from stablenum_torch._step.parameters import TrackedParameters

__all__ = ["Snapshot"]


class Snapshot:
    """The state before a replay."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._restored = False
        self._rng = rng_state()
        self._modes = Modes()
        self._objects = [_Attributes(x) for x in _with_parts(objects)]
        self._tensors: dict[int, _TensorState] = {}
        self._memory: list[tuple[Tensor, Tensor]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        # The guard writes its state through NumPy, which no dispatch mode sees.
        for state in (x for o in self._objects for x in o.values.values() if isinstance(x, GuardState)):
            for leaf in leaves(state):
                self.keep_memory(leaf)

    def keep_tensor(self, tensor: Tensor) -> None:
        """Keep a tensor's gradient and the memory that the tensor points to, and clear the gradient."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = _TensorState(tensor)
            if tensor.is_leaf:
                tensor.grad = None

    def keep_memory(self, tensor: Tensor) -> None:
        """Copy the whole storage of a tensor that is about to be written."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            source = tensor.detach()
            self._memory.append((source, source.clone()))
            return
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._memory.append((whole, whole.clone()))

    def keep_generator(self, generator: torch.Generator) -> None:
        """Keep a generator that the user made."""
        if all(known is not generator for known, _ in self._generators):
            self._generators.append((generator, generator.get_state()))

    def restore(self) -> None:
        """Restore everything; a second call completes an interrupted one, and otherwise does nothing."""
        if self._restored:
            return
        self._modes.restore()  # first, so that nothing of the following is recorded
        torch.set_grad_enabled(False)
        for target, saved in reversed(self._memory):
            if is_freed(target):  # a parameter that ``fully_shard`` puts together only while it is used
                continue
            with torch.inference_mode(target.is_inference()):
                target.copy_(saved)
        for obj in self._objects:
            obj.restore()
        for tensor in self._tensors.values():
            tensor.restore()
        for generator, state in self._generators:
            generator.set_state(state)
        set_rng_state(self._rng)
        self._modes.restore()
        self._restored = True


class _TensorState:
    """One tensor object: its gradient, its flags, its hooks, and the memory it points to."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.grad = tensor.grad if tensor.is_leaf else None
        self.requires_grad = tensor.requires_grad
        self.data = tensor.detach() if tensor.layout is torch.strided else None
        self.place = self._at(tensor)
        self.hooks = None if tensor._backward_hooks is None else dict(tensor._backward_hooks)
        accumulated = getattr(tensor, "_post_accumulate_grad_hooks", None)
        self.accumulated = None if accumulated is None else dict(accumulated)

    @staticmethod
    def _at(tensor: Tensor) -> Any:
        return (tensor.data_ptr(), view_key(tensor)) if tensor.layout is torch.strided else None

    def restore(self) -> None:
        tensor = self.tensor
        if self.data is not None and self._at(tensor) != self.place:
            tensor.data = self.data
        if tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad
        _restore_hooks(tensor._backward_hooks, self.hooks)
        _restore_hooks(getattr(tensor, "_post_accumulate_grad_hooks", None), self.accumulated)


def _restore_hooks(now: Any, before: dict[Any, Any] | None) -> None:
    if now is not None and dict(now) != (before or {}):
        now.clear()
        now.update(before or {})


class _Attributes:
    """The attributes of an object, and the contents of containers among them, some levels deep."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj
        self.values = dict(vars(obj))
        self.contents = [(x, _copied(x)) for x in _containers(self.values.values(), depth=3)]

    def restore(self) -> None:
        for container, before in ((vars(self.obj), self.values), *self.contents):
            if _same(container, before):
                continue
            # What is missing comes back first, so that an interrupt leaves no container empty.
            if isinstance(container, dict):
                container.update(before)
                for key in [key for key in container if key not in before]:
                    del container[key]
                if not _same(container, before):  # the order, too
                    for key in before:
                        container[key] = container.pop(key)
            elif isinstance(container, set):
                container |= before
                container &= before
            else:
                container[:] = before


def _copied(x: Any) -> Any:
    return dict(x) if isinstance(x, dict) else set(x) if isinstance(x, set) else list(x)


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        if len(now) != len(before):
            return False
        # By identity: tensors, which are keys of an optimizer's state, have no single answer to ==.
        return all(k is j and now[k] is before[j] for k, j in zip(now, before))
    if isinstance(now, set):
        return bool(now == before)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before))


def _containers(values: Iterable[Any], *, depth: int) -> list[Any]:
    found = []
    for x in values:
        if isinstance(x, dict | list | set) and hasattr(x, "clear"):
            found.append(x)
            if depth and not isinstance(x, set):
                found += _containers(x.values() if isinstance(x, dict) else x, depth=depth - 1)
    return found


_PARTS = (torch.optim.Optimizer, Guard, TrackedParameters, HaltWatch)


def _with_parts(objects: Iterable[Any]) -> list[Any]:
    """Return the objects and their parts, such as submodules, a guard and its inner optimizer."""
    found: dict[int, Any] = {}
    waiting = list(objects)
    while waiting:
        obj = waiting.pop(0)
        if id(obj) in found:
            continue
        found[id(obj)] = obj
        if isinstance(obj, nn.Module):
            found |= {id(module): module for module in obj.modules()}
        else:
            waiting += [x for x in vars(obj).values() if isinstance(x, _PARTS)]
    return list(found.values())
