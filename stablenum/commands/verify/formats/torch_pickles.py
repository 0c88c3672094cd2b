"""What stands for tensors, storages and dtypes of torch in a pickle.

Tensors are made from their storages with checked sizes, and get none of the attributes that a file has for
them, which could hide a method; these are looked at beside the tensor.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from stablenum.commands.verify.formats.numpy_pickles import numpy_stand_in
from stablenum.commands.verify.formats.restricted_pickles import (
    Function,
    RestrictedUnpickler,
    needs_code,
    text_of,
)
from stablenum.commands.verify.leaves import Holder
from stablenum.commands.verify.limits import Limits

__all__ = ["Storage", "TorchUnpickler"]

Tensor: TypeAlias = Any

# The dtypes of torch's classes of storages, by what comes before "Storage".
_STORAGES = {
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Int": "int32",
    "Long": "int64",
    "Short": "int16",
    # Quantized numbers are integers, and have their scales beside them.
    "QInt8": "int8",
    "QInt32": "int32",
    "QUInt2x4": "uint8",
    "QUInt4x2": "uint8",
    "QUInt8": "uint8",
    "Untyped": "uint8",
}
# How many numbers of four or two bits lie in a byte.
_PACKED = {"QUInt2x4": 4, "QUInt4x2": 2}
# torch's own limit.
_MOST_DIMENSIONS = 64
# Quantization has one scale for all, or one for each channel.
_SCALES = {2: ("scale", "zero_point"), 3: ("scales", "zero_points", "axis")}


@dataclass(frozen=True, slots=True)
class Storage:
    """The numbers of tensors: untyped ones of torch, and the dtype that they were saved with."""

    untyped: Any
    dtype: Any
    packed: int = 1


@dataclass(frozen=True, slots=True)
class _StorageKind:
    """What stands for a class of storages."""

    dtype: Any
    packed: int


class TorchUnpickler(RestrictedUnpickler):
    """Reads the pickle of a file of ``torch.save``.

    Args:
        data: the pickle, and what lies behind it.
        limits: how much the stand-ins may make.
        stored: the bytes of the file.
        torch: the package.
        storage: returns an untyped storage by its key, dtype and number of bytes.
    """

    def __init__(
        self,
        data: io.BytesIO,
        limits: Limits,
        stored: int,
        torch: Any,
        storage: Callable[[str, Any, int], Any],
    ) -> None:
        super().__init__(data, limits, stored)
        self._torch, self._storage = torch, storage

    def stand_in(self, module: str, name: str) -> Any:
        torch = self._torch
        if module in ("torch", "torch.storage") and name.removesuffix("Storage") in _STORAGES:
            kind = name.removesuffix("Storage")
            return _StorageKind(getattr(torch, _STORAGES[kind]), _PACKED.get(kind, 1))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.qscheme):
            return getattr(torch, name)
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch", "Size"): lambda sizes=(): self._sizes(sizes),
            ("torch", "Tensor"): _refused_class,
            ("torch", "device"): lambda *parts: ":".join(map(_part_of_device, parts)),
            ("torch.nn.parameter", "Parameter"): _refused_class,
            ("torch.serialization", "_get_layout"): text_of,
            ("torch._tensor", "_rebuild_from_type_v2"): self._of_type,
            ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): lambda data, *_: data,
            ("torch._utils", "_rebuild_device_tensor_from_numpy"): lambda data, *_: data,
            ("torch._utils", "_rebuild_meta_tensor_no_storage"): self._meta,
            ("torch._utils", "_rebuild_nested_tensor"): lambda data, *_: data,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda data, _, __, state: _with(data, state),
            ("torch._utils", "_rebuild_qtensor"): self._quantized,
            ("torch._utils", "_rebuild_sparse_tensor"): _sparse,
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor_v2,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_v3,
        }
        if (module, name) in known:
            return Function(known[module, name])
        return numpy_stand_in(module, name) or super().stand_in(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return a storage; old files have a view of another one behind the five parts."""
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] not in ("storage", b"storage"):
            return super().persistent_load(pid)
        _, kind, key, _, count, *view = pid
        if not isinstance(kind, _StorageKind) or type(count) is not int or count < 0:
            raise TypeError("a storage is described by its type, key, place and number of elements")
        size = kind.dtype.itemsize
        untyped = self._storage(text_of(key), kind.dtype, -(-count // kind.packed) * size)
        if view and view[0] is not None:
            _, offset, length = view[0]
            offset, length = self._sizes((offset, length))
            if offset + length > count:
                raise ValueError("a storage is a view beyond another one")
            untyped = untyped[offset * size : (offset + length) * size]
        return Storage(untyped, kind.dtype, kind.packed)

    # --- tensors -----------------------------------------------------------------------------

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, dtype: Any = None) -> Tensor:
        """Return the tensor of these sizes.

        Raises:
            ValueError: it would reach beyond its storage.
        """
        if not isinstance(storage, Storage):
            raise TypeError(f"a tensor has a storage, not {type(storage).__name__}")
        dtype = storage.dtype if dtype is None else dtype
        if not isinstance(dtype, self._torch.dtype):
            raise TypeError(f"a tensor has a dtype, not {type(dtype).__name__}")
        (start,), sizes, strides = self._sizes((offset,)), self._sizes(size), self._sizes(stride)
        if len(sizes) != len(strides):
            raise ValueError("a tensor has one stride for each of its sizes")
        if storage.packed > 1:  # where in a byte the numbers are does not matter
            sizes, strides, start = (storage.untyped.nbytes(),), (1,), 0
        end = start + 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        if 0 not in sizes and end * dtype.itemsize > storage.untyped.nbytes():
            raise ValueError(f"a tensor of {end:,} elements reaches beyond its storage")
        made = self._torch.empty(0, dtype=dtype)
        if 0 in sizes:
            return made.reshape(sizes)
        return made.set_(storage.untyped, start, sizes, strides)

    def _tensor_v2(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Tensor:
        """Return a tensor; more are whether it needs a gradient, its hooks, and its marks."""
        return self._marked(self._tensor(storage, offset, size, stride), more[2:])

    def _tensor_v3(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Tensor:
        """Return a tensor; the third of more is its dtype."""
        return self._marked(self._tensor(storage, offset, size, stride, more[2]), more[3:])

    def _marked(self, tensor: Tensor, marks: tuple[Any, ...]) -> Tensor:
        """Return a tensor whose numbers may stand for their conjugates, or have another sign."""
        marked = marks[0] if marks and isinstance(marks[0], dict) else {}
        if marked.get("conj"):
            tensor = self._torch.conj(tensor)
        if marked.get("neg"):
            tensor = self._torch._neg_view(tensor)
        return tensor

    def _quantized(self, storage: Any, offset: Any, size: Any, stride: Any, scheme: Any, *_: Any) -> Holder:
        scales = scheme[1:]
        names = _SCALES[len(scales)]
        return Holder(self._tensor(storage, offset, size, stride), dict(zip(names, scales, strict=True)))

    def _meta(self, dtype: Any, size: Any, *_: Any) -> Tensor:
        return self._torch.empty(self._sizes(size), dtype=dtype, device="meta")

    def _of_type(self, function: Any, _: Any, arguments: Any, state: Any) -> Any:
        if type(function) is not Function:
            raise needs_code("torch._tensor._rebuild_from_type_v2")
        return _with(self.called(function, arguments), state)

    def _sizes(self, sizes: Any) -> tuple[int, ...]:
        if not isinstance(sizes, tuple | list) or len(sizes) > _MOST_DIMENSIONS:
            raise TypeError("sizes are a tuple of as many numbers as there are dimensions")
        if not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
            raise TypeError("sizes are numbers that are not negative, and have 63 bits")
        return tuple(sizes)


def _with(data: Any, state: Any) -> Any:
    """Return a tensor and its attributes: a dict, or one of those in a dict and one of those in slots."""
    for part in state if isinstance(state, tuple) else (state,):
        if part is not None and not isinstance(part, dict):
            raise TypeError(f"attributes are a dict, not {type(part).__name__}")
        data = Holder(data, part or {})
    return data


def _sparse(layout: Any, data: Any) -> Holder:
    """Return the numbers of a sparse tensor, and where they are."""
    if text_of(layout) == "torch.sparse_coo":
        indices, values, *_ = data
        return Holder(values, {"indices": indices})
    compressed, plain, values, *_ = data
    return Holder(values, {"compressed_indices": compressed, "plain_indices": plain})


def _refused_class(*_: Any) -> Any:
    raise needs_code("torch.Tensor")


def _part_of_device(part: Any) -> str:
    return str(part) if type(part) is int and 0 <= part < 2**31 else text_of(part)
