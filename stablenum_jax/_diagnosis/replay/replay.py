"""``replay``: run one step again under observation, and report what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stablenum._support.settings_checks import check_callable, check_flag, check_loss_scale
from stablenum.diagnosis import Finding, Report
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.replay.source_files import raised_by_us
from stablenum.diagnosis.replay.trials import Read
from stablenum.diagnosis.watch.script_errors import last_line
from stablenum_jax._diagnosis.audit import state_problems
from stablenum_jax._diagnosis.replay.flags import flags_of
from stablenum_jax._diagnosis.replay.guards import scale_of, unscaled
from stablenum_jax._diagnosis.replay.inputs import Call, Leaf, at_hand, call_of
from stablenum_jax._diagnosis.replay.jax_internals import quietly, under_transformation
from stablenum_jax._diagnosis.replay.labels import outside_indices
from stablenum_jax._diagnosis.replay.programs import Program, program_of
from stablenum_jax._diagnosis.replay.run import Run, result_flags, run_compiled, run_eagerly, run_instrumented
from stablenum_jax._diagnosis.replay.trial import with_trial
from stablenum_jax._trees.leaves import check_argnums, check_state, is_floating
from stablenum_jax._trees.state import has_guard, is_guard
from stablenum_jax._trees.state import loss_scale as guard_scale

__all__ = ["replay"]


def replay(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    gradients: bool | None = None,
    loss_scale: float | None = None,
    opt_state: Any = None,
    known_bad: bool = False,
    **kwargs: Any,
) -> Report:
    """Run one step again, equation by equation, and report what went wrong first, where and why.

    Call this function eagerly with the arguments of the failed step: after a true skip, the parameters and
    the state are still those from before the step. The loss and its gradients are judged. None of the
    caller's objects is changed, and no buffer is donated.

    Args:
        fun: as for ``jax.value_and_grad``: returns a floating-point scalar, or ``(scalar, aux)``. Any other
            function, such as a whole training step, is replayed without differentiation, and all its
            floating-point results are judged. The function may be jitted.
        *args: pytrees of arrays, or models of flax.linen, flax.nnx or equinox.
        argnums: which arguments are the parameters.
        has_aux: as in JAX.
        gradients: False replays only the forward pass; None adds the gradients if the result is a scalar.
        loss_scale: the factor on the loss; by default that of the guard in ``opt_state``, or 1.
        opt_state: the optimizer's state before the step, which is searched for problems.
        known_bad: the step is known to have failed; if it does not fail again, the report says so.
        **kwargs: arguments of ``fun``.

    Returns:
        A report with ``ok``, ``findings`` (the first cause first) and ``verdict``, available as text, JSON or
        HTML.

    Raises:
        TypeError: an argument has a wrong type; called inside jit, grad or vmap; with ``gradients=True``, the
            result is not a floating-point scalar.
        ValueError: ``argnums`` names no argument; ``loss_scale`` is not a finite number above 0.

    Example:
        >>> import jax.numpy as jnp
        >>> report = replay(lambda w: jnp.sum(jnp.sqrt(w)), jnp.asarray([0.0, 1.0]))
        >>> report.verdict.cause.value, report.findings[0].operation
        ('boundary_derivative', 'sqrt')
    """
    check_callable("fun", fun, "a function that runs the step")
    _check_options(has_aux, gradients, opt_state, known_bad)
    start = time.perf_counter()
    numbers = check_argnums(argnums, len(args))
    _check_no_tracers((args, kwargs))
    scale = _scale(loss_scale, opt_state)

    def run() -> tuple[Evidence, list[str]]:
        call = call_of(fun, args, kwargs, numbers, opt_state)
        program = program_of(call, has_aux=has_aux, gradients=gradients, scaled=scale != 1.0)
        used = scale_of(call.leaves) if loss_scale is None and not program.gradients else scale
        try:
            outcome = _replayed(program, call, used, known_bad)
        except Exception as error:
            if not raised_by_us(error):
                raise
            return Evidence(framework="jax", unreplayed=f"the replay failed with {last_line(error)}"), []
        parameters = args[numbers[0]] if len(numbers) == 1 else None
        evidence = _evidence(outcome, call, used, opt_state, parameters)
        return with_trial(evidence, outcome.read), outcome.notes

    evidence, notes = quietly(run)
    return Report.of(evidence, notes=tuple(notes), seconds=time.perf_counter() - start)


def _check_options(has_aux: object, gradients: object, opt_state: object, known_bad: object) -> None:
    """Check the options of a replay, before anything runs.

    Raises:
        TypeError: one of them has a wrong type.
    """
    check_flag("has_aux", has_aux)
    if gradients is not None:
        check_flag("gradients", gradients)
    if opt_state is not None:
        check_state("opt_state", opt_state)
    check_flag("known_bad", known_bad)


def _check_no_tracers(tree: Any) -> None:
    if under_transformation() or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            "replay needs real arrays, but was called inside a transformation (jit, grad, vmap). "
            "Call it eagerly, outside any transformation, with the arguments of the step that failed."
        )


def _scale(given: float | None, opt_state: Any) -> float:
    if given is not None:
        return check_loss_scale(given)
    return float(guard_scale(opt_state)) if opt_state is not None and has_guard(opt_state) == 1 else 1.0


@dataclass
class _Outcome:
    """The replay that is reported, and the results of the others."""

    run: Run
    findings: list[Finding]
    labels: str
    reproduced: bool | None
    unscaled_finite: bool | None
    notes: list[str]
    compiled_bad: tuple[int, ...] = ()
    read: Read | None = None
    left: tuple[str, ...] = ()


def _replayed(program: Program, call: Call, scale: float, known_bad: bool) -> _Outcome:
    leaves = at_hand(call.leaves)
    notes: list[str] = []
    if any(leaf.sharding is not None for leaf in leaves):
        notes.append(_GATHERED)
    run = run_eagerly(program, leaves, scale)
    reproduced: bool | None = None
    compiled_bad: tuple[int, ...] = ()
    again = None
    if run.failed:
        origins = run.origins()
        forward = [o.step.forward for o in origins if o.step is not None and o.step.forward is not None]
        second = run_eagerly(program, leaves, scale, wanted=forward)
        reproduced, again = second.failed, second.interpreter
    else:
        compiled_bad = result_flags(program, run_compiled(program, call.leaves, scale))
        if compiled_bad:
            run, reproduced = _under_jit(program, call.leaves, scale, notes), True
        elif known_bad:
            reproduced = False
    if again is None:
        origins = run.origins()
    found = run.findings(origins, again)
    unscaled_finite = None
    if scale > 1.0 and run.failed and (program.scaled or scale_of(leaves) > 1.0):
        unscaled_finite = not run_eagerly(program, unscaled(leaves), 1.0).failed
    if run.measured and not run.bad:
        notes.append("a guard skipped the step; what it measured is judged in place of the results")
    for why in sorted(run.interpreter.closed):
        notes.append(
            f"a shard_map was evaluated as one step, because its shards could not be told apart: {why}"
        )
    if run.interpreter.skipped:
        notes.append(f"left out of the replay: {', '.join(sorted(run.interpreter.skipped))}")
    return _Outcome(
        run=run,
        findings=[f for f, _ in found],
        labels=outside_indices(found[0][1]) if found else "",
        reproduced=reproduced,
        unscaled_finite=unscaled_finite,
        notes=notes,
        compiled_bad=compiled_bad,
        read=run.read_by(origins[0], again) if origins else None,
        left=run.left([f for f, _ in found]),
    )


_GATHERED = (
    "the arguments are arrays of several processes, gathered by each process for a replay of its own; "
    "of what the step computes from them, the device is known only inside a shard_map"
)


def _under_jit(program: Program, leaves: Sequence[Leaf], scale: float, notes: list[str]) -> Run:
    run = run_instrumented(program, leaves, scale)
    notes.append(
        "run one equation at a time, the step is finite; compiled by XLA, which fuses and reorders, it is not"
        + (
            "; the finding comes from the compiled program, with a flag for every equation"
            if run.bad
            else "; compiled with a flag for every equation it is finite again, so no operation can be named"
        )
    )
    return run


def _evidence(outcome: _Outcome, call: Call, scale: float, opt_state: Any, parameters: Any) -> Evidence:
    run = outcome.run
    program = run.program
    bad = run.bad or outcome.compiled_bad
    failed = run.failed or bool(bad)
    names = [program.names[i] for i in bad]
    loss_bad = program.gradients and 0 in bad
    gradients = tuple(n for i, n in zip(bad, names, strict=True) if program.gradients and i != 0)
    results = [run.outputs[i].data for i in program.judged[1:]] if program.gradients else []
    return Evidence(
        framework="jax",
        findings=tuple(outcome.findings),
        loss_finite=not loss_bad if program.gradients else (False if failed else None),
        bad_gradients=gradients,
        bad_parameters=_bad_parameters(call, failed, program.gradients),
        labels=outcome.labels,
        reproduced=outcome.reproduced,
        loss_scale=scale,
        unscaled_finite=outcome.unscaled_finite,
        norm_overflow=not failed and _norm_overflows(results),
        state=_bad_state(opt_state, call, parameters),
        left=outcome.left,
        only_loss=failed and run.only_loss(),
        unjudged="" if program.judged else _NO_RESULT,
        differences=_DIFFERENCES if outcome.reproduced is False else (),
    )


_NO_RESULT = "the function returns no floating-point array, so there was nothing to judge"
# What a replay does not share with the step that it repeats.
_DIFFERENCES = (
    "the data, if the function reads them itself and not from its arguments",
    "XLA's program: the replay ran equation by equation, and then compiled again",
    "the memory: no buffer was donated",
    "the order of threads and of kernels that are not deterministic",
)


def _bad_parameters(call: Call, failed: bool, gradients: bool) -> tuple[str, ...]:
    """Return parameters that are not finite. If the step did not fail, an infinity is a bound or a mask."""
    flags = [(leaf.name, flags_of(leaf.data)) for leaf in call.leaves if leaf.role == "parameter"]
    return tuple(name for name, f in flags if (any(f) if failed else gradients and f[0]))


def _norm_overflows(gradients: Sequence[Any]) -> bool:
    """Return whether gradients are finite, but their sum of squares exceeds float32."""
    total = 0.0
    for g in gradients:
        a = np.abs(np.asarray(g)).astype(np.float64) if is_floating(g) else np.zeros(0)
        total += float(np.dot(a.ravel(), a.ravel()))
    return total > float(jnp.finfo(jnp.float32).max)


def _bad_state(opt_state: Any, call: Call, parameters: Any) -> tuple[str, ...]:
    """List problems in the optimizer's state, in words: those of the audit, else entries that are not
    finite."""
    if opt_state is not None and parameters is not None:
        try:
            return state_problems(opt_state, parameters)
        except (TypeError, ValueError):
            pass  # not a state for these parameters
    named = [(leaf.name, leaf.data) for leaf in call.leaves if leaf.role == "state" and not leaf.guard]
    if opt_state is not None and not named:
        paths, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=is_guard)
        named = [
            (f"opt_state{jax.tree_util.keystr(path)}", x) for path, x in paths if isinstance(x, jax.Array)
        ]
    words = {0: "NaN", 1: "inf", 2: "-inf"}
    found = []
    for name, data in named:
        kinds = [words[i] for i, f in enumerate(flags_of(data)) if f]
        if kinds:
            found.append(f"{name} holds {' and '.join(kinds)}")
    return tuple(found)
