"""torch's ``DebugMode``, which logs the operations of a run with a hash of each result, on two programs.

``DebugMode.check_hash_mismatches`` is meant for two runs of one program. It asks for the same operations in
the same order, and raises where they part; that place is all it can say of programs of another structure.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch.utils._debug_mode import DebugMode

from benchmarks.peers.answers import Answer
from benchmarks.peers.runs import TorchStep

__all__ = ["EXACT", "NEAR", "Logged", "debug_mode", "logged"]

EXACT, NEAR = 0.0, 1e-5  # the relative difference of two hashes, sums of magnitudes, that counts as one
_INDEX = re.compile(r" at index (\d+)")


class Logged(NamedTuple):
    """The calls of a training step, and their number after the forward pass and after the backward pass."""

    calls: list[Any]
    forward: int
    backward: int


def logged(step: TorchStep) -> Logged:
    """Run a step and log it."""
    with DebugMode(record_stack_trace=True) as mode, DebugMode.log_tensor_hashes():
        loss = step.loss_fn(*step.args)
        forward = len(mode.logs)
        loss.backward()
        backward = len(mode.logs)
        step.update()
    return Logged(list(mode.logs), forward, backward)


def debug_mode(left: Logged, right: Logged, file: str, *, tolerance: float) -> Answer:
    """Name the first call whose results differ, or at which the two logs part.

    Args:
        file: that of the right program, to which the line belongs.
        tolerance: see above.
    """
    try:
        DebugMode.check_hash_mismatches(left.calls, right.calls)
    except ValueError as error:
        parted = _INDEX.search(str(error))  # it names none for logs of different lengths
        return _answer(right, int(parted[1]), file) if parted else Answer(True)
    for i, pair in enumerate(zip(left.calls, right.calls, strict=True)):
        # Call by call, because what it returns says which operation a mismatch is of, but not which call.
        found = DebugMode.check_hash_mismatches(*([call] for call in pair))
        if any(not one["rel_diff"] <= tolerance for one in found):
            return _answer(right, i, file)
    return Answer(False)


def _answer(log: Logged, index: int, file: str) -> Answer:
    phase = "forward" if index < log.forward else "backward" if index < log.backward else "update"
    call = log.calls[index]
    trace = (call.fwd_stack_trace if phase == "backward" else call.stack_trace) or ""
    lines = re.findall(rf'{re.escape(file)}", line (\d+)', trace)
    return Answer(True, phase, line=int(lines[-1]) if lines else 0)
