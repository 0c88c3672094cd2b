"""Loss scales as pytrees, with jmp's names and the core's rules.

These classes are for training loops that scale and unscale themselves, as with jmp. The guard does all of
this on its own, and accepts these objects for its setting ``loss_scale``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import stablenum
from stablenum._support.settings_checks import check_number
from stablenum._support.user_warnings import warn
from stablenum.formats import FORMATS
from stablenum.rules.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScaleState
from stablenum_jax._trees.leaves import is_measurable
from stablenum_jax._trees.names import Path

__all__ = ["DynamicLossScale", "LossScale", "NoOpLossScale", "StaticLossScale", "all_finite", "select_tree"]

Array: TypeAlias = jax.Array
Tree = TypeVar("Tree")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """No scaling.

    Example:
        >>> NoOpLossScale().scale(3.0)
        3.0
    """

    @property
    def loss_scale(self) -> int:
        """The factor, which is always 1."""
        return 1

    def scale(self, tree: Tree) -> Tree:
        """Return ``tree`` unchanged."""
        return tree

    def unscale(self, tree: Tree) -> Tree:
        """Return ``tree`` unchanged."""
        return tree

    def adjust(self, grads_finite: Any) -> NoOpLossScale:
        """Return the object itself."""
        return self


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A constant factor. A plain number is static under ``jit``; an array is traced.

    Args:
        loss_scale: the factor.

    Example:
        >>> import jax.numpy as jnp
        >>> StaticLossScale(2**15).scale(jnp.float16(3.0))  # beyond float16
        Array(98304., dtype=float32)
    """

    loss_scale: Any

    def scale(self, tree: Tree) -> Tree:
        """Multiply losses or gradients by the factor, in float32 or wider; other leaves are unchanged."""
        return _scaled(tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Divide losses or gradients by the factor, in float32 or wider."""
        return _unscaled(tree, self.loss_scale)

    def adjust(self, grads_finite: Any) -> StaticLossScale:
        """Return the object itself."""
        return self

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Flatten the scale: an array is a leaf, a number is not."""
        if isinstance(self.loss_scale, (bool, int, float)):
            return (), self.loss_scale
        return (self.loss_scale,), None

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: tuple[Any, ...]) -> StaticLossScale:
        """Rebuild the object, the inverse of :meth:`tree_flatten`."""
        return cls(*(leaves or (static,)))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A factor that grows after ``period`` finite steps in a row and shrinks at a step that is not finite.

    The rule is :class:`stablenum.DynamicLossScale`: it multiplies or divides by ``factor``, and stays between
    ``min_loss_scale`` and the largest scale that the rule and the scale's dtype allow. Scale, counter and
    floor are leaves, so ``jit`` loses none of them.

    Args:
        loss_scale: () float, the factor; float16 and bfloat16 scales work.
        counter: () int32, the number of finite steps since ``loss_scale`` last changed.
        period: the number of finite steps before ``loss_scale`` grows.
        factor: the number that ``loss_scale`` is multiplied or divided by.
        min_loss_scale: () float, the floor.

    Raises:
        ValueError: from ``adjust``: ``period`` or ``factor`` is out of its range, or ``grads_finite`` is not
            a scalar.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> scale = DynamicLossScale(jnp.float32(8.0), period=1, min_loss_scale=jnp.float32(4.0))
        >>> float(scale.adjust(jnp.bool_(True)).loss_scale)
        16.0
        >>> float(jax.jit(lambda s: s.adjust(False).adjust(False))(scale).loss_scale)
        4.0
    """

    loss_scale: Any
    counter: Any = dataclasses.field(default_factory=lambda: np.zeros([], np.int32))
    period: int = 2000
    factor: int = 2
    min_loss_scale: Any = dataclasses.field(default_factory=lambda: np.ones([], np.float32))

    def __post_init__(self) -> None:
        _warn_if_not_floating(self.loss_scale, "loss_scale")
        _warn_if_not_floating(self.min_loss_scale, "min_loss_scale")

    def scale(self, tree: Tree) -> Tree:
        """Multiply losses or gradients by the factor, in float32 or wider; other leaves are unchanged."""
        return _scaled(tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Divide losses or gradients by the factor, in float32 or wider."""
        return _unscaled(tree, self.loss_scale)

    def adjust(self, grads_finite: Any) -> DynamicLossScale:
        """Return the scale for the next step.

        Args:
            grads_finite: () bool, whether the gradients of this step were finite.
        """
        finite = jnp.asarray(grads_finite, bool)
        if finite.ndim:
            raise ValueError(f"grads_finite must be a scalar; got shape {finite.shape}. Take its all().")
        dtype = jnp.result_type(self.loss_scale)
        dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(jnp.float32)
        factor = check_number("factor", self.factor, above=1.0)
        rule = stablenum.DynamicLossScale(
            init_scale=SMALLEST_SCALE,
            growth_factor=factor,
            backoff_factor=1.0 / factor,
            growth_interval=int(self.period),
            min_scale=SMALLEST_SCALE,
            max_scale=_largest(dtype),
        )
        # A scale that is inf or NaN would stay inf or NaN permanently.
        scale = jnp.nan_to_num(
            jnp.asarray(self.loss_scale, jnp.float32), nan=1.0, posinf=rule.max_scale, neginf=1.0
        )
        state = LossScaleState(scale, jnp.asarray(self.counter, jnp.int32), jnp.ones((), jnp.int32))
        after = rule.update(state, overflow=~finite, good=finite, xp=jnp)
        # The rule's floor is a plain number; this one may be an array.
        floor = jnp.asarray(self.min_loss_scale, jnp.float32)
        lowered = jnp.where(finite, after.scale, jnp.maximum(after.scale, floor))
        return dataclasses.replace(self, loss_scale=lowered.astype(dtype), counter=after.good_steps)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Flatten the object: scale, counter and floor are leaves."""
        return (self.loss_scale, self.counter, self.min_loss_scale), (self.period, self.factor)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: tuple[Any, ...]) -> DynamicLossScale:
        """Rebuild the object, the inverse of :meth:`tree_flatten`; accept whatever JAX puts in place of
        leaves."""
        made = object.__new__(cls)
        for name, value in zip(("loss_scale", "counter", "min_loss_scale"), leaves, strict=True):
            object.__setattr__(made, name, value)
        for name, value in zip(("period", "factor"), static, strict=True):
            object.__setattr__(made, name, value)
        return made


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale


def all_finite(tree: Any) -> Array:
    """Return () bool: whether every element of every array is finite. The result is True for an empty tree.

    PRNG keys, float0 and leaves that are not numbers are ignored.

    Example:
        >>> bool(all_finite({"a": jnp.ones(2), "b": jnp.asarray([1.0, jnp.nan])}))
        False
    """
    leaves = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if is_measurable((), leaf)]
    if not leaves:
        return jnp.array(True)
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def select_tree(pred: Any, a: Tree, b: Tree) -> Tree:
    """Return ``a`` where the () bool ``pred`` holds, else ``b``, leaf by leaf.

    Raises:
        AssertionError: ``pred`` is not a bool scalar (the error that jmp raises).
        TypeError: two leaves have different dtypes.

    Example:
        >>> select_tree(jnp.bool_(True), {"w": jnp.ones(1)}, {"w": jnp.zeros(1)})
        {'w': Array([1.], dtype=float32)}
    """
    if jnp.shape(pred) != () or jnp.result_type(pred) != jnp.bool_:
        raise AssertionError(
            f"pred: expected boolean scalar; got {jnp.result_type(pred)} of shape {jnp.shape(pred)}."
        )
    return jax.tree.map(lambda x, y: lax.select(pred, jnp.asarray(x), jnp.asarray(y)), a, b)


def _largest(dtype: Any) -> float:
    """Return the largest power of two that a scale of this dtype may reach."""
    known = FORMATS.get(jnp.dtype(dtype).name)
    return LARGEST_SCALE if known is None or known.bits > 16 or known.max > LARGEST_SCALE else 2.0**15


def _scaled(tree: Tree, factor: Any) -> Tree:
    return _change(tree, lambda x: x * jnp.asarray(factor).astype(x.dtype))


def _unscaled(tree: Tree, factor: Any) -> Tree:
    return _change(tree, lambda x: x / jnp.asarray(factor).astype(x.dtype))


def _change(tree: Tree, change: Callable[[Array], Array]) -> Tree:
    """Apply ``change`` to the floating-point leaves, in float32 or wider, because float16 ends at 65504."""

    def wide(path: Path, leaf: Any) -> Any:
        if not is_measurable(path, leaf):
            return leaf
        leaf = jnp.asarray(leaf)
        return change(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)))

    return jax.tree_util.tree_map_with_path(wide, tree)


def _warn_if_not_floating(x: Any, name: str) -> None:
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating):
        warn(f"Expected floating type for {name}, got {dtype}")
