"""Read what NumPy wrote: a ``.npz`` archive or a single ``.npy`` array."""

from __future__ import annotations

import contextlib
import functools
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from stablenum.commands.verify.contents import Contents, Entry, NotCheckedError
from stablenum.commands.verify.formats.array_fields import fields_of
from stablenum.commands.verify.formats.zip_members import Unpacked
from stablenum.commands.verify.limits import Limits

__all__ = ["read_npy", "read_npz"]

# What zipfile, zlib and NumPy raise for damaged files, RuntimeError for an encrypted one among them.
_DAMAGES = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, OverflowError, RuntimeError,
    SyntaxError, TypeError, MemoryError, struct.error,
)  # fmt: skip
_BYTES = 2**20  # that are unpacked at a time
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npz(path: Path, limits: Limits) -> Contents:
    """Return what is in a ``.npz`` archive.

    Raises:
        NotCheckedError: an array holds Python objects, or the archive is damaged.
    """
    arrays: list[Entry] = []
    notes: list[str] = []
    stored = path.stat().st_size
    with contextlib.ExitStack() as opened, _damage_named():
        # It stays open, for its table of contents may be long.
        archive = opened.enter_context(zipfile.ZipFile(path))
        members = archive.infolist()
        limits.check("parts", len(members), "its arrays are many")
        limits.check_bytes(sum(member.file_size for member in members), stored)  # no more is unpacked
        described = [_member(archive, member) for member in members]
        for each in described:
            arrays += each.entries(notes)
        close = opened.pop_all().close
    return Contents(
        format="npz",
        arrays=tuple(arrays),
        notes=tuple(notes),
        stored=stored,
        finish=lambda: _finish(described),
        close=close,
    )


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _Array:
    array = _Array(member.filename.removesuffix(".npy"), lambda: Unpacked(archive, member))
    if array.end != member.file_size:
        raise array.of_other_size()
    return array


def _finish(arrays: Sequence[_Array]) -> None:
    """Unpack what nothing has unpacked to its end, so that every checksum is compared."""
    for array in arrays:
        if not array.finished:
            array.read_to_end()


def read_npy(path: Path, limits: Limits) -> Contents:
    """Return what is in a ``.npy`` file.

    Raises:
        NotCheckedError: it holds Python objects, or it is damaged.
    """
    notes: list[str] = []
    stored = path.stat().st_size
    with _damage_named():
        array = _Array(path.stem, lambda: path.open("rb"))
    if array.end > stored:
        raise array.of_other_size()
    return Contents(format="npy", arrays=tuple(array.entries(notes)), notes=tuple(notes), stored=stored)


class _damage_named:  # noqa: N801, a context manager
    """Turns what NumPy and zipfile raise for a damaged file into :class:`NotCheckedError`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _DAMAGES):
            raise NotCheckedError("corrupt", str(error) or type(error).__name__) from error


def _described(name: str, stream: Any) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Return the shape and the dtype that the header of an array gives, and whether columns come first."""
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise NotCheckedError(
            "unreadable", f"{name} is in version {version} of the format; known are 1.0 and 2.0"
        )
    shape, columns, dtype = _HEADERS[version](stream)
    if dtype.hasobject:
        raise NotCheckedError(
            "unreadable", f"needs arbitrary code: {name} holds Python objects, which are pickled"
        )
    return shape, dtype, columns


class _Array:
    """One array, by itself or in an archive. It is not mapped: it may become shorter while it is read.

    Args:
        name: its name.
        opened: returns a stream of its bytes.

    Attributes:
        end: the bytes that its header and its elements should have together.
        finished: whether it has been read to its end.
    """

    def __init__(self, name: str, opened: Callable[[], Any]) -> None:
        self._name, self._opened = name, opened
        self.finished = False
        with opened() as stream:
            self._shape, self._dtype, self._columns = _described(name, stream)
            self._header = stream.tell()
        self._size = math.prod(self._shape)
        self.end = self._header + self._size * self._dtype.itemsize

    def of_other_size(self) -> NotCheckedError:
        return NotCheckedError(
            "corrupt", f"{self._name} of shape {self._shape} does not have the bytes of that shape"
        )

    def entries(self, notes: list[str]) -> Iterator[Entry]:
        """Yield the entries of the array, if what it holds is known."""
        # stablenum names a format that NumPy does not have behind the name; others lose it.
        shown, _, kind = self._name.rpartition("#")
        dtype = self._dtype
        if shown and dtype.kind == "u" and hasattr(ml_dtypes, kind):
            meant = np.dtype(getattr(ml_dtypes, kind))
        elif dtype == np.dtype("V2"):
            shown, meant = self._name, np.dtype(ml_dtypes.bfloat16)
            notes.append(f"{shown} has lost its dtype; two bytes an element were read as bfloat16")
        elif dtype.kind == "V" and dtype.names is None:
            notes.append(f"{self._name} has lost its dtype ({dtype.str}), and was not looked at")
            return
        elif dtype.names is not None:
            whole = functools.cache(lambda: self._whole(dtype))  # read once for all fields
            yield from fields_of((self._name,), self._shape, dtype, whole, notes)
            return
        else:
            shown, meant = self._name, dtype
        yield self._entry(shown, meant)

    def read_to_end(self) -> None:
        for _ in self._read(_BYTES):
            pass

    def _entry(self, name: str, dtype: np.dtype[Any]) -> Entry:
        return Entry(
            path=(name,),
            dtype=dtype.name,
            shape=self._shape,
            read=lambda: self._whole(dtype),
            blocks=lambda: self._blocks(dtype),
            columns=self._columns,
        )

    def _whole(self, dtype: np.dtype[Any]) -> Any:
        flat, at = np.empty(self._size, dtype), 0
        for block in self._blocks(dtype):
            flat[at : at + block.size] = block
            at += block.size
        return flat.reshape(self._shape, order="F" if self._columns else "C")

    def _blocks(self, dtype: np.dtype[Any]) -> Iterator[Any]:
        """Yield the elements in the order in which they are stored."""
        for data in self._read(max(1, _BYTES // max(1, dtype.itemsize)) * max(1, dtype.itemsize)):
            yield np.frombuffer(data, dtype)

    def _read(self, at_a_time: int) -> Iterator[bytes]:
        with _damage_named(), self._opened() as stream:
            stream.read(self._header)
            for at in range(self._header, self.end, at_a_time):
                data = stream.read(size := min(at_a_time, self.end - at))
                if len(data) < size:
                    raise NotCheckedError("corrupt", f"{self._name} ends too early")
                yield data
            stream.read(1)  # a member of an archive compares its checksum where it ends
        self.finished = True
