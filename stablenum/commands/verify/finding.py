"""Find out what a file or folder is, by what is in it and not by its name, and what a folder contains."""

from __future__ import annotations

import os
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stablenum.checkpoints.folders import POST_MORTEMS
from stablenum.checkpoints.manifest import MANIFEST
from stablenum.commands.verify.contents import NotCheckedError
from stablenum.commands.verify.formats import distributed_folders, orbax_folders, safetensors_files
from stablenum.commands.verify.formats.torch_files import LEGACY, holds_arrays
from stablenum.commands.verify.limits import Limits

__all__ = ["Found", "check_files", "checkpoints_in", "format_of", "part_format"]

# Files with these endings are reported even if they cannot be recognised.
_ENDINGS = (".bin", ".ckpt", ".npz", ".pt", ".pth", ".safetensors")
_DEEPEST = 4
# What zipfile raises for a damaged table of contents.
_DAMAGES = (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The checkpoints in a folder, and notes on what was passed over."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...]


def format_of(path: Path) -> str:
    """Return what a file or folder is: "torch", "safetensors", "npz", "npy", "distributed", "orbax" or
    "stablenum"; for a folder that is no checkpoint itself, "folder".

    Raises:
        NotCheckedError: it is empty, damaged, or nothing known.
    """
    try:
        return _of_folder(path) if path.is_dir() else _of_file(path)
    except OSError as error:
        raise NotCheckedError("unreadable", error.strerror or str(error)) from error


def _of_folder(folder: Path) -> str:
    os.listdir(folder)  # searches by pattern find nothing in a folder that cannot be listed
    if (folder / MANIFEST).is_file():
        return "stablenum"
    return part_format(folder)


def check_files(folder: Path, limits: Limits) -> None:
    """Check that all in a checkpoint that is a folder are files and folders: whoever opens a pipe waits.

    Raises:
        NotCheckedError: something is not.
        OSError: it cannot be looked at.
    """
    seen, count = {os.path.realpath(folder)}, 0
    for place, folders, files in os.walk(folder, followlinks=True):
        count += len(files)
        limits.check("parts", count, "the files in it are many")
        for name in files:
            path = Path(place, name)
            if path.exists() and not path.is_file():
                raise _no_file(f"{path.relative_to(folder)} in it")
        # Links may lead to where the walk has been.
        there = {name: os.path.realpath(os.path.join(place, name)) for name in folders}
        folders[:] = [name for name in folders if there[name] not in seen]
        seen |= set(there.values())


def _no_file(what: str) -> NotCheckedError:
    return NotCheckedError(
        "unknown", f"{what} is neither a file nor a folder, but a pipe, a device or the like"
    )


def part_format(path: Path) -> str:
    """Return what a file or folder is apart from a manifest in it.

    Raises:
        NotCheckedError: as :func:`format_of`.
    """
    return _of_framework(path) if path.is_dir() else _of_file(path)


def _of_framework(folder: Path) -> str:
    if (folder / distributed_folders.METADATA).is_file():
        return "distributed"
    if any(folder.glob("*.distcp")):
        raise NotCheckedError(
            "corrupt", "it has no .metadata, which torch writes last: the save was interrupted"
        )
    if orbax_folders.is_item(folder) or orbax_folders.is_step(folder):
        return "orbax"
    return "folder"


def _of_file(file: Path) -> str:
    if not file.is_file():
        raise _no_file("it")
    with file.open("rb") as stream:
        head = stream.read(64)
    if not head:
        raise NotCheckedError("unknown", "it is empty")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _of_archive(file)
    if head.startswith(LEGACY):
        return "torch"
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if safetensors_files.begins_like_one(head):
        return "safetensors"
    if re.match(rb"\x80[\x02-\x05]", head):
        raise NotCheckedError("unreadable", "needs arbitrary code: it is a pickle, which was not run")
    raise NotCheckedError("unknown", "it is in none of the known formats")


def _of_archive(file: Path) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except _DAMAGES as error:
        raise NotCheckedError("corrupt", f"its table of contents is missing or damaged ({error})") from error
    if any(name.endswith("/constants.pkl") for name in names):
        raise NotCheckedError("unreadable", "it is a program (TorchScript), not a checkpoint")
    if any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):
        return "torch"
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    raise NotCheckedError(
        "unknown", "it is a zip archive of something else" if names else "it is an empty archive"
    )


def checkpoints_in(folder: Path, limits: Limits) -> Found:
    """Return the checkpoints in a folder, those in its subfolders among them, in the order of their names.

    Files that are nothing known are passed over, unless their names end like those of checkpoints.
    """
    notes: list[str] = []
    found: list[Path] = []
    for path in _walk(folder, notes, 0, {folder.resolve()}):
        found.append(path)
        limits.check("parts", len(found), "the files in it are many")
    return Found(paths=tuple(found), notes=tuple(notes))


def _walk(folder: Path, notes: list[str], depth: int, seen: set[Path]) -> Iterator[Path]:
    """Yield the checkpoints in a folder; links may lead to one that was seen already."""
    for path in sorted(folder.iterdir(), key=_natural):
        if path.name.startswith("."):
            continue
        if path.is_dir() and path.name == POST_MORTEMS:
            notes.append(f"{path.name}/ was passed over: it holds states that were set aside as poisoned")
        elif path.is_dir() and orbax_folders.TEMPORARY in path.name:
            notes.append(f"{path.name}/ was passed over: a save that was interrupted")
        elif path.is_dir():
            if (there := path.resolve()) not in seen:
                seen.add(there)
                yield from _of_subfolder(path, notes, depth, seen)
        elif _is_candidate(path, notes):
            yield path


def _of_subfolder(path: Path, notes: list[str], depth: int, seen: set[Path]) -> Iterator[Path]:
    try:
        kind = format_of(path)
    except NotCheckedError:
        kind = "damaged"
    if kind != "folder":
        yield path
    elif depth < _DEEPEST:
        yield from _walk(path, notes, depth + 1, seen)


def _is_candidate(path: Path, notes: list[str]) -> bool:
    if not path.is_file():
        return False
    try:
        kind = format_of(path)
    except NotCheckedError as why:
        return path.suffix in _ENDINGS or why.word == "corrupt"
    if kind == "torch" and zipfile.is_zipfile(path) and not holds_arrays(path):
        notes.append(f"{path.name} was passed over: it holds no tensor")
        return False
    return True


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a key by which 9 comes before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
