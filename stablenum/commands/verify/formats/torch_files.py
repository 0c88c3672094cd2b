"""Read what ``torch.save`` wrote, without running any code of the file."""

from __future__ import annotations

import io
import re
import warnings
import zipfile
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from stablenum._support.partners import imported
from stablenum.commands.verify.contents import Contents, Entry, NotCheckedError, Plain
from stablenum.commands.verify.contents import Path as Keys
from stablenum.commands.verify.formats.array_fields import entries_of
from stablenum.commands.verify.leaves import leaves_of
from stablenum.commands.verify.limits import Limits

__all__ = ["LEGACY", "as_numpy", "entries_in", "holds_arrays", "load", "read", "torch_module"]

Tensor: TypeAlias = Any

# How files begin that torch wrote before version 1.6, or with _use_new_zipfile_serialization=False.
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_OLDEST = "2.11"
# Formats that NumPy lacks, by the integers that have their width.
_BITS = {1: "uint8", 2: "int16"}
# What a state may hold beside numbers.
_NO_NUMBERS = (bytes, bytearray)


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
    torch = torch_module()
    tree = load(torch, path, limits)
    arrays: list[Entry] = []
    values: dict[Keys, Plain] = {}
    notes: list[str] = []
    for entry in entries_in(torch, tree, (), notes, limits):
        if isinstance(entry, Entry):
            arrays.append(entry)
        else:
            values[entry[0]] = entry[1]
    if not arrays and not values:
        raise NotCheckedError("unknown", f"it holds no tensor and no number, but {type(tree).__name__}")
    stored = path.stat().st_size
    return Contents(format="torch", arrays=tuple(arrays), values=values, notes=tuple(notes), stored=stored)


def holds_arrays(path: Path) -> bool:
    """Return whether an archive of ``torch.save`` has storages; arguments that were pickled have none."""
    with zipfile.ZipFile(path) as archive:
        return any("/data/" in f"/{name}" for name in archive.namelist())


def load(torch: Any, source: Path | io.BytesIO, limits: Limits) -> Any:
    """Return the object in a file, or in a stream, of ``torch.save``.

    Raises:
        NotCheckedError: it needs code of its own, or is damaged.
    """
    archive = zipfile.is_zipfile(source)
    as_it_is = archive and _check_archive(source, limits)
    if not isinstance(source, Path):
        source.seek(0)
    allowed = [np.dtype, np.ndarray, *_numpy_globals()]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")
            return torch.load(
                str(source) if isinstance(source, Path) else source,
                map_location="cpu",
                weights_only=True,
                mmap=(as_it_is and isinstance(source, Path)) or None,
            )
    except Exception as error:
        raise _named(error) from error


def _numpy_globals() -> list[Any]:
    """Return what rebuilds arrays and numbers of NumPy, and nothing else: it runs no code of the file."""
    multiarray = np.zeros(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    names = ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16", "V1")
    return [frozenset, multiarray, scalar, *{type(np.dtype(name)) for name in names}]


def _named(error: Exception) -> NotCheckedError:
    """Return the reason why torch did not load a file."""
    text = str(error)
    if re.search(
        r"nsupported (global|class)|not an allowed|unrecognized function|Can only build|locklisted", text
    ):
        wanted = re.search(r"GLOBAL ([\w.]+)", text)
        which = f" ({wanted[1]})" if wanted else ""
        return NotCheckedError("unreadable", f"needs arbitrary code{which}; it was not run")
    said = _first_line(text)
    if isinstance(error, EOFError):
        said = said or "the file ends too early"
    elif isinstance(error, KeyError) or not said:
        said = f"{type(error).__name__}: {said}"
    return NotCheckedError("corrupt", said)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _check_archive(source: Path | io.BytesIO, limits: Limits) -> bool:
    """Compare the checksums that the archive has; torch itself does not. Return whether no part is packed.

    Raises:
        NotCheckedError: a part of the archive is damaged, or unpacked it would be too large.
    """
    stored = source.stat().st_size if isinstance(source, Path) else len(source.getbuffer())
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
        limits.check_bytes(sum(member.file_size for member in members), stored)
        for member in members:
            if member.filename.endswith("data.pkl"):
                limits.check("description", member.file_size, f"the bytes of {member.filename}")
            # Without sums (torch.serialization.set_crc32_options) all of them are 0.
            if member.CRC and not _is_sound(archive, member):
                raise NotCheckedError("corrupt", f"the checksum of {member.filename} in it is wrong")
    return all(member.compress_type == zipfile.ZIP_STORED for member in members)


def _is_sound(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(member) as stream:
            while stream.read(2**20):
                pass
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        return False
    return True


# --- what is in it ---------------------------------------------------------------------------


def entries_in(
    torch: Any, tree: Any, path: Keys, notes: list[str], limits: Limits
) -> Iterator[Entry | tuple[Keys, Plain]]:
    """Yield the tensors and plain values in dicts, lists, tuples and sets, with their paths."""
    for at, value in leaves_of(tree, path, limits):
        if isinstance(value, torch.Tensor):
            yield _entry(torch, at or ("tensor",), value, notes)
        elif isinstance(value, np.ndarray | np.generic):
            yield from entries_of(at or ("array",), np.asarray(value), notes)
        elif isinstance(value, bool | int | float | complex | str):
            yield at or ("value",), value
        elif value is not None and not isinstance(value, _NO_NUMBERS):
            notes.append(f"{'.'.join(at)} is of {type(value).__name__}, which was not looked at")


def _entry(torch: Any, path: Keys, tensor: Tensor, notes: list[str]) -> Entry:
    if hasattr(tensor, "to_local"):  # a DTensor, of which a file holds the part of one rank
        notes.append(f"{'.'.join(path)} is the part of one rank")
        tensor = tensor.to_local()
    stored = _stored(torch, tensor.detach())
    return Entry(
        path=path,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        read=lambda: as_numpy(torch, stored),
        size=stored.numel(),
        source=_source(torch, stored),
    )


def _stored(torch: Any, tensor: Tensor) -> Tensor:
    """Return a tensor's elements, each once: of a sparse one those that it stores, of one that is expanded
    along a dimension one of its copies, of windows that overlap all that they cover together."""
    if tensor.is_nested:
        tensor = tensor.values()
    if tensor.layout != torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    if tensor.device.type == "meta" or not tensor.numel():
        return tensor
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)) if tensor.numel() > span else tensor


def _source(torch: Any, tensor: Tensor) -> Hashable:
    """Return what is equal for tensors of the same elements."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return None
    marks = (tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), marks


def as_numpy(torch: Any, tensor: Tensor) -> Any:
    """Return a tensor as an array of NumPy."""
    values = tensor.detach()
    if values.device.type == "meta":
        raise NotCheckedError("corrupt", "a tensor in it has no data (it is on the device meta)")
    if values.is_quantized:
        values = values.dequantize()
    name = str(values.dtype).removeprefix("torch.")
    if name != "bfloat16" and not name.startswith("float8"):
        return values.resolve_conj().resolve_neg().numpy()
    bits = values.contiguous().view(getattr(torch, _BITS[values.element_size()]))
    return bits.numpy().view(np.dtype(getattr(ml_dtypes, name)))
