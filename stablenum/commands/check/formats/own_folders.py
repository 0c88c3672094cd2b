"""Read a checkpoint of stablenum: verify its manifest, then read the files that it lists."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stablenum.checkpoints.finiteness import listed
from stablenum.checkpoints.manifest import Manifest, complaints, files_in, read_manifest
from stablenum.commands.check.contents import Contents, Entry, NotCheckedError, Plain
from stablenum.commands.check.contents import Path as Keys
from stablenum.errors import CheckpointError

__all__ = ["read"]


def read(folder: Path, part: Callable[[Path], Contents | None]) -> tuple[Contents, tuple[str, ...]]:
    """Return what is in a checkpoint of stablenum, and the names of what in it is not finite on purpose.

    Args:
        folder: the checkpoint.
        part: reads a file or folder in it; None for one that is no checkpoint itself.

    Raises:
        NotCheckedError: it is not what was written, or a part of it cannot be read.
    """
    manifest = _verified(folder)
    arrays: list[Entry] = []
    values: dict[Keys, Plain] = {}
    notes: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            values.update(_numbers(json.loads(path.read_text("utf-8")), ()))
        elif (found := part(path)) is not None:
            arrays += found.arrays
            values |= found.values
            notes += found.notes
    if manifest.poisoned:
        notes.append(f"it was set aside as poisoned, and is never loaded: {listed(manifest.poisoned)}")
    if not manifest.confirmed:
        notes.append("it is not confirmed: a fault may show in the steps after it")
    form = f"stablenum, {manifest.format}"
    contents = Contents(format=form, arrays=tuple(arrays), values=values, notes=tuple(notes))
    return contents, manifest.allowed


def _verified(folder: Path) -> Manifest:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        raise NotCheckedError("corrupt", str(error)) from error
    wrong = complaints(folder, manifest)
    wrong += [f"{name} is not in the manifest" for name in files_in(folder) if name not in manifest.files]
    if wrong:
        raise NotCheckedError("corrupt", listed(wrong))
    return manifest


def _numbers(tree: Any, path: Keys) -> Iterator[tuple[Keys, Plain]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _numbers(value, (*path, str(key)))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _numbers(value, (*path, str(i)))
    elif isinstance(tree, bool | int | float | str):
        yield path, tree
