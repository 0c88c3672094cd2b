"""Look at a file or folder: read it with the reader of its format, and judge it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stablenum.checkpoints.folders import Listings
from stablenum.commands.verify.contents import Contents, NotCheckedError
from stablenum.commands.verify.finding import check_files, checkpoints_in, format_of, part_format
from stablenum.commands.verify.formats import (
    distributed_folders,
    numpy_files,
    orbax_folders,
    own_folders,
    safetensors_files,
    torch_files,
)
from stablenum.commands.verify.judging import judged
from stablenum.commands.verify.limits import Limits
from stablenum.commands.verify.verdicts import Outcome, Verdict

__all__ = ["look_at"]

_USUAL = Limits()

_READERS: Mapping[str, Callable[[Path, Limits], Contents]] = {
    "distributed": distributed_folders.read,
    "npy": numpy_files.read_npy,
    "npz": numpy_files.read_npz,
    "orbax": orbax_folders.read,
    "safetensors": safetensors_files.read,
    "torch": torch_files.read,
}


def look_at(
    path: Path, *, allow: Sequence[str] = (), limits: Limits = _USUAL
) -> tuple[list[Outcome], tuple[str, ...]]:
    """Return what is said of a file or folder; of a folder with checkpoints in it, of each of them.

    Where a training saves into the folder meanwhile, what it removes before it is read is no failure.

    Args:
        path: a file or folder.
        allow: patterns of the names of entries that may be not finite.
        limits: how much a checkpoint may ask for.

    Returns:
        The outcomes, at least one, and notes on what was passed over.
    """
    try:
        if format_of(path) == "folder":
            return _in_folder(path, allow, limits)
    except NotCheckedError as why:
        return [Outcome(path=str(path), word=why.word, why=str(why))], ()
    except OSError as error:
        return [Outcome(path=str(path), word="unreadable", why=error.strerror or str(error))], ()
    return [_outcome(path, allow, limits)], ()


def _in_folder(folder: Path, allow: Sequence[str], limits: Limits) -> tuple[list[Outcome], tuple[str, ...]]:
    listings = Listings()
    while True:
        try:
            found = checkpoints_in(folder, limits)
        except FileNotFoundError:  # a subfolder was removed while the folder was listed
            if not folder.exists() or not listings.changed(()):
                raise
            continue
        there = [(part, _identity(part)) for part in found.paths]
        outcomes = [_outcome(part, allow, limits) for part in found.paths]
        gone = {
            part
            for (part, before), outcome in zip(there, outcomes, strict=True)
            if outcome.verdict is None and (before is None or _identity(part) != before)
        }
        if len(gone) < len(outcomes):
            kept = [o for part, o in zip(found.paths, outcomes, strict=True) if part not in gone]
            notes = [
                f"{part.name} was removed while it was looked at" for part in found.paths if part in gone
            ]
            return kept, (*found.notes, *notes)
        if not listings.changed(there):
            raise NotCheckedError(
                "unknown",
                "what was in it was removed while it was looked at"
                if gone
                else "there is no checkpoint in it",
            )


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file or folder from another of the same name; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _outcome(path: Path, allow: Sequence[str], limits: Limits) -> Outcome:
    try:
        with contextlib.ExitStack() as reading:
            kind = format_of(path)
            if path.is_dir():
                check_files(path, limits)
            if kind == "stablenum":
                contents, meant = own_folders.read(path, lambda part: _part(part, limits), limits)
                allow = (*allow, *map(_literal, meant))
            else:
                contents = _READERS[kind](path, limits)
            reading.callback(contents.close)
            verdict = judged(contents, allow=allow, limits=limits)
            contents.finish()
    except NotCheckedError as why:
        return Outcome(path=str(path), word=why.word, why=str(why))
    except OSError as error:
        return Outcome(path=str(path), word="unreadable", why=error.strerror or str(error))
    except Exception as error:  # noqa: BLE001, nothing that a file does to a reader is a verdict on it
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Outcome(path=str(path), word="unreadable", why=said)
    if not (verdict.elements or verdict.numbers or verdict.poison):
        return Outcome(path=str(path), word="unknown", why=_nothing_judged(verdict))
    return Outcome(path=str(path), word="poisoned" if verdict.poison else "good", verdict=verdict)


def _nothing_judged(verdict: Verdict) -> str:
    nothing = f"nothing in it was judged: it holds no number that can be NaN or inf ({verdict.format})"
    return "; ".join([nothing, *verdict.notes])


def _part(path: Path, limits: Limits) -> Contents | None:
    """Return what is in a part of a checkpoint of stablenum; None if it is no checkpoint itself."""
    kind = part_format(path)
    return _READERS[kind](path, limits) if kind in _READERS else None


def _literal(name: str) -> str:
    """Return the pattern that only this name matches."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
