"""The report of a run that was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stablenum.recovery.identifiers import shown
from stablenum.recovery.ledger import RecoveryEvent
from stablenum.recovery.plan import Stop
from stablenum.recovery.symptoms import Symptom

__all__ = ["stopped_report"]

_LINES = 20  # of the verdict
_BATCHES = 8


def stopped_report(
    symptom: Symptom,
    move: Stop,
    events: Sequence[RecoveryEvent],
    *,
    suspects: Sequence[Any] = (),
    verdict: str | None = None,
    folder: Path | None = None,
) -> str:
    """Return what happened, which batches are suspected, what was tried, and where the good state is."""
    named = f" ({', '.join(symptom.names)})" if symptom.names else ""
    lines = [
        f"The training was stopped at step {symptom.step}: {move.why}.",
        f"What was seen: {symptom.detail}{named}. Likely since step {symptom.origin}.",
    ]
    if suspects:
        first = "; ".join(shown(s) for s in suspects[:_BATCHES])
        lines.append(f"Batches since then: {first}{'; ...' if len(suspects) > _BATCHES else ''}.")
    lines += [f"Tried: {event}." for event in events]
    if verdict:
        lines += ["The first skipped step, replayed:", *(f"  {v}" for v in verdict.splitlines()[:_LINES])]
    where = "" if folder is None else f"; it is on the disk in {folder}"
    lines.append(
        f"Model and optimizer are in the state of step {move.snapshot.step}, the last good one{where}."
    )
    return "\n".join(lines)
