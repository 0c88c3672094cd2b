"""Write one checkpoint whole: it is there with all its files on the disk, or it is not there."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stablenum._support.files import sync_file, sync_folder
from stablenum.checkpoints.codec import Codec, Ranks, on_all, on_each
from stablenum.checkpoints.folders import move_to_step, temporary_name
from stablenum.checkpoints.manifest import FileRecord, Manifest, files_in, record_of

__all__ = ["write_checkpoint"]


def write_checkpoint(
    root: Path, place: Path, state: Any, codec: Codec, ranks: Ranks, manifest: Callable[[], Manifest]
) -> Path:
    """Write a state into a hidden folder, flush it to the disk, and give it its name; on all ranks together.

    Rank 0 writes the manifest; each file is flushed, and read back for its checksum, by one of the ranks.

    Args:
        root: where the hidden folder is made.
        place: where the folder gets its name; on the same file system.
        state: what the codec writes.
        codec: writes the files.
        ranks: the processes that write together.
        manifest: returns the manifest without its files; called on rank 0.

    Raises:
        OSError: a file cannot be written; what was begun is removed.
        TypeError, ValueError: the codec cannot write the state.
    """
    wanted = on_all(ranks, lambda: manifest() if ranks.rank == 0 else None)[0]
    assert wanted is not None  # rank 0 made it
    folder = ranks.gather(temporary_name(root, wanted.step))[0]
    try:
        on_each(ranks, lambda: folder.mkdir() if ranks.rank == 0 else None)
        on_each(ranks, lambda: codec.write(folder, state))
        wanted = dataclasses.replace(wanted, files=_flushed(folder, ranks))
        return _named(folder, place, wanted, ranks)
    except BaseException:
        # Also after Ctrl-C. Rank 0 gets here when no other rank is writing any more, unless that came.
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _flushed(folder: Path, ranks: Ranks) -> dict[str, FileRecord]:
    """Wait until all files are on the disk, and return what the manifest says about each of them."""
    (names, *_), world = on_all(ranks, lambda: files_in(folder)), len(ranks.gather(None))

    def own() -> dict[str, FileRecord]:
        return {name: _flushed_file(folder / name) for name in names[ranks.rank :: world]}

    records = {name: record for part in on_all(ranks, own) for name, record in part.items()}
    return dict(sorted(records.items()))


def _flushed_file(path: Path) -> FileRecord:
    sync_file(path)
    return record_of(path)


def _named(folder: Path, place: Path, manifest: Manifest, ranks: Ranks) -> Path:
    def name() -> Path | None:
        if ranks.rank != 0:
            return None
        manifest.write(folder)
        for inside in (path for path in folder.rglob("*") if path.is_dir()):
            sync_folder(inside)
        sync_folder(folder)
        place.mkdir(exist_ok=True)
        target = move_to_step(folder, place, manifest.step)
        try:
            sync_folder(place)
            sync_folder(place.parent)  # in which it may be new
        except OSError:
            target.rename(folder)  # to be removed: what is reported as not saved is not there
            raise
        return target

    named = on_all(ranks, name)[0]
    assert named is not None  # rank 0 named it
    return named
