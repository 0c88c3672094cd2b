"""Decide a step on a GPU with the guard's own kernels, where they were found to decide as the core does."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

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

    The next state has been written then, until ``guard.undo()`` is called. Before the first decision of each
    kind, the kernel is tried in some situations beside the plain operations, which the host waits for.

    Args:
        guard: of the state.
        inputs: the step.
        still: whether it moves nothing, see ``moves_nothing``.
    """
    config = inputs.config
    if inputs.fault is not None or config.unit_rule is not None or config.exact_norms:
        return None
    seen, measured = _seen(guard, inputs)
    key = guard.key(seen, still=still)
    trusted = guard.trusted.get(key)
    if trusted is None:
        if not capturing():
            _try_out(guard, seen, inputs, measured, still=still)
        trusted = _trusted.get(guard.kinds(seen, still=still), False)
        if not capturing():
            guard.trusted[key] = trusted
    if not trusted:
        return None
    guard.decide(seen, still=still)
    return Decided(None, guard.factor, (), None, guard.divisor, guard.skip, guard.applied)


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
    """Find out whether the kernel of this step decides as the plain operations do.

    Of a kernel that measures, so is the one that it takes while a graph is captured, which is too late.
    """
    measured = measured_without_wait(inputs) if measured is None else measured
    kinds = guard.kinds(_of_measured(measured), still=still)
    if kinds not in _trusted:
        _trusted[kinds] = _agrees(guard, _situations(measured), None, still=still)
    own = guard.kinds(seen, still=still)
    if own not in _trusted:  # it differs in its first lines alone
        _trusted[own] = _trusted[kinds] and _agrees(guard, [measured], seen, still=still)


def _situations(measured: Measured) -> list[Measured]:
    """Return what else might have been measured: smaller and larger gradients, and what forbids a step."""
    norms, rows, loss, found_inf = measured.norms, measured.rows, measured.loss, measured.found_inf
    found = [measured]
    for factor in (1.0, 1e3, 0.0, 1e-3, math.inf, math.nan):
        joint = None if rows is None else torch.cat([rows[:, :1] * factor, rows[:, 1:]], 1)
        found.append(measured._replace(norms=norms * factor, rows=joint))
        found.append(measured)
    if loss is not None:
        found += [measured._replace(loss=loss * math.nan), measured._replace(loss=loss * 1e3)]
    if found_inf is not None:
        found.append(measured._replace(found_inf=torch.ones_like(found_inf)))
    return [*found, measured]


def _agrees(guard: DeviceGuard, steps: Sequence[Measured], seen: Seen | None, *, still: bool) -> bool:
    """Return whether the kernel decides steps as the plain operations do, one after the other, from the
    present state on, which is not changed. With ``seen``, they are one step, in which it measures by itself.
    """
    config = guard.config
    state = map_leaves(torch.clone, guard.state)
    trial = guard.on_another_state(state)
    try:
        for measured in steps:
            wanted = decided_without_wait(config, still, map_leaves(torch.clone, state), measured)
            trial.decide(_of_measured(measured) if seen is None else seen, still=still)
            found = [trial.factor, trial.divisor, trial.skip, *leaves(state)]
            expected = [wanted.multiplier, wanted.divisor, wanted.skip, *leaves(wanted.after)]
            if config.per_tensor:  # which has no divisor
                found[1] = expected[1]
            if not all(map(_close, found, expected)):
                _warn("they decide otherwise than the operations of torch do")
                return False
    except UnprintableError:
        return False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (compilers fail in many ways)
        _warn((str(error).strip().splitlines() or [type(error).__name__])[0])
        return False
    return True


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
