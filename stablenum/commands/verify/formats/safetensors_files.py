"""Read a safetensors file: a header in JSON, which says where in the rest each array is.

The file is read here and not by the library of that name, so that every format in it can be read without a
framework, and so that a header that does not fit the file is found.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from stablenum.commands.verify.contents import Contents, Entry, NotCheckedError, Plain
from stablenum.commands.verify.contents import Path as Keys
from stablenum.commands.verify.limits import Limits

__all__ = ["begins_like_one", "read"]

# The longest header that the format allows.
_LONGEST = 100_000_000
_MOST = 64  # dimensions of an array of NumPy
_BYTES = 2**20  # that are read at a time, whole elements of any dtype
_DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "C64": np.complex64,
    **{f"I{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    "BOOL": np.bool_,
}


def begins_like_one(head: bytes) -> bool:
    """Return whether a file with these first bytes is to be read as safetensors."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _LONGEST


def read(path: Path, limits: Limits) -> Contents:
    """Return what is in a safetensors file.

    Raises:
        NotCheckedError: the header is not one, or does not fit the file.
    """
    file = path.open("rb")  # and not mapped: it may become shorter while it is read
    with contextlib.ExitStack() as opened:
        opened.callback(file.close)
        contents = _contents(file, limits)
        opened.pop_all()
    return contents


def _contents(file: BinaryIO, limits: Limits) -> Contents:
    size = os.fstat(file.fileno()).st_size
    header, begin = _header(file, size, limits)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise NotCheckedError("corrupt", "its metadata is not a JSON object")
    limits.check("parts", len(header) + len(metadata), "its arrays and plain values are many")
    _check_cover(header, size - begin)
    arrays, notes = [], []
    for name, place in header.items():
        if place["dtype"] not in _DTYPES:
            notes.append(f"{name} is in {place['dtype']}, which was not looked at")
            continue
        arrays.append(_entry(name, place, file, begin))
    values: dict[Keys, Plain] = {
        ("__metadata__", key): text for key, text in metadata.items() if isinstance(text, str)
    }
    return Contents(
        format="safetensors",
        arrays=tuple(arrays),
        values=values,
        notes=tuple(notes),
        stored=size,
        close=file.close,
    )


def _header(file: BinaryIO, size: int, limits: Limits) -> tuple[dict[str, Any], int]:
    """Return the header, and where the bytes after it begin."""
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise NotCheckedError("corrupt", f"its header should have {length:,} bytes, the file has {size:,}")
    limits.check("description", length, "the bytes of its header")
    try:
        header = json.loads(file.read(length).decode())
    except (ValueError, RecursionError) as error:
        raise NotCheckedError("corrupt", f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise NotCheckedError("corrupt", "its header is not a JSON object")
    return header, 8 + length


def _check_cover(header: Mapping[str, Any], size: int) -> None:
    """Check that the arrays lie one after another and fill the file.

    Raises:
        NotCheckedError: they do not.
    """
    at = 0
    try:
        places = sorted((tuple(place["data_offsets"]), name) for name, place in header.items())
        for (start, end), name in places:
            if start != at or end < start:
                raise NotCheckedError(
                    "corrupt", f"{name} should begin at byte {at:,}; its header says {start:,}"
                )
            at = end
            _check_size(name, header[name], end - start)
    except (KeyError, TypeError, ValueError) as error:
        raise NotCheckedError(
            "corrupt", f"its header does not describe arrays ({str(error)[:200]!r})"
        ) from error
    if at != size:
        raise NotCheckedError("corrupt", f"its arrays have {at:,} bytes, the file has {size:,} for them")


def _check_size(name: str, place: Mapping[str, Any], size: int) -> None:
    shape = place["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > _MOST:
        raise ValueError(f"{name} has the shape {str(shape)[:100]}")
    if place["dtype"] not in _DTYPES:
        return
    expected = math.prod(shape) * np.dtype(_DTYPES[place["dtype"]]).itemsize
    if expected != size:
        raise NotCheckedError(
            "corrupt", f"{name} of shape {shape} should have {expected:,} bytes; it has {size:,}"
        )


def _entry(name: str, place: Mapping[str, Any], file: BinaryIO, begin: int) -> Entry:
    dtype, shape = np.dtype(_DTYPES[place["dtype"]]), tuple(place["shape"])
    start, end = (begin + offset for offset in place["data_offsets"])

    def part(at: int, size: int) -> Any:
        file.seek(at)
        data = file.read(size)
        if len(data) < size:
            raise NotCheckedError("corrupt", f"{name} ends too early: the file was changed while it was read")
        return np.frombuffer(data, dtype)

    return Entry(
        path=(name,),
        dtype=dtype.name,
        shape=shape,
        read=lambda: part(start, end - start).reshape(shape),
        blocks=lambda: (part(at, min(_BYTES, end - at)) for at in range(start, end, _BYTES)),
    )
