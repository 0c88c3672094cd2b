"""``value_and_grad``: scaled gradients, computed in the formats of a policy and of the guard's level."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import stablenum
from stablenum._support.settings_checks import check_callable, check_flag
from stablenum.errors import bad_field
from stablenum_jax._precision.escalate import check_not_escalating, in_level_format
from stablenum_jax._precision.nnx_arguments import cast_arguments, copied, update_objects
from stablenum_jax._precision.policy import Policy, as_policy
from stablenum_jax._step.scaled_loss import scaled_value_and_grad
from stablenum_jax._trees.leaves import check_argnums
from stablenum_jax._trees.state import loss_scale

__all__ = ["value_and_grad"]

PyTree: TypeAlias = Any
P = ParamSpec("P")
R = TypeVar("R")


def value_and_grad(
    fun: Callable[P, R],
    opt_state: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    policy: Any = None,
    formats: Sequence[Any] | None = None,
) -> Callable[P, tuple[R, Any]]:
    """Return ``jax.value_and_grad(fun)`` with the guard's loss scale: small gradients survive half precision.

    The loss is multiplied by the scale in float32, so a float16 loss does not overflow; the value is
    returned unscaled and in its own dtype. The gradients are returned *scaled*: the guard inspects them and
    unscales them in float32. Micikevicius et al. 2018 (arXiv 1710.03740).

    With ``policy`` the floating-point arrays in all arguments are cast for computing, module by module, and
    the gradients have the dtypes of the arguments. If the guard has an :class:`stablenum.EscalatePrecision`,
    the computation runs in the format of the guard's level. One compiled program contains all formats, in a
    ``lax.switch``, and the host never waits; call it under ``jit``, otherwise each call compiles again.
    Losses and auxiliary results have the widest level's dtype.

    Args:
        fun: returns a scalar loss, or ``(loss, aux)`` with ``has_aux``.
        opt_state: a pytree with one guard's state in it.
        argnums: which arguments to differentiate.
        has_aux: as in JAX.
        policy: None, or a policy: words, :class:`stablenum_jax.policy.Policy`, ``stablenum.Policy`` or jmp's.
        formats: the ``formats`` of the escalation, if they are not the usual ones from the policy's format
            upwards (float8, bfloat16, float32; or float16, float32); only with a policy.

    Returns:
        A function that returns ``(loss, grads)`` or ``((loss, aux), grads)``; without a loss scale and a
        policy, they are exactly those of ``jax.value_and_grad(fun)``.

    Raises:
        TypeError: ``fun`` is not a function, or (from the returned function) does not return a floating-point
            scalar.
        ValueError: ``argnums`` are no numbers; ``opt_state`` has no guard, or more than one; ``policy`` is
            not a policy, or does not compute in the first of ``formats``, which are not two or more formats
            from narrow to wide, or are given without a policy; the guard has an
            ``EscalatePrecision``, which widens a policy's formats, and ``policy`` is None.

    Example:
        >>> import jax.numpy as jnp, optax, stablenum_jax
        >>> tx = optax.chain(stablenum_jax.guard(loss_scale=1024.0), optax.sgd(0.1))
        >>> opt_state = tx.init(jnp.ones(2))
        >>> loss, grads = value_and_grad(lambda x: x.sum(), opt_state)(jnp.ones(2))
        >>> loss, grads
        (Array(2., dtype=float32), Array([1024., 1024.], dtype=float32))
    """
    check_callable("fun", fun, "a function that returns the loss")
    check_argnums(argnums, 0)
    check_flag("has_aux", has_aux)
    scale = loss_scale(opt_state)
    if formats is not None:
        formats = stablenum.EscalatePrecision(formats=formats).formats  # type: ignore[arg-type]
        if policy is None:
            raise bad_field("formats", "None without a policy, whose formats they widen", formats)
    if policy is None:
        check_not_escalating(opt_state)
        return functools.wraps(fun)(functools.partial(scaled_value_and_grad, fun, scale, argnums, has_aux))
    wanted = as_policy(policy)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        def call(now: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            @functools.wraps(fun)
            def cast_first(*args: Any, **kwargs: Any) -> Any:
                with cast_arguments(now, args, kwargs) as (cast, named):
                    return fun(*cast, **named)

            return scaled_value_and_grad(cast_first, scale, argnums, has_aux, *args, **kwargs)

        def of_level(now: Policy) -> tuple[Any, Any]:
            (given, named), changes = copied((args, kwargs))
            return call(now, given, named), changes()

        result, changed = in_level_format(of_level, wanted, opt_state, formats)
        update_objects((args, kwargs), changed)
        return result

    return wrapped
