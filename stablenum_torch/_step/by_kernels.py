"""Decide a step on a GPU with the guard's own kernels, wherever they were found to decide as the core does."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from stablenum._support.user_warnings import warn
from stablenum.arrays import leaves, map_leaves
from stablenum_torch._devices.compiled_decide import NotCompiledWarning
from stablenum_torch._devices.kernels.device_guard import DeviceGuard, Seen
from stablenum_torch._devices.kernels.launches import has_triton
from stablenum_torch._devices.kernels.printed_decide import Kinds, UnprintableError
from stablenum_torch._devices.waits import capturing
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.elements import extremes_without_wait
from stablenum_torch._step.observe import Measured, measured_without_wait, noted
from stablenum_torch._step.plain_decision import Decided, decided_without_wait

__all__ = ["can_launch", "decided_by_kernels"]

# Of what the kernels and the plain operations give. They add up norms in different orders, which moves a sum
# of n float32 by at most n / 2 units in the last place, and what follows from it by a few times as much.
_RELATIVE = 1e-4

_trusted: dict[Kinds, bool] = {}  # whether a kernel decided as the plain operations do, when it was tried


def can_launch(on: Tensor) -> bool:
    """Return whether kernels can be launched for the device of a tensor of the guard's state.

    ``TORCHDYNAMO_DISABLE=1``, which turns compiling off, turns these off, too.
    """
    plain = type(on) is Tensor and on.is_cuda and not torch.compiler.is_compiling()
    return (
        plain
        and has_triton()
        and os.environ.get("TORCHDYNAMO_DISABLE") != "1"
        and not is_in_torch_dispatch_mode()
    )


def decided_by_kernels(guard: DeviceGuard, inputs: StepInputs, *, still: bool) -> Decided | None:
    """Return what the kernels have decided; None if they cannot, and nothing is changed.

    The next state has been written then, until ``guard.undo()`` is called. The first decision of each kind
    is compared with that of the plain operations, which the host waits for.

    Args:
        guard: of the state.
        inputs: the step.
        still: whether it moves nothing, see ``moves_nothing``.
    """
    config = inputs.config
    if inputs.fault is not None or config.unit_rule is not None or config.exact_norms:
        return None
    seen, measured = _seen(guard, inputs)
    kinds = guard.kinds(seen, still=still)
    if kinds not in _trusted and not capturing():
        _try_out(guard, seen, inputs, measured, still=still)
    if not _trusted.get(kinds, False):
        return None
    guard.decide(seen, still=still)
    return Decided(None, guard.factor, (), None, guard.divisor, guard.skip)


def _seen(guard: DeviceGuard, inputs: StepInputs) -> tuple[Seen, Measured | None]:
    """Return what the kernel decides on, and what was measured for it without the kernel that measures."""
    # The table of addresses cannot be sent while a graph is being captured: a replay would send it again.
    if inputs.joint is None and not capturing():
        grads = [p.grad for p in inputs.params]
        if guard.reads(grads):
            amax, tiny = extremes_without_wait(inputs).joined() if inputs.config.needs else (None, None)
            loss, found_inf = noted(inputs)
            return Seen(grads, None, loss, found_inf, amax, tiny), None
    measured = measured_without_wait(inputs)
    return _of_measured(measured), measured


def _of_measured(measured: Measured) -> Seen:
    amax, tiny = measured.extremes.joined()
    rows = None if measured.rows is None else measured.rows[:, :4].double().contiguous()
    return Seen(None, measured.norms, measured.loss, measured.found_inf, amax, tiny, rows)


def _try_out(
    guard: DeviceGuard, seen: Seen, inputs: StepInputs, measured: Measured | None, *, still: bool
) -> None:
    """Find out whether the kernel decides this step as the plain operations do.

    Of a kernel that measures, so is the one that it takes while a graph is captured, which is too late.
    """
    measured = measured_without_wait(inputs) if measured is None else measured
    before = map_leaves(torch.clone, guard.state)
    wanted = decided_without_wait(inputs.config, still, before, measured)
    for one in (_of_measured(measured), seen):
        kinds = guard.kinds(one, still=still)
        if kinds not in _trusted:
            _trusted[kinds] = _agrees(guard, one, wanted, still=still)


def _agrees(guard: DeviceGuard, seen: Seen, wanted: Decided, *, still: bool) -> bool:
    try:
        guard.decide(seen, still=still)
        found = [guard.factor, guard.divisor, guard.skip, *leaves(guard.state)]
        expected = [wanted.multiplier, wanted.divisor, wanted.skip, *leaves(wanted.after)]
        if guard.config.per_tensor:  # which has no divisor
            found[1] = expected[1]
        same = all(map(_close, found, expected))
        if not same:
            _warn("they decide otherwise than the operations of torch do")
    except UnprintableError:
        return False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (compilers fail in many ways)
        _warn((str(error).strip().splitlines() or [type(error).__name__])[0])
        return False
    finally:
        guard.undo()
    return same


def _close(found: Tensor, expected: Tensor) -> bool:
    if not found.is_floating_point():
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=_RELATIVE, atol=0.0, equal_nan=True)


def _warn(reason: str) -> None:
    if NotCompiledWarning in _warned:
        return
    _warned.append(NotCompiledWarning)
    warn(
        "the guard's own kernels are not used, and torch compiles the decision, which costs some tens of "
        f"microseconds per step on a GPU; training is not affected. Reason: {reason}. "
        "TORCHDYNAMO_DISABLE=1 turns both off.",
        NotCompiledWarning,
    )


_warned: list[type] = []
