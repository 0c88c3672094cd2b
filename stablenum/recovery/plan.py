"""The plan: what a symptom is answered with, or why the run stops."""

from __future__ import annotations

from typing import NamedTuple

from stablenum.recovery.ledger import Ledger
from stablenum.recovery.settings import RecoveryPolicy, Response
from stablenum.recovery.snapshots import Snapshot, Snapshots
from stablenum.recovery.symptoms import Symptom

__all__ = ["Rewind", "Stop", "plan"]


class Rewind(NamedTuple):
    """Go back to ``snapshot`` and do what ``response`` says: the attempt number ``attempt`` at this fault."""

    snapshot: Snapshot
    response: Response
    attempt: int


class Stop(NamedTuple):
    """Give up, in the state of ``snapshot``, because ``why``."""

    snapshot: Snapshot
    why: str


def plan(symptom: Symptom, snapshots: Snapshots, ledger: Ledger, policy: RecoveryPolicy) -> Rewind | Stop:
    """Return what a symptom is answered with.

    Args:
        symptom: the symptom.
        snapshots: at least one.
        ledger: the rewinds before.
        policy: the settings.
    """
    good = snapshots.good_before(symptom.origin)
    tried = ledger.attempts_at(symptom, policy.forget_after)
    if tried >= len(policy.responses):
        return Stop(good[0], f"all {tried} responses to this fault were tried")
    if len(ledger.events) >= policy.budget:
        return Stop(good[0], f"the budget of {policy.budget} rewinds is used up")
    response = policy.responses[tried]
    return Rewind(good[min(response.older, len(good) - 1)], response, tried + 1)
