"""Write files whole: a full disk or an interrupt leaves the old file, not a part of the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["is_special", "sync_file", "sync_folder", "write_file", "write_text"]


def write_file(target: Path, fill: Callable[[Path], Any]) -> None:
    """Write a file next to the target, then rename it; write into a pipe, a device or our own output.

    Args:
        target: where to write. If it is a link, the file to which it points is replaced and the link stays.
        fill: writes the contents into a new file, whose suffix is that of ``target``.

    Raises:
        OSError: the file cannot be written; what was there before is unchanged.
    """
    if is_special(target) or (target.exists() and not _takes_files(target.resolve().parent)):
        _write_into(target, fill)
    else:
        _replace(target.resolve(), fill)


def write_text(target: Path, text: str) -> None:
    """Write text in UTF-8, as :func:`write_file` does."""
    write_file(target, lambda path: path.write_text(text, encoding="utf-8"))


def sync_file(path: Path) -> None:
    """Wait until a file's contents are on the disk, so that a power cut does not lose them.

    Raises:
        OSError: they cannot be written there; the file may be incomplete.
    """
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk: which files it has, and by which names.

    Where a folder cannot be flushed (on Windows and some network file systems, or without the right to list
    it), nothing is done.

    Raises:
        OSError: they cannot be written there.
    """
    if os.name == "nt":  # a folder cannot be opened there
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be written into, but not listed
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def is_special(path: Path) -> bool:
    """Return whether a path must be written into and not replaced: a pipe, a device or our own output."""
    return path.exists() and (not path.is_file() or _own_output(path) is not None)


def _takes_files(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _replace(target: Path, fill: Callable[[Path], Any]) -> None:
    # The name is unguessable and known before the file exists, so that the file is removed whatever happens.
    # Most file systems allow a name 255 bytes, and a character may take four of them.
    temporary = target.with_name(f".{target.stem[:40]}.{secrets.token_hex(8)}{target.suffix[:8]}")
    try:
        fill(temporary)
        _keep_mode(target, temporary)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _keep_mode(target: Path, temporary: Path) -> None:
    """Give a file the rights of the one that it replaces: who may not read the old one may not read it."""
    with contextlib.suppress(FileNotFoundError):
        temporary.chmod(stat.S_IMODE(target.stat().st_mode))


def _write_into(target: Path, fill: Callable[[Path], Any]) -> None:
    """Write by way of a temporary file, because some formats need to seek."""
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / f"result{target.suffix}"
        fill(temporary)
        sys.stdout.flush()
        own = _own_output(target)
        # A file opened a second time would be written from its start, over the output already printed.
        handle = os.open(target, os.O_WRONLY | os.O_TRUNC) if own is None else os.dup(own)
        with temporary.open("rb") as source, os.fdopen(handle, "wb") as sink:
            shutil.copyfileobj(source, sink)


def _own_output(path: Path) -> int | None:
    """Return 1 or 2 if our standard output or error goes to the path (``/dev/stdout``)."""
    there = path.stat()
    for descriptor in (1, 2):
        try:
            if os.path.samestat(there, os.fstat(descriptor)):
                return descriptor
        except OSError:  # closed
            continue
    return None
