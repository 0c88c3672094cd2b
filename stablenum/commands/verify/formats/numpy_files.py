"""Read what NumPy wrote: a ``.npz`` archive or a single ``.npy`` array."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from stablenum.commands.verify.contents import Contents, Entry, NotCheckedError

__all__ = ["read_npy", "read_npz"]

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npz(path: Path) -> Contents:
    """Return what is in a ``.npz`` archive.

    Raises:
        NotCheckedError: an array holds Python objects, or the archive is damaged.
    """
    arrays: list[Entry] = []
    notes: list[str] = []
    with _damage_named(), zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            with archive.open(member) as stream:
                shape, dtype = _described(name, stream)
            arrays += _entry(path, member, name, shape, dtype, notes)
    return Contents(format="npz", arrays=tuple(arrays), notes=tuple(notes))


def read_npy(path: Path) -> Contents:
    """Return what is in a ``.npy`` file.

    Raises:
        NotCheckedError: it holds Python objects, or it is damaged.
    """
    notes: list[str] = []
    with _damage_named():
        with path.open("rb") as stream:
            shape, dtype = _described(path.stem, stream)
        values = np.load(path, mmap_mode="r", allow_pickle=False) if dtype.kind in "fc" else None
    if values is None:
        return Contents(format="npy", notes=(f"it holds {dtype}, in which nothing can be NaN or inf",))
    entry = Entry(path=(path.stem,), dtype=dtype.name, shape=shape, read=lambda: np.asarray(values))
    return Contents(format="npy", arrays=(entry,), notes=tuple(notes))


class _damage_named:  # noqa: N801, a context manager
    """Turns what NumPy and zipfile raise for a damaged file into :class:`NotCheckedError`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, zipfile.BadZipFile | zlib.error | EOFError | ValueError | NotImplementedError):
            raise NotCheckedError("corrupt", str(error) or type(error).__name__) from error


def _described(name: str, stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the dtype that the header of an array gives."""
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise NotCheckedError(
            "unreadable", f"{name} is in version {version} of the format; known are 1.0 and 2.0"
        )
    shape, _, dtype = _HEADERS[version](stream)
    if dtype.hasobject:
        raise NotCheckedError(
            "unreadable", f"needs arbitrary code: {name} holds Python objects, which are pickled"
        )
    return shape, dtype


def _entry(
    path: Path, member: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], notes: list[str]
) -> Iterator[Entry]:
    """Yield the entry of an array, if what it holds is known."""
    # stablenum names a format that NumPy does not have behind the name; others lose it.
    shown, _, kind = name.rpartition("#")
    meant = dtype
    if shown and dtype.kind == "u" and hasattr(ml_dtypes, kind):
        meant = np.dtype(getattr(ml_dtypes, kind))
    elif dtype == np.dtype("V2"):
        shown, meant = name, np.dtype(ml_dtypes.bfloat16)
        notes.append(f"{name} has lost its dtype; two bytes an element were read as bfloat16")
    elif dtype.kind == "V":
        notes.append(f"{name} has lost its dtype ({dtype.str}), and was not looked at")
        return
    else:
        shown = name

    def load() -> Any:
        with _damage_named(), np.load(path, allow_pickle=False) as archive:
            return archive[name if name in archive.files else member].view(meant)

    yield Entry(path=(shown,), dtype=meant.name, shape=shape, read=load)
