"""The manifest of a checkpoint: what is in its files, so that a changed byte is found before it is loaded."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from stablenum._support.files import sync_file, write_file
from stablenum.errors import CheckpointError

__all__ = ["MANIFEST", "FileRecord", "Manifest", "complaints", "files_in", "read_manifest", "record_of"]

MANIFEST = "manifest.json"
_VERSION = 1
_FORMAT, _DIGEST = "stablenum_checkpoint", "manifest_sha256"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size of a file in bytes, and its SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        step: the number of steps that the state has taken.
        serial: its place in the order in which the checkpoints of a folder were written. After a rewind, a
            lower step may be the newer one.
        format: the name of the codec that wrote it.
        confirmed: whether nothing has spoken against the state since; of a state that was only just reached,
            nobody knows yet.
        time: when it was written, in ISO 8601.
        versions: the versions of the packages that wrote it.
        allowed: the names of the entries that were not finite on purpose.
        poisoned: the names of the entries that were not finite; only of a post-mortem, which is never loaded.
        files: the files, by their path within the folder.
        kind: ``"snapshot"`` if a recovery wrote it; not recorded of any other checkpoint.
    """

    step: int
    serial: int
    format: str
    confirmed: bool
    time: str
    versions: Mapping[str, str]
    allowed: tuple[str, ...] = ()
    poisoned: tuple[str, ...] = ()
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    kind: str = ""

    def write(self, folder: Path) -> None:
        """Write ``manifest.json``, whole and flushed to the disk.

        Raises:
            OSError: it cannot be written; an older manifest is unchanged.
        """

        def fill(path: Path) -> None:
            path.write_bytes(self._as_bytes())
            sync_file(path)

        write_file(folder / MANIFEST, fill)

    def _as_bytes(self) -> bytes:
        values = dataclasses.asdict(self)
        if not self.kind:
            del values["kind"]
        return _with_digest({_FORMAT: _VERSION} | values)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, it was changed since it was written, or another version of stablenum
            wrote it.
    """
    try:
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        found = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror or error}") from error
    try:
        values = json.loads(found)
        changed = found != _with_digest({k: v for k, v in values.items() if k != _DIGEST})
    except (ValueError, AttributeError, RecursionError):
        changed = True
    if changed:
        raise CheckpointError(f"{MANIFEST} was changed after it was written")
    if (version := values.pop(_FORMAT, None)) != _VERSION:
        raise CheckpointError(
            f"{MANIFEST} has version {version!r:.100}, and this version of stablenum reads version {_VERSION}"
        )
    try:
        manifest = _from_values(values)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{MANIFEST} does not describe a checkpoint ({error!r:.200})") from error
    if wrong := [name for name in manifest.files if not _is_inside(name)]:
        raise CheckpointError(f"{MANIFEST} names files outside the folder: {', '.join(wrong[:3])!r:.200}")
    return manifest


def _from_values(values: dict[str, Any]) -> Manifest:
    del values[_DIGEST]
    files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
    lists = {name: values.pop(name) for name in ("allowed", "poisoned")}
    manifest = Manifest(
        **values, allowed=tuple(lists["allowed"]), poisoned=tuple(lists["poisoned"]), files=files
    )
    for kind, found in (
        (int, (manifest.step, manifest.serial, *(record.bytes for record in files.values()))),
        (bool, (manifest.confirmed,)),
        (dict, (manifest.versions,)),
        (list, lists.values()),
        (
            str,
            (
                *(manifest.format, manifest.time, manifest.kind, *manifest.allowed, *manifest.poisoned),
                *(record.sha256 for record in files.values()),
            ),
        ),
    ):
        if wrong := [value for value in found if type(value) is not kind]:
            raise TypeError(f"{wrong[0]!r:.100} is not of {kind.__name__}")
    return manifest


def _is_inside(name: str) -> bool:
    """Return whether a path, as a manifest has it, leads to a file in the folder."""
    path = PurePosixPath(name)
    return "\0" not in name and not path.is_absolute() and ".." not in path.parts and path.as_posix() == name


def _with_digest(values: dict[str, Any]) -> bytes:
    """Return the one way in which these values are written, with a checksum of themselves."""
    digest = hashlib.sha256(_as_text(values).encode()).hexdigest()
    return (_as_text(values | {_DIGEST: digest}) + "\n").encode()


def _as_text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False)


def files_in(folder: Path) -> list[str]:
    """Return the paths of all files in a folder but for the manifest, relative to it and sorted."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def record_of(path: Path) -> FileRecord:
    """Return the size and the checksum of a file, which is read from its beginning to its end.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), digest)


def complaints(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None, *, checksums: bool = True
) -> list[str]:
    """Return what is wrong with the files of a checkpoint; nothing if they are as they were written.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        names: the files to look at; default all.
        checksums: whether to read the files, or only to compare their sizes.
    """
    chosen = manifest.files if names is None else names
    found = (_complaint(folder, name, manifest.files[name], checksums) for name in chosen)
    return [complaint for complaint in found if complaint]


def _complaint(folder: Path, name: str, wanted: FileRecord, checksums: bool) -> str:
    path = folder / name
    try:
        there = path.stat()
        if there.st_size != wanted.bytes:
            return f"{name} has {there.st_size} bytes instead of {wanted.bytes}"
        if not stat.S_ISREG(there.st_mode):
            return f"{name} is not a file"
        if checksums and record_of(path) != wanted:
            return f"{name} does not match its checksum"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return ""
