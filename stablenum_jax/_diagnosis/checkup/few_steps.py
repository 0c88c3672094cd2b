"""``checkup``: a few steps on one batch, evaluated equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stablenum._support.settings_checks import check_callable, check_flag
from stablenum.diagnosis.checkup.course import Course, Loss
from stablenum.diagnosis.checkup.report import Checkup
from stablenum.diagnosis.checkup.schedule import BY_HAND
from stablenum.errors import bad_field
from stablenum_jax._diagnosis.audit import state_problems
from stablenum_jax._diagnosis.checkup.custom_rules import CustomRules
from stablenum_jax._diagnosis.checkup.marks import GRADIENT, LOSS, PARAMETER, mark
from stablenum_jax._diagnosis.checkup.measuring import FirstCall, MeasuredCall, parameters_seen, probe_of
from stablenum_jax._diagnosis.replay.jax_internals import quietly, under_transformation
from stablenum_jax._diagnosis.trained import Trained
from stablenum_jax._step.decide_and_update import without_unsupported_value
from stablenum_jax._step.scaled_loss import scale_loss
from stablenum_jax._step.training import step
from stablenum_jax._trees.leaves import check_state, check_transformation
from stablenum_jax._trees.state import has_guard

__all__ = ["checkup"]


def checkup(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    tx: optax.GradientTransformation | None = None,
    opt_state: Any = None,
    has_aux: bool = False,
) -> Checkup:
    """Take a few steps on one batch, and report what keeps the model from learning although no number is NaN.

    With an optimizer, three steps are taken on the same batch, and the loss is computed once more. Without
    one, there is one forward and one backward pass, and nothing is known about steps. If the cure of the
    first finding can be tried (another initialisation, a lower rate), it is, with one more pass. The passes
    are evaluated equation by equation, without ``jax.jit``, and measured. Findings, with their causes first,
    are those of ``stablenum checkup``, which also sees how a whole training goes. Nothing of the caller's is
    changed.

    Args:
        loss_fn: ``loss_fn(params, *args)`` returns the scalar loss, or ``(loss, aux)`` with ``has_aux``. It
            may be jitted.
        params: a pytree, linen's whole dict of collections (of which ``"params"`` is trained), a flax.nnx
            module or state (of which ``nnx.Param`` is trained), or an Equinox module.
        *args: further arguments, such as one batch.
        tx: the optimizer. With a guard inside, the steps are those of :func:`stablenum_jax.step`, with its
            loss scale. One that needs more than the loss, such as a line search, takes no step.
        opt_state: the state of ``tx``; by default ``tx.init`` of the trained parameters.
        has_aux: as in ``jax.value_and_grad``.

    Returns:
        A :class:`stablenum.diagnosis.Checkup`: ``ok``, ``complaints`` (root causes first), ``notes``,
        ``to_json()``, ``to_html()``; ``str`` gives its text. A loss that is not finite is one of the
        complaints.

    Raises:
        TypeError: an argument has a wrong type; called inside jit, grad or vmap.
        ValueError: the loss is not a floating-point scalar, ``params`` holds no floating-point array, or
            ``opt_state`` is given without ``tx``.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> params = [0.01 * jax.random.normal(jax.random.key(i), (8, 8)) for i in range(4)]
        >>> def loss(params, x):
        ...     h = x
        ...     for w in params:
        ...         h = jnp.tanh(h @ w)
        ...     return jnp.mean(jnp.square(h - x))
        >>> report = checkup(loss, params, jnp.ones((16, 8)))
        >>> report.complaints[0].symptom.value, report.ok
        ('vanishing_activations', False)
    """
    check_callable("loss_fn", loss_fn, "a function loss_fn(params, *args) that returns the loss")
    check_flag("has_aux", has_aux)
    if tx is not None:
        check_transformation("tx", tx)
    if opt_state is not None:
        check_state("opt_state", opt_state)
        if tx is None:
            raise ValueError("opt_state must be None without tx; give the optimizer whose state it is, too.")
    if under_transformation():
        raise TypeError(
            "checkup needs real arrays, but was called inside a transformation (jit, grad, vmap). "
            "Call it eagerly, with the arguments of one step."
        )
    few = _FewSteps(loss_fn, params, args, tx, opt_state, has_aux)
    return quietly(few.checkup)


class _FewSteps:
    """Takes the steps, and collects what is seen of them."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        args: tuple[Any, ...],
        tx: optax.GradientTransformation | None,
        opt_state: Any,
        has_aux: bool,
    ) -> None:
        self.loss_fn, self.has_aux, self.tx = loss_fn, has_aux, tx
        self.trained = Trained.of(params)
        if not self.trained.leaves:
            raise bad_field("params", "parameters, with a floating-point array among them", params)
        leaves, self.structure = jax.tree.flatten(args)
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, (jax.Array, np.ndarray))]
        self.args, self.arrays = leaves, [leaves[i] for i in self.places]
        if tx is not None and opt_state is None:
            opt_state = tx.init(self.trained.tree(self.trained.leaves))
        self.opt_state = opt_state
        self.course = Course(
            framework="jax",
            inside=tuple(self.trained.names),
            bad_state=_bad_state(opt_state, self.trained.tree(self.trained.leaves)),
            bad_state_since=0,
        )
        self.notes: list[str] = []
        self.custom = CustomRules()

    def checkup(self) -> Checkup:
        """Take the steps, and judge them."""
        leaves, state = self.trained.leaves, self.opt_state
        _check_loss(jax.eval_shape(self.loss, leaves, self.arrays))
        with self.custom.installed():
            closed, first = self.traced(leaves, state), None
        for number in range(1 if self.tx is None else BY_HAND):
            before = jax.tree.leaves((leaves, state, self.arrays))
            call = MeasuredCall.of(closed, before)
            self.custom.compare(call.marked, number)
            loss, leaves, state = jax.tree.unflatten(jax.tree.structure((0, leaves, state)), call.results)
            after = None if self.tx is None else jax.tree.leaves((leaves, state, self.arrays))
            first = first or FirstCall(call, before if after is None else after)
            self.course.losses.append(Loss(number, float(loss)))
            self.course.probes.append(probe_of(call, number, parameters_seen(call, after, np.nan)))
        if self.tx is not None:
            self.course.steps = BY_HAND
            self.course.losses.append(Loss(BY_HAND, float(self.loss(leaves, self.arrays))))
        self.course.custom = self.custom.found
        return Checkup.of(self.course, first=first, notes=tuple(self.notes))

    def traced(self, leaves: Sequence[Any], state: Any) -> Any:
        """Return the jaxpr of a step: of the loss, the parameters and the state after it."""
        try:
            return jax.make_jaxpr(self.step)(leaves, state, self.arrays)
        except TypeError as error:
            if self.tx is None or "value_fn" not in str(error):
                raise
        self.notes.append("the optimizer needs the function itself (value_fn), so it took no step")
        self.tx = None
        return jax.make_jaxpr(self.step)(leaves, state, self.arrays)

    def step(self, leaves: Sequence[Any], state: Any, arrays: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return the loss, and the parameters and the state after a step, with marks for what is measured."""
        names = self.trained.names

        def scaled_loss(marked: dict[str, Any]) -> tuple[Any, Any]:
            loss = self.loss([marked[name] for name in names], arrays)
            return (scale_loss(loss, state) if has_guard(state) == 1 else loss), loss

        marked = mark(dict(zip(names, leaves, strict=True)), PARAMETER)
        (_, loss), grads = jax.value_and_grad(scaled_loss, has_aux=True)(marked)
        loss, grads = mark(loss, LOSS), mark(grads, GRADIENT)
        if self.tx is None:
            return loss, leaves, state
        params = self.trained.tree(leaves)
        gradients = self.trained.tree([grads[name] for name in names])
        if has_guard(state) == 1:
            params, state = step(self.tx, params, state, gradients, value=loss)
        else:
            update = without_unsupported_value(self.tx).update
            updates, state = update(gradients, state, params, value=loss)
            params = optax.apply_updates(params, updates)
        return loss, jax.tree.leaves(params), state

    def loss(self, leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Return the loss."""
        full = list(self.args)
        for place, array in zip(self.places, arrays, strict=True):
            full[place] = array
        result = self.loss_fn(self.trained.model(leaves), *jax.tree.unflatten(self.structure, full))
        return result[0] if self.has_aux else result


def _bad_state(opt_state: Any, params: Any) -> tuple[str, ...]:
    if opt_state is None:
        return ()
    try:
        return state_problems(opt_state, params)
    except ValueError:  # its moments are not a tree like params
        return ()


def _check_loss(loss: Any) -> None:
    shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
    if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        got = type(loss).__name__ if dtype is None else f"{dtype}{list(shape or ())}"
        raise bad_field("loss_fn", "a function that returns a floating-point scalar", got)
