"""Running the script on several ranks: all of them run it again together, and one report is written."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stablenum.commands.explain.process import PATIENCE, Running
from stablenum.commands.explain.runner import MOST_RUNS, Explained, run_once, unreproduced
from stablenum.commands.explain.verdicts import Joint, join
from stablenum.diagnosis.watch.launch import GRACE, Launch, has_failed, mark_failed
from stablenum.diagnosis.watch.plan import Outcome, Plan, again_from

__all__ = ["explain_together"]


def explain_together(plan: Plan, say: Callable[[str], object], launch: Launch) -> Explained | None:
    """Run the script on this rank until it fails on any; run it again to record the step that failed.

    Args:
        plan: what to run.
        say: called with messages about the progress, on rank 0.
        launch: this rank among the others.

    Returns:
        What rank 0 reports; None on the other ranks.
    """
    now, environment = replace(plan, rank=launch.rank), dict[str, str]()
    first: dict[int, Outcome] = {}
    for run in range(1, MOST_RUNS + 1):
        _run(now, environment, launch, run)
        if launch.leads:
            outcomes = launch.outcomes(run)
            first = first or outcomes
            joint = join(outcomes, launch.size)
            decision = _decision(run, outcomes, joint, say)
            launch.decide(run, decision)
            if not decision:
                return _explained(first, outcomes, joint, run)
        else:
            decision = launch.decision(run)
            if not decision:
                return None
        environment = decision["environment"]
        now = replace(now, **decision["plan"])
    return None


def _run(plan: Plan, environment: Mapping[str, str], launch: Launch, run: int) -> None:
    """Run the script on this rank, and tell rank 0 how it ended. A script that waits for a rank that has
    failed is ended: first by its own process, which tells what it knows, and then by this one."""
    marks = launch.marks(run)
    running, over = Running(), threading.Event()

    def watch() -> None:
        failed = None
        while not over.wait(0.2):
            failed = failed or (time.monotonic() if has_failed(marks) else None)
            if failed is not None and time.monotonic() > failed + GRACE + PATIENCE / 2:
                running.stop()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        outcome = run_once(
            replace(plan, marks=str(marks)), shown=run == 1, environment=environment, running=running
        )
    finally:
        over.set()
    if outcome.failure is not None or outcome.exit_code:
        mark_failed(marks, launch.rank)
    launch.tell(run, outcome)


def _decision(
    run: int, outcomes: Mapping[int, Outcome], joint: Joint, say: Callable[[str], object]
) -> dict[str, Any]:
    """Return how the script runs again; nothing if it does not."""
    failure = joint.failure
    if failure is None or joint.report is not None or run == MOST_RUNS:
        return {}
    last = run == MOST_RUNS - 1
    what = "every step" if last else "that step"
    say(f"{failure} on rank {joint.failed}; running the script again on all ranks to record {what}")
    optimizers = max(o.optimizers for o in outcomes.values())
    settings = any(o.failure is not None and o.failure.what == "setting" for o in outcomes.values())
    plan = {
        "record_from": 0 if last else again_from(failure, optimizers),
        "again": True,
        "settings": settings,
    }
    return {"plan": plan, "environment": _environment()}


def _environment() -> dict[str, str]:
    """Return what differs for the ranks of another run: the store of the first may still have its keys."""
    if "MASTER_PORT" not in os.environ:
        return {}
    with socket.socket() as free:
        free.bind(("", 0))
        return {"MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _explained(
    first: Mapping[int, Outcome], last: Mapping[int, Outcome], joint: Joint, runs: int
) -> Explained:
    shown = _of_all(first)
    if joint.report is not None:
        shown = replace(shown, failure=joint.failure)
        return Explained(shown, joint.report, runs, on_rank=joint.failed)
    if runs == 1:
        return Explained(shown, None, runs)
    begun = join(first, len(first))
    shown = replace(shown, failure=begun.failure)
    return Explained(shown, unreproduced(shown, _of_all(last)), runs, on_rank=begun.failed)


def _of_all(outcomes: Mapping[int, Outcome]) -> Outcome:
    """Return the outcome of rank 0, with an error that ended another rank, or that this one did not tell."""
    own = outcomes.get(0) or Outcome(exit_code=1, error="no report from rank 0")
    failed = {rank: o for rank, o in outcomes.items() if o.exit_code and not o.cut_short}
    if not failed:
        return own
    rank, outcome = min(failed.items())
    why = outcome.error or f"exit code {outcome.exit_code}"
    return replace(own, exit_code=outcome.exit_code, error=f"{why} on rank {rank}")
