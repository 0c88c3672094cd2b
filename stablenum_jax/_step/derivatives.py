"""Derivatives of what is measured and decided, in forward and in reverse mode.

What is measured and decided is made of selections: beside the ordinary result there is one for extreme
numbers, and one for a skip. In reverse mode the derivative of each is multiplied by a cotangent, that of the
results not selected by 0, and ``0 * inf`` is NaN although no such number was used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from stablenum_jax._trees.leaves import is_floating

__all__ = ["refuse_derivative", "undefined_beyond", "with_finite_slopes", "with_tangents"]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
Tree = TypeVar("Tree")

# The square of a divisor is part of the derivative, and is a normal float32 between these two.
_LEAST, _MOST = 2.0**-62, 2.0**62


def with_tangents(values: Tree, args: PyTree, rule: Callable[[Any, Any, Any], Any]) -> Tree:
    """Return values as they are, with a derivative of their own.

    Args:
        values: floating-point arrays.
        args: what they were computed from, behind ``lax.stop_gradient``.
        rule: returns the tangents of the values, given the values, the arguments and the tangents of these.
    """

    @jax.custom_jvp
    def valued(values: Tree, args: PyTree) -> Tree:
        return values

    @valued.defjvp
    def sloped(given: Any, tangents: Any) -> tuple[Tree, Any]:
        values = valued(*given)  # which has this derivative too, for one of higher order
        return values, rule(values, given[1], tangents[1])

    return valued(values, args)


def with_finite_slopes(
    function: Callable[..., Tree], like: Callable[..., Any] | None = None
) -> Callable[..., Tree]:
    """Return a function whose derivative is the sum of products with finite numbers only.

    A slope that is not finite counts as 0: it belongs to a result that is not selected, or to the end of the
    range of a root.

    Args:
        function: the function, of pytrees of arrays; it refers to no other traced arrays.
        like: a function of the same arguments and results with the derivatives to use, for a ``function``
            that computes with integers; None for its own.
    """
    smooth = function if like is None else like

    def rule(_: Any, args: Any, tangents: Any) -> list[Any]:
        structure: list[Any] = []

        def slopes(*at: Any) -> list[Any]:
            floats, put = _parted(at)
            linear = jax.linearize(lambda x: _parted(smooth(*put(x)))[0], floats)[1]
            leaves, kind = jax.tree.flatten(_finite(linear))
            structure.append(kind)
            return leaves

        found = with_finite_slopes(slopes)(*args)  # so that derivatives of higher order are finite too
        return _applied(jax.tree.unflatten(structure[0], found), _parted(tangents)[0])

    def sloped(*args: Any) -> Tree:
        floats, put = _parted(function(*jax.lax.stop_gradient(args)))
        return put(with_tangents(floats, args, rule))

    return sloped


def _parted(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the floating-point leaves of a tree, and a function that puts others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]

    def put(floats: Sequence[Any]) -> Any:
        new = dict(zip(places, floats, strict=True))
        return jax.tree.unflatten(structure, [new.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], put


def _finite(linear: Tree) -> Tree:
    """Return a linear function, which is a pytree of its slopes, with 0 for those that are not finite, or so
    near to the end of their format that a sum of four is not: second derivatives multiply and add them."""

    def finite(slope: Any) -> Any:
        if not is_floating(slope):
            return slope
        end = float(jnp.finfo(slope.dtype).max) / 4
        return jnp.where(jnp.abs(slope) < end, slope, jnp.zeros_like(slope))

    return jax.tree.map(finite, linear)


def _applied(linear: Callable[[list[Any]], list[Any]], tangents: list[Any]) -> list[Any]:
    """Return what a linear function of tangents returns, with 0 for a quotient by 0."""
    program = jax.make_jaxpr(linear)(tangents)
    return _evaluated(program.jaxpr, program.consts, tangents)


def _evaluated(program: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip([*program.constvars, *program.invars], [*consts, *args], strict=True))

    def value(atom: Any) -> Any:
        # A literal; jax.extend, which has its class, imports Pallas.
        return atom.val if hasattr(atom, "val") else values[atom]

    for step in program.eqns:
        inputs = [value(atom) for atom in step.invars]
        inner = step.params.get("jaxpr")
        if step.primitive.name == "div":
            results = [_quotient(*inputs)]
        elif step.primitive.name in ("jit", "pjit") and inner is not None:
            results = _evaluated(inner.jaxpr, inner.consts, inputs)
        else:
            found = step.primitive.bind(*inputs, **step.params)
            results = found if step.primitive.multiple_results else [found]
        values.update(zip(step.outvars, results, strict=True))
    return [value(atom) for atom in program.outvars]


def _quotient(x: Array, divisor: Array) -> Array:
    # A product: the derivative of a quotient in its divisor has the square of that, which may flush to 0.
    return x * with_finite_slopes(_inverse)(jnp.asarray(divisor))


def _inverse(divisor: Array) -> Array:
    """Return 1 over a divisor; 0 where that is not finite."""
    inverse = 1 / jnp.where(divisor == 0, jnp.ones_like(divisor), divisor)
    return jnp.where((divisor == 0) | ~jnp.isfinite(inverse), jnp.zeros_like(inverse), inverse)


def undefined_beyond(factor: Array, norm: Array, joint: Array, scale: Array) -> Array:
    """Return the factor on gradients, with a derivative of NaN where float32 does not hold the true one.

    Args:
        factor: the factor.
        norm: the norm of what it multiplies, () or of the shape of ``factor``.
        joint: the joint norm of all gradients.
        scale: what the factor divides by in addition, which does not depend on a norm.
    """

    def rule(_: Array, args: Any, tangents: Any) -> Array:
        factor, norm, joint, scale = args
        shrinks = factor * scale < 1 - 2.0**-20  # 1, but for rounding
        # A rule for single tensors may shrink a tiny one for the sake of the joint norm.
        beyond = shrinks & ((norm > _MOST) | (joint > _MOST) | ((joint > 0) & (joint < _LEAST)))
        return tangents[0] * jnp.where(beyond, jnp.nan, 1.0).astype(factor.dtype)

    return with_tangents(jax.lax.stop_gradient(factor), (factor, norm, joint, scale), rule)


def refuse_derivative(value: Array, of: PyTree, why: str) -> Array:
    """Return a value that cannot be differentiated.

    Args:
        value: the value.
        of: the arrays on which it depends.
        why: the message of the error: what cannot be differentiated, and what to write instead.

    Raises:
        TypeError: later, where a derivative with respect to ``of`` is computed.
    """

    def refused(*_: Any) -> Any:
        raise TypeError(why)

    return with_tangents(value, of, refused)
