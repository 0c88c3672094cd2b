"""What the log of a run says of its rewinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stablenum.guard.readout import StepRecord
from stablenum.recovery.ledger import RecoveryEvent, shown_symptom, tried
from stablenum.recovery.plan import Stop
from stablenum.recovery.symptoms import Symptom
from stablenum.runlog.lines import Rewind

__all__ = ["Why", "of_event", "of_stop"]


class Why(NamedTuple):
    """Why a run goes back.

    Attributes:
        symptom: what was seen.
        done: a sentence that says what is done about it.
    """

    symptom: Symptom
    done: str

    def rewind(self, before: Sequence[StepRecord], now: Sequence[StepRecord]) -> Rewind:
        """Return the rewind that took the guard from one record to another.

        Its steps have the numbers of the record, as all steps of a log. The recovery counts others: those
        that have been made, from 1, since it began.
        """
        first = now[-1]["step"] + 1 if now else 0
        last = max(before[-1]["step"], first - 1) if before else first - 1
        return Rewind(str(self.symptom.code), first, last, shown_symptom(self.symptom), self.done)


def of_event(event: RecoveryEvent) -> Why:
    """Return why a run goes back and goes on."""
    return Why(event.symptom, f"Attempt {event.attempt}: {tried(event)}")


def of_stop(symptom: Symptom, move: Stop) -> Why:
    """Return why a run goes back to its last good state and ends there."""
    return Why(symptom, f"The training was stopped: {move.why}")
