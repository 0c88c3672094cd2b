"""One guarded update of an optax transformation with a guard somewhere inside.

An optax transformation is opaque, and the decision must be known *before* its update runs, so
that a skipped step runs none of it. There are therefore two passes over the same ``tx.update``:

1. *capture*: an abstract run that ends where control reaches the guard. It yields the guard's
   config, and whether the guard receives the very gradients that the caller passed.
2. *attempt*: measure, decide, and run ``tx.update`` inside one ``lax.cond`` whose false branch is
   the no-op. The guard inside only multiplies.

If something is between the gradients and the guard (``MultiSteps``, or a transformation placed
before it), only the raw gradients can be judged here; the guard then measures and decides for
itself (:class:`Deferred`), and the whole step is undone here if the guard skipped it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

import stablenum
from stablenum._support.user_warnings import warn
from stablenum_jax._step import skip_watch
from stablenum_jax._step.apply import (
    grads_or_negative_zeros,
    in_promotable_dtype,
    multiply_leaves,
    negative_zeros,
    negative_zeros_unless,
)
from stablenum_jax._step.clip_update import clip_updates
from stablenum_jax._step.driver_mode import (
    Capture,
    Deferred,
    Direct,
    GuardReached,
    Passing,
    current_mode,
    in_mode,
)
from stablenum_jax._step.faults import fault_of_parameters, fault_of_settings
from stablenum_jax._step.inner_settings import certainly_nonfinite
from stablenum_jax._step.measure.over_axes import AxisName
from stablenum_jax._step.observe import Judged, Watched, judge, judge_finiteness
from stablenum_jax._step.unscaled import warn_if_unscaled
from stablenum_jax._step.warnings import GuardPlacementWarning
from stablenum_jax._trees.leaves import check_gradients, is_floating, is_measurable, varying_axes
from stablenum_jax._trees.names import Path, names_id_of
from stablenum_jax._trees.state import (
    GuardOptState,
    find_guard,
    has_guard,
    is_inside_multisteps,
    replace_guard,
)

__all__ = ["Add", "decide_and_update", "without_unsupported_value"]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
# How updates become parameters; None if the caller wants the updates themselves.
Add: TypeAlias = Callable[[PyTree, PyTree], PyTree] | None


class Captured(NamedTuple):
    """What the capture found out.

    Attributes:
        config, axis_name, log_skips: the guard's.
        paths: the paths of the parameters that the guard watches, as the guard sees them.
        source: for each of them the index of its gradient among the caller's leaves, -1 if it has
            no gradient; None if the guard sees arrays other than the caller's.
        weights: the parameters at these paths; () if no rule looks at them, None if the guard sees
            parameters other than the caller's.
        specs: how the parameters at these paths are divided; () if it is not known.
    """

    config: stablenum.GuardConfig
    axis_name: AxisName | None
    log_skips: bool
    paths: tuple[Path, ...]
    source: tuple[int, ...] | None
    weights: tuple[Any, ...] | None
    specs: tuple[PartitionSpec, ...]


class _Call(NamedTuple):
    """The update that the caller wants: ``update(grads, opt_state, params, **extra)``, then ``add``."""

    update: Callable[..., Any]
    grads: PyTree
    extra: dict[str, Any]
    add: Add


class _Plan(NamedTuple):
    """What is decided before the update runs.

    Attributes:
        config, axis_name: the guard's.
        mode: what the guard inside has to do during the update.
        decision: whether the update runs.
        judged: the decision in full, in direct mode; None otherwise.
        before: the guard's state before the step.
        after: the guard's state after a skip and, in direct mode, after any step.
        paths: the paths of the parameters that the guard watches.
        moved: which of these have a gradient.
        unscale: whether the gradients are divided by the loss scale before the update.
        update_rule: clips the whole update, None if there is nothing to clip here.
        reuse_grads: whether updates may be written over the gradients.
        warn: whether the guard receives gradients other than those of the outermost caller.
    """

    config: stablenum.GuardConfig
    axis_name: AxisName | None
    mode: Direct | Deferred
    decision: stablenum.Decision
    judged: Judged | None
    before: GuardOptState
    after: GuardOptState
    paths: tuple[Path, ...]
    moved: tuple[bool, ...]
    unscale: bool
    update_rule: stablenum.ClipUpdateRMS | None
    reuse_grads: bool
    warn: bool


def decide_and_update(
    tx: optax.GradientTransformation,
    params: PyTree,
    opt_state: PyTree,
    grads: PyTree,
    extra: dict[str, Any],
    *,
    loss: Array | None,
    add: Add,
    reuse_grads: bool,
) -> tuple[PyTree, PyTree, stablenum.GuardConfig]:
    """Decide the step, run it or not, and return parameters or updates, the next state and the config.

    With ``reuse_grads``, updates may be written over the gradients, which saves memory where the gradients
    are intermediate results of the program that this is part of.
    """
    skip_watch.begin()
    call = _Call(without_unsupported_value(tx).update, grads, extra, add)
    plan = _plan(call, params, opt_state, loss, reuse_grads=reuse_grads)
    attempt = functools.partial(_attempt, call, plan)
    if loss is None and current_mode() is None:
        _check_loss_has_its_name(call, plan, params, opt_state)
    shapes = jax.eval_shape(attempt, params, opt_state)[0] if add is None else None
    # The no-op must be the false branch, and the update and the addition must both be in the other one: only
    # then does XLA alias donated buffers through the conditional and fuse the multiplier.
    # Only what the branch of a skip may change leaves the conditional: more arrays slow down small steps.
    (target, opt_state), explained = lax.cond(
        plan.decision.apply,
        lambda params, opt_state: (attempt(params, opt_state), _part_by_reason(plan.after.guard)),
        lambda params, opt_state: (
            _skip(call, plan, params, opt_state, shapes),
            _part_by_reason(_explained(plan, params)),
        ),
        params,
        opt_state,
    )
    after = _with_part(plan.after.guard, *explained)
    plan = plan._replace(after=plan.after.with_guard(after))
    target, opt_state = _finish(plan, target, opt_state)
    return target, opt_state, plan.config


def without_unsupported_value(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` called without the loss, ``value``, if it does not take it, like ``contrib.sam``."""
    update = optax.with_extra_args_support(tx).update

    def tolerant(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        try:
            return update(updates, state, params, **extra)
        except TypeError as error:
            if "value" not in extra or "unexpected keyword argument 'value'" not in str(error):
                raise
        return update(updates, state, params, **{k: x for k, x in extra.items() if k != "value"})

    return optax.GradientTransformationExtraArgs(tx.init, tolerant)


def _plan(call: _Call, params: PyTree, opt_state: PyTree, loss: Array | None, *, reuse_grads: bool) -> _Plan:
    """Measure and decide."""
    own = find_guard(opt_state)
    if current_mode() is None:
        check_gradients(call.grads, params)
    seen = _capture(call, params, opt_state)
    outer = current_mode()
    unscaled = isinstance(outer, Deferred) and outer.unscaled
    if isinstance(outer, Deferred):
        loss = outer.loss
    if outer is None:
        warn_if_unscaled(seen.config)
    config, watched, scaled = seen.config, _watched(call.grads, seen), seen.config.loss_scale is not None
    direct = seen.source is not None and seen.weights is not None
    mode: Direct | Deferred
    judged = None
    if direct:
        # Devices that decide together must find the same, and nothing says that their numbers are the same.
        inside = seen.axis_name is None and _spoils_all(call, params, opt_state)
        fault = fault_of_settings(opt_state, inside)
        _check_none_bypasses(config, watched)
        judged = judge(
            config, own.guard, watched, loss=loss, axis_name=seen.axis_name, unscaled=unscaled, fault=fault
        )
        decision, after, _ = judged
        mode = Direct(decision)
    else:
        fault = fault_of_settings(opt_state)
        decision, after = judge_finiteness(
            config, own.guard, watched, loss=loss, axis_name=seen.axis_name, fault=fault
        )
        # The guard inside may judge the mean of several micro-batches, and a spike rule must not pair
        # its norm with the loss of one of them. Each loss has just been checked for finiteness.
        withheld = config.spike is not None and is_inside_multisteps(opt_state)
        mode = Deferred(unscaled=unscaled or scaled, loss=None if withheld else loss)
    return _Plan(
        config=config,
        axis_name=seen.axis_name,
        mode=mode,
        decision=decision,
        judged=judged,
        before=own,
        after=GuardOptState.of(
            after, names_id_of(seen.paths, own.names_id, log_skips=seen.log_skips), own.bad_at_init
        ),
        paths=seen.paths,
        moved=tuple(gradient is not None for gradient in watched.gradients),
        unscale=not direct and scaled and not unscaled,
        # The outermost caller sees the whole update, and clips it once.
        update_rule=config.update_rule if outer is None else None,
        reuse_grads=reuse_grads and call.add is None and direct,
        warn=outer is None and seen.source is None,
    )


def _spoils_all(call: _Call, params: PyTree, opt_state: PyTree) -> Any:
    """Return whether constants or schedules inside make the whole update NaN or inf: False, or () bool."""

    leaves, structure = jax.tree.flatten((call.grads, params, call.extra))
    given = {i: leaf for i, leaf in enumerate(leaves) if is_floating(leaf)}

    def update(given: dict[int, Any], opt_state: PyTree) -> PyTree:
        grads, params, extra = jax.tree.unflatten(structure, [given.get(i, x) for i, x in enumerate(leaves)])
        with in_mode(Passing()):
            return call.update(grads, opt_state, params, **extra)[0]

    return certainly_nonfinite(update, given, opt_state)


def _check_loss_has_its_name(call: _Call, plan: _Plan, params: PyTree, opt_state: PyTree) -> None:
    """Check that no argument of a step without a loss seems to be the loss under another name.

    The transformations of a chain take arguments of any name, and ignore what they do not know.

    Raises:
        TypeError: a floating-point scalar was given that has no effect on the update.
    """
    given = {name: x for name, x in call.extra.items() if is_floating(x) and jnp.shape(x) == ()}
    if not given:
        return

    def update(given: dict[str, Any]) -> Any:
        return _attempt(call._replace(extra=call.extra | given), plan, params, opt_state)

    program = jax.make_jaxpr(update)(given).jaxpr
    used = {id(var) for var in (*program.outvars, *(x for eqn in program.eqns for x in eqn.invars))}
    for name, var in zip(sorted(given), program.invars, strict=True):
        if id(var) not in used:
            raise TypeError(
                f"{name} must be an argument that tx uses; got one that changes nothing. If it is the loss, "
                f"write value= in place of {name}=."
            )


def _attempt(call: _Call, plan: _Plan, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Run the branch of an applied step: the update, and the addition if there is one."""
    grads = call.grads
    if plan.unscale:
        grads = multiply_leaves(grads, 1.0 / plan.before.guard.loss_scale.scale, widen=True)
    with in_mode(plan.mode):
        updates, after = call.update(grads, opt_state, params, **call.extra)
    after = _like("opt_state", opt_state, after)
    if plan.update_rule is not None:
        updates = clip_updates(plan.update_rule, updates, after, axis_name=plan.axis_name)
    if call.add is None:
        target = in_promotable_dtype(updates, call.grads)
    else:
        target = _like("params", params, call.add(params, updates))
    if isinstance(plan.mode, Deferred):
        skipped = _skip(call, plan, params, _without_window(opt_state), target)
        target, after = _undo_if_skipped(plan.before, (target, after), skipped)
    return target, after


def _skip(
    call: _Call, plan: _Plan, params: PyTree, opt_state: PyTree, updates: PyTree
) -> tuple[PyTree, PyTree]:
    """Run the branch of a skipped step: everything stays as it was except the guard's state.

    ``updates`` contains the shapes and dtypes of the updates, for a caller who wants updates.
    """
    if call.add is not None:
        target = params
    elif plan.reuse_grads:
        target = grads_or_negative_zeros(updates, call.grads)
    else:
        target = negative_zeros(updates, call.grads)
    return target, replace_guard(opt_state, plan.after)


def _explained(plan: _Plan, params: PyTree) -> stablenum.GuardState:
    """Return the guard's state after a skip, which says so if the optimizer has made a parameter NaN or inf.

    Devices that decide together would have to look together, and do not.
    """
    own = varying_axes(plan.decision.apply)
    if plan.judged is None or plan.axis_name is not None or params is None:
        return plan.after.guard
    if any(varying_axes(leaf) - own for leaf in jax.tree.leaves(params)):
        return plan.after.guard  # each device has its own parameters, and they take the same step
    counted = {path: i for i, path in enumerate(plan.paths) if plan.moved[i]}
    fault = fault_of_parameters(params, counted, plan.before, plan.decision.reason)
    return plan.after.guard if fault is None else plan.judged.after_found(fault)


def _part_by_reason(state: stablenum.GuardState) -> tuple[Array, Array]:
    """Return what depends on why a step was skipped: its record and the halt."""
    return state.recorder.ints[-1], state.halted


def _with_part(state: stablenum.GuardState, row: Array, halted: Array) -> stablenum.GuardState:
    recorder = state.recorder._replace(ints=jnp.concatenate([state.recorder.ints[:-1], row[None]]))
    return state._replace(recorder=recorder, halted=halted)


def _finish(plan: _Plan, target: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Finish the step, once, after either branch."""
    if plan.reuse_grads:
        target = negative_zeros_unless(plan.decision.apply, target)
    if isinstance(plan.mode, Direct):
        opt_state = replace_guard(opt_state, plan.after)
    elif plan.warn:
        _warn_of_placement(opt_state)
    return target, opt_state


def _capture(call: _Call, params: PyTree, opt_state: PyTree) -> Captured:
    """Run the update abstractly up to the guard. Nothing is computed and nothing is kept."""
    leaves, structure = jax.tree.flatten(call.grads)
    traced = [i for i, leaf in enumerate(leaves) if is_measurable((), leaf)]
    own_weights = {id(leaf) for leaf in jax.tree.leaves(params)}
    found: list[Captured] = []

    def probe(tracers: list[Array]) -> None:
        place = {id(tracer): i for i, tracer in zip(traced, tracers, strict=True)}
        everything = list(leaves)
        for i, tracer in zip(traced, tracers, strict=True):
            everything[i] = tracer
        try:
            with in_mode(Capture()):
                call.update(jax.tree.unflatten(structure, everything), opt_state, params, **call.extra)
        except GuardReached as reached:
            seen = reached.watched
            # The tracers must be the same objects: a transformation before the guard makes new ones.
            same = all(leaf is None or id(leaf) in place for leaf in seen.gradients)
            source = (
                tuple(-1 if leaf is None else place[id(leaf)] for leaf in seen.gradients) if same else None
            )
            weights = seen.weights if all(id(leaf) in own_weights for leaf in seen.weights) else None
            of_guard = reached.config, reached.axis_name, reached.log_skips
            found.append(Captured(*of_guard, seen.paths, source, weights, seen.specs))

    jax.eval_shape(probe, [leaves[i] for i in traced])
    if not found:
        raise ValueError(
            "tx never calls the guard whose state is in opt_state: either opt_state belongs to another "
            "optimizer (make it with the init of the same tx), or tx.update is already jitted (jit the "
            "training step instead)."
        )
    return found[0]


def _check_none_bypasses(config: stablenum.GuardConfig, watched: Watched) -> None:
    if config.loss_scale is not None and watched.others:
        raise ValueError(
            f"loss_scale needs a guard that sees all gradients; {len(watched.others)} of them bypass it "
            "and would stay multiplied by the scale. Put the guard outside masked and partition: "
            "optax.chain(stablenum_jax.guard(...), optax.partition(...))."
        )


def _watched(grads: PyTree, seen: Captured) -> Watched:
    """Return the gradients that the guard watches, in its order, and the remaining ones."""
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    measured = [i for i, (path, leaf) in enumerate(leaves) if is_measurable(path, leaf)]
    source = seen.source
    if source is None:
        by_path = {leaves[i][0]: i for i in measured}
        source = tuple(by_path.get(path, -1) for path in seen.paths)
    taken = set(source)
    return Watched(
        paths=seen.paths,
        gradients=tuple(None if i < 0 else leaves[i][1] for i in source),
        weights=seen.weights or (),
        others=tuple(leaves[i][1] for i in measured if i not in taken),
        specs=seen.specs,
    )


def _like(what: str, before: PyTree, after: PyTree) -> PyTree:
    """Return ``after`` in the dtypes of ``before``, so that the step can be a scan's carry.

    Raises:
        ValueError: the structure or a shape differs.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            f"tx.update must keep the structure of {what}; it got {jax.tree.structure(before)} and returned "
            f"{jax.tree.structure(after)}. Transformations that grow their state at the first update "
            "(as optax.monitor does) can neither be skipped nor carried through a scan: leave them out of tx."
        )

    def cast(path: Path, old: Any, new: Any) -> Array:
        if jnp.shape(old) != jnp.shape(new):
            raise ValueError(
                f"tx.update must keep the shapes of {what}; {what}{jax.tree_util.keystr(path)} had shape "
                f"{jnp.shape(old)} and came back with shape {jnp.shape(new)}."
            )
        new = jnp.asarray(new)
        dtype = jnp.asarray(old).dtype
        return new if new.dtype == dtype else new.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, before, after)


def _undo_if_skipped(own: GuardOptState, new: PyTree, old: PyTree) -> PyTree:
    """Return the target and the state after a deferred step, or the old ones if the guard inside skipped
    it."""
    guard = find_guard(new[1])
    skipped = guard.guard.skipped_total != own.guard.skipped_total
    target, opt_state = jax.tree.map(lambda a, b: jnp.where(skipped, a, b), old, new)
    return target, replace_guard(opt_state, guard)


def _without_window(opt_state: PyTree) -> PyTree:
    """Return ``opt_state`` in which a ``MultiSteps`` around the guard starts a new window.

    When the guard skips the sum of gradients that were finite one by one, that sum must be dropped: if it
    stayed in the accumulator, every later step would be skipped.
    """

    def drop(node: Any) -> Any:
        if not (isinstance(node, optax.MultiStepsState) and has_guard(node)):
            return node
        return node._replace(
            mini_step=jnp.zeros_like(node.mini_step),
            acc_grads=jax.tree.map(jnp.zeros_like, node.acc_grads),
        )

    return jax.tree.map(drop, opt_state, is_leaf=lambda node: isinstance(node, optax.MultiStepsState))


def _warn_of_placement(opt_state: PyTree) -> None:
    """Warn unless the guard received different gradients only because ``MultiSteps`` accumulates them."""
    if not is_inside_multisteps(opt_state):
        warn(
            "The guard does not receive the gradients themselves: a transformation before it, or a jit "
            "around tx.update, changes them. Steps with non-finite gradients are skipped anyway, but put "
            "the guard first, and jit the training step instead of tx.update.",
            GuardPlacementWarning,
        )
