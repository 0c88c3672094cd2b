"""The pickle and the storages in a file of ``torch.save``: an archive, or one pickle after another.

One reader finds, checks and reads every part, so that nothing is judged but what was checked.
"""

from __future__ import annotations

import io
import lzma
import mmap
import os
import sys
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from stablenum.commands.verify.contents import NotCheckedError
from stablenum.commands.verify.formats.torch_pickles import TorchUnpickler
from stablenum.commands.verify.formats.zip_members import Unpacked
from stablenum.commands.verify.limits import Limits

__all__ = ["LEGACY", "Stored"]

# How files begin that torch wrote before version 1.6, or with _use_new_zipfile_serialization=False.
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_VERSION = 1001
# The fixed part of a local header in an archive, and where in it the lengths of the name and the rest are.
_HEADER, _LENGTHS = 30, slice(26, 30)
_BLOCK = 2**20  # bytes that are unpacked at a time
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, OSError, RuntimeError,
    ValueError,
)  # fmt: skip


class Stored:
    """A file of ``torch.save``, or the bytes of one.

    The storages of an archive on the disk have their sizes at first, and no numbers: :meth:`filled` reads
    those of a tensor. The file is not mapped into memory, where one that shortens it would end this process.

    Attributes:
        size: the number of bytes.
    """

    def __init__(self, torch: Any, source: Path | bytes, limits: Limits) -> None:
        self._torch, self._limits = torch, limits
        self._file = source.open("rb") if isinstance(source, Path) else io.BytesIO(source)
        self._held = bytearray(source) if isinstance(source, bytes) else None
        self.size = self._file.seek(0, os.SEEK_END)
        self._storages: dict[str, Any] = {}
        self._unread: dict[int, int] = {}  # where the bytes of a storage begin in the file, by its address

    def __enter__(self) -> Stored:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def load(self) -> Any:
        """Return the object in it.

        Raises:
            NotCheckedError: it needs code of its own, or is damaged.
            Exception: it is damaged.
        """
        if self._bytes(0, len(LEGACY)) == LEGACY:
            return self._load_pickles()
        return self._load_archive()

    def filled(self, tensor: Any) -> Any:
        """Return a tensor with the numbers that the file has for it.

        Raises:
            NotCheckedError: the file has become shorter.
        """
        begin = self._unread.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if begin is None:
            return tensor
        width, sizes, strides = tensor.element_size(), tensor.size(), tensor.stride()
        span = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        held = bytearray(span * width)
        self._file.seek(begin + tensor.storage_offset() * width)
        if self._file.readinto(held) < len(held):
            raise NotCheckedError("corrupt", "the file has become shorter while it was read")
        made = self._torch.frombuffer(held, dtype=self._torch.uint8).view(tensor.dtype)
        made = made.as_strided(sizes, strides)
        made = self._torch.conj(made) if tensor.is_conj() else made
        return self._torch._neg_view(made) if tensor.is_neg() else made

    def _bytes(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)

    def _unpickler(self, data: io.BytesIO, storage: Any) -> TorchUnpickler:
        return TorchUnpickler(data, self._limits, self.size, self._torch, storage)

    def _untyped(self, buffer: Any, offset: int, size: int) -> Any:
        """Return a storage of the bytes in a buffer, which are not copied."""
        if not size:
            return self._torch.UntypedStorage(0)
        uint8 = self._torch.uint8
        return self._torch.frombuffer(buffer, dtype=uint8, count=size, offset=offset).untyped_storage()

    # --- an archive --------------------------------------------------------------------------

    def _load_archive(self) -> Any:
        with zipfile.ZipFile(self._file) as archive:
            members = self._checked(archive)
            found = [name for name in members if f"/{name}".endswith("/data.pkl")]
            if len(found) != 1:
                raise ValueError(f"its archive has {len(found)} parts data.pkl instead of one")
            pickled = found[0]
            top = pickled.removesuffix("data.pkl")
            order = f"{top}byteorder"
            swapped = order in members and _read(archive, members[order]) != sys.byteorder.encode()

            def storage(key: str, dtype: Any, size: int) -> Any:
                if key not in self._storages:
                    self._storages[key] = self._member(archive, members[f"{top}data/{key}"])
                    if swapped:
                        self._storages[key] = self._in_native_order(self._storages[key], dtype)
                if self._storages[key].nbytes() < size:
                    raise ValueError(f"the storage {key} is too short")
                return self._storages[key]

            return self._unpickler(io.BytesIO(_read(archive, members[pickled])), storage).load()

    def _checked(self, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
        """Return the members of an archive by their names, after their checksums, if it has any.

        Raises:
            NotCheckedError: one of them is damaged or there twice, or unpacked they would be too large.
        """
        members = {member.filename: member for member in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise NotCheckedError("corrupt", "its archive has two parts of the same name")
        self._limits.check_bytes(sum(member.file_size for member in members.values()), self.size)
        for member in members.values():
            if member.filename.endswith("data.pkl"):
                self._limits.check("description", member.file_size, f"the bytes of {member.filename}")
            if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
                raise NotCheckedError("corrupt", f"{member.filename} in it has two sizes")
            # Without sums (torch.serialization.set_crc32_options) all of them are 0.
            if member.CRC and not _is_sound(archive, member):
                raise NotCheckedError("corrupt", f"the checksum of {member.filename} in it is wrong")
        return members

    def _member(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
        """Return the storage in a member of the archive."""
        if member.compress_type != zipfile.ZIP_STORED:
            return self._untyped(_read(archive, member), 0, member.file_size)
        with archive.open(member):  # which checks its header
            header = self._bytes(member.header_offset, _HEADER)
        name, more = np.frombuffer(header[_LENGTHS], "<u2")
        start = member.header_offset + _HEADER + int(name) + int(more)
        if start + member.file_size > self.size:
            raise EOFError
        if self._held is not None:
            return self._untyped(self._held, start, member.file_size)
        untyped = self._untyped(_reserved(member.file_size), 0, member.file_size)
        self._unread[untyped.data_ptr()] = start
        return untyped

    def _in_native_order(self, untyped: Any, dtype: Any) -> Any:
        size = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        held = self.filled(self._torch.empty(0, dtype=self._torch.uint8).set_(untyped)).numpy()
        swapped = bytearray(np.frombuffer(held, f"u{size}").byteswap().tobytes())
        return self._untyped(swapped, 0, len(swapped))

    # --- one pickle after another ------------------------------------------------------------

    def _load_pickles(self) -> Any:
        data = io.BytesIO(self._bytes(0, self.size))
        widths: dict[str, int] = {}
        announced = [0]

        def storage(key: str, dtype: Any, size: int) -> Any:
            if key not in self._storages:
                announced[0] += size
                if announced[0] > self.size:  # all of them follow in the file
                    raise EOFError
                self._storages[key] = self._untyped(bytearray(size), 0, size)
                widths[key] = dtype.itemsize
            return self._storages[key]

        self._unpickler(data, storage).load()  # the number by which it is recognised
        if self._unpickler(data, storage).load() != _VERSION:
            raise ValueError("it has an unknown version of the format")
        system = self._unpickler(data, storage).load()
        if isinstance(system, dict) and system.get("little_endian", True) != (sys.byteorder == "little"):
            raise NotCheckedError("unreadable", "it was written on a machine with another order of bytes")
        found = self._unpickler(data, storage).load()
        for key in self._unpickler(data, storage).load():
            self._fill(data, self._storages[key], widths[key])
        return found

    def _fill(self, data: io.BytesIO, untyped: Any, width: int) -> None:
        """Read what a storage holds: the number of its elements, and these."""
        count = int.from_bytes(data.read(8), "little")
        if count * width != untyped.nbytes():
            raise ValueError(f"a storage has {count:,} elements, and not those that were announced")
        found = data.read(untyped.nbytes())
        if len(found) < untyped.nbytes():
            raise EOFError
        if found:
            held = self._torch.empty(0, dtype=self._torch.uint8).set_(untyped)
            held.copy_(self._torch.frombuffer(bytearray(found), dtype=self._torch.uint8))


def _reserved(size: int) -> mmap.mmap | bytearray:
    """Return so much room, none of which takes memory before something is written into it."""
    if not size or not hasattr(mmap, "MAP_NORESERVE"):
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE)


def _is_sound(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    try:
        with Unpacked(archive, member) as stream:
            while stream.read(_BLOCK):
                pass
    except _DAMAGE:
        return False
    return True


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    """Return the bytes of a member of an archive."""
    if member.compress_type == zipfile.ZIP_STORED:
        return bytearray(archive.read(member))
    data, at = bytearray(member.file_size), 0
    with Unpacked(archive, member) as stream:
        while part := stream.read(_BLOCK):
            data[at : at + len(part)] = part
            at += len(part)
    return data
