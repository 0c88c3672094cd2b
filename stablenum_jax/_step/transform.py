"""``guard`` and ``chain``: the guard as an optax transformation, and a chain with a true skip."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

import stablenum
from stablenum._support.settings_checks import check_flag
from stablenum.guard.config import Settings, make_config, settings_shown
from stablenum_jax._step import skip_watch
from stablenum_jax._step.apply import apply_multiplier, zeros_unless
from stablenum_jax._step.decide_and_update import without_unsupported_value
from stablenum_jax._step.driver_mode import Capture, Deferred, Direct, GuardReached, Passing, current_mode
from stablenum_jax._step.eager import guarded_update
from stablenum_jax._step.faults import nonfinite_parameters
from stablenum_jax._step.measure.norms import scalar_loss
from stablenum_jax._step.measure.over_axes import AxisName
from stablenum_jax._step.measure.specs import Specs, check_specs, specs_of
from stablenum_jax._step.observe import Watched, judge
from stablenum_jax._step.plain_update import PlainUpdate
from stablenum_jax._step.unscaled import warn_if_unscaled
from stablenum_jax._trees.leaves import (
    check_gradients,
    check_transformation,
    guarded_leaves,
    guarded_weights,
)
from stablenum_jax._trees.models import parameters, watched_parameters
from stablenum_jax._trees.names import names_id_of, path_name, register_names
from stablenum_jax._trees.places import beside
from stablenum_jax._trees.settings import register_settings
from stablenum_jax._trees.state import GuardOptState, has_guard, told_of_another_state

__all__ = ["chain", "check_axis_name", "check_named_once", "guard"]

PyTree: TypeAlias = Any


@settings_shown
def guard(
    inner: optax.GradientTransformation | None = None,
    config: stablenum.GuardConfig | None = None,
    *,
    axis_name: AxisName | None = None,
    specs: PyTree = None,
    log_skips: bool = True,
    **overrides: Unpack[Settings],
) -> optax.GradientTransformationExtraArgs:
    """Watch the gradients: skip non-finite steps entirely, unscale, clip, and record every step.

    Chain form, the first transformation of an optimizer, for :func:`stablenum_jax.step`::

        tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-3))
        params, opt_state = stablenum_jax.step(tx, params, opt_state, grads, value=loss)

    Wrapper form, for callers of plain ``tx.update`` (flax ``TrainState``, ``nnx.Optimizer``)::

        tx = stablenum_jax.guard(optax.adamw(1e-3), clip=1.0)

    Both are true skips: the parameters and the whole state of the optimizer stay bit for bit as they were.
    The chain form called through plain ``tx.update`` cannot do that: it passes zeros to the optimizer, which
    still applies momentum and weight decay, and it warns once (``NotATrueSkipWarning``).

    Put ``guard`` before any other transformation, so that it sees the gradients as they are. It works inside
    and around ``optax.MultiSteps``, ``masked``, ``partition`` and ``inject_hyperparams``. A guard inside
    ``MultiSteps`` needs :func:`stablenum_jax.step`, which keeps bad gradients out of the accumulator (optax
    clears it by multiplying with 0, so a NaN would stay there permanently); for callers of plain
    ``tx.update`` put the guard outside: ``guard(optax.MultiSteps(...))``. Inside, their first update warns
    (``NotATrueSkipWarning``). A spike rule inside uses only the
    norm of the mean gradient: the losses belong to single micro-batches, so they are checked for finiteness
    but neither judged nor recorded. Leaves that the guard does not see (masked ones) are checked for
    finiteness but not clipped, and with a loss scale they are an error. Under ``vmap`` each run has its own
    decision, and the skip selects between the two results.

    With ``loss_scale``, the gradients must come from ``stablenum_jax.value_and_grad(loss_fn, opt_state)`` or
    be multiplied by ``loss_scale(opt_state)``. The guard divides by the scale in any case: unscaled gradients
    become about 65536 times too small, and nothing is trained. If nothing in the process has read the scale
    before the first step with a dynamic one, that step warns (``UserWarning``).

    Two clip rules need more than gradients. ``AdaptiveGradClip`` compares them with the weights, so
    ``tx.update`` needs ``params``; names in its ``exclude`` are paths in the pytree (``"dense.kernel"``).
    ``ClipUpdateRMS`` acts on the update of the whole ``tx``, so it needs ``step``, ``chain`` or
    ``guard(inner)`` and, unless ``per_lr=False``, a learning rate in the state:
    ``optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)``. It keeps one copy of the updates.

    Args:
        inner: None for the chain form, or the optimizer to wrap: ``guard(inner)`` is
            ``chain(guard(), inner)``.
        config: the settings; the default skips and records, and changes nothing else.
        axis_name: under ``shard_map`` or ``pmap``, the axis (or axes) along which gradients are *sharded*, or
            along which each device has a loss of its own. All devices along it then make the same decision,
            from the norms of the whole gradients and the mean of the losses, with one collective, and
            ``metrics`` names the worst device. Leave it out if gradients and loss have been averaged over the
            axis, and under jit with sharded arrays. A leaf that does not vary over the axis counts once; with
            ``check_vma=False``, as in ``pmap``, this is unknown, and without ``specs`` every leaf is taken to
            be sharded.
        specs: with ``axis_name``, how the parameters are divided over mesh axes: a pytree of
            ``PartitionSpec`` like the parameters, or a prefix of it, as the ``in_specs`` of ``shard_map``.
            ``AdaptiveGradClip`` needs it for gradients that are sharded, because a unit may lie on several
            devices. A spec also says which devices have copies, with ``check_vma=False`` too. Axes that are
            not in ``axis_name`` are ignored, but must not divide a unit. Leave it out under jit with sharded
            arrays.
        log_skips: log a warning (logger ``"stablenum"``) of three or more skipped steps in a row, and of a
            halt, even if nothing reads the state: every 10 seconds, and when the program ends. Compiled
            programs do not change for it: the host sees each state as JAX returns it. A state that is not
            returned as a pytree, as by ``jax.export`` of a function of ``jax.tree.leaves(opt_state)``, is not
            seen. With False, reading the state logs no skips either.
        **overrides: fields of :class:`stablenum.GuardConfig`, such as ``clip=1.0`` or
            ``loss_scale="dynamic"``.

    Raises:
        TypeError: ``inner`` is not an optax transformation, ``config`` is not a GuardConfig, a leaf of
            ``specs`` is not a PartitionSpec, or an override is unknown or a traced array.
        ValueError: a setting has a wrong value, ``axis_name`` or a spec names an axis twice, or ``specs`` is
            given without ``axis_name``. `init` raises it too, if a pattern in `exclude` matches no parameter
            or ``specs`` does not fit the parameters; and the first step, before anything is computed, if
            ``axis_name`` or a spec names an axis that ``shard_map`` or ``pmap`` does not bind, if a leaf
            varies over an axis of ``axis_name`` that its spec does not name, or if ``AdaptiveGradClip`` is to
            clip units of a gradient that may be sharded, without ``specs``.

    Example:
        >>> params = {"w": jnp.ones(2)}
        >>> tx = guard(optax.adam(0.1), clip=1.0)
        >>> updates, opt_state = tx.update({"w": jnp.asarray([jnp.nan, 1.0])}, tx.init(params), params)
        >>> bool((optax.apply_updates(params, updates)["w"] == params["w"]).all())
        True
    """
    if inner is not None:
        check_transformation("inner", inner)
        own = guard(None, config, axis_name=axis_name, specs=specs, log_skips=log_skips, **overrides)
        return chain(own, inner)
    check_flag("log_skips", log_skips)
    for name, value in overrides.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{name} must be a plain Python value, known before tracing; got {type(value).__name__}. "
                "Inside optax.inject_hyperparams, either write the value as a literal, as in "
                "inject_hyperparams(lambda lr: optax.chain(guard(clip=1.0), optax.adamw(lr)))(lr=1e-3), or "
                "list the argument in static_args."
            )
    check_axis_name(axis_name)
    check_named_once(axis_name)
    checked = check_specs(specs, axis_name)
    made = make_config(config, overrides)
    return _Guard(made, axis_name, checked, log_skips=log_skips).as_transformation()


def check_axis_name(axis_name: object) -> None:
    """Check that ``axis_name`` can name an axis, or several. (JAX allows any hashable name but a number.)

    Raises:
        TypeError: it cannot.
    """
    names = axis_name if isinstance(axis_name, tuple) and axis_name else (axis_name,)
    if axis_name is not None and not all(_is_name(name) for name in names):
        raise TypeError(
            f"axis_name must be the name of an axis of shard_map or pmap, a tuple of names, or None; "
            f"got {axis_name!r}."
        )


def check_named_once(axis_name: AxisName | None) -> None:
    """Check that a tuple does not name an axis twice: its devices would be counted twice.

    Raises:
        ValueError: it does.
    """
    if isinstance(axis_name, tuple) and len(set(axis_name)) < len(axis_name):
        raise ValueError(f"axis_name must name each axis once; got {axis_name!r}.")


def _is_name(name: object) -> bool:
    return isinstance(name, Hashable) and not isinstance(name, (int, float, complex, tuple)) and name != ""


class _Guard:
    """The chain form, which does what the driver around it says; without a driver it does what it can."""

    def __init__(
        self,
        config: stablenum.GuardConfig,
        axis_name: AxisName | None,
        specs: Specs | None,
        *,
        log_skips: bool,
    ) -> None:
        self.config, self.axis_name, self.specs, self.log_skips = config, axis_name, specs, log_skips
        self.plain_update = PlainUpdate(skips=False)

    def as_transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: PyTree) -> GuardOptState:
        """Return the state before the first step."""
        skip_watch.begin()
        params = watched_parameters(parameters(params))
        leaves = guarded_leaves(params, None)
        paths = list(leaves)
        if self.specs is not None:
            specs_of(self.specs, paths, list(leaves.values()), params)  # raises if they do not fit
        names = [path_name(path) for path in paths]
        if self.config.unit_rule is not None:
            self.config.unit_rule.included(names)  # raises if a pattern matches nothing
        number = register_names(names, log_skips=self.log_skips)
        register_settings(number, self.config)
        state = GuardOptState.of(
            guard=stablenum.init_guard(self.config, len(paths), xp=jnp),
            names_id=jnp.asarray(number, jnp.int32),
            bad_at_init=nonfinite_parameters(leaves.values()),
        )
        return beside(params, state)

    def update(
        self, updates: PyTree, state: GuardOptState, params: PyTree = None, *, value: Any = None, **extra: Any
    ) -> tuple[PyTree, GuardOptState]:
        """Return the gradients for the next transformation, and the next state."""
        params = watched_parameters(parameters(params, updates))
        leaves = guarded_leaves(updates, params)
        weights = () if self.config.unit_rule is None else guarded_weights(leaves, params)
        specs: tuple[PartitionSpec, ...] = ()
        if self.specs is not None:
            specs = specs_of(self.specs, tuple(leaves), tuple(leaves.values()), updates, params)
        watched = Watched(tuple(leaves), tuple(leaves.values()), weights, specs=specs)
        mode = current_mode()
        if isinstance(mode, Capture):
            raise GuardReached(self.config, self.axis_name, watched, log_skips=self.log_skips)
        if isinstance(mode, Passing):
            return updates, state
        if isinstance(mode, Direct):
            return self._apply(updates, watched, mode.decision), state
        if mode is None:
            self._check_alone()
            warn_if_unscaled(self.config)
            check_gradients(updates, params, "updates", shapes=False)
            mode = Deferred(unscaled=False, loss=scalar_loss(value))
        decision, after, _ = judge(
            self.config,
            state.guard,
            watched,
            loss=mode.loss,
            axis_name=self.axis_name,
            unscaled=mode.unscaled,
        )
        # Selected first: the derivative of the product has the gradients as a factor.
        updates = self._apply(zeros_unless(decision.apply, updates), watched, decision)
        names_id = names_id_of(leaves, state.names_id, log_skips=self.log_skips)
        return updates, GuardOptState.of(after, names_id, state.bad_at_init)

    def _apply(self, updates: PyTree, watched: Watched, decision: stablenum.Decision) -> PyTree:
        return apply_multiplier(self.config, updates, watched.paths, decision, watched.shapes)

    def _check_alone(self) -> None:
        """Raise or warn where a guard without a driver around it cannot do what it should."""
        if self.config.update_rule is not None:
            raise ValueError(
                "ClipUpdateRMS clips the optimizer's update, which a guard called through plain tx.update "
                "never sees. Call stablenum_jax.step(tx, params, opt_state, grads), or build the optimizer "
                "with stablenum_jax.chain(...) or stablenum_jax.guard(inner)."
            )
        self.plain_update.check()


def chain(*transforms: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Chain transformations as ``optax.chain`` does, with a true skip: in a skipped step none of them runs.

    The chain is for callers of plain ``tx.update``. On a skip the updates are -0.0, which leaves every
    parameter bit for bit as it was; the state of all transformations is unchanged too. If you call the update
    yourself, prefer :func:`stablenum_jax.step`, which is faster: it adds the updates inside the branch that a
    skip leaves out.
    Jit the whole training step, not ``update`` alone: updates are then written over the gradients and take no
    memory.

    Args:
        *transforms: the guard (see :func:`guard`, bare or under wrappers) first, then any others.

    Raises:
        TypeError: an argument is not an optax transformation.
        ValueError: from ``init``: not exactly one guard, or not in the first transformation. From
            ``update``: the optimizer changes the structure of its state; ``params`` is missing for
            ``AdaptiveGradClip``, or the learning rate for ``ClipUpdateRMS``; the update failed, and the state
            is that of another optimizer.
        NonFiniteError: from ``update`` called eagerly: the guard has halted the training.

    Example:
        >>> tx = chain(guard(clip=1.0), optax.add_decayed_weights(1e-4), optax.sgd(0.1))
        >>> params = {"w": jnp.zeros(2)}
        >>> updates, opt_state = tx.update({"w": jnp.asarray([3.0, 4.0])}, tx.init(params), params)
        >>> updates["w"].round(2)
        Array([-0.06, -0.08], dtype=float32)
    """
    if not transforms:
        raise ValueError("chain needs at least one transformation, the guard; got none.")
    for i, transform in enumerate(transforms):
        check_transformation(f"transforms[{i}]", transform)
    inner = optax.chain(*map(without_unsupported_value, transforms))
    plain_update = PlainUpdate(skips=True)

    def init(params: PyTree) -> PyTree:
        params = parameters(params)
        state = inner.init(params)
        guards = [has_guard(part) for part in state]
        if guards[0] != 1 or sum(guards) != 1:
            raise ValueError(
                "stablenum_jax.chain must hold exactly one guard, in its first transformation; got "
                f"{sum(guards)} guard(s), in the transformations {[i for i, n in enumerate(guards) if n]}. "
                "Write chain(stablenum_jax.guard(), optimizer), without another guard inside the optimizer."
            )
        return beside(params, state)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        params = parameters(params, updates)
        if isinstance(current_mode(), (Capture, Passing, Direct)):
            return inner.update(updates, state, params, **extra)  # the driver around it does the rest
        if current_mode() is None:
            plain_update.check()
        with told_of_another_state(inner, params, state):
            return guarded_update(inner, params, state, updates, extra, add=None)

    return optax.GradientTransformationExtraArgs(init, update)
