"""Leaves of a pytree: which are gradients or floating-point numbers, and which ones a guard watches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from stablenum.errors import bad_field, bad_type
from stablenum.guard.config import GuardConfig
from stablenum_jax._trees.names import Path

__all__ = [
    "FP8_STATISTICS",
    "check_argnums",
    "check_gradients",
    "check_state",
    "check_transformation",
    "guarded_leaves",
    "guarded_weights",
    "is_floating",
    "is_measurable",
    "real_parts",
    "varying_axes",
    "wide_dtype",
]

Array: TypeAlias = jax.Array

# flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT: statistics that are returned as "gradients" and replace
# the parameter instead of being added to it. They are not gradients, so they are not measured.
FP8_STATISTICS = "_overwrite_with_gradient"


def is_measurable(path: Path, leaf: Any) -> bool:
    """Return whether a leaf is a gradient: real or complex floating point, and not an fp8 statistic.

    Integers, PRNG keys and float0 (JAX's gradient of an integer) are not.
    """
    if any(getattr(key, "key", None) == FP8_STATISTICS for key in path):
        return False
    return is_floating(leaf)


def is_floating(x: Any) -> bool:
    """Return whether an array, a scalar or an abstract value is of a real or complex floating type."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, (float, complex))
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and bool(jnp.issubdtype(dtype, jnp.inexact))


def guarded_leaves(updates: Any, params: Any) -> dict[Path, Any]:
    """Return the gradients that a guard watches, by path; None for a parameter without a gradient.

    With ``params`` there is an entry for each parameter, whether or not it has a gradient, so that
    the n-th norm is always that of the n-th parameter.
    """
    given = {
        path: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(updates) if is_measurable(path, leaf)
    }
    if params is None:
        return given
    paths = [path for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_measurable(path, leaf)]
    if not set(given) <= set(paths):
        return given  # trees of different kinds: use the gradients' own paths
    return {path: given.get(path) for path in paths}


def check_argnums(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return the numbers of the arguments to differentiate, from 0, of ``count`` positional ones.

    Raises:
        ValueError: they are no such numbers; if there is no positional argument, only their type is checked.
    """
    given = tuple(argnums) if isinstance(argnums, (tuple, list)) else (argnums,)
    if not given or not all(isinstance(n, int) and not isinstance(n, bool) for n in given):
        raise bad_field("argnums", "the number of a positional argument, or several", argnums)
    wrong = [n for n in given if not -count <= n < count]
    if wrong and count:
        raise ValueError(f"argnums must name positional arguments, here 0 to {count - 1}; got {wrong[0]}.")
    return tuple(n % count for n in given) if count else ()


def check_gradients(grads: Any, params: Any, name: str = "grads", *, shapes: bool = True) -> None:
    """Check that each gradient can be one of the parameter at the same path. Values are not read.

    Args:
        grads: the gradients.
        params: the parameters.
        name: the argument's name, for a message.
        shapes: whether the shapes must be the parameters' (those of updates inside a chain may differ).

    Raises:
        TypeError: a gradient of a floating-point parameter holds whole numbers or bools, or that of a real
            one holds complex numbers.
        ValueError: a gradient has another shape than its parameter.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        param: Any = by_path.get(path)
        if not (hasattr(leaf, "dtype") and is_floating(param) and hasattr(param, "shape")):
            continue
        if (
            any(getattr(key, "key", None) == FP8_STATISTICS for key in path)
            or leaf.dtype == jax.dtypes.float0
        ):
            continue
        where = f"{name}{jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(leaf.dtype, jnp.inexact if jnp.iscomplexobj(param) else jnp.floating):
            raise TypeError(
                f"{where} must hold floating-point numbers, as its {param.dtype} parameter does; got "
                f"{leaf.dtype}. Pass the gradients that jax.grad returned."
            )
        if shapes and jnp.shape(leaf) != jnp.shape(param):
            raise ValueError(
                f"{where} must have its parameter's shape {jnp.shape(param)}; got {jnp.shape(leaf)}."
            )


def check_state(name: str, state: Any) -> None:
    """Check that an argument can be the state of an optimizer: a tree of arrays, or an array.

    Raises:
        TypeError: it is another object, or holds functions (as ``tx`` itself does).
    """
    leaves = jax.tree.leaves(state)
    alone = len(leaves) == 1 and leaves[0] is state
    if not any(hasattr(x, "dtype") for x in leaves) and (alone or any(map(callable, leaves))):
        hint = "Pass what tx.init or tx.update returned."
        raise bad_type(name, "the state of an optax transformation", state, hint=hint)


def check_transformation(name: str, value: object) -> None:
    """Check that an argument is an optax transformation.

    Raises:
        TypeError: it is not.
    """
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, such as optax.adamw(1e-3); "
            f"got {type(value).__name__}."
            + (" Pass a GuardConfig as config=." if isinstance(value, GuardConfig) else "")
        )


def guarded_weights(leaves: Mapping[Path, Any], params: Any) -> tuple[Any, ...]:
    """Return the parameters that the gradients ``leaves`` belong to, for a rule that compares the two.

    Raises:
        ValueError: ``params`` is None, or has another structure or other shapes.
    """
    if params is None:
        raise ValueError(
            "params must be given for AdaptiveGradClip, which compares gradients with weights; got None. "
            "Call tx.update(grads, opt_state, params), or stablenum_jax.step."
        )
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))
    for path, leaf in leaves.items():
        if path not in by_path or (leaf is not None and jnp.shape(leaf) != jnp.shape(by_path[path])):
            raise ValueError(
                f"params must have the structure and shapes of grads for AdaptiveGradClip; "
                f"grads{jax.tree_util.keystr(path)} has no parameter of its shape {jnp.shape(leaf)}."
            )
    return tuple(by_path[path] for path in leaves)


def varying_axes(x: Any) -> frozenset[Any]:
    """Return the mesh axes that an array, or the shape of one, varies over inside ``shard_map``.

    Without ``check_vma``, JAX does not know them, and there are none.
    """
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    axes = getattr(getattr(kind, "manual_axis_type", None), "varying", None)
    return frozenset((getattr(kind, "vma", None) if axes is None else axes) or ())  # its name before 0.10


def wide_dtype(*dtypes: Any) -> Any:
    """Return the dtype in which numbers of these floating types are computed: float32 or wider.

    JAX's own promotion has no answer for 8-bit numbers and, where ``jax_numpy_dtype_promotion`` is "strict",
    for none.

    Example:
        >>> wide_dtype(jnp.float8_e4m3fn, jnp.bfloat16)
        dtype('float32')
    """
    double = any(jnp.finfo(dtype).bits == 64 for dtype in dtypes)
    if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
        return jnp.dtype("complex128" if double else "complex64")
    return jnp.dtype("float64" if double else "float32")


def real_parts(x: Array) -> list[Array]:
    """Return ``x`` in the precision in which it is summed: itself, or its real and imaginary parts."""
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return [part if part.dtype == jnp.float64 else part.astype(jnp.float32) for part in parts]
