"""A small stand-in for Triton that runs the library's kernels in NumPy, on CPU tensors by their addresses.

It has what these kernels use, and rounds as IEEE 754 says. A whole guarded step of the path of a GPU runs on
it without Triton and without a GPU.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import stablenum_torch._devices.kernels.launches as launches
import stablenum_torch._step.by_kernels as by_kernels

launched: Counter[str] = Counter()
formats: list[dict[str, Any]] = []  # of the arguments of each launch, by name
_program = [0, 1]  # the number of the program that runs, and how many there are

_NUMPY = {
    torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16, torch.int64: np.int64, torch.int32: np.int32, torch.bool: np.bool_,
}  # fmt: skip


class Pointer:
    """An address, or an array of addresses, of elements of a format."""

    def __init__(self, address: Any, dtype: Any) -> None:
        self.address, self.dtype = address, np.dtype(dtype)

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.address + np.asarray(elements, np.int64) * self.dtype.itemsize, self.dtype)


class PointerType:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype


def _elements(address: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The memory between the first and the last address as an array, and the places in it."""
    low, high = int(address.min()), int(address.max())
    raw = (ctypes.c_byte * (high - low + dtype.itemsize)).from_address(low)
    return np.frombuffer(raw, np.uint8), address - low


def _one(address: int, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer((ctypes.c_byte * dtype.itemsize).from_address(address), dtype)


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Any:
    if mask is None and isinstance(pointer.address, (int, np.integer)):
        return _one(int(pointer.address), pointer.dtype)[0]
    address, dtype = np.asarray(pointer.address), pointer.dtype
    if mask is None:
        mask = np.True_
    address, mask = np.broadcast_arrays(address, mask)
    result = np.full(address.shape, 0 if other is None else other, dtype)
    if mask.any():
        chosen = address[mask]
        raw, places = _elements(chosen, dtype)
        if len(raw) == len(places) * dtype.itemsize:  # one after the other, as all of these kernels lie
            result[mask] = raw.view(dtype)
        else:
            index = places[:, None] + np.arange(dtype.itemsize)
            result[mask] = raw[index].copy().view(dtype)[:, 0]
    return result[()]


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    if mask is None and isinstance(pointer.address, (int, np.integer)):
        _one(int(pointer.address), pointer.dtype)[0] = value
        return
    address, dtype = np.asarray(pointer.address), pointer.dtype
    address, mask = np.broadcast_arrays(address, np.True_ if mask is None else mask)
    values = np.broadcast_to(np.asarray(value).astype(dtype), address.shape)
    if mask.any():
        raw, places = _elements(address[mask], dtype)
        index = places[:, None] + np.arange(dtype.itemsize)
        raw.flags.writeable = True
        raw[index] = np.ascontiguousarray(values[mask]).view(np.uint8).reshape(len(places), -1)


def cast(value: Any, dtype: Any) -> Any:
    if isinstance(dtype, PointerType):
        return Pointer(value, dtype.dtype)
    return np.asarray(value).astype(dtype)[()]


def _multiple_of(pointer: Pointer, of: int) -> Pointer:
    assert pointer.address % of == 0
    return pointer


language: Any = types.ModuleType("triton.language")
vars(language).update(
    constexpr=None, float64=np.float64, float32=np.float32, float16=np.float16,
    bfloat16=ml_dtypes.bfloat16, int64=np.int64, int32=np.int32, int1=np.bool_,
    pointer_type=PointerType, load=load, store=store, cast=cast, multiple_of=_multiple_of,
    arange=np.arange, where=np.where, abs=np.abs, floor=np.floor, sqrt=np.sqrt, sqrt_rn=np.sqrt,
    # Triton's leave NaN out.
    minimum=np.fmin, maximum=np.fmax, div_rn=np.divide, sort=np.sort,
    sum=lambda x, axis: np.sum(x, axis=axis, dtype=np.asarray(x).dtype),
    max=lambda x, axis: np.max(x, axis=axis), min=lambda x, axis: np.min(x, axis=axis),
    argmax=lambda x, axis: np.argmax(x, axis=axis),
    zeros=lambda shape, dtype: np.zeros(shape, dtype),
    full=lambda shape, value, dtype: np.full(shape, value, dtype)[()],
    program_id=lambda axis: _program[0], num_programs=lambda axis: _program[1],
    debug_barrier=lambda: None,
)  # fmt: skip


class Kernel:
    """What ``triton.jit`` returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, enable_fp_fusion: bool = True, **constants: Any) -> None:
            launched[self._function.__name__] += 1
            names = inspect.signature(self._function).parameters
            formats.append({n: getattr(a, "dtype", type(a)) for n, a in zip(names, args, strict=False)})
            _program[1] = grid[0]
            given = [
                Pointer(a.data_ptr(), _NUMPY[a.dtype]) if isinstance(a, torch.Tensor) else a for a in args
            ]
            with np.errstate(all="ignore"):
                for _program[0] in range(grid[0]):
                    self._function(*given, **constants)

        return launch


def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return Kernel if function is None else Kernel(function)


@contextmanager
def triton_stand_in() -> Iterator[Counter[str]]:
    """In this context the library's kernels are made with the stand-in; what is returned counts launches by
    name."""
    honest = launches.made

    def made(source: str, name: str) -> Any:
        package: Any = types.ModuleType("triton")
        package.jit, package.language = jit, language
        # For as long as the source is run: torch looks for Triton, too.
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "triton", package)
            patch.setitem(sys.modules, "triton.language", language)
            return honest(source, name)

    launched.clear()
    formats.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "made", made)
        _forget()
        yield launched
    _forget()


def _forget() -> None:
    launches.decide_kernel.cache_clear()
    launches.squares_kernel.cache_clear()
    by_kernels._trusted.clear()
