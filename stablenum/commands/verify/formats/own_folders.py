"""Read a checkpoint of stablenum: verify its manifest, then read the files that it lists."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stablenum.checkpoints.finiteness import listed
from stablenum.checkpoints.manifest import Manifest, complaints, files_in, read_manifest
from stablenum.checkpoints.structure import put_together
from stablenum.commands.verify.contents import Contents, Entry, NotCheckedError, Plain
from stablenum.commands.verify.contents import Path as Keys
from stablenum.commands.verify.formats.distributed_folders import METADATA
from stablenum.commands.verify.leaves import leaves_of
from stablenum.commands.verify.limits import Limits, read_json
from stablenum.errors import CheckpointError

__all__ = ["read"]

# Formats without complex numbers hold the pairs of their parts, under the name with this behind it.
COMPLEX = "#complex"
# Hidden files that a reader would go by: those of torch.distributed.checkpoint and of zarr.
_READ = (METADATA, ".zarray", ".zattrs", ".zgroup", ".zmetadata")


def read(
    folder: Path, part: Callable[[Path], Contents | None], limits: Limits
) -> tuple[Contents, tuple[str, ...]]:
    """Return what is in a checkpoint of stablenum, and the names of what in it is not finite on purpose.

    Args:
        folder: the checkpoint.
        part: reads the folder, or a file or folder in it; None for what is no checkpoint apart from that.
        limits: how much may be read.

    Raises:
        NotCheckedError: it is not what was written, or a part of it cannot be read.
    """
    manifest = _verified(folder)
    with contextlib.ExitStack() as opened:

        def looked_into(path: Path) -> Contents | None:
            found = part(path)
            if found is not None:
                opened.callback(found.close)
            return found

        whole = looked_into(folder)
        tops = {Path(name).parts[0] for name in manifest.files}
        parts = [folder / name for name in sorted(tops) if not name.endswith(".json")]
        found = [whole] if whole else [c for c in map(looked_into, parts) if c is not None]
        plain = [
            folder / name for name in sorted(manifest.files) if name.endswith(".json") and "/" not in name
        ]
        arrays, values = _merged(found, plain, limits)
        close = opened.pop_all().close
    notes = [note for contents in found for note in contents.notes]
    if manifest.poisoned:
        notes.append(f"it was set aside as poisoned, and is never loaded: {listed(manifest.poisoned)}")
    if not manifest.confirmed:
        notes.append("it is not confirmed: a fault may show in the steps after it")
    form = f"stablenum, {manifest.format}"
    contents = Contents(
        format=form,
        arrays=tuple(arrays),
        values=values,
        notes=tuple(notes),
        stored=sum(record.bytes for record in manifest.files.values()),
        close=close,
    )
    return contents, manifest.allowed


def _merged(
    found: Sequence[Contents], plain: Sequence[Path], limits: Limits
) -> tuple[list[Entry], dict[Keys, Plain]]:
    """Return the arrays and values, under the paths that the state has in the files of plain values."""
    arrays = {entry.path: entry for contents in found for entry in contents.arrays}
    values = {path: value for contents in found for path, value in contents.values.items()}
    stored = {entry.name.removesuffix(COMPLEX): entry for entry in arrays.values()}
    for file in plain:
        state = _put_together(file, stored | _of_rank(file, stored), limits)
        for path, leaf in leaves_of(state, (), limits):
            if isinstance(leaf, Entry):
                arrays[leaf.path] = dataclasses.replace(leaf, path=path)
            elif isinstance(leaf, bool | int | float | complex | str):
                values[path] = leaf
    return list(arrays.values()), values


def _of_rank(file: Path, stored: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the arrays that one rank has for itself, under the names that they have in its file."""
    number = re.search(r"\d+", file.stem)
    own = f"rank {int(number[0]) if number else 0}/"
    return {name.removeprefix(own): entry for name, entry in stored.items() if name.startswith(own)}


def _put_together(file: Path, arrays: Mapping[str, Entry], limits: Limits) -> Any:
    try:
        return put_together(read_json(file, limits), arrays)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotCheckedError(
            "corrupt", f"{file.name} does not describe the state ({error!r:.200})"
        ) from error


def _verified(folder: Path) -> Manifest:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        raise NotCheckedError("corrupt", str(error)) from error
    wrong = complaints(folder, manifest)
    # What file managers and network file systems leave is hidden, and read by nobody.
    more = [name for name in files_in(folder) if Path(name).name in _READ or Path(name).name[0] != "."]
    wrong += [f"{name} is not in the manifest" for name in more if name not in manifest.files]
    if wrong:
        raise NotCheckedError("corrupt", listed(wrong))
    return manifest
