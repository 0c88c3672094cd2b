"""Who is writing into a folder of checkpoints: what dead processes have left there may be removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["writing_into"]

_LOCK = ".lock"


@contextlib.contextmanager
def writing_into(folder: Path, clean: Callable[[], None]) -> Iterator[None]:
    """Be one of those that write into a folder; at first, call ``clean`` if there is no other.

    The system releases the lock of a process that is killed, on whichever machine and in whichever container
    it ran; process numbers would say nothing there. On file systems without locks, nothing is cleaned.

    Raises:
        OSError: the folder takes no files.
    """
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if _locked(handle, alone=True):
            clean()
        _locked(handle, alone=False)
        yield
    finally:
        os.close(handle)  # releases the lock


def _locked(handle: int, *, alone: bool) -> bool:
    """Take the lock for this process alone, without waiting, or together with others."""
    if fcntl is None:
        return False
    how = fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH
    try:
        fcntl.flock(handle, how)
    except OSError:  # another process is writing, or the file system has no locks
        return False
    return True
