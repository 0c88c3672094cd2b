"""The files that a fix may change: the user's own, in one folder, as they were when they were read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from stablenum._support.files import write_file
from stablenum.diagnosis.edits.edit import StaleEditError
from stablenum.diagnosis.replay.source_files import package_of

__all__ = ["readable", "write_changes"]


def readable(path: Path, folder: Path) -> str | None:
    """Return the text of a file that may be changed; None for one outside the folder, behind a link, of an
    installed package, or not in UTF-8."""
    if path.suffix != ".py" or package_of(str(path)) or not path.is_file():
        return None
    real = path.resolve()
    if path.is_symlink() or not real.is_relative_to(folder.resolve()):
        return None
    try:
        return _text_of(real)
    except UnicodeDecodeError:
        return None


def write_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[Path, Path]]:
    """Write changed files, and return each with the copy of what it was, which lies beside it.

    Args:
        before: the text of each file when it was read.
        after: the new text of those that change.

    Raises:
        StaleEditError: a file is no longer what it was, or is behind a link. Nothing is written then.
        OSError: a file cannot be written; it is as it was, and those before it are changed.
    """
    changed = {Path(file): text for file, text in after.items() if text != before[file]}
    for path in changed:
        if path.is_symlink() or not path.is_file() or _text_of(path) != before[str(path)]:
            raise StaleEditError(
                f"{path} has changed since it was read, and nothing was written. Run the command again."
            )
    written = []
    for path, text in changed.items():
        copy = _free(path)
        shutil.copy2(path, copy)
        write_file(path, lambda new, text=text: new.write_bytes(text.encode()))  # type: ignore[misc]
        written.append((path, copy))
    return written


def _text_of(path: Path) -> str:
    """Return the text of a file with its line breaks as they are."""
    return path.read_bytes().decode()


def _free(path: Path) -> Path:
    """Return a name for a copy beside a file that no file has."""
    names = (path.with_name(f"{path.name}.bak{number or ''}") for number in range(10_000))
    return next(name for name in names if not name.exists())
