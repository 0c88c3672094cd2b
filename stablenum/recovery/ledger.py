"""The ledger: every rewind of a run, why it was made and what was tried; kept over restarts."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stablenum.files import write_text
from stablenum.recovery.identifiers import shown_range
from stablenum.recovery.settings import Response
from stablenum.recovery.symptoms import Symptom

__all__ = ["Ledger", "RecoveryEvent"]

_logger = logging.getLogger("stablenum")
_FILE = "recovery.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryEvent:
    """One rewind.

    Attributes:
        symptom: what was seen.
        attempt: which attempt at this fault it was, from 1.
        to_step: the step to whose state the run went back.
        response: what was tried.
        left_out: the identifiers of the first and the last batch that were left out; None if they followed
            again.
        suspects: the identifiers of the batches from the symptom's origin to its step, as far as known.
        clip_at: the gradient norm to which steps were clipped for a while; None if that was left alone.
    """

    symptom: Symptom
    attempt: int
    to_step: int
    response: Response
    left_out: tuple[Any, Any] | None = None
    suspects: tuple[Any, ...] = ()
    clip_at: float | None = None

    def __str__(self) -> str:
        s = self.symptom
        named = f" ({', '.join(s.names[:4])}{', ...' if len(s.names) > 4 else ''})" if s.names else ""
        return (
            f"step {s.step}: {s.detail}{named}. Attempt {self.attempt}: back to step {self.to_step}, "
            f"{self._tried()}"
        )

    def _tried(self) -> str:
        parts = ["the same data again"]
        if self.left_out is not None:
            parts = [f"{shown_range(*self.left_out)} left out"]
        if self.response.rate != 1.0:
            parts.append(f"learning rate x {self.response.rate:g}")
        if self.clip_at is not None:
            parts.append(f"gradients clipped at {self.clip_at:.3g}")
        if self.response.wider:
            parts.append("a wider format")
        until = f", up to step {self.eased_until}" if self.response.eases else ""
        return ", ".join(parts) + until

    @property
    def eased_until(self) -> int:
        """The last step to which rate, clip and format of the response apply."""
        return self.symptom.step + self.response.steps

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, if the identifiers are."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return plain | {
            "symptom": self.symptom.to_dict(),
            "response": dataclasses.asdict(self.response),
            "left_out": None if self.left_out is None else list(self.left_out),
            "suspects": list(self.suspects),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> RecoveryEvent:
        """Return the event that :meth:`to_dict` described."""
        left_out = plain["left_out"]
        return cls(
            **dict(plain)
            | {
                "symptom": Symptom.from_dict(plain["symptom"]),
                "response": Response(**plain["response"]),
                "left_out": None if left_out is None else tuple(left_out),
                "suspects": tuple(plain["suspects"]),
            }
        )


class Ledger:
    """The rewinds of a run so far, oldest first; ``recovery.json`` in the folder, if there is one."""

    def __init__(self, events: Sequence[RecoveryEvent] = ()) -> None:
        self.events = list(events)

    def write(self, folder: Path | None) -> None:
        """Write the file; if that is not possible, a warning is logged."""
        if folder is None:
            return
        plain = {"events": [event.to_dict() for event in self.events]}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / _FILE, json.dumps(plain, indent=1, default=str) + "\n")
        except OSError as error:
            _logger.warning(
                "%s could not be written: %s. After a restart, the budget would be as before this rewind.",
                folder / _FILE,
                error,
            )

    @staticmethod
    def text(folder: Path | None) -> str | None:
        """Return what the file says; None if there is none."""
        path = None if folder is None else folder / _FILE
        return path.read_text(encoding="utf-8") if path is not None and path.exists() else None

    def read(self, text: str | None) -> None:
        """Take in what a file said."""
        if text is not None:
            self.events = [RecoveryEvent.from_dict(event) for event in json.loads(text)["events"]]

    def attempts_at(self, symptom: Symptom, forget_after: int) -> int:
        """Return how many attempts were made at the fault that a symptom belongs to."""
        if not self.events or symptom.step > self.events[-1].symptom.step + forget_after:
            return 0
        return self.events[-1].attempt
