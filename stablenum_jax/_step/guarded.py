"""One guarded update of an optax transformation with a guard somewhere inside.

An optax transformation is opaque, and the decision must be known *before* its update runs, so
that a refused step runs none of it. Hence two passes over the same ``tx.update``:

1. *capture*: an abstract run that ends where control reaches the guard. It tells the guard's
   config and whether the guard receives the very gradients that the driver holds.
2. *drive*: measure, decide, and run ``tx.update`` inside one ``lax.cond`` whose false branch is
   the no-op. The guard inside only multiplies.

If something stands between the gradients and the guard (``MultiSteps``, or a transformation placed
before it), the driver can judge the raw gradients only; the guard then measures and decides for
itself (:class:`Deferred`) and the driver takes the whole step back if it refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

import stablenum
from stablenum_jax._step.apply import (
    grads_or_negative_zeros,
    multiply_leaves,
    negative_zeros,
    negative_zeros_unless,
)
from stablenum_jax._step.clip_update import clip_updates
from stablenum_jax._step.handshake import Capture, Deferred, Direct, GuardReached, current_mode, in_mode
from stablenum_jax._step.measure import AxisName
from stablenum_jax._step.observe import Watched, judge, judge_finiteness
from stablenum_jax._step.warnings import GuardPlacementWarning
from stablenum_jax._trees.leaves import is_measurable
from stablenum_jax._trees.names import Path
from stablenum_jax._trees.state import GuardOptState, find_guard, has_guard, replace_guard

__all__ = ["Add", "run_guarded"]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
# How updates become parameters, or None where the caller wants the updates themselves.
Add: TypeAlias = Callable[[PyTree, PyTree], PyTree] | None


class Captured(NamedTuple):
    """What the capture found out.

    Attributes:
        config, axis_name: the guard's.
        paths: the paths of the parameters that the guard watches, as the guard sees them.
        source: for each of them the index of its gradient among the driver's leaves, -1 if it has
            no gradient; None if the guard sees other arrays than the driver's.
        weights: the parameters of these paths, () if no rule looks at them; None if the guard sees
            others than the driver's.
    """

    config: stablenum.GuardConfig
    axis_name: AxisName | None
    paths: tuple[Path, ...]
    source: tuple[int, ...] | None
    weights: tuple[Any, ...] | None


def _capture(
    update: Callable[..., Any], params: PyTree, opt_state: PyTree, grads: PyTree, extra: dict[str, Any]
) -> Captured:
    """Run ``update`` abstractly up to the guard. Nothing is computed and nothing is kept."""
    leaves, structure = jax.tree.flatten(grads)
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
                update(jax.tree.unflatten(structure, everything), opt_state, params, **extra)
        except GuardReached as reached:
            seen = reached.watched
            same = all(leaf is None or id(leaf) in place for leaf in seen.gradients)
            source = (
                tuple(-1 if leaf is None else place[id(leaf)] for leaf in seen.gradients) if same else None
            )
            weights = seen.weights if all(id(leaf) in own_weights for leaf in seen.weights) else None
            found.append(Captured(reached.config, reached.axis_name, seen.paths, source, weights))

    jax.eval_shape(probe, [leaves[i] for i in traced])
    if not found:
        raise ValueError(
            "tx never calls the guard whose state is in opt_state: either opt_state is that of another "
            "optimizer (make it with the init of the same tx), or tx.update is jitted already (jit the "
            "training step instead)."
        )
    return found[0]


def run_guarded(
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
    """Decide the step and run it, or not: parameters or updates, the next state, the guard's config.

    ``reuse_grads``: updates may be written over the gradients, which pays where these are intermediates of
    the program that this is part of.
    """
    update = optax.with_extra_args_support(tx).update
    own = find_guard(opt_state)
    seen = _capture(update, params, opt_state, grads, extra)
    outer = current_mode()
    outer_unscaled = isinstance(outer, Deferred) and outer.unscaled
    if isinstance(outer, Deferred):
        loss = outer.loss
    watched = _watched(grads, seen)
    direct = seen.source is not None and seen.weights is not None
    decision, guard_after = (
        judge(
            seen.config,
            own.guard,
            watched,
            loss=loss,
            axis_name=seen.axis_name,
            unscaled=outer_unscaled,
        )
        if direct
        else judge_finiteness(seen.config, own.guard, watched, loss=loss, axis_name=seen.axis_name)
    )
    # Whoever is furthest out sees the whole update, and clips it once.
    update_rule = seen.config.update_rule if outer is None else None
    mode: Direct | Deferred
    if direct:
        if seen.config.loss_scale is not None and watched.others:
            raise ValueError(
                f"loss_scale needs a guard that sees all gradients; {len(watched.others)} of them bypass it "
                "and would stay multiplied by the scale. Put the guard outside of masked and partition: "
                "optax.chain(stablenum_jax.guard(...), optax.partition(...))."
            )
        mode = Direct(decision)
    else:
        # A micro-batch's loss beside the norm of their mean would be a sample to a spike rule; that each
        # of them is finite has been seen here.
        withheld = seen.config.spike is not None and _accumulates(opt_state)
        mode = Deferred(
            unscaled=outer_unscaled or seen.config.loss_scale is not None, loss=None if withheld else loss
        )

    def attempt(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        given = grads
        if isinstance(mode, Deferred) and mode.unscaled and not outer_unscaled:
            given = multiply_leaves(grads, 1.0 / own.guard.loss_scale.scale, widen=True)
        with in_mode(mode):
            updates, after = update(given, opt_state, params, **extra)
        after = _like("opt_state", opt_state, after)
        if update_rule is not None:
            updates = clip_updates(update_rule, updates, after, axis_name=seen.axis_name)
        target = updates if add is None else _like("params", params, add(params, updates))
        if isinstance(mode, Deferred):
            before, kept = skip(params, _without_window(opt_state), target)
            target, after = _undo_if_refused(own, (target, after), (before, kept))
        return target, after

    reuse_grads = reuse_grads and add is None and direct
    no_updates = grads_or_negative_zeros if reuse_grads else negative_zeros

    def skip(params: PyTree, opt_state: PyTree, updates: PyTree) -> tuple[PyTree, PyTree]:
        target = params if add is not None else no_updates(updates, grads)
        return target, replace_guard(opt_state, own._replace(guard=guard_after))

    shape = jax.eval_shape(attempt, params, opt_state)[0] if add is None else None
    # The no-op must be the false branch and must come with the update and the addition in the other
    # one: only then does XLA alias donated buffers through the conditional and fuse the multiplier.
    target, opt_state = lax.cond(
        decision.apply, attempt, lambda params, opt_state: skip(params, opt_state, shape), params, opt_state
    )
    if reuse_grads:
        target = negative_zeros_unless(decision.apply, target)
    if isinstance(mode, Direct):
        opt_state = replace_guard(opt_state, own._replace(guard=guard_after))
    elif outer is None and seen.source is None:
        _warn_of_placement(opt_state)
    return target, opt_state, seen.config


def _watched(grads: PyTree, seen: Captured) -> Watched:
    """The gradients that the guard watches, in its order, and the others that are there."""
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
    )


def _like(what: str, before: PyTree, after: PyTree) -> PyTree:
    """``after`` in the dtypes of ``before``, so that the step can be a scan's carry.

    Raises:
        ValueError: its structure or a shape differs.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            f"tx.update must keep the structure of {what}; it got {jax.tree.structure(before)} and returned "
            f"{jax.tree.structure(after)}. Transformations that grow their state at the first update "
            "(optax.monitor does) cannot be skipped, nor carried through a scan: leave them out of tx."
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


