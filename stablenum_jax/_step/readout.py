"""Read and write a guard's state on the host. No other module of a step makes the host wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

import stablenum
from stablenum._support.settings_checks import check_flag
from stablenum.formats import NO_LOSS
from stablenum.guard import halting, readout, statedict
from stablenum.guard.clip_log import ClipLog
from stablenum.guard.ranks import MAX_PARAMETERS
from stablenum.guard.reasons import APPLIED, Reason
from stablenum.guard.recorder import Recorder
from stablenum.guard.skip_log import SkipLog, SkipLogs
from stablenum_jax._trees.names import known_names, logs_skips
from stablenum_jax._trees.scale_reads import note_scale_read
from stablenum_jax._trees.settings import known_settings
from stablenum_jax._trees.state import GuardOptState, find_guard, is_inside_multisteps, replace_guard

__all__ = [
    "check_readable",
    "clear_halt",
    "guard_state_dict",
    "history",
    "load_guard_state_dict",
    "metrics",
    "raise_if_halted",
    "scalars",
    "skip_log_of",
    "tell_of_skips",
    "unless_skipped",
]

# The logs of skips are kept under the number of the parameters' names.
_skips: defaultdict[int, SkipLogs] = defaultdict(SkipLogs)
_clips = ClipLog()

PyTree: TypeAlias = Any


def _read(opt_state: PyTree) -> tuple[stablenum.GuardState, tuple[str, ...] | None]:
    """Return the guard's state and the parameters' names."""
    state, number = _read_number(opt_state)
    return state, known_names(number)


def _read_number(opt_state: PyTree) -> tuple[stablenum.GuardState, int]:
    """Return the guard's state and the number of the parameters' names."""
    found = find_guard(opt_state)
    check_readable(found)
    read = GuardOptState(*jax.device_get(tuple(found)))
    return read.guard, int(read.names_id)


def check_readable(found: GuardOptState) -> None:
    """Check that a guard's state belongs to one run and has values.

    Raises:
        ValueError: it is stacked or traced.
    """
    if found.runs:
        raise ValueError(
            "opt_state must belong to a single training run; got one stacked to shape "
            f"{found.runs} by vmap, pmap or scan. Select one run, as in "
            "jax.tree.map(lambda x: x[0], opt_state)."
        )
    if isinstance(found.ints, jax.core.Tracer):
        raise ValueError(
            "opt_state must hold concrete arrays; got traced ones. Read it outside jit; inside jit, "
            "metrics(opt_state) gives arrays."
        )


def metrics(opt_state: PyTree, *, raise_if_halted: bool = True) -> stablenum.typing.Metrics:
    """Return the outcome of the last step.

    Keys: applied, reason (:class:`stablenum.Reason`), grad_norm (unscaled, before clipping),
    loss_scale (of that step), clip_coefficient, skipped_total, skipped_in_a_row, worst
    (index and name of the parameter with the first non-finite norm, else the largest), step, loss
    (NaN if it was not given). Before the first step ``applied`` is False, ``reason`` NO_STEP_YET.

    On the host these are plain Python values, and reading them waits for the device. A run of skipped steps
    is logged then (logger ``"stablenum"``), and so is clipping in front of the guard: a jitted step itself
    can neither log nor raise. In a trace (jit, scan) they are arrays, ``worst`` and ``reason`` as () int32,
    so that they can be logged from inside; if ``jax.debug_nans`` is on while they are traced, a loss that was
    not given is float32's lowest number there.

    Args:
        opt_state: a pytree with one guard's state in it.
        raise_if_halted: on the host, raise if the guard has halted the training.

    Raises:
        NonFiniteError: the guard has halted the training (``on_nonfinite="raise"`` or
            ``max_skips_in_a_row``).
        ValueError: ``opt_state`` has no guard or more than one, or is stacked.

    Example:
        >>> import optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(0.1))
        >>> params, grads = {"w": jnp.zeros(2)}, {"w": jnp.asarray([3.0, 4.0])}
        >>> params, opt_state = stablenum_jax.step(tx, params, tx.init(params), grads)
        >>> seen = metrics(opt_state)
        >>> seen["reason"].name, seen["grad_norm"], seen["worst"].name
        ('CLIPPED', 5.0, 'w')
    """
    check_flag("raise_if_halted", raise_if_halted)
    note_scale_read()  # it is in the result
    found = find_guard(opt_state)
    if isinstance(found.ints, jax.core.Tracer) and not found.runs:
        return cast("stablenum.typing.Metrics", _traced_metrics(found.guard))
    state, number = _read_number(opt_state)
    if raise_if_halted:
        _check_halted(state, number)
    last = readout.metrics(state, known_names(number))
    if logs_skips(number):
        skip_log_of(state, number).after_read(last)
    _clips.after_step(int(state.step), state)
    return last


def _traced_metrics(state: stablenum.GuardState) -> dict[str, jax.Array]:
    """Return the arrays behind :func:`stablenum.guard.metrics`.

    Under ``jax.debug_nans``, which stops at every NaN, what is not known is float32's lowest number instead.
    """
    floats, ints = state.recorder.floats[-1], state.recorder.ints[-1]
    started = ints[0] >= 0
    unknown = NO_LOSS if jax.config.jax_debug_nans else jnp.nan
    reason = jnp.where(started, ints[1], int(Reason.NO_STEP_YET))
    return {
        "step": ints[0],
        "loss": jnp.where(started & (floats[0] != NO_LOSS), floats[0], unknown),
        "grad_norm": jnp.where(started, floats[1], unknown),
        "loss_scale": jnp.where(started, floats[2], state.loss_scale.scale),
        "clip_coefficient": jnp.where(started, floats[3], 1.0),
        "reason": reason,
        "worst": jnp.where(ints[2] < 0, ints[2], ints[2] % MAX_PARAMETERS),
        "worst_rank": jnp.maximum(ints[2], 0) // MAX_PARAMETERS - 1,  # -1: one process decides alone
        "precision_level": jnp.maximum(ints[3], 0),
        "applied": jnp.isin(reason, jnp.asarray([int(code) for code in APPLIED])),
        "skipped_total": state.skipped_total,
        "skipped_in_a_row": state.skipped_in_a_row,
    }


def scalars(opt_state: PyTree, prefix: str = "") -> dict[str, float]:
    """Return the last step as plain numbers for a logger. Reading them waits for the device.

    Keys: loss (left out if it was not given), grad_norm, loss_scale, clip_coefficient, applied (1 or 0),
    reason (:class:`stablenum.Reason`), skipped_total, skipped_in_a_row, and worst_rank where several devices
    decide together and one of them can be named. Loss and norm are NaN or inf if they were so in the step. In
    a trace, :func:`stablenum_jax.metrics` returns these as arrays.

    Args:
        opt_state: a pytree with one guard's state in it.
        prefix: put in front of each key, such as ``"guard/"``.

    Raises:
        NonFiniteError: the guard has halted the training, as in :func:`stablenum_jax.metrics`.
        TypeError: ``prefix`` is not a string.
        ValueError: ``opt_state`` has no guard or more than one, or is stacked or traced.

    Example:
        >>> import optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(0.1))
        >>> params, grads = {"w": jnp.zeros(2)}, {"w": jnp.asarray([3.0, 4.0])}
        >>> params, opt_state = stablenum_jax.step(tx, params, tx.init(params), grads)
        >>> scalars(opt_state, "guard/")["guard/grad_norm"]
        5.0
    """
    _read(opt_state)  # which refuses a traced state; metrics would give arrays
    return readout.scalars(metrics(opt_state), prefix)


def history(opt_state: PyTree) -> list[stablenum.typing.StepRecord]:
    """Return the last 128 steps, oldest first, as dicts of plain values. A halt does not raise here.

    Keys: step, loss, grad_norm, loss_scale, clip_coefficient, reason, applied, worst, precision_level,
    worst_rank.

    Raises:
        ValueError: ``opt_state`` has no guard or more than one, or is stacked or traced.

    Example:
        >>> import optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
        >>> history(tx.init({"w": jnp.zeros(2)}))
        []
    """
    return readout.history(*_read(opt_state))


def raise_if_halted(opt_state: PyTree, config: stablenum.GuardConfig) -> None:
    """Raise if the guard has halted the training.

    Raises:
        NonFiniteError: the guard has halted; the attribute ``opt_state`` is the halted state.
    """
    try:
        _check_halted(*_read_number(opt_state), config=config)
    except stablenum.NonFiniteError as error:
        error.opt_state = opt_state  # type: ignore[attr-defined]
        raise


def _check_halted(
    state: stablenum.GuardState, number: int, config: stablenum.GuardConfig | None = None
) -> None:
    """Raise if the guard has halted, and do not log this halt later."""
    try:
        halting.check_halted(state, known_names(number), config=config)
    except stablenum.NonFiniteError as error:
        skip_log_of(state, number).after_halt(error.metrics["step"])
        raise


def skip_log_of(state: stablenum.GuardState, number: int) -> SkipLog:
    """Return the log of skips of the training that a state belongs to."""
    return _skips[number].of(state._replace(recorder=Recorder(*map(np.asarray, state.recorder))))


def tell_of_skips(log: SkipLog, state: stablenum.GuardState, number: int) -> None:
    """Log a halt, or the runs of skips that are due, of a state in NumPy that its caller may not read."""
    if not logs_skips(number):
        return
    names = known_names(number)
    try:
        halting.check_halted(state, names, config=known_settings(number))
    except stablenum.NonFiniteError as error:
        log.after_halt(error.metrics["step"], str(error))
    else:
        log.after_steps(readout.history(state, names), readout.metrics(state, names))


def unless_skipped(opt_state: PyTree, new: PyTree, old: PyTree, *, before: PyTree = None) -> PyTree:
    """Return ``new``, or ``old`` if the last step was skipped.

    For what a forward pass changes besides the parameters: batch norm's running statistics become NaN in the
    forward pass of a bad batch, and would stay so. This works under jit too, and never waits for the device.

    Some layers turn a statistic infinite while loss and gradients stay finite: the batch norms of equinox and
    Keras divide by an infinite variance and go on with zeros. Such a step is skipped if the loss says so:
    ``value=jnp.where(stablenum_jax.policy.all_finite(new), loss, jnp.nan)``.

    Args:
        opt_state: the state that :func:`stablenum_jax.step` returned.
        new: what the forward pass of the step returned, a pytree.
        old: the same from before the step.
        before: the state that :func:`stablenum_jax.step` got, needed for a guard inside ``optax.MultiSteps``.
            Such a guard is called once per window, so its state alone does not say which of the micro-batches
            were skipped.

    Returns:
        A pytree of the structure of ``new``; leaves that are not arrays are those of ``new``.

    Raises:
        ValueError: ``opt_state`` has no guard or more than one, or the structures of ``new`` and ``old``
            differ; the guard is inside ``optax.MultiSteps``, and ``before`` is None.

    Example:
        >>> import optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
        >>> params = {"w": jnp.zeros(2)}
        >>> bad = {"w": jnp.asarray([1.0, jnp.nan])}
        >>> params, opt_state = stablenum_jax.step(tx, params, tx.init(params), bad)
        >>> unless_skipped(opt_state, {"mean": jnp.nan}, {"mean": jnp.asarray(0.5)})
        {'mean': Array(0.5, dtype=float32, weak_type=True)}
    """
    applied = _applied(opt_state, before)
    if jax.tree.structure(new) != jax.tree.structure(old):
        allowed = f"a tree like old, {jax.tree.structure(old)}"
        raise ValueError(f"new must be {allowed}; got {jax.tree.structure(new)}.")

    def choose(path: Any, after: Any, before: Any) -> Any:
        if not isinstance(after, (jax.Array, np.ndarray, np.generic, int, float, complex)):
            return after
        if jnp.shape(after) != jnp.shape(before):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"new{where} must have the shape of old{where}, {jnp.shape(before)}; got {jnp.shape(after)}."
            )
        return jnp.where(applied, after, before)

    return jax.tree_util.tree_map_with_path(choose, new, old)


def _applied(opt_state: PyTree, before: PyTree) -> jax.Array:
    """Return () bool, whether the step from ``before`` (None if it is not known) was applied."""
    guard = find_guard(opt_state).guard
    if before is not None:
        return (guard.skipped_total == find_guard(before).guard.skipped_total) & (guard.halted == 0)
    if is_inside_multisteps(opt_state):
        raise ValueError(
            "before must be the state before the step, as in unless_skipped(opt_state, new, old, "
            "before=old_opt_state), for a guard inside optax.MultiSteps; got None. Or put the guard outside: "
            "stablenum_jax.guard(optax.MultiSteps(...))."
        )
    return guard.skipped_in_a_row == 0


def clear_halt(opt_state: PyTree) -> PyTree:
    """Return ``opt_state`` with a guard that continues after it has halted the training.

    The halt and the counts of skips in a row are cleared; everything else stays. This works under jit too.

    Raises:
        ValueError: ``opt_state`` has no guard, or more than one.

    Example:
        >>> import optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(on_nonfinite="raise"), optax.sgd(0.1))
        >>> opt_state = clear_halt(tx.init({"w": jnp.zeros(2)}))
    """
    found = find_guard(opt_state)
    guard = found.guard
    cleared = guard._replace(
        halted=jnp.zeros_like(guard.halted),
        skipped_in_a_row=jnp.zeros_like(guard.skipped_in_a_row),
        nonfinite_in_a_row=jnp.zeros_like(guard.nonfinite_in_a_row),
    )
    return replace_guard(opt_state, found.with_guard(cleared))


def guard_state_dict(opt_state: PyTree) -> dict[str, Any]:
    """Return the guard's state as plain JSON values, the same as PyTorch's ``guard_state_dict()``.

    Raises:
        ValueError: ``opt_state`` has no guard or more than one, or is stacked or traced.

    Example:
        >>> import json, optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
        >>> plain = guard_state_dict(tx.init({"w": jnp.zeros(2)}))
        >>> json.loads(json.dumps(plain, allow_nan=False))["names"]
        ['w']
    """
    return statedict.state_to_dict(*_read(opt_state))


def load_guard_state_dict(opt_state: PyTree, plain: Mapping[str, Any]) -> PyTree:
    """Return ``opt_state`` with a guard's state saved by :func:`guard_state_dict`, here or in PyTorch.

    Args:
        opt_state: a pytree with one guard's state in it, made with the same config.
        plain: the saved dict.

    Raises:
        ValueError: ``plain`` is not such a dict, or was made with another config; the message names
            the field.

    Example:
        >>> import optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(loss_scale="dynamic"), optax.sgd(0.1))
        >>> opt_state = tx.init({"w": jnp.zeros(2)})
        >>> opt_state = load_guard_state_dict(opt_state, guard_state_dict(opt_state))
    """
    found = find_guard(opt_state)
    check_readable(found)
    names = known_names(int(found.names_id))
    loaded = statedict.state_from_dict(plain, found.guard, xp=jnp, names=names)
    return replace_guard(opt_state, found.with_guard(loaded))
