"""Read what ``torch.save`` wrote, without running any code of the file."""

from __future__ import annotations

import contextlib
import warnings
import zipfile
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from stablenum._support.partners import imported
from stablenum.commands.verify.contents import Contents, Entry, Gathered, NotCheckedError, Plain
from stablenum.commands.verify.contents import Path as Keys
from stablenum.commands.verify.formats.array_fields import entries_of
from stablenum.commands.verify.formats.torch_pickles import Storage
from stablenum.commands.verify.formats.torch_storages import LEGACY, Stored
from stablenum.commands.verify.leaves import leaves_of
from stablenum.commands.verify.limits import Limits

__all__ = ["LEGACY", "as_numpy", "entries_in", "holds_arrays", "load", "read", "torch_module"]

Tensor: TypeAlias = Any

_OLDEST = "2.11"
_BLOCK = 2**22  # elements that are read at a time. Chosen: 16 MiB in float32
# Formats that NumPy lacks, by the integers that have their width.
_BITS = {1: "uint8", 2: "int16"}


def torch_module() -> Any:
    """Return torch.

    Raises:
        NotCheckedError: torch is not installed, or too old.
    """
    try:
        return imported("a file that torch wrote", {"torch": "torch"}, _OLDEST)
    except ImportError as error:
        raise NotCheckedError("unreadable", str(error)) from error


def read(path: Path, limits: Limits) -> Contents:
    """Return what is in a file of ``torch.save``.

    Raises:
        NotCheckedError: it needs code of its own, it is damaged, or torch is missing.
    """
    torch, found = torch_module(), Gathered()
    with contextlib.ExitStack() as opened:
        stored = opened.enter_context(Stored(torch, path, limits))
        tree = _loaded(stored)
        for entry in entries_in(torch, tree, (), found.notes, limits, stored.filled):
            found.add(entry)
        if not found.arrays and not found.values:
            raise NotCheckedError("unknown", f"it holds no tensor and no number, but {type(tree).__name__}")
        return Contents(
            format="torch",
            arrays=tuple(found.arrays),
            values=found.values,
            notes=tuple(found.notes),
            stored=stored.size,
            close=opened.pop_all().close,
        )


def holds_arrays(path: Path) -> bool:
    """Return whether an archive of ``torch.save`` has storages; arguments that were pickled have none."""
    with zipfile.ZipFile(path) as archive:
        return any("/data/" in f"/{name}" for name in archive.namelist())


def load(torch: Any, source: bytes, limits: Limits) -> Any:
    """Return the object in the bytes of a file of ``torch.save``.

    Raises:
        NotCheckedError: it needs code of its own, or is damaged.
    """
    with Stored(torch, source, limits) as stored:
        return _loaded(stored)


def _loaded(stored: Stored) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return stored.load()
    except (NotCheckedError, OSError, MemoryError):
        raise
    except Exception as error:
        raise NotCheckedError("corrupt", _said(error)) from error


def _said(error: Exception) -> str:
    """Return why a file could not be loaded."""
    said = "" if isinstance(error, KeyError) else _first_line(str(error))
    if isinstance(error, EOFError):
        return said or "the file ends too early"
    return said or f"its pickle is damaged ({type(error).__name__})"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


# --- what is in it ---------------------------------------------------------------------------


def entries_in(
    torch: Any,
    tree: Any,
    path: Keys,
    notes: list[str],
    limits: Limits,
    filled: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Iterator[Entry | tuple[Keys, Plain]]:
    """Yield the tensors and plain values in dicts, lists, tuples and sets, with their paths.

    Args:
        torch: the package.
        tree: what a file holds.
        path: where the tree is.
        notes: gets a sentence for each part that is not read.
        limits: how much may be in it.
        filled: returns a tensor with its numbers.
    """
    for at, value in leaves_of(tree, path, limits):
        if isinstance(value, Storage):
            value = torch.empty(0, dtype=value.dtype).set_(value.untyped)
        if isinstance(value, torch.Tensor):
            yield _entry(torch, at or ("tensor",), value, filled)
        elif isinstance(value, np.ndarray):
            yield from entries_of(at or ("array",), value, notes)
        elif isinstance(value, Entry):
            yield value
        elif isinstance(value, bool | int | float | complex | str):
            yield at or ("value",), value


def _entry(torch: Any, path: Keys, tensor: Tensor, filled: Callable[[Tensor], Tensor]) -> Entry:
    stored = _stored(tensor)
    marked = stored.is_meta or stored.is_conj() or stored.is_neg()
    in_order = stored.shape == tensor.shape and stored.is_contiguous() and not marked

    def blocks() -> Iterator[Any]:
        for part in stored.reshape(-1).split(_BLOCK):
            yield as_numpy(torch, filled(part))

    return Entry(
        path=path,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        read=lambda: as_numpy(torch, filled(stored)),
        size=stored.numel(),
        source=_source(stored),
        blocks=blocks if in_order and stored.numel() > _BLOCK else None,
    )


def _stored(tensor: Tensor) -> Tensor:
    """Return a tensor's elements, each once: of one that is expanded along a dimension one of its copies, of
    windows that overlap all that they cover together."""
    if tensor.device.type == "meta" or not tensor.numel():
        return tensor
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)) if tensor.numel() > span else tensor


def _source(tensor: Tensor) -> Hashable:
    """Return what is equal for tensors of the same elements."""
    if tensor.device.type == "meta":
        return None
    marks = (tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), marks


def as_numpy(torch: Any, tensor: Tensor) -> Any:
    """Return a tensor as an array of NumPy."""
    if tensor.device.type == "meta":
        raise NotCheckedError("corrupt", "a tensor in it has no data (it is on the device meta)")
    name = str(tensor.dtype).removeprefix("torch.")
    if name != "bfloat16" and not name.startswith("float8"):
        return tensor.resolve_conj().resolve_neg().numpy()
    bits = tensor.contiguous().view(getattr(torch, _BITS[tensor.element_size()]))
    return bits.numpy().view(np.dtype(getattr(ml_dtypes, name)))
