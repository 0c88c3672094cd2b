"""The file of a ledger, ``recovery.json``: the rewinds of a run, for a restart."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from stablenum._support.files import write_text
from stablenum.recovery.ledger import RecoveryEvent

__all__ = ["events_in", "text_in", "write_events"]

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


def text_in(folder: Path | None) -> str | None:
    """Return what the file says; None if there is none."""
    path = None if folder is None else folder / _FILE
    return path.read_text(encoding="utf-8") if path is not None and path.exists() else None


def events_in(text: str) -> list[RecoveryEvent]:
    """Return the rewinds that a file tells of."""
    return [RecoveryEvent.from_dict(event) for event in json.loads(text)["events"]]
