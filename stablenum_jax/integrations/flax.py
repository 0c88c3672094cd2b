"""flax: a ``TrainState`` that hands the loss to the guard and stands still at a skipped step."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from stablenum._support.one_line import kind_of, one_line
from stablenum._support.partners import imported
from stablenum._support.public_names import present
from stablenum_jax._step.readout import unless_skipped
from stablenum_jax._step.training import step as guarded_step
from stablenum_jax._trees.leaves import check_transformation
from stablenum_jax._trees.state import has_guard

imported(__name__, {"flax": "flax"}, "0.12.8")
from flax import struct  # noqa: E402
from flax.training.dynamic_scale import DynamicScale  # noqa: E402
from flax.training.train_state import TrainState as FlaxTrainState  # noqa: E402

__all__ = ["TrainState"]

PyTree: TypeAlias = Any

# The fields that a step sets by itself.
_OWN = frozenset({"opt_state", "params", "step"})


class TrainState(FlaxTrainState):
    """flax's ``TrainState`` for an optimizer with a guard: a skipped step changes nothing in it.

    ``apply_gradients`` runs :func:`stablenum_jax.step`, so it takes the loss. At a skipped step ``params``,
    the optimizer's state, ``step`` and every field that ``apply_gradients`` was given stay as they were. Like
    flax's class it may have subclasses with further fields. The state itself is a pytree with one guard in
    it: give it to :func:`stablenum_jax.value_and_grad`, :func:`stablenum_jax.scalars` or
    :func:`stablenum_jax.history`.

    Attributes:
        step: () int32, the number of applied steps.
        batch_stats: the collection that was given to ``create``, such as batch norm's running statistics, or
            None.

    Example:
        >>> import optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-3))
        >>> state = TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
        >>> state = state.apply_gradients(grads={"w": jnp.ones(2)}, value=jnp.asarray(jnp.nan))
        >>> int(state.step), stablenum_jax.metrics(state)["reason"].name
        (0, 'NONFINITE_LOSS')
    """

    # By keyword only, so that a subclass may add fields without a default, as it may to flax's class.
    batch_stats: Any = struct.field(default=None, kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # flax makes a dataclass of each subclass, which would show the elements of all arrays.
        super().__init_subclass__(**{"repr": False, **kwargs})

    def __repr__(self) -> str:
        arrays = len(jax.tree.leaves((self.params, self.opt_state)))
        return one_line(self, apply_fn=kind_of(self.apply_fn), tx=kind_of(self.tx), arrays=arrays)

    @classmethod
    def create(cls, *, apply_fn: Any, params: PyTree, tx: Any, **kwargs: Any) -> TrainState:
        """Return the state before the first step.

        Args:
            apply_fn: usually the model's ``apply``; may be None.
            params: the parameters, with 8-bit statistics if there are any, as in flax.
            tx: an optax transformation with one guard inside:
                ``optax.chain(stablenum_jax.guard(), optax.adamw(1e-3))``, or ``stablenum_jax.guard(inner)``.
            **kwargs: the other fields. What ``apply_gradients`` is to replace must be given here, because the
                structure of the state never changes.

        Raises:
            TypeError: ``tx`` is not an optax transformation, or a field is unknown.
            ValueError: ``tx`` has no guard or more than one.
        """
        check_transformation("tx", tx)
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        guards = has_guard(state.opt_state)
        if guards != 1:
            raise ValueError(
                f"tx must hold exactly one guard; got {guards or 'none'}. Write optax.chain("
                "stablenum_jax.guard(), tx), or use flax's own TrainState for an optimizer without a guard."
            )
        return state.replace(step=jnp.zeros((), jnp.int32))

    def apply_gradients(self, *, grads: PyTree, value: Any = None, **kwargs: Any) -> TrainState:
        """Run one guarded step, or skip it, and return the next state.

        Args:
            grads: the gradients of ``params``, multiplied by the loss scale if the guard has one, as those
                from ``stablenum_jax.value_and_grad(loss_fn, state)`` are.
            value: the unscaled loss, a scalar; a step whose loss is not finite is skipped.
            **kwargs: new values of other fields, such as ``batch_stats=``. They are kept as they were at a
                skipped step, except a ``DynamicScale`` of flax, which must shrink there. A field that is to
                change at a skipped step is replaced by ``state.replace(field=...)``.

        Raises:
            NonFiniteError: called eagerly, and the guard halted the training.
            TypeError: a field is unknown, or a gradient or the loss is not of a format that it can have.
            ValueError: a field has another structure or shape than before; ``grads`` does not fit ``params``;
                ``value`` is not a scalar.
        """
        self._check_fields(kwargs)
        params, opt_state = guarded_step(self.tx, self.params, self.opt_state, grads, value=value)
        held = {name: new for name, new in kwargs.items() if not isinstance(new, DynamicScale)}
        held["step"] = self.step + 1
        old = {name: getattr(self, name) for name in held}
        kept = unless_skipped(opt_state, held, old, before=self.opt_state)
        return self.replace(params=params, opt_state=opt_state, **{**kwargs, **kept})

    def _check_fields(self, new: dict[str, Any]) -> None:
        """Check that new values are those of fields, and keep their structure.

        Raises:
            TypeError: a field is unknown.
            ValueError: the structure of one differs.
        """
        known = sorted({field.name for field in dataclasses.fields(self)} - _OWN)
        for name, value in new.items():
            if name not in known:
                raise TypeError(
                    f"{name} must be a field of {type(self).__name__} besides {', '.join(sorted(_OWN))}; "
                    f"the others are {', '.join(known)}. The loss is value=."
                )
            got, before = jax.tree.structure(value), jax.tree.structure(getattr(self, name))
            if got != before:
                raise ValueError(
                    f"{name} must keep the structure that it has in the state, {before}; got {got}. Give the "
                    f"first value to create, as {name}=."
                )


__dir__ = present(globals())
