"""The files that commands write: checked before the work begins, and written whole."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from stablenum._support.files import is_special, write_file

__all__ = [
    "MENDED",
    "SCRIPT_FAILED",
    "check_file",
    "check_folder",
    "check_suffix",
    "check_target",
    "check_there",
    "write",
]

# The exit code if the user's script fails and nothing was found; 1 says that something was, 2 is for usage.
SCRIPT_FAILED = 3
# The exit code if something was found, and a change of the source that mends it is proven.
MENDED = 4


def check_there(path: Path, argument: str, what: str = "file") -> os.stat_result:
    """Check that there is something to read, and return what the system says of it."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise typer.BadParameter(f"there is no {what} {str(path)!r}.", param_hint=argument) from None
    except (OSError, ValueError) as error:  # no right to look, a loop of links, a name that is too long
        why = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"{str(path)!r} cannot be read: {why}.", param_hint=argument) from error


def check_file(path: Path, argument: str) -> None:
    """Check that there is a file to read."""
    if stat.S_ISDIR(check_there(path, argument).st_mode):
        raise typer.BadParameter(f"{str(path)!r} is a folder; name a file.", param_hint=argument)
    if not os.access(path, os.R_OK):
        why = os.strerror(errno.EACCES)
        raise typer.BadParameter(f"{str(path)!r} cannot be read: {why}.", param_hint=argument)


def check_target(option: str, path: Path | None) -> None:
    """Check that a result can be written to ``path``, before minutes of work and not after."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; name a file.", param_hint=option)
        if is_special(path):
            if not os.access(path, os.W_OK):
                raise typer.BadParameter(f"{path} cannot be written to.", param_hint=option)
            return
        folder = path.resolve().parent
    except (OSError, RuntimeError) as error:  # a loop of links
        raise typer.BadParameter(f"{path} cannot be accessed: {error}", param_hint=option) from error
    if not folder.is_dir():
        raise typer.BadParameter(f"the folder {folder} does not exist.", param_hint=option)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"the folder {folder} cannot be written to.", param_hint=option)


def check_suffix(option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Check that the name of a file says what is written to it; devices and pipes may have any name."""
    if path is None or path.suffix.lower() in suffixes or is_special(path):
        return
    raise typer.BadParameter(f"{path} must end in {' or '.join(suffixes)}.", param_hint=option)


def check_folder(option: str, path: Path | None) -> None:
    """Check that files can be written into the folder ``path``, which is made later if there is none."""
    if path is None:
        return
    try:
        there = path.resolve()
        while not there.exists():
            there = there.parent
    except (OSError, RuntimeError) as error:  # a loop of links
        raise typer.BadParameter(f"{path} cannot be accessed: {error}", param_hint=option) from error
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is a file; name a folder.", param_hint=option)
    if not os.access(there, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"the folder {there} cannot be written to.", param_hint=option)


def write(target: Path, fill: Callable[[Path], Any], option: str) -> None:
    """Write a result, and report an OSError as a usage error of its option (exit code 2)."""
    try:
        write_file(target, fill)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {target}: {error}", param_hint=option) from error
