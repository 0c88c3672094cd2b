"""Run healthy trainings plainly and with ``Recovery``, and count how often it goes back for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from rich.table import Table

import stablenum_torch
from benchmarks.recovery.healthy import classifying, moving, regressing, sequences, tuning
from benchmarks.recovery.healthy.training import Batch, Training
from stablenum import RecoveryStopped

__all__ = ["TRAININGS", "plainly", "rows", "table", "with_recovery"]

Make = Callable[[int], Training]

_MODULES = (classifying, tuning, regressing, sequences, moving)
TRAININGS: dict[str, Make] = {
    name.replace("_", " "): getattr(module, name) for module in _MODULES for name in module.__all__
}


def _made(make: Make, seed: int) -> tuple[Training, torch.optim.lr_scheduler.LambdaLR]:
    torch.manual_seed(seed)
    training = make(seed)
    return training, torch.optim.lr_scheduler.LambdaLR(training.optimizer, training.rate)


def _score(training: Training) -> float:
    """The evaluation, which leaves the random numbers of the training as they are."""
    training.model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        found = training.evaluate()
    training.model.train()
    return found


def plainly(make: Make, seed: int = 0) -> dict[str, Any]:
    """Run a training with its plain optimizer; return evaluations, losses, and whether all is finite."""
    training, scheduler = _made(make, seed)
    start, losses = _score(training), []
    for step in range(training.steps):
        training.before(step)
        training.optimizer.zero_grad()
        parts = training.data(step)
        losses.append(0.0)
        for part in parts:
            loss = training.loss(part, step) / len(parts)
            loss.backward()
            losses[-1] += loss.item()
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)
        training.optimizer.step()
        scheduler.step()
        training.after(step)
    finite = all(map(math.isfinite, losses)) and all(
        bool(p.isfinite().all()) for p in training.model.parameters()
    )
    return {"start": start, "end": _score(training), "losses": losses, "finite": finite}


def with_recovery(make: Make, seed: int = 0) -> dict[str, Any]:
    """Run a training with ``Recovery`` as it is by default; return its last evaluation and what it did."""
    training, scheduler = _made(make, seed)
    opt = stablenum_torch.wrap(training.optimizer, names=training.model, clip=training.clip)
    recovery = stablenum_torch.Recovery(
        training.model, opt, data=training.data, scheduler=scheduler, extra=training.extra
    )
    stopped: list[str] = []
    try:
        for parts in recovery.batches(training.steps):
            _guarded_step(training, opt, parts, recovery.step)
            scheduler.step()
            training.after(recovery.step)
    except RecoveryStopped as error:
        stopped.append(str(error).splitlines()[0])
    why = [str(event) for event in recovery.events]
    return {"end": _score(training), "rewinds": len(why), "why": why + stopped, "steps": recovery.step}


def _guarded_step(
    training: Training, opt: stablenum_torch.GuardedOptimizer, parts: list[Batch], step: int
) -> None:
    training.before(step)
    opt.zero_grad()
    for part in parts:
        opt.backward(training.loss(part, step) / len(parts))
    opt.step()


def rows(trainings: Mapping[str, Make] = TRAININGS, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a row for each training: how often a run with ``Recovery`` went back, and why.

    ``healthy`` says whether the plain run learned: its losses and weights are finite, and its evaluation is
    better at the end than at the start. A rewind of such a run is a false alarm.
    """
    for name, make in trainings.items():
        plain, watched = plainly(make, seed), with_recovery(make, seed)
        yield {
            "training": name,
            "steps": watched["steps"],
            "rewinds": watched["rewinds"],
            "why": watched["why"],
            "start": plain["start"],
            "plain": plain["end"],
            "recovery": watched["end"],
            "healthy": plain["finite"] and plain["end"] < plain["start"],
        }


def table(found: list[dict[str, Any]]) -> Table:
    """Return the rows as a table, with the messages below their trainings."""
    shown = Table(title="false alarms in healthy trainings", caption="evaluations: smaller is better")
    shown.add_column("training", overflow="fold")
    for column in ("steps", "at the start", "plain", "with Recovery", "rewinds"):
        shown.add_column(column, justify="right")
    for row in found:
        values = (f"{row[key]:.3g}" for key in ("start", "plain", "recovery"))
        name = row["training"] if row["healthy"] else f"{row['training']} (not healthy)"
        shown.add_row(name, str(row["steps"]), *values, str(row["rewinds"]))
    total = sum(row["rewinds"] for row in found)
    alarmed = sum(row["rewinds"] > 0 for row in found)
    shown.add_section()
    shown.add_row(f"{alarmed} of {len(found)} with false alarms", "", "", "", "", str(total))
    return shown
