"""What is saved of a dict of objects and plain values, and how it is loaded: wholly, or not at all."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from stablenum.checkpoints.finiteness import Kind
from stablenum.checkpoints.names import is_record, is_setting, kind_of_number, may_be_mask
from stablenum.errors import CheckpointError, bad_type
from stablenum_torch._devices.ranks import is_dtensor
from stablenum_torch._recovery.entries import leaves
from stablenum_torch._recovery.trees import copied_tree

__all__ = ["Loading", "State", "captured", "is_stateful"]


class State(NamedTuple):
    """What is saved.

    Attributes:
        values: for each name, a state dict or a plain value.
        kinds: those of the tensors that are not like parameters, by name.
        objects: for each name, the object or the plain value that was given.
    """

    values: dict[str, Any]
    kinds: Mapping[str, Kind] = {}
    objects: Mapping[str, Any] = {}


def is_stateful(value: object) -> bool:
    """Return whether a value has a state dict, and can load one."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def captured(objects: Any) -> State:
    """Return the state of some objects and plain values. Tensors in it are those of the objects, not copies.

    Raises:
        TypeError: ``objects`` is not a dict with strings as keys.
        ValueError: a tensor is on the meta device and has no values.
    """
    if not isinstance(objects, Mapping) or not all(isinstance(name, str) for name in objects):
        hint = 'For example {"model": model, "optimizer": opt}.'
        raise bad_type("state", "a dict of objects and plain values, by name", objects, hint=hint)
    values = {name: value.state_dict() if is_stateful(value) else value for name, value in objects.items()}
    for name, leaf in leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no values. Initialise it, as with to_empty()."
            )
    return State(values, dict(_kinds(objects, values)), objects)


def _kinds(objects: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, Kind]]:
    """Yield the kinds of what may be a mask, and of single numbers outside of models and of moments."""
    in_training = any(map(is_stateful, objects.values()))
    for name, owner in objects.items():
        if isinstance(owner, nn.Module):
            yield from ((f"{name}.{buffer}", "buffer") for buffer, _ in owner.named_buffers())
            continue
        for path, leaf in leaves(values[name], name):
            keys = path.split(".")
            if not isinstance(leaf, (Tensor, np.ndarray)):
                continue
            if math.prod(leaf.shape) == 1 and _is_record(owner, keys, in_training):
                yield path, kind_of_number(keys, optimizer=isinstance(owner, Optimizer))
            elif not isinstance(owner, Optimizer) and may_be_mask(path):
                yield path, "buffer"


def _is_record(owner: Any, keys: Sequence[str], in_training: bool) -> bool:
    if isinstance(owner, Optimizer):
        return is_setting(keys)
    # Of a plain value, nothing but its name tells whether it is a state dict.
    return is_stateful(owner) or is_record(keys, beside_model=in_training and len(keys) == 1)


class Loading:
    """Loads into some objects and plain values, and can undo it.

    Args:
        objects: what is loaded into: an object by its ``load_state_dict``; a plain value is replaced in this
            dict.
        values: what :func:`captured` returned for them, or for more than them.
        where: names the checkpoint in messages.

    Raises:
        CheckpointError: something is not among the values; nothing is changed.
    """

    def __init__(self, objects: MutableMapping[str, Any], values: Mapping[str, Any], where: str) -> None:
        missing = [name for name in objects if name not in values]
        if missing:
            raise CheckpointError(
                f"{where} has no {missing[0]!r}; it has {', '.join(map(repr, values))}. Nothing was changed. "
                "Load only what is there."
            )
        self._objects, self._values, self._where = objects, values, where
        self._before: dict[str, Any] = {}

    def load(self) -> None:
        """Load everything. After any exception, call :meth:`undo`.

        Raises:
            CheckpointError: it does not fit an object.
        """
        name = ""
        try:
            # All copies are made first, since objects may share tensors.
            copies = {}
            for name, value in self._objects.items():
                copies[name] = copied_tree(value.state_dict(), _on_host) if is_stateful(value) else value
            for name, value in self._objects.items():
                self._before[name] = copies[name]
                self._put(name, value, self._values[name])
                if is_stateful(value):
                    _check_range(leaves(value.state_dict(), name), dict(leaves(self._values[name], name)))
        except Exception as error:
            said = str(error).rstrip(".")
            raise CheckpointError(
                f"{self._where} does not fit {name!r}: {said}. Nothing was changed."
            ) from error

    def undo(self) -> None:
        """Put back what was there before :meth:`load`, as far as that has come."""
        with contextlib.ExitStack() as all_of_them:  # also those behind one that cannot be put back
            for name, value in self._before.items():
                target = self._objects[name] if is_stateful(self._objects[name]) else None
                all_of_them.callback(self._put, name, target, value)
        self._before = {}

    def _put(self, name: str, target: Any, value: Any) -> None:
        if is_stateful(target):
            target.load_state_dict(value)
        else:
            self._objects[name] = value


def _check_range(loaded: Iterable[tuple[str, Any]], saved: Mapping[str, Any]) -> None:
    """Check that no finite value has become inf in a narrower format.

    Raises:
        ValueError: one has.
    """
    for name, leaf in loaded:
        old = saved.get(name)
        if not isinstance(old, Tensor) or not isinstance(leaf, Tensor) or old.dtype == leaf.dtype:
            continue
        if is_dtensor(leaf) or not (leaf.is_floating_point() and old.is_floating_point()):
            continue
        if bool(old.isfinite().all()) and not bool(leaf.isfinite().all()):
            raise ValueError(f"{name} would be inf in {str(leaf.dtype).removeprefix('torch.')}")


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
