"""Decide a step on a GPU with the guard's own kernels, where they were found to decide as the core does."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from stablenum._support.user_warnings import warn
from stablenum.arrays import leaves, map_leaves
from stablenum.guard.decide import GuardState
from stablenum.guard.reasons import Reason
from stablenum_torch._devices.compiled_decide import NotCompiledWarning
from stablenum_torch._devices.kernels.device_guard import DeviceGuard, Kernel, Seen
from stablenum_torch._devices.kernels.launches import has_triton
from stablenum_torch._devices.kernels.printed_decide import Kinds
from stablenum_torch._devices.kernels.printed_elements import UnprintableError
from stablenum_torch._devices.state import copy_into
from stablenum_torch._devices.waits import capturing
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.elements import extremes_without_wait
from stablenum_torch._step.observe import Measured, measured_without_wait, noted
from stablenum_torch._step.plain_decision import Decided, decided_without_wait

__all__ = ["can_launch", "decided_by_kernels"]

# Of what kernels and plain operations give from the same state. They add up norms in different orders, which
# moves a sum of n float32 by some log2(n) / 2 units in the last place where it is added up in pairs, and by
# more where it is not; what follows from it moves by a few times as much.
_RELATIVE = 1e-5

_trusted: dict[Kinds, bool] = {}  # whether a kernel decided as the plain operations do, when it was tried


def can_launch(on: Tensor) -> bool:
    """Return whether kernels can be launched for the device of a tensor of the guard's state.

    ``TORCHDYNAMO_DISABLE=1``, which turns compiling off, turns these off, too. Triton's interpreter cannot
    follow addresses on a device.
    """
    plain = type(on) is Tensor and on.is_cuda and not torch.compiler.is_compiling()
    return (
        plain
        and has_triton()
        and os.environ.get("TORCHDYNAMO_DISABLE", "0") != "1"
        and os.environ.get("TRITON_INTERPRET", "0") in ("", "0", "false", "off")
        and not is_in_torch_dispatch_mode()
    )


def decided_by_kernels(
    guard: DeviceGuard, inputs: StepInputs, *, still: bool
) -> tuple[Decided | None, Measured | None]:
    """Return what the kernels have decided, None if they cannot; and what torch has measured for them.

    The next state has been written then, until ``guard.undo()`` is called. Before the first decision of each
    kind, the kernel is tried in some situations beside the plain operations, which the host waits for.

    Args:
        guard: of the state.
        inputs: the step.
        still: whether it moves nothing, see ``moves_nothing``.
    """
    if inputs.fault is not None or inputs.config.exact_norms:
        return None, None
    kernel = _kernel(guard, inputs, still)
    if kernel.trusted is None:
        kernel.trusted = _trusted.get(kernel.kinds)
    # None is tried while a graph is captured.
    if kernel.trusted is False or (kernel.trusted is None and capturing()):
        return None, None
    seen, measured = _seen(guard, inputs)
    if kernel.trusted is None:
        measured = measured_without_wait(inputs) if measured is None else measured
        kernel.trusted = _trusted[kernel.kinds] = _agrees(guard, kernel, seen, measured)
        if not kernel.trusted:
            return None, measured
    guard.decide(kernel, seen)
    return Decided(None, guard.factor, (), None, guard.divisor, guard.skip, guard.applied), measured


def _kernel(guard: DeviceGuard, inputs: StepInputs, still: bool) -> Kernel:
    measured, ranks = tuple(sorted(inputs.config.needs)), 0
    if inputs.joint is not None:  # the rows of the ranks have loss and flag
        ranks = len(inputs.joint.ranks)
    else:
        measured += ("loss",) if inputs.loss is not None else ()
        measured += ("found_inf",) if inputs.found_inf is not None else ()
    return guard.kernel(still=still, measured=measured, ranks=ranks)


def _seen(guard: DeviceGuard, inputs: StepInputs) -> tuple[Seen, Measured | None]:
    """Return what the kernel decides on, and what torch has measured for it."""
    # Addresses cannot be sent while a graph is being captured: a replay would send them again.
    if inputs.joint is None and not capturing() and guard.reads([p.grad for p in inputs.params]):
        amax, tiny = extremes_without_wait(inputs).joined() if inputs.config.needs else (None, None)
        return Seen(None, *noted(inputs), amax, tiny), None
    measured = measured_without_wait(inputs)
    return _of_measured(measured), measured


def _of_measured(measured: Measured) -> Seen:
    amax, tiny = measured.extremes.joined()
    rows = None if measured.rows is None else measured.rows[:, :4].double().contiguous()
    return Seen(measured.norms, measured.loss, measured.found_inf, amax, tiny, rows)


# --- whether a kernel decides as the plain operations do ----------------------------------------------------


def _agrees(guard: DeviceGuard, kernel: Kernel, seen: Seen, measured: Measured) -> bool:
    """Return whether the kernel decides as the plain operations do: this step as it measures it, and some
    situations from the present state and from one whose rules have learnt. Neither is changed."""
    state = map_leaves(torch.clone, guard.state)
    try:
        trial = guard.on_another_state(state)
        steps: Iterator[tuple[GuardState, Measured, Seen]] = itertools.chain(
            [(guard.state, measured, seen)],
            ((guard.state, one, _of_measured(one)) for one in _situations(measured)),
            ((warm, one, _of_measured(one)) for warm in [_warm(guard)] for one in _situations(measured)),
        )
        for begin, one, as_seen in steps:
            copy_into(state, begin)
            wanted = decided_without_wait(guard.config, kernel.kinds.still, begin, one)
            trial.decide(kernel, as_seen)
            if not _same(trial, wanted):
                _warn("they decide differently from the operations of torch")
                return False
    except UnprintableError:
        return False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (compilers fail in many ways)
        _warn((str(error).strip().splitlines() or [type(error).__name__])[0])
        return False
    return True


def _situations(measured: Measured) -> list[Measured]:
    """Return what else might have been measured: smaller and larger gradients, and what forbids a step.

    No two norms are alike: a quantile or a spread of equal ones would hang on the last bit.
    """
    norms, rows, loss, found_inf = measured.norms, measured.rows, measured.loss, measured.found_inf
    found = []
    for factor in (1.37, 0.61, 1.13e3, 0.0, 0.89e-3, math.inf, math.nan):
        joint = None if rows is None else torch.cat([rows[:, :1] * factor, rows[:, 1:]], 1)
        found.append(measured._replace(norms=norms * factor, rows=joint))
    if loss is not None:
        found += [measured._replace(loss=loss * math.nan), measured._replace(loss=loss * 1.7e3)]
    if found_inf is not None:
        found.append(measured._replace(found_inf=torch.ones_like(found_inf)))
    return found


def _warm(guard: DeviceGuard) -> GuardState:
    """Return a state in which counters are about to reach their limits, and windows are full."""
    config, state = guard.config, map_leaves(torch.clone, guard.state)
    halted, recorder = state.halted, state.recorder

    def warmed(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return torch.full_like(leaf, 1000)  # more than any rule's warm-up
        ramp = torch.arange(leaf.numel(), device=leaf.device).reshape(leaf.shape)
        return (1.0 + 0.1 * torch.sin(ramp.float())) if leaf.ndim else leaf

    warm = map_leaves(warmed, state)._replace(halted=halted, recorder=recorder)
    limit = _one_before(config, "skip_limit")
    interval = _one_before(config.loss_scale, "growth_interval")
    scale = state.loss_scale._replace(good_steps=torch.full_like(state.loss_scale.good_steps, interval))
    row = torch.full_like(state.nonfinite_in_a_row, limit)
    return warm._replace(loss_scale=scale, nonfinite_in_a_row=row, skipped_in_a_row=row)


def _one_before(rule: Any, name: str) -> int:
    limit = getattr(rule, name, None)
    return 0 if limit is None else max(0, limit - 1)


def _same(trial: DeviceGuard, wanted: Decided) -> bool:
    found, expected = [trial.factor, trial.skip], [wanted.multiplier, wanted.skip]
    if not trial.config.per_tensor:
        found, expected = [*found, trial.divisor], [*expected, wanted.divisor]
    after = wanted.after
    assert after is not None
    rules, wanted_rules = (
        leaves((s.loss_scale, s.clip, s.spike, s.escalation)) for s in (trial.state, after)
    )
    counts = ("step", "skipped_total", "skipped_in_a_row", "nonfinite_in_a_row", "halted")
    return (
        all(map(_close, [*found, *rules], [*expected, *wanted_rules]))
        and all(torch.equal(getattr(trial.state, name), getattr(after, name)) for name in counts)
        and torch.equal(trial.state.loss_scale.scale, after.loss_scale.scale)
        and _close(trial.state.recorder.floats, after.recorder.floats)
        and torch.equal(*(_without_clipped(s.recorder.ints) for s in (trial.state, after)))
    )


def _without_clipped(rows: Tensor) -> Tensor:
    """Return a recorder's whole numbers with OK for CLIPPED: which of them it is may hang on the last bit."""
    step, reason, worst, level = rows.unbind(1)
    reason = torch.where(reason == int(Reason.CLIPPED), int(Reason.OK), reason)
    return torch.stack([step, reason, worst, level], 1)


def _close(found: Tensor, expected: Tensor) -> bool:
    if not found.is_floating_point():
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=_RELATIVE, atol=0.0, equal_nan=True)


def _warn(reason: str) -> None:
    if _warned:
        return
    _warned.append(reason)
    warn(
        "the guard's own kernels are not used, and torch compiles the decision, which costs some tens of "
        f"microseconds per step on a GPU; training is not affected. Reason: {reason}. "
        "TORCHDYNAMO_DISABLE=1 turns both off.",
        NotCompiledWarning,
    )


_warned: list[str] = []
