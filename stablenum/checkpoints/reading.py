"""Find the newest good checkpoint: its bytes are those that were written, and its values are finite."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stablenum.checkpoints.codec import Codec, Ranks, on_all, on_each
from stablenum.checkpoints.finiteness import is_meant, listed
from stablenum.checkpoints.folders import Found, Listings, found_in
from stablenum.checkpoints.manifest import MANIFEST, Manifest, complaints
from stablenum.errors import CheckpointError

__all__ = ["Loaded", "newest_good"]

_logger = logging.getLogger("stablenum")


class Loaded(NamedTuple):
    """A checkpoint that has been verified and read.

    Attributes:
        step: the number of steps that the state has taken.
        state: what the codec read.
        folder: where it is.
        manifest: what the checkpoint says about itself.
    """

    step: int
    state: Any
    folder: Path
    manifest: Manifest


def newest_good(
    root: Path,
    like: Any,
    codec: Codec,
    ranks: Ranks,
    allow: Sequence[str],
    step: int | None = None,
    kind: str = "",
) -> Loaded:
    """Return the newest checkpoint that is good on all ranks, a confirmed one before any other.

    Those that are passed over are logged with the reason. Where another process saves and removes meanwhile,
    the folder is listed again.

    Args:
        root: the folder with the checkpoints.
        like: what the state is loaded into; given to the codec.
        codec: reads the files.
        ranks: the processes that load together.
        allow: patterns of entries that may be not finite.
        step: the only step that is looked at; default all.
        kind: what is not recorded to be of another kind is read.

    Raises:
        CheckpointError: there is no checkpoint, or none is good; ``reasons`` has the reason of each.
    """
    failed: dict[tuple[str, int], str] = {}
    listings = Listings()
    while True:
        found = on_all(ranks, lambda: found_in(root) if ranks.rank == 0 else [])[0]
        asked = [f for f in found if step in (None, f.step)]
        for candidate in sorted((f for f in asked if f.key not in failed), key=_order, reverse=True):
            try:
                loaded = _loaded(candidate, like, codec, ranks, allow, kind)
            except (CheckpointError, OSError) as error:
                failed[candidate.key] = str(error)
            else:
                there = {f.key for f in found}
                bad = {name: why for (name, serial), why in failed.items() if (name, serial) in there}
                bad |= {f.folder.name: f.reason for f in found if f.manifest is None and f.step > loaded.step}
                if ranks.rank == 0:
                    _log_passed_over(root, loaded, bad)
                return loaded
        if not listings.changed(f.key for f in asked):
            reasons = {name: why for (name, _), why in failed.items()}
            raise CheckpointError(_none_good(root, step, found, reasons), reasons=reasons)


def _order(found: Found) -> tuple[bool, bool, int]:
    """Return the key by which the best is the last; those without a manifest come first."""
    if found.manifest is None:
        return (False, False, found.step)
    return (True, found.manifest.confirmed, found.manifest.serial)


def _loaded(found: Found, like: Any, codec: Codec, ranks: Ranks, allow: Sequence[str], kind: str) -> Loaded:
    """Return a checkpoint.

    Raises:
        OSError, CheckpointError: it is not good; on all ranks alike.
    """
    manifest = found.manifest
    if manifest is None:
        raise CheckpointError(found.reason)
    if manifest.kind not in ("", kind):
        raise CheckpointError(f"it is a {manifest.kind} of a recovery, which only that can resume from")
    if manifest.format != codec.name:
        raise CheckpointError(f"its format is {manifest.format!r}, and {codec.name!r} is to be read")
    _check_files(found.folder, manifest, ranks)
    state = on_each(ranks, lambda: _read(found.folder, like, codec))
    _check_finite(state, manifest, codec, ranks, allow)
    return Loaded(manifest.step, state, found.folder, manifest)


def _read(folder: Path, like: Any, codec: Codec) -> Any:
    """Return what a codec reads in a folder that is there from beginning to end.

    Raises:
        OSError, CheckpointError: it cannot be read, whatever a library says then.
    """
    try:
        state = codec.read(folder, like)
    except (OSError, CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"it cannot be read: {type(error).__name__}: {error}") from error
    if not (folder / MANIFEST).exists():  # which goes first when a checkpoint is removed
        raise CheckpointError("it was removed while it was read")
    return state


def _check_files(folder: Path, manifest: Manifest, ranks: Ranks) -> None:
    names, world = sorted(manifest.files), len(ranks.gather(None))
    wrong = on_all(ranks, lambda: complaints(folder, manifest, names[ranks.rank :: world]))
    if any(wrong):
        raise CheckpointError(listed(complaint for part in wrong for complaint in part))


def _check_finite(state: Any, manifest: Manifest, codec: Codec, ranks: Ranks, allow: Sequence[str]) -> None:
    def poisoned() -> list[str]:
        entries = [entry for entry in codec.nonfinite(state) if entry.name not in manifest.allowed]
        return [str(entry) for entry in entries if not is_meant(entry, allow)]

    found = dict.fromkeys(entry for part in on_all(ranks, poisoned) for entry in part)
    if found:
        raise CheckpointError(f"not finite: {listed(found)}")


def _log_passed_over(root: Path, loaded: Loaded, reasons: dict[str, str]) -> None:
    if reasons:
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        _logger.warning(f"{root}: step {loaded.step} is loaded. Passed over, because not good: {told}.")


def _none_good(root: Path, step: int | None, found: Sequence[Found], reasons: dict[str, str]) -> str:
    if reasons:
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        return f"no checkpoint in {root} can be loaded. {told}. Nothing was changed."
    if step is None:
        return f"there is no checkpoint in {root}. Nothing was changed."
    steps = listed(sorted({f.step for f in found})) or "none"
    return f"there is no checkpoint of step {step} in {root}; the steps there are: {steps}."
