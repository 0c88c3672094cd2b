"""Compute in the format of the guard's escalation level, chosen on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

import stablenum
from stablenum.errors import bad_field
from stablenum.formats import FORMATS
from stablenum.rules.escalation import EscalationState
from stablenum_jax._precision.casts import is_castable
from stablenum_jax._precision.policy import Policy, as_policy
from stablenum_jax._trees.state import guard_state

__all__ = [
    "check_not_escalating",
    "computing_in",
    "current_policy",
    "in_level_format",
    "ladder_of",
    "raised_format",
]

PyTree: TypeAlias = Any

_FORMAT: ContextVar[str | None] = ContextVar("stablenum_jax_format", default=None)


@contextmanager
def computing_in(name: str | None) -> Iterator[None]:
    """Trace the body with the computation's format raised to ``name``."""
    token = _FORMAT.set(name)
    try:
        yield
    finally:
        _FORMAT.reset(token)


def raised_format() -> str | None:
    """Return the format of the level that is being traced; None at level 0, the policy's own format."""
    return _FORMAT.get()


def current_policy(policy: Policy) -> Policy:
    """Return ``policy`` or, inside an escalated computation, that policy with the level's format.

    A module for which a rule has a format wider than the level's keeps the rule's format.
    """
    name = _FORMAT.get()
    if name is None:
        return policy
    return as_policy(policy.core.at_least(name))


def ladder_of(policy: Policy, formats: Sequence[Any] | None) -> tuple[str, ...]:
    """Return the formats of the levels: the given ones, or those from the policy's format upwards.

    Raises:
        ValueError: ``formats`` does not begin with the policy's format, or is not increasing.
    """
    compute = policy.core.compute
    if formats is None:
        steps = ("bfloat16", "float32") if FORMATS[compute].bits == 8 else ("float32",)
        return (compute, *(name for name in steps if FORMATS[name].bits > FORMATS[compute].bits))
    rule = stablenum.EscalatePrecision(formats=tuple(formats))
    rule.check_begins_with(compute)
    return rule.formats


def _escalation(opt_state: PyTree) -> EscalationState | None:
    found = guard_state(opt_state).escalation
    return found if isinstance(found, EscalationState) else None


def check_not_escalating(opt_state: PyTree) -> None:
    """Raise if the guard would widen the formats of a policy, for a caller without a policy.

    Raises:
        ValueError: the guard has an escalation.
    """
    if _escalation(opt_state) is not None:
        raise bad_field(
            "policy",
            "given if the guard has an EscalatePrecision",
            None,
            hint="The guard's level widens a policy's formats, and has no effect without one: write "
            "value_and_grad(fun, opt_state, policy='p=f32,c=f16'), and give a model's policy to "
            "stablenum_jax.precision(model, policy) too; or leave escalate out.",
        )


def in_level_format(
    call: Callable[[Policy], PyTree], policy: Policy, opt_state: PyTree, formats: Sequence[Any] | None
) -> PyTree:
    """Run ``call`` with the policy of the guard's level: all levels are traced, one is run.

    Floating-point results have the widest dtype that any level returns, so that all branches have one type.

    Args:
        call: computes with the policy that it is given.
        policy: the policy of level 0.
        opt_state: contains the guard's state.
        formats: see :func:`ladder_of`.
    """
    escalation = _escalation(opt_state)
    if escalation is None:
        return call(policy)
    names = ladder_of(policy, formats)

    def branch(i: int) -> Callable[[], PyTree]:
        def run() -> PyTree:
            with computing_in(None if i == 0 else names[i]):
                return call(current_policy(policy))

        return run

    branches = [branch(i) for i in range(len(names))]
    shapes = [jax.eval_shape(run) for run in branches]
    common = jax.tree.map(lambda *leaves: _common(leaves), *shapes)

    def alike(run: Callable[[], PyTree]) -> Callable[[], PyTree]:
        return lambda: jax.tree.map(lambda x, d: x.astype(d) if is_castable(x) else x, run(), common)

    level = jnp.clip(escalation.level, 0, len(names) - 1)
    return lax.switch(level, [alike(run) for run in branches])


def _common(leaves: Sequence[Any]) -> Any:
    dtypes = [leaf.dtype for leaf in leaves]
    return jnp.result_type(*dtypes) if is_castable(leaves[0]) else dtypes[0]
