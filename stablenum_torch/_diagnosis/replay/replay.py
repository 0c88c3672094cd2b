"""``replay``: run one training step again with every operation recorded, and explain its failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stablenum._support.settings_checks import check_callable, check_flag, check_loss_scale
from stablenum.diagnosis import Report
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.errors import bad_type
from stablenum.formats import FLOAT32_MAX
from stablenum_torch._devices.generators import RngState, check_rng_state
from stablenum_torch._devices.ranks import several_ranks
from stablenum_torch._diagnosis.audit import setting_problems, state_problems
from stablenum_torch._diagnosis.replay.inputs import look_around
from stablenum_torch._diagnosis.replay.run import Call, Run, run
from stablenum_torch._diagnosis.replay.trial import with_trial

__all__ = ["replay"]


def replay(
    step_fn: Callable[..., Any],
    *args: Any,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    loss_scale: float | None = None,
    rng_state: RngState | Tensor | None = None,
    known_bad: bool = False,
    **kwargs: Any,
) -> Report:
    """Run one training step again and report what first went wrong: which operation, where, and why.

    Every operation of the forward and the backward pass is recorded below autograd and autocast, with one
    reduction per result. A loss, gradient or updated parameter that is not finite is traced back to the first
    operation at fault. A step that fails is run a second time and, if it has a loss scale, a third time
    without the scale.

    Of several ranks, all must replay the step at the same time, because it waits for their collectives; then
    it is run once. The report says whether the value was made on this rank or came from another one.

    Afterwards parameters, buffers, gradients, optimizer state, random generators, modes and hooks are what
    they were, bit for bit, even if ``step_fn`` raises. Compiled modules run eagerly.

    What is written without torch (memory shared with NumPy) or stored in objects of your own (a list of
    losses, a counter) is not restored. If ``step_fn`` draws its batch from an iterator, it gets a different
    batch each time; pass the batch as an argument instead.

    Args:
        step_fn: ``step_fn(*args, **kwargs)`` runs the forward pass and returns the loss (a tensor, or a tuple
            or dict that contains it), or runs the backward pass itself. It may also step an optimizer.
        *args: arguments of ``step_fn``.
        model: gives modules and parameters their names; by default the modules that the function refers to.
        optimizer: the optimizer whose parameters and state are examined; by default those that the function
            refers to.
        loss_scale: the loss scale of the backward pass that is run here. A GradScaler that the function
            refers to keeps its own scale.
        rng_state: the state of the generators at the beginning of the step that failed, as
            ``torch.get_rng_state()`` returns it; by default the current state.
        known_bad: whether the step is known to have failed; if the replay is finite, the report says so.
        **kwargs: arguments of ``step_fn``.

    Returns:
        A report with ``ok``, ``findings`` (the first cause first) and ``verdict``; ``str`` gives its text.

    Raises:
        TypeError: ``step_fn`` is not callable, or another argument has a wrong type.
        ValueError: ``loss_scale`` is not a finite number above 0.
        Exception: what ``step_fn`` raised, unless an operation rejected labels or non-finite numbers.

    Example:
        >>> import torch
        >>> w = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> report = replay(lambda: w.sqrt().sum())
        >>> report.findings[0].operation, report.verdict.cause.value, w.grad
        ('sqrt', 'boundary_derivative', None)
    """
    check_callable("step_fn", step_fn, "a function that runs the step")
    _check_options(model, optimizer, rng_state, known_bad)
    if loss_scale is not None:
        loss_scale = check_loss_scale(loss_scale)
    start = time.perf_counter()
    with torch.inference_mode(False):
        call = Call(step_fn, args, kwargs, look_around(step_fn, args, kwargs, model, optimizer))
        evidence, notes = _evidence(call, loss_scale, rng_state, known_bad)
    return Report.of(evidence, notes=notes, seconds=time.perf_counter() - start)


def _check_options(model: object, optimizer: object, rng_state: object, known_bad: object) -> None:
    """Check the options of a replay, before anything runs.

    Raises:
        TypeError: one of them has a wrong type.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise bad_type("model", "a torch.nn.Module or None", model)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise bad_type("optimizer", "a torch.optim.Optimizer, guarded or not, or None", optimizer)
    if rng_state is not None:
        check_rng_state(rng_state)
    check_flag("known_bad", known_bad)


_NO_LOSS = "the function returned None and ran no backward pass, so there was nothing to judge"


def _evidence(
    call: Call, loss_scale: float | None, rng: RngState | Tensor | None, known_bad: bool
) -> tuple[Evidence, tuple[str, ...]]:
    first = run(call, loss_scale=loss_scale, rng=rng)
    shown, reproduced = first, None
    if several_ranks():  # all of them run the step equally often, whatever each of them finds
        reproduced = first.went_wrong if known_bad and not first.unjudged else None
    elif first.went_wrong and not _raised(first):
        reproduced = run(call, loss_scale=loss_scale, rng=rng).went_wrong
    elif known_bad and not first.went_wrong and not first.unjudged:
        second = run(call, loss_scale=loss_scale, rng=rng)
        shown, reproduced = (second if second.went_wrong else first), False
    unscaled = None
    scales = [loss_scale or 1.0, *(scaler.get_scale() for scaler in call.around.scalers)]
    scaled = max(scales) > 1.0 and not several_ranks()
    if shown.bad_gradients and shown.loss_finite is not False and scaled:
        unscaled = not run(call, loss_scale=1.0, rng=rng).went_wrong
    evidence = Evidence(
        framework="torch",
        findings=tuple(shown.findings),
        loss_finite=shown.loss_finite,
        bad_gradients=tuple(shown.bad_gradients),
        bad_parameters=tuple(shown.bad_parameters),
        bad_updates=tuple(shown.bad_updates),
        labels=shown.labels,
        reproduced=reproduced,
        loss_scale=max(scales),
        unscaled_finite=unscaled,
        norm_overflow=not shown.went_wrong and shown.norm / scales[0] > FLOAT32_MAX**0.5,
        other_rank=shown.received,
        state=_state(call),
        settings=_settings(call),
        left=shown.left,
        unreplayed=shown.unreplayed,
        unjudged=_NO_LOSS if shown.unjudged and not shown.went_wrong else "",
        differences=_differences(rng) if reproduced is False else (),
    )
    return with_trial(evidence, shown.read), tuple(shown.notes)


def _differences(rng: RngState | Tensor | None) -> tuple[str, ...]:
    """Describe what a replay does not share with the step that it repeats."""
    return (
        *(["the generators' states before the step, which the replay was not given"] if rng is None else []),
        "the data, if the function reads them itself and not from its arguments",
        "compiled functions and modules, which ran eagerly",
        "the order of threads and of kernels that are not deterministic",
    )


def _raised(result: Run) -> bool:
    """Return whether an operation rejected its arguments, as it will every time."""
    return any(f.kind == "error" for f in result.findings)


def _settings(call: Call) -> tuple[str, ...]:
    """Describe the settings of the optimizers that are not numbers."""
    return tuple(problem for o in call.around.optimizers for problem in setting_problems(o))


def _state(call: Call) -> tuple[str, ...]:
    """Describe the problems in the states of the optimizers before the step."""
    return tuple(problem for o in call.around.optimizers for problem in state_problems(o))