def _undo_if_refused(own: GuardOptState, new: PyTree, old: PyTree) -> PyTree:
    """Target and state of a deferred step; the old ones where the guard inside refused it."""
    guard = find_guard(new[1])
    refused = guard.guard.skipped_total != own.guard.skipped_total
    target, opt_state = jax.tree.map(lambda a, b: jnp.where(refused, a, b), old, new)
    return target, replace_guard(opt_state, guard)


def _without_window(opt_state: PyTree) -> PyTree:
    """``opt_state`` with the window of a ``MultiSteps`` around the guard begun anew.

    When the guard refuses the sum of gradients that were finite one by one, that sum has to go: kept
    in the accumulator it would be refused for ever.
    """

    def drop(node: Any) -> Any:
        if not (isinstance(node, optax.MultiStepsState) and has_guard(node)):
            return node
        return node._replace(
            mini_step=jnp.zeros_like(node.mini_step),
            acc_grads=jax.tree.map(jnp.zeros_like, node.acc_grads),
        )

    return jax.tree.map(drop, opt_state, is_leaf=lambda node: isinstance(node, optax.MultiStepsState))


def _accumulates(opt_state: PyTree) -> bool:
    """Whether a ``MultiSteps`` stands around the guard."""

    def around(node: object) -> bool:
        return isinstance(node, optax.MultiStepsState) and has_guard(node) == 1

    return any(map(around, jax.tree.leaves(opt_state, is_leaf=around)))


def _warn_of_placement(opt_state: PyTree) -> None:
    """Warn unless the guard got other gradients because ``MultiSteps`` accumulates them."""
    if not _accumulates(opt_state):
        warnings.warn(
            "The guard does not receive the gradients themselves: a transformation before it, or a jit "
            "around tx.update, hands it others. Non-finite gradients are refused all the same, but put the "
            "guard first, and jit the training step instead of tx.update.",
            GuardPlacementWarning,
            stacklevel=2,
        )
