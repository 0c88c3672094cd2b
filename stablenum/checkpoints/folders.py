"""The folders of checkpoints within a folder: their names, what is there, and how one is removed."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from stablenum.checkpoints.manifest import Manifest, complaints, read_manifest
from stablenum.errors import CheckpointError

__all__ = [
    "POST_MORTEMS",
    "Found",
    "Listings",
    "check_kind",
    "found_in",
    "intact_in",
    "move_to_step",
    "remove",
    "temporary_name",
    "tidy",
]

POST_MORTEMS = "post-mortem"
# A step that is saved again, as after a rewind, gets a number behind its name until the older one is removed.
_NAME = re.compile(r"step-(\d+)(?:-\d+)?")
_HIDDEN = ".step-"
_KINDS = {"": "a checkpoint", "snapshot": "a snapshot of a recovery"}
_MOST_DIGITS = 16


# A folder is listed again at most so often, as a process beside this one may save all the time.
_MOST_LISTINGS = 100
# Listings in a row that must be empty: a listing is no snapshot, and may miss what is renamed meanwhile.
_SURELY_EMPTY = 5


class Listings:
    """Whether to list a folder again, because a process beside this one has saved or removed something.

    Between a listing and the reading of what it has, a checkpoint may be gone and a newer one there.
    """

    def __init__(self) -> None:
        self._before: frozenset[object] | None = None
        self._alike = self._count = 0

    def changed(self, found: Iterable[object]) -> bool:
        """Return whether to list again after a listing of which nothing, or not the newest, could be read."""
        now = frozenset(found)
        self._alike = self._alike + 1 if now == self._before else 1
        self._before, self._count = now, self._count + 1
        return self._alike < (2 if now else _SURELY_EMPTY) and self._count < _MOST_LISTINGS


class Found(NamedTuple):
    """A folder with the name of a checkpoint, and its manifest or the reason why it has none."""

    folder: Path
    step: int
    manifest: Manifest | None
    reason: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """What no other checkpoint has: names are used again."""
        return self.folder.name, -1 if self.manifest is None else self.manifest.serial


def found_in(root: Path) -> list[Found]:
    """Return the checkpoints in a folder, whether they are good or not; none if there is no such folder.

    Raises:
        OSError: the folder is there and cannot be read.
    """
    try:
        paths = sorted(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = ((path, _NAME.fullmatch(path.name)) for path in paths)
    # The number has as many digits at most as that of a step that can be saved.
    numbered = [(path, int(name[1])) for path, name in named if name and len(name[1]) <= _MOST_DIGITS]
    return [_found(path, number) for path, number in numbered if path.is_dir()]


def _found(folder: Path, step: int) -> Found:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Found(folder, step, None, str(error))
    if manifest.poisoned:
        return Found(folder, step, None, "it is the post-mortem of a poisoned state")
    if manifest.step != step:
        return Found(folder, step, None, f"it holds step {manifest.step}")
    return Found(folder, step, manifest)


def intact_in(root: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints with a manifest and files of the right sizes, in the order of writing.

    Raises:
        OSError: the folder is there and cannot be read.
    """
    listings = Listings()
    while True:
        found = found_in(root)
        known = [(f.folder, f.manifest) for f in found if f.manifest is not None]
        intact = [(folder, m) for folder, m in known if not complaints(folder, m, checksums=False)]
        if intact or not listings.changed(f.key for f in found):
            return sorted(intact, key=lambda pair: pair[1].serial)


def check_kind(root: Path, kind: str, but: Container[str] = ()) -> None:
    """Check that what is in a folder was written for the same purpose: old ones are removed as new ones come.

    Args:
        root: the folder.
        kind: what is written into it, as in :attr:`Manifest.kind`.
        but: the names of those that need not be looked at.

    Raises:
        CheckpointError: it has something of another kind.
        OSError: the folder is there and cannot be read.
    """
    for found in found_in(root):
        if found.manifest is not None and found.manifest.kind != kind and found.folder.name not in but:
            raise CheckpointError(
                f"{root} is in use for something else: {found.folder.name} in it is "
                f"{_KINDS.get(found.manifest.kind, 'of another kind')}, and {_KINDS[kind]} would replace it. "
                "Nothing was changed. Give another folder: checkpoints and a recovery need one each."
            )


def temporary_name(root: Path, step: int) -> Path:
    """Return an unused name for a folder that is still being written, or is being removed."""
    return root / f"{_HIDDEN}{step:09d}.{secrets.token_hex(8)}"


def move_to_step(temporary: Path, place: Path, step: int) -> Path:
    """Give a complete folder the first name for its step that is free, in one operation.

    Raises:
        OSError: it cannot be renamed.
    """
    number = 1
    while True:
        target = place / (f"step-{step:09d}" + (f"-{number}" if number > 1 else ""))
        if not target.exists():
            try:
                return temporary.rename(target)
            except OSError:
                if not target.exists():  # else another process was faster
                    raise
        number += 1


def remove(folder: Path, root: Path) -> None:
    """Remove a checkpoint. If that is interrupted, no part of it is left that could be taken for one.

    Raises:
        OSError: it cannot be removed.
    """
    hidden = temporary_name(root, 0)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def tidy(root: Path) -> None:
    """Remove what processes that have ended left half written or half removed."""
    with contextlib.suppress(OSError):  # a left-over takes space, but does no harm
        for path in root.iterdir():
            if path.name.startswith(_HIDDEN):
                shutil.rmtree(path, ignore_errors=True)
