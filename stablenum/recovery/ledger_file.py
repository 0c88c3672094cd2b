"""The file of a ledger, ``recovery.json``: the rewinds of a run, for a restart."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from stablenum._support.files import write_text
from stablenum.errors import CheckpointError
from stablenum.recovery.ledger import RecoveryEvent

__all__ = ["events_in", "read_file", "write_events"]

_logger = logging.getLogger("stablenum")
_FILE = "recovery.json"


def write_events(folder: Path | None, events: Sequence[RecoveryEvent]) -> None:
    """Write the file, unless the folder is None; if that is not possible, a warning is logged."""
    if folder is None:
        return
    plain = {"events": [event.to_dict() for event in events]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / _FILE, json.dumps(plain, indent=1, default=str) + "\n")
    except OSError as error:
        _logger.warning(
            "%s could not be written: %s. After a restart, the budget would be as before this rewind.",
            folder / _FILE,
            error,
        )


def read_file(folder: Path | None) -> tuple[Path, bytes | str] | None:
    """Return the file and its bytes, or in words why it cannot be read; None if there is none."""
    path = None if folder is None else folder / _FILE
    if path is None or not path.exists():
        return None
    try:
        return path, path.read_bytes() if path.is_file() else "it is not a file"
    except OSError as error:
        return path, error.strerror or str(error)


def events_in(path: Path, content: bytes | str) -> list[RecoveryEvent]:
    """Return the rewinds that a file tells of.

    Args:
        path: the file.
        content: what :func:`read_file` returned of it.

    Raises:
        CheckpointError: it cannot be read, or it is not what :func:`write_events` writes.
    """
    if isinstance(content, str):
        raise _unreadable(path, content)
    try:
        return [_checked(RecoveryEvent.from_dict(event)) for event in json.loads(content)["events"]]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        why = f"it is damaged ({type(error).__name__}: {error!s:.100})"
        raise _unreadable(path, why) from error


def _checked(event: RecoveryEvent) -> RecoveryEvent:
    """Return an event whose numbers are those that the next answers are computed from."""
    counts = (event.attempt, event.to_step, event.symptom.step, event.symptom.origin)
    if not all(type(count) is int for count in counts):
        raise TypeError("a step or an attempt is not a whole number")
    return event


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {why}. It has the rewinds of the run so far, which say how much of the "
        "budget is left. Nothing was changed. To go on with the whole budget, remove it; to begin from step "
        "0, give another folder."
    )
