"""Look at a file or folder: read it with the reader of its format, and judge it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stablenum.commands.verify.contents import Contents, NotCheckedError
from stablenum.commands.verify.finding import checkpoints_in, format_of, part_format
from stablenum.commands.verify.formats import (
    distributed_folders,
    numpy_files,
    orbax_folders,
    own_folders,
    safetensors_files,
    torch_files,
)
from stablenum.commands.verify.judging import judged
from stablenum.commands.verify.verdicts import Outcome

__all__ = ["look_at"]

_READERS: Mapping[str, Callable[[Path], Contents]] = {
    "distributed": distributed_folders.read,
    "npy": numpy_files.read_npy,
    "npz": numpy_files.read_npz,
    "orbax": orbax_folders.read,
    "safetensors": safetensors_files.read,
    "torch": torch_files.read,
}


def look_at(path: Path, *, allow: Sequence[str] = ()) -> tuple[list[Outcome], tuple[str, ...]]:
    """Return what is said of a file or folder; of a folder with checkpoints in it, of each of them.

    Args:
        path: a file or folder.
        allow: patterns of the names of entries that may be not finite.

    Returns:
        The outcomes, at least one, and notes on what was passed over.
    """
    try:
        if format_of(path) == "folder":
            found = checkpoints_in(path)
            if not found.paths:
                raise NotCheckedError("unknown", "there is no checkpoint in it")
            return [_outcome(part, allow) for part in found.paths], found.notes
    except NotCheckedError as why:
        return [Outcome(path=str(path), word=why.word, why=str(why))], ()
    return [_outcome(path, allow)], ()


def _outcome(path: Path, allow: Sequence[str]) -> Outcome:
    try:
        kind = format_of(path)
        if kind == "stablenum":
            contents, meant = own_folders.read(path, _part)
            verdict = judged(contents, allow=(*allow, *map(_literal, meant)))
        else:
            verdict = judged(_READERS[kind](path), allow=allow)
    except NotCheckedError as why:
        return Outcome(path=str(path), word=why.word, why=str(why))
    except OSError as error:
        return Outcome(path=str(path), word="unreadable", why=error.strerror or str(error))
    except Exception as error:  # noqa: BLE001, nothing that a file does to a reader is a verdict on it
        return Outcome(path=str(path), word="unreadable", why=f"{type(error).__name__}: {error}")
    return Outcome(path=str(path), word="poisoned" if verdict.poison else "good", verdict=verdict)


def _part(path: Path) -> Contents | None:
    """Return what is in a part of a checkpoint of stablenum; None if it is no checkpoint itself."""
    kind = part_format(path)
    return _READERS[kind](path) if kind in _READERS else None


def _literal(name: str) -> str:
    """Return the pattern that only this name matches."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
