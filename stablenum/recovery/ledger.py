"""The ledger: every rewind of a run, why it was made and what was tried; kept over restarts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stablenum.recovery.identifiers import shown_range
from stablenum.recovery.settings import Response
from stablenum.recovery.symptoms import Symptom

__all__ = ["Ledger", "RecoveryEvent", "shown_symptom", "tried"]

_NAMES = 4


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
        return (
            f"step {self.symptom.step}: {shown_symptom(self.symptom)}, likely since step "
            f"{self.symptom.origin}. "
            f"Attempt {self.attempt}: back to step {self.to_step}, {tried(self)}"
        )

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


def shown_symptom(symptom: Symptom) -> str:
    """Return a clause that says what was seen, and of what."""
    names = symptom.names
    more = ", ..." if len(names) > _NAMES else ""
    return f"{symptom.detail} ({', '.join(names[:_NAMES])}{more})" if names else symptom.detail


def tried(event: RecoveryEvent) -> str:
    """Return in words how the run went on after a rewind."""
    response, parts = event.response, ["the same data again"]
    if event.left_out is not None:
        parts = [f"{shown_range(*event.left_out)} left out"]
    if response.rate != 1.0:
        parts.append(f"learning rate x {response.rate:g}")
    if event.clip_at is not None:
        parts.append(f"gradients clipped at {event.clip_at:.3g}")
    if response.wider:
        parts.append("a wider format")
    until = f", up to step {event.eased_until}" if response.eases else ""
    return ", ".join(parts) + until


class Ledger:
    """The rewinds of a run so far, oldest first."""

    def __init__(self, events: Sequence[RecoveryEvent] = ()) -> None:
        self.events = list(events)

    def attempts_at(self, symptom: Symptom, forget_after: int) -> int:
        """Return how many attempts were made at the fault that a symptom belongs to."""
        if not self.events or symptom.step > self.events[-1].symptom.step + forget_after:
            return 0
        return self.events[-1].attempt
