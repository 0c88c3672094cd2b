"""Unpack a member of a zip archive in blocks: ``zipfile`` unpacks at once what bz2 and lzma have packed."""

from __future__ import annotations

import bz2
import contextlib
import lzma
import struct
import zipfile
import zlib
from typing import Any

__all__ = ["Unpacked"]

_PACKED = 2**16  # bytes that are read of what is packed at a time
_LOCAL = struct.Struct("<26xHH")  # the header before a member: at its end, how long its name and extras are


class Unpacked(contextlib.AbstractContextManager["Unpacked"]):
    """The bytes of a member, unpacked as they are read, with its size and checksum compared at the end.

    Args:
        archive: the archive, open.
        member: one of its members.

    Raises:
        zipfile.BadZipFile, RuntimeError, NotImplementedError: it is damaged, encrypted, or packed in an
            unknown way.
    """

    def __init__(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
        archive.open(member).close()  # compares the header before it with the table of contents
        self._member, self._left = member, member.compress_size
        self._count = self._checksum = 0
        file: Any = archive.fp  # of all members that are read: each keeps its own place
        file.seek(member.header_offset)
        self._at = member.header_offset + _LOCAL.size + sum(_LOCAL.unpack(file.read(_LOCAL.size)))
        self._file = file
        self._unpacker = None if member.compress_type == zipfile.ZIP_STORED else self._made()

    def __exit__(self, *_: object) -> None:
        """Do nothing: the archive closes the file."""

    def read(self, size: int) -> bytes:
        """Return the next bytes, as many as ``size`` unless the member ends.

        Raises:
            zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, ValueError: it is damaged, or it has
                other bytes than the table of contents says.
        """
        parts: list[bytes] = []
        while size > 0 and (part := self._next(size)):
            size -= len(part)
            self._count += len(part)
            self._checksum = zlib.crc32(part, self._checksum)
            parts.append(part)
            if self._count > self._member.file_size:
                raise self._damage(f"more than the {self._member.file_size:,} bytes that it should have")
        if size > 0 and self._count < self._member.file_size:
            raise self._damage(f"{self._count:,} bytes instead of {self._member.file_size:,}")
        if size > 0 and self._checksum != self._member.CRC:
            raise self._damage("another checksum than it should have (CRC-32)")
        return b"".join(parts)

    def tell(self) -> int:
        """Return how many bytes have been read."""
        return self._count

    def _damage(self, has: str) -> zipfile.BadZipFile:
        return zipfile.BadZipFile(f"{self._member.filename} has {has}")

    def _packed(self, most: int) -> bytes:
        self._file.seek(self._at)
        data: bytes = self._file.read(min(most, self._left))
        self._at += len(data)
        self._left -= len(data)
        return data

    def _next(self, most: int) -> bytes:
        unpacker = self._unpacker
        if unpacker is None:
            return self._packed(most)
        while not unpacker.eof:
            waiting = getattr(unpacker, "unconsumed_tail", b"")
            needs_input = getattr(unpacker, "needs_input", not waiting)
            packed = self._packed(_PACKED) if needs_input else waiting
            if (part := unpacker.decompress(packed, most)) or (needs_input and not packed):
                return part  # type: ignore[no-any-return]
        return b""

    def _made(self) -> Any:
        kind = self._member.compress_type
        if kind == zipfile.ZIP_DEFLATED:
            return zlib.decompressobj(-zlib.MAX_WBITS)
        if kind == zipfile.ZIP_BZIP2:
            return bz2.BZ2Decompressor()
        if kind == zipfile.ZIP_LZMA:
            return self._of_lzma()
        raise NotImplementedError(f"{self._member.filename} is packed in a way that is not known ({kind})")

    def _of_lzma(self) -> lzma.LZMADecompressor:
        """Return what unpacks lzma, whose settings are the first nine bytes (zip's APPNOTE, section 5.8)."""
        settings, dictionary = struct.unpack("<4xBI", self._packed(9).ljust(9, b"\0"))
        rest, lc = divmod(settings, 9)
        pb, lp = divmod(rest, 5)
        # Nothing is further back than the beginning, and no dictionary is smaller than 4096 bytes.
        size = max(4096, min(dictionary, self._member.file_size))
        filters = [{"id": lzma.FILTER_LZMA1, "dict_size": size, "lc": lc, "lp": lp, "pb": pb}]
        return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)
